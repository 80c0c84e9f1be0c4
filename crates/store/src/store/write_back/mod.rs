//! Write-back: chunks that memory has taken in are copied to the disk in slack, so that they
//! outlive memory and the process. This file is glue: `queue.rs` says what is written when, the
//! disk tier writes.
//!
//! A chunk is held in memory while it is written, by a read as any other. What the queue gives up
//! is not lost as long as memory has it: its next use offers it again.

mod losses;
mod queue;

pub use queue::WriteBackStat;
pub(super) use queue::{Dirty, Written};

use super::Shared;
use crate::admission::{AdmissionConfig, Chunk, Policy};
use crate::disk::PacerLimits;
use crate::ssd::{NotWritten, SsdWriteEnd};
use crate::stat::Refused;
use crate::tier::{Read, ReadEnd};
use forebay_kv::ChunkId;
use forebay_transfer::{Class, LogGate, Span};
use losses::Losses;
use parking_lot::{Condvar, Mutex};
use queue::Queue;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What is written to the disk, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteBackConfig {
    /// Which chunks are written at all.
    pub admission: AdmissionConfig,
    /// How many chunks are written at a time, given how long reads take meanwhile, and how long a
    /// chunk may wait.
    pub pacer: PacerLimits,
    /// Chunks that may wait at most.
    pub queue_chunks: usize,
}

impl WriteBackConfig {
    /// Up to 8 chunks at a time while reads take less than 2 ms beside 1 ms per MB; a chunk waits
    /// 10 s at most, and 65,536 chunks do. There is no endurance budget.
    pub fn new(policy: Policy, memory_bytes: u64, ssd_bytes: u64, chunk_bytes: u64) -> WriteBackConfig {
        WriteBackConfig {
            admission: AdmissionConfig {
                policy,
                memory_bytes,
                ssd_bytes,
                ssd_chunks: ssd_bytes / chunk_bytes.max(1),
                endurance_bytes_per_day: None,
            },
            pacer: PacerLimits {
                lots_min: 1,
                lots_max: 8,
                read_goal_us: 2_000,
                read_goal_bytes_per_s: 1_000_000_000,
                epoch_us: EPOCH.as_micros() as u64,
                dirty_age_max_us: 10_000_000,
            },
            queue_chunks: 65_536,
        }
    }
}

/// How often the number of writes at a time is judged, and looked at while chunks wait.
const EPOCH: Duration = Duration::from_millis(100);

/// The queue as threads share it.
#[derive(Debug)]
pub(super) struct WriteBack {
    state: Mutex<State>,
    /// There is something to write, room to write it, or nothing any more.
    changed: Condvar,
    lost: LogGate,
    slow: LogGate,
    over_budget: LogGate,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    closed: bool,
}

impl WriteBack {
    pub fn new(config: &WriteBackConfig) -> WriteBack {
        let state = State { queue: Queue::new(config), closed: false };
        WriteBack {
            state: Mutex::new(state),
            changed: Condvar::new(),
            lost: LogGate::new(),
            slow: LogGate::new(),
            over_budget: LogGate::new(),
        }
    }

    /// Notes that a request used a chain of chunks.
    pub fn used(&self, chain: &[Chunk]) {
        self.state.lock().queue.used(chain);
    }

    /// Offers chunks that memory has and the disk has not, parents first.
    pub fn offer(&self, now_us: u64, chunks: impl IntoIterator<Item = Dirty>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        let before = state.queue.stat().verdicts.over_budget_bytes;
        let waits = chunks.into_iter().filter(|dirty| state.queue.offer(now_us, *dirty)).count();
        let over_budget_bytes = state.queue.stat().verdicts.over_budget_bytes - before;
        self.tell_losses(&mut state);
        drop(state);
        if waits > 0 {
            self.changed.notify_all();
        }
        if over_budget_bytes > 0
            && let Some(repeated) = self.over_budget.pass()
        {
            tracing::warn!(over_budget_bytes, repeated, "SSD endurance budget is used up");
        }
    }

    /// Says in the log what was lost, once a minute.
    fn tell_losses(&self, state: &mut State) {
        if state.queue.has_losses() && self.lost.pass().is_some() {
            state.queue.take_losses().iter().for_each(Losses::tell);
        }
    }

    /// A read from the disk ended.
    pub fn read_ended(&self, now_us: u64, took_us: u64, bytes: u64) {
        let mut state = self.state.lock();
        let before = state.queue.window();
        state.queue.read_ended(now_us, took_us, bytes);
        let window = state.queue.window();
        drop(state);
        if window < before
            && let Some(repeated) = self.slow.pass()
        {
            tracing::warn!(took_us, bytes, window, repeated, "SSD reads are slow");
        }
    }

    pub fn stat(&self) -> WriteBackStat {
        self.state.lock().queue.stat()
    }

    /// Waits until nothing waits or is being written.
    pub fn drain(&self) {
        let mut state = self.state.lock();
        while !state.queue.is_idle() && !state.closed {
            self.changed.wait(&mut state);
        }
    }

    /// Ends the thread. What waits is forgotten.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let losses = state.queue.take_losses();
        drop(state);
        self.changed.notify_all();
        losses.iter().for_each(Losses::tell);
    }

    /// Waits for a chunk to write. `None` when there will not be any more.
    fn next(&self, now_us: impl Fn() -> u64) -> Option<Dirty> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let now = now_us();
            let next = state.queue.next(now);
            self.tell_losses(&mut state);
            if next.is_some() {
                return next;
            }
            // The last ones may have been given up.
            self.changed.notify_all();
            match state.queue.is_empty() {
                false => drop(self.changed.wait_for(&mut state, EPOCH)),
                true => self.changed.wait(&mut state),
            }
        }
    }

    fn adopt(&self, now_us: u64, parent: ChunkId) {
        self.state.lock().queue.adopt(now_us, parent);
        self.changed.notify_all();
    }

    fn ended(&self, now_us: u64, dirty: &Dirty, written: Written) {
        let mut state = self.state.lock();
        state.queue.ended(now_us, dirty, written);
        self.tell_losses(&mut state);
        drop(state);
        self.changed.notify_all();
    }
}

/// A chunk on its way to the disk. Dropped before its write ended, it was refused.
#[derive(Debug)]
struct Outgoing {
    shared: Arc<Shared>,
    write_back: Arc<WriteBack>,
    dirty: Dirty,
    read: Option<Read>,
    written: Written,
}

/// The thread of write-back: takes what is to be written from the queue and begins to write it. It
/// keeps nothing alive while it waits, so that a store that is dropped lets go of its log.
pub(super) fn run(write_back: Arc<WriteBack>, shared: Weak<Shared>, now_us: impl Fn() -> u64) {
    while let Some(dirty) = write_back.next(&now_us) {
        let Some(shared) = shared.upgrade() else { return };
        begin(&write_back, &shared, dirty);
    }
}

fn begin(write_back: &Arc<WriteBack>, shared: &Arc<Shared>, dirty: Dirty) {
    let copy = shared.tier.lock().begin_copy(shared.now_us(), dirty.tenant, &dirty.id);
    let (Some((read, checksums)), Some(disk)) = (copy, &shared.disk) else {
        return write_back.ended(shared.now_us(), &dirty, Written::Gone);
    };
    let layers = shared.layers_of(&read);
    let outgoing = Outgoing {
        shared: Arc::clone(shared),
        write_back: Arc::clone(write_back),
        dirty,
        read: Some(read),
        written: Written::Refused,
    };
    // What is refused drops `on_end` before it says why.
    let outgoing = Arc::new(Mutex::new(Some(outgoing)));
    let theirs = Arc::clone(&outgoing);
    let on_end = move |end| {
        if let Some(outgoing) = take(&theirs) {
            outgoing.ended(end);
        }
    };
    let begun = disk.ssd.write(
        dirty.tenant,
        dirty.id,
        dirty.parent,
        &layers,
        Some(checksums),
        Class::WriteBack,
        on_end,
    );
    let Err(NotWritten::Refused(refused)) = begun else { return };
    if let (Refused::Full { .. }, Some(outgoing)) = (&refused, &mut *outgoing.lock()) {
        outgoing.written = Written::NoRoom;
    }
    drop(outgoing);
    if let (Refused::ParentMissing, Some(parent)) = (refused, dirty.parent)
        && disk.ssd.contains(&parent)
    {
        // It came in the meantime, when nobody knew yet of one that waits for it.
        write_back.adopt(shared.now_us(), parent);
    }
}

fn take(outgoing: &Mutex<Option<Outgoing>>) -> Option<Outgoing> {
    outgoing.lock().take()
}

impl Outgoing {
    fn ended(mut self, end: SsdWriteEnd) {
        self.written = match end {
            SsdWriteEnd::Stored { .. } => Written::Stored,
            SsdWriteEnd::AlreadyHere => Written::AlreadyHere,
            SsdWriteEnd::Deleted => Written::Gone,
            SsdWriteEnd::Failed(_) => Written::Failed,
        };
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        let Some(read) = self.read.take() else { return };
        let deleted = {
            let mut tier = self.shared.tier.lock();
            let deleted = !tier.is_current(&read);
            // Should the write have failed and lost an operation, that may read the bytes of
            // another chunk later; where it writes them to, nobody reads.
            tier.end_read(self.shared.now_us(), read, ReadEnd::Done);
            deleted
        };
        if let Some(disk) = self.shared.disk.as_ref().filter(|_| deleted) {
            // Whoever deleted it cannot have found it on the disk before it was there.
            disk.ssd.delete(self.dirty.tenant, &[self.dirty.id]);
            self.written = Written::Gone;
        }
        self.write_back.ended(self.shared.now_us(), &self.dirty, self.written);
    }
}

impl Shared {
    /// Where the layers of a chunk lie in the arena.
    fn layers_of(&self, read: &Read) -> Vec<Vec<Span>> {
        let shape = read.shape();
        let extents = (0..shape.layers()).filter_map(|layer| shape.layer(layer));
        let span = |extent: std::ops::Range<u64>| {
            Span::new(self.arena, read.offset_bytes() + extent.start, extent.end - extent.start)
        };
        extents.map(|extent| vec![span(extent)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant::TenantId;
    use std::io::Write;

    /// Where log lines go.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_write_back_gives_up_is_told_in_the_log_with_its_number_and_reasons() {
        let lines = Lines::default();
        let own = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || own.clone()).finish();
        let mut config = WriteBackConfig::new(Policy::All, 1 << 20, 1 << 24, 64 << 10);
        config.queue_chunks = 3;
        let dirty = |number: u8| Dirty {
            tenant: TenantId(0),
            id: ChunkId::from_bytes([number; 32]),
            parent: None,
            bytes: 10,
        };
        tracing::subscriber::with_default(log, || {
            let write_back = WriteBack::new(&config);
            write_back.offer(0, (0..5).map(dirty));
            let first = write_back.next(|| 1).unwrap();
            write_back.ended(1, &first, Written::Gone);
            let second = write_back.next(|| 1).unwrap();
            write_back.ended(1, &second, Written::Stored);
            // The line of this minute has told the chunks that found the queue full.
            assert_eq!(write_back.next(|| 1), Some(dirty(2)));
            write_back.ended(1, &dirty(2), Written::Failed);
            assert_eq!(String::from_utf8(lines.0.lock().clone()).unwrap().lines().count(), 1);
            write_back.close();
        });
        let told = String::from_utf8(lines.0.lock().clone()).unwrap();
        assert_eq!(told.lines().count(), 2, "{told}");
        let says = "chunks were not written to SSD chunks=2 gone=1 too_old=0 queue_full=0 refused=0 failed=1";
        assert!(told.contains("WARN") && told.contains(says), "{told}");
    }
}
