//! Where everything lies in a ring's memory, in words of 64 bits. `docs/reference/ring.md` has the
//! same as a diagram of bytes.
//!
//! A ring has *posted* slots, which its host producer fills in turn, and *armed* slots, each of
//! which somebody else publishes later and in any order: a GPU's kernel or a write in its stream.
//! Every slot has room of its own for contexts and for their results, so that nothing but the slot
//! has to be found free before a request is written.

use crate::atomics::{AtomicU64, Ordering};
use thiserror::Error;

/// What the first word says: `FBRING` and the version of all of this.
pub const MAGIC: u64 = 0x4642_5249_4e47_0002;
/// Contexts of a request at most.
pub const CONTEXTS_MAX: u16 = 256;
/// Slots of a kind at most.
pub const SLOTS_MAX: u16 = 1024;
/// The header is a page. Of that loom models what is used.
pub const HEADER_WORDS: usize = if cfg!(loom) { 48 } else { 512 };
pub const REQUEST_WORDS: usize = 8;
pub const CONTEXT_WORDS: usize = 2;
pub const RESULT_WORDS: usize = 2;
pub const COMPLETION_WORDS: usize = 4;

/// Words of the header. Those that change have a cache line each, and one writer.
const SIZES: usize = 1;
const EPOCH: usize = 2;
const HEARTBEAT: usize = 8;
const CONSUMER_ASLEEP: usize = 16;
const CLOSED: usize = 24;
const PRODUCER_ASLEEP: usize = 32;
const ARMED: usize = 40;

/// How many slots a ring has, and how many contexts each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    posted: u16,
    armed: u16,
    contexts: u16,
}

/// Why a ring is not laid out so, or memory is no ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoRing {
    #[error("{what} must be a power of two from 1 to {limit}, not {value}")]
    Size {
        /// The posted slots, or the contexts of a slot.
        what: &'static str,
        value: u16,
        limit: u16,
    },
    #[error("armed slots must be 0 to {SLOTS_MAX}, not {value}")]
    Armed { value: u16 },
    #[error("the first word is {word:#018x}; a ring of this version has {MAGIC:#018x}")]
    Magic { word: u64 },
    #[error("{bytes} bytes of memory; the ring has {needed}")]
    Short { bytes: u64, needed: u64 },
}

impl Layout {
    pub fn new(posted: u16, armed: u16, contexts: u16) -> Result<Layout, NoRing> {
        let is_size = |value: u16, limit| value.is_power_of_two() && value <= limit;
        if !is_size(posted, SLOTS_MAX) {
            return Err(NoRing::Size { what: "posted slots", value: posted, limit: SLOTS_MAX });
        }
        if !is_size(contexts, CONTEXTS_MAX) {
            return Err(NoRing::Size { what: "contexts", value: contexts, limit: CONTEXTS_MAX });
        }
        if armed > SLOTS_MAX {
            return Err(NoRing::Armed { value: armed });
        }
        Ok(Layout { posted, armed, contexts })
    }

    /// Slots that are filled in turn.
    pub fn posted(&self) -> u16 {
        self.posted
    }

    /// Slots that are published in any order.
    pub fn armed(&self) -> u16 {
        self.armed
    }

    /// Slots of both kinds: the posted ones come first.
    pub fn slots(&self) -> u16 {
        self.posted + self.armed
    }

    /// Contexts of a slot.
    pub fn contexts(&self) -> u16 {
        self.contexts
    }

    /// Completions that the ring has room for. No slot has more than one that was not taken, so
    /// that they never run out.
    pub fn completions(&self) -> u16 {
        self.slots().next_power_of_two()
    }

    pub fn words(&self) -> usize {
        self.completion(0) + usize::from(self.completions()) * COMPLETION_WORDS
    }

    pub fn bytes(&self) -> u64 {
        (self.words() * size_of::<u64>()) as u64
    }

    /// The first word of a slot's request.
    pub fn request(&self, slot: u16) -> usize {
        HEADER_WORDS + usize::from(slot) * REQUEST_WORDS
    }

    /// The first word of a context of a slot.
    pub fn context(&self, slot: u16, context: u16) -> usize {
        let before = usize::from(slot) * usize::from(self.contexts) + usize::from(context);
        self.request(self.slots()) + before * CONTEXT_WORDS
    }

    /// The first word of the result of a slot's context.
    pub fn result(&self, slot: u16, context: u16) -> usize {
        let before = usize::from(slot) * usize::from(self.contexts) + usize::from(context);
        self.context(self.slots(), 0) + before * RESULT_WORDS
    }

    /// The first word of the completion of this number.
    pub fn completion(&self, number: u64) -> usize {
        let at = (number % u64::from(self.completions())) as usize;
        self.result(self.slots(), 0) + at * COMPLETION_WORDS
    }
}

/// The page that both ends share. The consumer writes it, but for the words that say what the
/// producer does.
#[derive(Debug, Clone, Copy)]
pub struct Header<'a>(&'a [AtomicU64]);

impl<'a> Header<'a> {
    /// Makes a ring of zeroed words. Whoever maps it later [finds](Header::find) it.
    pub fn make(ring: &'a [AtomicU64], layout: Layout, epoch: u64) -> Result<Header<'a>, NoRing> {
        let header = Header(has_room(ring, layout)?);
        let Layout { posted, armed, contexts } = layout;
        let sizes = u64::from(posted) | u64::from(armed) << 16 | u64::from(contexts) << 32;
        ring[SIZES].store(sizes, Ordering::Relaxed);
        ring[EPOCH].store(epoch, Ordering::Relaxed);
        ring[0].store(MAGIC, Ordering::Release);
        Ok(header)
    }

    /// The header of memory that came from elsewhere, and how the ring is laid out.
    pub fn find(ring: &'a [AtomicU64]) -> Result<(Header<'a>, Layout), NoRing> {
        let bytes = size_of_val(ring) as u64;
        let short = NoRing::Short { bytes, needed: (HEADER_WORDS * size_of::<u64>()) as u64 };
        let first = ring.first().filter(|_| ring.len() >= HEADER_WORDS).ok_or(short)?;
        let word = first.load(Ordering::Acquire);
        if word != MAGIC {
            return Err(NoRing::Magic { word });
        }
        let sizes = ring[SIZES].load(Ordering::Relaxed);
        let layout = Layout::new(sizes as u16, (sizes >> 16) as u16, (sizes >> 32) as u16)?;
        Ok((Header(has_room(ring, layout)?), layout))
    }

    /// Of a ring that was made or found before.
    pub fn of(ring: &'a [AtomicU64]) -> Header<'a> {
        Header(ring)
    }

    /// Requests of another epoch are those of another life of the ring.
    pub fn epoch(&self) -> u64 {
        self.0[EPOCH].load(Ordering::Relaxed)
    }

    /// Counts up while the consumer is awake.
    pub fn heartbeat(&self) -> u64 {
        self.0[HEARTBEAT].load(Ordering::Relaxed)
    }

    pub fn beat(&self) {
        self.0[HEARTBEAT].fetch_add(1, Ordering::Relaxed);
    }

    /// Says that nothing is taken from this ring any more, and nothing is told.
    pub fn close(&self) {
        self.0[CLOSED].store(1, Ordering::Release);
    }

    pub fn is_closed(&self) -> bool {
        self.0[CLOSED].load(Ordering::Acquire) != 0
    }

    /// Whether the consumer sleeps; a request wakes it then.
    pub fn consumer_asleep(&self) -> &'a AtomicU64 {
        &self.0[CONSUMER_ASLEEP]
    }

    /// Whether who waits for completions sleeps; a completion wakes it then.
    pub fn producer_asleep(&self) -> &'a AtomicU64 {
        &self.0[PRODUCER_ASLEEP]
    }

    /// How many armed slots may be published at any time. A GPU wakes nobody: the consumer looks
    /// at these by itself.
    pub fn armed(&self) -> u64 {
        self.0[ARMED].load(Ordering::Acquire)
    }

    pub fn set_armed(&self, slots: u64) {
        self.0[ARMED].store(slots, Ordering::Release);
    }
}

fn has_room(ring: &[AtomicU64], layout: Layout) -> Result<&[AtomicU64], NoRing> {
    let (bytes, needed) = (size_of_val(ring) as u64, layout.bytes());
    if ring.len() < layout.words() { Err(NoRing::Short { bytes, needed }) } else { Ok(ring) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn memory(layout: Layout) -> Vec<AtomicU64> {
        (0..layout.words()).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_ring_is_found_as_it_was_made() {
        for (posted, armed, contexts) in [(1, 0, 1), (64, 64, 256), (1024, 1024, 256), (2, 3, 4)] {
            let layout = Layout::new(posted, armed, contexts).unwrap();
            let ring = memory(layout);
            Header::make(&ring, layout, 9).unwrap();
            let (header, found) = Header::find(&ring).unwrap();
            assert_eq!((found, header.epoch()), (layout, 9));
        }
    }

    #[test]
    fn memory_that_is_too_short_or_of_another_version_is_no_ring() {
        let layout = Layout::new(4, 4, 8).unwrap();
        let ring = memory(layout);
        let needed = layout.bytes();
        let short = &ring[..ring.len() - 1];
        assert_eq!(Header::make(short, layout, 1).unwrap_err(), NoRing::Short { bytes: needed - 8, needed });
        assert_eq!(Header::find(&ring).unwrap_err(), NoRing::Magic { word: 0 });
        Header::make(&ring, layout, 1).unwrap();
        assert_eq!(Header::find(short).unwrap_err(), NoRing::Short { bytes: needed - 8, needed });
        assert!(matches!(Header::find(&ring[..8]), Err(NoRing::Short { bytes: 64, .. })));
        ring[SIZES].store(3, Ordering::Relaxed);
        let refused = Header::find(&ring).unwrap_err();
        assert_eq!(refused.to_string(), "posted slots must be a power of two from 1 to 1024, not 3");
        ring[0].store(MAGIC + 1, Ordering::Relaxed);
        assert_eq!(Header::find(&ring).unwrap_err(), NoRing::Magic { word: MAGIC + 1 });
    }

    #[test]
    fn nothing_of_a_ring_lies_upon_anything_else() {
        let layout = Layout::new(4, 3, 2).unwrap();
        let mut words = vec![0; layout.words()];
        let mut take = |at: usize, count| words[at..at + count].iter_mut().for_each(|word| *word += 1);
        take(0, HEADER_WORDS);
        for slot in 0..layout.slots() {
            take(layout.request(slot), REQUEST_WORDS);
            for context in 0..layout.contexts() {
                take(layout.context(slot, context), CONTEXT_WORDS);
                take(layout.result(slot, context), RESULT_WORDS);
            }
        }
        (0..layout.completions()).for_each(|number| take(layout.completion(number.into()), COMPLETION_WORDS));
        assert!(words.iter().all(|taken| *taken == 1), "{words:?}");
    }
}
