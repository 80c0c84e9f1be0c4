//! Transfers cut into commands: none is longer than the drive takes, has more descriptors than the
//! caller has room for, or leaves the namespace. Every byte is in exactly one command, in order.

use super::command::MAX_BLOCKS;
use super::format::Format;
use super::memory::Segment;
use thiserror::Error;

/// What a command may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub format: Format,
    /// The page of memory that the controller was told (CC.MPS).
    pub page_bytes: u64,
    /// What MDTS allows.
    pub max_bytes: u64,
    /// PRP entries with the one in the command, or data blocks.
    pub max_descriptors: u64,
    pub block_bytes: u64,
    pub namespace_blocks: u64,
}

/// The blocks of one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub first_block: u64,
    pub blocks: u32,
}

/// Why a transfer cannot be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SplitError {
    #[error("page_bytes is {0}; powers of two are allowed")]
    PageBytes(u64),
    #[error("block_bytes is {0}; powers of two are allowed")]
    BlockBytes(u64),
    #[error("max_bytes is {max_bytes}; at least a block of {block_bytes} is allowed")]
    MaxBytes { max_bytes: u64, block_bytes: u64 },
    #[error("the transfer has {bytes} bytes; whole blocks of {block_bytes}, at least one, are allowed")]
    Bytes { bytes: u64, block_bytes: u64 },
    #[error("blocks {first_block} to {end} are asked for; the namespace ends at {namespace_blocks}")]
    BeyondNamespace { first_block: u64, end: u64, namespace_blocks: u64 },
    #[error("no whole block fits a command from byte {offset} of segment {segment} on")]
    NoWholeBlock { segment: usize, offset: u64 },
}

/// A transfer that is being cut.
#[derive(Debug)]
pub struct Split<'a> {
    segments: &'a [Segment],
    limits: Limits,
    /// What of the limits counts for bytes, in whole blocks.
    max_bytes: u64,
    next_block: u64,
    /// Where the next command begins: a segment, and bytes of it that are done.
    segment: usize,
    offset: u64,
}

impl<'a> Split<'a> {
    /// Refuses what would leave the namespace, before anything is cut.
    pub fn new(segments: &'a [Segment], first_block: u64, limits: Limits) -> Result<Split<'a>, SplitError> {
        let Limits { page_bytes, block_bytes, namespace_blocks, .. } = limits;
        if !page_bytes.is_power_of_two() {
            return Err(SplitError::PageBytes(page_bytes));
        }
        if !block_bytes.is_power_of_two() {
            return Err(SplitError::BlockBytes(block_bytes));
        }
        // A descriptor's length has 32 bits.
        let max_bytes = limits.max_bytes.min(u64::from(u32::MAX));
        let max_bytes = max_bytes.min(block_bytes.saturating_mul(u64::from(MAX_BLOCKS)));
        let max_bytes = max_bytes - max_bytes % block_bytes;
        if max_bytes == 0 {
            return Err(SplitError::MaxBytes { max_bytes: limits.max_bytes, block_bytes });
        }
        let add = |sum: u64, segment: &Segment| sum.checked_add(segment.bytes);
        let bytes = segments.iter().try_fold(0, add).unwrap_or(u64::MAX);
        if bytes == 0 || !bytes.is_multiple_of(block_bytes) {
            return Err(SplitError::Bytes { bytes, block_bytes });
        }
        let end = first_block.saturating_add(bytes / block_bytes);
        if end > namespace_blocks {
            return Err(SplitError::BeyondNamespace { first_block, end, namespace_blocks });
        }
        Ok(Split { segments, limits, max_bytes, next_block: first_block, segment: 0, offset: 0 })
    }

    /// The next command's blocks, and its memory in `memory`, which is emptied before.
    pub fn next_piece(&mut self, memory: &mut Vec<Segment>) -> Result<Option<Piece>, SplitError> {
        memory.clear();
        self.skip_empty();
        if self.segment == self.segments.len() {
            return Ok(None);
        }
        let mut bytes = self.gather(memory);
        bytes -= drop_part_of_block(memory, bytes % self.limits.block_bytes);
        if bytes == 0 {
            return Err(SplitError::NoWholeBlock { segment: self.segment, offset: self.offset });
        }
        self.advance(bytes);
        let blocks = (bytes / self.limits.block_bytes) as u32;
        let piece = Piece { first_block: self.next_block, blocks };
        self.next_block += u64::from(blocks);
        Ok(Some(piece))
    }

    /// Takes memory until a limit is met; returns how many bytes.
    fn gather(&self, memory: &mut Vec<Segment>) -> u64 {
        let (mut bytes, mut descriptors, mut offset) = (0, 0, self.offset);
        for segment in &self.segments[self.segment..] {
            let Segment { address, bytes: whole } = *segment;
            let rest = Segment { address: address.wrapping_add(offset), bytes: whole - offset };
            offset = 0;
            let room = self.room(rest, memory.last(), self.limits.max_descriptors - descriptors);
            let taken = rest.bytes.min(room).min(self.max_bytes - bytes);
            if taken > 0 {
                memory.push(Segment { bytes: taken, ..rest });
                descriptors += self.descriptors(rest.address, taken);
                bytes += taken;
            }
            if taken < rest.bytes {
                break;
            }
        }
        bytes
    }

    /// Bytes of memory that so many more descriptors can describe behind what is there.
    fn room(&self, memory: Segment, before: Option<&Segment>, descriptors: u64) -> u64 {
        let in_page = memory.address % self.limits.page_bytes;
        let is_page_end = |before: &Segment| {
            before.address.wrapping_add(before.bytes).is_multiple_of(self.limits.page_bytes)
        };
        match self.limits.format {
            Format::Sgl if descriptors > 0 => u64::MAX,
            Format::Prp if before.is_none_or(|before| in_page == 0 && is_page_end(before)) => {
                descriptors.saturating_mul(self.limits.page_bytes).saturating_sub(in_page)
            }
            Format::Sgl | Format::Prp => 0,
        }
    }

    fn descriptors(&self, address: u64, bytes: u64) -> u64 {
        match self.limits.format {
            Format::Sgl => 1,
            Format::Prp => (address % self.limits.page_bytes + bytes).div_ceil(self.limits.page_bytes),
        }
    }

    fn advance(&mut self, bytes: u64) {
        self.offset += bytes;
        while let Some(segment) = self.segments.get(self.segment).filter(|at| self.offset >= at.bytes) {
            self.offset -= segment.bytes;
            self.segment += 1;
        }
    }

    fn skip_empty(&mut self) {
        self.advance(0);
    }
}

/// Takes bytes off the end of the memory, as many as there are at most; returns how many.
fn drop_part_of_block(memory: &mut Vec<Segment>, excess: u64) -> u64 {
    let mut remaining = excess;
    while remaining > 0 {
        let Some(last) = memory.last_mut() else { break };
        let dropped = remaining.min(last.bytes);
        last.bytes -= dropped;
        remaining -= dropped;
        if last.bytes == 0 {
            memory.pop();
        }
    }
    excess - remaining
}
