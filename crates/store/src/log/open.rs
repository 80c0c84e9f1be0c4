//! Opening the disk tier: what recovery found on each volume becomes rows, relatives and an order
//! of use. This file joins the two.

use super::format::{Current, NotOpened, PAGE_BYTES, Record, SegmentState};
use super::medium::Medium;
use super::recovery::{Found, FoundSegment, Metadata, Recovered, read_metadata, read_segments};
use super::segments::{LogSlot, Segment, Segments, State};
use super::tier::{DiskTier, DiskTierConfig};
use super::volume_state::VolumeState;
use crate::chunk_leases::ChunkLeases;
use crate::entry::{Entry, Row, State as ChunkState};
use crate::index::BATCH;
use crate::tenant::{Quotas, TenantId};
use crate::tier::Tier;
use forebay_kv::ChunkId;

/// Why a log of several is not opened.
#[derive(Debug)]
pub(crate) struct NotOpenedAt {
    pub volume: usize,
    pub error: NotOpened,
}

impl NotOpenedAt {
    fn of(volume: usize) -> impl FnOnce(NotOpened) -> NotOpenedAt {
        move |error| NotOpenedAt { volume, error }
    }
}

impl DiskTier {
    /// Opens the logs on these volumes, whatever state a crash left them in, and says what was
    /// found on each. From here on the files say that they are in use; nothing else was written.
    ///
    /// Chunks that were stored last count as used last.
    pub fn open(
        config: &DiskTierConfig,
        media: &[&dyn Medium],
    ) -> Result<(DiskTier, Vec<Recovered>), NotOpened> {
        DiskTier::open_telling_volume(config, media).map_err(|not| not.error)
    }

    /// The same. An error says of which volume it is.
    pub(crate) fn open_telling_volume(
        config: &DiskTierConfig,
        media: &[&dyn Medium],
    ) -> Result<(DiskTier, Vec<Recovered>), NotOpenedAt> {
        let metadata =
            |(number, medium): (usize, &&dyn Medium)| read_metadata(*medium).map_err(NotOpenedAt::of(number));
        let mut found = media.iter().enumerate().map(metadata).collect::<Result<Vec<_>, _>>()?;
        let (mut volumes, mut segments) = (Vec::new(), Vec::new());
        for (number, metadata) in found.iter().enumerate() {
            let Metadata { superblock, both_sound, .. } = metadata;
            let next = Current { superblock: *superblock, both_sound: *both_sound }.next(false);
            let mut volume = VolumeState::new(next, segments.len(), metadata.journal);
            volume.replay_from = metadata.replay_from;
            volume.checkpoint = metadata.checkpoint;
            volume.doomed = metadata.doomed.clone();
            let unused = || Segment::unused(number as u16, true);
            segments.extend(std::iter::repeat_with(unused).take(next.layout.segments as usize));
            volumes.push(volume);
        }
        let space = Segments::new(volumes, segments, config.relocated_percent);
        let leases = ChunkLeases::new(config.max_leases, config.max_lease_us);
        let quotas = Quotas::new(config.default_quota_bytes, config.quotas.clone());
        let mut tier = Tier::with_space(space, config.max_chunks, leases, quotas);
        for (number, (metadata, medium)) in found.iter_mut().zip(media).enumerate() {
            let mut left_out = 0;
            let adopt = |segment| left_out += tier.adopt(number, segment);
            read_segments(*medium, metadata, adopt).map_err(NotOpenedAt::of(number))?;
            metadata.recovered.left_out = left_out;
            tier.settle_volume(number);
        }
        for (number, medium) in media.iter().enumerate() {
            tier.start_epoch(number, *medium).map_err(NotOpenedAt::of(number))?;
        }
        let doomed: Vec<TenantId> =
            tier.space.volumes.iter().flat_map(|volume| volume.doomed.clone()).collect();
        for tenant in doomed {
            tier.doom_tenant(0, tenant);
        }
        for (number, metadata) in found.iter_mut().enumerate() {
            metadata.recovered.chunks = tier.live_on(number);
        }
        Ok((tier, found.into_iter().map(|metadata| metadata.recovered).collect()))
    }

    /// Takes over a segment and what lives in it. Says how many chunks the index had no room for.
    fn adopt(&mut self, volume: usize, found: FoundSegment) -> u64 {
        let FoundSegment { number, row, slots, chunks } = found;
        let number = self.space.volumes[volume].first_segment + number as usize;
        let segment = &mut self.space.segments[number];
        segment.clean = row.clean;
        segment.sequence = row.sequence;
        match row.state {
            SegmentState::Free => return 0,
            SegmentState::Withdrawn => {
                segment.state = State::Withdrawn;
                self.space.volumes[volume].usable -= 1;
                return 0;
            }
            // Nothing is added to a segment of an earlier epoch: who was writing where is not known
            // any more.
            SegmentState::Open | SegmentState::Sealed => segment.state = State::Sealed,
        }
        segment.occupants = vec![None; usize::from(slots.count)];
        segment.share_bytes = self.space.volumes[volume].layout.segment_bytes / u64::from(slots.count.max(1));
        segment.frontier = slots.count;
        segment.slots = slots;
        if row.state == SegmentState::Open {
            let (sequence, owner) = (row.sequence, &mut self.space.volumes[volume]);
            let segment = owner.local(number);
            owner.pending.push(Record::Sealed { segment, sequence });
            owner.to_summarise.push(number);
        }
        let (note, mut left_out) = (row.state == SegmentState::Open, 0);
        for batch in chunks.chunks(BATCH) {
            // Millions of ids come in no order: the processor fetches the cells of some of them at
            // the same time.
            let ids: Vec<ChunkId> = batch.iter().map(|chunk| chunk.id).collect();
            std::hint::black_box(self.index.find_batch(&ids));
            let mut adopt = |chunk: &&Found| self.adopt_chunk(LogSlot::new(number, chunk.slot), chunk, note);
            left_out += batch.iter().filter(|chunk| !adopt(chunk)).count() as u64;
        }
        left_out
    }

    /// Takes over a chunk, if the index has room for it.
    fn adopt_chunk(&mut self, slot: LogSlot, found: &Found, note: bool) -> bool {
        let Found { tenant, id, parent, .. } = found;
        let row = match self.index.find(id) {
            Some(row) => {
                self.leave_older_copy(row, slot);
                row
            }
            None => match self.insert_recovered(*tenant, id, parent.as_ref(), slot) {
                Some(row) => row,
                None => return false,
            },
        };
        self.space.occupy(slot, row);
        self.quotas.charge_over(self.entry(row).tenant, self.space.segments[slot.segment()].stride_bytes());
        if note {
            self.space.note_stored(slot, *tenant, *id, None);
        }
        true
    }

    /// Of two copies of a chunk, the one in the newer generation counts: the other was about to be
    /// forgotten.
    fn leave_older_copy(&mut self, row: Row, newer: LogSlot) {
        let id = *self.id_of(row);
        if let Some(older) = self.entry_mut(row).slot.replace(newer) {
            self.space.note_forgotten(older, &id);
            let refund = self.space.leave(older, Some(self.entry(row).tenant));
            self.refund(refund);
        }
    }

    /// A row for a chunk that is on disk. `None` if the index is full.
    fn insert_recovered(
        &mut self,
        tenant: TenantId,
        id: &ChunkId,
        parent: Option<&ChunkId>,
        slot: LogSlot,
    ) -> Option<Row> {
        let row = self.index.insert(id)?;
        let parent = parent.and_then(|parent| self.index.find(parent));
        let entry = Entry { slot: Some(slot), state: ChunkState::Writing, ..Entry::unused(tenant) };
        self.put_recovered(row, parent, entry);
        Some(row)
    }

    /// Sorts a volume's segments that hold nothing.
    fn settle_volume(&mut self, volume: usize) {
        let own = self.space.volumes[volume].segments();
        let mut free: Vec<usize> =
            own.clone().filter(|number| self.space.segments[*number].state == State::Free).collect();
        free.sort_by_key(|number| self.space.segments[*number].sequence);
        self.space.volumes[volume].free.extend(free);
        own.for_each(|number| self.space.free_if_empty(number));
    }

    /// Says in a volume's file that it is in use, in an epoch of its own.
    fn start_epoch(&self, volume: usize, medium: &dyn Medium) -> Result<(), NotOpened> {
        let superblock = &self.space.volumes[volume].superblock;
        let offset = superblock.place();
        let failed = |error: std::io::Error| NotOpened::Io { offset, error: error.to_string() };
        let (page, mut read) = (superblock.encode(), vec![0; PAGE_BYTES]);
        medium.write_at(offset, &page).map_err(failed)?;
        medium.sync().map_err(failed)?;
        // A page that could not be read before may be one that never can. Without it the epoch
        // would be used twice.
        medium.read_at(offset, &mut read).map_err(failed)?;
        match read == page {
            true => Ok(()),
            false => Err(failed(std::io::Error::other("it gives back other bytes than were written"))),
        }
    }

    fn live_on(&self, volume: usize) -> u64 {
        let own = &self.space.segments[self.space.volumes[volume].segments()];
        own.iter().map(|segment| u64::from(segment.live)).sum()
    }
}
