//! How logs are shown to people: their sizes, and their names where something is wrong.

use forebay_results::output::Error;
use std::fmt;
use std::path::Path;

/// Units that are shown, largest first.
const UNITS: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

/// Says in which file something is wrong.
pub fn in_file(file: &Path, error: impl std::error::Error) -> Error {
    format!("{}: {error}", file.display()).into()
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
    fn sizes_are_shown_with_the_largest_unit_that_is_not_above_them() {
        let shown = [0, 1023, 1024, 1536, 256 << 20, 3 << 40].map(|bytes| Size(bytes).to_string());
        assert_eq!(shown, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "256 MiB", "3 TiB"]);
    }
}
