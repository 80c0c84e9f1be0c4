//! Admission: which of the chunks that memory drops are written to the SSD. This module knows keys,
//! lengths and the time it is told; it moves no byte.
//!
//! `docs/tiers.md` describes what [`Admission`] does to real traces; `forebay trace info --tiers`
//! tries it on others.

mod adaptive;
mod endurance;
mod evidence;
mod filter;
mod history;
mod key;
mod lru;
mod shadow;
#[cfg(test)]
mod testing;

pub use adaptive::AdaptiveState;
pub use evidence::HITS_PER_WRITE;
pub use key::{Chunk, ChunkKey};
pub use lru::Lru;

use adaptive::Adaptive;
use endurance::{Claim, Endurance};
use evidence::Evidence;
use history::History;
use shadow::Shadow;
use std::fmt;
use std::str::FromStr;

/// Which chunks that memory drops are written to the SSD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    All,
    /// Those that were used at least twice, among four to eight times as many chunks as fit on the
    /// SSD.
    SecondHit,
    /// As `all` or as `second-hit`, whichever does better on a sample of the traffic.
    Adaptive,
}

impl Policy {
    pub const NAMES: [(Policy, &str); 3] =
        [(Policy::All, "all"), (Policy::SecondHit, "second-hit"), (Policy::Adaptive, "adaptive")];
}

impl fmt::Display for Policy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Policy::NAMES.iter().find(|(policy, _)| policy == self).map_or("", |(_, name)| name);
        out.pad(name)
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Policy, UnknownPolicy> {
        let found = Policy::NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(policy, _)| *policy).ok_or_else(|| UnknownPolicy { given: text.to_owned() })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown admission policy {given:?}, allowed are {}", Policy::NAMES.map(|(_, name)| name).join(", "))]
pub struct UnknownPolicy {
    pub given: String,
}

/// What admission has to know about the tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionConfig {
    pub policy: Policy,
    pub memory_bytes: u64,
    pub ssd_bytes: u64,
    /// How many chunks fit into it. What is remembered of each is some 32 bytes.
    pub ssd_chunks: u64,
    /// Bytes that may be written to the SSD in any 24 hours, whatever the policy says.
    pub endurance_bytes_per_day: Option<u64>,
}

/// What is to become of a chunk that memory drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is to be written to the SSD.
    Write,
    /// It is to be forgotten: it was used once only.
    UsedOnce,
    /// It is to be forgotten: the SSD's endurance budget is used up for now.
    OverBudget,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verdicts {
    pub write_bytes: u64,
    pub used_once_bytes: u64,
    pub over_budget_bytes: u64,
}

/// Decides which chunks are written to the SSD.
///
/// ```
/// use forebay_store::admission::{Admission, AdmissionConfig, Chunk, ChunkKey, Policy, Verdict};
///
/// let mut admission = Admission::new(AdmissionConfig {
///     policy: Policy::SecondHit,
///     memory_bytes: 1 << 30,
///     ssd_bytes: 1 << 40,
///     ssd_chunks: 1 << 15,
///     endurance_bytes_per_day: None,
/// });
/// let [first, second] = [1, 2].map(|hash| Chunk { key: ChunkKey::from_hash(hash), bytes: 32 << 20 });
/// admission.used(&[first, second]);
/// admission.used(&[first]);
/// assert_eq!(admission.admit(second, 2_000_000), Verdict::UsedOnce);
/// assert_eq!(admission.admit(first, 2_000_000), Verdict::Write);
/// ```
#[derive(Debug)]
pub struct Admission {
    rule: Rule,
    endurance: Option<Endurance>,
    verdicts: Verdicts,
}

#[derive(Debug)]
enum Rule {
    All,
    SecondHit(History),
    Adaptive(Box<Adaptive>),
}

impl Admission {
    pub fn new(config: AdmissionConfig) -> Admission {
        let history = || History::new(config.ssd_chunks);
        let rule = match config.policy {
            Policy::All => Rule::All,
            Policy::SecondHit => Rule::SecondHit(history()),
            Policy::Adaptive => {
                let shadow = Shadow::new(config.memory_bytes, config.ssd_bytes);
                let evidence = Evidence::new(config.ssd_bytes);
                Rule::Adaptive(Box::new(Adaptive::new(history(), shadow, evidence)))
            }
        };
        let endurance = config.endurance_bytes_per_day.map(|bytes_per_day| Endurance::new(bytes_per_day, 0));
        Admission { rule, endurance, verdicts: Verdicts::default() }
    }

    /// Notes that a request used a chain of chunks, given from its root without gaps, wherever they
    /// were found or if they had to be computed. To be called once for each request.
    pub fn used(&mut self, chain: &[Chunk]) {
        match &mut self.rule {
            Rule::All => {}
            Rule::SecondHit(history) => history.used(chain),
            Rule::Adaptive(adaptive) => adaptive.used(chain),
        }
    }

    /// What is to become of a chunk that memory drops and that is not on the SSD. A
    /// [`Verdict::Write`] is charged to the endurance budget.
    pub fn admit(&mut self, chunk: Chunk, now_us: u64) -> Verdict {
        let claim = match &self.rule {
            Rule::All => Some(Claim::Full),
            Rule::SecondHit(history) => history.used_again(chunk.key).then_some(Claim::Full),
            Rule::Adaptive(adaptive) => adaptive.claim(chunk.key),
        };
        let mut affords =
            |claim| self.endurance.as_mut().is_none_or(|budget| budget.take(chunk.bytes, claim, now_us));
        let verdict = match claim {
            None => Verdict::UsedOnce,
            Some(claim) if affords(claim) => Verdict::Write,
            Some(_) => Verdict::OverBudget,
        };
        self.verdicts.count(verdict, chunk.bytes);
        verdict
    }

    /// Bytes of memory: some 32 for each chunk that fits on the SSD where use is remembered, and at
    /// most 8 MiB of models.
    pub fn table_bytes(&self) -> u64 {
        match &self.rule {
            Rule::All => 0,
            Rule::SecondHit(history) => history.table_bytes(),
            Rule::Adaptive(adaptive) => adaptive.table_bytes(),
        }
    }

    pub fn verdicts(&self) -> Verdicts {
        self.verdicts
    }

    /// What the adaptive policy does at the moment; `None` for the others.
    pub fn adaptive(&self) -> Option<AdaptiveState> {
        match &self.rule {
            Rule::Adaptive(adaptive) => Some(adaptive.state()),
            Rule::All | Rule::SecondHit(_) => None,
        }
    }
}

impl Verdicts {
    fn count(&mut self, verdict: Verdict, bytes: u64) {
        let sum = match verdict {
            Verdict::Write => &mut self.write_bytes,
            Verdict::UsedOnce => &mut self.used_once_bytes,
            Verdict::OverBudget => &mut self.over_budget_bytes,
        };
        *sum = sum.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::testing::chunk;
    use super::*;

    fn admission(policy: Policy, endurance_bytes_per_day: Option<u64>) -> Admission {
        let config = AdmissionConfig {
            policy,
            memory_bytes: 100,
            ssd_bytes: 1_000,
            ssd_chunks: 1_000,
            endurance_bytes_per_day,
        };
        Admission::new(config)
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for (policy, name) in Policy::NAMES {
            assert_eq!((policy.to_string().as_str(), name.parse()), (name, Ok(policy)));
        }
        let error = "ghost".parse::<Policy>().unwrap_err().to_string();
        assert_eq!(error, "unknown admission policy \"ghost\", allowed are all, second-hit, adaptive");
    }

    #[test]
    fn the_budget_binds_every_policy() {
        for (policy, _) in Policy::NAMES {
            // An hour's worth are ten chunks, of which all are used again.
            let mut admission = admission(policy, Some(240));
            let chain: Vec<Chunk> = (0..20).map(chunk).collect();
            admission.used(&chain);
            admission.used(&chain);
            let verdicts: Vec<Verdict> = chain.iter().map(|chunk| admission.admit(*chunk, 0)).collect();
            assert_eq!(verdicts[..10], [Verdict::Write; 10], "{policy}");
            assert_eq!(verdicts[10..], [Verdict::OverBudget; 10], "{policy}");
            let expected = Verdicts { write_bytes: 10, over_budget_bytes: 10, used_once_bytes: 0 };
            assert_eq!(admission.verdicts(), expected);
        }
    }

    #[test]
    fn what_was_used_once_does_not_use_up_what_is_kept_for_the_rest() {
        let mut admission = admission(Policy::Adaptive, Some(240));
        let [once, twice] = [0, 100].map(|start| (start..start + 10).map(chunk).collect::<Vec<_>>());
        for chain in [&once, &twice, &twice] {
            admission.used(chain);
        }
        let mut written = |chain: &[Chunk]| {
            chain.iter().filter(|chunk| admission.admit(**chunk, 0) == Verdict::Write).count()
        };
        assert_eq!((written(&once), written(&twice)), (5, 5));
    }
}
