//! The start of a segment: a page that says which generation of the segment this is and which shape
//! its chunks have. All chunks of a segment have the same shape, so where its slots lie follows
//! from this page alone.
//!
//! ```text
//! segment = header | summary pages | slot 0 | slot 1 | ... | rest
//!
//! 32  segment   u32     number of the segment
//! 36  slots     u16
//! 38  layers    u16
//! 40  sequence  u64     the segment's generation; never used twice in a log
//! 48  layers    u32 each: length, bit 31 set where an extent starts
//! ```

use super::page::{Damaged, Fields, LogUuid, PAGE_BYTES, PageKind, Parser, check};
use super::slot_shape::{SlotShape, Unfit};
use super::summary::{ENTRIES_PER_PAGE, summary_pages};
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;

/// Slots of a segment at most, whatever their length.
pub(crate) const MAX_SLOTS: u64 = 65_535;

/// The shortest slot: one page of data and the footer.
pub(crate) const MIN_STRIDE_BYTES: u64 = 2 * PAGE;

/// The header of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHeader {
    pub segment: u32,
    /// Its generation: raised each time that any segment is opened.
    pub sequence: u64,
    pub slots: Slots,
}

/// The slots of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slots {
    pub shape: Arc<SlotShape>,
    pub count: u16,
}

impl Slots {
    /// What a segment that was never opened has.
    pub(crate) fn none() -> Slots {
        Slots { shape: Arc::new(SlotShape::none()), count: 0 }
    }

    pub fn fit(shape: Arc<SlotShape>, segment_bytes: u64) -> Result<Slots, Unfit> {
        let stride = shape.stride_bytes();
        let room_bytes = segment_bytes.saturating_sub(PAGE);
        // A page of the summary serves many slots, so the first guess is at most a few slots too
        // high.
        let most = (room_bytes / stride).min(MAX_SLOTS);
        let fitting =
            (1..=most).rev().find(|slots| summary_pages(*slots) * PAGE + slots * stride <= room_bytes);
        match fitting {
            Some(slots) => Ok(Slots { shape, count: slots as u16 }),
            None => Err(Unfit::TooLarge { slot_bytes: stride, room_bytes: room_bytes.saturating_sub(PAGE) }),
        }
    }

    /// Bytes of the header and the summary, which lie before the slots.
    pub fn head_bytes(&self) -> u64 {
        PAGE + summary_pages(u64::from(self.count)) * PAGE
    }

    /// Where a slot starts in its segment.
    pub fn slot_at(&self, slot: u16) -> u64 {
        self.head_bytes() + u64::from(slot) * self.shape.stride_bytes()
    }

    /// Where the page of the summary that covers a slot starts in the segment.
    pub fn summary_at(&self, slot: u16) -> u64 {
        PAGE + u64::from(slot) / ENTRIES_PER_PAGE as u64 * PAGE
    }
}

impl SegmentHeader {
    pub fn encode(&self, log: LogUuid) -> Vec<u8> {
        let mut fields = Fields::page(PageKind::Segment, log);
        fields.u32(self.segment).u16(self.slots.count).u16(self.slots.shape.layers() as u16);
        fields.u64(self.sequence);
        self.slots.shape.encode(&mut fields);
        fields.finish_page()
    }

    /// What the page says about a segment of this length.
    pub fn parse(log: LogUuid, segment_bytes: u64, bytes: &[u8]) -> Result<SegmentHeader, Damaged> {
        let mut fields = Parser::page(PageKind::Segment, log, bytes)?;
        let (segment, count, layers) = (fields.u32()?, fields.u16()?, fields.u16()?);
        let sequence = fields.u64()?;
        let shape = Arc::new(SlotShape::parse(&mut fields, layers)?);
        fields.end()?;
        let fitting = Slots::fit(Arc::clone(&shape), segment_bytes).map_or(0, |slots| slots.count);
        check("slots", count, (1..=fitting).contains(&count), format!("1 to {fitting}"))?;
        Ok(SegmentHeader { segment, sequence, slots: Slots { shape, count } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::ChunkShape;
    use proptest::prelude::*;

    const LOG: LogUuid = LogUuid([7; 16]);

    fn shape(lengths: &[u64]) -> Arc<SlotShape> {
        Arc::new(SlotShape::new(&ChunkShape::new(lengths.iter().copied()).unwrap()).unwrap())
    }

    #[test]
    fn a_header_says_where_every_slot_lies() {
        let slots = Slots::fit(shape(&[3000, 3000]), 64 << 10).unwrap();
        assert_eq!((slots.count, slots.head_bytes()), (4, 2 * PAGE));
        assert_eq!(slots.slot_at(3), 2 * PAGE + 9 * PAGE);
        let header = SegmentHeader { segment: 9, sequence: 77, slots };
        assert_eq!(SegmentHeader::parse(LOG, 64 << 10, &header.encode(LOG)), Ok(header));
    }

    #[test]
    fn a_chunk_larger_than_a_segment_is_refused() {
        let refused = Slots::fit(shape(&[64 << 10]), 64 << 10).unwrap_err();
        assert_eq!(refused, Unfit::TooLarge { slot_bytes: 68 << 10, room_bytes: 56 << 10 });
    }

    #[test]
    fn a_header_that_promises_more_slots_than_fit_is_refused() {
        let slots = Slots { count: 5, ..Slots::fit(shape(&[3000, 3000]), 64 << 10).unwrap() };
        let header = SegmentHeader { segment: 0, sequence: 1, slots };
        assert!(matches!(
            SegmentHeader::parse(LOG, 64 << 10, &header.encode(LOG)),
            Err(Damaged::Field { .. })
        ));
    }

    proptest! {
        #[test]
        fn slots_fill_the_segment_and_never_leave_it(layer in 1u64..60_000, segment_pages in 16u64..4096) {
            let segment_bytes = segment_pages * PAGE;
            if let Ok(slots) = Slots::fit(shape(&[layer]), segment_bytes) {
                let end = slots.slot_at(slots.count);
                prop_assert!(end <= segment_bytes);
                prop_assert!(segment_bytes - end < slots.shape.stride_bytes() + PAGE);
            }
        }
    }
}
