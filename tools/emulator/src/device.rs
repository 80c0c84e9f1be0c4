//! The emulated GPU's memory: one buffer that holds the KV of every block, layer by layer, as vLLM
//! lays it out. This file knows offsets.
//!
//! ```text
//! layer 0: block 0 | block 1 | ... | last block
//! layer 1: block 0 | block 1 | ...
//! ```
//!
//! A block's bytes in one layer are its *extent*; extents of neighbouring blocks are neighbours in
//! memory.

use crate::scheduler::BlockId;
use crate::truth::KvShape;
use forebay_transfer::{HostBuffer, RegionId, Span};
use std::ops::Range;
use std::sync::Arc;

/// The memory. Whoever holds a block may write it; the scheduler sees to it that nobody else reads
/// or writes it then.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    buffer: Arc<HostBuffer>,
    shape: KvShape,
    blocks: usize,
}

impl DeviceMemory {
    /// Zeroed memory for `blocks` blocks.
    pub fn new(shape: KvShape, blocks: u32) -> DeviceMemory {
        let blocks = blocks as usize;
        let buffer = HostBuffer::new(shape.layers() * blocks * shape.extent_bytes());
        DeviceMemory { buffer: Arc::new(buffer), shape, blocks }
    }

    /// What is registered with the mover.
    pub fn buffer(&self) -> Arc<HostBuffer> {
        Arc::clone(&self.buffer)
    }

    /// Copies a block's extent in one layer into `extent`, which is as long.
    pub fn read(&self, layer: usize, block: BlockId, extent: &mut [u8]) {
        let inside = self.buffer.read(self.offset(layer, block), extent);
        debug_assert!(inside, "an extent outside of the device: layer {layer}, {block:?}");
    }

    /// Copies the words `tokens` of every row of `extent` to the block's extent in one layer.
    pub fn write(&self, layer: usize, block: BlockId, tokens: &Range<usize>, extent: &[u8]) {
        let offset = self.offset(layer, block);
        if tokens.len() == self.shape.block_tokens() {
            self.write_at(offset, extent);
            return;
        }
        let row_bytes = self.shape.row_bytes();
        let bytes = KvShape::word_bytes(tokens);
        for (index, row) in extent.chunks_exact(row_bytes).enumerate() {
            self.write_at(offset + index * row_bytes + bytes.start, &row[bytes.clone()]);
        }
    }

    /// The extents of blocks, layer after layer.
    pub fn read_blocks(&self, blocks: &[BlockId]) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes_of(blocks)];
        let extents = bytes.chunks_exact_mut(self.shape.extent_bytes());
        for (extent, (layer, block)) in extents.zip(self.places(blocks)) {
            self.read(layer, block, extent);
        }
        bytes
    }

    /// Writes what [`DeviceMemory::read_blocks`] gave of as many blocks, but for the first ones.
    /// Says whether it was as long as these blocks.
    pub fn write_blocks(&self, blocks: &[BlockId], first: usize, bytes: &[u8]) -> bool {
        if bytes.len() != self.bytes_of(blocks) {
            return false;
        }
        let all = 0..self.shape.block_tokens();
        let extents = bytes.chunks_exact(self.shape.extent_bytes());
        for (index, (extent, (layer, block))) in extents.zip(self.places(blocks)).enumerate() {
            if index % blocks.len() >= first {
                self.write(layer, block, &all, extent);
            }
        }
        true
    }

    fn bytes_of(&self, blocks: &[BlockId]) -> usize {
        self.shape.layers() * blocks.len() * self.shape.extent_bytes()
    }

    fn places<'a>(&self, blocks: &'a [BlockId]) -> impl Iterator<Item = (usize, BlockId)> + 'a {
        (0..self.shape.layers()).flat_map(move |layer| blocks.iter().map(move |&block| (layer, block)))
    }

    fn write_at(&self, offset: usize, bytes: &[u8]) {
        let inside = self.buffer.write(offset, bytes);
        debug_assert!(inside, "bytes outside of the device at {offset}");
    }

    /// Where the extents of `blocks` lie in one layer of the device registered as `region`, in
    /// order; neighbours are one span.
    pub fn spans(&self, region: RegionId, layer: usize, blocks: &[BlockId]) -> Vec<Span> {
        let extent_bytes = self.shape.extent_bytes() as u64;
        let mut spans: Vec<Span> = Vec::new();
        for &block in blocks {
            let offset = self.offset(layer, block) as u64;
            match spans.last_mut() {
                Some(last) if last.offset + last.len == offset => last.len += extent_bytes,
                _ => spans.push(Span::new(region, offset, extent_bytes)),
            }
        }
        spans
    }

    fn offset(&self, layer: usize, block: BlockId) -> usize {
        (layer * self.blocks + block.index()) * self.shape.extent_bytes()
    }
}
