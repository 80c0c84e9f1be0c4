//! How a copy whose paths are all fixed at once is divided: so that all paths finish together.
//! Pure.

/// A path that a copy may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Path {
    /// What it carries while the others are at work too.
    pub bytes_per_s: f64,
    /// How much later than at once its bytes begin to arrive.
    pub latency_s: f64,
}

/// No path gets less than this: for so little it is not worth the work of queueing it.
pub const SHARE_MIN: u64 = 256 << 10;
/// Shares are whole multiples of this, so that pages and vectors stay whole.
pub const SHARE_UNIT: u64 = 4096;

/// The bytes for each path. Path 0, the direct one, takes what remains, and everything where others
/// do not pay.
pub fn shares(bytes: u64, paths: &[Path]) -> Vec<u64> {
    let mut shares = vec![0; paths.len()];
    let mut used: Vec<usize> = (0..paths.len()).filter(|path| paths[*path].bytes_per_s > 0.0).collect();
    loop {
        let rate: f64 = used.iter().map(|path| paths[*path].bytes_per_s).sum();
        let lead: f64 = used.iter().map(|path| paths[*path].bytes_per_s * paths[*path].latency_s).sum();
        // All finish at `end_s` when each carries its rate times what is left of that after its
        // latency.
        let end_s = (bytes as f64 + lead) / rate;
        for path in &used {
            let share = paths[*path].bytes_per_s * (end_s - paths[*path].latency_s);
            shares[*path] = share.max(0.0) as u64 / SHARE_UNIT * SHARE_UNIT;
        }
        let idle = used.iter().copied().filter(|path| *path != 0 && shares[*path] < SHARE_MIN);
        let Some(idle) = idle.min_by_key(|path| shares[*path]) else { break };
        shares[idle] = 0;
        used.retain(|path| *path != idle);
    }
    let relayed: u64 = shares.iter().skip(1).sum();
    if let Some(direct) = shares.first_mut() {
        *direct = bytes.saturating_sub(relayed);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DIRECT: Path = Path { bytes_per_s: 50e9, latency_s: 0.0 };
    const RELAY: Path = Path { bytes_per_s: 50e9, latency_s: 40e-6 };

    #[test]
    fn equal_paths_share_a_large_copy_evenly() {
        let shares = shares(1 << 30, &[DIRECT, RELAY]);
        assert_eq!(shares.iter().sum::<u64>(), 1 << 30);
        assert!(shares[0].abs_diff(shares[1]) <= 4 << 20, "{shares:?}");
    }

    #[test]
    fn a_copy_that_ends_before_a_relay_begins_goes_direct() {
        assert_eq!(shares(1 << 20, &[DIRECT, RELAY, RELAY]), vec![1 << 20, 0, 0]);
    }

    #[test]
    fn a_relay_without_a_rate_gets_nothing() {
        let dead = Path { bytes_per_s: 0.0, ..RELAY };
        assert_eq!(shares(1 << 30, &[DIRECT, dead])[1], 0);
    }

    proptest! {
        #[test]
        fn every_byte_has_one_path(
            bytes in 1..(64_u64 << 30),
            rates in prop::collection::vec((0.0..100e9_f64, 0.0..1e-3_f64), 0..8),
        ) {
            let mut paths = vec![DIRECT];
            paths.extend(rates.into_iter().map(|(bytes_per_s, latency_s)| Path { bytes_per_s, latency_s }));
            let shares = shares(bytes, &paths);
            prop_assert_eq!(shares.iter().sum::<u64>(), bytes);
            prop_assert!(shares.iter().skip(1).all(|share| *share == 0 || *share >= SHARE_MIN));
        }
    }
}
