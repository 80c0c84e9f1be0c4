//! What each path to or from a GPU carries, as the last batches measured it: by this the next one
//! is divided. It is told times and reads no clock: who queues batches has events for that.
//! Sans-IO.
//!
//! A path that is slower than it was has its new rate at once; one that is faster, when two batches
//! in a row say so, since the end of one batch may seem to be late and that of the next one then
//! comes soon after. What differs by less is noise, of which a part is followed. A path that gets
//! nothing is tried now and then with a little, more seldom each time that it is no faster; one
//! that has not finished what it was given gets nothing until it has.

use crate::plan::{self, Batch, PROBE_BYTES, PathRates};

/// Rates that differ by less than this part differ by noise ...
const NOISE: f64 = 0.25;
/// ... of which the estimate follows this part.
const FOLLOWED: f64 = 0.25;
/// Less than this says nothing ...
const MEASURED_BYTES_MIN: u64 = 512 << 10;
/// ... and of any more, starting and ending take this, or a fifth of the time if that is less.
const START_S: f64 = 5e-6;
const START_PART: f64 = 0.2;
/// A path is stuck when it takes so many times as long as it should, and this.
const STUCK_TIMES: f64 = 4.0;
const STUCK_S: f64 = 0.05;
/// A path that gets nothing is tried after so many batches or so long, ...
const PROBE_BATCHES: u32 = 16;
const PROBE_US: u64 = 1_000_000;
/// ... after twice that when it was no faster, and so on so many times.
const PROBE_DOUBLINGS: u32 = 6;

/// Estimates for the paths of one GPU in one direction.
#[derive(Debug)]
pub struct Estimates {
    rates: PathRates,
    paths: Vec<Estimate>,
    /// By port, the batch that was measured last and what went through the port in it.
    seen: Vec<(u64, f64)>,
    /// Batches that were divided.
    batches: u64,
    /// Nothing is tried.
    is_fixed: bool,
}

#[derive(Debug, Clone, Default)]
struct Estimate {
    /// What the last batch measured; none before.
    last_bytes_per_s: Option<f64>,
    is_stuck: bool,
    /// Since it had a share: how many batches, and from when on.
    idle_batches: u32,
    idle_since_us: u64,
    /// How often in a row it was only tried.
    probes: u32,
}

impl Estimates {
    /// Begins with what is assumed, or was measured another time.
    pub fn new(rates: PathRates) -> Estimates {
        let paths = vec![Estimate::default(); rates.paths.len()];
        let seen = vec![(0, 0.0); rates.ports.len()];
        Estimates { rates, paths, seen, batches: 0, is_fixed: false }
    }

    /// Stays with these, and tries nothing.
    pub fn fixed(rates: PathRates) -> Estimates {
        Estimates { is_fixed: true, ..Estimates::new(rates) }
    }

    /// What each path carries, none where it is stuck; and whether that was measured.
    pub fn rates(&self) -> impl Iterator<Item = (f64, bool)> {
        let rate = |(path, estimate): (&plan::Path, &Estimate)| {
            (if estimate.is_stuck { 0.0 } else { path.bytes_per_s }, estimate.last_bytes_per_s.is_some())
        };
        self.rates.paths.iter().zip(&self.paths).map(rate)
    }

    /// The number of the batch that was divided last.
    pub fn batch(&self) -> u64 {
        self.batches
    }

    /// Divides a batch over those paths that may be used now; a share for each path.
    pub fn shares(&mut self, bytes: u64, is_usable: impl Fn(usize) -> bool, now_us: u64) -> Vec<u64> {
        let mut rates = self.rates.clone();
        let may_have = |path: usize| (path == 0 || is_usable(path)) && !self.paths[path].is_stuck;
        let barred = (0..rates.paths.len()).filter(|path| !may_have(*path));
        barred.for_each(|path| rates.paths[path].bytes_per_s = 0.0);
        let due = (1..self.paths.len()).filter(|path| may_have(*path) && self.is_due(*path, bytes, now_us));
        let probe = due.max_by_key(|path| self.paths[*path].idle_batches);
        let shares = plan::shares(&rates, Batch { bytes, probe });
        for (path, (estimate, share)) in self.paths.iter_mut().zip(&shares).enumerate() {
            match share {
                0 if path > 0 && !is_usable(path) => {}
                0 => estimate.idle_batches = estimate.idle_batches.saturating_add(1),
                _ => {
                    let is_tried = probe == Some(path) && *share <= PROBE_BYTES;
                    estimate.probes = if is_tried { estimate.probes.saturating_add(1) } else { 0 };
                    (estimate.idle_batches, estimate.idle_since_us) = (0, now_us);
                }
            }
        }
        self.batches += 1;
        shares
    }

    /// Whether a path that gets nothing is to be tried again with a batch: nobody has yet, it is
    /// time, or it was just seen to be so fast that it would pay.
    fn is_due(&self, path: usize, bytes: u64, now_us: u64) -> bool {
        if self.is_fixed {
            return false;
        }
        let Estimate { last_bytes_per_s, idle_batches, idle_since_us, probes, .. } = self.paths[path];
        let Some(last) = last_bytes_per_s else { return probes == 0 || idle_batches >= PROBE_BATCHES };
        let is_faster = last > self.rates.paths[path].bytes_per_s * (1.0 + NOISE);
        let is_faster = is_faster && self.would_pay(path, last, bytes);
        let doublings = probes.min(PROBE_DOUBLINGS);
        let is_time = idle_batches >= PROBE_BATCHES << doublings
            || now_us.saturating_sub(idle_since_us) >= PROBE_US << doublings;
        is_faster || is_time
    }

    /// Whether a path would get a share of a batch if it carried that. A batch takes as long as its
    /// slowest path, so one that a little goes over is held up by a path that is far too slow.
    fn would_pay(&self, path: usize, bytes_per_s: f64, bytes: u64) -> bool {
        let mut rates = self.rates.clone();
        rates.paths[path].bytes_per_s = bytes_per_s;
        plan::shares(&rates, Batch { bytes, probe: None })[path] > 0
    }

    /// A path has carried what it was given of a batch, in so many seconds; 0 if nobody knows.
    pub fn measured(&mut self, path: usize, batch: u64, bytes: u64, seconds: f64) {
        let estimate = &mut self.paths[path];
        estimate.is_stuck = false;
        if bytes < MEASURED_BYTES_MIN || seconds <= 0.0 {
            return;
        }
        let known = self.rates.paths[path].bytes_per_s;
        let rate = bytes as f64 / (seconds - START_S).max(seconds * (1.0 - START_PART));
        let before = estimate.last_bytes_per_s.replace(rate).unwrap_or(0.0);
        let followed = match rate / known {
            slower if slower < 1.0 - NOISE => rate,
            faster if faster > 1.0 + NOISE => rate.min(before).max(known),
            _ => known + (rate - known) * FOLLOWED,
        };
        self.rates.paths[path].bytes_per_s = followed;
        self.note_port(path, batch, rate);
    }

    /// A port carries what went through it at the same time, whatever its place says of it: bridges
    /// of virtual machines are none.
    fn note_port(&mut self, path: usize, batch: u64, bytes_per_s: f64) {
        let Some(port) = self.rates.paths[path].port else { return };
        let (of, sum) = &mut self.seen[port];
        if std::mem::replace(of, batch) != batch {
            *sum = 0.0;
        }
        *sum += bytes_per_s;
        self.rates.ports[port] = self.rates.ports[port].max(*sum);
    }

    /// A path has not finished what it was given of a batch, and began at least so long ago.
    pub fn waits(&mut self, path: usize, bytes: u64, seconds: f64) {
        let usual_s = bytes as f64 / self.rates.paths[path].bytes_per_s.max(1.0);
        self.paths[path].is_stuck |= seconds > STUCK_TIMES * usual_s + STUCK_S;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Path;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const GB: f64 = 1e9;
    const BATCH: u64 = 64 * MIB;

    /// Links of a machine, whose rates the estimates are not told but by batches.
    struct Machine {
        estimates: Estimates,
        gb_per_s: Vec<f64>,
        now_us: u64,
    }

    impl Machine {
        fn new(gb_per_s: &[f64]) -> Machine {
            let path = |rate: &f64| Path { bytes_per_s: rate * GB, latency_s: 0.0, port: None };
            let rates = PathRates { paths: gb_per_s.iter().map(path).collect(), ports: vec![] };
            Machine { estimates: Estimates::new(rates), gb_per_s: gb_per_s.to_vec(), now_us: 0 }
        }

        /// Both paths are behind the same port.
        fn behind_one_port(gb_per_s: f64) -> Machine {
            let path = Path { bytes_per_s: gb_per_s * GB, latency_s: 0.0, port: Some(0) };
            let rates = PathRates { paths: vec![path; 2], ports: vec![gb_per_s * GB] };
            Machine { estimates: Estimates::new(rates), gb_per_s: vec![gb_per_s; 2], now_us: 0 }
        }

        /// Shares of a batch, each of which is measured with a factor of its own.
        fn batch(&mut self, noise: &[f64]) -> Vec<u64> {
            self.now_us += 1_000;
            let shares = self.estimates.shares(BATCH, |_| true, self.now_us);
            let batch = self.estimates.batch();
            for (path, share) in shares.iter().enumerate().filter(|(_, share)| **share > 0) {
                let rate = self.gb_per_s[path] * GB * noise.get(path).unwrap_or(&1.0);
                self.estimates.measured(path, batch, *share, *share as f64 / rate);
            }
            shares
        }

        /// How much longer a batch so divided takes than one that is divided as it should be.
        fn excess(&self, shares: &[u64]) -> f64 {
            let times = shares.iter().zip(&self.gb_per_s).map(|(share, rate)| *share as f64 / (rate * GB));
            let best = BATCH as f64 / (self.gb_per_s.iter().sum::<f64>() * GB);
            times.fold(0.0, f64::max) / best - 1.0
        }
    }

    #[test]
    fn a_path_that_changes_its_rate_has_its_right_share_two_batches_later() {
        for (before, after) in [(50.0, 12.5), (12.5, 50.0), (50.0, 5.0), (50.0, 36.0), (36.0, 48.0)] {
            for path in 0..3 {
                let mut machine = Machine::new(&[50.0; 3]);
                machine.gb_per_s[path] = before;
                (0..20).for_each(|_| _ = machine.batch(&[]));
                machine.gb_per_s[path] = after;
                let shares = [(); 3].map(|()| machine.batch(&[]));
                let excess = machine.excess(&shares[2]);
                assert!(excess < 0.16, "path {path} from {before} to {after}: {excess} by {shares:?}");
            }
        }
    }

    #[test]
    fn a_path_too_slow_to_be_used_is_tried_seldom_and_used_again_when_it_is_fast() {
        let mut machine = Machine::new(&[50.0, 50.0]);
        machine.gb_per_s[1] = 0.1;
        let tried: Vec<bool> = (0..1000).map(|_| machine.batch(&[])[1] > 0).collect();
        assert!(tried[1..].iter().all(|is_tried| !is_tried || machine.gb_per_s[1] == 0.1));
        let count = tried.iter().filter(|is_tried| **is_tried).count();
        assert!((3..=8).contains(&count), "{count} of 1000 batches tried it");
        machine.gb_per_s[1] = 50.0;
        let began = (0..2000).position(|_| machine.batch(&[])[1] > BATCH / 3).unwrap();
        assert!(began <= 1026, "used again after {began} batches");
    }

    #[test]
    fn a_path_that_is_faster_and_still_too_slow_is_tried_no_sooner() {
        let mut machine = Machine::new(&[50.0, 50.0]);
        // Each trial finds it twice as fast as the one before, and far too slow.
        machine.gb_per_s[1] = 0.001;
        let tried = (0..1000).filter(|_| {
            let is_tried = machine.batch(&[])[1] > 0;
            machine.gb_per_s[1] *= if is_tried { 1.5 } else { 1.0 };
            is_tried
        });
        let count = tried.count();
        assert!((3..=8).contains(&count), "{count} of 1000 batches tried it");
    }

    #[test]
    fn a_path_that_does_not_finish_gets_nothing_until_it_has() {
        let mut machine = Machine::new(&[50.0, 50.0]);
        let share = machine.estimates.shares(BATCH, |_| true, 0)[1];
        let usual_s = share as f64 / (50.0 * GB);
        machine.estimates.waits(1, share, usual_s * 3.0);
        assert!(machine.estimates.shares(BATCH, |_| true, 1)[1] > 0);
        machine.estimates.waits(1, share, 1.0);
        for now_us in [2, 10_000_000, 1_000_000_000] {
            assert_eq!(machine.estimates.shares(BATCH, |_| true, now_us), [BATCH, 0]);
        }
        machine.estimates.measured(1, 1, share, usual_s);
        assert!(machine.estimates.shares(BATCH, |_| true, 2_000_000_000)[1] > BATCH / 3);
    }

    #[test]
    fn paths_behind_one_port_are_used_together_only_if_it_is_seen_to_carry_both() {
        let mut machine = Machine::behind_one_port(50.0);
        assert_eq!(machine.batch(&[])[1], PROBE_BYTES, "it is tried at once");
        assert!(machine.batch(&[])[1] > BATCH / 3, "the port is wider than its place says");
        let mut machine = Machine::behind_one_port(50.0);
        for _ in 0..100 {
            // The two share what one of them would have.
            let shares = machine.estimates.shares(BATCH, |_| true, machine.now_us);
            let batch = machine.estimates.batch();
            let seconds = BATCH as f64 / (50.0 * GB);
            for (path, share) in shares.iter().enumerate().filter(|(_, share)| **share > 0) {
                machine.estimates.measured(path, batch, *share, seconds);
            }
            assert!(shares[1] <= PROBE_BYTES, "{shares:?}");
        }
    }

    proptest! {
        #[test]
        fn shares_are_all_of_a_batch_whatever_was_measured(
            steps in prop::collection::vec((0..3_usize, 1..(1_u64 << 32), 0.0..1e3_f64, any::<bool>()), 1..60),
        ) {
            let mut machine = Machine::new(&[50.0, 50.0, 50.0]);
            for (path, bytes, seconds, is_over) in steps {
                match is_over {
                    true => machine.estimates.measured(path, machine.estimates.batch(), bytes, seconds),
                    false => machine.estimates.waits(path, bytes, seconds),
                }
                let shares = machine.estimates.shares(bytes, |usable| usable != path, bytes);
                prop_assert_eq!(shares.iter().sum::<u64>(), bytes);
                prop_assert!(path == 0 || shares[path] == 0, "{path} of {shares:?}");
            }
        }

        #[test]
        fn a_path_gets_no_more_than_its_last_rate_is_worth(
            rates in prop::collection::vec(0.01..60.0_f64, 1..40),
        ) {
            let mut machine = Machine::new(&[50.0, 50.0]);
            for rate in rates {
                machine.gb_per_s[1] = rate;
                machine.batch(&[]);
                let share = machine.batch(&[])[1];
                // The estimate is off by what counts as noise.
                let most = rate / (1.0 - NOISE) / (1.0 - START_PART);
                let most = (BATCH as f64 * most / (most + 50.0)) as u64;
                prop_assert!(share <= most.max(PROBE_BYTES), "{share} at {rate} GB/s");
            }
        }

        #[test]
        fn noise_of_a_tenth_moves_shares_by_no_more_than_a_twentieth(
            noise in prop::collection::vec(prop::array::uniform3(0.9..1.1_f64), 30),
        ) {
            let mut machine = Machine::new(&[50.0, 50.0, 50.0]);
            let mut before = machine.batch(&[]);
            for factors in noise {
                let shares = machine.batch(&factors);
                prop_assert!(machine.excess(&shares) < 0.15, "{shares:?}");
                for (share, before) in shares.iter().zip(&before) {
                    let moved = share.abs_diff(*before) as f64 / BATCH as f64;
                    prop_assert!(moved < 0.03, "{moved} from {before} to {share}");
                }
                before = shares;
            }
        }
    }
}
