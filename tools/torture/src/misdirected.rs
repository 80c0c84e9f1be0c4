//! Which page of an I/O goes astray, and where to. This file knows numbers of bytes.

use std::ops::Range;

/// What disks and file systems misplace at a time.
pub const PAGE_BYTES: usize = 4096;

/// The page of `bytes`, above 0, that goes astray: of fewer than a page, all of them.
pub fn page(bytes: usize, choice: u64) -> Range<usize> {
    let pages = bytes.div_ceil(PAGE_BYTES).max(1) as u64;
    // The other bits of the choice say where to.
    let start = ((choice >> 32) % pages) as usize * PAGE_BYTES;
    start..bytes.min(start + PAGE_BYTES)
}

/// The page beside that at `place`.
pub fn neighbour(place: u64) -> u64 {
    place ^ PAGE_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_goes_astray_and_never_to_its_own_place() {
        for bytes in [1, PAGE_BYTES, 3 * PAGE_BYTES + 5] {
            let starts: std::collections::BTreeSet<usize> =
                (0..64).map(|n| page(bytes, n << 32).start).collect();
            assert_eq!(starts.len(), bytes.div_ceil(PAGE_BYTES));
            assert!((0..64).all(|n| !page(bytes, n << 32).is_empty() && page(bytes, n << 32).end <= bytes));
        }
        assert_eq!((neighbour(0), neighbour(4096), neighbour(8192)), (4096, 0, 12288));
    }
}
