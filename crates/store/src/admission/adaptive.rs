//! `adaptive`: follows whichever of `all` and `second-hit` does better on a sample of the traffic.
//! This file joins the history, the models and the evidence.

use super::endurance::Claim;
use super::evidence::Evidence;
use super::history::History;
use super::key::{Chunk, ChunkKey};
use super::shadow::Shadow;

#[derive(Debug)]
pub(crate) struct Adaptive {
    history: History,
    shadow: Shadow,
    evidence: Evidence,
    admits_all: bool,
    changes: u64,
}

/// What the adaptive policy does at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdaptiveState {
    /// Whether it admits all chunks, or those used again only.
    pub admits_all: bool,
    /// How often that changed.
    pub changes: u64,
    /// One in how many chunks is sampled.
    pub sampled_one_in: u64,
}

impl Adaptive {
    /// Admits all until something speaks against it: while the SSD has room, second hits can only
    /// do worse.
    pub fn new(history: History, shadow: Shadow, evidence: Evidence) -> Adaptive {
        Adaptive { history, shadow, evidence, admits_all: true, changes: 0 }
    }

    pub fn used(&mut self, chain: &[Chunk]) {
        self.history.used(chain);
        let Some(sampled) = self.shadow.used(chain, &self.history) else { return };
        self.evidence.add(&sampled);
        if !self.shadow.was_full {
            return;
        }
        if self.evidence.all_is_better().is_some_and(|better| better != self.admits_all) {
            self.admits_all = !self.admits_all;
            self.changes += 1;
        }
    }

    /// The claim with which the chunk may be written, if it may: chunks used again come before all
    /// others.
    pub fn claim(&self, key: ChunkKey) -> Option<Claim> {
        match (self.history.used_again(key), self.admits_all) {
            (true, _) => Some(Claim::Full),
            (false, true) => Some(Claim::Half),
            (false, false) => None,
        }
    }

    pub fn state(&self) -> AdaptiveState {
        AdaptiveState {
            admits_all: self.admits_all,
            changes: self.changes,
            sampled_one_in: self.shadow.one_in,
        }
    }

    pub fn table_bytes(&self) -> u64 {
        self.history.table_bytes() + self.shadow.table_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::testing::{chunk, hash};

    const MEMORY_BYTES: u64 = 2_000;
    const SSD_BYTES: u64 = 20_000;

    fn adaptive() -> Adaptive {
        let shadow = Shadow::new(MEMORY_BYTES, SSD_BYTES);
        Adaptive::new(History::new(SSD_BYTES), shadow, Evidence::new(SSD_BYTES))
    }

    /// Prompts of ten chunks of which four in ten come from a set as large as half of the SSD; the
    /// others never come again.
    fn scan(adaptive: &mut Adaptive, prompts: std::ops::Range<u64>) {
        for prompt in prompts {
            let random = hash(prompt);
            let start = if random % 10 < 4 { (random >> 8) % 1_000 * 10 } else { (1 << 30) + prompt * 10 };
            adaptive.used(&(start..start + 10).map(chunk).collect::<Vec<_>>());
        }
    }

    /// Prompts of ten chunks that all come exactly twice, the second time when memory has dropped
    /// them.
    fn pairs(adaptive: &mut Adaptive, prompts: std::ops::Range<u64>) {
        for prompt in prompts {
            for number in [prompt, prompt.saturating_sub(800)] {
                let start = (1 << 40) + number * 10;
                adaptive.used(&(start..start + 10).map(chunk).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn it_admits_all_until_the_ssd_is_full() {
        let mut adaptive = adaptive();
        scan(&mut adaptive, 0..2_000);
        assert!(adaptive.admits_all);
        assert_eq!(adaptive.claim(chunk(1 << 50).key), Some(Claim::Half));
    }

    #[test]
    fn it_follows_the_traffic_there_and_back_and_does_not_flutter() {
        let mut adaptive = adaptive();
        scan(&mut adaptive, 0..30_000);
        assert!(!adaptive.admits_all, "what comes once pushes out what comes again");
        assert_eq!(adaptive.claim(chunk(1 << 50).key), None);
        pairs(&mut adaptive, 0..30_000);
        assert!(adaptive.admits_all, "the second use of a chunk is its last");
        scan(&mut adaptive, 30_000..60_000);
        assert!(!adaptive.admits_all);
        assert!((3..=5).contains(&adaptive.state().changes), "{:?}", adaptive.state());
    }

    #[test]
    fn what_was_used_again_always_comes_first() {
        let mut adaptive = adaptive();
        for _ in 0..2 {
            adaptive.used(&[chunk(1)]);
        }
        assert_eq!(adaptive.claim(chunk(1).key), Some(Claim::Full));
    }
}
