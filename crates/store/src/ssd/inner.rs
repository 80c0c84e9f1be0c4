//! What all parts of the SSD tier share: the tier behind its lock, the volumes, staging, threads
//! and counters. Every change of the tier goes through here, so that what follows from it is never
//! forgotten: commits that became due, chunks to be relocated. This file knows who is to be woken.

use super::check::Check;
use super::committer::Committer;
use super::crypt::TenantKeys;
use super::in_flight::InFlight;
use super::log_lines::LogLines;
use super::pool::Pool;
use super::stat::{SsdStat, VolumeStat};
use super::thread_pool::ThreadPool;
use crate::disk::DiskHandle;
use crate::log::{DiskPlace, DiskTier, Medium, Relocation, RelocationEnd};
use crate::lost::bytes_in;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{End, MoverHandle, RegionId, Span};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub const VOLUMES_MAX: usize = 64;
/// Chunks that may be written at a time.
pub const WRITES_MAX: usize = 4096;
const RELOCATIONS_MAX: usize = 4;
/// How long none is begun after one failed.
const RELOCATION_BACKOFF_US: u64 = 1_000_000;

/// Begins to relocate a chunk, on whichever thread changed the tier.
pub(super) type StartRelocation = fn(&Arc<SsdInner>, Relocation);

/// The parts of the SSD tier.
pub(super) struct SsdInner {
    pub core: Mutex<Core>,
    pub mover: MoverHandle,
    pub staging: Arc<Pool>,
    pub volumes: Vec<OpenVolume>,
    pub threads: Arc<ThreadPool>,
    /// What is counted as it happens; the rest of it stays empty here.
    pub counts: Mutex<SsdStat>,
    pub lines: LogLines,
    pub keys: TenantKeys,
    /// Of reads and of chunks that are relocated: staging bounds both.
    pub reads: Arc<InFlight>,
    pub writes: Arc<InFlight>,
    pub reserve_bytes: u64,
    pub check: Check,
    pub start_relocation: StartRelocation,
}

pub(super) struct Core {
    tier: DiskTier,
    /// Chunks being relocated.
    relocations: usize,
    /// None is begun before: one that failed would be the next one again.
    relocate_at_us: u64,
}

pub(super) struct OpenVolume {
    pub medium: Arc<dyn Medium>,
    pub disk: DiskHandle,
    /// All of the file.
    pub region: RegionId,
    pub committer: Committer,
}

/// How a transfer failed, if it did.
pub(super) struct Broken {
    pub reason: String,
    /// What a lost operation may still touch.
    pub quarantined: Vec<Span>,
}

impl Broken {
    /// The failure that an end says, if it says one.
    pub fn of(end: End) -> Option<Broken> {
        let (reason, quarantined) = match end {
            End::Done { .. } => return None,
            End::Failed(failure) => (failure.reason.to_string(), failure.quarantined),
            End::Cancelled { quarantined, .. } => ("cancelled".into(), quarantined),
        };
        Some(Broken { reason, quarantined })
    }
}

impl SsdInner {
    pub fn now_us(&self) -> u64 {
        self.mover.now_us()
    }

    pub fn look<R>(&self, at: impl FnOnce(&DiskTier) -> R) -> R {
        at(&self.core.lock().tier)
    }

    /// Changes the tier, wakes the committers that have something to do, and begins to relocate
    /// chunks if room is needed.
    pub fn change<R>(self: &Arc<Self>, act: impl FnOnce(&mut DiskTier, u64) -> R) -> R {
        let now_us = self.now_us();
        let mut core = self.core.lock();
        let result = act(&mut core.tier, now_us);
        let relocations = core.next_relocations(now_us);
        for (number, volume) in self.volumes.iter().enumerate() {
            let (pending, urgent) = (core.tier.has_pending(number), core.tier.commit_is_urgent(number));
            volume.committer.note(now_us, pending, urgent);
        }
        drop(core);
        relocations.into_iter().for_each(|relocation| (self.start_relocation)(self, relocation));
        result
    }

    /// A chunk is not being relocated any more.
    pub fn end_relocation(self: &Arc<Self>, relocation: Relocation, end: RelocationEnd) {
        let now_us = self.now_us();
        let mut core = self.core.lock();
        core.relocations -= 1;
        if matches!(end, RelocationEnd::Failed { .. }) {
            core.relocate_at_us = now_us + RELOCATION_BACKOFF_US;
        }
        drop(core);
        self.change(|tier, now_us| tier.end_relocation(now_us, relocation, end));
    }

    /// Changes the tier on behalf of a committer, which looks by itself for what follows.
    pub fn change_quietly<R>(&self, act: impl FnOnce(&mut DiskTier, u64) -> R) -> R {
        let now_us = self.now_us();
        act(&mut self.core.lock().tier, now_us)
    }

    /// `range` of the slot as a span of its volume's region.
    pub fn slot_span(&self, slot: &DiskPlace, range: Range<u64>) -> Span {
        let region = self.volumes[slot.volume].region;
        Span::new(region, slot.slot_at + range.start, range.end - range.start)
    }

    pub fn path_of(&self, slot: &DiskPlace) -> &Path {
        self.volumes[slot.volume].disk.path()
    }

    /// Bytes of a slot that an ended transfer may still touch.
    pub fn lost_bytes(&self, slot: &DiskPlace, quarantined: &[Span]) -> u64 {
        let region = self.volumes[slot.volume].region;
        let bytes = slot.slot_at..slot.slot_at + slot.shape.stride_bytes();
        bytes_in(region, &bytes, quarantined)
    }

    /// Spans that were quarantined are touched by nobody any more.
    pub fn quiet(self: &Arc<Self>, spans: &[Span]) {
        self.staging.quiet(spans);
        for (number, volume) in self.volumes.iter().enumerate() {
            for span in spans.iter().filter(|span| span.region == volume.region) {
                self.change(|tier, _| tier.quiet(number, span.offset, span.len));
            }
        }
    }

    pub fn stat(&self) -> SsdStat {
        SsdStat {
            tier: self.look(DiskTier::stat),
            staging: self.staging.usage(),
            volumes: self.volumes.iter().map(OpenVolume::stat).collect(),
            ..self.counts.lock().clone()
        }
    }
}

impl OpenVolume {
    fn stat(&self) -> VolumeStat {
        VolumeStat {
            read_only: self.committer.is_read_only(),
            physical_bytes: self.medium.space().map_or(0, |space| space.held_bytes),
            link: self.disk.stats(),
            ..*self.committer.counts.lock()
        }
    }
}

impl Core {
    pub fn new(tier: DiskTier) -> Core {
        Core { tier, relocations: 0, relocate_at_us: 0 }
    }

    fn next_relocations(&mut self, now_us: u64) -> Vec<Relocation> {
        let mut relocations = Vec::new();
        while self.relocations < RELOCATIONS_MAX
            && now_us >= self.relocate_at_us
            && let Some(relocation) = self.tier.next_relocation(now_us)
        {
            self.relocations += 1;
            relocations.push(relocation);
        }
        relocations
    }
}

impl std::fmt::Debug for SsdInner {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("SsdInner").field("volumes", &self.volumes.len()).finish_non_exhaustive()
    }
}
