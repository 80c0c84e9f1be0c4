//! The summary of a segment: who is in which slot, so that after a restart one read per segment
//! replaces one per chunk. It repeats what footers say and is rewritten in place; a page that is
//! damaged or late costs reads of footers and nothing else.
//!
//! ```text
//! 32  segment   u32
//! 36  first     u16     slot of the first entry
//! 38  entries   u16
//! 40  sequence  u64     the segment's generation
//! 48  entries, 72 bytes each:
//!       0  id      32 bytes
//!      32  parent  32 bytes
//!      64  tenant  u16     whose bytes the slot holds, even if the chunk is gone
//!      66  flags   u16     1: a chunk is here; 2: it has a parent
//!      68  zero    u32
//! ```

use super::page::{Damaged, Fields, LogUuid, PageKind, Parser, check};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;

pub const ENTRIES_PER_PAGE: usize = 56;

const HAS_CHUNK: u16 = 1;
const HAS_PARENT: u16 = 2;

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SummaryEntry {
    pub tenant: TenantId,
    /// The chunk and the one before it, unless the chunk is gone.
    pub chunk: Option<(ChunkId, Option<ChunkId>)>,
}

/// A page of a summary: the entries of consecutive slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SummaryPage {
    pub segment: u32,
    pub sequence: u64,
    /// Slot of the first entry; a multiple of 56.
    pub first: u16,
}

/// Pages that so many slots need.
pub(crate) fn summary_pages(slots: u64) -> u64 {
    slots.div_ceil(ENTRIES_PER_PAGE as u64)
}

impl SummaryPage {
    /// The page with these entries, of which there are at most 56.
    pub fn encode(&self, log: LogUuid, entries: &[SummaryEntry]) -> Vec<u8> {
        let mut fields = Fields::page(PageKind::Summary, log);
        fields.u32(self.segment).u16(self.first).u16(entries.len() as u16).u64(self.sequence);
        for entry in entries {
            let (id, parent) = entry.chunk.unzip();
            let parent = parent.flatten();
            let flags = id.map_or(0, |_| HAS_CHUNK) | parent.map_or(0, |_| HAS_PARENT);
            for id in [id, parent] {
                fields.bytes(&id.map_or([0; 32], |id| *id.as_bytes()));
            }
            fields.u16(entry.tenant.0).u16(flags).u32(0);
        }
        fields.finish_page()
    }

    /// The entries of this very page, appended to `entries`.
    pub fn parse(&self, log: LogUuid, bytes: &[u8], entries: &mut Vec<SummaryEntry>) -> Result<(), Damaged> {
        let mut fields = Parser::page(PageKind::Summary, log, bytes)?;
        let found = (fields.u32()?, fields.u16()?);
        check("segment", found.0, found.0 == self.segment, self.segment)?;
        check("first", found.1, found.1 == self.first, self.first)?;
        let count = fields.u16()?;
        check("entries", count, usize::from(count) <= ENTRIES_PER_PAGE, ENTRIES_PER_PAGE)?;
        let sequence = fields.u64()?;
        check("sequence", sequence, sequence == self.sequence, self.sequence)?;
        for _ in 0..count {
            let [id, parent] = [fields.bytes()?, fields.bytes()?].map(ChunkId::from_bytes);
            let (tenant, flags) = (TenantId(fields.u16()?), fields.u16()?);
            fields.u32()?;
            let parent = (flags & HAS_PARENT != 0).then_some(parent);
            entries.push(SummaryEntry { tenant, chunk: (flags & HAS_CHUNK != 0).then_some((id, parent)) });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: LogUuid = LogUuid([7; 16]);
    const PAGE: SummaryPage = SummaryPage { segment: 3, sequence: 9, first: 56 };

    fn entries() -> Vec<SummaryEntry> {
        let id = |byte| ChunkId::from_bytes([byte; 32]);
        [None, Some((id(1), None)), Some((id(2), Some(id(1))))]
            .map(|chunk| SummaryEntry { tenant: TenantId(5), chunk })
            .into()
    }

    #[test]
    fn entries_survive_the_disk() {
        let entries = entries().repeat(18);
        let mut found = Vec::new();
        PAGE.parse(LOG, &PAGE.encode(LOG, &entries), &mut found).unwrap();
        assert_eq!(found, entries);
    }

    #[test]
    fn a_page_of_another_life_segment_or_place_is_refused() {
        let page = PAGE.encode(LOG, &entries());
        let others = [
            SummaryPage { sequence: 8, ..PAGE },
            SummaryPage { segment: 4, ..PAGE },
            SummaryPage { first: 0, ..PAGE },
        ];
        for other in others {
            assert!(matches!(other.parse(LOG, &page, &mut Vec::new()), Err(Damaged::Field { .. })));
        }
    }
}
