//! Values of options: sizes in bytes, and times in seconds.

use std::time::Duration;

/// A size above 0, as sizes are written everywhere.
pub fn size<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let bytes = forebay_transfer::size::parse(text)?;
    let some = T::try_from(bytes).ok().filter(|_| bytes > 0);
    some.ok_or_else(|| {
        format!("'{text}' is not allowed; allowed is {}, above 0", forebay_transfer::size::ALLOWED)
    })
}

/// A time above 0.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let duration = seconds_or_none(text).ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| format!("'{text}' is not allowed: a number of seconds above 0"))
}

/// A time, or none.
pub fn seconds_or_none(text: &str) -> Result<Duration, String> {
    let duration = text.parse().ok().and_then(|number| Duration::try_from_secs_f64(number).ok());
    duration.ok_or_else(|| format!("'{text}' is not allowed: a number of seconds, 0 or more"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_powers_of_1024_or_refused_with_their_text() {
        assert_eq!((size("4MiB"), size("200000")), (Ok(4_u64 << 20), Ok(200_000_usize)));
        assert_eq!((size("256M"), size("1.5GiB")), (Ok(256_u64 << 20), Ok(3_usize << 29)));
        assert_eq!((size("100G"), size("64K"), size("7B")), (Ok(100_u64 << 30), Ok(64_u64 << 10), Ok(7_u64)));
        for bad in ["100GB", "12Q", "iB", "G", "", "-1", "0", "0.3", "1e30", "nan", "inf", "x"] {
            let refused = size::<u64>(bad).unwrap_err();
            assert!(refused.contains(&format!("'{bad}'")) && refused.contains("powers of 1024"), "{refused}");
        }
    }

    #[test]
    fn seconds_are_read_or_refused_with_their_text() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "NaN", "1e300", "x", ""] {
            assert!(seconds(bad).unwrap_err().contains("not allowed"), "{bad}");
            assert_eq!(seconds_or_none(bad).is_ok(), bad == "0", "{bad}");
        }
    }
}
