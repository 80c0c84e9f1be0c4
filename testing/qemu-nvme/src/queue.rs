//! A pair of queues in guest memory: `forebay-ring` has the logic, and entries and doorbells go to
//! QEMU's controller. It knows nothing of what commands do.

use crate::mailbox::Mailbox;
use crate::{GuestMemory, Qemu, QueuePlaces};
use forebay_ring::nvme::{Command, Ended, Polled, QueuePair, Refused, Submitted, command, completion};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a command may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_micros(20);

/// A submission queue and its completion queue. `T` is what commands are for.
#[derive(Debug)]
pub struct Queue<T> {
    qemu: Arc<Qemu>,
    pair: QueuePair<T>,
    pub(crate) id: u16,
    pub(crate) entries: u16,
    pub(crate) submission: u64,
    pub(crate) completion: u64,
}

impl<T> Queue<T> {
    pub(crate) fn new(qemu: Arc<Qemu>, id: u16, entries: u16, submission: u64, completion: u64) -> Queue<T> {
        let pair = QueuePair::new(id, entries.into(), entries.into()).expect("a number that is allowed");
        Queue { qemu, pair, id, entries, submission, completion }
    }

    /// Bytes of each queue's memory, for so many entries.
    pub(crate) fn bytes(entries: u16) -> usize {
        usize::from(entries) * command::ENTRY_BYTES.max(completion::ENTRY_BYTES)
    }

    /// Where the queues and their doorbells lie, for somebody else who drives them. This one is of
    /// no use then.
    pub fn places(self) -> QueuePlaces {
        let [tail_doorbell, head_doorbell] = [0, 1].map(|of| Mailbox::doorbell(2 * u32::from(self.id) + of));
        let Queue { entries, submission, completion, .. } = self;
        QueuePlaces { entries, submission, completion, tail_doorbell, head_doorbell }
    }

    /// The memory that the controller reaches.
    pub fn memory(&self) -> &GuestMemory {
        self.qemu.memory()
    }

    /// Takes a command and writes its entry. The controller learns of it by [`Queue::ring`].
    pub fn submit(&mut self, command: &Command, purpose: T) -> Result<(), Refused<T>> {
        self.submit_changed(command, purpose, |_| ())
    }

    /// As [`Queue::submit`], with an entry that `change` makes another of: what our encoders do not
    /// encode.
    pub fn submit_changed(
        &mut self,
        command: &Command,
        purpose: T,
        change: impl FnOnce(&mut [u8; command::ENTRY_BYTES]),
    ) -> Result<(), Refused<T>> {
        let Submitted { slot, mut entry, .. } = self.pair.submit(command, purpose)?;
        change(&mut entry);
        self.memory().write(self.submission + u64::from(slot) * command::ENTRY_BYTES as u64, &entry);
        Ok(())
    }

    /// Tells the controller of all commands that were taken.
    pub fn ring(&self) {
        self.qemu.ring_tail(self.id, self.pair.sq_tail() as u16);
    }

    /// A command that has ended, if there is one. The controller may use its completion's entry
    /// again.
    ///
    /// # Panics
    /// Where a completion ends no command that is outstanding.
    pub fn poll(&mut self) -> Option<Ended<T>> {
        let (memory, completion) = (self.qemu.memory(), self.completion);
        let load = |slot: u32, word: usize| {
            let at = u64::from(slot) * completion::ENTRY_BYTES as u64 + 4 * word as u64;
            memory.word(completion + at).load(Ordering::Acquire)
        };
        match self.pair.poll(load) {
            Polled::Nothing => None,
            Polled::Fault(fault) => panic!("queue {}: {fault}", self.id),
            Polled::Ended(ended) => {
                self.qemu.ring_head(self.id, self.pair.cq_head() as u16);
                Some(ended)
            }
        }
    }

    /// The next command that ends.
    ///
    /// # Panics
    /// Where none ends within a minute.
    pub fn wait(&mut self) -> Ended<T> {
        let since = Instant::now();
        loop {
            if let Some(ended) = self.poll() {
                return ended;
            }
            assert!(since.elapsed() < LIMIT, "none of {} commands ends", self.pair.outstanding());
            // QEMU's threads need the processors more than this one.
            std::thread::sleep(PAUSE);
        }
    }

    /// Commands that have not ended.
    pub fn outstanding(&self) -> u32 {
        self.pair.outstanding()
    }

    /// Ends all commands after the controller was disabled, and makes the queues' memory as new.
    pub fn reset(&mut self) -> Vec<Ended<T>> {
        let bytes = Queue::<T>::bytes(self.entries);
        self.memory().fill(self.submission, bytes, 0);
        self.memory().fill(self.completion, bytes, 0);
        self.pair.reset()
    }
}
