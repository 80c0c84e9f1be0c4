//! Where an engine keeps each piece of its KV cache.
//!
//! Knows one paged cache: an axis order, its sizes, and hence the byte offset of any layer, block, head and
//! token within its tensor. Must never know addresses, regions or what a block holds at the moment.
//!
//! vLLM's logical view of a layer is `[B, H, N, C]`, where the cell C packs one head's key and value of one
//! token (or the one latent of MLA). The physical orders are those of [`AxisOrder`].

use std::ops::Range;

use crate::extent::{Extent, OutOfRange, Strided, check_index, check_range};
use crate::order::{Axis, AxisOrder};

/// The most bytes that a layout may span: 2^62, so that no offset overflows.
pub const MAX_LAYOUT_BYTES: u64 = 1 << 62;

/// The sizes of a paged cache, as one worker holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolShape {
    /// L: layers.
    pub layers: u32,
    /// B: blocks in the pool.
    pub blocks: u32,
    /// H: KV heads on this worker.
    pub heads: u32,
    /// N: tokens in a block.
    pub block_tokens: u32,
    /// C in bytes: one head's key and value of one token. `Group::cell_bytes` gives it.
    pub cell_bytes: u32,
}

/// A paged KV cache in memory: an order of axes with sizes.
///
/// ```
/// use forebay_kv::{AxisOrder, Layout, PoolShape};
///
/// // Llama-3.1-8B in bf16: 32 layers, 8 heads of 2 x 128 x 2 bytes.
/// let shape = PoolShape { layers: 32, blocks: 1000, heads: 8, block_tokens: 16, cell_bytes: 512 };
/// let layout = Layout::new(AxisOrder::Lbhnc, shape)?;
/// let page = layout.page(3, 7)?;
/// assert_eq!((page.offset, page.bytes(), page.pieces), (7 * 65_536, 65_536, 1));
/// // Half of the heads of a page, for a worker with twice the tensor parallelism, is one piece too.
/// assert_eq!(layout.extents(3, 7, 4..8, 0..16)?.pieces, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    order: AxisOrder,
    shape: PoolShape,
    /// Bytes from one layer, block, head, token to the next within a tensor.
    layer_stride: u64,
    block_stride: u64,
    head_stride: u64,
    token_stride: u64,
}

/// A layout that cannot exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A size is zero.
    #[error("{field} is 0; allowed: 1 or more")]
    Zero {
        /// The field of [`PoolShape`].
        field: &'static str,
    },
    /// The sizes multiply to too many bytes.
    #[error("the layout spans {bytes} bytes; allowed: up to {MAX_LAYOUT_BYTES}")]
    TooLarge {
        /// The product of all sizes.
        bytes: u128,
    },
}

impl Layout {
    /// A cache of this order and these sizes.
    ///
    /// # Errors
    /// When a size is zero or their product exceeds [`MAX_LAYOUT_BYTES`].
    pub fn new(order: AxisOrder, shape: PoolShape) -> Result<Self, LayoutError> {
        let fields = [
            ("layers", shape.layers),
            ("blocks", shape.blocks),
            ("heads", shape.heads),
            ("block_tokens", shape.block_tokens),
            ("cell_bytes", shape.cell_bytes),
        ];
        if let Some((field, _)) = fields.iter().find(|(_, size)| *size == 0) {
            return Err(LayoutError::Zero { field });
        }
        // Five factors below 2^32 can exceed even u128, so saturate: the limit is far below.
        let bytes = fields.iter().fold(1u128, |product, (_, size)| product.saturating_mul((*size).into()));
        if bytes > MAX_LAYOUT_BYTES.into() {
            return Err(LayoutError::TooLarge { bytes });
        }
        let mut layout =
            Self { order, shape, layer_stride: 0, block_stride: 0, head_stride: 0, token_stride: 0 };
        let mut stride = u64::from(shape.cell_bytes);
        for axis in order.axes().into_iter().rev() {
            let (slot, size) = match axis {
                Axis::Layer => (&mut layout.layer_stride, shape.layers),
                Axis::Block => (&mut layout.block_stride, shape.blocks),
                Axis::Head => (&mut layout.head_stride, shape.heads),
                Axis::Token => (&mut layout.token_stride, shape.block_tokens),
            };
            *slot = stride;
            stride *= u64::from(size);
        }
        if !order.is_cross_layer() {
            // Each layer is a tensor of its own and starts at 0 in it.
            layout.layer_stride = 0;
        }
        Ok(layout)
    }

    /// The order of the axes.
    pub const fn order(&self) -> AxisOrder {
        self.order
    }

    /// The sizes.
    pub const fn shape(&self) -> PoolShape {
        self.shape
    }

    /// How many tensors there are: one a layer, or one for all.
    pub const fn tensors(&self) -> u32 {
        if self.order.is_cross_layer() { 1 } else { self.shape.layers }
    }

    /// Bytes in each tensor.
    pub const fn tensor_bytes(&self) -> u64 {
        let layers = if self.order.is_cross_layer() { self.shape.layers as u64 } else { 1 };
        layers * self.shape.blocks as u64 * self.page_bytes()
    }

    /// Bytes of one block in one layer.
    pub const fn page_bytes(&self) -> u64 {
        self.shape.heads as u64 * self.shape.block_tokens as u64 * self.shape.cell_bytes as u64
    }

    /// The tensor that holds a layer, counted from 0.
    ///
    /// # Errors
    /// When there is no such layer.
    pub fn tensor_of(&self, layer: u32) -> Result<u32, OutOfRange> {
        check_index("layer", layer, self.shape.layers)?;
        Ok(if self.order.is_cross_layer() { 0 } else { layer })
    }

    /// Where some heads of some tokens of one page lie, as offsets within the layer's tensor.
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
        check_index("layer", layer, self.shape.layers)?;
        check_index("block", block, self.shape.blocks)?;
        check_range("head", &heads, self.shape.heads)?;
        check_range("token", &tokens, self.shape.block_tokens)?;
        let offset = u64::from(layer) * self.layer_stride
            + u64::from(block) * self.block_stride
            + u64::from(heads.start) * self.head_stride
            + u64::from(tokens.start) * self.token_stride;
        let (heads, tokens) = (u64::from(heads.end - heads.start), u64::from(tokens.end - tokens.start));
        Ok(if self.order.heads_before_tokens() {
            Strided::joined(offset, tokens * self.token_stride, self.head_stride, heads)
        } else {
            Strided::joined(offset, heads * self.head_stride, self.token_stride, tokens)
        })
    }

    /// Where one block of one layer lies, as offsets within the layer's tensor.
    ///
    /// # Errors
    /// When the layer or the block does not exist.
    pub fn page(&self, layer: u32, block: u32) -> Result<Strided, OutOfRange> {
        self.extents(layer, block, 0..self.shape.heads, 0..self.shape.block_tokens)
    }

    /// Where a block of all layers lies, if that is one extent: in cross-layer orders, or with a single
    /// layer.
    ///
    /// # Errors
    /// When the block does not exist.
    pub fn whole_block(&self, block: u32) -> Result<Option<Extent>, OutOfRange> {
        check_index("block", block, self.shape.blocks)?;
        if self.order.is_cross_layer() {
            let len = u64::from(self.shape.layers) * self.page_bytes();
            return Ok(Some(Extent { offset: u64::from(block) * len, len }));
        }
        if self.shape.layers == 1 { Ok(self.page(0, block)?.contiguous()) } else { Ok(None) }
    }
}
