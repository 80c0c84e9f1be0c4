//! How a batch whose paths are all fixed at once is divided: so that all paths finish together.
//! What the paths carry is given, by [`Estimates`](crate::estimates::Estimates). Pure.

/// A path that a batch may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Path {
    /// What it carries while the others are at work too; 0 if nothing may go there.
    pub bytes_per_s: f64,
    /// How much later than at once its bytes begin to arrive.
    pub latency_s: f64,
    /// The port of the processor that it shares with others, by its place in [`PathRates::ports`].
    pub port: Option<usize>,
}

/// What the paths of a batch carry.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PathRates {
    /// The direct one first.
    pub paths: Vec<Path>,
    /// Bytes per second of ports that several paths share.
    pub ports: Vec<f64>,
}

/// What is to be divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    pub bytes: u64,
    /// A path to be tried although it may not be worth it: otherwise nobody learns that it is.
    pub probe: Option<usize>,
}

/// No path gets less than this: for so little it is not worth the work of queueing it.
pub const SHARE_MIN: u64 = 256 << 10;
/// Shares are whole multiples of this, so that pages and vectors stay whole.
pub const SHARE_UNIT: u64 = 4096;
/// What a path gets that is only tried: enough to tell its rate.
pub const PROBE_BYTES: u64 = 512 << 10;
/// Nothing is tried with a batch of less than so many times that.
const PROBED_BATCH: u64 = 8;

/// A path of which others leave less than this part to its port only takes from them.
const PORT_PART_MIN: f64 = 0.25;

/// The bytes for each path. Path 0, the direct one, takes what remains, and everything where others
/// do not pay.
pub fn shares(rates: &PathRates, batch: Batch) -> Vec<u64> {
    let mut shares = evenly(&within_ports(rates), batch.bytes);
    if let Some(probe) = batch.probe
        && shares[probe] == 0
        && batch.bytes >= PROBED_BATCH * PROBE_BYTES
        && let Some(most) = (0..shares.len()).max_by_key(|path| shares[*path])
    {
        shares[most] -= PROBE_BYTES;
        shares[probe] = PROBE_BYTES;
    }
    shares
}

/// Paths with what the ports that they share leave to them: those that come first are used first.
fn within_ports(rates: &PathRates) -> Vec<Path> {
    let mut left = rates.ports.clone();
    let limited = |path: &Path| {
        let Some(left) = path.port.and_then(|port| left.get_mut(port)) else { return *path };
        let is_worth_it = *left >= path.bytes_per_s * PORT_PART_MIN;
        let bytes_per_s = if is_worth_it { path.bytes_per_s.min(*left) } else { 0.0 };
        *left -= bytes_per_s;
        Path { bytes_per_s, ..*path }
    };
    rates.paths.iter().map(limited).collect()
}

/// Shares with which all paths that are worth it finish at the same time.
fn evenly(paths: &[Path], bytes: u64) -> Vec<u64> {
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

    const MIB: u64 = 1 << 20;
    const DIRECT: Path = Path { bytes_per_s: 50e9, latency_s: 0.0, port: None };
    const RELAY: Path = Path { latency_s: 40e-6, ..DIRECT };

    /// A path as fast as that: its GB/s.
    fn at(path: Path, gb_per_s: f64) -> Path {
        Path { bytes_per_s: gb_per_s * 1e9, ..path }
    }

    /// Paths behind the port of this number.
    fn behind(port: usize, path: Path) -> Path {
        Path { port: Some(port), ..path }
    }

    /// What it is, the paths and ports (GB/s), MiB of the batch, the path to try, MiB for each.
    type Row<'a> = (&'a str, Vec<Path>, &'a [f64], u64, Option<usize>, &'a [u64]);

    #[test]
    fn each_path_has_what_it_carries_while_the_others_carry_theirs() {
        let both = |relay| vec![DIRECT, relay];
        let small = Path { latency_s: 0.0, ..RELAY };
        let table: [Row; 16] = [
            ("one path", vec![DIRECT], &[], 64, None, &[64]),
            ("equal paths", both(RELAY), &[], 1024, None, &[513, 511]),
            ("a relay's latency counts", both(RELAY), &[], 8, None, &[5, 3]),
            ("too small for relays", both(RELAY), &[], 1, None, &[1, 0]),
            ("a link slowed 4x", both(at(RELAY, 12.5)), &[], 1024, None, &[820, 204]),
            ("the direct link slowed 4x", vec![at(DIRECT, 12.5), RELAY], &[], 1024, None, &[205, 819]),
            (
                "one of three slowed 4x",
                vec![DIRECT, at(RELAY, 12.5), RELAY],
                &[],
                1024,
                None,
                &[456, 114, 454],
            ),
            ("a dead one", both(at(RELAY, 0.0)), &[], 1024, None, &[1024, 0]),
            ("a dead one of three", vec![DIRECT, at(RELAY, 0.0), RELAY], &[], 1024, None, &[513, 0, 511]),
            ("a dead direct link", vec![at(DIRECT, 0.0), small], &[], 1024, None, &[0, 1024]),
            ("all are dead", vec![at(DIRECT, 0.0), at(RELAY, 0.0)], &[], 64, None, &[64, 0]),
            ("a dead one is tried", both(at(RELAY, 0.0)), &[], 1024, Some(1), &[1024, 1]),
            ("nothing is tried with little", both(at(RELAY, 0.0)), &[], 3, Some(1), &[3, 0]),
            ("who has a share needs no trial", both(RELAY), &[], 1024, Some(1), &[513, 511]),
            (
                "a relay behind the target's port",
                vec![behind(0, DIRECT), behind(0, RELAY)],
                &[50.0],
                1024,
                None,
                &[1024, 0],
            ),
            (
                "two relays behind one port",
                vec![DIRECT, behind(0, RELAY), behind(0, RELAY)],
                &[50.0],
                1024,
                None,
                &[513, 511, 0],
            ),
        ];
        for (what, paths, ports, mib, probe, expected) in table {
            let rates = PathRates { paths, ports: ports.iter().map(|gb_per_s| gb_per_s * 1e9).collect() };
            let shares = shares(&rates, Batch { bytes: mib * MIB, probe });
            let rounded: Vec<u64> = shares.iter().map(|share| (share + MIB / 2) / MIB).collect();
            assert_eq!(rounded, expected, "{what}: {shares:?}");
        }
    }

    fn any_rates() -> impl Strategy<Value = PathRates> {
        let path = (0.0..100e9_f64, 0.0..1e-3_f64, prop::option::of(0..2_usize));
        let path = path.prop_map(|(bytes_per_s, latency_s, port)| Path { bytes_per_s, latency_s, port });
        let ports = prop::collection::vec(0.0..100e9_f64, 2);
        (prop::collection::vec(path, 0..8), ports).prop_map(|(mut paths, ports)| {
            paths.insert(0, DIRECT);
            PathRates { paths, ports }
        })
    }

    proptest! {
        #[test]
        fn every_byte_has_one_path(
            bytes in 1..(64_u64 << 30),
            rates in any_rates(),
            probe in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let probe = probe.map(|probe| probe.index(rates.paths.len()));
            let shares = shares(&rates, Batch { bytes, probe });
            prop_assert_eq!(shares.iter().sum::<u64>(), bytes);
            prop_assert!(shares.iter().skip(1).all(|share| *share == 0 || *share >= SHARE_MIN));
        }

        #[test]
        fn no_relay_gets_more_than_its_part_beside_the_direct_path(
            bytes in 1..(64_u64 << 30),
            rates in any_rates(),
            probe in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let probe = probe.map(|probe| probe.index(rates.paths.len()));
            let shares = shares(&rates, Batch { bytes, probe });
            for (path, share) in rates.paths.iter().zip(&shares).skip(1) {
                let part = path.bytes_per_s / (path.bytes_per_s + DIRECT.bytes_per_s);
                let most = (bytes as f64 * part * (1.0 + 1e-9)) as u64;
                prop_assert!(*share <= most.max(PROBE_BYTES), "{share} of {bytes} with {path:?}");
            }
        }
    }
}
