//! Sizes of tiers as people write them: `memory=2%,ssd=1.5TiB`.

use forebay_transfer::size;
use std::fmt;
use std::str::FromStr;

/// Sizes of both tiers.
///
/// ```
/// use forebay_trace::tiers::{TierSize, TierSizes};
///
/// let sizes: TierSizes = "memory=2%,ssd=1.5TiB".parse().unwrap();
/// assert_eq!(sizes, TierSizes { memory: TierSize::Percent(2.0), ssd: TierSize::Bytes(3 << 39) });
/// assert_eq!("ssd=4MiB".parse::<TierSizes>().unwrap_err().to_string(), "\"ssd=4MiB\": no size for memory");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierSizes {
    pub memory: TierSize,
    pub ssd: TierSize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TierSize {
    /// Percent of the trace's distinct blocks.
    Percent(f64),
    /// Bytes of KV.
    Bytes(u64),
    /// Tokens of KV.
    Tokens(u64),
}

/// Why sizes cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Something else than a name and a size.
    #[error("{given:?}: allowed is memory=SIZE,ssd=SIZE")]
    Form { given: String },
    #[error("{given:?}: no size for {tier}")]
    Missing { given: String, tier: &'static str },
    /// Not a size.
    #[error(
        "{given:?}: allowed are a percentage of the distinct blocks up to 100% (2%), bytes (64GiB) or tokens (500000tokens)"
    )]
    Size { given: String },
}

impl FromStr for TierSizes {
    type Err = SizeError;

    fn from_str(given: &str) -> Result<TierSizes, SizeError> {
        let (mut memory, mut ssd) = (None, None);
        for part in given.split(',') {
            let tier = match part.split_once('=') {
                Some(("memory", size)) => memory.replace(size.parse()?),
                Some(("ssd", size)) => ssd.replace(size.parse()?),
                _ => return Err(SizeError::Form { given: given.into() }),
            };
            if tier.is_some() {
                return Err(SizeError::Form { given: given.into() });
            }
        }
        let missing = |tier| SizeError::Missing { given: given.into(), tier };
        Ok(TierSizes {
            memory: memory.ok_or_else(|| missing("memory"))?,
            ssd: ssd.ok_or_else(|| missing("ssd"))?,
        })
    }
}

impl FromStr for TierSize {
    type Err = SizeError;

    fn from_str(given: &str) -> Result<TierSize, SizeError> {
        let error = || SizeError::Size { given: given.into() };
        if let Some(percent) = given.strip_suffix('%') {
            let percent = percent.parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
            return percent.map(TierSize::Percent).ok_or_else(error);
        }
        if let Some(tokens) = given.strip_suffix("tokens") {
            return tokens.parse().map(TierSize::Tokens).map_err(|_| error());
        }
        // A number without a unit may well be meant for something else.
        let bytes = given.ends_with(|letter: char| letter.is_ascii_alphabetic()).then(|| size::parse(given));
        bytes.and_then(Result::ok).map(TierSize::Bytes).ok_or_else(error)
    }
}

impl fmt::Display for TierSizes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "memory={},ssd={}", self.memory, self.ssd)
    }
}

impl fmt::Display for TierSize {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TierSize::Percent(percent) => write!(out, "{percent}%"),
            TierSize::Tokens(tokens) => write!(out, "{tokens}tokens"),
            TierSize::Bytes(bytes) => out.write_str(&size::write(*bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_notation_is_understood() {
        let cases = [
            ("2%", TierSize::Percent(2.0)),
            ("0.5%", TierSize::Percent(0.5)),
            ("0B", TierSize::Bytes(0)),
            ("64GiB", TierSize::Bytes(64 << 30)),
            ("1.5T", TierSize::Bytes(3 << 39)),
            ("281888tokens", TierSize::Tokens(281_888)),
        ];
        for (text, size) in cases {
            assert_eq!(text.parse(), Ok(size), "{text}");
        }
        let sizes: TierSizes = "ssd=0.5%,memory=1536MiB".parse().unwrap();
        assert_eq!(sizes.to_string(), "memory=1536MiB,ssd=0.5%");
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        let cases = [
            ("memory=2%", "no size for ssd"),
            ("memory=2%,memory=3%,ssd=1%", "allowed is memory=SIZE,ssd=SIZE"),
            ("dram=2%,ssd=1%", "allowed is memory=SIZE,ssd=SIZE"),
            ("", "allowed is"),
            ("memory=2%,ssd=101%", "\"101%\": allowed are a percentage"),
            ("memory=2%,ssd=-1GiB", "\"-1GiB\""),
            ("memory=2%,ssd=NaN%", "\"NaN%\""),
            ("memory=2%,ssd=20", "\"20\""),
            ("memory=2%,ssd=1.5TB", "\"1.5TB\""),
        ];
        for (text, part) in cases {
            let error = text.parse::<TierSizes>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(percent in 0.0f64..=100.0, bytes in any::<u64>(), tokens in any::<u64>()) {
            for size in [TierSize::Percent(percent), TierSize::Bytes(bytes), TierSize::Tokens(tokens)] {
                prop_assert_eq!(size.to_string().parse(), Ok(size));
            }
        }

        #[test]
        fn no_text_is_a_panic(text in "\\PC{0,40}", number in "[0-9.e+-]{0,12}", unit in "(%|tokens|TiB|B|kB)") {
            let _ = text.parse::<TierSizes>();
            let _ = format!("memory={number}{unit},ssd={text}").parse::<TierSizes>();
        }
    }
}
