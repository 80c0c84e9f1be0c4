//! Where bytes are compared with their checksums, and where a store's are made. This file knows
//! names and what each means; the comparing is `load/copy.rs`, the making `store.rs`.

use thiserror::Error;

/// Who sums bytes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// The host: the pages of a cache that it can read, or else the node's arena.
    Host,
    /// The GPU that has the cache, in its memory.
    Gpu,
    /// Both, and a store's sums must be the same.
    Both,
}

/// A value that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("verify is {value:?}; allowed: {allowed}")]
pub struct BadVerify {
    value: String,
    allowed: &'static str,
}

impl Verify {
    /// The value of a name.
    pub fn named(name: &str) -> Result<Verify, BadVerify> {
        let allowed = "\"gpu\", \"host\" or \"both\"";
        let all = [Verify::Host, Verify::Gpu, Verify::Both];
        let found = all.into_iter().find(|verify| verify.name() == name);
        found.ok_or_else(|| BadVerify { value: name.into(), allowed })
    }

    /// What was asked for, if it can be had; what is best where nothing was.
    pub(crate) fn choose(asked: Option<Verify>, is_on_gpu: bool) -> Result<Verify, BadVerify> {
        match asked {
            None if is_on_gpu => Ok(Verify::Gpu),
            None | Some(Verify::Host) => Ok(Verify::Host),
            Some(verify) if is_on_gpu => Ok(verify),
            Some(verify) => {
                let allowed = "\"host\" for a cache in host memory";
                Err(BadVerify { value: verify.name().into(), allowed })
            }
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Verify::Host => "host",
            Verify::Gpu => "gpu",
            Verify::Both => "both",
        }
    }

    pub(crate) fn on_host(self) -> bool {
        self != Verify::Gpu
    }

    pub(crate) fn on_gpu(self) -> bool {
        self != Verify::Host
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_not_allowed_is_named_with_those_that_are() {
        let why = Verify::named("cpu").unwrap_err().to_string();
        assert_eq!(why, "verify is \"cpu\"; allowed: \"gpu\", \"host\" or \"both\"");
        for name in ["gpu", "both"] {
            let asked = Verify::named(name).unwrap();
            assert_eq!(Verify::choose(Some(asked), true), Ok(asked));
            let why = Verify::choose(Some(asked), false).unwrap_err().to_string();
            assert_eq!(why, format!("verify is {name:?}; allowed: \"host\" for a cache in host memory"));
        }
    }

    #[test]
    fn a_gpu_checks_what_is_in_its_memory_unless_the_host_is_to() {
        assert_eq!([true, false].map(|gpu| Verify::choose(None, gpu).unwrap()), [Verify::Gpu, Verify::Host]);
        assert_eq!(Verify::choose(Some(Verify::Host), true), Ok(Verify::Host));
    }
}
