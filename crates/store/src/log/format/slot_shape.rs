//! How a chunk lies in its slot: its layers one after another, in extents that start at pages, then
//! one page for the footer. This file knows lengths and offsets inside a slot.
//!
//! ```text
//! slot = extent | extent | ... | footer
//! extent = layer | layer | ... | zeros up to a page
//! ```

use super::page::{Damaged, Fields, PAGE_BYTES, Parser, check};
use crate::shape::{ChunkShape, ShapeError};
use std::ops::Range;
use thiserror::Error;

/// Layers of a chunk on disk at most: a footer has room for so many checksums.
pub const MAX_DISK_LAYERS: usize = 496;

/// Bytes of a layer at most.
pub const MAX_LAYER_BYTES: u64 = STARTS_EXTENT as u64 - 1;

/// An extent is closed as soon as it is at least so long; a shorter rest joins the last one. Where
/// we measured it, a read of 80 KiB took 2.4 times the CPU per byte of one of 1 MiB.
const EXTENT_BYTES: u64 = 512 << 10;

/// Set in the stored length of a layer with which an extent begins.
const STARTS_EXTENT: u32 = 1 << 31;

const PAGE: u64 = PAGE_BYTES as u64;

/// Where the layers of a chunk lie in its slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SlotShape {
    chunk: ChunkShape,
    /// Where each layer starts in the slot.
    starts: Box<[u64]>,
    data_bytes: u64,
}

/// Why chunks of a shape cannot be kept on this disk.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unfit {
    #[error("a chunk of {layers} layers; a footer has room for {MAX_DISK_LAYERS}")]
    Layers { layers: usize },
    #[error("layer {layer} has {bytes} bytes, allowed are {MAX_LAYER_BYTES}")]
    LayerBytes { layer: usize, bytes: u64 },
    #[error("the chunk takes {slot_bytes} bytes; a segment has room for {room_bytes}: make larger segments")]
    TooLarge { slot_bytes: u64, room_bytes: u64 },
}

impl SlotShape {
    /// How chunks of this shape lie in a slot.
    pub fn new(chunk: &ChunkShape) -> Result<SlotShape, Unfit> {
        let layers = chunk.layers();
        if layers > MAX_DISK_LAYERS {
            return Err(Unfit::Layers { layers });
        }
        let lengths: Vec<u64> = (0..layers).filter_map(|layer| chunk.layer(layer)).map(length).collect();
        if let Some(layer) = lengths.iter().position(|bytes| *bytes > MAX_LAYER_BYTES) {
            return Err(Unfit::LayerBytes { layer, bytes: lengths[layer] });
        }
        Ok(SlotShape::placed(chunk.clone(), &extents(&lengths)))
    }

    /// A slot for nothing but a footer.
    pub(crate) fn none() -> SlotShape {
        SlotShape::placed(ChunkShape::none(), &[])
    }

    /// Places layers, given which of them start an extent.
    fn placed(chunk: ChunkShape, starts_extent: &[bool]) -> SlotShape {
        let mut end = 0u64;
        let place = |(layer, starts): (usize, &bool)| {
            let start = if *starts { end.next_multiple_of(PAGE) } else { end };
            end = start + chunk.layer(layer).map_or(0, length);
            start
        };
        let starts = starts_extent.iter().enumerate().map(place).collect();
        SlotShape { chunk, starts, data_bytes: end.next_multiple_of(PAGE) }
    }

    /// The chunk's own shape, without padding.
    pub fn chunk(&self) -> &ChunkShape {
        &self.chunk
    }

    pub fn layers(&self) -> usize {
        self.starts.len()
    }

    /// Where the footer starts: the length of all extents.
    pub fn footer_at(&self) -> u64 {
        self.data_bytes
    }

    /// Whether the layers follow each other without padding, as they do in memory.
    pub fn is_dense(&self) -> bool {
        (0..self.layers()).all(|layer| self.layer(layer) == self.chunk.layer(layer))
    }

    /// Length of a slot.
    pub fn stride_bytes(&self) -> u64 {
        self.data_bytes + PAGE
    }

    /// Where a layer lies in the slot, or `None` if there is no such layer.
    pub fn layer(&self, layer: usize) -> Option<Range<u64>> {
        let start = *self.starts.get(layer)?;
        Some(start..start + self.chunk.layer(layer).map_or(0, length))
    }

    /// The pages of the slot that hold a run of layers, or `None` if some of them do not exist or
    /// the run is empty.
    pub fn window(&self, layers: Range<usize>) -> Option<Range<u64>> {
        let first = self.layer(layers.start).filter(|_| !layers.is_empty())?;
        let last = self.layer(layers.end - 1)?;
        Some(first.start / PAGE * PAGE..last.end.next_multiple_of(PAGE))
    }

    /// Whether no other layer has a part of the pages that hold a run of layers.
    pub fn are_alone(&self, layers: Range<usize>) -> bool {
        let Some(window) = self.window(layers.clone()) else { return false };
        let starts = self.layer(layers.start).is_some_and(|first| first.start == window.start);
        let next = self.layer(layers.end);
        starts && next.is_none_or(|next| next.start >= window.end)
    }

    /// Appends one number per layer: its length, and whether it starts an extent.
    pub(crate) fn words(&self) -> impl Iterator<Item = u32> + '_ {
        let mut end = 0;
        (0..self.layers()).filter_map(|layer| self.layer(layer)).map(move |place| {
            let starts_extent = place.start == 0 || place.start != end;
            // A layer that starts an extent without padding before it reads the same without the
            // mark.
            end = place.end;
            (place.end - place.start) as u32 | if starts_extent { STARTS_EXTENT } else { 0 }
        })
    }

    /// The shape that these numbers say.
    pub(crate) fn from_words(words: &[u32]) -> Result<SlotShape, Damaged> {
        let layers = words.len() as u64;
        check(
            "layers",
            layers,
            (1..=MAX_DISK_LAYERS as u64).contains(&layers),
            format!("1 to {MAX_DISK_LAYERS}"),
        )?;
        let chunk = ChunkShape::new(words.iter().map(|word| u64::from(word & !STARTS_EXTENT))).map_err(
            |error: ShapeError| Damaged::Field { field: "layer_bytes", value: 0, allowed: error.to_string() },
        )?;
        let starts: Vec<bool> = words.iter().map(|word| word & STARTS_EXTENT != 0).collect();
        Ok(SlotShape::placed(chunk, &starts))
    }

    /// Takes `layers` such numbers off a page.
    pub(crate) fn parse(fields: &mut Parser<'_>, layers: u16) -> Result<SlotShape, Damaged> {
        let words: Vec<u32> = (0..layers).map(|_| fields.u32()).collect::<Result<_, _>>()?;
        SlotShape::from_words(&words)
    }

    /// Appends the numbers to a page.
    pub(crate) fn encode(&self, fields: &mut Fields) {
        self.words().for_each(|word| {
            fields.u32(word);
        });
    }
}

fn length(range: Range<u64>) -> u64 {
    range.end - range.start
}

/// Which layers start an extent.
fn extents(lengths: &[u64]) -> Vec<bool> {
    let all: u64 = lengths.iter().sum();
    let mut left = all;
    let mut extent = EXTENT_BYTES;
    let starts = |bytes: &u64| {
        let starts = extent >= EXTENT_BYTES && (left >= EXTENT_BYTES || left == all);
        extent = if starts { *bytes } else { extent.saturating_add(*bytes) };
        left -= *bytes;
        starts
    };
    lengths.iter().map(starts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(lengths: &[u64]) -> SlotShape {
        SlotShape::new(&ChunkShape::new(lengths.iter().copied()).unwrap()).unwrap()
    }

    #[test]
    fn layers_of_whole_pages_lie_without_padding() {
        let mib = 1 << 20;
        let slot = shape(&[mib; 32]);
        assert_eq!((slot.footer_at(), slot.stride_bytes()), (32 * mib, 32 * mib + PAGE));
        assert_eq!(slot.layer(31), Some(31 * mib..32 * mib));
        assert_eq!(slot.window(3..5), Some(3 * mib..5 * mib));
    }

    #[test]
    fn small_layers_share_extents_and_a_short_rest_joins_the_last() {
        // 100 KB layers: 6 reach 512 KiB, so extents are layers 0-5 and 6-13.
        let slot = shape(&[100_000; 14]);
        assert_eq!(slot.layer(5), Some(500_000..600_000));
        assert_eq!(slot.layer(6).unwrap().start, 600_000u64.next_multiple_of(PAGE));
        assert_eq!(slot.layer(13).unwrap().end, 600_000u64.next_multiple_of(PAGE) + 800_000);
        assert_eq!(slot.footer_at() % PAGE, 0);
        assert_eq!(shape(&[5]).stride_bytes(), 2 * PAGE);
    }

    #[test]
    fn shapes_that_no_footer_can_hold_are_refused() {
        let many = ChunkShape::new(vec![1; MAX_DISK_LAYERS + 1]).unwrap();
        assert_eq!(SlotShape::new(&many), Err(Unfit::Layers { layers: MAX_DISK_LAYERS + 1 }));
        let long = ChunkShape::new([1, 1 << 31]).unwrap();
        assert_eq!(SlotShape::new(&long), Err(Unfit::LayerBytes { layer: 1, bytes: 1 << 31 }));
    }

    proptest! {
        #[test]
        fn layers_never_overlap_and_shapes_survive_the_disk(lengths in prop::collection::vec(1u64..400_000, 1..40)) {
            let slot = shape(&lengths);
            let places: Vec<_> = (0..lengths.len()).map(|layer| slot.layer(layer).unwrap()).collect();
            prop_assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(places.iter().zip(&lengths).all(|(place, bytes)| place.end - place.start == *bytes));
            prop_assert!(places.last().unwrap().end <= slot.footer_at());
            let padding = slot.footer_at() - lengths.iter().sum::<u64>();
            prop_assert!(padding < PAGE * (1 + lengths.iter().sum::<u64>() / EXTENT_BYTES));
            let words: Vec<u32> = slot.words().collect();
            prop_assert_eq!(SlotShape::from_words(&words), Ok(slot));
        }

        #[test]
        fn any_numbers_give_a_shape_or_a_reason(words in prop::collection::vec(any::<u32>(), 0..600)) {
            if let Ok(slot) = SlotShape::from_words(&words) {
                prop_assert!(slot.window(0..words.len()).unwrap().end <= slot.footer_at());
            }
        }
    }
}
