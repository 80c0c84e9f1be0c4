//! Arenas of nodes as the GPU reaches them: pinned while they are in use already. This file knows
//! which mapping is pinned.

use crate::copies::NotCopied;
use forebay_client::NodeArena;
use forebay_cuda::device::Device;
use forebay_cuda::pinned::{PIECE_BYTES_MAX, PinnedBehind, Published, Shareable, publish};
use forebay_transfer::Backing;
use forebay_transfer::lock::Mutex;
use std::sync::{Arc, Weak};

/// An arena is pinned in so many pieces, so that threads share the work and a first load waits for
/// its piece only; within limits: few chunks are cut, and huge pages stay whole.
const PIECES: u64 = 64;
const PIECE_BYTES_MIN: u64 = 2 << 20;
const THREADS: usize = 4;

/// The arenas that there are: one, and those before it that are still used.
#[derive(Debug)]
pub struct Arenas {
    device: Arc<Device>,
    /// The node relays for this GPU, and is told which of its arenas it is.
    are_published: bool,
    known: Arc<Mutex<Vec<Known>>>,
}

#[derive(Debug)]
struct Known {
    /// The client drops an arena whose node is gone.
    arena: Weak<NodeArena>,
    pinned: Arc<PinnedBehind>,
    _published: Option<Published>,
}

impl Arenas {
    pub fn new(device: &Arc<Device>, are_published: bool) -> Arenas {
        Arenas { device: Arc::clone(device), are_published, known: Arc::default() }
    }

    /// An arena, which begins to be pinned if it is new. It is let go of when its node is gone and
    /// nothing uses it: the host may not have room for the next node's beside it. Unpinning is not
    /// waited for.
    pub fn of(&self, arena: &Arc<NodeArena>) -> Result<Arc<PinnedBehind>, NotCopied> {
        let mut known = self.known.lock();
        let found = known.iter().find(|known| std::ptr::eq(known.arena.as_ptr(), Arc::as_ptr(arena)));
        if let Some(found) = found {
            return Ok(Arc::clone(&found.pinned));
        }
        let memory = Arc::clone(arena.memory()) as Arc<dyn Backing>;
        let piece_bytes = (memory.len() as u64 / PIECES).next_multiple_of(PIECE_BYTES_MIN);
        let piece_bytes = piece_bytes.clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
        let pinned = PinnedBehind::start(&self.device, memory, piece_bytes, THREADS);
        let pinned = Arc::new(pinned.map_err(|error| NotCopied(format!("a thread did not start: {error}")))?);
        let shared = || publish(Arc::clone(arena.memory()) as Arc<dyn Shareable>);
        let published = self.are_published.then(shared).flatten();
        known.push(Known {
            arena: Arc::downgrade(arena),
            pinned: Arc::clone(&pinned),
            _published: published,
        });
        drop(known);
        let all = Arc::downgrade(&self.known);
        arena.when_gone(Box::new(move || {
            if let Some(all) = all.upgrade() {
                all.lock().retain(|known| known.arena.strong_count() > 0);
            }
        }));
        Ok(pinned)
    }

    /// Unpins all of them, and waits until that is done. Nothing is under way there any more.
    pub fn close(&self) {
        let known = std::mem::take(&mut *self.known.lock());
        known.iter().for_each(|known| known.pinned.close());
    }
}
