//! Pages in host memory: a peer reads them through the agent, under the lease, and this side has
//! its mover read a peer's.

use super::memory::{Arriving, Begun, DirectMemory, Offered, OnSummed};
use super::message::{Allocation, Heads, LayerAt, Memory};
use super::plan::{Move, part_of_page};
use crate::cache::{CacheShape, Layer};
use crate::errors::NotCopied;
use crate::host::PageMemory;
use crate::page_tables::PageTables;
use crate::thread_pool::{TaskQueue, Urgency};
use forebay_net::{Access, Agent, LeasedSpan, PeerRegion, Registration};
use forebay_store::checksum;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, End, MoverHandle, RegionId, Span, SpanPair, Transfer};
use std::sync::{Arc, Weak};

/// A cache's memory as its agent offers it, and the way to that of peers.
pub struct HostMemory {
    agent: Weak<Agent>,
    mover: MoverHandle,
    tasks: Arc<TaskQueue>,
    cache: CacheShape,
    ranges: Vec<Registration>,
    memory: Memory,
}

fn failed(error: impl ToString) -> NotCopied {
    NotCopied(error.to_string())
}

impl HostMemory {
    /// Offers the cache's memory under leases.
    ///
    /// # Safety
    /// The pages of the cache must be mapped, readable and writable until the agent has ended.
    pub unsafe fn new(
        agent: &Arc<Agent>,
        mover: &MoverHandle,
        cache: &CacheShape,
        tasks: &Arc<TaskQueue>,
    ) -> Result<HostMemory, NotCopied> {
        let mut ranges = Vec::new();
        for (start, end) in ranges_of(cache.layers()) {
            // SAFETY: layers lie from the start to the end, by this function's contract.
            let memory = Arc::new(unsafe { PageMemory::new(start, end - start) });
            ranges.push(agent.register(memory, Access::LEASED_READ).map_err(failed)?);
        }
        let allocation = |range: &Registration| {
            let PeerRegion { key, generation, len } = range.offered();
            Allocation::Host { key, generation, bytes: len }
        };
        let memory = Memory::of(cache, ranges.iter().map(allocation).collect(), |address| {
            let at = ranges
                .iter()
                .position(|range| (range.base()..range.base() + range.bytes()).contains(&address));
            let at = at.ok_or_else(|| failed("a layer lies nowhere"))?;
            Ok((at as u32, address - ranges[at].base()))
        })?;
        let (agent, mover, cache) = (Arc::downgrade(agent), mover.clone(), cache.clone());
        Ok(HostMemory { agent, mover, tasks: Arc::clone(tasks), cache, ranges, memory })
    }

    /// A transfer of a peer's pages, and the regions that are its own until it has ended.
    fn transfer(&self, offered: &Offered, moves: &[Move]) -> Result<(Transfer, PeerRegions), NotCopied> {
        let agent = self.agent.upgrade().ok_or_else(|| failed("the cache is closed"))?;
        let mut theirs = PeerRegions { agent, regions: Vec::new() };
        for allocation in &offered.opened.memory.allocations {
            let Allocation::Host { key, generation, bytes } = *allocation else {
                return Err(failed("the peer's pages are in memory of a GPU"));
            };
            let region = PeerRegion { key, generation, len: bytes };
            let region = theirs.agent.region(&offered.peer, region, offered.opened.lease).map_err(failed)?;
            theirs.regions.push(region);
        }
        let pair = |each: &Move| {
            let at = self.memory.layers[each.layer as usize];
            let range = self.ranges[at.allocation as usize].region();
            let from = Span::new(theirs.regions[each.allocation as usize], each.from, each.bytes);
            SpanPair::new(from, Span::new(range, at.offset + each.to, each.bytes))
        };
        Ok((Transfer::new(moves.iter().map(pair).collect(), Class::Demand), theirs))
    }
}

/// Regions of the mover for one read.
struct PeerRegions {
    agent: Arc<Agent>,
    regions: Vec<RegionId>,
}

impl Drop for PeerRegions {
    fn drop(&mut self) {
        for region in self.regions.drain(..) {
            // Nothing uses it any more; otherwise it goes with the peer.
            let _ = self.agent.forget_region(region);
        }
    }
}

impl DirectMemory for HostMemory {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn spans(&self, tables: &PageTables) -> Vec<LeasedSpan> {
        let mut spans: Vec<LeasedSpan> = Vec::new();
        for (layer, at) in self.cache.layers().iter().zip(&self.memory.layers) {
            let region = self.ranges[at.allocation as usize].offered();
            for page in tables.pages(layer.group) {
                let offset = at.offset + page * layer.stride_bytes;
                match spans.last_mut() {
                    Some(last) if last.region == region && last.offset + last.len == offset => {
                        last.len += layer.page_bytes;
                    }
                    _ => spans.push(LeasedSpan { region, offset, len: layer.page_bytes }),
                }
            }
        }
        spans
    }

    fn sum(&self, pages: &[Vec<u64>], heads: Heads, on_summed: OnSummed) {
        let sum = |(layer, at): (&Layer, &LayerAt)| {
            let region = self.ranges[at.allocation as usize].region();
            let (begin, bytes) = part_of_page(layer.page_bytes, at.heads, heads)?;
            let offset = |page: &u64| at.offset + page * layer.stride_bytes + begin;
            let span = |page| Span::new(region, offset(page), bytes);
            let spans: Vec<Span> = pages[layer.group].iter().map(span).collect();
            checksum::of_spans(self.mover.memory(), &spans).map(u64::from)
        };
        let layers = self.cache.layers().iter().zip(&self.memory.layers);
        let summed: Option<Vec<u64>> = layers.map(sum).collect();
        on_summed(summed.ok_or_else(|| failed("a page is no host memory, or has not these heads")));
    }

    fn begin(&self, _stream: u64) -> Result<Begun, NotCopied> {
        Ok(None)
    }

    fn copy(
        self: Arc<Self>,
        offered: &Offered,
        moves: Vec<Move>,
        _begun: Begun,
        arriving: Arriving,
        on_summed: OnSummed,
    ) {
        let (transfer, theirs) = match self.transfer(offered, &moves) {
            Ok(transfer) => transfer,
            Err(error) => return on_summed(Err(error)),
        };
        let told = Arc::new(Mutex::new(Some((arriving, on_summed, theirs))));
        let own = Arc::clone(&self);
        let tell = move |told: &Mutex<Option<(Arriving, OnSummed, PeerRegions)>>, copied| {
            let Some((arriving, on_summed, theirs)) = told.lock().take() else { return };
            let memory = Arc::clone(&own);
            // Regions go by a thread that may wait for the mover, and before the read is over.
            own.tasks.post(Urgency::Load, move || {
                drop(theirs);
                match copied {
                    Ok(()) => memory.sum(&arriving.pages, arriving.heads, on_summed),
                    Err(why) => on_summed(Err(why)),
                }
            });
        };
        let (at_end, tell_end) = (Arc::clone(&told), tell.clone());
        let submitted = self.mover.submit(transfer, move |end| {
            let is_done = matches!(end, End::Done { .. });
            tell_end(&at_end, if is_done { Ok(()) } else { Err(failed(format!("{end:?}"))) });
        });
        if let Err(error) = submitted {
            tell(&told, Err(failed(error)));
        }
    }
}

/// The ranges that layers lie in, in order, none overlapping: layers may share memory.
fn ranges_of(layers: &[Layer]) -> Vec<(u64, u64)> {
    let mut each: Vec<(u64, u64)> =
        layers.iter().map(|layer| (layer.address, layer.address + layer.bytes())).collect();
    each.sort_unstable();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (start, end) in each {
        match ranges.last_mut() {
            Some((_, last)) if start <= *last => *last = (*last).max(end),
            _ => ranges.push((start, end)),
        }
    }
    ranges
}

impl std::fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostMemory").field("ranges", &self.ranges.len()).finish_non_exhaustive()
    }
}
