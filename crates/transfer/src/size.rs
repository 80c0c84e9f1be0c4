//! Sizes in bytes as people write them, in every file and on every command line: `256M`, `256MiB`,
//! `1.5GiB`, `200000`.
//!
//! All units are powers of 1024: `K` and `KiB`, `M` and `MiB`, `G` and `GiB`, `T` and `TiB`; `B` or
//! nothing is a byte. `KB`, `MB`, `GB` and `TB` are refused, since half of those who write them
//! mean powers of 1000. A fraction has to come out as whole bytes.

use serde::{Deserializer, Serializer, de};
use std::fmt;

const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// What may be written.
pub const ALLOWED: &str =
    "a number with K, M, G or T, or KiB, MiB, GiB or TiB (all powers of 1024), such as 256M or 1.5GiB";

/// What is written, in bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    let number = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = factor(&text[number.len()..]);
    let bytes = unit.and_then(|unit| times(number.trim_end(), unit));
    bytes.ok_or_else(|| format!("'{text}' is no size in whole bytes; allowed is {ALLOWED}"))
}

fn factor(unit: &str) -> Option<u64> {
    let known = |name: &str| name == unit || (name != "B" && name.strip_suffix("iB") == Some(unit));
    match unit {
        "" => Some(1),
        unit if unit.is_ascii() => UNITS.iter().find(|(name, _)| known(name)).map(|(_, bytes)| *bytes),
        _ => None,
    }
}

/// A decimal number times a unit, where that is a whole number.
fn times(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || fraction.len() > 18 {
        return None;
    }
    let parts = 10u128.pow(fraction.len() as u32);
    let in_parts = fraction.parse::<u128>().ok()? * u128::from(unit);
    let beside = in_parts.is_multiple_of(parts).then_some(in_parts / parts)?;
    let bytes = u128::from(whole.parse::<u64>().ok()?) * u128::from(unit) + beside;
    u64::try_from(bytes).ok()
}

/// The shortest exact way to write it, in whole numbers.
pub fn write(bytes: u64) -> String {
    let fits = |(_, unit): &&(&str, u64)| bytes >= *unit && bytes.is_multiple_of(*unit);
    match UNITS.iter().find(fits) {
        Some((name, unit)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

/// For serde: text, or a number of bytes.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    from.deserialize_any(Written)
}

struct Written;

impl de::Visitor<'_> for Written {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a size: {ALLOWED}")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
        parse(text).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<u64, E> {
        Ok(bytes)
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<u64, E> {
        u64::try_from(bytes).map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))
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
    fn sizes_are_exact_powers_of_1024_and_others_are_refused_with_their_text_and_what_is_allowed() {
        for (text, bytes) in [
            ("64GiB", 64 << 30),
            ("256M", 256 << 20),
            ("256MiB", 256 << 20),
            ("1.5GiB", 3 << 29),
            ("0.25K", 256),
            ("1.5T", 3 << 39),
            ("3 KiB", 3072),
            ("200000", 200_000),
            ("7B", 7),
            ("0", 0),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
            assert_eq!(parse(&write(bytes)), Ok(bytes));
        }
        for bad in [
            "",
            "GiB",
            "4GB",
            "4KB",
            "-1",
            "+1",
            "1.5",
            "0.1KiB",
            ".5M",
            "5.M",
            "1e3",
            "nan",
            "12Q",
            "iB",
            "1iB",
            "1ib",
            "1BiB",
            "99999999999TiB",
            "1.0000000000000000001G",
            "1µB",
        ] {
            let refused = parse(bad).unwrap_err();
            assert!(refused.contains(&format!("'{bad}'")) && refused.contains("powers of 1024"), "{refused}");
        }
        assert_eq!((write(0), write(1536)), ("0B".into(), "1536B".into()));
    }
}
