//! Token ids for prefix blocks: traces hold no text, so a replayed prompt is made from its block
//! ids.

/// The token ids of one prefix block, each below `vocab` (a `vocab` of 0 is taken as 1). They are a
/// function of `block_id` and their position alone, so that equal ids give equal tokens and a
/// partial block is a prefix of the whole one. The generator is SplitMix64 (Steele, Lea and Flood,
/// "Fast splittable pseudorandom number generators", OOPSLA 2014), started at a mix of the id.
///
/// ```
/// use forebay_trace::tokens::block_tokens;
///
/// let whole: Vec<u32> = block_tokens(7, 16, 32_000).collect();
/// let partial: Vec<u32> = block_tokens(7, 5, 32_000).collect();
/// assert_eq!(whole[..5], partial);
/// ```
pub fn block_tokens(block_id: u64, block_tokens: u32, vocab: u32) -> impl Iterator<Item = u32> {
    // Neighbouring ids must not start neighbouring streams: SplitMix64's streams are shifts of one
    // another.
    let start = mix(block_id ^ 0x5EED_0F70_CE45_B10C);
    (1..=u64::from(block_tokens)).map(move |position| {
        let random = mix(start.wrapping_add(position.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        below(random, vocab.max(1))
    })
}

/// The output function of SplitMix64, a bijection of 64-bit words.
pub(crate) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// A number in `0..limit` from 64 random bits, by multiplication.
fn below(random: u64, limit: u32) -> u32 {
    ((u128::from(random) * u128::from(limit)) >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::block_tokens;
    use std::collections::HashSet;

    #[test]
    fn tokens_stay_below_the_vocabulary() {
        assert!(block_tokens(3, 4_096, 151_936).all(|token| token < 151_936));
        assert!(block_tokens(3, 64, 1).all(|token| token == 0));
        assert!(block_tokens(3, 64, 0).all(|token| token == 0));
    }

    #[test]
    fn different_blocks_have_different_tokens() {
        let distinct: HashSet<Vec<u32>> =
            (0..10_000).map(|id| block_tokens(id, 16, 32_000).collect()).collect();
        assert_eq!(distinct.len(), 10_000);
    }

    #[test]
    fn tokens_spread_over_the_vocabulary() {
        let mut seen = [0u32; 10];
        (0..1_000).for_each(|id| block_tokens(id, 16, 10).for_each(|token| seen[token as usize] += 1));
        // 1,600 expected each, standard deviation 38.
        assert!(seen.iter().all(|&count| (1_400..1_800).contains(&count)), "{seen:?}");
    }

    #[test]
    fn the_tokens_of_a_block_never_change() {
        // Recorded runs are compared across versions: a change here makes their prompts different
        // ones.
        assert_eq!(block_tokens(42, 4, 151_936).collect::<Vec<_>>(), EXPECTED_42);
    }

    const EXPECTED_42: [u32; 4] = [80_042, 84, 70_470, 66_256];
}
