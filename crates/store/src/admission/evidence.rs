//! What the models' figures say for `all` and for `second-hit`. This file knows hits and writes.

use super::shadow::{ALL, PerPolicy, SECOND_HIT, Sampled};

/// Bytes of hits that a byte written has to save: twenty bytes written for one of hits is the most
/// that is paid.
///
/// A byte looked up is written at most once, so however the traffic is, `second-hit` is never
/// preferred for more than 5 points of hits. `docs/tiers.md` says what other figures do.
pub const HITS_PER_WRITE: f64 = 0.05;

/// How far back the figures reach: so many times the SSD's capacity, in bytes looked up.
const WINDOW_CAPACITIES: f64 = 4.0;

/// One policy is better when its advantage is so many standard errors of the sample.
const STANDARD_ERRORS: f64 = 2.0;

/// Checksums over the sample that fade as more is looked up.
#[derive(Debug)]
pub(crate) struct Evidence {
    window_bytes: f64,
    hit_bytes: PerPolicy<f64>,
    written_bytes: PerPolicy<f64>,
    /// The squared differences in hits, chain by chain: the chunks of a chain stand and fall
    /// together.
    spread: f64,
}

impl Evidence {
    /// None yet, about an SSD of this size.
    pub fn new(ssd_bytes: u64) -> Evidence {
        Evidence {
            window_bytes: WINDOW_CAPACITIES * ssd_bytes.max(1) as f64,
            hit_bytes: [0.0; 2],
            written_bytes: [0.0; 2],
            spread: 0.0,
        }
    }

    /// Adds what a chain meant to both.
    pub fn add(&mut self, sampled: &Sampled) {
        let kept = (-(sampled.used_bytes as f64) / self.window_bytes).exp();
        for policy in [ALL, SECOND_HIT] {
            let (hits, written) = (&mut self.hit_bytes[policy], &mut self.written_bytes[policy]);
            *hits = *hits * kept + sampled.hit_bytes[policy] as f64;
            *written = *written * kept + sampled.written_bytes[policy] as f64;
        }
        let difference = sampled.hit_bytes[ALL] as f64 - sampled.hit_bytes[SECOND_HIT] as f64;
        self.spread = self.spread * kept + difference * difference;
    }

    /// Whether `all` is better, beyond what chance explains; `None` when that cannot be told.
    pub fn all_is_better(&self) -> Option<bool> {
        let worth = |policy: usize| self.hit_bytes[policy] - HITS_PER_WRITE * self.written_bytes[policy];
        let advantage = worth(ALL) - worth(SECOND_HIT);
        (advantage.abs() > STANDARD_ERRORS * self.spread.sqrt()).then_some(advantage > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(all: (u64, u64), second_hit: (u64, u64)) -> Sampled {
        Sampled { used_bytes: 100, hit_bytes: [all.0, second_hit.0], written_bytes: [all.1, second_hit.1] }
    }

    fn verdict(chains: impl IntoIterator<Item = Sampled>) -> Option<bool> {
        let mut evidence = Evidence::new(1_000);
        chains.into_iter().for_each(|sampled| evidence.add(&sampled));
        evidence.all_is_better()
    }

    #[test]
    fn nothing_speaks_for_neither() {
        assert_eq!(verdict([]), None);
        assert_eq!(verdict([chain((50, 10), (50, 10))]), None);
    }

    #[test]
    fn writes_without_hits_speak_for_second_hit() {
        assert_eq!(verdict([chain((0, 100), (0, 0))]), Some(false));
    }

    #[test]
    fn a_few_hits_are_chance_and_many_are_not() {
        let better = || chain((100, 100), (0, 0));
        assert_eq!(verdict([better(); 4]), None, "4 chains are two standard errors");
        assert_eq!(verdict([better(); 6]), Some(true));
    }

    #[test]
    fn one_hit_is_worth_twenty_writes_of_the_same_length() {
        // Each policy has a hit that the other has not, so the spread is the same.
        let chains = |written| (0..5_000).map(move |_| chain((10, written), (9, 0)));
        assert_eq!(verdict(chains(19)), None);
        let exact = |written| {
            let mut evidence = Evidence::new(u64::MAX);
            chains(written).for_each(|sampled| evidence.add(&sampled));
            evidence.all_is_better()
        };
        assert_eq!((exact(18), exact(22)), (Some(true), Some(false)));
    }

    #[test]
    fn old_figures_fade() {
        let old = (0..1_000).map(|_| chain((100, 100), (0, 0)));
        let new = (0..400).map(|_| chain((0, 100), (100, 0)));
        assert_eq!(verdict(old.clone()), Some(true));
        assert_eq!(verdict(old.chain(new)), Some(false), "400 chains are ten windows");
    }
}
