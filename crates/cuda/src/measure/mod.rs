//! Measuring a host's links, and copies over them, in seconds. Machines are shared and clocks go up
//! and down, so candidates take turns and the median of each counts.
//!
//! Pure: `choose`, `turns`. Driver: `flow`. Glue: `links` (bare links), `relays` (real copies), and
//! this file.

mod choose;
mod flow;
mod links;
mod relays;
mod turns;

use crate::copier::{Copier, CopierOptions, CopyError, StartError};
use crate::device::{Device, DeviceMemory, HostMemory};
use crate::driver::{CudaError, Driver};
use crate::links::Direction;
use crate::profile::{Profile, RelayedBothWays};
use crate::rates::Rates;
use crate::relay::Relay;
use crate::remote::NodeRelays;
use crate::topology::Topology;
use relays::Trials;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Host memory that is pinned for it and given back after it. As much is allocated on one GPU, and
/// less on the others. What copiers have of their own comes on top.
pub const PINNED_BYTES: u64 = 256 << 20;
/// When this much time has passed, no candidate that had a turn has another.
pub const TIME_LIMIT: Duration = Duration::from_secs(3);
/// The part of that after which it is so for the bare links.
const LINKS_PART: f64 = 0.4;

/// Why there are no figures.
#[derive(Debug, Error)]
pub enum MeasureError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error("link {link}: it moved fewer than {lots} lots of {lot_bytes} bytes in {limit:?}")]
    Stuck {
        /// Between what.
        link: String,
        /// What it should have moved at least.
        lots: u64,
        /// Of how many bytes.
        lot_bytes: u64,
        /// How long it had.
        limit: Duration,
    },
}

/// Measures the GPUs that this process sees on its host. Neither should have anything else to do
/// meanwhile.
pub fn measure(driver: &'static Driver, host: &Topology) -> Result<Profile, MeasureError> {
    let start = Instant::now();
    // It also lets GPUs reach each other's memory.
    let usual = copier(driver, Relay::default())?;
    let first = usual.devices().next().cloned().ok_or(StartError::NoDevices)?;
    let pinned = HostMemory::new(&first, PINNED_BYTES as usize)?;
    let bare = links::measure(&usual, host, &pinned, start + TIME_LIMIT.mul_f64(LINKS_PART))?;
    let mut profile = Profile::new(host.digest(), bare.alone, bare.together, bare.pairs, None);
    profile.untrusted = usual.stream_copies().peers().untrusted().to_vec();
    profile.relayed = relayed(usual, &profile, &pinned, start + TIME_LIMIT)?;
    Ok(profile)
}

/// Copies over relays, for the GPU whose own PCIe link is the fastest, since it gains least; none
/// where no GPU has a relay.
fn relayed(
    usual: Copier,
    profile: &Profile,
    pinned: &HostMemory,
    end: Instant,
) -> Result<Option<RelayedBothWays>, MeasureError> {
    let rate = |device: &Device| profile.alone(device.index()).map_or(0.0, |rates| rates.h2d_bytes_per_s);
    let served = usual.devices().filter(|device| usual.stream_copies().has_relays(device.index()));
    let target = served.max_by(|one, other| rate(one).total_cmp(&rate(other))).cloned();
    let Some((target, link)) =
        target.and_then(|target| Some((target.clone(), profile.alone(target.index())?)))
    else {
        return Ok(None);
    };
    let driver = usual.driver();
    let mut copiers = vec![(Relay::default(), usual)];
    for relay in Relay::ALL.into_iter().filter(|relay| *relay != Relay::default()) {
        copiers.push((relay, copier(driver, relay)?));
    }
    let (memory, rates) = (DeviceMemory::new(&target, PINNED_BYTES)?, Rates::from(profile).fixed());
    let mut trials = Trials { copiers, pinned, memory, rates };
    let now = Instant::now();
    let middle = now + end.saturating_duration_since(now) / 2;
    let h2d = trials.of(Direction::HostToDevice, link.h2d_bytes_per_s, middle)?;
    let d2h = trials.of(Direction::DeviceToHost, link.d2h_bytes_per_s, end)?;
    Ok(Some(RelayedBothWays { h2d, d2h }))
}

fn copier(driver: &'static Driver, relay: Relay) -> Result<Copier, StartError> {
    let (to_device, to_host, rates) = (Some(relay), Some(relay), Some(Rates::default()));
    let options = CopierOptions { devices: None, to_device, to_host, rates, relays: NodeRelays::None };
    Copier::with_driver(driver, &options)
}
