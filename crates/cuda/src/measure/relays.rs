//! Real copies for one GPU over its relays: by what stream copies are divided best, from which size
//! on they pay, when the mover is better still, and how peers hand on best. All of it through
//! [`Copier::copy_and_wait`], as callers have it; rates decide whether that is a plain copy, a
//! stream copy or the mover's.

use super::choose::{Pair, best_kind, best_step, pays_from};
use super::turns::in_turn;
use super::{MeasureError, PINNED_BYTES};
use crate::copier::Copier;
use crate::device::{DeviceMemory, HostMemory};
use crate::driver::abi::Address;
use crate::kernels::Piece;
use crate::links::Direction;
use crate::profile::Relayed;
use crate::rates::{RELAYING, Rates, Relaying};
use crate::relay::Relay;
use std::time::Instant;

const ROUNDS: usize = 7;
/// More of them for small copies, which are over soon and disturbed easily.
const SMALL_ROUNDS: usize = 15;
/// A copy over a slow PCIe link is no larger than what takes this long.
const COPY_S: f64 = 8e-3;
/// What relays may carry of what their PCIe links would: with all PCIe links at work the host's
/// memory is the limit, and some of what a relay carries is late for good.
const EFFICIENCIES: [f64; 7] = [0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05];
const LATENCIES_US: [u32; 10] = [10, 15, 20, 25, 30, 40, 50, 60, 80, 100];
/// Sizes at which latency tells, in MiB.
const LATENCY_MIB: [f64; 3] = [4.0, 8.0, 16.0];
/// Sizes at which stream copies may begin to pay, in MiB.
const BREAK_EVEN_MIB: [f64; 11] = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0];
/// StreamCopies have copies where they take at most this part of a plain copy's time. They are
/// measured one after another, when all that a stream copy touches on the host and in the driver is
/// warm. A single copy finds it cold: that costs a stream copy up to 30 us more, with its several
/// times as many calls, and a plain copy next to nothing. Copies that gain less than this warm (12
/// us of the 80 that 4 MiB take) were slower cold, by up to a quarter; at twice the size the gain
/// covers it.
const STREAM_COPY_PAYS: f64 = 0.85;
/// The mover has copies that are waited for where it takes at most this part of a stream copy's
/// time: a stream copy leaves the processor and the peers' own work more to themselves.
const MOVER_PAYS: f64 = 0.95;

#[derive(Debug, Clone, Copy)]
enum Who {
    Plain,
    StreamCopy(Relaying),
    Mover,
}

/// A GPU to copy for, and what with.
pub struct Trials<'a> {
    /// Copiers that differ in how relays hand on what the mover gives them. StreamCopies are the
    /// first one's.
    pub copiers: Vec<(Relay, Copier)>,
    pub pinned: &'a HostMemory,
    pub memory: DeviceMemory,
    /// Of the bare links.
    pub rates: Rates,
}

/// Trials in one direction, with copies up to a size.
struct Trial<'a, 'b> {
    trials: &'a mut Trials<'b>,
    direction: Direction,
    most: u64,
}

impl Trials<'_> {
    /// Finds what is best in one direction, for a target whose own PCIe link has this rate.
    pub fn of(
        &mut self,
        direction: Direction,
        link_bytes_per_s: f64,
        until: Instant,
    ) -> Result<Relayed, MeasureError> {
        let start = Instant::now();
        let part = |part: f64| start + until.saturating_duration_since(start).mul_f64(part);
        let most = ((link_bytes_per_s * COPY_S) as u64).next_power_of_two().min(PINNED_BYTES);
        let mut trial = Trial { trials: self, direction, most };
        let relaying = trial.efficiency(part(0.4))?;
        let relaying = trial.latency(relaying, part(0.55))?;
        let break_even_bytes = trial.break_even(relaying, part(0.75))?;
        let best = trial.relay(part(0.9))?;
        let mover_from = trial.mover(relaying, best, until)?;
        // Where stream copies do not pay the mover's paths, which are the same ones, do not either.
        let mover_bytes = break_even_bytes.zip(mover_from).map_or(u64::MAX, |(least, from)| from.max(least));
        Ok(Relayed { relaying, break_even_bytes, mover_bytes, relay: self.copiers[best].0 })
    }
}

impl Trial<'_, '_> {
    fn efficiency(&mut self, until: Instant) -> Result<Relaying, MeasureError> {
        let candidates = EFFICIENCIES.map(|efficiency| Relaying { efficiency, ..RELAYING });
        self.best(&candidates, &[self.most / 4, self.most], until)
    }

    fn latency(&mut self, found: Relaying, until: Instant) -> Result<Relaying, MeasureError> {
        let candidates = LATENCIES_US.map(|us| Relaying { latency_s: f64::from(us) / 1e6, ..found });
        self.best(&candidates, &sizes(&LATENCY_MIB, self.most), until)
    }

    /// The candidate by which stream copies of these sizes are divided best.
    fn best(
        &mut self,
        candidates: &[Relaying],
        sizes: &[u64],
        until: Instant,
    ) -> Result<Relaying, MeasureError> {
        let seconds = in_turn(candidates.len() * sizes.len(), ROUNDS, until, |nth| {
            let (relaying, bytes) = (candidates[nth / sizes.len()], sizes[nth % sizes.len()]);
            self.seconds(0, Who::StreamCopy(relaying), bytes)
        })?;
        let table: Vec<Vec<f64>> = seconds.chunks(sizes.len()).map(<[f64]>::to_vec).collect();
        Ok(candidates[best_step(&table)])
    }

    fn break_even(&mut self, relaying: Relaying, until: Instant) -> Result<Option<u64>, MeasureError> {
        let sizes = sizes(&BREAK_EVEN_MIB, self.most);
        let pairs =
            self.pairs([(0, Who::Plain), (0, Who::StreamCopy(relaying))], &sizes, SMALL_ROUNDS, until)?;
        Ok(pays_from(&pairs, STREAM_COPY_PAYS))
    }

    /// The copier whose relays are the best for the mover.
    fn relay(&mut self, until: Instant) -> Result<usize, MeasureError> {
        let seconds = in_turn(self.trials.copiers.len(), ROUNDS, until, |copier| {
            self.seconds(copier, Who::Mover, self.most)
        })?;
        Ok(best_kind(&seconds))
    }

    fn mover(
        &mut self,
        relaying: Relaying,
        best: usize,
        until: Instant,
    ) -> Result<Option<u64>, MeasureError> {
        let sizes = [self.most / 4, self.most / 2, self.most];
        let pairs =
            self.pairs([(0, Who::StreamCopy(relaying)), (best, Who::Mover)], &sizes, ROUNDS, until)?;
        Ok(pays_from(&pairs, MOVER_PAYS))
    }

    /// Two ways side by side at several sizes.
    fn pairs(
        &mut self,
        ways: [(usize, Who); 2],
        sizes: &[u64],
        rounds: usize,
        until: Instant,
    ) -> Result<Vec<Pair>, MeasureError> {
        let seconds = in_turn(2 * sizes.len(), rounds, until, |nth| {
            let (copier, who) = ways[nth % 2];
            self.seconds(copier, who, sizes[nth / 2])
        })?;
        let pair = |(bytes, both): (&u64, &[f64])| Pair { bytes: *bytes, usual_s: both[0], other_s: both[1] };
        Ok(sizes.iter().zip(seconds.chunks(2)).map(pair).collect())
    }

    fn seconds(&mut self, copier: usize, who: Who, bytes: u64) -> Result<f64, MeasureError> {
        let (trials, direction) = (&mut *self.trials, self.direction);
        let (host, device) = (trials.pinned.start() as Address, trials.memory.address());
        let (from, to) = direction.in_order(host, device);
        let rates = who.rates(&trials.rates);
        let copier = &mut trials.copiers[copier].1;
        copier.set_rates(rates)?;
        let start = Instant::now();
        let target = trials.memory.device().index();
        // SAFETY: both ranges are as long as the largest copy, and nobody else uses them.
        unsafe { copier.copy_and_wait(target, direction, &[Piece { from, to, bytes }])? };
        Ok(start.elapsed().as_secs_f64())
    }
}

impl Who {
    /// Rates with which a copier leaves a copy to it.
    fn rates(self, bare: &Rates) -> Rates {
        Direction::BOTH.into_iter().fold(bare.clone(), |rates, direction| {
            rates.with(direction, |own| {
                (own.break_even_bytes, own.mover_bytes) = match self {
                    Who::Plain => (u64::MAX, u64::MAX),
                    Who::StreamCopy(_) => (0, u64::MAX),
                    Who::Mover => (u64::MAX, 0),
                };
                if let Who::StreamCopy(relaying) = self {
                    own.relaying = relaying;
                }
            })
        })
    }
}

/// The sizes that are not larger than `most`, but one at least.
fn sizes(mib: &[f64], most: u64) -> Vec<u64> {
    let bytes = mib.iter().map(|mib| (mib * f64::from(1 << 20)) as u64);
    let sizes: Vec<u64> = bytes.filter(|bytes| *bytes <= most).collect();
    if sizes.is_empty() { vec![most] } else { sizes }
}
