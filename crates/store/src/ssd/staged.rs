//! Verified bytes of a chunk in staging. This file knows where layers lie in a block; it must never know how they came
//! there.

use super::crypt::SEAL_BYTES;
use super::pool::Held;
use crate::log::Footer;
use forebay_transfer::Span;
use std::ops::Range;

/// Layers of a chunk, read and verified. Their staging is free again when this is dropped, so end every transfer from it
/// first.
#[derive(Debug)]
pub struct Staged {
    pub(super) held: Held,
    pub(super) layers: Range<usize>,
    /// Where the block starts in the slot.
    pub(super) starts_at: u64,
    pub(super) footer: Footer,
    /// Sums of layers that were sealed on disk, as they are now.
    pub(super) opened: Option<Box<[u32]>>,
}

impl Staged {
    /// Which layers.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// How many layers the chunk has.
    pub fn chunk_layers(&self) -> usize {
        self.footer.shape.layers()
    }

    /// Where a layer lies in host memory that the mover knows; of a layer that was not read, `None`.
    pub fn span(&self, layer: usize) -> Option<Span> {
        self.place(layer).map(|place| self.held.span(place))
    }

    /// The bytes of a layer; of one that was not read, `None`.
    pub fn bytes(&self, layer: usize) -> Option<&[u8]> {
        self.place(layer).map(|place| self.held.slice(place))
    }

    /// The CRC-32C of a layer; of one that was not read, `None`.
    pub fn crc(&self, layer: usize) -> Option<u32> {
        match &self.opened {
            _ if !self.layers.contains(&layer) => None,
            Some(crcs) => crcs.get(layer - self.layers.start).copied(),
            None => self.footer.crc(layer),
        }
    }

    fn place(&self, layer: usize) -> Option<Range<u64>> {
        let place = self.footer.shape.layer(layer).filter(|_| self.layers.contains(&layer))?;
        let seal_bytes = if self.opened.is_some() { SEAL_BYTES as u64 } else { 0 };
        Some(place.start - self.starts_at..place.end - self.starts_at - seal_bytes)
    }
}
