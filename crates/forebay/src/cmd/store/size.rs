//! Sizes as people write them. Units are powers of 1024, as disks' tools have them; this file must never guess at others.

use std::fmt;

/// Units, largest first.
const UNITS: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

/// Reads a size such as `100G`, `100GiB`, `1.5T` or `1048576`.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = &text[digits.len()..];
    let name = unit.strip_suffix("iB").unwrap_or(unit);
    let found = UNITS.iter().find(|(known, _)| *known == name).map(|(_, bytes)| *bytes);
    let factor = match (found, unit) {
        (Some(bytes), _) => bytes,
        (None, "" | "B") => 1,
        _ => {
            return Err(format!(
                "'{unit}' in '{text}' is none of K, M, G, T, KiB, MiB, GiB, TiB (powers of 1024)"
            ));
        }
    };
    let number: f64 = digits.parse().map_err(|_| format!("'{digits}' in '{text}' is not a number"))?;
    let bytes = number * factor as f64;
    if bytes >= 1.0 && bytes < u64::MAX as f64 && bytes.fract() == 0.0 {
        Ok(bytes as u64)
    } else {
        Err(format!("'{text}' is not a whole number of bytes from 1 to 2^64 - 1"))
    }
}

/// Shows bytes with a unit.
#[derive(Debug, Clone, Copy)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, bytes)| self.0 >= *bytes) {
            None => write!(out, "{} B", self.0),
            Some((name, bytes)) if self.0.is_multiple_of(*bytes) => {
                write!(out, "{} {name}iB", self.0 / bytes)
            }
            Some((name, bytes)) => write!(out, "{:.1} {name}iB", self.0 as f64 / *bytes as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_powers_of_1024_or_refused_with_their_text() {
        assert_eq!((size("100G"), size("100GiB"), size("4096")), (Ok(100 << 30), Ok(100 << 30), Ok(4096)));
        assert_eq!((size("1.5T"), size("64K"), size("7B")), (Ok(3 << 39), Ok(64 << 10), Ok(7)));
        for bad in ["100GB", "12Q", "iB", "G", "", "-1", "0", "0.3", "1e30", "nan", "inf"] {
            let refused = size(bad).unwrap_err();
            assert!(refused.contains(&format!("'{bad}'")), "{refused}");
        }
    }

    #[test]
    fn sizes_are_shown_with_the_largest_unit_that_is_not_above_them() {
        let shown = [0, 1023, 1024, 1536, 256 << 20, 3 << 40].map(|bytes| Size(bytes).to_string());
        assert_eq!(shown, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "256 MiB", "3 TiB"]);
    }
}
