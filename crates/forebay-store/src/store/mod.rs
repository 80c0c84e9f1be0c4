//! The store as its users have it: the memory tier, its arena and the mover, joined. This file is glue: it turns chunks
//! and layers into transfers, and ends of transfers into what the tier must know. It must never decide what stays.

mod lease;
mod load;
mod save;

pub use lease::Lease;
pub use load::{NotLoaded, NotVerified};
pub use save::{NotStored, StoreEnd};

use crate::arena::{Arena, ArenaError, Pages};
use crate::slots::SlabError;
use crate::stat::Stat;
use crate::tenant::TenantId;
use crate::tier::{MemoryTier, TierConfig};
use forebay_kv::ChunkId;
use forebay_mover::{Backing, Closed, End, MoverHandle, Place, RegionId, Span};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// Chunks at rest in host memory, for any number of threads. Cheap to clone.
///
/// Bytes come and go by transfers of the mover: the caller registers its memory there and adds a route between its place
/// and the store's, in both directions. What the caller must do:
///
/// * Storing: keep the source registered and unchanged until `on_end` is called.
/// * Loading: hold the [`Lease`] until the bytes are verified, keep the target registered and to the mover until `on_end`
///   is called, then [`verify`](Store::verify) every layer before anyone uses it. Anything but `Ok` is a miss.
/// * `on_end` runs on one of the store's or the mover's threads: keep it short, and do not wait for either in it.
///
/// The arena stays registered with the mover until the mover ends.
///
/// ```
/// use forebay_kv::ChunkId;
/// use forebay_links::HostLink;
/// use forebay_mover::*;
/// use forebay_store::{Pages, Store, StoreEnd, TenantId, TierConfig};
/// use std::sync::{Arc, mpsc::channel};
///
/// let mover = MoverThread::spawn(Limits::default())?;
/// let handle = mover.handle();
/// let host = Place::Host(0);
/// let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(2)?))?;
/// handle.add_route(RouteSpec::direct(host, host, link))??;
/// let store = Store::open(&handle, host, Pages::Transparent, TierConfig::new(16 << 20))?;
///
/// // Two layers of 1000 bytes go into the store and come back behind them.
/// let memory = Arc::new(HostBuffer::new(4000));
/// memory.write(0, &[7; 2000]);
/// let region = handle.register(host, memory.clone())?;
/// let layers = |start: u64| [0, 1000].map(|layer| vec![Span::new(region, start + layer, 1000)]);
/// let (tenant, id) = (TenantId(0), ChunkId::from_bytes([1; 32]));
///
/// let (sender, stored) = channel();
/// store.store_chunk(tenant, id, None, &layers(0), Class::WriteBack, move |end| drop(sender.send(end)))?;
/// assert_eq!(stored.recv()?, StoreEnd::Stored { bytes: 2000 });
///
/// let lease = store.lease(tenant, &[id], 1_000_000);
/// let (sender, loaded) = channel();
/// store.load_chunk(&lease, 0, &layers(2000), Class::Demand, None, move |end| drop(sender.send(end)))?;
/// assert_eq!(loaded.recv()?, End::Done { bytes: 2000 });
/// let mut layer = [0; 1000];
/// memory.read(2000, &mut layer);
/// store.verify(&lease, 0, 0, &[&layer])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

/// Why there is no store.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The configuration does not divide the arena.
    #[error(transparent)]
    Config(#[from] SlabError),
    /// There is not enough memory.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The mover has ended.
    #[error(transparent)]
    Mover(#[from] Closed),
    /// No thread could be started.
    #[error("the store's thread: {0}")]
    Thread(#[from] std::io::Error),
}

#[derive(Debug)]
struct Shared {
    tier: Mutex<MemoryTier>,
    mover: MoverHandle,
    arena: RegionId,
    pages: Pages,
    /// To the thread that seals chunks whose bytes have arrived.
    sealer: Sender<save::Sealing>,
}

impl Store {
    /// Makes an arena of `config.capacity_bytes`, registers it with the mover at `place`, and starts the store's thread.
    pub fn open(
        mover: &MoverHandle,
        place: Place,
        pages: Pages,
        config: TierConfig,
    ) -> Result<Store, OpenError> {
        let capacity_bytes = config.capacity_bytes;
        let tier = Mutex::new(MemoryTier::new(config)?);
        let arena = Arena::new(capacity_bytes, pages)?;
        let pages = arena.pages();
        let arena = mover.register(place, Arc::new(arena) as Arc<dyn Backing>)?;
        let (sealer, sealings) = channel();
        // The thread ends when the last clone of the store, lease and running operation is gone.
        std::thread::Builder::new().name("forebay-seal".into()).spawn(move || save::seal_all(sealings))?;
        let shared = Arc::new(Shared { tier, mover: mover.clone(), arena, pages, sealer });
        let listener = Arc::downgrade(&shared);
        mover.on_quiet(move |spans| {
            if let Some(shared) = listener.upgrade() {
                shared.quiet(spans);
            }
        })?;
        Ok(Store { shared })
    }

    /// How many of `ids`, a sequence from its first chunk on, are here without a gap. Looking keeps nothing: only a lease
    /// does.
    pub fn lookup(&self, ids: &[ChunkId]) -> usize {
        self.shared.tier().lookup(ids)
    }

    /// Keeps the longest prefix that is here from being evicted until it is unpinned, and says how long it is.
    pub fn pin(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        self.shared.tier().pin(tenant, ids)
    }

    /// Ends the pins of these chunks, and says how many there were.
    pub fn unpin(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        self.shared.tier().unpin(tenant, ids)
    }

    /// Drops these chunks, even if leased, pinned or being written, and says how many there were. Memory that an
    /// operation still uses is free when that ends.
    pub fn delete(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        self.shared.tier().delete(tenant, ids)
    }

    /// All counters.
    pub fn stat(&self) -> Stat {
        self.shared.tier().stat()
    }

    /// Which pages the arena got.
    pub fn pages(&self) -> Pages {
        self.shared.pages
    }
}

impl Shared {
    /// A thread that panicked holding the lock did so on a broken invariant of the tier, which its own checks find again.
    fn tier(&self) -> MutexGuard<'_, MemoryTier> {
        self.tier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_us(&self) -> u64 {
        self.mover.now_us()
    }

    /// Bytes of the arena that an ended transfer may still touch.
    fn lost_bytes(&self, end: &End) -> u64 {
        let spans = match end {
            End::Done { .. } => &[][..],
            End::Failed(failure) => &failure.quarantined,
            End::Cancelled { quarantined, .. } => quarantined,
        };
        self.in_arena(spans).map(|span| span.len).sum()
    }

    fn quiet(&self, spans: &[Span]) {
        let mut tier = self.tier();
        for span in self.in_arena(spans) {
            tier.quiet(span.offset, span.len);
        }
    }

    fn in_arena<'a>(&self, spans: &'a [Span]) -> impl Iterator<Item = &'a Span> {
        let arena = self.arena;
        spans.iter().filter(move |span| span.region == arena)
    }
}
