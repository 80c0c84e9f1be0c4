//! The store as its users have it: the memory tier, its arena, the mover and the disk below, if
//! there is one. This module turns chunks and layers into transfers, and ends of transfers into
//! what the tiers must know.
//!
//! `save.rs` stores chunks; `load.rs` loads them from memory and `load_disk.rs` from disk;
//! `fetch.rs` and `reserve.rs` are for those who read and write the arena by themselves; `watch.rs`
//! tells others what is here, and `whereabouts.rs` says why something is not. `control.rs` keeps
//! chunks where they are or sends them away, `forget.rs` overwrites them. Behind the user's back
//! `write_back` copies from memory to disk, and `promote.rs` brings into memory what is read from
//! disk.

mod control;
mod disk;
mod fetch;
mod fetch_layers;
mod forget;
mod lease;
mod load;
mod load_disk;
mod promote;
mod reserve;
mod save;
mod watch;
mod whereabouts;
mod write_back;

pub use control::ChunkStatus;
pub use disk::{DiskSideStat, Hits};
pub use fetch::{NotFetched, ReadGuard};
pub use fetch_layers::LayerGuard;
pub use lease::Lease;
pub use load::{Load, NotLoaded, NotVerified};
pub use promote::{NotPromoted, PromotionStat};
pub use reserve::{NotStored, Reservation};
pub use save::StoreEnd;
pub use watch::{Changed, Left};
pub use whereabouts::{Whereabouts, WhyAbsent};
pub use write_back::{Timing, WriteBackConfig, WriteBackStat, WritesBegun};

use crate::lost::bytes_in;
use crate::slots::{InArena, SlabError};
use crate::ssd::Ssd;
use crate::stat::Stat;
use crate::tenant::TenantId;
use crate::tier::{Kept, MemoryTier, NotAdopted, TierConfig};
use disk::Disk;
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{
    Arena, ArenaError, Backing, Closed, End, LogGate, MoverHandle, Pages, Place, RegionId, Span,
};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use thiserror::Error;
use write_back::WriteBack;

/// Chunks at rest in host memory and, if there is one, on a disk below it, for any number of
/// threads. Cheap to clone.
///
/// Bytes come and go by transfers of the mover: the caller registers its memory there and adds a
/// route between its place and the store's, in both directions. What the caller must do:
///
/// * Storing: keep the source registered and unchanged until `on_end` is called.
/// * Loading: hold the [`Lease`] until the bytes are verified, keep the target registered and to
///   the mover until `on_end` is called, then [`verify`](Store::verify) every layer before anyone
///   uses it. Anything but `Ok` is a miss.
/// * `on_end` runs on one of the store's or the mover's threads: keep it short, and do not wait for
///   either in it.
///
/// The arena stays registered with the mover until the mover ends.
///
/// ```
/// use forebay_kv::ChunkId;
/// use forebay_transfer::HostLink;
/// use forebay_transfer::*;
/// use forebay_store::{Store, StoreEnd, TenantId, TierConfig};
/// use std::sync::{Arc, mpsc::channel};
///
/// let mover = MoverThread::spawn(Limits::default())?;
/// let handle = mover.handle();
/// let host = Place::Host(0);
/// let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(2)?))?;
/// handle.add_path(PathSpec::direct(host, host, link))??;
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
    shared: Arc<StoreInner>,
}

#[derive(Debug, Error)]
pub enum OpenError {
    #[error(transparent)]
    Config(#[from] SlabError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error("the memory that is taken over has {arena_bytes} bytes, not {capacity_bytes}")]
    Length { arena_bytes: u64, capacity_bytes: u64 },
    #[error("what memory is said to keep: {0}")]
    Kept(#[from] NotAdopted),
    #[error(transparent)]
    Mover(#[from] Closed),
    #[error("the store's thread: {0}")]
    Thread(#[from] std::io::Error),
}

#[derive(Debug)]
struct StoreInner {
    tier: Mutex<MemoryTier>,
    mover: MoverHandle,
    arena: RegionId,
    backing: Arc<Arena>,
    /// Chunks that come from disk into memory.
    fetches: fetch::Fetches,
    partial: fetch_layers::PartialChunks,
    /// To the thread that takes the checksums of what has arrived.
    checksum_jobs: Sender<save::Job>,
    memory_full: LogGate,
    pins_gave_way: LogGate,
    disk: Option<Disk>,
}

/// The memory of a store, and what is in it.
#[derive(Debug)]
pub struct Memory {
    tier: MemoryTier,
    arena: Arena,
}

impl Memory {
    /// An arena of `config.capacity_bytes`, without chunks.
    pub fn new(pages: Pages, config: TierConfig) -> Result<Memory, OpenError> {
        let capacity_bytes = config.capacity_bytes;
        Ok(Memory { tier: MemoryTier::new(config)?, arena: Arena::new(capacity_bytes, pages)? })
    }

    /// The arena of a process that gives it up, with the chunks that it kept there. Nothing is
    /// copied.
    pub fn take_over(
        file: OwnedFd,
        pages: Pages,
        config: TierConfig,
        kept: &Kept,
    ) -> Result<Memory, OpenError> {
        let (arena, capacity_bytes) = (Arena::take_over(file, pages)?, config.capacity_bytes);
        let arena_bytes = arena.len() as u64;
        if arena_bytes != capacity_bytes {
            return Err(OpenError::Length { arena_bytes, capacity_bytes });
        }
        Ok(Memory { tier: MemoryTier::adopt(config, kept)?, arena })
    }
}

impl Store {
    /// Makes an arena of `config.capacity_bytes`, registers it with the mover at `place`, and
    /// starts the store's thread.
    pub fn open(
        mover: &MoverHandle,
        place: Place,
        pages: Pages,
        config: TierConfig,
    ) -> Result<Store, OpenError> {
        Store::over(mover, place, Memory::new(pages, config)?, None)
    }

    /// The same with a disk below: what memory takes in is written there in slack, as `write_back`
    /// says, and what is there is found and loaded as if it were in memory. `ssd` has to use the
    /// same mover and `place`. A chunk that is loaded from the disk is taken into memory too if
    /// there is a route from `place` to itself.
    pub fn open_with_ssd(
        mover: &MoverHandle,
        place: Place,
        pages: Pages,
        config: TierConfig,
        ssd: Ssd,
        write_back: &WriteBackConfig,
    ) -> Result<Store, OpenError> {
        Store::over(mover, place, Memory::new(pages, config)?, Some((ssd, write_back)))
    }

    /// The same over memory that is there, with or without a disk.
    pub fn over(
        mover: &MoverHandle,
        place: Place,
        memory: Memory,
        disk: Option<(Ssd, &WriteBackConfig)>,
    ) -> Result<Store, OpenError> {
        let Some((ssd, write_back)) = disk else { return Store::join(mover, place, memory, None) };
        let queue = Arc::new(WriteBack::new(write_back));
        let disk = Disk::new(ssd, Arc::clone(&queue));
        let store = Store::join(mover, place, memory, Some(disk))?;
        let (shared, mover): (Weak<StoreInner>, _) = (Arc::downgrade(&store.shared), mover.clone());
        // The thread ends when the store is closed or gone.
        std::thread::Builder::new()
            .name("forebay-write".into())
            .spawn(move || write_back::run(queue, shared, || mover.now_us()))?;
        Ok(store)
    }

    fn join(
        mover: &MoverHandle,
        place: Place,
        memory: Memory,
        disk: Option<Disk>,
    ) -> Result<Store, OpenError> {
        let tier = Mutex::new(memory.tier);
        let backing = Arc::new(memory.arena);
        let arena = mover.register(place, Arc::clone(&backing) as Arc<dyn Backing>)?;
        let (checksum_jobs, jobs) = channel();
        // The thread ends when the last clone of the store, lease and running operation is gone.
        std::thread::Builder::new().name("forebay-sum".into()).spawn(move || save::run_all(jobs))?;
        let (mover_handle, fetches) = (mover.clone(), fetch::Fetches::default());
        let shared = StoreInner {
            tier,
            mover: mover_handle,
            arena,
            backing,
            fetches,
            partial: fetch_layers::PartialChunks::default(),
            checksum_jobs,
            memory_full: LogGate::new(),
            pins_gave_way: LogGate::new(),
            disk,
        };
        let shared = Arc::new(shared);
        let (bell, rings) = channel();
        shared.tier.lock().set_wipe_bell(bell);
        let weak = Arc::downgrade(&shared);
        // The thread ends with the tier, which has the bell.
        std::thread::Builder::new()
            .name("forebay-wipe".into())
            .spawn(move || forget::overwrite_all(weak, rings))?;
        let listener = Arc::downgrade(&shared);
        mover.on_quiet(move |spans| {
            if let Some(shared) = listener.upgrade() {
                shared.quiet(spans);
            }
        })?;
        Ok(Store { shared })
    }

    /// How many of `ids`, a sequence from its first chunk on, are here and the tenant's,
    /// without a gap: a prefix in memory and what follows it on disk. Looking keeps nothing:
    /// only a lease does.
    pub fn lookup(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let (in_memory, on_disk) = self.locate(tenant, ids);
        in_memory + on_disk
    }

    /// The same, told apart: how many are in memory, and how many of those behind them are on disk.
    pub fn locate(&self, tenant: TenantId, ids: &[ChunkId]) -> (usize, usize) {
        let in_memory = self.shared.tier.lock().lookup(tenant, ids);
        (in_memory, self.shared.open_disk().map_or(0, |disk| disk.ssd.lookup(tenant, &ids[in_memory..])))
    }

    /// Drops these chunks, even if leased, pinned or being written, and says how many there were.
    /// Memory that an operation still uses is free when that ends.
    pub fn delete(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        self.count_in_either(
            ids,
            |ids| self.shared.tier.lock().delete(tenant, ids),
            |ssd, ids| ssd.delete(tenant, ids),
        )
    }

    /// Changes chunks in both tiers, and says how many were changed in one of them at least.
    fn count_in_either(
        &self,
        ids: &[ChunkId],
        in_memory: impl Fn(&[ChunkId]) -> usize,
        on_disk: impl Fn(&Ssd, &[ChunkId]) -> usize,
    ) -> usize {
        let Some(disk) = &self.shared.disk else { return in_memory(ids) };
        let changed = |id: &&ChunkId| {
            let id = std::slice::from_ref(*id);
            in_memory(id) + on_disk(&disk.ssd, id) > 0
        };
        ids.iter().filter(changed).count()
    }

    pub fn stat(&self) -> Stat {
        self.shared.tier.lock().stat()
    }

    pub fn pages(&self) -> Pages {
        self.shared.backing.pages()
    }

    /// What memory keeps, for another process that goes on with it. `None` while anything reads or
    /// writes it.
    pub fn kept(&self) -> Option<Kept> {
        let tier = self.shared.tier.lock();
        tier.is_quiet().then(|| tier.kept())
    }
}

impl StoreInner {
    fn now_us(&self) -> u64 {
        self.mover.now_us()
    }

    /// Bytes of a chunk of the arena that an ended transfer may still touch.
    fn lost_bytes_in(&self, end: &End, chunk: &Range<u64>) -> u64 {
        bytes_in(self.arena, chunk, quarantined(end))
    }

    fn layers_of(&self, chunk: &InArena) -> impl Iterator<Item = Span> {
        let shape = chunk.shape();
        let extents = (0..shape.layers()).filter_map(|layer| shape.layer(layer));
        extents.map(|extent| {
            Span::new(self.arena, chunk.offset_bytes() + extent.start, extent.end - extent.start)
        })
    }

    fn quiet(&self, spans: &[Span]) {
        let mut tier = self.tier.lock();
        for span in spans.iter().filter(|span| span.region == self.arena) {
            tier.quiet(0, span.offset, span.len);
        }
    }
}

/// Spans that an ended transfer may still touch.
fn quarantined(end: &End) -> &[Span] {
    match end {
        End::Done { .. } => &[],
        End::Failed(failure) => &failure.quarantined,
        End::Cancelled { quarantined, .. } => quarantined,
    }
}
