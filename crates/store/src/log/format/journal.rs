//! Blocks of the journal: a page with up to 63 records, and the rule by which blocks of this
//! stretch of the log's life are told from older ones in the same place.
//!
//! ```text
//! 32  epoch     u64     in which the block was written
//! 40  sequence  u64     without gaps since the last checkpoint; block n lies at page n modulo the journal's pages
//! 48  records   u16
//! 50  zero      14 bytes
//! 64  records, 64 bytes each
//! ```
//!
//! A block is written once. It continues the journal if its sequence is the next one and its epoch
//! is not lower than that of the block before. The second condition matters after a crash: of
//! blocks n and n+1 that were written together only n+1 may have survived. The log then writes
//! another block n, and n+1 must not be taken for its successor.

use super::layout::Layout;
use super::page::{Damaged, Fields, LogUuid, PAGE_BYTES, PageKind, Parser, check};
use super::record::{RECORD_BYTES, Record};

pub const RECORDS_PER_BLOCK: usize = 63;

/// Where the next block of a journal is expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalPosition {
    pub sequence: u64,
    /// Its epoch, or a later one.
    pub epoch: u64,
}

impl JournalPosition {
    /// Where the block lies in the file.
    pub fn place(&self, layout: &Layout) -> u64 {
        layout.journal.offset + self.sequence % layout.journal_blocks() * PAGE_BYTES as u64
    }

    /// The block here, with at most 63 records.
    pub fn encode(&self, log: LogUuid, records: &[Record]) -> Vec<u8> {
        let mut fields = Fields::page(PageKind::Journal, log);
        fields.u64(self.epoch).u64(self.sequence).u16(records.len() as u16);
        fields.pad_to(PAGE_BYTES - RECORDS_PER_BLOCK * RECORD_BYTES);
        records.iter().for_each(|record| record.encode(&mut fields));
        fields.finish_page()
    }

    /// The records of the block here, and where the one after it is expected. Anything but `Ok` is
    /// the journal's end.
    ///
    /// `epoch_limit` is the epoch in which the log was last opened: nothing can be newer.
    pub fn parse(
        &self,
        log: LogUuid,
        epoch_limit: u64,
        bytes: &[u8],
    ) -> Result<(Vec<Record>, JournalPosition), Damaged> {
        let mut fields = Parser::page(PageKind::Journal, log, bytes)?;
        let (epoch, sequence) = (fields.u64()?, fields.u64()?);
        check("sequence", sequence, sequence == self.sequence, self.sequence)?;
        let epochs = self.epoch..=epoch_limit;
        check("epoch", epoch, epochs.contains(&epoch), format!("{} to {epoch_limit}", self.epoch))?;
        let count = fields.u16()?;
        check("records", count, usize::from(count) <= RECORDS_PER_BLOCK, RECORDS_PER_BLOCK)?;
        fields.slice(14)?;
        let records = (0..count).map(|_| Record::parse(&mut fields)).collect::<Result<_, _>>()?;
        Ok((records, JournalPosition { sequence: sequence.saturating_add(1), epoch }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: LogUuid = LogUuid([7; 16]);

    fn at(sequence: u64, epoch: u64) -> JournalPosition {
        JournalPosition { sequence, epoch }
    }

    #[test]
    fn a_full_block_survives_the_disk() {
        let records: Vec<Record> = (0..63).map(|segment| Record::Withdrawn { segment }).collect();
        let block = at(8, 3).encode(LOG, &records);
        assert_eq!(at(8, 2).parse(LOG, 3, &block), Ok((records, at(9, 3))));
    }

    #[test]
    fn blocks_of_an_earlier_lap_or_of_before_a_crash_do_not_continue_the_journal() {
        let block = at(8, 3).encode(LOG, &[]);
        assert!(at(9, 3).parse(LOG, 9, &block).is_err(), "an earlier lap");
        assert!(at(8, 4).parse(LOG, 9, &block).is_err(), "written before the log was last opened");
        assert!(at(8, 1).parse(LOG, 2, &block).is_err(), "an epoch that never was");
    }

    #[test]
    fn blocks_take_the_journals_pages_in_turn() {
        let layout = Layout::with_journal(1 << 20, 64 << 10, 16 << 10).unwrap();
        let places = [0, 3, 4, 9].map(|sequence| at(sequence, 0).place(&layout) - layout.journal.offset);
        assert_eq!(places, [0, 3 * 4096, 0, 4096]);
    }
}
