//! Write-back: chunks that memory has taken in are copied to the disk in slack, so that they
//! outlive memory and the process. This file is glue: `queue.rs` says what is written, `windows.rs`
//! when, from the rates that `rates.rs` measures; the disk tier writes.
//!
//! A chunk is held in memory while it is written, by a read as any other. What the queue gives up
//! is not lost as long as memory has it: its next use offers it again.

mod orphans;
mod queue;
mod rates;
#[cfg(test)]
mod simulation;
mod windows;

pub(super) use queue::{Dirty, Written};
pub use queue::{WriteBackConfig, WriteBackStat, WritesBegun};
pub use windows::Timing;

use super::StoreInner;
use crate::absence::AbsenceLog;
use crate::admission::Chunk;
use crate::ssd::{NotWritten, Source, SsdWriteEnd};
use crate::stat::Refused;
use crate::tier::{Read, ReadEnd};
use forebay_kv::ChunkId;
use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{Class, LogGate};
use queue::{EPOCH, Losses, Queue};
use std::sync::{Arc, Weak};
use std::time::Duration;

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
    /// Who waits until nothing waits or is being written.
    drainers: usize,
    closed: bool,
}

impl WriteBack {
    pub fn new(config: &WriteBackConfig) -> WriteBack {
        let state = State { queue: Queue::new(config), drainers: 0, closed: false };
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

    /// Has a chunk written that memory has and the disk has not, whatever admission says.
    pub fn offer_admitted(&self, now_us: u64, dirty: Dirty) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        state.queue.offer_admitted(now_us, dirty);
        self.tell_losses(&mut state);
        drop(state);
        self.changed.notify_all();
    }

    /// Says in the log what was lost, once a minute.
    fn tell_losses(&self, state: &mut State) {
        if state.queue.has_losses() && self.lost.pass().is_some() {
            state.queue.take_losses().iter().for_each(Losses::tell);
        }
    }

    /// A read from the disk begins.
    pub fn read_began(&self, now_us: u64) {
        self.state.lock().queue.read_began(now_us);
    }

    /// A read from the disk that began has ended.
    pub fn read_ended(&self, now_us: u64, took_us: u64, bytes: u64) {
        let mut state = self.state.lock();
        let before = state.queue.window();
        state.queue.read_ended(now_us, took_us, bytes);
        let window = state.queue.window();
        let may_go_on = state.queue.may_go_on();
        drop(state);
        if may_go_on {
            self.changed.notify_all();
        }
        if window < before
            && let Some(repeated) = self.slow.pass()
        {
            tracing::warn!(took_us, bytes, window, repeated, "SSD reads are slow");
        }
    }

    pub fn stat(&self) -> WriteBackStat {
        self.state.lock().queue.stat()
    }

    /// Why chunks are not on the disk, as far as it is remembered.
    pub fn absences(&self) -> AbsenceLog {
        self.state.lock().queue.absences().copy()
    }

    /// Writes what waits without waiting for a better time, until nothing waits or is being
    /// written.
    pub fn drain(&self) {
        let mut state = self.state.lock();
        state.drainers += 1;
        state.queue.set_hurried(true);
        self.changed.notify_all();
        while !state.queue.is_idle() && !state.closed {
            self.changed.wait(&mut state);
        }
        state.drainers -= 1;
        let hurried = state.drainers > 0;
        state.queue.set_hurried(hurried);
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
            if state.queue.is_empty() {
                self.changed.wait(&mut state);
            } else {
                let wait_us = state.queue.wakes_at_us().saturating_sub(now);
                let wait = EPOCH.min(Duration::from_micros(wait_us));
                self.changed.wait_for(&mut state, wait);
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
    shared: Arc<StoreInner>,
    write_back: Arc<WriteBack>,
    dirty: Dirty,
    read: Option<Read>,
    written: Written,
}

/// The thread of write-back: takes what is to be written from the queue and begins to write it. It
/// keeps nothing alive while it waits, so that a store that is dropped lets go of its log.
pub(super) fn run(write_back: Arc<WriteBack>, shared: Weak<StoreInner>, now_us: impl Fn() -> u64) {
    while let Some(dirty) = write_back.next(&now_us) {
        let Some(shared) = shared.upgrade() else { return };
        begin(&write_back, &shared, dirty);
    }
}

fn begin(write_back: &Arc<WriteBack>, shared: &Arc<StoreInner>, dirty: Dirty) {
    let copy = shared.tier.lock().begin_copy(shared.now_us(), dirty.tenant, &dirty.id);
    let (Some((read, checksums)), Some(disk)) = (copy, &shared.disk) else {
        return write_back.ended(shared.now_us(), &dirty, Written::Gone);
    };
    let layers = shared.layers_of(&read).map(|layer| vec![layer]).collect();
    let source = Source { id: dirty.id, parent: dirty.parent, layers, crcs: Some(checksums) };
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
    let begun = disk.ssd.write(dirty.tenant, source, Class::WriteBack, on_end);
    let refused = match begun {
        // Those that came before it may follow.
        Ok(_) => return write_back.adopt(shared.now_us(), dirty.id),
        Err(NotWritten::Refused(refused)) => refused,
        Err(_) => return,
    };
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
            disk.ssd.forget(self.dirty.tenant, &[self.dirty.id]);
            self.written = Written::Gone;
        }
        self.write_back.ended(self.shared.now_us(), &self.dirty, self.written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Policy;
    use crate::tenant::TenantId;
    use std::sync::mpsc::channel;
    use testkit::ended;

    #[test]
    fn a_drain_writes_beside_reads_and_what_comes_later_waits_again() {
        let mut config = WriteBackConfig::new(Policy::All, 1 << 20, 1 << 24, 64 << 10);
        config.timing = Timing::InWindows;
        let dirty = |number: u8| Dirty {
            tenant: TenantId(0),
            id: ChunkId::from_bytes([number; 32]),
            parent: None,
            bytes: 10,
        };
        let write_back = Arc::new(WriteBack::new(&config));
        write_back.read_began(0);
        write_back.offer(0, [dirty(1)]);
        let (writes, drains) = (Arc::clone(&write_back), Arc::clone(&write_back));
        let (sender, given) = channel();
        std::thread::spawn(move || sender.send(writes.next(|| 1)));
        let (sender, drained) = channel();
        std::thread::spawn(move || {
            drains.drain();
            sender.send(())
        });
        assert_eq!(ended(&given), Some(dirty(1)));
        write_back.ended(1, &dirty(1), Written::Stored);
        ended(&drained);
        write_back.offer(2, [dirty(2)]);
        assert_eq!(write_back.state.lock().queue.next(2), None);
    }

    #[test]
    fn what_write_back_gives_up_is_told_in_the_log_with_its_number_and_reasons() {
        let mut config = WriteBackConfig::new(Policy::All, 1 << 20, 1 << 24, 64 << 10);
        config.queue_chunks = 3;
        let (tenant, parent, bytes) = (TenantId(0), None, 10);
        let dirty = |number: u8| Dirty { tenant, id: ChunkId::from_bytes([number; 32]), parent, bytes };
        let write_back = WriteBack::new(&config);
        let told = testkit::logged(|| {
            write_back.offer(0, (0..5).map(dirty));
            let first = write_back.next(|| 1).unwrap();
            write_back.ended(1, &first, Written::Gone);
            let second = write_back.next(|| 1).unwrap();
            write_back.ended(1, &second, Written::Stored);
            // The line of this minute has told the chunks that found the queue full.
            assert_eq!(write_back.next(|| 1), Some(dirty(2)));
            write_back.ended(1, &dirty(2), Written::Failed);
        });
        assert_eq!(told.lines().count(), 1, "{told}");
        let told = testkit::logged(|| write_back.close());
        assert_eq!(told.lines().count(), 1, "{told}");
        let says = "chunks were not written to SSD chunks=2 gone=1 too_old=0 queue_full=0 refused=0 failed=1";
        assert!(told.contains("WARN") && told.contains(says), "{told}");
    }
}
