//! The host link: copies between any two regions of host memory. This file is the glue between the
//! mover and a few threads; `pieces.rs` checks what may be copied, `copy.rs` copies.

mod copy;
mod pieces;

use crate::lock::{Condvar, Mutex};
use crate::{Completion, Link, LinkOp, MIN_LOT_BYTES, Memory, Outcome, Process};
use copy::{Block, Kernel, STREAM_BYTES_MAX, STREAMS};
use pieces::Piece;
use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Threads of a link at most.
pub const MAX_COPY_THREADS: usize = 64;

/// Lots below this are copied through the cache. They are whole small transfers, whose reader is
/// near: on a machine with 2 MiB of L2, copying and then reading is faster through the cache up to
/// 1 MiB, while copying alone is 1.6 times as fast past it at any size from 16 KiB.
const STREAMING_LOT_BYTES: u64 = MIN_LOT_BYTES;

/// Blocks below this are copied through the cache also in larger lots: they are mostly head and
/// tail.
const STREAMING_BLOCK_BYTES: usize = 1024;

/// What a thread takes of a lot at a time, at least and at most.
const SHARE_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 20;

/// Scatter and gather between host regions, by threads of its own.
///
/// A lot is divided among the threads by bytes, whatever its pairs look like. With nothing to copy
/// the threads sleep. Two threads saturate the memory of a small machine. A lot whose targets
/// overlap its sources is refused.
///
/// Dropping the link finishes what was started.
///
/// ```
/// use forebay_transfer::*;
/// use std::sync::Arc;
///
/// let mover = MoverThread::spawn(Limits::default())?;
/// let handle = mover.handle();
/// let host = Place::Host(0);
/// let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(2)?))?;
/// handle.add_path(PathSpec::direct(host, host, link))??;
///
/// let (source, target) = (Arc::new(HostBuffer::new(8192)), Arc::new(HostBuffer::new(8192)));
/// source.write(0, &[7; 8192]);
/// let (from, to) = (handle.register(host, source)?, handle.register(host, target.clone())?);
/// let pair = SpanPair::new(Span::new(from, 0, 8192), Span::new(to, 0, 8192));
/// let end = handle.run(Transfer::new(vec![pair], Class::Demand))?;
///
/// assert_eq!(end, End::Done { bytes: 8192 });
/// let mut bytes = [0; 8192];
/// assert!(target.read(0, &mut bytes) && bytes == [7; 8192]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HostLink {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    process: Process,
}

impl HostLink {
    /// A link with 1 to [`MAX_COPY_THREADS`] threads. Fails if the system starts no more threads.
    pub fn new(threads: usize) -> std::io::Result<HostLink> {
        let threads = threads.clamp(1, MAX_COPY_THREADS);
        let queue = Arc::new(Queue {
            state: Mutex::default(),
            posted: Condvar::new(),
            threads: threads as u64,
            streaming: Kernel::streaming(),
        });
        let mut link = HostLink {
            queue: Arc::clone(&queue),
            threads: Vec::with_capacity(threads),
            process: Process::current(),
        };
        for number in 0..threads {
            let queue = Arc::clone(&queue);
            let name = format!("forebay-copy-{number}");
            link.threads.push(std::thread::Builder::new().name(name).spawn(move || queue.work())?);
        }
        Ok(link)
    }
}

impl Link for HostLink {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        match pieces::resolve(&op, memory) {
            Ok(pieces) => self.queue.post(pieces, done),
            Err(unsound) => done.finish(Outcome::Failed { error: unsound.to_string() }),
        }
    }
}

impl Drop for HostLink {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The threads, and whoever holds the lock, are the parent's.
            return std::mem::forget(std::mem::take(&mut self.threads));
        }
        self.queue.close();
        for thread in self.threads.drain(..) {
            // A thread that panicked has dropped its lot, which reports the failure.
            let _ = thread.join();
        }
    }
}

/// Lots that are not handed out in full, and those who wait for them.
#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    posted: Condvar,
    threads: u64,
    /// The kernel for lots that would not stay in the cache.
    streaming: Kernel,
}

#[derive(Debug, Default)]
struct State {
    lots: VecDeque<Handout>,
    closed: bool,
}

/// A lot and how far it has been handed out.
#[derive(Debug)]
struct Handout {
    lot: Arc<Lot>,
    next: Position,
    rest_bytes: u64,
    share_bytes: u64,
}

/// A byte of a lot: of which piece, and where in it.
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    piece: usize,
    offset: usize,
}

/// A lot being copied. Whoever copies its last bytes finishes it.
#[derive(Debug)]
struct Lot {
    pieces: Vec<Piece>,
    bytes: u64,
    kernel: Kernel,
    uncopied_bytes: AtomicU64,
    done: Mutex<Option<Completion>>,
}

impl Queue {
    fn post(&self, pieces: Vec<Piece>, done: Completion) {
        let bytes = pieces.iter().map(|piece| piece.len as u64).sum();
        if bytes == 0 {
            return done.finish(Outcome::Moved { bytes });
        }
        let kernel = if bytes < STREAMING_LOT_BYTES { Kernel::Cached } else { self.streaming };
        let share_bytes = bytes.div_ceil(self.threads).clamp(*SHARE_BYTES.start(), *SHARE_BYTES.end());
        let lot = Lot { pieces, bytes, kernel, uncopied_bytes: bytes.into(), done: Some(done).into() };
        let handout =
            Handout { lot: Arc::new(lot), next: Position::default(), rest_bytes: bytes, share_bytes };
        self.state.lock().lots.push_back(handout);
        if bytes > share_bytes {
            self.posted.notify_all();
        } else {
            self.posted.notify_one();
        }
    }

    fn close(&self) {
        self.state.lock().closed = true;
        self.posted.notify_all();
    }

    /// Copies shares until the queue is closed and empty.
    fn work(&self) {
        while let Some((lot, from, bytes)) = self.next_share() {
            lot.copy(from, bytes);
        }
    }

    /// The next share of the oldest lot: where it starts and how long it is.
    fn next_share(&self) -> Option<(Arc<Lot>, Position, u64)> {
        let mut state = self.state.lock();
        loop {
            if let Some(handout) = state.lots.front_mut() {
                let share = handout.take();
                if handout.rest_bytes == 0 {
                    state.lots.pop_front();
                }
                return Some(share);
            }
            if state.closed {
                return None;
            }
            self.posted.wait(&mut state);
        }
    }
}

impl Handout {
    fn take(&mut self) -> (Arc<Lot>, Position, u64) {
        let (from, bytes) = (self.next, self.share_bytes.min(self.rest_bytes));
        self.next = self.lot.after(from, bytes);
        self.rest_bytes -= bytes;
        (Arc::clone(&self.lot), from, bytes)
    }
}

/// Short blocks of one length that wait until there are enough to be copied side by side.
struct ShortBlocks {
    kernel: Kernel,
    blocks: [Block; STREAMS],
    count: usize,
    len: usize,
}

impl ShortBlocks {
    /// Copies a block, or keeps it for later.
    ///
    /// # Safety
    ///
    /// Until [`flush`](ShortBlocks::flush) has returned: as for [`Kernel::copy_side_by_side`].
    unsafe fn copy(&mut self, (from, to): Block, len: usize) {
        if !(STREAMING_BLOCK_BYTES..STREAMS * STREAM_BYTES_MAX).contains(&len) {
            let kernel = if len < STREAMING_BLOCK_BYTES { Kernel::Cached } else { self.kernel };
            // SAFETY: as the caller promises.
            return unsafe { kernel.copy(from, to, len) };
        }
        if self.count > 0 && self.len != len {
            // SAFETY: as the caller promises.
            unsafe { self.flush() };
        }
        self.blocks[self.count] = (from, to);
        (self.count, self.len) = (self.count + 1, len);
        if self.count == STREAMS {
            // SAFETY: as the caller promises.
            unsafe { self.flush() };
        }
    }

    /// Copies those that wait.
    ///
    /// # Safety
    ///
    /// As for [`copy`](ShortBlocks::copy).
    unsafe fn flush(&mut self) {
        match std::mem::take(&mut self.count) {
            // SAFETY: as the caller promises.
            STREAMS => unsafe { self.kernel.copy_side_by_side(&self.blocks, self.len) },
            count => self.blocks[..count].iter().for_each(|(from, to)| {
                // SAFETY: as the caller promises.
                unsafe { self.kernel.copy(*from, *to, self.len) };
            }),
        }
    }
}

impl Lot {
    /// The position `bytes` further on.
    fn after(&self, from: Position, bytes: u64) -> Position {
        let mut at = from;
        self.visit(from, bytes, |_, position, len| {
            at = Position { piece: position.piece, offset: position.offset + len };
        });
        at
    }

    /// Calls `visit` for each part of a piece that lies in the `bytes` from a position on.
    fn visit(&self, from: Position, bytes: u64, mut visit: impl FnMut(&Piece, Position, usize)) {
        let (mut at, mut rest) = (from, bytes);
        while let (true, Some(piece)) = (rest > 0, self.pieces.get(at.piece)) {
            let len = u64::min(rest, (piece.len - at.offset) as u64) as usize;
            if len > 0 {
                visit(piece, at, len);
            }
            rest -= len as u64;
            at = Position { piece: at.piece + 1, offset: 0 };
        }
    }

    fn copy(&self, from: Position, bytes: u64) {
        let mut short = ShortBlocks {
            kernel: self.kernel,
            blocks: [(ptr::null(), ptr::null_mut()); STREAMS],
            count: 0,
            len: 0,
        };
        self.visit(from, bytes, |piece, at, len| {
            // SAFETY: the piece was resolved from registered memory, which the mover keeps
            // registered until the lot is finished; `at.offset + len` is at most the piece's
            // length.
            let block = unsafe {
                (piece.from.as_ptr().add(at.offset).cast_const(), piece.to.as_ptr().add(at.offset))
            };
            // SAFETY: as above; no target of the lot overlaps a source or another target, and
            // shares do not overlap each other. The kernel was chosen for this processor.
            unsafe { short.copy(block, len) };
        });
        // SAFETY: as above.
        unsafe { short.flush() };
        self.kernel.fence();
        // Release, so that whoever finishes the lot has seen every share's bytes before.
        if self.uncopied_bytes.fetch_sub(bytes, Ordering::AcqRel) == bytes {
            let done = self.done.lock().take();
            if let Some(done) = done {
                done.finish(Outcome::Moved { bytes: self.bytes });
            }
        }
    }
}
