//! Sizes of logs: read as everywhere, and shown to people.

use std::fmt;

/// Units that are shown, largest first.
const UNITS: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

/// Reads a size of a log, as sizes are written everywhere.
pub fn size(text: &str) -> Result<u64, String> {
    match forebay_transfer::size::parse(text)? {
        0 => Err(format!("'{text}' is no size of a log; allowed is {}", forebay_transfer::size::ALLOWED)),
        bytes => Ok(bytes),
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
