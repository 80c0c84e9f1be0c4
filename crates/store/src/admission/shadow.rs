//! What `all` and `second-hit` would have made of the traffic: the tiers modelled twice, at a small
//! scale. This file knows a sample of the chunks and models of tiers.
//!
//! # Why a sample of single chunks is enough
//!
//! A chunk is of use only with everything before it, so one would sample whole families of chains
//! by their first chunk. But where all prompts start alike there is one family: the Mooncake
//! conversation trace has 182,790 different blocks and one first block. Chunks are therefore
//! sampled one by one, by their key (SHARDS: Waldspurger et al., "Efficient MRC construction with
//! SHARDS", FAST 2015), each tier with the sampled share of its capacity. That is sound because
//! both policies keep what they hold closed towards the root: every use of a chunk uses all before
//! it, they are touched after it, so they are newer in every order and used at least as often. When
//! a chunk is held, so is all before it, and the hit of a chunk is the hit of its prefix. For
//! `second-hit` this is not exact: a chunk may be held whose predecessor is not. A test below holds
//! the figures of a sample against those of all chunks.

use super::history::History;
use super::key::{Chunk, MAX_ONE_IN};
use super::lru::Lru;

/// One in so many chunks is sampled at first.
const FIRST_ONE_IN: u64 = 64;

/// Chunks in one model at most: from there on, half of the sample goes.
const MAX_CHUNKS: usize = 1 << 15;

/// For each of the two policies.
pub(crate) type PerPolicy<T> = [T; 2];
/// The place of `all` in [`PerPolicy`].
pub(crate) const ALL: usize = 0;
/// The place of `second-hit` in [`PerPolicy`].
pub(crate) const SECOND_HIT: usize = 1;

/// The models: one of the memory tier, which does not depend on the policy, and one SSD tier for
/// each policy.
#[derive(Debug)]
pub(crate) struct Shadow {
    /// One in how many chunks is sampled.
    pub one_in: u64,
    memory: Lru,
    ssds: PerPolicy<Lru>,
    /// Whether the policies had to choose what to keep: an SSD that takes all chunks was full once.
    pub was_full: bool,
}

/// What one chain meant to the models, in bytes, each sampled byte counted for all that it stands
/// for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sampled {
    /// Looked up.
    pub used_bytes: u64,
    /// Found on the SSD and not in memory.
    pub hit_bytes: PerPolicy<u64>,
    /// Written to the SSD.
    pub written_bytes: PerPolicy<u64>,
}

impl Shadow {
    pub fn new(memory_bytes: u64, ssd_bytes: u64) -> Shadow {
        let scaled = |bytes: u64| Lru::new(bytes / FIRST_ONE_IN);
        Shadow {
            one_in: FIRST_ONE_IN,
            memory: scaled(memory_bytes),
            ssds: [scaled(ssd_bytes), scaled(ssd_bytes)],
            was_full: false,
        }
    }

    /// Uses a chain, from its root, of which `history` knows already. `None` when no chunk of it is
    /// in the sample.
    pub fn used(&mut self, chain: &[Chunk], history: &History) -> Option<Sampled> {
        let (mut sampled, one_in) = (Sampled::default(), self.one_in);
        for chunk in chain.iter().rev().filter(|chunk| chunk.key.is_sampled(one_in)) {
            self.touch(*chunk, &mut sampled);
        }
        if sampled.used_bytes == 0 {
            return None;
        }
        while let Some(dropped) = self.memory.pop_excess() {
            self.demote(dropped, history, &mut sampled);
        }
        let scaled = sampled.times(self.one_in);
        self.shrink();
        Some(scaled)
    }

    pub fn table_bytes(&self) -> u64 {
        self.memory.table_bytes() + self.ssds.iter().map(Lru::table_bytes).sum::<u64>()
    }

    fn touch(&mut self, chunk: Chunk, sampled: &mut Sampled) {
        sampled.used_bytes = sampled.used_bytes.saturating_add(chunk.bytes);
        let in_memory = self.memory.contains(chunk.key);
        for (ssd, hit_bytes) in self.ssds.iter_mut().zip(&mut sampled.hit_bytes) {
            if !in_memory && ssd.touch(chunk.key) {
                *hit_bytes = hit_bytes.saturating_add(chunk.bytes);
            }
        }
        self.memory.insert(chunk);
    }

    fn demote(&mut self, chunk: Chunk, history: &History, sampled: &mut Sampled) {
        let admitted: PerPolicy<bool> = [true, history.used_again(chunk.key)];
        for ((ssd, admitted), written_bytes) in
            self.ssds.iter_mut().zip(admitted).zip(&mut sampled.written_bytes)
        {
            if !ssd.touch(chunk.key) && admitted {
                ssd.insert(chunk);
                *written_bytes = written_bytes.saturating_add(chunk.bytes);
                while ssd.pop_excess().is_some() {
                    self.was_full = true;
                }
            }
        }
    }

    /// Halves the sample while a model is too large.
    fn shrink(&mut self) {
        while self.one_in < MAX_ONE_IN
            && [&self.memory, &self.ssds[ALL], &self.ssds[SECOND_HIT]]
                .iter()
                .any(|lru| lru.len() > MAX_CHUNKS)
        {
            self.one_in *= 2;
            let one_in = self.one_in;
            self.memory.halve(|key| key.is_sampled(one_in));
            self.ssds.iter_mut().for_each(|ssd| ssd.halve(|key| key.is_sampled(one_in)));
        }
    }
}

impl Sampled {
    fn times(self, one_in: u64) -> Sampled {
        let times = |bytes: u64| bytes.saturating_mul(one_in);
        Sampled {
            used_bytes: times(self.used_bytes),
            hit_bytes: self.hit_bytes.map(times),
            written_bytes: self.written_bytes.map(times),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::testing::{chunk, hash};

    /// Prompts of 1 to 40 chunks that begin like one of `families`, some of which come often, and
    /// end on their own.
    fn prompts(count: u64, families: u64) -> impl Iterator<Item = Vec<Chunk>> {
        (0..count).map(move |prompt| {
            let random = hash(prompt);
            let skewed = (random % families) * ((random >> 20) % families) / families;
            let shared = 1 + hash(skewed) % 30;
            let own = random >> 40 & 7;
            let beginning = (0..shared).map(move |at| chunk(skewed * 100 + at));
            beginning.chain((0..own).map(move |at| chunk((1 << 40) + prompt * 10 + at))).collect()
        })
    }

    /// The same models of every chunk.
    fn whole(memory_bytes: u64, ssd_bytes: u64) -> Shadow {
        let mut shadow = Shadow::new(memory_bytes * FIRST_ONE_IN, ssd_bytes * FIRST_ONE_IN);
        shadow.one_in = 1;
        shadow
    }

    fn add(sum: &mut Sampled, more: Sampled) {
        sum.used_bytes += more.used_bytes;
        for policy in [ALL, SECOND_HIT] {
            sum.hit_bytes[policy] += more.hit_bytes[policy];
            sum.written_bytes[policy] += more.written_bytes[policy];
        }
    }

    #[test]
    fn a_sample_shows_what_the_whole_would() {
        let (memory_bytes, ssd_bytes) = (2_000, 20_000);
        let mut history = History::new(ssd_bytes);
        let mut models = [whole(memory_bytes, ssd_bytes), Shadow::new(memory_bytes, ssd_bytes)];
        let mut checksums = [Sampled::default(); 2];
        for prompt in prompts(50_000, 20_000) {
            history.used(&prompt);
            for (model, sum) in models.iter_mut().zip(&mut checksums) {
                add(sum, model.used(&prompt, &history).unwrap_or_default());
            }
        }
        for policy in [ALL, SECOND_HIT] {
            let hits = checksums.map(|sum| sum.hit_bytes[policy] as f64 / sum.used_bytes as f64);
            let written = checksums.map(|sum| sum.written_bytes[policy] as f64 / sum.used_bytes as f64);
            // 14,000 sampled uses; the figures of the whole are 0.05 to 0.6.
            assert!((hits[0] - hits[1]).abs() < 0.02, "{policy}: {hits:?}");
            assert!((written[0] - written[1]).abs() < 0.02, "{policy}: {written:?}");
            assert!(hits[0] > 0.05 && written[0] > 0.01, "{hits:?} {written:?}");
        }
    }

    #[test]
    fn what_memory_holds_is_no_hit_of_the_ssd() {
        let mut shadow = Shadow::new(64, 64 * 10);
        let history = History::new(10);
        let mut sampled = (0..).map(chunk).filter(|chunk| chunk.key.is_sampled(FIRST_ONE_IN));
        let [one, other] = [sampled.next().unwrap(), sampled.next().unwrap()];
        let mut hits = |chunk| shadow.used(&[chunk], &history).unwrap().hit_bytes[ALL];
        // Memory has room for one: `one` goes to the SSD, comes back, and is then in both.
        assert_eq!([one, other, one, one].map(&mut hits), [0, 0, 64, 0]);
    }

    #[test]
    fn only_a_full_ssd_makes_a_difference_in_favour_of_second_hits() {
        let mut shadow = Shadow::new(64 * 10, 64 * 100);
        let mut history = History::new(6_400);
        let mut number = 0;
        while !shadow.was_full {
            history.used(&[chunk(number)]);
            let sampled = shadow.used(&[chunk(number)], &history).unwrap_or_default();
            assert!(sampled.hit_bytes[SECOND_HIT] <= sampled.hit_bytes[ALL]);
            number += 1;
        }
        // 110 sampled chunks fill memory and the SSD: one in 64 of some 7,040.
        assert!((5_500..8_500).contains(&number), "{number}");
    }

    #[test]
    fn the_sample_shrinks_when_a_model_is_full_and_capacities_with_it() {
        let ssd_chunks = 64 * 100_000;
        let (mut shadow, history) = (Shadow::new(64_000, ssd_chunks), History::new(1));
        let mut written = 0;
        for start in (0..64 * 80_000u64).step_by(64) {
            let chain: Vec<Chunk> = (start..start + 64).map(chunk).collect();
            written += shadow.used(&chain, &history).unwrap_or_default().written_bytes[ALL];
            assert!(shadow.table_bytes() < 8 << 20);
        }
        // 80,000 sampled chunks do not fit into a model, half and a quarter of them neither until
        // one in 256 is left.
        assert_eq!(shadow.one_in, 256);
        assert_eq!(shadow.ssds[ALL].capacity_bytes(), ssd_chunks / 256);
        let expected = 64.0 * 80_000.0 - 64_000.0;
        assert!(
            (written as f64 / expected - 1.0).abs() < 0.02,
            "each counts for all it stands for: {written}"
        );
    }
}
