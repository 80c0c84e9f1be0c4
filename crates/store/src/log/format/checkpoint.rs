//! Checkpoints: which slots of which segments hold chunks, at one moment. Chunks' ids are not in
//! them; they are in the segments' summaries and footers, which are written once with the chunks.
//! So a checkpoint takes a bit per chunk.
//!
//! ```text
//! head
//!  32  serial     u64     the higher of two valid checkpoints counts
//!  40  epoch      u64     of the block before `journal`
//!  48  journal    u64     sequence of the first block to replay
//!  56  sequence   u64     the generation that the next opened segment gets
//!  64  segments   u32
//!  68  doomed     u16     tenants whose bytes are being overwritten
//!  70  zero       u16
//!  72  body       u64     length in bytes
//!  80  crc        u32     CRC-32C of the body
//!  84  zero       u32
//!  88  tenants    u16 each
//! body, in the pages after the head: for each segment
//!   0  state      u8      0 free, 1 open, 2 sealed, 3 withdrawn
//!   1  flags      u8      1: from `frontier` on, or all of it if free, holds zeros or was never written
//!   2  slots      u16
//!   4  frontier   u16     slots from here on hold nothing of this generation
//!   6  summary    u16     slots below are in the summary
//!   8  sequence   u64     the segment's generation, 0 if it was never opened
//!  16  live       a bit per slot, lowest bit first, rounded up to bytes
//! ```

use super::layout::Layout;
use super::page::{Damaged, Fields, LogUuid, PAGE_BYTES, PageKind, Parser, check};
use crate::checksum::crc32c;
use crate::tenant::TenantId;

pub const MAX_DOOMED: usize = 64;

const CLEAN: u8 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentState {
    /// It holds nothing and may be opened.
    Free,
    /// Chunks are written into it.
    Open,
    /// It takes no more chunks.
    Sealed,
    /// Its space belongs to the file system.
    Withdrawn,
}

/// Which slots of a segment hold chunks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SlotSet {
    bits: Vec<u8>,
}

impl SlotSet {
    /// A set without slots, in which there is room for `slots`.
    pub fn new(slots: u16) -> SlotSet {
        SlotSet { bits: vec![0; usize::from(slots).div_ceil(8)] }
    }

    pub fn contains(&self, slot: u16) -> bool {
        self.bits.get(usize::from(slot / 8)).is_some_and(|byte| byte >> (slot % 8) & 1 == 1)
    }

    pub fn set(&mut self, slot: u16, is_in: bool) {
        if let Some(byte) = self.bits.get_mut(usize::from(slot / 8)) {
            let bit = 1 << (slot % 8);
            *byte = if is_in { *byte | bit } else { *byte & !bit };
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (0..self.bits.len() as u32 * 8).map(|slot| slot as u16).filter(|slot| self.contains(*slot))
    }

    pub fn len(&self) -> usize {
        self.bits.iter().map(|byte| byte.count_ones() as usize).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|byte| *byte == 0)
    }
}

/// A segment at the moment of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentRow {
    pub state: SegmentState,
    /// Whether it holds no bytes of earlier generations from the frontier on, or anywhere if it is
    /// free.
    pub clean: bool,
    pub slots: u16,
    /// Slots from here on hold nothing of this generation.
    pub frontier: u16,
    /// Slots below this are in the summary.
    pub summarised: u16,
    pub sequence: u64,
    pub live: SlotSet,
}

impl SegmentRow {
    /// A segment that was never opened.
    pub fn unused() -> SegmentRow {
        SegmentRow {
            state: SegmentState::Free,
            clean: true,
            slots: 0,
            frontier: 0,
            summarised: 0,
            sequence: 0,
            live: SlotSet::new(0),
        }
    }
}

/// The state of the log at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    pub serial: u64,
    /// Epoch of the block before the first one to replay.
    pub epoch: u64,
    /// First block to replay.
    pub journal: u64,
    /// The generation that the next opened segment gets.
    pub next_sequence: u64,
    /// Tenants whose bytes are being overwritten.
    pub doomed: Vec<TenantId>,
    pub segments: Vec<SegmentRow>,
}

/// The first page of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointHead {
    /// The checkpoint, its segments not yet known.
    checkpoint: Checkpoint,
    segments: u32,
    body_bytes: u64,
    body_crc: u32,
}

impl Checkpoint {
    pub fn empty(layout: &Layout) -> Checkpoint {
        let segments = vec![SegmentRow::unused(); layout.segments as usize];
        Checkpoint { serial: 0, epoch: 0, journal: 0, next_sequence: 1, doomed: Vec::new(), segments }
    }

    /// Which of the two areas it is written to.
    pub fn area(&self) -> usize {
        (self.serial % 2) as usize
    }

    /// Head and body, padded to pages.
    pub fn encode(&self, log: LogUuid) -> Vec<u8> {
        let mut body = Fields::new();
        self.segments.iter().for_each(|row| row.encode(&mut body));
        let body = body.finish();
        // Those beyond need no name: their chunks are gone, and for one tenant all is overwritten
        // that no chunk has.
        let doomed = &self.doomed[..self.doomed.len().min(MAX_DOOMED)];
        let mut head = Fields::page(PageKind::Checkpoint, log);
        head.u64(self.serial).u64(self.epoch).u64(self.journal).u64(self.next_sequence);
        head.u32(self.segments.len() as u32).u16(doomed.len() as u16).u16(0);
        head.u64(body.len() as u64).u32(crc32c(&body)).u32(0);
        doomed.iter().for_each(|tenant| {
            head.u16(tenant.0);
        });
        let mut bytes = head.finish_page();
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES), 0);
        bytes
    }
}

impl CheckpointHead {
    /// What the first page of an area says.
    pub fn parse(log: LogUuid, layout: &Layout, bytes: &[u8]) -> Result<CheckpointHead, Damaged> {
        let mut fields = Parser::page(PageKind::Checkpoint, log, bytes)?;
        let (serial, epoch) = (fields.u64()?, fields.u64()?);
        let (journal, next_sequence) = (fields.u64()?, fields.u64()?);
        let (segments, doomed) = (fields.u32()?, fields.u16()?);
        check("segments", segments, segments == layout.segments, layout.segments)?;
        check("doomed", doomed, usize::from(doomed) <= MAX_DOOMED, MAX_DOOMED)?;
        fields.u16()?;
        let (body_bytes, body_crc) = (fields.u64()?, fields.u32()?);
        let room = layout.checkpoints[0].bytes.min(layout.checkpoints[1].bytes) - PAGE_BYTES as u64;
        check("body", body_bytes, body_bytes <= room, format!("{room} or less"))?;
        fields.u32()?;
        let doomed = (0..doomed).map(|_| fields.u16().map(TenantId)).collect::<Result<_, _>>()?;
        let checkpoint = Checkpoint { serial, epoch, journal, next_sequence, doomed, segments: Vec::new() };
        Ok(CheckpointHead { checkpoint, segments, body_bytes, body_crc })
    }

    pub fn serial(&self) -> u64 {
        self.checkpoint.serial
    }

    /// Bytes to read after the head.
    pub fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    /// The checkpoint, given its body, which may be followed by padding.
    pub fn with_body(mut self, bytes: &[u8]) -> Result<Checkpoint, Damaged> {
        let mut fields = Parser::new(bytes);
        let body = fields.slice(usize::try_from(self.body_bytes).unwrap_or(usize::MAX))?;
        if crc32c(body) != self.body_crc {
            return Err(Damaged::Crc);
        }
        let mut fields = Parser::new(body);
        let rows = (0..self.segments).map(|_| SegmentRow::parse(&mut fields));
        self.checkpoint.segments = rows.collect::<Result<_, _>>()?;
        Ok(self.checkpoint)
    }
}

impl SegmentRow {
    fn encode(&self, fields: &mut Fields) {
        let state = match self.state {
            SegmentState::Free => 0,
            SegmentState::Open => 1,
            SegmentState::Sealed => 2,
            SegmentState::Withdrawn => 3,
        };
        fields.u8(state).u8(if self.clean { CLEAN } else { 0 });
        fields.u16(self.slots).u16(self.frontier).u16(self.summarised).u64(self.sequence);
        fields.bytes(&self.live.bits);
    }

    fn parse(fields: &mut Parser<'_>) -> Result<SegmentRow, Damaged> {
        let (state, flags) = (fields.u8()?, fields.u8()?);
        let state = match state {
            0 => SegmentState::Free,
            1 => SegmentState::Open,
            2 => SegmentState::Sealed,
            3 => SegmentState::Withdrawn,
            _ => {
                let allowed = "0 to 3".to_owned();
                return Err(Damaged::Field { field: "state", value: state.into(), allowed });
            }
        };
        let (slots, frontier, summarised) = (fields.u16()?, fields.u16()?, fields.u16()?);
        check("frontier", frontier, frontier <= slots, format!("0 to {slots}"))?;
        check("summary", summarised, summarised <= slots, format!("0 to {slots}"))?;
        let sequence = fields.u64()?;
        let bits = fields.slice(usize::from(slots).div_ceil(8))?.to_vec();
        let live = SlotSet { bits };
        let beyond = (slots..=slots | 7).find(|slot| live.contains(*slot));
        check("live slot", beyond.unwrap_or(0), beyond.is_none(), format!("below {slots}"))?;
        Ok(SegmentRow { state, clean: flags & CLEAN != 0, slots, frontier, summarised, sequence, live })
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::MIN_STRIDE_BYTES;
    use super::*;

    const LOG: LogUuid = LogUuid([7; 16]);

    fn layout() -> Layout {
        Layout::new(1 << 20, 64 << 10).unwrap()
    }

    fn checkpoint() -> Checkpoint {
        let mut checkpoint = Checkpoint::empty(&layout());
        let mut live = SlotSet::new(7);
        [0, 2, 6].into_iter().for_each(|slot| live.set(slot, true));
        let row = SegmentRow {
            state: SegmentState::Open,
            slots: 7,
            frontier: 7,
            summarised: 3,
            sequence: 5,
            live,
            clean: false,
        };
        checkpoint.segments[3] = row;
        checkpoint.doomed = vec![TenantId(4), TenantId(9)];
        Checkpoint { serial: 3, epoch: 8, journal: 100, next_sequence: 6, ..checkpoint }
    }

    fn reparsed(bytes: &[u8]) -> Result<Checkpoint, Damaged> {
        let (head, body) = bytes.split_at(PAGE_BYTES);
        CheckpointHead::parse(LOG, &layout(), head)?.with_body(body)
    }

    #[test]
    fn a_checkpoint_survives_the_disk() {
        let checkpoint = checkpoint();
        assert_eq!(reparsed(&checkpoint.encode(LOG)), Ok(checkpoint.clone()));
        assert_eq!(checkpoint.segments[3].live.iter().collect::<Vec<_>>(), [0, 2, 6]);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let checkpoint = checkpoint();
        let bytes = checkpoint.encode(LOG);
        let body_end = PAGE_BYTES + 16 * checkpoint.segments.len() + 1;
        for bit in 0..body_end * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(reparsed(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn the_largest_checkpoint_fits_its_area() {
        let layout = layout();
        let slots = (layout.segment_bytes / MIN_STRIDE_BYTES) as u16;
        let row = SegmentRow { slots, live: SlotSet::new(slots), ..SegmentRow::unused() };
        let segments = vec![row; layout.segments as usize];
        let checkpoint = Checkpoint { segments, ..Checkpoint::empty(&layout) };
        assert!(checkpoint.encode(LOG).len() as u64 <= layout.checkpoints[0].bytes);
    }
}
