//! Lengths in bytes as people write them: `64GiB`, `200000`. This file knows units; it must never know what has the length.

use serde::{Deserialize, Deserializer, Serializer, de};

const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// What is written, in bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => Some(1),
        unit => UNITS.iter().find(|(name, _)| *name == unit).map(|(_, bytes)| *bytes),
    };
    let bytes =
        unit.zip(digits.trim_end().parse::<u64>().ok()).and_then(|(unit, count)| unit.checked_mul(count));
    bytes
        .ok_or_else(|| format!("'{text}' is no size; allowed is a whole number with B, KiB, MiB, GiB or TiB"))
}

/// The shortest way to write it.
pub fn write(bytes: u64) -> String {
    let fits = |(_, unit): &&(&str, u64)| bytes >= *unit && bytes.is_multiple_of(*unit);
    match UNITS.iter().find(fits) {
        Some((name, unit)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

/// For serde: text, or a number of bytes.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Bytes(u64),
        Text(String),
    }
    match Written::deserialize(from)? {
        Written::Bytes(bytes) => Ok(bytes),
        Written::Text(text) => parse(&text).map_err(de::Error::custom),
    }
}

/// For serde.
pub fn serialize<S: Serializer>(bytes: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&write(*bytes))
}

/// The same where nothing may be said.
pub mod optional {
    use serde::{Deserializer, Serializer};

    /// For serde.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
        super::deserialize(from).map(Some)
    }

    /// For serde.
    pub fn serialize<S: Serializer>(bytes: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => super::serialize(bytes, to),
            None => to.serialize_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_and_others_refused_with_their_text() {
        for (text, bytes) in [("64GiB", 64 << 30), ("200000", 200_000), ("3KiB", 3072), ("1TiB", 1 << 40)] {
            assert_eq!(parse(text), Ok(bytes));
            assert_eq!(parse(&write(bytes)), Ok(bytes));
        }
        for bad in ["", "GiB", "4GB", "-1", "1.5GiB", "99999999999TiB"] {
            assert!(parse(bad).unwrap_err().contains(bad), "{bad}");
        }
        assert_eq!((write(0), write(1536)), ("0B".into(), "1536B".into()));
    }
}
