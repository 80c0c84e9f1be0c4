//! What engines do: a time of prefills, each with a prefix from SSD, a time of decoding with few of
//! them, and a time without. Stores come at any moment. This file knows times and numbers of
//! chunks.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::ops::Range;
use std::time::Duration;

pub const MIB: u64 = 1 << 20;
/// 64 tokens at 64 KiB a token, in layers of 256 KiB.
pub const CHUNK_BYTES: u64 = 4 * MIB;
pub const LAYERS: u64 = 16;

/// A prefill every so often, with so many chunks from SSD and so many to SSD.
const PREFILL_EVERY: Duration = Duration::from_millis(120);
const PREFIX_CHUNKS: usize = 12;
const PREFILL_STORES: usize = 6;
/// While engines decode, a few short prefixes come, and a store every so often.
const DECODE: Duration = Duration::from_millis(1_500);
const DECODE_LOADS: usize = 4;
const DECODE_LOAD_CHUNKS: usize = 4;
const DECODE_STORE_EVERY: Duration = Duration::from_millis(30);
const IDLE: Duration = Duration::from_millis(1_300);

#[derive(Clone)]
pub enum What {
    /// These of the chunks that are on SSD, none of which is loaded twice.
    Load(Range<usize>),
    /// A new chunk of this number.
    Store(usize),
}

pub struct Trace {
    /// In order of time.
    pub events: Vec<(Duration, What)>,
    pub lasts: Duration,
    chunks: usize,
    stores: usize,
}

impl Trace {
    /// The trace with so many prefills; the same each time.
    pub fn new(prefills: u32) -> Trace {
        let mut random = StdRng::seed_from_u64(38);
        let lasts = prefills * PREFILL_EVERY + DECODE + IDLE;
        let mut trace = Trace { events: Vec::new(), lasts, chunks: 0, stores: 0 };
        for prefill in 0..prefills {
            let at = prefill * PREFILL_EVERY;
            // Prompts do not come by the clock.
            trace.load(at + PREFILL_EVERY.mul_f64(random.random_range(0.0..0.3)), PREFIX_CHUNKS);
            for _ in 0..PREFILL_STORES {
                trace.store(at + PREFILL_EVERY.mul_f64(random.random_range(0.0..1.0)));
            }
        }
        let decodes = prefills * PREFILL_EVERY;
        for _ in 0..DECODE_LOADS {
            trace.load(decodes + DECODE.mul_f64(random.random_range(0.0..1.0)), DECODE_LOAD_CHUNKS);
        }
        for number in 0..DECODE.as_millis() / DECODE_STORE_EVERY.as_millis() {
            trace.store(decodes + number as u32 * DECODE_STORE_EVERY);
        }
        trace.events.sort_by_key(|(at, _)| *at);
        trace
    }

    /// Chunks that are on SSD before.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    pub fn stores(&self) -> usize {
        self.stores
    }

    fn load(&mut self, at: Duration, chunks: usize) {
        self.events.push((at, What::Load(self.chunks..self.chunks + chunks)));
        self.chunks += chunks;
    }

    fn store(&mut self, at: Duration) {
        self.events.push((at, What::Store(self.stores)));
        self.stores += 1;
    }
}
