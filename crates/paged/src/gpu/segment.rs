//! How a batch is cut into segments, which are what a copy stream carries at a time, with addresses
//! for offsets. The batch ends with its last segment, behind which its extents are summed up. This
//! file knows addresses and who is told.

use crate::cache::CacheShape;
use crate::copies::{self, Batch, Direction, Extent, ExtentPart, NotCopied, OnCopied};
use forebay_client::NodeArena;
use forebay_cuda::checksum::{Checksums, Range, SumList};
use forebay_cuda::kernels::Piece;
use forebay_cuda::pinned::PinnedBehind;
use forebay_cuda::stream_copy::BATCH_PIECES_MAX;
use forebay_transfer::Backing;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The batch that segments belong to. Whoever gave it is told when the last of them is dropped.
pub struct BatchEnd {
    bytes: u64,
    /// Segments that have not arrived.
    missing: AtomicUsize,
    failed: Mutex<Option<NotCopied>>,
    sums: Option<SumList>,
    on_copied: Mutex<Option<OnCopied>>,
    /// Mapped and pinned until then.
    _arena: Arc<NodeArena>,
    _pinned: Arc<PinnedBehind>,
}

impl BatchEnd {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What is to be summed up behind the last segment.
    pub fn sums(&self) -> Option<&SumList> {
        self.sums.as_ref()
    }

    /// A segment is over: its bytes have arrived, or nothing touches them any more.
    pub fn end(&self, outcome: Result<(), NotCopied>) {
        match outcome {
            Ok(()) => drop(self.missing.fetch_sub(1, Ordering::AcqRel)),
            Err(why) => drop(self.failed.lock().get_or_insert(why)),
        }
    }
}

impl Drop for BatchEnd {
    fn drop(&mut self) {
        let failed = self.failed.lock().take();
        let outcome = match (failed, *self.missing.get_mut()) {
            (Some(why), _) => Err(why),
            (None, 0) => Ok(self.sums.as_ref().map_or_else(Vec::new, SumList::sums)),
            (None, _) => Err(NotCopied("it was given up".into())),
        };
        if let Some(on_copied) = self.on_copied.lock().take() {
            on_copied(outcome);
        }
    }
}

impl std::fmt::Debug for BatchEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchEnd").field("missing", &self.missing).finish_non_exhaustive()
    }
}

/// Cuts a batch into segments of at most `segment_bytes`, or one piece. None if it has a piece of
/// no layer, or extents for which there is no room; what comes back with them is told their ends.
pub fn cut(
    batch: Batch,
    cache: &CacheShape,
    direction: Direction,
    pinned: &Arc<PinnedBehind>,
    checksums: &Arc<Checksums>,
    segment_bytes: u64,
    on_copied: OnCopied,
) -> (Vec<Vec<Piece>>, Arc<BatchEnd>) {
    let (arena, pinned_bytes) = (batch.arena.memory().as_ptr() as u64, pinned.piece_bytes());
    let (sums, failed) = match sums(&batch, arena, cache, pinned_bytes, checksums) {
        Ok(sums) => (sums, None),
        Err(why) => (None, Some(why)),
    };
    let lists = match failed {
        Some(_) => Vec::new(),
        None => lists(&batch.pieces, arena, cache, direction, pinned_bytes, segment_bytes),
    };
    let end = BatchEnd {
        bytes: batch.pieces.iter().map(|piece| piece.bytes).sum(),
        missing: AtomicUsize::new(lists.len()),
        failed: Mutex::new(failed),
        sums,
        on_copied: Mutex::new(Some(on_copied)),
        _arena: batch.arena,
        _pinned: Arc::clone(pinned),
    };
    (lists, Arc::new(end))
}

/// What of the arena a batch copies or sums up: offsets and bytes.
pub fn arena_ranges(batch: &Batch) -> Vec<(u64, u64)> {
    let copied = batch.pieces.iter().map(|piece| (piece.arena_offset, piece.bytes));
    let summed = batch.extents.iter().flatten().filter_map(|part| match *part {
        ExtentPart::Arena { offset, bytes } => Some((offset, bytes)),
        ExtentPart::Page { .. } => None,
    });
    copied.chain(summed).collect()
}

/// Lists what is to be summed up, if anything is and all of the batch is of layers that there are.
fn sums(
    batch: &Batch,
    arena: u64,
    cache: &CacheShape,
    pinned_bytes: u64,
    checksums: &Arc<Checksums>,
) -> Result<Option<SumList>, NotCopied> {
    let of_pages = batch.extents.iter().flatten().filter_map(|part| match *part {
        ExtentPart::Page { layer, .. } => Some(layer),
        ExtentPart::Arena { .. } => None,
    });
    let mut layers = batch.pieces.iter().map(|piece| piece.layer).chain(of_pages);
    if let Some(stray) = layers.find(|layer| *layer as usize >= cache.layers().len()) {
        return Err(NotCopied(format!("there is no layer {stray}")));
    }
    if batch.extents.is_empty() {
        return Ok(None);
    }
    let ranges: Vec<_> =
        batch.extents.iter().map(|extent| ranges(extent, arena, cache, pinned_bytes)).collect();
    checksums.list(&ranges).map(Some).map_err(|error| NotCopied(error.to_string()))
}

/// The parts of an extent by address, all of layers that there are. None goes across registrations
/// of the arena.
fn ranges(extent: &Extent, arena: u64, cache: &CacheShape, pinned_bytes: u64) -> Vec<Range> {
    let mut ranges = Vec::with_capacity(extent.len());
    for part in extent {
        match *part {
            ExtentPart::Page { layer, offset, bytes } => {
                ranges.push(Range { at: cache.layers()[layer as usize].address + offset, bytes });
            }
            ExtentPart::Arena { offset, bytes } => {
                let of_arena = cut_at_seams(offset, bytes, pinned_bytes);
                ranges.extend(of_arena.map(|(offset, bytes)| Range { at: arena + offset, bytes }));
            }
        }
    }
    ranges
}

/// The pieces by address, all of layers that there are, in lists of at most `segment_bytes`. No
/// piece goes across a multiple of `pinned_bytes` of the arena, where one registration ends and
/// another begins: the driver refuses a copy over both. A piece that goes on there begins a list as
/// well, since pieces of a list that touch are copied as one.
fn lists(
    pieces: &[copies::Piece],
    arena: u64,
    cache: &CacheShape,
    direction: Direction,
    pinned_bytes: u64,
    segment_bytes: u64,
) -> Vec<Vec<Piece>> {
    let (mut lists, mut list, mut bytes, mut last_ends, mut last_layer) =
        (Vec::new(), Vec::new(), 0, (0, 0), 0);
    let cut = pieces.iter().flat_map(|piece| {
        let parts = cut_at_seams(piece.arena_offset, piece.bytes, pinned_bytes);
        parts.map(move |(offset, len)| (piece, offset, len))
    });
    for (piece, offset, len) in cut {
        let within = offset - piece.arena_offset;
        let far = cache.layers()[piece.layer as usize].address + piece.page_offset + within;
        let is_full = bytes + len > segment_bytes || list.len() == BATCH_PIECES_MAX;
        // What touches is copied as one, which the driver refuses across registrations, and across
        // layers if each is an allocation.
        let is_at_seam = offset.is_multiple_of(pinned_bytes) && offset == last_ends.0;
        let is_across_layers = piece.layer != last_layer && (offset, far) == last_ends;
        if is_full || is_at_seam || is_across_layers {
            lists.extend(Some(std::mem::take(&mut list)).filter(|list| !list.is_empty()));
            bytes = 0;
        }
        let near = arena + offset;
        list.push(match direction {
            Direction::Load => Piece { from: near, to: far, bytes: len },
            Direction::Store => Piece { from: far, to: near, bytes: len },
        });
        (bytes, last_ends, last_layer) = (bytes + len, (offset + len, far + len), piece.layer);
    }
    lists.extend(Some(list).filter(|list| !list.is_empty()));
    lists
}

/// What of a range of the arena lies in each registration: where in the arena, how many bytes.
fn cut_at_seams(arena_offset: u64, bytes: u64, pinned_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let (mut at, end) = (arena_offset, arena_offset + bytes);
    std::iter::from_fn(move || {
        let len = (end - at).min(pinned_bytes - at % pinned_bytes);
        let offset = at;
        at += len;
        (len > 0).then_some((offset, len))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cache::{ALL_PAGES, Group, Layer};

    const ARENA: u64 = 1 << 40;
    const LAYER: u64 = 1 << 50;
    const PINNED: u64 = 1000;

    /// Layers that lie one behind the other.
    fn cache(layers: u64) -> CacheShape {
        let layer = |number| {
            let address = LAYER + number * 10_000;
            Layer { address, pages: 10, stride_bytes: 1000, page_bytes: 1000, group: 0 }
        };
        let group = Group { page_tokens: 1, heads: 1, kept_pages: ALL_PAGES };
        CacheShape::new((0..layers).map(layer).collect(), vec![group], 1).unwrap()
    }

    /// Lists of pieces (offset in the arena, bytes) that lie one behind the other in a layer:
    /// (from, to, bytes) of each.
    fn loaded(pieces: &[(u64, u64)], segment_bytes: u64) -> Vec<Vec<(u64, u64, u64)>> {
        let cache = cache(1);
        let mut page_offset = 0;
        let piece = |&(arena_offset, bytes): &(u64, u64)| {
            page_offset += bytes;
            copies::Piece { arena_offset, layer: 0, page_offset: page_offset - bytes, bytes }
        };
        let pieces: Vec<_> = pieces.iter().map(piece).collect();
        let lists = lists(&pieces, ARENA, &cache, Direction::Load, PINNED, segment_bytes);
        let ends = |piece: &Piece| (piece.from - ARENA, piece.to - LAYER, piece.bytes);
        lists.iter().map(|list| list.iter().map(ends).collect()).collect()
    }

    #[test]
    fn no_list_has_more_bytes_than_a_part_but_for_a_piece_that_is_longer() {
        let expected = [vec![(0, 0, 30), (50, 30, 30)], vec![(100, 60, 30)], vec![(200, 90, 80)]];
        assert_eq!(loaded(&[(0, 30), (50, 30), (100, 30), (200, 80)], 60), expected);
    }

    #[test]
    fn a_piece_across_two_registrations_is_two_that_are_in_two_lists() {
        assert_eq!(loaded(&[(990, 30)], 1000), [vec![(990, 0, 10)], vec![(1000, 10, 20)]]);
        assert_eq!(loaded(&[(990, 10), (1000, 20)], 1000), [vec![(990, 0, 10)], vec![(1000, 10, 20)]]);
    }

    #[test]
    fn a_piece_that_begins_a_registration_and_touches_none_begins_no_list() {
        assert_eq!(loaded(&[(500, 30), (1000, 30)], 1000), [vec![(500, 0, 30), (1000, 30, 30)]]);
        assert_eq!(loaded(&[(0, 30), (1000, 30)], 1000).len(), 1);
    }

    #[test]
    fn nothing_is_one_across_two_layers() {
        let piece = |arena_offset, layer, page_offset| copies::Piece {
            arena_offset,
            layer,
            page_offset,
            bytes: 1000,
        };
        let counts = |pieces: &[copies::Piece]| {
            let lists = lists(pieces, ARENA, &cache(2), Direction::Store, 1 << 30, 1 << 30);
            lists.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(counts(&[piece(0, 0, 8000), piece(1000, 0, 9000), piece(2000, 1, 0)]), [2, 1]);
        assert_eq!(counts(&[piece(0, 0, 8000), piece(1000, 1, 0)]), [2], "these do not touch on the GPU");
        assert_eq!(counts(&[piece(0, 0, 9000), piece(2000, 1, 0)]), [2], "nor these in the arena");
    }
}
