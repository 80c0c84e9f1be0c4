//! The kernel that publishes requests of a ring with the checksums of what was copied.

use super::{View, Work};
use crc_fast::{CrcAlgorithm, checksum_combine};

/// Words of `struct Commit`.
const ENTRY_WORDS: u64 = 7;

/// `(const Commit* commits, u32 count)` with `struct Commit { u64 contexts; u64 word; u64 value;
/// u64 ranges; u64 remainders; u64 starts; u64 layers; }`
pub fn commits(view: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[commits, count] = args else { return Err("wrong parameters".into()) };
    let mut work = Work::default();
    for entry in view.table(commits, count * ENTRY_WORDS)?.chunks_exact(ENTRY_WORDS as usize) {
        let &[contexts, word, value, ranges, remainders, starts, layers] = entry else { continue };
        let starts = view.half_words(starts, layers + 1)?;
        for (layer, of_layer) in (0..).zip(starts.windows(2)) {
            let (first, count) = (u64::from(of_layer[0]), u64::from(of_layer[1] - of_layer[0]));
            let ranges = view.table(ranges + 16 * first, 2 * count)?;
            let lengths = ranges.chunks_exact(2).map(|range| range[1]);
            let sum = joined(lengths.zip(view.half_words(remainders + 4 * first, count)?));
            work.store(contexts + 16 * layer, layer << 32);
            work.store(contexts + 16 * layer + 8, sum.into());
        }
        work.store(word, value);
    }
    Ok(work)
}

/// The CRC-32C of ranges by their lengths and remainders.
fn joined(ranges: impl Iterator<Item = (u64, u32)>) -> u32 {
    // Sums are joined as those of a CRC are: the remainder is what a CRC leaves without the
    // initial value and the final complement, which the whole has once.
    let goes_on = |sum: u32, (bytes, remainder): (u64, u32)| {
        checksum_combine(CrcAlgorithm::Crc32Iscsi, sum.into(), remainder.into(), bytes) as u32
    };
    !ranges.fold(!0, goes_on)
}
