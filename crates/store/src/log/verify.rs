//! Checking all that a log holds: every layer of every chunk is read and must be what was written.
//! This file says what is wrong; it must never change anything or decide what follows.

use super::format::{ChunkCopy, Fault, Footer, NotOpened, SlotShape};
use super::inspect::{ChunkInLog, Inspection, inspect};
use super::medium::Medium;
use std::io;
use thiserror::Error;

/// Why a chunk that the log knows is not one that it can give back.
#[derive(Debug, Error)]
pub enum ChunkFault {
    #[error(transparent)]
    Bytes(#[from] Fault),
    /// The footer says that the chunk has other layers than those of its segment.
    #[error("the chunk's footer has another shape than its segment")]
    Shape,
    #[error("the disk failed: {0}")]
    Io(#[from] io::Error),
}

#[derive(Debug)]
pub struct Verified {
    pub inspection: Inspection,
    /// Bytes of layers that are as they were written.
    pub sound_bytes: u64,
    /// Chunks that are not, and why.
    pub faults: Vec<(ChunkInLog, ChunkFault)>,
}

impl Verified {
    /// Whether nothing is wrong. A log is not to blame for chunks that a crash took before they
    /// were durable.
    pub fn is_sound(&self) -> bool {
        self.faults.is_empty() && self.inspection.recovered.lost == 0 && self.inspection.both_superblocks
    }
}

pub fn verify(medium: &dyn Medium) -> Result<Verified, NotOpened> {
    let (mut sound_bytes, mut faults) = (0, Vec::new());
    let inspection =
        inspect(medium, |chunk| match read_chunk(medium, &chunk.copy, &chunk.shape, chunk.slot_at) {
            Ok(_) => sound_bytes += chunk.shape.chunk().bytes(),
            Err(fault) => faults.push((chunk.clone(), fault)),
        })?;
    Ok(Verified { inspection, sound_bytes, faults })
}

/// Reads a slot that holds this very copy, every layer verified; returns the slot and its footer.
pub(super) fn read_chunk(
    medium: &dyn Medium,
    copy: &ChunkCopy,
    shape: &SlotShape,
    slot_at: u64,
) -> Result<(Vec<u8>, Footer), ChunkFault> {
    let mut slot = vec![0; shape.stride_bytes() as usize];
    medium.read_at(slot_at, &mut slot)?;
    let footer = Footer::of(copy, &slot[shape.footer_at() as usize..])?;
    if *footer.shape != *shape {
        return Err(ChunkFault::Shape);
    }
    for (layer, place) in (0..shape.layers()).filter_map(|layer| Some((layer, shape.layer(layer)?))) {
        footer.verify(layer, &[&slot[place.start as usize..place.end as usize]])?;
    }
    Ok((slot, footer))
}
