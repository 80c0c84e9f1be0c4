//! The ring through which an engine asks a node's relay to copy, and hears that it is over: words
//! of memory that both processes have.
//!
//! A file of [`words`] words: one page of [header](Header), then [`QUEUE_WORDS`] for each queue. A
//! queue has one asker and one answerer, which takes requests in order and answers them in order.
//! Request `n` is written into slot `n % SLOTS` and counts once the slot's first word is `n + 1`;
//! so does its answer in the same slot. A slot is used again once its request was answered, so
//! neither side ever has to believe a position that the other one states. The answerer copies every
//! word once before it looks at it: the asker may be anybody, and write what it likes at any time.
//! The loom model of falling asleep is `tests/loom_ring.rs`.

use super::atomics::{AtomicU64, Ordering, fence};
use thiserror::Error;

/// Requests of a queue that have not been answered, at most.
pub const SLOTS: u64 = 8;
/// Runs of a request, at most.
pub const RUNS_MAX: usize = 124;
pub const QUEUE_WORDS: usize = SLOTS as usize * SLOT_WORDS;

/// What the first word says: a name and the version of all of this.
const MAGIC: u64 = 0x4642_5952_494e_4702;
const SLOT_WORDS: usize = 512;
const HEADER_WORDS: usize = 512;

/// Words of a slot. What the asker writes and what the answerer writes lie in different cache
/// lines.
const ASKED: usize = 0;
const COUNT: usize = 1;
const ANSWERED: usize = 8;
const STATUS: usize = 9;
const RUNS: usize = 16;
const RUN_WORDS: usize = 4;

/// Words of the header, one to a cache line.
const BEAT: usize = 8;
const ASLEEP: usize = 16;
const QUIET: usize = 24;
/// How many copies of its own the engine has under way on its GPU's PCIe link, in either direction.
/// The engine writes it.
const OWN: [usize; 2] = [32, 40];

/// Contiguous bytes of host memory and of staging. The queue says which of them are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The memory, by the number under which the node was given it.
    pub memory: u64,
    /// First byte of it.
    pub offset: u64,
    /// First byte of the queue's staging.
    pub staging: u64,
    pub bytes: u64,
}

/// What an asker must not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Violation {
    #[error("a slot's sequence word is {word}; allowed is {expected}, or {before} until it is written")]
    Sequence {
        word: u64,
        /// The number of the request that belongs there, plus one.
        expected: u64,
        /// What it said before.
        before: u64,
    },
    #[error("more than {SLOTS} requests without an answer")]
    Overrun,
    #[error("a request of {runs} runs; allowed are 1 to {RUNS_MAX}")]
    Runs { runs: u64 },
    #[error("{bytes} bytes at {offset} of {what}, which has {limit_bytes}")]
    Bounds {
        /// Staging, or the memory.
        what: &'static str,
        offset: u64,
        bytes: u64,
        limit_bytes: u64,
    },
    #[error("memory {memory} was never given, or was taken back")]
    Memory { memory: u64 },
}

pub fn words(queues: usize) -> usize {
    HEADER_WORDS + queues * QUEUE_WORDS
}

pub fn queue(ring: &[AtomicU64], index: usize) -> &[AtomicU64] {
    let start = HEADER_WORDS + index * QUEUE_WORDS;
    &ring[start..start + QUEUE_WORDS]
}

/// The page that all queues of a ring share. Only the node writes it, but for the words that say
/// what the engine does itself.
#[derive(Debug, Clone, Copy)]
pub struct Header<'a>(&'a [AtomicU64]);

impl<'a> Header<'a> {
    /// The header of a ring that the node has just made.
    pub fn make(ring: &'a [AtomicU64]) -> Header<'a> {
        ring[0].store(MAGIC, Ordering::Release);
        Header(ring)
    }

    /// The header of a ring that was received, if it is one of this version with so many queues.
    pub fn find(ring: &'a [AtomicU64], queues: usize) -> Option<Header<'a>> {
        (ring.len() >= words(queues) && ring[0].load(Ordering::Acquire) == MAGIC).then_some(Header(ring))
    }

    pub fn of(ring: &'a [AtomicU64]) -> Header<'a> {
        Header(ring)
    }

    pub fn beat(&self) {
        self.0[BEAT].fetch_add(1, Ordering::Relaxed);
    }

    /// Changes while the node's thread is awake.
    pub fn beats(&self) -> u64 {
        self.0[BEAT].load(Ordering::Relaxed)
    }

    /// Announces sleep, or its end. After announcing it the node looks at all queues once more.
    pub fn set_asleep(&self, asleep: bool) {
        self.0[ASLEEP].store(u64::from(asleep), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether a request that was written before needs a ring of the bell to be seen.
    pub fn is_asleep(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0[ASLEEP].load(Ordering::SeqCst) != 0
    }

    /// Says that the engine begins to copy on its GPU's own PCIe link.
    pub fn begin_own(&self, direction: usize) {
        self.0[OWN[direction]].fetch_add(1, Ordering::Relaxed);
    }

    pub fn end_own(&self, direction: usize) {
        self.0[OWN[direction]].fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether the engine copies on its GPU's own PCIe link, as far as it says so.
    pub fn is_own(&self, direction: usize) -> bool {
        self.0[OWN[direction]].load(Ordering::Relaxed) != 0
    }

    /// Says that nothing of this ring's requests is under way, and never will be.
    pub fn set_quiet(&self) {
        self.0[QUIET].store(1, Ordering::Release);
    }

    pub fn is_quiet(&self) -> bool {
        self.0[QUIET].load(Ordering::Acquire) != 0
    }
}

/// The engine's end of a queue.
#[derive(Debug, Default)]
pub struct Asker {
    asked: u64,
}

impl Asker {
    /// Writes a request and gives its number. `None` if it has no runs or too many, or too few
    /// answers have come.
    pub fn ask(&mut self, queue: &[AtomicU64], runs: &[Run]) -> Option<u64> {
        let number = self.asked;
        let is_free = number < SLOTS || answer(queue, number - SLOTS).is_some();
        if runs.is_empty() || runs.len() > RUNS_MAX || !is_free {
            return None;
        }
        let slot = slot(queue, number);
        for (run, words) in runs.iter().zip(slot[RUNS..].chunks_exact(RUN_WORDS)) {
            let values = [run.memory, run.offset, run.staging, run.bytes];
            words.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        }
        slot[COUNT].store(runs.len() as u64, Ordering::Relaxed);
        slot[ASKED].store(number + 1, Ordering::Release);
        self.asked += 1;
        Some(number)
    }
}

/// How a request ended, if it has: 0, or the driver's error.
pub fn answer(queue: &[AtomicU64], number: u64) -> Option<u64> {
    let slot = slot(queue, number);
    let answered = slot[ANSWERED].load(Ordering::Acquire) == number + 1;
    answered.then(|| slot[STATUS].load(Ordering::Relaxed))
}

/// The node's end of a queue.
#[derive(Debug, Default)]
pub struct Answerer {
    taken: u64,
    answered: u64,
}

impl Answerer {
    /// Takes the next request, if there is one: its runs are put into `runs`, as they were said.
    pub fn take(&mut self, queue: &[AtomicU64], runs: &mut Vec<Run>) -> Result<bool, Violation> {
        let slot = slot(queue, self.taken);
        let (expected, before) = (self.taken + 1, (self.taken + 1).saturating_sub(SLOTS));
        let word = slot[ASKED].load(Ordering::Acquire);
        if word == before {
            return Ok(false);
        }
        if word != expected {
            return Err(Violation::Sequence { word, expected, before });
        }
        if self.taken - self.answered == SLOTS {
            return Err(Violation::Overrun);
        }
        let count = slot[COUNT].load(Ordering::Relaxed);
        if count == 0 || count > RUNS_MAX as u64 {
            return Err(Violation::Runs { runs: count });
        }
        runs.clear();
        runs.extend(slot[RUNS..].chunks_exact(RUN_WORDS).take(count as usize).map(|words| {
            let value = |index: usize| words[index].load(Ordering::Relaxed);
            Run { memory: value(0), offset: value(1), staging: value(2), bytes: value(3) }
        }));
        self.taken += 1;
        Ok(true)
    }

    /// Whether there is something to be taken, if only nonsense.
    pub fn is_asked(&self, queue: &[AtomicU64]) -> bool {
        let before = (self.taken + 1).saturating_sub(SLOTS);
        slot(queue, self.taken)[ASKED].load(Ordering::Acquire) != before
    }

    /// Answers the oldest request that was taken and not answered.
    pub fn answer(&mut self, queue: &[AtomicU64], status: u64) {
        debug_assert!(self.answered < self.taken, "only what was taken is answered");
        let slot = slot(queue, self.answered);
        slot[STATUS].store(status, Ordering::Relaxed);
        slot[ANSWERED].store(self.answered + 1, Ordering::Release);
        self.answered += 1;
    }
}

impl Run {
    /// Checks the run against the lengths of its memory and of the queue's staging.
    pub fn check(&self, memory_bytes: u64, staging_bytes: u64) -> Result<(), Violation> {
        let bytes = self.bytes;
        let inside = |what, offset: u64, limit_bytes| match offset.checked_add(bytes) {
            Some(end) if bytes > 0 && end <= limit_bytes => Ok(()),
            _ => Err(Violation::Bounds { what, offset, bytes, limit_bytes }),
        };
        inside("staging", self.staging, staging_bytes)?;
        inside("memory", self.offset, memory_bytes)
    }
}

fn slot(queue: &[AtomicU64], number: u64) -> &[AtomicU64] {
    let start = (number % SLOTS) as usize * SLOT_WORDS;
    &queue[start..start + SLOT_WORDS]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn ring(queues: usize) -> Vec<AtomicU64> {
        (0..words(queues)).map(|_| AtomicU64::new(0)).collect()
    }

    fn run(seed: u64) -> Run {
        Run { memory: seed, offset: seed << 1, staging: seed << 2, bytes: seed << 3 }
    }

    #[test]
    fn a_ring_of_another_version_or_length_is_not_used() {
        let ring = ring(2);
        assert!(Header::find(&ring, 2).is_none());
        Header::make(&ring);
        assert!(Header::find(&ring, 2).is_some());
        assert!(Header::find(&ring, 3).is_none());
        ring[0].store(MAGIC + 1, Ordering::Relaxed);
        assert!(Header::find(&ring, 2).is_none());
    }

    #[test]
    fn a_run_that_leaves_its_memory_or_its_staging_is_refused() {
        let good = Run { memory: 0, offset: 90, staging: 40, bytes: 10 };
        assert_eq!(good.check(100, 50), Ok(()));
        for (offset, staging, bytes) in
            [(91, 40, 10), (90, 41, 10), (90, 40, 0), (u64::MAX, 40, 2), (90, u64::MAX, 2), (0, 0, u64::MAX)]
        {
            let bad = Run { offset, staging, bytes, ..good };
            assert!(matches!(bad.check(100, 50), Err(Violation::Bounds { .. })), "{bad:?}");
        }
    }

    #[test]
    fn requests_cross_threads_whole_and_in_order() {
        const COUNT: u64 = 20_000;
        let ring = ring(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (queue, mut answerer, mut runs) = (queue(&ring, 0), Answerer::default(), Vec::new());
                let mut taken = 0;
                while taken < COUNT {
                    if answerer.take(queue, &mut runs).unwrap() {
                        assert_eq!(runs, vec![run(taken); taken as usize % 3 + 1]);
                        answerer.answer(queue, taken ^ 1);
                        taken += 1;
                    } else {
                        std::thread::yield_now();
                    }
                }
            });
            let (queue, mut asker) = (queue(&ring, 0), Asker::default());
            for expected in 0..COUNT {
                let runs = vec![run(expected); expected as usize % 3 + 1];
                let number = loop {
                    if let Some(number) = asker.ask(queue, &runs) {
                        break number;
                    }
                    std::thread::yield_now();
                };
                assert_eq!(number, expected);
                if expected % 5 == 0 {
                    while answer(queue, number).is_none() {
                        std::thread::yield_now();
                    }
                    assert_eq!(answer(queue, number), Some(number ^ 1));
                }
            }
        });
    }

    #[derive(Debug, Clone)]
    enum Step {
        Ask(usize),
        Take,
        Answer(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..RUNS_MAX + 3).prop_map(Step::Ask),
            Just(Step::Take),
            any::<u64>().prop_map(Step::Answer)
        ]
    }

    proptest! {
        #[test]
        fn a_request_queue_is_a_bounded_queue_with_answers(steps in prop::collection::vec(step(), 1..200)) {
            let ring = ring(3);
            let queue = queue(&ring, 1);
            let (mut asker, mut answerer, mut runs) = (Asker::default(), Answerer::default(), Vec::new());
            let (mut waiting, mut taken, mut answers) = (VecDeque::new(), 0_u64, Vec::new());
            let mut asked = 0_u64;
            for step in steps {
                match step {
                    Step::Ask(count) => {
                        let said: Vec<Run> = (0..count as u64).map(|nth| run(asked * 1000 + nth)).collect();
                        let room = asked - (answers.len() as u64) < SLOTS;
                        let fits = (1..=RUNS_MAX).contains(&count) && room;
                        prop_assert_eq!(asker.ask(queue, &said), fits.then_some(asked));
                        if fits {
                            waiting.push_back(said);
                            asked += 1;
                        }
                    }
                    Step::Take => match waiting.pop_front() {
                        Some(said) => {
                            prop_assert_eq!(answerer.take(queue, &mut runs), Ok(true));
                            prop_assert_eq!(&runs, &said);
                            taken += 1;
                        }
                        None => prop_assert_eq!(answerer.take(queue, &mut runs), Ok(false)),
                    },
                    Step::Answer(status) if taken > answers.len() as u64 => {
                        answerer.answer(queue, status);
                        answers.push(status);
                    }
                    Step::Answer(_) => {}
                }
                for (number, status) in answers.iter().enumerate().rev().take(SLOTS as usize) {
                    prop_assert_eq!(answer(queue, number as u64), Some(*status));
                }
                for number in answers.len() as u64..asked {
                    prop_assert_eq!(answer(queue, number), None);
                }
            }
        }

        #[test]
        fn whatever_an_asker_writes_is_taken_as_it_is_or_refused(
            writes in prop::collection::vec((0..QUEUE_WORDS, prop_oneof![0..20_u64, any::<u64>()]), 0..300),
            firsts in prop::collection::vec((0..SLOTS as usize, 0..20_u64, 0..200_u64), 0..60),
        ) {
            let ring = ring(1);
            let queue = queue(&ring, 0);
            let (mut answerer, mut runs, mut open) = (Answerer::default(), Vec::new(), 0);
            let words = writes.into_iter().map(|(at, value)| vec![(at, value)]);
            let slots = firsts.into_iter().map(|(slot, asked, count)| {
                vec![(slot * SLOT_WORDS + COUNT, count), (slot * SLOT_WORDS + ASKED, asked)]
            });
            for written in words.zip(slots).flat_map(|(word, slot)| [word, slot]) {
                for (at, value) in written {
                    queue[at].store(value, Ordering::Relaxed);
                }
                match answerer.take(queue, &mut runs) {
                    Ok(true) => {
                        prop_assert!((1..=RUNS_MAX).contains(&runs.len()));
                        open += 1;
                    }
                    Ok(false) => {}
                    Err(_) => break,
                }
                prop_assert!(open <= SLOTS);
                if open == SLOTS {
                    answerer.answer(queue, 0);
                    open -= 1;
                }
            }
        }
    }
}
