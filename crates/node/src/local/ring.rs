//! The ring of a client: a thread that takes requests from it, as the client's connection takes
//! frames. It sleeps while nothing is posted, and looks from time to time by itself while a GPU may
//! publish, which wakes nobody.

use forebay_ring::memory::{self, NotMapped, RingMemory};
use forebay_ring::sleep::{fall_asleep, is_to_be_woken};
use forebay_ring::{
    BadRequest, CONTEXTS_MAX, Consumer, ContextResult, Layout, Status, Taken, Ticket, Violation, Work,
};
use forebay_transfer::lock::Mutex;
use rustix::fd::{AsFd, BorrowedFd};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Requests that a client has under way at most, and as many that its GPU may publish.
const SLOTS: u16 = 64;
/// How long the thread looks for the next request before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// How long it sleeps at a time while a GPU may publish.
const NAP: Duration = Duration::from_micros(50);
/// A ring lives as long as its connection, so that it has one life.
const EPOCH: u64 = 1;

/// The ring of a client, and the thread that takes requests from it.
#[derive(Debug)]
pub struct Ring {
    shared: Arc<SharedRing>,
    thread: JoinHandle<()>,
}

/// A ring, as its requests have it.
#[derive(Debug)]
pub struct SharedRing {
    memory: RingMemory,
    consumer: Mutex<Consumer>,
    is_stopped: AtomicBool,
}

/// What the thread has found.
#[derive(Debug)]
pub enum Found {
    /// To be carried out, and ended.
    Work(Work),
    /// It has ended already.
    Bad(BadRequest),
    /// The ring is about to be closed.
    Violation(Violation),
}

/// Why there is no ring.
#[derive(Debug, Error)]
pub enum NoThread {
    #[error(transparent)]
    Memory(#[from] NotMapped),
    #[error("the system gives no thread: {0}")]
    Thread(#[from] io::Error),
}

impl Ring {
    /// A ring of a client. `on_found` is called on its thread: keep it short.
    pub fn open(on_found: impl Fn(&Arc<SharedRing>, Found) + Send + 'static) -> Result<Ring, NoThread> {
        let layout = Layout::new(SLOTS, SLOTS, CONTEXTS_MAX).map_err(NotMapped::from)?;
        let memory = RingMemory::create(layout, EPOCH)?;
        let consumer = Mutex::new(Consumer::new(layout, &memory.header()));
        let shared = Arc::new(SharedRing { memory, consumer, is_stopped: AtomicBool::new(false) });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("forebay-ring".into());
        let thread = thread.spawn(move || own.serve(&on_found))?;
        Ok(Ring { shared, thread })
    }

    /// What the client maps.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.shared.memory.as_fd()
    }

    /// Takes nothing from it any more. What is under way goes on, and tells nobody.
    pub fn stop(self) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.shared.memory.header().close();
        let asleep = self.shared.memory.header().consumer_asleep();
        // Also one that is about to sleep sees it: it looks once more behind its announcement.
        asleep.store(0, Ordering::SeqCst);
        memory::wake(asleep);
        // A panic of the thread has already been printed.
        let _ = self.thread.join();
    }
}

impl SharedRing {
    fn serve(self: &Arc<Self>, on_found: &impl Fn(&Arc<Self>, Found)) {
        while !self.is_stopped() {
            let taken = self.consumer.lock().take(self.memory.words());
            match taken {
                Ok(Some(Taken::Work(work))) => on_found(self, Found::Work(work)),
                Ok(Some(Taken::Ended(Some(bad)))) => {
                    self.wake_client();
                    on_found(self, Found::Bad(bad));
                }
                Ok(Some(Taken::Ended(None) | Taken::Cancelled { .. })) => self.wake_client(),
                Ok(None) => self.rest(),
                Err(violation) => {
                    // Counted first: the client sees the closed ring at once.
                    on_found(self, Found::Violation(violation));
                    self.memory.header().close();
                    break;
                }
            }
        }
        self.wake_client();
    }

    /// Looks for a while, then sleeps.
    fn rest(&self) {
        let header = self.memory.header();
        let until = Instant::now() + SPIN;
        while Instant::now() < until {
            if self.has_work() {
                return;
            }
            std::hint::spin_loop();
        }
        let asleep = header.consumer_asleep();
        if fall_asleep(asleep, || self.has_work()) {
            memory::wait(asleep, (header.armed() > 0).then_some(NAP));
        }
        header.beat();
    }

    fn has_work(&self) -> bool {
        self.is_stopped() || self.consumer.lock().has_work(self.memory.words())
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// A request has ended, on any thread.
    pub fn end(&self, ticket: Ticket, results: &[ContextResult], bytes: u64) {
        self.consumer.lock().end(self.memory.words(), ticket, results, bytes);
        self.wake_client();
    }

    /// Nothing can be done of a request.
    pub fn refuse(&self, ticket: Ticket, status: Status) {
        self.consumer.lock().refuse(self.memory.words(), ticket, status);
        self.wake_client();
    }

    pub fn is_cancelled(&self, ticket: &Ticket) -> bool {
        self.consumer.lock().is_cancelled(ticket)
    }

    fn wake_client(&self) {
        let asleep = self.memory.header().producer_asleep();
        if is_to_be_woken(asleep) {
            memory::wake(asleep);
        }
    }
}
