//! Memory that is pinned behind its users' backs: a host's arena is tens of GiB, which takes
//! seconds, and the first copies must not wait for the last page. Pieces that somebody waits for go
//! first. A piece that the driver refused is tried again when it is asked for later.

use super::pin::Pin;
use crate::device::Device;
use crate::driver::Relaxed;
use forebay_transfer::Backing;
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A piece that was refused is tried again after so long: the host may have been short of memory
/// for a moment only.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// Called when all that was asked for is pinned, or with why it will not be.
pub type OnPinned = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Memory, and which of it is pinned. No longer wanted, it is unpinned and let go of on a thread of
/// its own.
#[derive(Debug)]
pub struct PinnedBehind {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    device: Arc<Device>,
    /// Dropped before the memory, whose pieces are pinned in it.
    state: Mutex<State>,
    memory: Arc<dyn Backing>,
    piece_bytes: u64,
    begun: Instant,
    changed: Condvar,
}

struct State {
    pieces: Vec<Piece>,
    /// Pieces that somebody waits for, and those that nobody has looked at yet.
    wanted: VecDeque<usize>,
    next: usize,
    waiters: Vec<Waiter>,
    pinned_bytes: u64,
    took: Duration,
    closed: bool,
}

/// A part of the memory.
enum Piece {
    Loose,
    /// A thread is at it.
    InWork,
    Pinned {
        _pin: Pin,
    },
    Refused {
        why: String,
        since: Instant,
    },
}

struct Waiter {
    /// Pieces that are not there yet.
    missing: Vec<usize>,
    on_pinned: OnPinned,
}

impl PinnedBehind {
    /// Begins to pin `memory` in pieces of `piece_bytes`, which is at least 1 and a multiple of a
    /// page, with so many threads.
    pub fn start(
        device: &Arc<Device>,
        memory: Arc<dyn Backing>,
        piece_bytes: u64,
        threads: usize,
    ) -> std::io::Result<PinnedBehind> {
        let pieces = (memory.len() as u64).div_ceil(piece_bytes);
        let state = State {
            pieces: (0..pieces).map(|_| Piece::Loose).collect(),
            wanted: VecDeque::new(),
            next: 0,
            waiters: Vec::new(),
            pinned_bytes: 0,
            took: Duration::ZERO,
            closed: false,
        };
        let (device, begun) = (Arc::clone(device), Instant::now());
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { device, memory, piece_bytes, begun, state, changed });
        let spawned = (1..threads).try_for_each(|_| {
            let shared = Arc::clone(&shared);
            spawn(move || shared.pin_all()).map(drop)
        });
        let own = Arc::clone(&shared);
        let keeper = spawned.and_then(|()| spawn(move || own.keep()));
        let keeper = keeper.inspect_err(|_| shared.close())?;
        Ok(PinnedBehind { shared, keeper: Mutex::new(Some(keeper)) })
    }

    pub fn memory(&self) -> &Arc<dyn Backing> {
        &self.shared.memory
    }

    /// No copy may go across a multiple of this.
    pub fn piece_bytes(&self) -> u64 {
        self.shared.piece_bytes
    }

    /// Bytes that are pinned, and how long that took so far.
    pub fn progress(&self) -> (u64, Duration) {
        let state = self.shared.state.lock();
        (state.pinned_bytes, state.took)
    }

    /// Has `on_pinned` called when these ranges, as (offset, bytes), are pinned: at once if they
    /// are, else on another thread.
    pub fn when_pinned(&self, ranges: impl Iterator<Item = (u64, u64)>, on_pinned: OnPinned) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let is_closed = state.closed;
        let mut missing = Vec::new();
        let mut refused = None;
        let mut last = usize::MAX;
        for (offset, bytes) in ranges.filter(|(_, bytes)| *bytes > 0) {
            let end = offset.saturating_add(bytes - 1);
            for piece in (offset / shared.piece_bytes) as usize..=(end / shared.piece_bytes) as usize {
                if std::mem::replace(&mut last, piece) == piece {
                    continue;
                }
                match state.pieces.get_mut(piece) {
                    Some(Piece::Pinned { .. }) => {}
                    Some(Piece::Refused { why, since }) if since.elapsed() < REFUSED_FOR => {
                        refused = Some(why.clone());
                    }
                    Some(found) if !is_closed => {
                        if let Piece::Refused { .. } = found {
                            *found = Piece::Loose;
                        }
                        missing.push(piece);
                    }
                    _ => refused = Some("it is not there any more".into()),
                }
            }
        }
        if missing.is_empty() || refused.is_some() {
            drop(state);
            return on_pinned(refused.map_or(Ok(()), Err));
        }
        missing.sort_unstable();
        missing.dedup();
        state.wanted.extend(missing.iter().copied());
        state.waiters.push(Waiter { missing, on_pinned });
        drop(state);
        shared.changed.notify_all();
    }

    /// Unpins it and waits until that is done. Nothing may be under way there.
    pub fn close(&self) {
        self.shared.close();
        let keeper = self.keeper.lock().take();
        if let Some(keeper) = keeper {
            // A panic of the thread has already been printed.
            let _ = keeper.join();
        }
    }
}

impl Drop for PinnedBehind {
    fn drop(&mut self) {
        self.shared.close();
    }
}

fn spawn(body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("forebay-pin".into()).spawn(body)
}

impl Shared {
    fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Pins what is left, and later what is asked for again, until it is to be unpinned.
    fn keep(&self) {
        let _relaxed = Relaxed::enter(self.device.driver());
        self.pin_all();
        let mut state = self.state.lock();
        while !state.closed || state.pieces.iter().any(|piece| matches!(piece, Piece::InWork)) {
            if !state.closed && !state.wanted.is_empty() {
                drop(state);
                self.pin_all();
                state = self.state.lock();
                continue;
            }
            self.changed.wait(&mut state);
        }
        let (pieces, waiters) = (std::mem::take(&mut state.pieces), std::mem::take(&mut state.waiters));
        drop(state);
        drop(pieces);
        for waiter in waiters {
            (waiter.on_pinned)(Err("it is not there any more".into()));
        }
    }

    fn pin_all(&self) {
        // Others may capture graphs meanwhile.
        let _relaxed = Relaxed::enter(self.device.driver());
        while let Some(index) = self.next() {
            let pinned = self.pin(index);
            self.settle(index, pinned);
        }
    }

    /// The next piece to be pinned: one that is waited for, or the next of all.
    fn next(&self) -> Option<usize> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let index = match state.wanted.pop_front() {
                Some(wanted) => wanted,
                None => {
                    state.next += 1;
                    state.next - 1
                }
            };
            match state.pieces.get_mut(index) {
                Some(piece @ Piece::Loose) => {
                    *piece = Piece::InWork;
                    return Some(index);
                }
                Some(_) => {}
                None => return None,
            }
        }
    }

    fn pin(&self, index: usize) -> Result<Pin, String> {
        let offset = index as u64 * self.piece_bytes;
        let bytes = self.piece_bytes.min(self.memory.len() as u64 - offset);
        // SAFETY: the offset lies inside the backing, whose bytes are mapped while it lives.
        let start = unsafe { self.memory.as_ptr().add(offset as usize) };
        let start = NonNull::new(start).ok_or("it is nowhere")?;
        // SAFETY: the memory is let go of after the pieces.
        unsafe { Pin::new(&self.device, start, bytes) }.map_err(|error| error.to_string())
    }

    /// Notes what became of a piece, and tells those who waited for it last.
    fn settle(&self, index: usize, pinned: Result<Pin, String>) {
        let mut state = self.state.lock();
        let outcome = pinned.as_ref().map(|_| ()).map_err(Clone::clone);
        if outcome.is_ok() {
            let offset = index as u64 * self.piece_bytes;
            state.pinned_bytes += self.piece_bytes.min(self.memory.len() as u64 - offset);
            state.took = self.begun.elapsed();
        }
        state.pieces[index] = match pinned {
            Ok(pin) => Piece::Pinned { _pin: pin },
            Err(why) => Piece::Refused { why, since: Instant::now() },
        };
        let mut told = Vec::new();
        for mut waiter in std::mem::take(&mut state.waiters) {
            let waited = waiter.missing.len();
            waiter.missing.retain(|missing| *missing != index);
            let is_over = waiter.missing.is_empty() || (waited > waiter.missing.len() && outcome.is_err());
            if is_over { told.push(waiter) } else { state.waiters.push(waiter) }
        }
        drop(state);
        self.changed.notify_all();
        for waiter in told {
            (waiter.on_pinned)(outcome.clone());
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("bytes", &self.memory.len()).finish_non_exhaustive()
    }
}
