//! Copies between an arena and a cache in host memory, by the client's mover. Driver: it vouches
//! for the cache's addresses.

use crate::cache::{CacheShape, Layer};
use crate::copies::{Batch, Copies, Direction, Job, NotCopied, OnCopied};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{
    Backing, Class, End, LinkSpec, MoverHandle, PathSpec, Place, RegionId, Span, SpanPair, Transfer,
};
use forebay_transfer::{HostLink, mapped};
use std::sync::Arc;

/// The host's memory: the arena and the cache.
pub const HOST: Place = Place::Host(0);
/// Lots that are copied at a time, and their bytes.
const WINDOW: (u32, u64) = (4, 64 << 20);
/// Batches of a load that are on their way at a time: while one is verified the next ones are
/// copied.
const BATCHES: usize = 4;
/// The copying threads are this process's own and end what they began, so no copy is given up as
/// lost; this is the mover's limit for it all the same.
const OP_TIMEOUT_US: u64 = 24 * 3_600 * 1_000_000;

/// Pages of an engine's cache.
pub struct PageMemory {
    address: u64,
    bytes: u64,
}

impl PageMemory {
    /// # Safety
    /// The memory is mapped, readable and writable, and stays so until it is dropped.
    pub unsafe fn new(address: u64, bytes: u64) -> PageMemory {
        PageMemory { address, bytes }
    }
}

// SAFETY: by the contract of `new`; an engine and the connector agree by blocks on who touches
// which page when.
unsafe impl Backing for PageMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.address as *mut u8
    }

    fn len(&self) -> usize {
        self.bytes as usize
    }

    /// An engine may break its promise, which must not end the process.
    fn is_there(&self, offset: usize, len: usize, write: bool) -> bool {
        mapped::is_there(self.address + offset as u64, len as u64, write)
    }
}

#[derive(Debug)]
pub struct HostCopies {
    mover: MoverHandle,
    regions: Arc<[RegionId]>,
}

fn failed(error: impl ToString) -> NotCopied {
    NotCopied(error.to_string())
}

impl HostCopies {
    /// Adds the link, its route and the cache to the mover.
    ///
    /// # Safety
    /// The pages of the cache must be mapped, readable and writable until the mover has ended.
    pub unsafe fn new(
        mover: &MoverHandle,
        cache: &CacheShape,
        threads: usize,
    ) -> Result<HostCopies, NotCopied> {
        let (lots, bytes) = WINDOW;
        let spec = LinkSpec { op_timeout_us: OP_TIMEOUT_US, ..LinkSpec::new("cache", lots, bytes) };
        let link = HostLink::new(threads).map_err(failed)?;
        let link = mover.add_link(spec, Box::new(link)).map_err(failed)?;
        mover.add_path(PathSpec::direct(HOST, HOST, link)).map_err(failed)?.map_err(failed)?;
        let register = |layer: &Layer| {
            // SAFETY: by this function's contract.
            let pages = unsafe { PageMemory::new(layer.address, layer.bytes()) };
            mover.register(HOST, Arc::new(pages))
        };
        let regions = cache.layers().iter().map(register).collect::<Result<_, _>>().map_err(failed)?;
        Ok(HostCopies { mover: mover.clone(), regions })
    }
}

impl Copies for HostCopies {
    fn begin(
        &self,
        direction: Direction,
        _is_awaited: bool,
        _stream: u64,
    ) -> Result<Arc<dyn Job>, NotCopied> {
        let (mover, regions) = (self.mover.clone(), Arc::clone(&self.regions));
        Ok(Arc::new(HostJob { mover, regions, direction }))
    }

    fn region(&self, layer: u32) -> Option<RegionId> {
        self.regions.get(layer as usize).copied()
    }

    fn batches_max(&self, _bytes: u64) -> usize {
        BATCHES
    }
}

/// A load or a store in host memory.
#[derive(Debug)]
struct HostJob {
    mover: MoverHandle,
    regions: Arc<[RegionId]>,
    direction: Direction,
}

impl HostJob {
    fn transfer(&self, batch: &Batch) -> Result<Transfer, NotCopied> {
        let mut pairs = Vec::with_capacity(batch.pieces.len());
        for piece in &batch.pieces {
            let region = self.regions.get(piece.layer as usize);
            let region = region.ok_or_else(|| failed(format!("there is no layer {}", piece.layer)))?;
            let arena = Span::new(batch.arena.region(), piece.arena_offset, piece.bytes);
            let page = Span::new(*region, piece.page_offset, piece.bytes);
            pairs.push(match self.direction {
                Direction::Load => SpanPair::new(arena, page),
                Direction::Store => SpanPair::new(page, arena),
            });
        }
        let is_load = self.direction == Direction::Load;
        Ok(Transfer::new(pairs, if is_load { Class::Demand } else { Class::WriteBack }))
    }
}

impl Job for HostJob {
    fn copy(&self, _layer: u32, batch: Batch, on_copied: OnCopied) {
        let transfer = match self.transfer(&batch) {
            Ok(transfer) => transfer,
            Err(error) => return on_copied(Err(error)),
        };
        let told = Arc::new(Mutex::new(Some(on_copied)));
        let tell = |told: &Mutex<Option<OnCopied>>, end| {
            if let Some(on_copied) = told.lock().take() {
                on_copied(end);
            }
        };
        let at_end = Arc::clone(&told);
        let submitted = self.mover.submit(transfer, move |end| {
            // The arena stays mapped until here.
            drop(batch);
            let is_done = matches!(end, End::Done { .. });
            tell(&at_end, if is_done { Ok(Vec::new()) } else { Err(failed(format!("{end:?}"))) });
        });
        if let Err(error) = submitted {
            tell(&told, Err(failed(error)));
        }
    }

    fn follow(&self, _layer: u32, _stream: u64) -> Result<bool, NotCopied> {
        Ok(false)
    }
}
