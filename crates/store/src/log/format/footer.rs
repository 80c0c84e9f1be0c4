//! The footer of a chunk, and the check of every read against it. This file knows which copy of
//! which chunk a reader expects and what it got.
//!
//! How a layer that is read alone proves what it is: the index says which copy is expected (chunk,
//! segment, slot, life of the segment). The footer says the same about itself under its own CRC, or
//! it is refused. It holds the layers' checksums, each bound to the copy and the layer. Bytes that
//! give such a sum are the ones that were written there.
//!
//! ```text
//!  32  segment   u32
//!  36  slot      u16
//!  38  tenant    u16
//!  40  sequence  u64      the segment's generation, and the copy's
//!  48  flags     u16      1: has a parent; 2: the layers are encrypted with the tenant's key
//!  50  layers    u16
//!  52  zero      u32
//!  56  bytes     u64      of the chunk, without padding
//!  64  id        32 bytes
//!  96  parent    32 bytes
//! 128  layers    8 bytes each: u32 length, bit 31 set where an extent starts; u32 sum
//! ```

use super::chunk_copy::ChunkCopy;
use super::page::{Damaged, Fields, LogUuid, PageKind, Parser, check};
use super::slot_shape::{MAX_DISK_LAYERS, SlotShape};
use crate::checksum;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::sync::Arc;
use thiserror::Error;

const HAS_PARENT: u16 = 1;
const IS_ENCRYPTED: u16 = 2;

/// What a chunk's last page says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    pub copy: ChunkCopy,
    pub tenant: TenantId,
    pub parent: Option<ChunkId>,
    pub shape: Arc<SlotShape>,
    /// Whether the layers are encrypted with the tenant's key. Lengths and checksums are those of
    /// the encrypted bytes.
    pub encrypted: bool,
    /// The CRC-32C of each layer, combined with the layer's [tag](ChunkCopy::checksum_tag).
    checksums: Box<[u32]>,
}

/// Why what was read is not what was written. To the reader it is a miss, and never data.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    #[error("the chunk's footer: {0}")]
    Footer(#[from] Damaged),
    /// The footer was written in another generation of the segment: an earlier write that came
    /// back, or a lost one.
    #[error("the slot holds generation {found} of its segment, expected is {expected}")]
    Stale { found: u64, expected: u64 },
    /// The footer of another place: a read or a write went astray.
    #[error("the footer is of segment {segment}, slot {slot}")]
    Misplaced { segment: u32, slot: u16 },
    #[error("the slot holds chunk {0:?}")]
    OtherChunk(ChunkId),
    #[error("there is no layer {layer} in {layers}")]
    NoLayer { layer: usize, layers: usize },
    #[error("{found} bytes of layer {layer}, which has {expected}")]
    Length { layer: usize, found: u64, expected: u64 },
    /// The bytes are not the ones that were written.
    #[error("the bytes of layer {layer} do not match their CRC-32C")]
    Bytes { layer: usize },
}

impl Footer {
    /// The footer of a copy, from the CRC-32C of each of its layers.
    pub fn new(
        copy: ChunkCopy,
        tenant: TenantId,
        parent: Option<ChunkId>,
        shape: Arc<SlotShape>,
        crcs: &[u32],
    ) -> Footer {
        debug_assert_eq!(crcs.len(), shape.layers(), "a layer has one sum");
        let checksums =
            crcs.iter().enumerate().map(|(layer, crc)| crc ^ copy.checksum_tag(layer as u16)).collect();
        Footer { copy, tenant, parent, shape, encrypted: false, checksums }
    }

    /// The same, of a copy whose layers are encrypted with the tenant's key, or not.
    pub fn with_encrypted(self, encrypted: bool) -> Footer {
        Footer { encrypted, ..self }
    }

    pub fn encode(&self) -> Vec<u8> {
        let ChunkCopy { log, id, segment, sequence, slot } = self.copy;
        let mut fields = Fields::page(PageKind::Footer, log);
        fields.u32(segment).u16(slot).u16(self.tenant.0).u64(sequence);
        let flags = self.parent.map_or(0, |_| HAS_PARENT) | if self.encrypted { IS_ENCRYPTED } else { 0 };
        fields.u16(flags).u16(self.shape.layers() as u16).u32(0);
        fields.u64(self.shape.chunk().bytes());
        fields.bytes(id.as_bytes()).bytes(&self.parent.map_or([0; 32], |parent| *parent.as_bytes()));
        for (word, sum) in self.shape.words().zip(&self.checksums) {
            fields.u32(word).u32(*sum);
        }
        fields.finish_page()
    }

    /// The footer of whatever copy this page says that it is.
    pub fn parse(log: LogUuid, bytes: &[u8]) -> Result<Footer, Damaged> {
        let mut fields = Parser::page(PageKind::Footer, log, bytes)?;
        let (segment, slot, tenant) = (fields.u32()?, fields.u16()?, TenantId(fields.u16()?));
        let sequence = fields.u64()?;
        let (flags, layers) = (fields.u16()?, fields.u16()?);
        let known = HAS_PARENT | IS_ENCRYPTED;
        check("flags", flags, flags & !known == 0, format!("0 to {known}"))?;
        check("layers", layers, usize::from(layers) <= MAX_DISK_LAYERS, MAX_DISK_LAYERS)?;
        fields.u32()?;
        let chunk_bytes = fields.u64()?;
        let [id, parent] = [fields.bytes()?, fields.bytes()?].map(ChunkId::from_bytes);
        let (mut words, mut checksums) = (Vec::new(), Vec::new());
        for _ in 0..layers {
            words.push(fields.u32()?);
            checksums.push(fields.u32()?);
        }
        let shape = Arc::new(SlotShape::from_words(&words)?);
        let bytes = shape.chunk().bytes();
        check("bytes", chunk_bytes, chunk_bytes == bytes, bytes)?;
        let parent = (flags & HAS_PARENT != 0).then_some(parent);
        let encrypted = flags & IS_ENCRYPTED != 0;
        let copy = ChunkCopy { log, id, segment, sequence, slot };
        Ok(Footer { copy, tenant, parent, shape, encrypted, checksums: checksums.into() })
    }

    /// The footer of the copy that is expected, and of no other.
    ///
    /// ```
    /// use forebay_kv::ChunkId;
    /// use forebay_store::log::{ChunkCopy, Fault, Footer, LogUuid, SlotShape, crc32c};
    /// use forebay_store::{ChunkShape, TenantId};
    /// use std::sync::Arc;
    ///
    /// let (log, id) = (LogUuid([1; 16]), ChunkId::from_bytes([2; 32]));
    /// let name = ChunkCopy { log, id, segment: 0, sequence: 8, slot: 5 };
    /// let shape = Arc::new(SlotShape::new(&ChunkShape::new([4])?)?);
    /// let page = Footer::new(name, TenantId(0), None, shape, &[crc32c(b"good")]).encode();
    ///
    /// let footer = Footer::of(&name, &page)?;
    /// assert_eq!(footer.verify(0, &[b"go", b"od"]), Ok(()));
    /// assert_eq!(footer.verify(0, &[b"evil"]), Err(Fault::Bytes { layer: 0 }));
    /// let older = ChunkCopy { sequence: 7, ..name };
    /// assert_eq!(Footer::of(&older, &page), Err(Fault::Stale { found: 8, expected: 7 }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(expected: &ChunkCopy, bytes: &[u8]) -> Result<Footer, Fault> {
        let footer = Footer::parse(expected.log, bytes)?;
        let found = &footer.copy;
        if (found.segment, found.slot) != (expected.segment, expected.slot) {
            return Err(Fault::Misplaced { segment: found.segment, slot: found.slot });
        }
        if found.sequence != expected.sequence {
            return Err(Fault::Stale { found: found.sequence, expected: expected.sequence });
        }
        if found.id != expected.id {
            return Err(Fault::OtherChunk(found.id));
        }
        Ok(footer)
    }

    /// The CRC-32C that a layer had when it was stored.
    pub fn crc(&self, layer: usize) -> Option<u32> {
        Some(self.checksums.get(layer)? ^ self.copy.checksum_tag(u16::try_from(layer).ok()?))
    }

    pub fn crcs(&self) -> Vec<u32> {
        (0..self.checksums.len()).filter_map(|layer| self.crc(layer)).collect()
    }

    /// Fails unless these pieces, one after another, are the layer as it was written.
    pub fn verify(&self, layer: usize, pieces: &[&[u8]]) -> Result<(), Fault> {
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        self.check(layer, bytes, checksum::of_pieces(pieces))
    }

    /// Fails unless `found` bytes with this CRC-32C are the layer as it was written.
    pub fn check(&self, layer: usize, found: u64, crc: u32) -> Result<(), Fault> {
        let no_layer = Fault::NoLayer { layer, layers: self.checksums.len() };
        let stored = self.crc(layer).ok_or(no_layer.clone())?;
        let place = self.shape.layer(layer).ok_or(no_layer)?;
        let expected = place.end - place.start;
        if found != expected {
            return Err(Fault::Length { layer, found, expected });
        }
        if crc == stored { Ok(()) } else { Err(Fault::Bytes { layer }) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::page::with_bytes;
    use super::*;
    use crate::shape::ChunkShape;

    fn footer(layers: usize) -> Footer {
        let shape = Arc::new(SlotShape::new(&ChunkShape::new(vec![2; layers]).unwrap()).unwrap());
        let crcs: Vec<u32> = (0..layers).map(|layer| layer as u32 * 7).collect();
        Footer::new(ChunkCopy::sample(), TenantId(6), Some(ChunkId::from_bytes([9; 32])), shape, &crcs)
    }

    #[test]
    fn the_largest_footer_fits_its_page() {
        let footer = footer(MAX_DISK_LAYERS);
        assert_eq!(Footer::of(&ChunkCopy::sample(), &footer.encode()), Ok(footer));
    }

    #[test]
    fn an_encrypted_copy_says_so_and_flags_that_mean_nothing_yet_are_refused() {
        for encrypted in [false, true] {
            let footer = footer(2).with_encrypted(encrypted);
            assert_eq!(Footer::of(&ChunkCopy::sample(), &footer.encode()), Ok(footer));
        }
        let page = with_bytes(footer(2).encode(), 48, &[4]);
        let unknown = Damaged::Field { field: "flags", value: 4, allowed: "0 to 3".into() };
        assert_eq!(Footer::of(&ChunkCopy::sample(), &page), Err(Fault::Footer(unknown)));
    }

    #[test]
    fn crcs_are_those_that_were_stored_although_checksums_are_tagged() {
        let footer = footer(4);
        assert_eq!(footer.crcs(), [0, 7, 14, 21]);
        assert!(footer.crcs().iter().zip(&footer.checksums).all(|(crc, sum)| crc != sum));
        assert_eq!(footer.crc(4), None);
    }

    #[test]
    fn a_footer_of_another_copy_is_refused_with_what_it_is() {
        let page = footer(2).encode();
        let of = |expected: ChunkCopy| Footer::of(&expected, &page).unwrap_err();
        let other = ChunkId::from_bytes([0; 32]);
        assert_eq!(
            of(ChunkCopy { sequence: 9, ..ChunkCopy::sample() }),
            Fault::Stale { found: 4, expected: 9 }
        );
        assert_eq!(
            of(ChunkCopy { segment: 9, ..ChunkCopy::sample() }),
            Fault::Misplaced { segment: 3, slot: 5 }
        );
        assert_eq!(
            of(ChunkCopy { slot: 9, ..ChunkCopy::sample() }),
            Fault::Misplaced { segment: 3, slot: 5 }
        );
        assert_eq!(
            of(ChunkCopy { id: other, ..ChunkCopy::sample() }),
            Fault::OtherChunk(ChunkCopy::sample().id)
        );
        let log = LogUuid([0; 16]);
        let found = LogUuid([1; 16]);
        assert_eq!(of(ChunkCopy { log, ..ChunkCopy::sample() }), Fault::Footer(Damaged::OtherLog { found }));
    }

    #[test]
    fn a_layer_of_the_wrong_length_or_number_is_refused() {
        let footer = footer(2);
        assert_eq!(footer.verify(2, &[&[0; 2]]), Err(Fault::NoLayer { layer: 2, layers: 2 }));
        assert_eq!(footer.verify(1, &[&[0; 1]]), Err(Fault::Length { layer: 1, found: 1, expected: 2 }));
    }
}
