//! Load or compute: this is where the vLLM connector decides how many chunks of a stored prefix it
//! loads. The decision is [`CostModel::chunks_to_load`]. The connector calls it as
//! `forebay.Slack.worth`, in `python/forebay/vllm/connector/load_or_compute.py`; the emulated
//! engine calls it in its `load_policy.rs`. Nothing here does I/O: callers report how long steps
//! and loads took.
//!
//! [`CostModel`] keeps what was measured; [`choose`] is the decision, a pure function.
//!
//! Steps are kept in buckets by powers of two of their new tokens and their prefix. A cost that is
//! linear in the new tokens and in the pairs of tokens that attend to each other is fitted to all
//! buckets; near a bucket, its own measurement corrects the fit. What is not known yet is taken for
//! worth loading: so it gets known.
//!
//! # The profile
//!
//! ```json
//! {"version": 1, "layers": 32,
//!  "steps": [{"new_tokens": 2048, "prefix_tokens": 0, "seconds": 0.05, "count": 3}],
//!  "tiers": {"memory": {"bytes_per_s": 5e10, "latency_s": 0.0005}}}
//! ```
//!
//! `count` is how many steps the seconds are the mean of, 1 if it is left out. `tiers` may lack any
//! of `memory`, `disk` and `peer`, `latency_s` is 0 if it is left out. A profile is a beginning:
//! what is learned later outweighs it.

mod choose;

use choose::{PrefillCost, Prefix, Source, StoredChunk, choose};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use thiserror::Error;

/// How much a new measurement counts against what was known.
const GAIN: f64 = 0.2;
/// Measurements of a bucket that count at most, so that it goes on learning.
const COUNT_MAX: u64 = 1_000;
/// Tokens and bytes beyond this are taken for a mistake.
const TOKENS_MAX: u64 = 1 << 40;
/// Loads below this say more about latency than about the rate.
const RATE_BYTES_MIN: u64 = 1 << 20;
/// Of so many first loads of a tier the fastest says how fast it is: others may have waited for
/// what is made ready once.
const FIRST_LOADS: u32 = 4;
/// Of so many answers that nothing of a tier is worth loading, one says to load a little all the
/// same: what is never loaded is never measured, and slow loads would be believed for ever.
const TRY_EVERY: u32 = 16;
const VERSION: u32 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    Memory,
    Disk,
    Peer,
}

impl Tier {
    /// As profiles and counters call it.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Memory => "memory",
            Tier::Disk => "disk",
            Tier::Peer => "peer",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    pub prompt_tokens: u64,
    /// Tokens at its start whose KV the engine has. It may end inside of a chunk.
    pub held_tokens: u64,
    pub chunk_tokens: u32,
    pub chunk_bytes: u64,
    /// Chunks that can be had, from the one on that `held_tokens` ends in: the first ones are in
    /// memory,
    pub in_memory: usize,
    /// the next ones on disk,
    pub on_disk: usize,
    /// the last ones on other nodes.
    pub on_peers: usize,
    /// Bytes that are being loaded already, from memory, disk and other nodes.
    pub queued: [u64; 3],
    /// How long the GPU cannot compute for this prompt in any case, in microseconds.
    pub wait_us: u64,
    /// Requests that compute meanwhile. What is computed for this one holds up all of them, what is
    /// loaded for it holds up none.
    pub others: u32,
}

/// Why a profile is none.
#[derive(Debug, Error)]
pub enum BadProfile {
    #[error("profile: {0}")]
    Json(#[from] serde_json::Error),
    #[error("profile: {what} is {value}; allowed: {allowed}")]
    Value { what: &'static str, value: String, allowed: String },
}

#[derive(Debug, Clone)]
pub struct CostModel {
    layers: u32,
    /// By the powers of two of new tokens and prefix.
    steps: BTreeMap<(u32, u32), Bucket>,
    tiers: BTreeMap<Tier, Rate>,
    /// Fitted to the buckets; `None` as long as there are none.
    cost: Option<PrefillCost>,
    /// Answers that nothing of a tier is worth loading, since one said to try.
    declined: [u32; 3],
}

/// Steps that are alike, on average.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    new_tokens: f64,
    prefix_tokens: f64,
    us: f64,
    count: u64,
}

/// How fast a tier is. The mean is of times for a byte: a mean of rates would follow the few
/// measurements that caught a link between two loads.
#[derive(Debug, Clone, Copy)]
struct Rate {
    us_per_byte: f64,
    latency_us: f64,
    loads: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    version: u32,
    layers: u32,
    #[serde(default)]
    steps: Vec<ProfileStep>,
    #[serde(default)]
    tiers: BTreeMap<Tier, ProfileTier>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileStep {
    new_tokens: f64,
    prefix_tokens: f64,
    seconds: f64,
    #[serde(default = "once")]
    count: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileTier {
    bytes_per_s: f64,
    #[serde(default)]
    latency_s: f64,
}

fn once() -> u64 {
    1
}

/// In the order in which a prefix's chunks lie there.
const TIERS: [Tier; 3] = [Tier::Memory, Tier::Disk, Tier::Peer];

impl CostModel {
    /// What is known of a model with so many layers: what the profile says, or nothing.
    pub fn new(layers: u32, profile: Option<&str>) -> Result<CostModel, BadProfile> {
        let refuse = |what, value: String, allowed: &str| {
            Err(BadProfile::Value { what, value, allowed: allowed.to_owned() })
        };
        if layers == 0 {
            return refuse("layers", "0".into(), "1 or more");
        }
        let mut model = CostModel {
            layers,
            steps: BTreeMap::new(),
            tiers: BTreeMap::new(),
            cost: None,
            declined: [0; 3],
        };
        let Some(profile) = profile else { return Ok(model) };
        let profile: Profile = serde_json::from_str(profile)?;
        if profile.version != VERSION {
            return refuse("version", profile.version.to_string(), "1");
        }
        if profile.layers != layers {
            return refuse("layers", profile.layers.to_string(), &format!("{layers}, as the model has"));
        }
        for ProfileStep { new_tokens, prefix_tokens, seconds, count } in profile.steps {
            let tokens = 0.0..=TOKENS_MAX as f64;
            if !(new_tokens >= 1.0 && tokens.contains(&new_tokens) && tokens.contains(&prefix_tokens)) {
                return refuse(
                    "a step's tokens",
                    format!("{new_tokens} + {prefix_tokens}"),
                    "new ones, 2^40 at most",
                );
            }
            if !is_time(seconds) {
                return refuse("a step's seconds", seconds.to_string(), "1e-9 to 1e9");
            }
            let bucket =
                Bucket { new_tokens, prefix_tokens, us: seconds * 1e6, count: count.clamp(1, COUNT_MAX) };
            model.steps.insert(bucket.key(), bucket);
        }
        for (tier, ProfileTier { bytes_per_s, latency_s }) in profile.tiers {
            if !(is_rate(bytes_per_s) && latency_s >= 0.0 && latency_s.is_finite()) {
                return refuse("a tier's rate", format!("{bytes_per_s} B/s after {latency_s} s"), "above 0");
            }
            let rate =
                Rate { us_per_byte: 1e6 / bytes_per_s, latency_us: latency_s * 1e6, loads: FIRST_LOADS };
            model.tiers.insert(tier, rate);
        }
        model.cost = fit(model.steps.values());
        Ok(model)
    }

    /// A step computed so many tokens behind a prefix. What cannot be is not noted.
    pub fn note_step(&mut self, new_tokens: u64, prefix_tokens: u64, seconds: f64) {
        if !is_time(seconds) || !(1..=TOKENS_MAX).contains(&new_tokens) || prefix_tokens > TOKENS_MAX {
            return;
        }
        let (new_tokens, prefix_tokens) = (new_tokens as f64, prefix_tokens as f64);
        let seen = Bucket { new_tokens, prefix_tokens, us: seconds * 1e6, count: 1 };
        self.steps.entry(seen.key()).and_modify(|known| known.learn(&seen)).or_insert(seen);
        self.cost = fit(self.steps.values());
    }

    /// So many bytes of a tier took so long. Few bytes are not noted before the tier has a rate.
    pub fn note_load(&mut self, tier: Tier, bytes: u64, seconds: f64) {
        if !is_time(seconds) || bytes == 0 {
            return;
        }
        let us = seconds * 1e6;
        let Some(known) = self.tiers.get_mut(&tier) else {
            if bytes < RATE_BYTES_MIN {
                return;
            }
            self.tiers.insert(tier, Rate { us_per_byte: us / bytes as f64, latency_us: 0.0, loads: 1 });
            return;
        };
        if bytes < RATE_BYTES_MIN {
            let latency_us = (us - bytes as f64 * known.us_per_byte).max(0.0);
            known.latency_us += GAIN * (latency_us - known.latency_us);
        } else {
            let us_per_byte = (us - known.latency_us).max(us / 2.0) / bytes as f64;
            known.us_per_byte = match known.loads < FIRST_LOADS {
                true => known.us_per_byte.min(us_per_byte),
                false => known.us_per_byte + GAIN * (us_per_byte - known.us_per_byte),
            };
            known.loads = known.loads.saturating_add(1);
        }
    }

    /// How many of the chunks to load so that all requests together wait least: this one until the
    /// KV of its prompt is there, the others while it is computed. All of them as long as computing
    /// has no known cost, and now and then a first one of a tier of which none would be worth it,
    /// so that this goes on learning; a tier of unknown rate costs nothing.
    pub fn chunks_to_load(&mut self, question: &Question) -> usize {
        let Question { prompt_tokens, held_tokens, chunk_tokens, chunk_bytes, .. } = *question;
        let can_be_had =
            question.in_memory.saturating_add(question.on_disk).saturating_add(question.on_peers);
        let tokens = u64::from(chunk_tokens.max(1));
        let held_tokens = held_tokens.min(prompt_tokens);
        let missing = (prompt_tokens - held_tokens / tokens * tokens).div_ceil(tokens);
        let chunks = can_be_had.min(usize::try_from(missing).unwrap_or(usize::MAX));
        let Some(cost) = self.cost else { return chunks };
        let prefill = times(cost, 1.0 + f64::from(question.others));
        let inside = held_tokens % tokens;
        let first = held_tokens - inside;
        let of = |number: usize| {
            let start = if number == 0 { held_tokens } else { first + number as u64 * tokens };
            let end = first.saturating_add((number as u64 + 1).saturating_mul(tokens)).min(prompt_tokens);
            let source = match number {
                number if number < question.in_memory => 0,
                number if number - question.in_memory < question.on_disk => 1,
                _ => 2,
            };
            StoredChunk { tokens: clip(end.saturating_sub(start)), bytes: chunk_bytes, source }
        };
        let chunks: Vec<StoredChunk> = (0..chunks).map(of).collect();
        let covered: u64 = chunks.iter().map(|chunk| u64::from(chunk.tokens)).sum();
        let prefix = Prefix {
            held_tokens: clip(held_tokens),
            chunks: &chunks,
            new_tokens: clip(prompt_tokens - held_tokens - covered),
            sources: &self.sources(question.queued),
            prefill,
            wait_us: question.wait_us as f64,
        };
        let worth = choose(&prefix).chunks;
        worth + self.exploration_chunks(chunks.split_at(worth))
    }

    /// How many of the chunks that are left to try all the same: a few, now and then, if nothing of
    /// their tier is loaded.
    fn exploration_chunks(&mut self, (loaded, left): (&[StoredChunk], &[StoredChunk])) -> usize {
        let Some(StoredChunk { source, bytes, .. }) = left.first().copied() else { return 0 };
        if loaded.last().is_some_and(|last| last.source == source) {
            return 0;
        }
        let declined = &mut self.declined[source];
        *declined = (*declined + 1) % TRY_EVERY;
        if *declined > 0 {
            return 0;
        }
        let enough = RATE_BYTES_MIN.div_ceil(bytes.max(1)) as usize;
        left.iter().take(enough).take_while(|chunk| chunk.source == source).count()
    }

    fn sources(&self, queued: [u64; 3]) -> [Source; 3] {
        let mut sources = TIERS.map(|tier| match self.tiers.get(&tier) {
            Some(rate) => {
                Source { bytes_per_us: 1.0 / rate.us_per_byte, latency_us: rate.latency_us, queued_bytes: 0 }
            }
            None => Source { bytes_per_us: f64::MAX, latency_us: 0.0, queued_bytes: 0 },
        });
        sources.iter_mut().zip(queued).for_each(|(source, bytes)| source.queued_bytes = bytes);
        sources
    }

    /// How long a load of so many bytes from memory, disk and other nodes takes behind those that
    /// are queued there; `None` if one of these rates is not known.
    pub fn load_us(&self, bytes: [u64; 3], queued: [u64; 3]) -> Option<f64> {
        let mut longest_us = 0.0_f64;
        for (number, bytes) in bytes.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0) {
            let rate = self.tiers.get(&TIERS[number])?;
            let behind = bytes.saturating_add(queued[number]) as f64;
            longest_us = longest_us.max(rate.latency_us + behind * rate.us_per_byte);
        }
        Some(longest_us)
    }

    /// How long a step takes that computes so many tokens behind a prefix; 0 as long as nothing is
    /// known.
    pub fn step_us(&self, new_tokens: u64, prefix_tokens: u64) -> f64 {
        let Some(cost) = self.cost else { return 0.0 };
        let (new_tokens, prefix_tokens) = (new_tokens as f64, prefix_tokens as f64);
        let asked = Bucket { new_tokens, prefix_tokens, us: 0.0, count: 0 };
        let near = self.steps.get(&asked.key());
        let correction = near.map_or(1.0, |near| near.us / near.fitted_us(&cost).max(f64::MIN_POSITIVE));
        asked.fitted_us(&cost) * correction
    }

    /// How long one layer of such a step takes.
    pub fn layer_us(&self, new_tokens: u64, prefix_tokens: u64) -> f64 {
        self.step_us(new_tokens, prefix_tokens) / f64::from(self.layers)
    }

    /// What is known, to begin with another time.
    pub fn profile(&self) -> String {
        let step = |bucket: &Bucket| ProfileStep {
            new_tokens: bucket.new_tokens,
            prefix_tokens: bucket.prefix_tokens,
            seconds: bucket.us / 1e6,
            count: bucket.count,
        };
        let tier = |(tier, rate): (&Tier, &Rate)| {
            let (bytes_per_s, latency_s) = (1e6 / rate.us_per_byte, rate.latency_us / 1e6);
            (*tier, ProfileTier { bytes_per_s, latency_s })
        };
        let steps = self.steps.values().map(step).collect();
        let tiers = self.tiers.iter().map(tier).collect();
        let profile = Profile { version: VERSION, layers: self.layers, steps, tiers };
        // A structure of numbers always has a JSON form.
        serde_json::to_string_pretty(&profile).unwrap_or_default()
    }
}

/// A cost for so many requests that wait.
fn times(cost: PrefillCost, waiting: f64) -> PrefillCost {
    PrefillCost {
        linear_us_per_token: cost.linear_us_per_token * waiting,
        attention_us_per_pair: cost.attention_us_per_pair * waiting,
        floor_us: cost.floor_us * waiting,
    }
}

/// Whether so many seconds can be the time of a step or a load.
fn is_time(seconds: f64) -> bool {
    (1e-9..=1e9).contains(&seconds)
}

fn is_rate(bytes_per_s: f64) -> bool {
    bytes_per_s.is_finite() && bytes_per_s > 0.0
}

fn clip(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

impl Bucket {
    fn key(&self) -> (u32, u32) {
        let power = |tokens: f64| (tokens.max(0.0) as u64).saturating_add(1).ilog2();
        (power(self.new_tokens), power(self.prefix_tokens))
    }

    fn pairs(&self) -> f64 {
        self.new_tokens * (self.prefix_tokens + self.new_tokens / 2.0)
    }

    fn fitted_us(&self, cost: &PrefillCost) -> f64 {
        let us = cost.linear_us_per_token * self.new_tokens + cost.attention_us_per_pair * self.pairs();
        us.max(cost.floor_us)
    }

    /// The first ones are averaged; later ones count for a fixed share.
    fn learn(&mut self, seen: &Bucket) {
        self.count = (self.count + 1).min(COUNT_MAX);
        let gain = (1.0 / self.count as f64).max(GAIN);
        self.new_tokens += gain * (seen.new_tokens - self.new_tokens);
        self.prefix_tokens += gain * (seen.prefix_tokens - self.prefix_tokens);
        self.us += gain * (seen.us - self.us);
    }
}

/// The cost that is nearest to the buckets, by relative error: a step of a millisecond says as much
/// as one of a second.
fn fit<'a>(buckets: impl Iterator<Item = &'a Bucket> + Clone) -> Option<PrefillCost> {
    let floor_us = buckets.clone().map(|bucket| bucket.us).reduce(f64::min)?;
    // Steps that cost hardly more than the shortest one say nothing about tokens, unless all do.
    let longer = buckets.clone().filter(|bucket| bucket.us > 1.5 * floor_us);
    let used: Vec<&Bucket> =
        if longer.clone().next().is_some() { longer.collect() } else { buckets.collect() };
    let [mut tt, mut tp, mut pp, mut t, mut p] = [0.0; 5];
    for bucket in used {
        let (tokens, pairs) = (bucket.new_tokens / bucket.us, bucket.pairs() / bucket.us);
        tt += tokens * tokens;
        tp += tokens * pairs;
        pp += pairs * pairs;
        t += tokens;
        p += pairs;
    }
    let determinant = tt * pp - tp * tp;
    let solved = (determinant > 1e-9 * tt * pp)
        .then(|| ((t * pp - p * tp) / determinant, (p * tt - t * tp) / determinant));
    let (linear_us_per_token, attention_us_per_pair) = match solved {
        Some((linear, attention)) if linear >= 0.0 && attention >= 0.0 => (linear, attention),
        Some((linear, _)) if linear < 0.0 => (0.0, p / pp),
        _ => (t / tt, 0.0),
    };
    Some(PrefillCost { linear_us_per_token, attention_us_per_pair, floor_us })
}

#[cfg(test)]
mod tests;
