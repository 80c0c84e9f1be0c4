//! A set of hashes in two bytes each, which never misses a member and takes about one stranger in
//! 500 for one. This file knows bits.
//!
//! It is a blocked Bloom filter: all bits of a hash lie in one cache line (Putze, Sanders and
//! Singler, "Cache-, hash- and space-efficient Bloom filters", JEA 2010).

/// Bits per hash that the set is made for.
const BITS_PER_HASH: u64 = 16;
/// Words of a block: a cache line.
const BLOCK_WORDS: usize = 8;
/// Bits set for each hash, named by nine bits of the hash each.
const PROBES: u32 = 7;
const PROBE_BITS: u32 = (BLOCK_WORDS as u32 * u64::BITS).ilog2();

#[derive(Debug)]
pub(crate) struct Filter {
    blocks: Box<[[u64; BLOCK_WORDS]]>,
}

impl Filter {
    /// An empty set that is made for so many hashes.
    pub fn new(hashes: u64) -> Filter {
        let block_bits = BLOCK_WORDS as u64 * u64::from(u64::BITS);
        let blocks = hashes.saturating_mul(BITS_PER_HASH).div_ceil(block_bits).max(1);
        Filter { blocks: vec![[0; BLOCK_WORDS]; blocks as usize].into() }
    }

    /// Adds a hash; whether it was not there yet.
    pub fn insert(&mut self, hash: u64) -> bool {
        let at = self.block_of(hash);
        let mut is_new = false;
        for (word, bit) in probes(hash) {
            is_new |= self.blocks[at][word] & bit == 0;
            self.blocks[at][word] |= bit;
        }
        is_new
    }

    /// Whether the hash is there, or seems to be.
    pub fn contains(&self, hash: u64) -> bool {
        let block = &self.blocks[self.block_of(hash)];
        probes(hash).all(|(word, bit)| block[word] & bit != 0)
    }

    pub fn clear(&mut self) {
        self.blocks.fill([0; BLOCK_WORDS]);
    }

    pub fn table_bytes(&self) -> u64 {
        size_of_val(&*self.blocks) as u64
    }

    fn block_of(&self, hash: u64) -> usize {
        // A product, so that the block does not follow from the bits that name the probes.
        let spread = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((u128::from(spread) * self.blocks.len() as u128) >> 64) as usize
    }
}

/// The word and the bit of each probe.
fn probes(hash: u64) -> impl Iterator<Item = (usize, u64)> {
    (0..PROBES).map(move |probe| {
        let place = (hash >> (probe * PROBE_BITS)) as usize % (BLOCK_WORDS * u64::BITS as usize);
        (place / u64::BITS as usize, 1 << (place % u64::BITS as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::testing::hash;

    #[test]
    fn members_are_never_missed_and_strangers_seldom_taken_for_members() {
        let mut filter = Filter::new(100_000);
        let new = (0..100_000).filter(|number| filter.insert(hash(*number))).count();
        assert!(new > 99_900, "{new}");
        assert!((0..100_000).all(|number| filter.contains(hash(number))));
        let mistaken = (100_000..1_100_000).filter(|number| filter.contains(hash(*number))).count();
        assert!(mistaken < 2_500, "{mistaken} of a million");
        assert_eq!(filter.table_bytes(), 200_000);
    }

    #[test]
    fn a_cleared_filter_is_empty() {
        let mut filter = Filter::new(0);
        assert!(filter.insert(hash(1)) && !filter.insert(hash(1)));
        filter.clear();
        assert!(!filter.contains(hash(1)));
    }
}
