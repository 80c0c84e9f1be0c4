//! Pages in memory of a GPU: this side exports its allocations, and its kernels read those of a
//! peer of the same host, over NVLink or PCIe. A peer's memory stays mapped here from read to read,
//! since mapping takes longer than many reads, until the peer is gone: what is mapped stays
//! allocated then.

use super::memory::{Arriving, Begun, DirectMemory, Offered, OnSummed};
use super::message::{Allocation, Heads, Memory};
use super::plan::{self, Move, Stage, part_of_page};
use crate::cache::{CacheShape, Layer};
use crate::errors::NotCopied;
use crate::gpu::Gpu;
use crate::page_tables::PageTables;
use forebay_cuda::checksum::{self, SumList, Width};
use forebay_cuda::device::{Event, ForeignMemory, Stream};
use forebay_cuda::driver::CudaError;
use forebay_cuda::driver::abi::IpcHandle;
use forebay_cuda::event_waiter::EventWaiter;
use forebay_cuda::ipc::{self, Exported, PeerCopies};
use forebay_cuda::kernels::Piece;
use forebay_net::LeasedSpan;
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Allocations of peers that stay mapped, at most. When there are more, those go that are not read.
const MAPPED_MAX: usize = 4096;
/// A request waits for these sums, so they may have most of the GPU for a moment: 4 GiB take 2 ms.
const SUMS_WIDTH: Width = Width { blocks: 512, threads: 256 };
/// What is copied before its sums begin: those of the last stage are all that a read waits for
/// after its copy.
const STAGE_BYTES: u64 = 512 << 20;

#[derive(Debug)]
pub struct GpuMemory {
    gpu: Arc<Gpu>,
    memory: Memory,
    ends: EventWaiter,
    copies: Arc<PeerCopies>,
    /// Where pages that others read are summed up, and those that were read.
    sums: Stream,
    sums_of_reads: Stream,
    mapped: Mutex<HashMap<[u8; 64], Mapped>>,
}

/// A peer's allocation, and which peer that is.
#[derive(Debug)]
struct Mapped {
    memory: Arc<ForeignMemory>,
    peer: String,
}

/// Pages that are being summed up.
struct Summing {
    /// Passed when the sums are there.
    done: Arc<Event>,
    list: SumList,
    /// Memory of a peer that is read until then.
    read: Vec<Arc<ForeignMemory>>,
}

fn failed(error: impl ToString) -> NotCopied {
    NotCopied(error.to_string())
}

impl GpuMemory {
    pub fn new(gpu: &Arc<Gpu>, cache: &CacheShape) -> Result<GpuMemory, NotCopied> {
        let _relaxed = gpu.relaxed();
        let device = gpu.device();
        let mut exported: Vec<Exported> = Vec::new();
        let mut place = |address: u64| {
            let holds = |one: &Exported| (one.start..one.start + one.bytes).contains(&address);
            let at = exported.iter().position(holds);
            if at.is_none() {
                exported.push(ipc::export(device, address).map_err(failed)?);
            }
            let at = at.unwrap_or(exported.len() - 1);
            Ok::<_, NotCopied>((at as u32, address - exported[at].start))
        };
        let mut memory = Memory::of(cache, Vec::new(), &mut place)?;
        memory.allocations = exported.iter().map(allocation).collect();
        let ends = EventWaiter::spawn(device.driver(), "forebay-reads").map_err(failed)?;
        let copies = Arc::new(PeerCopies::new(device).map_err(failed)?);
        let (sums, sums_of_reads) =
            (Stream::urgent(device).map_err(failed)?, Stream::urgent(device).map_err(failed)?);
        let (gpu, mapped) = (Arc::clone(gpu), Mutex::default());
        Ok(GpuMemory { gpu, memory, ends, copies, sums, sums_of_reads, mapped })
    }

    /// Lists these pages, each layer as one extent.
    fn list(&self, pages: &[Vec<u64>], heads: Heads) -> Result<SumList, NotCopied> {
        let cache = self.gpu.cache();
        let extent = |layer: &Layer| {
            let part = part_of_page(layer.page_bytes, cache.group_of(layer).heads, heads);
            let (begin, bytes) = part.ok_or_else(|| failed("a page has not these heads"))?;
            let at = |page: &u64| layer.address + page * layer.stride_bytes + begin;
            Ok(pages[layer.group].iter().map(|page| checksum::Range { at: at(page), bytes }).collect())
        };
        let extents =
            cache.layers().iter().map(extent).collect::<Result<Vec<Vec<checksum::Range>>, NotCopied>>()?;
        let _current = self.gpu.device().enter().map_err(failed)?;
        self.gpu.checksums().list(&extents).map_err(failed)
    }

    /// Has a stream sum up some layers of a list, behind `copied`.
    ///
    /// # Safety
    ///
    /// Nobody writes the listed pages from there on until the stream has come past their sums, and
    /// the list lives until then.
    unsafe fn queue_sums(
        &self,
        list: &SumList,
        layers: Range<usize>,
        copied: Option<&Event>,
        stream: &Stream,
    ) -> Result<(), NotCopied> {
        let _current = self.gpu.device().enter().map_err(failed)?;
        copied.map_or(Ok(()), |copied| stream.wait_for(copied)).map_err(failed)?;
        // SAFETY: pages are the GPU's by the contract of `CudaCopies::new`; the rest is this
        // function's contract.
        unsafe { list.queue_part(layers, stream, SUMS_WIDTH) }.map_err(failed)
    }

    /// Passed when what a stream has to sum up now is.
    fn done(&self, stream: &Stream) -> Result<Arc<Event>, NotCopied> {
        let _current = self.gpu.device().enter().map_err(failed)?;
        let done = Arc::new(Event::to_sleep_for(self.gpu.device()).map_err(failed)?);
        done.record(stream).map_err(failed)?;
        Ok(done)
    }

    /// Tells the sums when they are there, and lets go of what was read.
    fn tell(&self, summing: Summing, on_summed: OnSummed) {
        let Summing { done, list, read } = summing;
        let on_passed = move |passed: Result<(), CudaError>| {
            drop(read);
            on_summed(passed.map(|()| list.digests()).map_err(failed));
        };
        self.ends.when_passed(done, Box::new(on_passed));
    }

    /// The pieces of a read, and the peer's memory that they lie in.
    fn pieces(
        &self,
        offered: &Offered,
        moves: &[Move],
    ) -> Result<(Vec<Piece>, Vec<Arc<ForeignMemory>>), NotCopied> {
        let allocations = &offered.opened.memory.allocations;
        self.forget_former(&offered.peer, allocations);
        let theirs =
            allocations.iter().map(|one| self.map(&offered.peer, one)).collect::<Result<Vec<_>, _>>()?;
        let layers = self.gpu.cache().layers();
        let piece = |each: &Move| Piece {
            from: theirs[each.allocation as usize].address() + each.from,
            to: layers[each.layer as usize].address + each.to,
            bytes: each.bytes,
        };
        Ok((moves.iter().map(piece).collect(), theirs))
    }

    /// Queues a read, and sums of what has come while the rest does. After an error nothing of it
    /// is under way.
    fn queue(
        &self,
        offered: &Offered,
        moves: &[Move],
        begun: Begun,
        arriving: &Arriving,
    ) -> Result<Summing, NotCopied> {
        let begun = begun.ok_or_else(|| failed("nobody says where it begins"))?;
        let (pieces, read) = self.pieces(offered, moves)?;
        let mut list = None;
        let mut queue = || {
            for Stage { moves, layers } in plan::stages(moves, self.gpu.cache().layers().len(), STAGE_BYTES) {
                // SAFETY: pages here are the connector's by the contract of `CudaCopies::new`,
                // those of the peer are mapped until `read` is dropped.
                unsafe { self.copies.copy(&pieces[moves], &begun) }.map_err(failed)?;
                let copied = self.copies.mark().map_err(failed)?;
                // The list of 4 GiB takes a millisecond, during which the first stage is copied.
                let list = match &mut list {
                    Some(list) => list,
                    none => none.insert(self.list(&arriving.pages, arriving.heads)?),
                };
                // SAFETY: the pages are this read's until it has ended. After an error the list
                // lives until the stream is at rest.
                unsafe { self.queue_sums(list, layers, Some(&copied), &self.sums_of_reads)? };
            }
            self.done(&self.sums_of_reads)
        };
        match (queue(), list) {
            (Ok(done), Some(list)) => Ok(Summing { done, list, read }),
            (queued, _list) => {
                // Where they cannot be waited for, the context is lost, and all that was in it.
                let _ = self.copies.stream().synchronize();
                let _ = self.sums_of_reads.synchronize();
                Err(queued.err().unwrap_or_else(|| failed("the cache has no layers")))
            }
        }
    }

    /// Lets go of what a peer of this name had that does not have it now: another process has come
    /// in its place.
    fn forget_former(&self, peer: &str, allocations: &[Allocation]) {
        let has = |name: &[u8; 64]| {
            let is_it = |one: &Allocation| matches!(one, Allocation::Gpu { handle, .. } if handle.as_flattened() == name.as_slice());
            allocations.iter().any(is_it)
        };
        self.mapped.lock().retain(|name, there| there.peer != peer || has(name));
    }

    /// A peer's allocation, mapped here.
    fn map(&self, peer: &str, allocation: &Allocation) -> Result<Arc<ForeignMemory>, NotCopied> {
        let Allocation::Gpu { handle, bytes } = allocation else {
            return Err(failed("the peer's pages are in host memory"));
        };
        let mut name = [0; 64];
        name.as_chunks_mut::<32>().0.copy_from_slice(handle);
        let mut mapped = self.mapped.lock();
        if let Some(there) = mapped.get(&name) {
            return Ok(Arc::clone(&there.memory));
        }
        let device = self.gpu.device();
        let there = ForeignMemory::open(device, IpcHandle(name)).map_err(failed)?;
        // A peer may say that it has more than it has.
        let has = ipc::bytes_from(device.driver(), there.address()).unwrap_or(0);
        if has < *bytes {
            return Err(failed(format!("the peer says {bytes} bytes of an allocation of {has}")));
        }
        if mapped.len() >= MAPPED_MAX {
            mapped.retain(|_, there| Arc::strong_count(&there.memory) > 1);
        }
        let memory = Arc::new(there);
        mapped.insert(name, Mapped { memory: Arc::clone(&memory), peer: peer.to_owned() });
        Ok(memory)
    }
}

fn allocation(exported: &Exported) -> Allocation {
    let mut handle = [[0; 32]; 2];
    handle.copy_from_slice(exported.handle.0.as_chunks::<32>().0);
    Allocation::Gpu { handle, bytes: exported.bytes }
}

impl DirectMemory for GpuMemory {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn sum(&self, pages: &[Vec<u64>], heads: Heads, on_summed: OnSummed) {
        let _relaxed = self.gpu.relaxed();
        let queued = self.list(pages, heads).and_then(|list| {
            let all = 0..self.gpu.cache().layers().len();
            // SAFETY: whoever asks knows that nobody writes them. After an error the list lives
            // until the stream is at rest.
            let queued = unsafe { self.queue_sums(&list, all, None, &self.sums) };
            match queued.and_then(|()| self.done(&self.sums)) {
                Ok(done) => Ok(Summing { done, list, read: Vec::new() }),
                Err(why) => {
                    // As in `queue`.
                    let _ = self.sums.synchronize();
                    Err(why)
                }
            }
        });
        match queued {
            Err(error) => on_summed(Err(error)),
            Ok(summing) => self.tell(summing, on_summed),
        }
    }

    fn spans(&self, _tables: &PageTables) -> Vec<LeasedSpan> {
        Vec::new()
    }

    fn begin(&self, stream: u64) -> Result<Begun, NotCopied> {
        self.gpu.begun(stream).map(Some)
    }

    fn copy(
        self: Arc<Self>,
        offered: &Offered,
        moves: Vec<Move>,
        begun: Begun,
        arriving: Arriving,
        on_summed: OnSummed,
    ) {
        let _relaxed = self.gpu.relaxed();
        match self.queue(offered, &moves, begun, &arriving) {
            Err(why) => on_summed(Err(why)),
            Ok(summing) => self.tell(summing, on_summed),
        }
    }

    fn forget_peers(&self, is_gone: &dyn Fn(&str) -> bool) -> bool {
        let _relaxed = self.gpu.relaxed();
        let mut mapped = self.mapped.lock();
        mapped.retain(|_, there| !is_gone(&there.peer));
        !mapped.is_empty()
    }

    fn close(&self) {
        self.forget_peers(&|_| true);
    }
}
