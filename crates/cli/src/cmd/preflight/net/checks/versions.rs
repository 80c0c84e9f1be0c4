//! What has to be the same on hosts that share KV. That both ends speak the same version on the
//! wire is known from their greeting.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::Warning;
use forebay_node::NodeConfig;
use serde::{Deserialize, Serialize};

/// What one host says. What it does not know is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    pub forebay: String,
    /// Of the environment, which is the engine's where preflight starts that.
    pub hash_seed: Option<String>,
    /// Bytes of the largest chunk that its node takes.
    pub largest_chunk: Option<u64>,
}

impl Versions {
    pub fn here(config: Option<&NodeConfig>) -> Versions {
        Versions {
            forebay: env!("CARGO_PKG_VERSION").into(),
            hash_seed: std::env::var("PYTHONHASHSEED").ok(),
            largest_chunk: config.map(|config| config.effective().memory.largest_chunk),
        }
    }
}

/// `None` of the settings: the peer is a node, which tells its version only.
pub fn judge(peer: &str, here: &Versions, there: &Versions) -> Finding {
    let bad = |seen: String, expected: &str, action: &str| {
        Finding::bad(Check::Versions, Warning, peer, seen, expected, action)
    };
    if here.forebay != there.forebay {
        let seen = format!("it has Forebay {}, this host {}", there.forebay, here.forebay);
        return bad(seen, "the same version, but during an update", "update them together");
    }
    if let (Some(one), Some(other)) = (here.largest_chunk, there.largest_chunk)
        && one != other
    {
        let seen = format!("its largest chunk has {other} bytes, this host's {one}");
        let action = "chunks that are longer are not pulled: give both the same memory.largest_chunk";
        return bad(seen, "the same memory.largest_chunk", action);
    }
    // A node's own environment says nothing of its engines'.
    if there.largest_chunk.is_some() && here.hash_seed != there.hash_seed {
        let of = |seed: &Option<String>| seed.clone().unwrap_or("not set".into());
        let seen =
            format!("PYTHONHASHSEED is {} there and {} here", of(&there.hash_seed), of(&here.hash_seed));
        let action =
            "set it to the same number, or engines find none of each other's blocks where keys are vLLM's";
        return bad(seen, "the same PYTHONHASHSEED", action);
    }
    Finding::ok(Check::Versions, peer, format!("Forebay {} as here", there.forebay))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;

    #[test]
    fn what_differs_is_told_with_both_values() {
        let here =
            Versions { forebay: "0.1.0".into(), hash_seed: Some("0".into()), largest_chunk: Some(16 << 20) };
        let judged = |there: Versions| judge("left", &here, &there);
        assert_eq!(judged(here.clone()).severity, Severity::Ok);
        let other = judged(Versions { forebay: "0.2.0".into(), ..here.clone() });
        assert!(other.severity == Warning && other.seen.contains("Forebay 0.2.0, this host 0.1.0"));
        let chunk = judged(Versions { largest_chunk: Some(1 << 20), ..here.clone() });
        assert!(chunk.severity == Warning && chunk.seen.contains("1048576 bytes, this host's 16777216"));
        let seed = judged(Versions { hash_seed: None, ..here.clone() });
        assert!(seed.severity == Warning && seed.seen.contains("not set there and 0 here"), "{seed:?}");
        let node = judged(Versions { hash_seed: None, largest_chunk: None, ..here.clone() });
        assert_eq!(node.severity, Severity::Ok, "a node says its version only");
    }
}
