//! Layers of a chunk that were read from disk and checked: in staging, or in the memory that the
//! reader asked for. Whoever gets a [`Staged`] copies from its spans, or uses them where they are.

use super::crypt::ENCRYPTION_BYTES;
use super::pool::StagingBlock;
use crate::log::Footer;
use forebay_transfer::Span;
use std::ops::Range;

/// Layers of a chunk, read and verified. Their staging is free again when this is dropped, so end
/// every transfer from it first.
#[derive(Debug)]
pub struct Staged {
    pub(super) place: StagedIn,
    pub(super) layers: Range<usize>,
    pub(super) footer: Footer,
}

/// Where the layers are.
#[derive(Debug)]
pub(super) enum StagedIn {
    Staging {
        held: StagingBlock,
        /// Where the block starts in the slot on disk.
        starts_at: u64,
        /// Checksums of layers that were encrypted on disk, as they are now.
        decrypted: Option<Box<[u32]>>,
    },
    /// Where the reader wanted them.
    Target {
        into: Span,
        /// Where that starts in the slot on disk.
        starts_at: u64,
    },
}

impl Staged {
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    pub fn chunk_layers(&self) -> usize {
        self.footer.shape.layers()
    }

    pub fn len_bytes(&self) -> u64 {
        self.layers().filter_map(|layer| self.span(layer)).map(|span| span.len).sum()
    }

    /// Whether they were read to where the reader wanted them, and not to staging.
    pub fn is_direct(&self) -> bool {
        matches!(self.place, StagedIn::Target { .. })
    }

    /// Where a layer lies in host memory that the mover knows; of a layer that was not read,
    /// `None`.
    pub fn span(&self, layer: usize) -> Option<Span> {
        let place = self.place(layer)?;
        Some(match &self.place {
            StagedIn::Staging { held, .. } => held.span(place),
            StagedIn::Target { into, .. } => part_of(into, &place),
        })
    }

    /// The bytes of a layer in staging; of any other, `None`.
    pub fn bytes(&self, layer: usize) -> Option<&[u8]> {
        let StagedIn::Staging { held, .. } = &self.place else { return None };
        self.place(layer).map(|place| held.slice(place))
    }

    /// The CRC-32C of a layer; of one that was not read, `None`.
    pub fn crc(&self, layer: usize) -> Option<u32> {
        match &self.place {
            _ if !self.layers.contains(&layer) => None,
            StagedIn::Staging { decrypted: Some(crcs), .. } => crcs.get(layer - self.layers.start).copied(),
            _ => self.footer.crc(layer),
        }
    }

    pub fn crcs(&self) -> Vec<u32> {
        self.layers().filter_map(|layer| self.crc(layer)).collect()
    }

    /// Where a layer lies in the block, without what encryption added to it.
    fn place(&self, layer: usize) -> Option<Range<u64>> {
        let place = self.footer.shape.layer(layer).filter(|_| self.layers.contains(&layer))?;
        match &self.place {
            StagedIn::Target { starts_at, .. } => Some(place.start - starts_at..place.end - starts_at),
            StagedIn::Staging { starts_at, decrypted, .. } => {
                let encryption_bytes = if decrypted.is_some() { ENCRYPTION_BYTES as u64 } else { 0 };
                Some(place.start - starts_at..place.end - starts_at - encryption_bytes)
            }
        }
    }
}

/// `range` of a span that is at least as long.
pub(super) fn part_of(span: &Span, range: &Range<u64>) -> Span {
    Span::new(span.region, span.offset + range.start, range.end - range.start)
}
