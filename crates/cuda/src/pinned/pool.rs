//! The pool of pinned memory: whoever needs some waits for pinning only when none is free.

use super::error::PinError;
use super::mapping::Mapping;
use super::pin::{MOST_BYTES, Pin};
use super::published::{Published, Shareable, publish};
use super::space::{Growth, Place, Space};
use crate::device::{Device, HostMemory};
use crate::driver::abi;
use crate::topology::MemoryFacts;
use forebay_transfer::Backing;
use forebay_transfer::lock::{Condvar, Mutex, MutexGuard};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Threads that make the pages of a slab present. The zeroing of pages is bound by memory beyond a
/// few.
const MOST_THREADS: usize = 8;

#[derive(Debug, Clone, Copy)]
pub struct PoolConfig {
    /// Bytes that it may hold, lent or not. What does not fit is refused.
    pub limit_bytes: u64,
    /// Length of a slab. A longer request has one of its own.
    pub slab_bytes: u64,
    /// Whether slabs are files in memory, so that other processes can map them.
    pub shared: bool,
}

impl PoolConfig {
    /// Slabs of 1 GiB, of this process alone.
    pub fn new(limit_bytes: u64) -> PoolConfig {
        PoolConfig { limit_bytes, slab_bytes: 1 << 30, shared: false }
    }

    /// The same, for memory that other processes map too.
    pub fn shared(limit_bytes: u64) -> PoolConfig {
        PoolConfig { shared: true, ..PoolConfig::new(limit_bytes) }
    }
}

/// What a pool did and holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounters {
    pub held_bytes: u64,
    pub lent_bytes: u64,
    /// Slabs that were pinned, since the start.
    pub registrations: u64,
    /// Time spent mapping and pinning, since the start.
    pub pinning: Duration,
    /// Requests that were refused, for the limit or by the system, since the start.
    pub refused: u64,
}

/// Pinned memory that is kept when it is given back. Clones are the same pool.
#[derive(Clone)]
pub struct PinnedPool {
    inner: Arc<Inner>,
}

struct Inner {
    device: Arc<Device>,
    config: PoolConfig,
    state: Mutex<State>,
    /// The driver was seen to refuse registrations and to allocate.
    registers_none: AtomicBool,
    /// A slab was made, or could not be.
    grown: Condvar,
}

struct State {
    space: Space<Kept>,
    /// A thread is making a slab. One at a time: the driver takes registrations one after another
    /// anyway.
    growing: bool,
    registrations: u64,
    pinning: Duration,
    refused: u64,
}

/// A slab, and where it is shared what says so to others.
struct Kept {
    slab: Arc<Slab>,
    _published: Option<Published>,
}

#[derive(Debug)]
enum Slab {
    /// Memory of ours that was registered.
    Registered {
        /// Dropped first: the memory outlives its registration.
        _pin: Pin,
        memory: Mapping,
    },
    /// Memory of the driver's, where it registers none.
    Allocated(HostMemory),
}

impl Slab {
    fn start(&self) -> *mut u8 {
        match self {
            Slab::Registered { memory, .. } => memory.start().as_ptr(),
            Slab::Allocated(memory) => memory.start(),
        }
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Slab::Registered { memory, .. } => memory.file_descriptor(),
            Slab::Allocated(_) => None,
        }
    }
}

impl PinnedPool {
    /// A pool that holds nothing yet. `device` is any GPU: what it pins is pinned for all.
    pub fn new(device: &Arc<Device>, config: PoolConfig) -> PinnedPool {
        let slab_bytes = config.slab_bytes.clamp(1, MOST_BYTES);
        let state = State {
            space: Space::new(config.limit_bytes, slab_bytes),
            growing: false,
            registrations: 0,
            pinning: Duration::ZERO,
            refused: 0,
        };
        let inner = Inner {
            device: Arc::clone(device),
            config,
            state: Mutex::new(state),
            registers_none: AtomicBool::new(false),
            grown: Condvar::new(),
        };
        PinnedPool { inner: Arc::new(inner) }
    }

    /// Lends `bytes` bytes that lie in one registration. Their contents are whatever the last
    /// borrower left. Pins more when that much is not free.
    pub fn take(&self, bytes: u64) -> Result<PinnedBuffer, PinError> {
        let taken = self.inner.take(bytes);
        if taken.is_err() {
            self.inner.state.lock().refused += 1;
        }
        let (place, slab) = taken?;
        Ok(PinnedBuffer { pool: Arc::clone(&self.inner), slab, place, bytes: bytes as usize })
    }

    /// Pins until the pool holds `bytes` bytes, lent or not, so that nobody has to wait for it
    /// later.
    pub fn warm(&self, bytes: u64) -> Result<(), PinError> {
        self.inner.warm(bytes)
    }

    /// The same on a thread of its own. Requests in the meantime are met as soon as there is memory
    /// for them.
    pub fn warm_in_background(&self, bytes: u64) -> std::io::Result<JoinHandle<Result<(), PinError>>> {
        let inner = Arc::clone(&self.inner);
        thread::Builder::new().name("forebay-pinning".into()).spawn(move || inner.warm(bytes))
    }

    pub fn counters(&self) -> PoolCounters {
        let state = self.inner.state.lock();
        PoolCounters {
            held_bytes: state.space.held_bytes(),
            lent_bytes: state.space.lent_bytes(),
            registrations: state.registrations,
            pinning: state.pinning,
            refused: state.refused,
        }
    }
}

impl std::fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedPool").field("counters", &self.counters()).finish_non_exhaustive()
    }
}

impl Inner {
    fn take(&self, bytes: u64) -> Result<(Place, Arc<Slab>), PinError> {
        if bytes > MOST_BYTES {
            return Err(PinError::TooLong { bytes, most_bytes: MOST_BYTES });
        }
        let mut state = self.state.lock();
        loop {
            if let Some((place, kept)) = state.space.take(bytes) {
                return Ok((place, Arc::clone(&kept.slab)));
            }
            state = if state.growing { self.wait(state) } else { self.grow(state, bytes)? };
        }
    }

    fn warm(&self, bytes: u64) -> Result<(), PinError> {
        let mut state = self.state.lock();
        loop {
            let missing = state.space.missing(bytes)?;
            if missing == 0 {
                return Ok(());
            }
            state = if state.growing { self.wait(state) } else { self.grow(state, missing)? };
        }
    }

    /// Makes a slab that has room for `bytes`, without the lock.
    fn grow<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        bytes: u64,
    ) -> Result<MutexGuard<'a, State>, PinError> {
        let Growth { unused, add_bytes } = state.space.grow(bytes)?;
        state.growing = true;
        drop(state);

        let started = Instant::now();
        drop(unused);
        let made = self.make_slab(add_bytes).map(Kept::new);
        let mut state = self.state.lock();
        state.growing = false;
        state.pinning += started.elapsed();
        self.grown.notify_all();
        let kept = made?;
        state.registrations += 1;
        state.space.add(add_bytes, kept);
        Ok(state)
    }

    /// Makes a slab. Some hosts refuse to register memory and allocate it pinned all the same: that
    /// cannot be shared.
    fn make_slab(&self, bytes: u64) -> Result<Slab, PinError> {
        if self.registers_none.load(Ordering::Relaxed) {
            return self.allocate_slab(bytes);
        }
        match self.register_slab(bytes) {
            // For want of memory, there is none to allocate either.
            Err(PinError::Pin { error, .. }) if !self.config.shared && error.status != abi::OUT_OF_MEMORY => {
                let allocated = self.allocate_slab(bytes)?;
                tracing::warn!(reason = %error, "pinned memory is allocated by the driver, which registers none");
                self.registers_none.store(true, Ordering::Relaxed);
                Ok(allocated)
            }
            made => made,
        }
    }

    fn allocate_slab(&self, bytes: u64) -> Result<Slab, PinError> {
        let failed = |error| PinError::Pin { bytes, error, host: Box::new(MemoryFacts::read()) };
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        HostMemory::new(&self.device, len).map(Slab::Allocated).map_err(failed)
    }

    fn register_slab(&self, bytes: u64) -> Result<Slab, PinError> {
        let threads = thread::available_parallelism().map_or(1, |count| count.get().min(MOST_THREADS));
        let memory = Mapping::new(bytes, self.config.shared, threads)?;
        // SAFETY: the slab drops its mapping after the pin.
        let pin = unsafe { Pin::new(&self.device, memory.start(), bytes) }?;
        Ok(Slab::Registered { _pin: pin, memory })
    }

    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.grown.wait(&mut state);
        state
    }
}

impl Kept {
    fn new(slab: Slab) -> Kept {
        let slab = Arc::new(slab);
        let published = publish(Arc::clone(&slab) as Arc<dyn Shareable>);
        Kept { slab, _published: published }
    }
}

// SAFETY: the range is the slab's memory, which is readable and writable, and never moves.
unsafe impl Backing for Slab {
    fn as_ptr(&self) -> *mut u8 {
        self.start()
    }

    fn len(&self) -> usize {
        match self {
            Slab::Registered { memory, .. } => memory.len(),
            Slab::Allocated(memory) => memory.bytes(),
        }
    }
}

impl Shareable for Slab {
    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file()
    }
}

/// Pinned memory of a pool, which has it back when this is dropped.
pub struct PinnedBuffer {
    pool: Arc<Inner>,
    slab: Arc<Slab>,
    place: Place,
    bytes: usize,
}

impl PinnedBuffer {
    /// The file that the bytes lie in and where they begin there, when the pool is shared.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Slab::file(&self.slab).map(|file| (file, self.place.offset))
    }
}

// SAFETY: the range lies in the slab's mapping, which the buffer keeps and which never moves.
unsafe impl Backing for PinnedBuffer {
    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the place lies inside the slab.
        unsafe { self.slab.start().add(self.place.offset as usize) }
    }

    fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.pool.state.lock().space.give_back(self.place);
    }
}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedBuffer").field("bytes", &self.bytes).field("place", &self.place).finish()
    }
}
