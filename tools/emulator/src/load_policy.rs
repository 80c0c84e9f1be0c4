//! How much of a stored prefix the emulated engine loads, and how much it computes. It asks the
//! same [`CostModel`] as the vLLM connector: steps cost what the step model says, and how fast
//! disk and peers are is measured from the engine's own loads.
//!
//! Loads move the emulated bytes in real time, so computing counts in real time too: the faster the
//! model's clock, the sooner the engine computes. Chunks are counted with the bytes that they have
//! in the real model.

use crate::clock::ModelClock;
use crate::scheduler::Residence;
use forebay_paged::cost_model::{BadProfile, CostModel, Question, Tier};
use forebay_steps::{Profile, StepModel, StepShare};
use std::time::{Duration, Instant};

/// Steps of which the cost model is told; all others follow from them.
const NEW_TOKENS: [usize; 6] = [2, 256, 1_024, 4_096, 16_384, 65_536];
const PREFIX_TOKENS: [usize; 3] = [0, 8_192, 65_536];

/// Decides about loads and learns from them.
#[derive(Debug)]
pub struct LoadPolicy {
    model: CostModel,
    chunk_tokens: u32,
    chunk_bytes: u64,
    chunk_link_us: f64,
    /// Chunks that are being loaded.
    loading: Residence,
    /// When the last load from disk and from peers ended.
    last_end: [Option<Instant>; 2],
}

/// A load under way.
#[derive(Debug)]
pub struct Measured {
    began: Instant,
    asked: Residence,
    arrived: Residence,
    /// When the last chunk from disk and from peers arrived.
    last_end: [Instant; 2],
}

impl LoadPolicy {
    /// A policy that knows what steps cost, and nothing of disk and peers.
    pub fn new(
        profile: &Profile,
        step_model: &StepModel,
        clock: &ModelClock,
        chunk_tokens: usize,
    ) -> Result<LoadPolicy, BadProfile> {
        let layers = u32::try_from(profile.model.layers).unwrap_or(u32::MAX);
        let mut model = CostModel::new(layers, None)?;
        for (new_tokens, context_tokens) in
            NEW_TOKENS.into_iter().flat_map(|new| PREFIX_TOKENS.map(|prefix| (new, prefix)))
        {
            let step_us = step_model.step_us([StepShare { context_tokens, new_tokens }]);
            model.note_step(new_tokens as u64, context_tokens as u64, clock.real_us(step_us) / 1e6);
        }
        let chunk_bytes = profile.model.kv_bytes_per_token * chunk_tokens as u64;
        Ok(LoadPolicy {
            model,
            chunk_tokens: u32::try_from(chunk_tokens).unwrap_or(u32::MAX),
            chunk_bytes,
            // Bytes / (10^9 bytes per second) in microseconds.
            chunk_link_us: chunk_bytes as f64 / profile.host_link.gb_per_s / 1e3,
            loading: Residence::default(),
            last_end: [None; 2],
        })
    }

    /// Microseconds that a chunk, in its real size, is on the GPU's host link.
    pub fn chunk_link_us(&self) -> f64 {
        self.chunk_link_us
    }

    /// How many chunks to load, all of them behind the `first_chunk` that the engine has: those in
    /// memory in any case, and those from disk and peers with which all requests wait least. `wait`
    /// is how long the request waits anyway, and `others` compute meanwhile.
    pub fn chunks_to_load(
        &mut self,
        prompt_tokens: usize,
        first_chunk: usize,
        there: Residence,
        wait: Duration,
        others: usize,
    ) -> usize {
        let held = first_chunk + there.memory;
        let queued = |chunks: usize| chunks as u64 * self.chunk_bytes;
        let question = Question {
            prompt_tokens: prompt_tokens as u64,
            held_tokens: held as u64 * u64::from(self.chunk_tokens),
            chunk_tokens: self.chunk_tokens,
            chunk_bytes: self.chunk_bytes,
            in_memory: 0,
            on_disk: there.disk,
            on_peers: there.peers,
            queued: [0, queued(self.loading.disk), queued(self.loading.peers)],
            wait_us: u64::try_from(wait.as_micros()).unwrap_or(u64::MAX),
            others: u32::try_from(others).unwrap_or(u32::MAX),
        };
        there.memory + self.model.chunks_to_load(&question)
    }

    /// A load of these chunks begins.
    pub fn began(&mut self, asked: Residence, now: Instant) -> Measured {
        self.loading.disk += asked.disk;
        self.loading.peers += asked.peers;
        Measured { began: now, asked, arrived: Residence::default(), last_end: [now; 2] }
    }

    /// A load has ended. Where it waited for one before it, only the time since that one's end
    /// counts.
    pub fn ended(&mut self, load: &Measured) {
        self.loading.disk -= load.asked.disk;
        self.loading.peers -= load.asked.peers;
        let tiers = [(Tier::Disk, load.arrived.disk), (Tier::Peer, load.arrived.peers)];
        for (index, (tier, chunks)) in tiers.into_iter().enumerate().filter(|(_, (_, chunks))| *chunks > 0) {
            let end = load.last_end[index];
            let since = self.last_end[index].map_or(load.began, |before| before.max(load.began));
            let seconds = end.saturating_duration_since(since).as_secs_f64();
            self.model.note_load(tier, chunks as u64 * self.chunk_bytes, seconds);
            self.last_end[index] = self.last_end[index].max(Some(end));
        }
    }
}

impl Measured {
    /// A chunk of the load has arrived.
    pub fn arrived(&mut self, chunk: usize, at: Instant) {
        let Residence { memory, disk, .. } = self.asked;
        let (count, last_end) = match chunk {
            chunk if chunk < memory => return,
            chunk if chunk < memory + disk => (&mut self.arrived.disk, &mut self.last_end[0]),
            _ => (&mut self.arrived.peers, &mut self.last_end[1]),
        };
        *count += 1;
        *last_end = at.max(*last_end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_steps::Launch;

    #[test]
    fn a_chunk_is_on_the_link_as_long_as_its_real_bytes_take() {
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        let model = StepModel::new(&profile, Launch::Graph);
        let policy = LoadPolicy::new(&profile, &model, &ModelClock::new(1.0), 64).unwrap();
        assert!((policy.chunk_link_us() - 64.0 * 98_304.0 / 55e9 * 1e6).abs() < 1e-6);
    }
}
