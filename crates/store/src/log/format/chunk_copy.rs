//! Which copy of a chunk it is that lies somewhere on the disk, and how a layer's checksum is bound
//! to that copy.

use super::page::{Fields, LogUuid};
use crate::checksum::crc32c;
use forebay_kv::ChunkId;

/// Names one copy of a chunk on the disk. No two copies ever have the same name: a slot is written
/// once in the life of its segment, and each generation has its own sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChunkCopy {
    pub log: LogUuid,
    pub id: ChunkId,
    pub segment: u32,
    /// The generation of the segment in which the copy was written and of the copy.
    pub sequence: u64,
    pub slot: u16,
}

impl ChunkCopy {
    /// What a layer's CRC-32C is combined with by exclusive or before it is kept. It is the CRC-32C
    /// of the name and the layer's number, so the sum kept for one layer of one copy is of no use
    /// for any other.
    ///
    /// Exclusive or, unlike a sum over name and bytes, lets the sum that was taken when the bytes
    /// left the GPU go to disk and come back without the bytes being read again.
    pub fn checksum_tag(&self, layer: u16) -> u32 {
        let mut fields = Fields::new();
        fields.bytes(&self.log.0).bytes(self.id.as_bytes());
        fields.u64(self.sequence).u32(self.segment).u16(self.slot).u16(layer);
        crc32c(&fields.finish())
    }
}

#[cfg(test)]
impl ChunkCopy {
    /// Any copy.
    pub(crate) fn sample() -> ChunkCopy {
        let (log, id) = (LogUuid([1; 16]), ChunkId::from_bytes([2; 32]));
        ChunkCopy { log, id, segment: 3, sequence: 4, slot: 5 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_differ_in_every_part_of_the_name() {
        let copy = ChunkCopy::sample();
        let others = [
            ChunkCopy { log: LogUuid([0; 16]), ..copy }.checksum_tag(6),
            ChunkCopy { id: ChunkId::from_bytes([0; 32]), ..copy }.checksum_tag(6),
            ChunkCopy { segment: 0, ..copy }.checksum_tag(6),
            ChunkCopy { sequence: 0, ..copy }.checksum_tag(6),
            ChunkCopy { slot: 0, ..copy }.checksum_tag(6),
            copy.checksum_tag(0),
        ];
        assert!(others.iter().all(|other| *other != copy.checksum_tag(6)));
    }
}
