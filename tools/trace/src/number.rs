//! Numbers as the tools that write traces write them: whole numbers may have a fraction of zero
//! (`512.0`), and ids may be negative.

use serde::de::{self, Deserialize, Deserializer, Unexpected, Visitor};
use std::fmt;

/// Above this, doubles have gaps: two different ids could be written as one number.
const MOST_EXACT: f64 = 9_007_199_254_740_992.0;

/// The id of a block. A negative one is the number with the same 64 bits, so that ids stay
/// different.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Id(u64);

/// A number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tokens(pub u32);

/// Block ids, for `deserialize_with`.
pub(crate) fn ids<'text, D: Deserializer<'text>>(json: D) -> Result<Vec<u64>, D::Error> {
    Ok(Vec::<Id>::deserialize(json)?.into_iter().map(|Id(id)| id).collect())
}

/// A number of tokens, for `deserialize_with`.
pub(crate) fn tokens<'text, D: Deserializer<'text>>(json: D) -> Result<u32, D::Error> {
    Tokens::deserialize(json).map(|Tokens(tokens)| tokens)
}

/// A number of tokens or null, for `deserialize_with`.
pub(crate) fn optional_tokens<'text, D: Deserializer<'text>>(json: D) -> Result<Option<u32>, D::Error> {
    Ok(Option::<Tokens>::deserialize(json)?.map(|Tokens(tokens)| tokens))
}

/// A number of tokens in a cell of CSV.
pub(crate) fn tokens_of_text(text: &str) -> Option<u32> {
    text.parse().ok().or_else(|| exact(text.parse().ok()?).and_then(|whole| u32::try_from(whole).ok()))
}

/// A double as the whole number that it is.
fn exact(value: f64) -> Option<i64> {
    (value.fract() == 0.0 && value.abs() <= MOST_EXACT).then_some(value as i64)
}

/// Reads a whole number of at most 64 bits, of which `of_whole` makes what is `expected`.
struct Whole<T> {
    expected: &'static str,
    of_whole: fn(i128) -> Option<T>,
}

impl<T> Visitor<'_> for Whole<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.expected)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        let wrong = || E::invalid_value(Unexpected::Unsigned(number), &self);
        (self.of_whole)(number.into()).ok_or_else(wrong)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        let wrong = || E::invalid_value(Unexpected::Signed(number), &self);
        (self.of_whole)(number.into()).ok_or_else(wrong)
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        let wrong = || E::invalid_value(Unexpected::Float(number), &self);
        exact(number).and_then(|whole| (self.of_whole)(whole.into())).ok_or_else(wrong)
    }
}

impl<'text> Deserialize<'text> for Id {
    fn deserialize<D: Deserializer<'text>>(json: D) -> Result<Id, D::Error> {
        let of_whole = |whole: i128| Some(Id(whole as u64));
        json.deserialize_any(Whole { expected: "a whole number of at most 64 bits", of_whole })
    }
}

impl<'text> Deserialize<'text> for Tokens {
    fn deserialize<D: Deserializer<'text>>(json: D) -> Result<Tokens, D::Error> {
        let of_whole = |whole: i128| u32::try_from(whole).ok().map(Tokens);
        json.deserialize_any(Whole { expected: "a whole number of tokens", of_whole })
    }
}

#[cfg(test)]
mod tests {
    use super::{Id, Tokens, tokens_of_text};

    fn id(text: &str) -> Option<u64> {
        serde_json::from_str::<Id>(text).ok().map(|Id(id)| id)
    }

    fn tokens(text: &str) -> Option<u32> {
        serde_json::from_str::<Tokens>(text).ok().map(|Tokens(tokens)| tokens)
    }

    #[test]
    fn whole_numbers_are_numbers_however_they_are_written() {
        assert_eq!((tokens("512"), tokens("512.0"), tokens("5.12e2")), (Some(512), Some(512), Some(512)));
        assert_eq!((id("7.0"), id("18446744073709551615")), (Some(7), Some(u64::MAX)));
        assert_eq!((tokens_of_text("512.0"), tokens_of_text("512")), (Some(512), Some(512)));
    }

    #[test]
    fn negative_ids_stay_different_from_each_other() {
        assert_eq!((id("-1"), id("-2"), id("-2.0")), (Some(u64::MAX), Some(u64::MAX - 1), id("-2")));
    }

    #[test]
    fn what_is_no_whole_number_is_refused() {
        for wrong in ["512.5", "-1", "4294967296", "\"512\"", "null", "true", "1e300"] {
            assert_eq!(tokens(wrong), None, "{wrong}");
        }
        // 2^53 + 2: a double of this size may stand for another number than the one that was meant.
        for wrong in ["1.5", "9007199254740994.0", "\"7\"", "[]"] {
            assert_eq!(id(wrong), None, "{wrong}");
        }
        for wrong in ["", "x", "-1", "1.5", "inf", "NaN"] {
            assert_eq!(tokens_of_text(wrong), None, "{wrong}");
        }
    }
}
