//! How much of a trace's prompts was seen before, by anyone and within the same session, in bounded
//! memory. It looks at a random part of all prefixes, chosen by their keys and made smaller when
//! memory is full (fixed-size SHARDS: Waldspurger et al., "Efficient MRC construction with SHARDS",
//! FAST 2015): exact for small traces, an estimate for large ones.

use crate::prefix::{KeySet, prefix_keys};
use crate::request::TraceRequest;
use crate::tokens::mix;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// How many prefixes are remembered for each of the two shares.
const REMEMBERED_PREFIXES: usize = 1 << 20;

/// Counts reuse over requests in the order of their arrival.
pub struct ReuseCounter {
    anyone: Sampled,
    same_session: Sampled,
}

/// Shares of prompt blocks that an infinite cache would have held.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reuse {
    /// With one cache for all.
    pub shared: f64,
    /// With a cache for each top-level session; sub-agents use their session's.
    pub within_session: f64,
}

impl Reuse {
    pub fn across_sessions(&self) -> f64 {
        self.shared - self.within_session
    }
}

impl Default for ReuseCounter {
    fn default() -> ReuseCounter {
        ReuseCounter::remembering(REMEMBERED_PREFIXES)
    }
}

impl ReuseCounter {
    fn remembering(limit: usize) -> ReuseCounter {
        ReuseCounter { anyone: Sampled::new(limit), same_session: Sampled::new(limit) }
    }

    /// Counts the next request.
    pub fn add(&mut self, request: &TraceRequest) {
        let session = xxh3_64(request.root_session().as_bytes());
        for key in prefix_keys(request) {
            self.anyone.add(key);
            self.same_session.add(mix(key ^ session));
        }
    }

    /// The shares so far, or `None` without any block.
    pub fn reuse(&self) -> Option<Reuse> {
        Some(Reuse { shared: self.anyone.known_share()?, within_session: self.same_session.known_share()? })
    }
}

/// A share of known keys among all keys, of those below a threshold that falls as the memory fills.
struct Sampled {
    keys: KeySet,
    limit: usize,
    highest: u64,
    /// Each key counts for all those that its sampling left out.
    weight: f64,
    looked_at: f64,
    known: f64,
}

impl Sampled {
    fn new(limit: usize) -> Sampled {
        Sampled { keys: KeySet::default(), limit, highest: u64::MAX, weight: 1.0, looked_at: 0.0, known: 0.0 }
    }

    fn add(&mut self, key: u64) {
        if key > self.highest {
            return;
        }
        self.looked_at += self.weight;
        if !self.keys.insert(key) {
            self.known += self.weight;
        }
        if self.keys.len() > self.limit {
            self.highest /= 2;
            self.weight *= 2.0;
            self.keys.retain(|&key| key <= self.highest);
        }
    }

    fn known_share(&self) -> Option<f64> {
        (self.looked_at > 0.0).then(|| self.known / self.looked_at)
    }
}

#[cfg(test)]
mod tests {
    use super::ReuseCounter;
    use crate::request::TraceRequest;

    fn request(session: &str, blocks: Vec<u64>) -> TraceRequest {
        TraceRequest { session: session.into(), block_tokens: 16, blocks, ..TraceRequest::default() }
    }

    #[test]
    fn reuse_is_told_apart_by_who_came_before() {
        let mut counter = ReuseCounter::default();
        assert!(counter.reuse().is_none());
        counter.add(&request("a", vec![1, 2]));
        counter.add(&request("a", vec![1, 2, 3]));
        counter.add(&request("b", vec![1, 9, 3]));
        let reuse = counter.reuse().unwrap();
        assert_eq!((reuse.shared, reuse.within_session), (3.0 / 8.0, 2.0 / 8.0));
        assert_eq!(reuse.across_sessions(), 1.0 / 8.0);
    }

    #[test]
    fn a_small_memory_gives_nearly_the_same_share() {
        let mut exact = ReuseCounter::default();
        let mut small = ReuseCounter::remembering(2_000);
        for turn in 0..40_000u64 {
            // In the second half every other prompt repeats the one before: what is seen late
            // counts as much as early.
            let prompt = turn - u64::from(turn >= 20_000 && turn % 2 == 1);
            let blocks = (0..5).map(|position| prompt * 5 + position).collect();
            let request = request("a", blocks);
            exact.add(&request);
            small.add(&request);
        }
        let (exact, small) = (exact.reuse().unwrap().shared, small.reuse().unwrap().shared);
        assert_eq!(exact, 0.25);
        assert!((exact - small).abs() < 0.02, "{exact} {small}");
    }
}
