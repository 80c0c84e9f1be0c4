//! What a cache of KV is believed to hold, guessed from outside: an engine's GPU memory, or a store
//! that several engines share. It knows which prompts were used, and what was found of them later;
//! whose cache it is and how it is told are others' business.
//!
//! The cache has a clock that counts the chunks that came into it. It evicts only as chunks come,
//! and drops what was used longest ago, the end of a prompt before its beginning (as vLLM's block
//! pool does). So a chunk is believed resident while its age on that clock is below the cache's
//! *reach*, and the reach is learned: a chunk that was lost bounds it from above, one that was
//! found although believed lost raises it again.

use crate::chain::Chain;
use crate::generations::Generations;

/// A prompt is believed cached up to chunk boundaries, an engine counts whole blocks or store
/// chunks (64 to 256 tokens, up to 1.8 KB), and tokens are not spread evenly over the bytes. A
/// difference below this many chunks, or below an eighth of the prediction, is no evidence.
const SLACK_CHUNKS: usize = 4;

/// One chunk on the clock.
pub const CHUNK: i64 = 1 << 20;

/// What each use adds to the clock beside the chunks that come: times of last use tell which use
/// made them, and a million uses age a cache's chunks by one.
pub const TICK: i64 = 1;

#[derive(Debug)]
pub struct ShadowCache {
    /// Chunk key -> time of last use. Within a prompt it falls by [`CHUNK`] per chunk: ends go
    /// first.
    pub used: Generations<i64>,
    /// Chunks that have come so far, in [`CHUNK`]s, and a [`TICK`] for each use.
    pub clock: i64,
    /// Chunks of at least this age are believed gone.
    reach: i64,
    /// The same, by how many chunks it is told to have room for.
    room: i64,
    /// Chunks that have come by the clock, and that the cache has not told of yet.
    expected: i64,
    /// It was not told for a while what comes.
    is_untold: bool,
}

impl ShadowCache {
    /// An empty cache of which at most `chunks` chunks are remembered.
    pub fn new(chunks: usize) -> ShadowCache {
        let used = Generations::new(chunks);
        ShadowCache { used, clock: 0, reach: i64::MAX, room: i64::MAX, expected: 0, is_untold: false }
    }

    /// How many of the first chunks of `chain` it is believed to hold. Costs the logarithm of the
    /// chain's length: use of a prompt touches it from its beginning, so what is resident is always
    /// a beginning.
    pub fn hit_chunks(&self, chain: &Chain) -> usize {
        chain.keys().partition_point(|&key| self.holds(key))
    }

    /// Is it believed to hold this chunk?
    pub fn holds(&self, key: u64) -> bool {
        self.age(key).is_some_and(|age| age < self.reach.min(self.room))
    }

    /// In whole chunks.
    pub fn age(&self, key: u64) -> Option<i64> {
        self.used.get(key).map(|used| (self.clock - used).div_euclid(CHUNK))
    }

    /// The ages of the known beginning of `chain`, whether believed resident or not: by the clock.
    pub fn ages(&self, chain: &Chain) -> Vec<i64> {
        let age = |&key: &u64| self.used.get(key).map(|used| self.clock - used);
        chain.keys().iter().map_while(age).collect()
    }

    /// Marks all of `chain` as used now, of which `held` chunks need not come, and returns the ages
    /// that its known beginning had.
    pub fn touch(&mut self, chain: &Chain, held: usize) -> Vec<i64> {
        let before = self.clock;
        let coming = (chain.chunks() - held) as i64;
        self.clock += coming * CHUNK + TICK;
        self.expected += coming;
        let mut ages = Vec::with_capacity(chain.chunks());
        // From the end, so that the bound of the map forgets ends before beginnings.
        for (position, &key) in chain.keys().iter().enumerate().rev() {
            match self.used.insert(key, self.clock - position as i64 * CHUNK) {
                Some(used) => ages.push(before - used),
                None => ages.clear(),
            }
        }
        ages.reverse();
        ages
    }

    /// What of `chain` was used at this time and not since was in use until now: an engine evicts
    /// nothing that it computes with. It matters where others move the clock, too.
    pub fn in_use_until_now(&mut self, chain: &Chain, used: i64) {
        if self.room == i64::MAX {
            return;
        }
        for (position, &key) in chain.keys().iter().enumerate().rev() {
            let ahead = position as i64 * CHUNK;
            if self.used.get(key) == Some(used - ahead) {
                self.used.insert(key, self.clock - ahead);
            }
        }
    }

    /// Of a prompt whose chunks had these `ages`, the one behind the first `found` was lost.
    pub fn lost(&mut self, found: usize, ages: &[i64]) {
        let lost_age = ages.get(found).map_or(i64::MAX, |age| age.div_euclid(CHUNK));
        self.reach = self.reach.min(lost_age);
    }

    /// The first `found` chunks of such a prompt were there, although fewer were believed to be.
    pub fn held(&mut self, found: usize, ages: &[i64]) {
        if let Some(last) = ages[..found.min(ages.len())].last() {
            self.reach = self.reach.max(last.div_euclid(CHUNK).saturating_add(1));
        }
    }

    /// So many chunks came into it, by whatever way, so many are in it, and for so many it has
    /// room, if it has shown that. What came and was not expected ages all that is there.
    pub fn told(&mut self, came: usize, live: usize, room: Option<usize>) {
        // What came untold does not come again.
        if std::mem::take(&mut self.is_untold) {
            self.expected = 0;
        }
        // What never comes must not hide for ever what others bring.
        let expected = self.expected.min(live as i64);
        let own = expected.min(came as i64);
        self.expected = expected - own;
        let others = (came as i64 - own).saturating_mul(CHUNK);
        self.clock = self.clock.saturating_add(others).min(CLOCK_MAX);
        self.room = room.map_or(i64::MAX, |chunks| (chunks + slack(chunks)) as i64);
    }

    /// Nothing is told of it for now.
    pub fn untold(&mut self) {
        (self.room, self.is_untold) = (i64::MAX, true);
    }

    /// Fewer chunks come than the clock says: so many were there already, or are not needed.
    pub fn come_fewer(&mut self, chunks: usize) {
        self.expected = (self.expected - chunks as i64).max(0);
    }

    /// Forgets everything, what was learned of its size as well.
    pub fn forget(&mut self) {
        self.used.clear();
        (self.reach, self.room, self.expected) = (i64::MAX, i64::MAX, 0);
    }

    /// Remembers at most so many chunks from now on.
    pub fn limit(&mut self, chunks: usize) {
        self.used.limit(chunks);
    }

    /// Chunks that are remembered of it.
    pub fn len(&self) -> usize {
        self.used.len()
    }
}

/// What others say has come moves the clock no further.
const CLOCK_MAX: i64 = i64::MAX / 2;

/// Is `found` so much less than what was predicted that something must have been lost?
pub fn is_less(found: usize, predicted: usize) -> bool {
    found + slack(predicted) <= predicted
}

/// Is `found` so much more that something must be there that was believed lost?
pub fn is_more(found: usize, predicted: usize) -> bool {
    found >= predicted + slack(predicted)
}

fn slack(predicted: usize) -> usize {
    SLACK_CHUNKS.max(predicted / 8)
}
