//! Bare links: each GPU's PCIe link alone, all PCIe links at once, and the way from each GPU to
//! each other.

use super::flow::{Flow, Ring, run};
use super::turns::in_turn;
use super::{MeasureError, PINNED_BYTES};
use crate::copier::Copier;
use crate::device::{Device, DeviceMemory, HostMemory, Stream};
use crate::driver::CudaError;
use crate::driver::abi::Address;
use crate::links::Direction;
use crate::peers::Peers;
use crate::profile::{BothWays, LinkRate, PairRate};
use crate::topology::Topology;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rounds in which PCIe links take turns, and how long each turn is.
const ROUNDS: usize = 7;
const WINDOW: Duration = Duration::from_millis(8);
const LOT_BYTES: u64 = 4 << 20;
/// The same from GPU to GPU, where bytes take a tenth of the time.
const PAIR_ROUNDS: usize = 3;
const PAIR_WINDOW: Duration = Duration::from_millis(2);
const PAIR_LOT_BYTES: u64 = 16 << 20;

#[derive(Debug)]
pub struct Bare {
    pub alone: Vec<LinkRate>,
    pub together: BothWays,
    pub pairs: Vec<PairRate>,
}

/// A GPU and memory of it that lots lie in.
struct Gpu {
    device: Arc<Device>,
    memory: DeviceMemory,
}

/// Measures the links of a copier's GPUs, with pinned memory of [`PINNED_BYTES`].
pub fn measure(
    copier: &Copier,
    host: &Topology,
    pinned: &HostMemory,
    until: Instant,
) -> Result<Bare, MeasureError> {
    let gpu = |device: &Arc<Device>| {
        Ok(Gpu { device: Arc::clone(device), memory: DeviceMemory::new(device, PAIR_LOT_BYTES)? })
    };
    let gpus = copier.devices().map(gpu).collect::<Result<Vec<Gpu>, CudaError>>()?;
    // Streams of other GPUs take copies too, but some context has to be current.
    let _current = gpus.first().map(|gpu| gpu.device.enter()).transpose()?;
    let start = Instant::now();
    let part = |part: f64| start + until.saturating_duration_since(start).mul_f64(part);
    let h2d = links(&gpus, pinned, Direction::HostToDevice, part(0.4))?;
    let d2h = links(&gpus, pinned, Direction::DeviceToHost, part(0.8))?;
    let both = |nth: usize| BothWays { h2d_bytes_per_s: h2d[nth], d2h_bytes_per_s: d2h[nth] };
    let alone = |(nth, gpu): (usize, &Gpu)| LinkRate { gpu: gpu.device.index(), rates: both(nth) };
    Ok(Bare {
        alone: gpus.iter().enumerate().map(alone).collect(),
        together: both(gpus.len()),
        pairs: pairs(&gpus, copier.stream_copies().peers(), host, until)?,
    })
}

/// Each PCIe link's rate in one direction, then that of all.
fn links(
    gpus: &[Gpu],
    pinned: &HostMemory,
    direction: Direction,
    until: Instant,
) -> Result<Vec<f64>, MeasureError> {
    // Each PCIe link has its own part of host memory, all of which is used, so that no cache holds
    // what PCIe links read and write.
    let lots = (PINNED_BYTES / LOT_BYTES / gpus.len() as u64).max(1);
    let flow = |(nth, gpu): (u64, &Gpu)| {
        let host = Ring { start: pinned.start() as Address + nth * lots * LOT_BYTES, lots };
        let device = Ring { start: gpu.memory.address(), lots: PAIR_LOT_BYTES / LOT_BYTES };
        let (from, to) = direction.in_order(host, device);
        let link = format!("gpu{}.{}", gpu.device.index(), direction.name());
        Flow::new(link, Stream::new(&gpu.device)?, from, to, LOT_BYTES)
    };
    let mut flows = (0..).zip(gpus).map(flow).collect::<Result<Vec<Flow>, CudaError>>()?;
    let all = flows.len();
    in_turn(all + 1, ROUNDS, until, |link| {
        let flows = if link == all { &mut flows[..] } else { &mut flows[link..=link] };
        // SAFETY: the memory outlives the run, and nobody else uses it; the caller has entered a
        // context.
        unsafe { run(flows, WINDOW) }
    })
}

/// The rate from each GPU to each that it reaches.
fn pairs(
    gpus: &[Gpu],
    peers: &Peers,
    host: &Topology,
    until: Instant,
) -> Result<Vec<PairRate>, MeasureError> {
    let reaches = |from: &Gpu, to: &Gpu| {
        let (from, to) = (from.device.index(), to.device.index());
        let one_way =
            |from, to| host.pairs.iter().any(|pair| (pair.from, pair.to, pair.reaches) == (from, to, true));
        // What arrives wrong has no rate.
        one_way(from, to) && one_way(to, from) && peers.relay(from, to)
    };
    let all = gpus.iter().flat_map(|from| gpus.iter().map(move |to| (from, to)));
    let pairs: Vec<(&Gpu, &Gpu)> = all.filter(|(from, to)| reaches(from, to)).collect();
    let flow = |(from, to): &(&Gpu, &Gpu)| {
        let ring = |gpu: &Gpu| Ring { start: gpu.memory.address(), lots: 1 };
        let link = format!("gpu{}>gpu{}", from.device.index(), to.device.index());
        Flow::new(link, Stream::new(&from.device)?, ring(from), ring(to), PAIR_LOT_BYTES)
    };
    let mut flows = pairs.iter().map(flow).collect::<Result<Vec<Flow>, CudaError>>()?;
    let rates = in_turn(flows.len(), PAIR_ROUNDS, until, |pair| {
        // SAFETY: as above.
        unsafe { run(&mut flows[pair..=pair], PAIR_WINDOW) }
    })?;
    let rate = |((from, to), bytes_per_s): (&(&Gpu, &Gpu), f64)| PairRate {
        from: from.device.index(),
        to: to.device.index(),
        bytes_per_s,
    };
    Ok(pairs.iter().zip(rates).map(rate).collect())
}
