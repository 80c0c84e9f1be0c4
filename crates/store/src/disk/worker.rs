//! The thread of a disk link: it carries operations from the inbox to the kernel and their ends
//! back. This file is glue; what to request is decided in [`flights`](super::flights), how in the
//! drivers.

use super::file::DiskFile;
use super::flights::Flights;
use super::kernel::{Completed, Kernel};
use super::regions::Regions;
use super::stats::DiskStats;
use forebay_transfer::lock::{Mutex, RwLock};
use forebay_transfer::{Backing, Completion, Inbox, LinkOp, LogGate, Memory, Outcome};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

const PAUSE_AFTER_FAILED_WAIT: Duration = Duration::from_millis(10);

/// What a link's thread shares with those who use the link.
pub(crate) struct Shared {
    pub inbox: Inbox<Message>,
    pub regions: RwLock<Regions>,
    pub stats: Mutex<DiskStats>,
}

/// What callers want.
pub(crate) enum Message {
    Op(LinkOp, Arc<Memory>, Completion),
    /// Pin this memory, and say whether that worked.
    Pin(Arc<dyn Backing>, SyncSender<std::io::Result<()>>),
}

/// Who waits for an operation.
struct Waiter {
    done: Completion,
    /// Kept alive until the operation is quiet, even if the mover is gone.
    _memory: Arc<Memory>,
}

/// The thread's own. The kernel is dropped first, and waits until nothing is under way before
/// anything it uses goes.
pub(crate) struct Worker {
    kernel: Box<dyn Kernel>,
    flights: Flights<Waiter>,
    io_bytes_max: u64,
    shared: Arc<Shared>,
    /// Memory that the kernel may have pinned.
    pinned: Vec<Arc<dyn Backing>>,
    failed_waits: LogGate,
    file: DiskFile,
}

impl Worker {
    pub fn new(
        kernel: Box<dyn Kernel>,
        depth: u32,
        io_bytes_max: u64,
        shared: Arc<Shared>,
        file: DiskFile,
    ) -> Worker {
        let flights = Flights::new(depth as usize, file.block_bytes());
        Worker {
            kernel,
            flights,
            io_bytes_max,
            shared,
            pinned: Vec::new(),
            failed_waits: LogGate::new(),
            file,
        }
    }

    /// Runs until the inbox is closed and everything that was posted has ended.
    pub fn run(mut self) {
        let mut messages = Vec::new();
        let mut completed = Vec::new();
        loop {
            let open = self.shared.inbox.take(&mut messages);
            messages.drain(..).for_each(|message| self.accept(message));
            self.deliver_ends();
            self.start_what_can_start();
            if !open && self.flights.is_empty() {
                return;
            }
            if self.shared.inbox.may_sleep(!open) {
                self.wait(&mut completed);
            }
        }
    }

    fn accept(&mut self, message: Message) {
        match message {
            Message::Pin(backing, answer) => {
                let pinned = match NonNull::new(backing.as_ptr()) {
                    // SAFETY: the backing is kept for as long as the kernel, and stays where it is
                    // while it lives.
                    Some(start) => unsafe { self.kernel.pin(start, backing.len()) },
                    None => Ok(()),
                };
                self.pinned.push(backing);
                // A caller that has gone does not want to know.
                let _ = answer.send(pinned);
            }
            Message::Op(op, memory, done) => {
                let mut plan = self.flights.spare_plan();
                let regions = self.shared.regions.read();
                let planned = regions.plan(&op, &memory, self.io_bytes_max, &mut plan);
                drop(regions);
                match planned {
                    Ok(action) => self.flights.add(Waiter { done, _memory: memory }, action, plan),
                    Err(unusable) => {
                        self.flights.recycle(plan);
                        done.finish(Outcome::Failed { error: unusable.to_string() });
                    }
                }
            }
        }
    }

    fn start_what_can_start(&mut self) {
        while let Some((key, request)) = self.flights.next() {
            // SAFETY: the table keeps the slices in place until the key completed; the waiter keeps
            // the memory behind them; the file is open. All three outlive the kernel. The table
            // hands out no more than its depth.
            unsafe { self.kernel.start(key, request) };
        }
    }

    fn deliver_ends(&mut self) {
        let mut any = false;
        while let Some((waiter, end)) = self.flights.next_ended() {
            if !std::mem::replace(&mut any, true) {
                *self.shared.stats.lock() = self.flights.stats;
            }
            waiter.done.finish(match end {
                Ok(bytes) => Outcome::Moved { bytes },
                Err(fault) => Outcome::Failed { error: fault.to_string() },
            });
        }
    }

    fn wait(&mut self, completed: &mut Vec<Completed>) {
        if let Err(error) = self.kernel.wait(completed) {
            // Nothing may be said about what is under way. Whoever waits too long for an operation
            // gives it up, and keeps its memory in quarantine.
            self.flights.stats.failed_waits += 1;
            if let Some(repeated) = self.failed_waits.pass() {
                let volume = self.file.path().display();
                tracing::error!(%volume, %error, repeated, "waiting for the SSD fails");
            }
            std::thread::sleep(PAUSE_AFTER_FAILED_WAIT);
        }
        completed.drain(..).for_each(|completed| self.flights.complete(completed));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a panic nobody would read the inbox any more; a message that is dropped reports a
        // failure.
        self.shared.inbox.close();
        self.shared.inbox.take(&mut Vec::new());
    }
}
