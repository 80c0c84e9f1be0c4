//! Sizes as they are written on the command line and in the names of rows. Pure.

use std::fmt;

/// No copy is larger: its pattern and its target are pinned, on the host, for each GPU that is
/// measured.
const MOST_BYTES: u64 = 32 << 30;
const UNITS: [(&str, u64); 4] = [("gib", 1 << 30), ("mib", 1 << 20), ("kib", 1 << 10), ("b", 1)];

/// A number of bytes, such as `64kib`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Reads a size: a whole number and a unit.
pub fn size(text: &str) -> Result<Size, String> {
    let lower = text.to_ascii_lowercase();
    let digits = lower.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = UNITS.iter().find(|(name, _)| *name == &lower[digits.len()..]);
    let (_, unit) = unit.ok_or_else(|| format!("'{text}' has no unit; allowed: b, kib, mib, gib"))?;
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(*unit));
    let bytes = bytes.filter(|bytes| (1..=MOST_BYTES).contains(bytes));
    bytes.map(Size).ok_or_else(|| format!("'{text}'; allowed: from 1 b to {}", Size(MOST_BYTES)))
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit));
        let (name, unit) = whole.unwrap_or(&("b", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_reads_the_same() {
        for (text, bytes) in [("1b", 1), ("4kib", 4096), ("1536kib", 1536 << 10), ("1gib", 1 << 30)] {
            assert_eq!(size(text), Ok(Size(bytes)));
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!(size("64MiB"), Ok(Size(64 << 20)));
    }

    #[test]
    fn what_is_no_size_is_refused_with_what_is_allowed() {
        for text in ["", "kib", "4", "4kb", "0kib", "33gib", "-1kib", "1.5mib", "99999999999999999999gib"] {
            assert!(size(text).unwrap_err().contains("allowed"), "{text}");
        }
    }
}
