//! The staging memory and who waits for it: reservations of several blocks at once, all or nothing,
//! first come first served. This file knows blocks, waiters and deadlines.

use super::staging::{Block, FreeSpace};
use crate::lost::bytes_in;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Backing, RegionId, Span};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotStaged {
    #[error(
        "{needed_bytes} bytes of staging are needed, there are {staging_bytes}: ask for less or give more"
    )]
    TooLarge { needed_bytes: u64, staging_bytes: u64 },
    #[error("{limit} reservations wait for staging; no more may")]
    TooMany { limit: usize },
    #[error("no staging came free before the deadline")]
    Late,
    #[error("the store is closed")]
    Closed,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StagingUse {
    pub capacity_bytes: u64,
    /// Held by operations and by [`Staged`](super::Staged) layers.
    pub used_bytes: u64,
    /// Of these, bytes that lost operations may still touch.
    pub quarantined_bytes: u64,
    /// Reservations that wait.
    pub waiting: usize,
    /// Reservations that waited, since the start.
    pub waited: u64,
    /// Reservations that were late or one too many, since the start.
    pub refused: u64,
}

type OnReady = Box<dyn FnOnce(Result<Vec<StagingBlock>, NotStaged>) + Send>;

pub(super) struct Pool {
    region: RegionId,
    waiting_max: usize,
    memory: Arc<dyn Backing>,
    state: Mutex<State>,
}

struct State {
    space: FreeSpace,
    waiting: VecDeque<Waiter>,
    /// Blocks whose holder is gone while a lost operation may still touch them, by offset.
    lost: BTreeMap<u64, Lost>,
    closed: bool,
    waited: u64,
    refused: u64,
}

struct Waiter {
    lengths: Vec<u64>,
    deadline_us: Option<u64>,
    on_ready: OnReady,
}

struct Lost {
    block: Block,
    /// Bytes of it that are not quiet.
    bytes: u64,
}

/// A block of staging. Free again when dropped.
pub(super) struct StagingBlock {
    pool: Arc<Pool>,
    block: Block,
}

impl Pool {
    /// A pool over memory that is registered as `region`, for which so many reservations may wait.
    pub fn new(region: RegionId, memory: Arc<dyn Backing>, waiting_max: usize) -> Pool {
        let state = State {
            space: FreeSpace::new(memory.len() as u64),
            waiting: VecDeque::new(),
            lost: BTreeMap::new(),
            closed: false,
            waited: 0,
            refused: 0,
        };
        Pool { region, waiting_max, memory, state: Mutex::new(state) }
    }

    /// Reserves a block for each length, whole pages, now or when there is room. `on_ready` is
    /// called exactly once: on this thread at once, or on the one that gives staging back. Says
    /// whether it waits.
    pub fn reserve(
        self: &Arc<Pool>,
        lengths: Vec<u64>,
        deadline_us: Option<u64>,
        on_ready: impl FnOnce(Result<Vec<StagingBlock>, NotStaged>) + Send + 'static,
    ) -> bool {
        let mut state = self.state.lock();
        match self.blocks_now(&mut state, &lengths) {
            Ok(Some(blocks)) => {
                drop(state);
                on_ready(Ok(self.hold(blocks)));
                false
            }
            Ok(None) => {
                state.waited += 1;
                state.waiting.push_back(Waiter { lengths, deadline_us, on_ready: Box::new(on_ready) });
                true
            }
            Err(refused) => {
                state.refused += 1;
                drop(state);
                on_ready(Err(refused));
                false
            }
        }
    }

    /// Blocks, or nothing if they have to be waited for.
    fn blocks_now(&self, state: &mut State, lengths: &[u64]) -> Result<Option<Vec<Block>>, NotStaged> {
        if state.closed {
            return Err(NotStaged::Closed);
        }
        let needed_bytes = lengths.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let staging_bytes = self.memory.len() as u64;
        if needed_bytes > staging_bytes {
            return Err(NotStaged::TooLarge { needed_bytes, staging_bytes });
        }
        let blocks = if state.waiting.is_empty() { state.space.take_all(lengths) } else { None };
        if blocks.is_none() && state.waiting.len() >= self.waiting_max {
            return Err(NotStaged::TooMany { limit: self.waiting_max });
        }
        Ok(blocks)
    }

    /// When the first deadline of those who wait is.
    pub fn next_deadline_us(&self) -> Option<u64> {
        self.state.lock().waiting.iter().filter_map(|waiter| waiter.deadline_us).min()
    }

    /// Sends away those whose deadline has passed.
    pub fn expire(self: &Arc<Pool>, now_us: u64) {
        let mut state = self.state.lock();
        let is_late = |waiter: &Waiter| waiter.deadline_us.is_some_and(|deadline_us| deadline_us <= now_us);
        if !state.waiting.iter().any(is_late) {
            return;
        }
        let (late, waiting): (VecDeque<_>, VecDeque<_>) = state.waiting.drain(..).partition(is_late);
        state.waiting = waiting;
        state.refused += late.len() as u64;
        drop(state);
        late.into_iter().for_each(|waiter| (waiter.on_ready)(Err(NotStaged::Late)));
        // Whoever was behind them may fit.
        self.serve();
    }

    /// Sends everybody away, now and from now on.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|waiter| (waiter.on_ready)(Err(NotStaged::Closed)));
    }

    /// Bytes that were lost are touched by nobody any more.
    pub fn quiet(self: &Arc<Pool>, spans: &[Span]) {
        let mut state = self.state.lock();
        for span in spans.iter().filter(|span| span.region == self.region) {
            state.quiet(span);
        }
        drop(state);
        self.serve();
    }

    pub fn usage(&self) -> StagingUse {
        let state = self.state.lock();
        let capacity_bytes = self.memory.len() as u64;
        StagingUse {
            capacity_bytes,
            used_bytes: capacity_bytes - state.space.free_bytes(),
            quarantined_bytes: state.lost.values().map(|lost| lost.block.bytes).sum(),
            waiting: state.waiting.len(),
            waited: state.waited,
            refused: state.refused,
        }
    }

    /// Serves those who wait, in their order, as far as there is room.
    fn serve(self: &Arc<Pool>) {
        loop {
            let mut state = self.state.lock();
            let Some(first) = state.waiting.front() else { return };
            let lengths = first.lengths.clone();
            let Some(blocks) = state.space.take_all(&lengths) else { return };
            let Some(waiter) = state.waiting.pop_front() else { return };
            drop(state);
            (waiter.on_ready)(Ok(self.hold(blocks)));
        }
    }

    fn hold(self: &Arc<Pool>, blocks: Vec<Block>) -> Vec<StagingBlock> {
        blocks.into_iter().map(|block| StagingBlock { pool: Arc::clone(self), block }).collect()
    }

    fn give_back(self: &Arc<Pool>, block: Block) {
        let mut state = self.state.lock();
        state.space.give_back(block);
        let somebody_waits = !state.waiting.is_empty();
        drop(state);
        if somebody_waits {
            self.serve();
        }
    }
}

impl State {
    fn quiet(&mut self, span: &Span) {
        let before_end = self.lost.range_mut(..span.offset.saturating_add(span.len)).rev();
        let mut quiet = Vec::new();
        for (offset, lost) in before_end.take_while(|(_, lost)| lost.block.range().end > span.offset) {
            lost.bytes = lost.bytes.saturating_sub(bytes_in(span.region, &lost.block.range(), [span]));
            quiet.extend((lost.bytes == 0).then_some(*offset));
        }
        for lost in quiet.into_iter().filter_map(|offset| self.lost.remove(&offset)).collect::<Vec<_>>() {
            self.space.give_back(lost.block);
        }
    }
}

impl StagingBlock {
    /// `range` of the block as a span. The caller keeps it inside.
    pub fn span(&self, range: Range<u64>) -> Span {
        debug_assert!(range.start <= range.end && range.end <= self.block.bytes);
        Span::new(self.pool.region, self.block.offset + range.start, range.end - range.start)
    }

    /// `range` of the block, or nothing if it reaches outside. Only while no transfer writes it.
    pub fn slice(&self, range: Range<u64>) -> &[u8] {
        let Some((start, len)) = self.part(range) else { return &[] };
        // SAFETY: the part lies in the memory, which lives as long as the pool; the block is this
        // value's alone, no transfer writes it by the contract above, and mutable slices borrow the
        // value exclusively.
        unsafe { std::slice::from_raw_parts(self.pool.memory.as_ptr().add(start), len) }
    }

    /// The same, to be written. Only while no transfer uses it.
    pub fn slice_mut(&mut self, range: Range<u64>) -> &mut [u8] {
        let Some((start, len)) = self.part(range) else { return &mut [] };
        // SAFETY: as in `slice`, and the value is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pool.memory.as_ptr().add(start), len) }
    }

    fn part(&self, range: Range<u64>) -> Option<(usize, usize)> {
        let inside = range.start <= range.end && range.end <= self.block.bytes;
        let start = self.block.offset + range.start;
        inside.then_some((start as usize, (range.end - range.start) as usize))
    }

    /// Ends the hold after a transfer that failed: parts of the block that are quarantined keep it
    /// from being used again until they are [quiet](Pool::quiet).
    pub fn end(self, quarantined: &[Span]) {
        let pool = &self.pool;
        let block = self.block;
        let bytes = bytes_in(pool.region, &block.range(), quarantined);
        if bytes > 0 {
            let mut held = self;
            let block = std::mem::replace(&mut held.block, Block { offset: 0, bytes: 0 });
            held.pool.state.lock().lost.insert(block.offset, Lost { block, bytes });
        }
    }
}

impl Drop for StagingBlock {
    fn drop(&mut self) {
        if self.block.bytes > 0 {
            self.pool.give_back(self.block);
        }
    }
}

impl std::fmt::Debug for StagingBlock {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("StagingBlock").field(&self.block).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::{HostBuffer, Limits, MoverThread, Place};
    use std::sync::mpsc::{Receiver, channel};

    const PAGE: u64 = 4096;

    fn pool(pages: u64) -> Arc<Pool> {
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let memory = Arc::new(HostBuffer::new((pages * PAGE) as usize));
        let region = mover.handle().register(Place::Host(0), memory.clone()).unwrap();
        Arc::new(Pool::new(region, memory, 3))
    }

    type Ready = Receiver<Result<Vec<StagingBlock>, NotStaged>>;

    fn reserve(pool: &Arc<Pool>, pages: &[u64], deadline_us: Option<u64>) -> Ready {
        let (sender, receiver) = channel();
        let lengths = pages.iter().map(|pages| pages * PAGE).collect();
        pool.reserve(lengths, deadline_us, move |ready| drop(sender.send(ready)));
        receiver
    }

    fn refusal(ready: &Ready) -> NotStaged {
        ready.try_recv().unwrap().unwrap_err()
    }

    fn got(ready: &Ready) -> Option<Vec<StagingBlock>> {
        ready.try_recv().ok().map(|held| held.unwrap())
    }

    #[test]
    fn nobody_holds_a_part_of_what_it_asked_for_and_nobody_overtakes() {
        let pool = pool(10);
        let first = got(&reserve(&pool, &[4, 4], None)).unwrap();
        let second = reserve(&pool, &[2, 4], None);
        let third = reserve(&pool, &[1], None);
        assert!(got(&second).is_none() && got(&third).is_none());
        assert_eq!(pool.usage().used_bytes, 8 * PAGE, "those who wait hold nothing");
        drop(first);
        let second = got(&second).unwrap();
        assert!(got(&third).is_some());
        drop(second);
        assert_eq!(
            pool.usage(),
            StagingUse { capacity_bytes: 10 * PAGE, waited: 2, ..StagingUse::default() }
        );
    }

    #[test]
    fn who_waits_too_long_is_told_and_those_behind_are_served() {
        let pool = pool(10);
        let first = got(&reserve(&pool, &[8], None)).unwrap();
        let late = reserve(&pool, &[3], Some(100));
        let small = reserve(&pool, &[2], Some(200));
        pool.expire(99);
        assert_eq!((pool.next_deadline_us(), got(&small).is_none()), (Some(100), true));
        pool.expire(100);
        assert_eq!(refusal(&late), NotStaged::Late);
        assert!(got(&small).is_some());
        drop(first);
    }

    #[test]
    fn as_many_wait_as_may_and_one_more_is_told_how_many_may() {
        let pool = pool(4);
        let held = got(&reserve(&pool, &[4], None));
        let waiting = [0; 3].map(|_| reserve(&pool, &[1], None));
        assert_eq!(refusal(&reserve(&pool, &[1], None)), NotStaged::TooMany { limit: 3 });
        drop(held);
        assert!(waiting.iter().all(|waiting| got(waiting).is_some()));
    }

    #[test]
    fn what_can_never_be_or_comes_after_the_end_is_refused_at_once() {
        let pool = pool(4);
        assert!(matches!(refusal(&reserve(&pool, &[3, 2], None)), NotStaged::TooLarge { .. }));
        let held = got(&reserve(&pool, &[4], None));
        let waiting = reserve(&pool, &[1], None);
        pool.close();
        assert_eq!(refusal(&waiting), NotStaged::Closed);
        assert_eq!(refusal(&reserve(&pool, &[1], None)), NotStaged::Closed);
        drop(held);
    }

    #[test]
    fn quarantined_staging_is_used_again_only_when_all_of_it_is_quiet() {
        let pool = pool(4);
        let mut held = got(&reserve(&pool, &[2, 2], None)).unwrap();
        let spans = [held[0].span(0..PAGE), held[0].span(PAGE..2 * PAGE)];
        held.remove(0).end(&spans);
        held.remove(0).end(&spans);
        assert_eq!(pool.usage().quarantined_bytes, 2 * PAGE);
        let waiting = reserve(&pool, &[4], None);
        pool.quiet(&spans[..1]);
        assert!(got(&waiting).is_none());
        pool.quiet(&spans[1..]);
        assert!(got(&waiting).is_some());
    }

    #[test]
    fn blocks_that_one_lost_operation_touches_are_all_kept_until_it_is_quiet() {
        let pool = pool(6);
        let mut held = got(&reserve(&pool, &[2, 2, 2], None)).unwrap();
        assert_eq!(held[1].span(0..PAGE).offset, held[0].span(0..PAGE).offset + 2 * PAGE, "side by side");
        // They were read into from slots side by side: one I/O, and one span.
        let span = Span::new(pool.region, held[0].span(0..PAGE).offset + PAGE, 3 * PAGE);
        held.drain(..).for_each(|held| held.end(&[span]));
        assert_eq!((pool.usage().used_bytes, pool.usage().quarantined_bytes), (4 * PAGE, 4 * PAGE));
        pool.quiet(&[span]);
        assert_eq!((pool.usage().used_bytes, pool.usage().quarantined_bytes), (0, 0));
    }
}
