//! Where each piece of KV lies inside a chunk.
//!
//! Knows that a chunk is the layers of one worker one after another, and a layer its blocks' pages one after
//! another, each page as the engine has it. Must never know ids, tiers, or which sequence a chunk belongs to.
//!
//! ```text
//! chunk = layer 0 | layer 1 | ...            one extent, `bytes()` long
//! layer = page of block 0 | block 1 | ...    one extent, `layer(i)`
//! page  = [H, N, C] or [N, H, C]             the engine's order within a block
//! ```

use std::ops::Range;

use crate::chunking::{Chunking, MAX_CHUNK_TOKENS};
use crate::extent::{Extent, OutOfRange, Strided, check_index, check_range};
use crate::geometry::{Geometry, MAX_BYTES_PER_TOKEN};
use crate::order::AxisOrder;

// The largest chunk of the largest geometry: offsets cannot overflow.
const _: () = assert!(MAX_BYTES_PER_TOKEN.checked_mul(MAX_CHUNK_TOKENS as u64).is_some());

/// The inner shape of chunks of one worker. Only layers that keep KV per token are in a chunk; state layers
/// are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkLayout {
    chunking: Chunking,
    heads_before_tokens: bool,
    layers: Vec<ChunkLayer>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChunkLayer {
    model_layer: u32,
    offset: u64,
    heads: u32,
    cell_bytes: u64,
}

impl ChunkLayer {
    const fn bytes_per_token(&self) -> u64 {
        self.heads as u64 * self.cell_bytes
    }
}

impl ChunkLayout {
    /// The layout of chunks of a worker with this geometry, in an engine with this order of axes.
    ///
    /// The geometry is the worker's own: see [`Geometry::shard`]. Of the order only heads before or after
    /// tokens matters, for a chunk holds one block after another in every order.
    pub fn new(geometry: &Geometry, order: AxisOrder, chunking: Chunking) -> Self {
        let mut layers: Vec<ChunkLayer> = geometry
            .groups()
            .iter()
            .flat_map(|group| {
                let (heads, cell_bytes) = (group.heads(), group.cell_bytes());
                group.layers.iter().map(move |&model_layer| ChunkLayer {
                    model_layer,
                    offset: 0,
                    heads,
                    cell_bytes,
                })
            })
            .filter(|layer| layer.cell_bytes > 0)
            .collect();
        layers.sort_unstable_by_key(|layer| layer.model_layer);
        let mut bytes = 0;
        for layer in &mut layers {
            layer.offset = bytes;
            bytes += layer.bytes_per_token() * u64::from(chunking.chunk_tokens());
        }
        Self { chunking, heads_before_tokens: order.heads_before_tokens(), layers, bytes }
    }

    /// How tokens are cut into chunks and blocks.
    pub const fn chunking(&self) -> Chunking {
        self.chunking
    }

    /// Layers in a chunk. Less than the model's layers where some keep no KV per token.
    pub const fn layers(&self) -> u32 {
        self.layers.len() as u32
    }

    /// The model's number of a layer of the chunk.
    ///
    /// # Errors
    /// When the chunk has no such layer.
    pub fn model_layer(&self, layer: u32) -> Result<u32, OutOfRange> {
        Ok(self.checked(layer)?.model_layer)
    }

    /// Bytes in a chunk.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a layer lies: one extent.
    ///
    /// # Errors
    /// When the chunk has no such layer.
    pub fn layer(&self, layer: u32) -> Result<Extent, OutOfRange> {
        let layer = self.checked(layer)?;
        let len = layer.bytes_per_token() * u64::from(self.chunking.chunk_tokens());
        Ok(Extent { offset: layer.offset, len })
    }

    /// Where the page of one of the chunk's blocks lies in a layer: one extent.
    ///
    /// # Errors
    /// When the chunk has no such layer or block.
    pub fn page(&self, layer: u32, block: u32) -> Result<Extent, OutOfRange> {
        let layer = self.checked(layer)?;
        check_index("block of the chunk", block, self.chunking.blocks_per_chunk())?;
        let len = layer.bytes_per_token() * u64::from(self.chunking.block_tokens());
        Ok(Extent { offset: layer.offset + u64::from(block) * len, len })
    }

    /// Where some heads of some tokens of a page lie.
    ///
    /// # Errors
    /// When an index does not exist or a range is empty.
    pub fn extents(
        &self,
        layer: u32,
        block: u32,
        heads: Range<u32>,
        tokens: Range<u32>,
    ) -> Result<Strided, OutOfRange> {
        let page = self.page(layer, block)?;
        let ChunkLayer { heads: held, cell_bytes, .. } = *self.checked(layer)?;
        let block_tokens = self.chunking.block_tokens();
        check_range("head", &heads, held)?;
        check_range("token", &tokens, block_tokens)?;
        let (outer, inner, inner_len) =
            if self.heads_before_tokens { (heads, tokens, block_tokens) } else { (tokens, heads, held) };
        let row_bytes = u64::from(inner_len) * cell_bytes;
        Ok(Strided::joined(
            page.offset + u64::from(outer.start) * row_bytes + u64::from(inner.start) * cell_bytes,
            u64::from(inner.end - inner.start) * cell_bytes,
            row_bytes,
            u64::from(outer.end - outer.start),
        ))
    }

    fn checked(&self, layer: u32) -> Result<&ChunkLayer, OutOfRange> {
        check_index("layer of the chunk", layer, self.layers())?;
        Ok(&self.layers[layer as usize])
    }
}
