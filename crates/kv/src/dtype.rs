//! The number formats KV is kept in.
//!
//! Knows the formats' names, as model configs and engines spell them, and their widths.

use std::fmt;
use std::str::FromStr;

/// The format of one stored key or value element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE 754 single precision, 4 bytes.
    Float32,
    /// IEEE 754 half precision, 2 bytes.
    Float16,
    /// bfloat16, 2 bytes.
    Bfloat16,
    /// 8-bit float with 4 exponent bits, 1 byte. What vLLM means by plain `fp8`.
    Fp8E4m3,
    /// 8-bit float with 5 exponent bits, 1 byte.
    Fp8E5m2,
}

impl KvDtype {
    pub const ALL: [KvDtype; 5] =
        [Self::Float32, Self::Float16, Self::Bfloat16, Self::Fp8E4m3, Self::Fp8E5m2];

    /// Width of one element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 => 1,
        }
    }

    /// The one name under which the format enters a namespace.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A format's name that nobody uses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("dtype is {0:?}; allowed: {allowed}", allowed = KvDtype::SPELLINGS)]
pub struct UnknownDtype(pub String);

impl KvDtype {
    /// What [`KvDtype::from_str`] accepts, for messages.
    pub const SPELLINGS: &'static str = "float32, float, float16, half, bfloat16, fp8, fp8_e4m3, float8_e4m3fn, \
                                         fp8_e5m2, float8_e5m2";
}

impl FromStr for KvDtype {
    type Err = UnknownDtype;

    /// Reads a name as Hugging Face configs (`bfloat16`), PyTorch (`torch.bfloat16`) or vLLM's
    /// `--kv-cache-dtype` (`fp8`) spell it.
    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        match name.strip_prefix("torch.").unwrap_or(name) {
            "float32" | "float" => Ok(Self::Float32),
            "float16" | "half" => Ok(Self::Float16),
            "bfloat16" => Ok(Self::Bfloat16),
            "fp8" | "fp8_e4m3" | "float8_e4m3fn" => Ok(Self::Fp8E4m3),
            "fp8_e5m2" | "float8_e5m2" => Ok(Self::Fp8E5m2),
            _ => Err(UnknownDtype(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_read_back_from_its_own_name() {
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
    }

    #[test]
    fn every_spelling_in_the_message_is_accepted() {
        for name in KvDtype::SPELLINGS.split(", ") {
            assert!(name.parse::<KvDtype>().is_ok(), "{name}");
            assert!(format!("torch.{name}").parse::<KvDtype>().is_ok(), "{name}");
        }
    }

    #[test]
    fn an_unknown_format_is_named_with_what_is_allowed() {
        let error = "int4".parse::<KvDtype>().unwrap_err().to_string();
        assert!(error.contains("\"int4\"") && error.contains("fp8_e5m2"), "{error}");
    }
}
