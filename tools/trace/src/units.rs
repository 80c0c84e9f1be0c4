//! Figures as text: times, counts, bytes and shares with as many digits as a reader can use. It
//! knows units.

/// Shown where there is no figure.
pub const NONE: &str = "-";

/// Seconds with three significant digits or to the millisecond: `0.004`, `0.137`, `9.59`, `30.4`,
/// `120`.
pub fn seconds(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Seconds, or a dash.
pub fn seconds_or_none(value: Option<f64>) -> String {
    value.map_or_else(|| NONE.into(), seconds)
}

/// Milliseconds of a time in seconds, or a dash.
pub fn millis_or_none(value_s: Option<f64>) -> String {
    value_s.map_or_else(|| NONE.into(), |value_s| seconds(value_s * 1e3))
}

/// A share as a percentage, or a dash.
pub fn percent_or_none(share: Option<f64>) -> String {
    share.map_or_else(|| NONE.into(), |share| format!("{:.1}", share * 100.0))
}

/// A count with thousands separated: `12,345`.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of tokens or requests in three digits: `950`, `12.3 k`, `4.56 M`.
pub fn short_count(value: u64) -> String {
    scaled(value as f64, 1_000.0, &["", " k", " M", " G", " T", " P", " E"])
}

/// Bytes in decimal units: `950 B`, `12.3 kB`, `4.56 GB`.
pub fn bytes(value: u64) -> String {
    scaled(value as f64, 1_000.0, &[" B", " kB", " MB", " GB", " TB", " PB", " EB"])
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // 999.5 would be written as 1000: it belongs to the next unit.
    while value >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = if unit == 0 { 0 } else { 2usize.saturating_sub((value + 0.005).log10().max(0.0) as usize) };
    format!("{value:.digits$}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_significant_digits() {
        let shown = [0.004_21, 0.137_4, 0.999_6, 1.0, 9.587, 9.996, 30.44, 99.96, 1_234.4].map(seconds);
        assert_eq!(shown, ["0.004", "0.137", "1.00", "1.00", "9.59", "10.0", "30.4", "100", "1234"]);
        assert_eq!(millis_or_none(Some(0.0213)), "21.3");
        assert_eq!(seconds_or_none(None), "-");
    }

    #[test]
    fn counts_and_bytes_carry_their_unit() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [7, 999, 12_340, 999_600, 123_456_789].map(short_count),
            ["7", "999", "12.3 k", "1.00 M", "123 M"]
        );
        assert_eq!([950, 1_000, 4_560_000_000].map(bytes), ["950 B", "1.00 kB", "4.56 GB"]);
        assert_eq!(bytes(u64::MAX), "18.4 EB");
    }
}
