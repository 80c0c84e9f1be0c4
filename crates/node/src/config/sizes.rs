//! Sizes that follow from others where the configuration does not say them.

use super::{NodeConfig, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENTS_MAX, SsdConfig};
use forebay_store::{SLOT_ALIGN_BYTES, TierConfig};

/// Of a segment, for what is beside the chunks in it.
const BESIDE_CHUNKS_BYTES: u64 = 1 << 20;

/// The largest chunk there may be, told or not.
pub(crate) fn largest_chunk(config: &NodeConfig) -> u64 {
    slab_bytes(config, TierConfig::new(config.memory.size).slab_bytes)
}

/// As told; else at least a usual chunk, if there are 64 slabs of that.
fn slab_bytes(config: &NodeConfig, default: u64) -> u64 {
    let usual = config.memory.chunk_size.next_multiple_of(SLOT_ALIGN_BYTES);
    match config.memory.largest_chunk {
        0 if usual <= config.memory.size / 64 => default.max(usual),
        0 => default,
        largest => largest.next_multiple_of(SLOT_ALIGN_BYTES),
    }
}

/// As told; else so that what fits into memory fits onto the disk, four usual chunks at least, if
/// there are 64 segments of that: space is reused by segments. No more than a segment may have, and
/// no more segments than there may be. Usual chunks leave nothing over.
pub(crate) fn segment_bytes(config: &SsdConfig, usual_chunk: u64, largest_chunk: u64) -> u64 {
    if config.segment_size != 0 {
        return config.segment_size;
    }
    let least =
        config.size.div_ceil(SEGMENTS_MAX).next_multiple_of(BESIDE_CHUNKS_BYTES).max(SEGMENT_BYTES_MIN);
    let sixty_fourth = config.size / 64 / BESIDE_CHUNKS_BYTES * BESIDE_CHUNKS_BYTES;
    let most = sixty_fourth.max(least).min(SEGMENT_BYTES_MAX);
    let usual_chunk = usual_chunk.max(1);
    let fitting = (most - BESIDE_CHUNKS_BYTES) / usual_chunk;
    match largest_chunk.div_ceil(usual_chunk).max(4).min(fitting) {
        0 => most,
        chunks => {
            let wanted = chunks * usual_chunk + BESIDE_CHUNKS_BYTES;
            wanted.next_multiple_of(BESIDE_CHUNKS_BYTES).max(least).min(most)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_store::log::Layout;

    #[test]
    fn a_slab_holds_a_usual_chunk_if_there_are_sixty_four_and_is_as_told_otherwise() {
        let mib = 1 << 20;
        for (memory, chunk, largest, slab) in [
            (3 << 30, mib, 0, 32 * mib),
            (3 << 30, 40 * mib, 0, 40 * mib),
            (3 << 30, 49 * mib, 0, 32 * mib),
            (128 * mib, 40 * mib, 5000, 2 * SLOT_ALIGN_BYTES),
            (2 * mib, mib, 0, 32 << 10),
        ] {
            let text = format!(
                "socket = '/a'\n[memory]\nsize = '{memory}B'\nchunk_size = '{chunk}B'\n\
                 largest_chunk = '{largest}B'\n"
            );
            let config = NodeConfig::from_toml(&text).unwrap();
            let default = TierConfig::new(memory).slab_bytes;
            assert_eq!(slab_bytes(&config, default), slab, "{memory} {chunk} {largest}");
        }
    }

    #[test]
    fn what_fits_into_memory_fits_into_a_segment_of_a_log_that_has_sixty_four() {
        let (mib, gib) = (1 << 20, 1 << 30);
        for (size, usual, largest, told, segment) in [
            (100 * gib, mib, mib, 0, 16 * mib),
            (100 * gib, mib, 16 * mib, 0, 17 * mib),
            (100 * gib, mib, 256 * mib, 0, 257 * mib),
            (100 * gib, 32 * mib, 64 * mib, 0, 129 * mib),
            (100 * gib, 32 * mib - 7, 64 * mib, 0, 129 * mib),
            (6 * gib, mib, 256 * mib, 0, 96 * mib),
            (6 * gib, 48 * mib, 256 * mib, 0, 49 * mib),
            // Of usual chunks alone there are whole numbers.
            (100 * gib, 52 * mib, 256 * mib, 0, 261 * mib),
            (100 * gib, 65 * mib, 256 * mib, 0, 261 * mib),
            (100 * gib, 90 * mib, 512 * mib, 0, 541 * mib),
            (80 * mib, mib, mib, 0, 16 * mib),
            (100 * gib, 32 * mib, 256 * mib, 64 * mib, 64 * mib),
            // No more than a log may have,
            (100 * gib, 256 * mib, 256 * mib, 0, 769 * mib),
            (100 * gib, mib, 2 * gib, 0, gib),
            (100 * gib, 2 * gib, 2 * gib, 0, gib),
            // and no more of them.
            (40 << 40, mib, mib, 0, 40 * mib),
        ] {
            let config = SsdConfig { path: "log".into(), size, segment_size: told, create: true };
            assert_eq!(segment_bytes(&config, usual, largest), segment, "{size} {usual} {largest} {told}");
            assert!(Layout::new(size, segment).is_ok(), "a log that can be made");
        }
    }
}
