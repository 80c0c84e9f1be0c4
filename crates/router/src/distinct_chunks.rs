//! How many different prompt chunks were routed: an estimate in 256 KiB, however many there are. It
//! is HyperLogLog with 2^18 registers and the estimator of Otmar Ertl ("New cardinality estimation
//! algorithms for HyperLogLog sketches", 2017), which needs no table of corrections. Its standard
//! error is 0.2 %. It knows hashes.

/// Bits of a hash that choose a register.
const BITS: u32 = 18;
const REGISTERS: usize = 1 << BITS;
/// The other bits of a hash.
const REST: usize = 64 - BITS as usize;

/// The chunks so far, of which each is noted as often as it comes.
#[derive(Debug)]
pub struct DistinctChunks {
    registers: Box<[u8]>,
    /// How many registers have each value.
    having: [u32; REST + 2],
    noted: u64,
}

impl Default for DistinctChunks {
    fn default() -> DistinctChunks {
        let mut having = [0; REST + 2];
        having[0] = REGISTERS as u32;
        DistinctChunks { registers: vec![0; REGISTERS].into(), having, noted: 0 }
    }
}

impl DistinctChunks {
    /// Notes chunks by hashes all of whose bits are random.
    pub fn note(&mut self, keys: &[u64]) {
        self.noted += keys.len() as u64;
        for key in keys {
            let register = &mut self.registers[(key >> REST) as usize];
            // The place of the first bit that is set, from 1 on; one more than all if none is.
            let value = ((key << BITS).leading_zeros() as usize).min(REST) as u8 + 1;
            if value > *register {
                self.having[usize::from(*register)] -= 1;
                self.having[usize::from(value)] += 1;
                *register = value;
            }
        }
    }

    /// Chunks so far.
    pub fn noted(&self) -> u64 {
        self.noted
    }

    /// About how many different ones.
    pub fn distinct(&self) -> u64 {
        let registers = REGISTERS as f64;
        let share = |value: usize| f64::from(self.having[value]) / registers;
        let mut sum = registers * tau(1.0 - share(REST + 1));
        for value in (1..=REST).rev() {
            sum = 0.5 * (sum + f64::from(self.having[value]));
        }
        sum += registers * sigma(share(0));
        (registers * registers / (2.0 * std::f64::consts::LN_2 * sum)).round() as u64
    }
}

/// What registers that nothing has met add.
fn sigma(mut share: f64) -> f64 {
    if share >= 1.0 {
        return f64::INFINITY;
    }
    let (mut factor, mut sum) = (1.0, share);
    loop {
        share *= share;
        let before = sum;
        sum += share * factor;
        factor += factor;
        if sum <= before {
            return sum;
        }
    }
}

/// What registers that can hold no more take away.
fn tau(mut share: f64) -> f64 {
    if share <= 0.0 || share >= 1.0 {
        return 0.0;
    }
    let (mut factor, mut sum) = (1.0, 1.0 - share);
    loop {
        share = share.sqrt();
        let before = sum;
        factor *= 0.5;
        sum -= (1.0 - share).powi(2) * factor;
        if sum >= before {
            return sum / 3.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_64;

    #[test]
    fn an_estimate_is_within_one_percent_of_what_was_noted_from_none_to_millions() {
        let mut chunks = DistinctChunks::default();
        assert_eq!(chunks.distinct(), 0);
        let mut next = 0u64;
        for count in [1, 1_000, 100_000, 600_000, 1_000_000, 5_000_000] {
            while next < count {
                chunks.note(&[xxh3_64(&next.to_le_bytes())]);
                next += 1;
            }
            let error = chunks.distinct().abs_diff(count) as f64 / count as f64;
            assert!(error < 0.01, "{count}: {error}");
        }
    }

    #[test]
    fn a_chunk_that_comes_again_is_noted_and_is_no_other() {
        let mut chunks = DistinctChunks::default();
        let keys: Vec<u64> = (0..1_000u64).map(|number| xxh3_64(&number.to_le_bytes())).collect();
        (0..3).for_each(|_| chunks.note(&keys));
        assert_eq!(chunks.noted(), 3_000);
        assert!(chunks.distinct().abs_diff(1_000) < 10, "{}", chunks.distinct());
    }
}
