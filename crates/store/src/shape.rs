//! The shape of a chunk: how many bytes each of its layers has. This file knows lengths and offsets
//! inside a chunk.

use std::ops::Range;
use thiserror::Error;

/// Layers of a chunk at most.
pub const MAX_LAYERS: usize = 4096;

/// The lengths of a chunk's layers, which lie one after another: a layer is one extent, a run of
/// layers is one extent, and so is the chunk.
///
/// ```
/// use forebay_store::ChunkShape;
///
/// let shape = ChunkShape::new([100, 50, 100])?;
/// assert_eq!((shape.layers(), shape.bytes()), (3, 250));
/// assert_eq!(shape.extent(1..3), Some(100..250));
/// # Ok::<(), forebay_store::ShapeError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ChunkShape {
    /// Where each layer ends, from the start of the chunk.
    ends: Box<[u64]>,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShapeError {
    #[error("a chunk has 1 to {MAX_LAYERS} layers, not {layers}")]
    Layers { layers: usize },
    #[error("layer {layer} has no bytes")]
    EmptyLayer { layer: usize },
    #[error("the chunk is larger than 2^64 bytes")]
    Overflow,
}

impl ChunkShape {
    /// The shape of a chunk whose layers have the given lengths in bytes.
    pub fn new(layer_bytes: impl IntoIterator<Item = u64>) -> Result<ChunkShape, ShapeError> {
        let mut ends = Vec::new();
        let mut end = 0u64;
        for (layer, bytes) in layer_bytes.into_iter().enumerate() {
            if bytes == 0 {
                return Err(ShapeError::EmptyLayer { layer });
            }
            end = end.checked_add(bytes).ok_or(ShapeError::Overflow)?;
            ends.push(end);
        }
        match ends.len() {
            1..=MAX_LAYERS => Ok(ChunkShape { ends: ends.into() }),
            layers => Err(ShapeError::Layers { layers }),
        }
    }

    /// What memory without chunks has for a shape.
    pub(crate) fn none() -> ChunkShape {
        ChunkShape { ends: Box::new([]) }
    }

    pub fn layers(&self) -> usize {
        self.ends.len()
    }

    pub fn bytes(&self) -> u64 {
        self.start(self.ends.len())
    }

    /// Where a layer lies in the chunk, or `None` if there is no such layer.
    pub fn layer(&self, layer: usize) -> Option<Range<u64>> {
        (layer < self.layers()).then(|| self.start(layer)..self.ends[layer])
    }

    /// Where a run of layers lies in the chunk, or `None` if the chunk lacks some of them or the
    /// run is empty.
    pub fn extent(&self, layers: Range<usize>) -> Option<Range<u64>> {
        let inside = layers.start < layers.end && layers.end <= self.layers();
        inside.then(|| self.start(layers.start)..self.start(layers.end))
    }

    fn start(&self, layer: usize) -> u64 {
        layer.checked_sub(1).map_or(0, |before| self.ends[before])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_shapes_are_refused_with_the_layer() {
        assert_eq!(ChunkShape::new([]), Err(ShapeError::Layers { layers: 0 }));
        assert_eq!(ChunkShape::new([1, 0]), Err(ShapeError::EmptyLayer { layer: 1 }));
        assert_eq!(ChunkShape::new([1, u64::MAX]), Err(ShapeError::Overflow));
        assert_eq!(
            ChunkShape::new(vec![1; MAX_LAYERS + 1]),
            Err(ShapeError::Layers { layers: MAX_LAYERS + 1 })
        );
    }

    #[test]
    fn extents_tile_the_chunk() {
        let shape = ChunkShape::new([7, 1, 9]).unwrap();
        assert_eq!([0, 1, 2].map(|layer| shape.layer(layer).unwrap()), [0..7, 7..8, 8..17]);
        assert_eq!((shape.extent(0..3), shape.bytes()), (Some(0..17), 17));
        assert_eq!((shape.layer(3), shape.extent(2..4), shape.extent(1..1)), (None, None, None));
    }
}
