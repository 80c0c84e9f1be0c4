//! Checksums: CRC-32C of bytes, and how a layer's sum is bound to the one copy of a chunk that it
//! belongs to. This file knows bytes and identities.

use super::page::{Fields, LogUuid};
use crate::checksum;
use forebay_kv::ChunkId;

/// CRC-32C (Castagnoli polynomial, reflected, initial value and final XOR all ones: RFC 3720,
/// appendix B.4).
///
/// ```
/// assert_eq!(forebay_store::log::crc32c(b"123456789"), 0xe306_9283);
/// ```
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum::of_pieces(&[bytes])
}

/// Names one copy of a chunk on the disk. No two copies ever have the same name: a slot is written
/// once in the life of its segment, and each generation has its own sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyName {
    pub log: LogUuid,
    pub id: ChunkId,
    pub segment: u32,
    /// The generation of the segment in which the copy was written and of the copy.
    pub sequence: u64,
    pub slot: u16,
}

impl CopyName {
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sums_are_those_of_the_reference(bytes in prop::collection::vec(any::<u8>(), 0..5000), cut in 0usize..5000) {
            let (head, tail) = bytes.split_at(cut.min(bytes.len()));
            prop_assert_eq!(crc32c(&bytes), crc32c::crc32c(&bytes));
            prop_assert_eq!(checksum::of_pieces(&[head, tail]), crc32c::crc32c(&bytes));
        }
    }

    #[test]
    fn tags_differ_in_every_part_of_the_name() {
        let name = CopyName {
            log: LogUuid([1; 16]),
            id: ChunkId::from_bytes([2; 32]),
            segment: 3,
            sequence: 4,
            slot: 5,
        };
        let others = [
            CopyName { log: LogUuid([0; 16]), ..name }.checksum_tag(6),
            CopyName { id: ChunkId::from_bytes([0; 32]), ..name }.checksum_tag(6),
            CopyName { segment: 0, ..name }.checksum_tag(6),
            CopyName { sequence: 0, ..name }.checksum_tag(6),
            CopyName { slot: 0, ..name }.checksum_tag(6),
            name.checksum_tag(0),
        ];
        assert!(others.iter().all(|other| *other != name.checksum_tag(6)));
    }
}
