//! What paths carry: the figures by which the first stream copies are divided, as they were
//! measured or, before that, as they are assumed. Those that follow go by what the ones before
//! measured.

use crate::links::Direction;
use crate::plan::{Path, PathRates};
use crate::topology::Topology;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// Rates of the PCIe links of a host, and what relaying costs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rates {
    /// Bytes per second of each GPU's PCIe link while the others are idle.
    links: HashMap<(u16, Direction), f64>,
    /// In the order of [`Direction::BOTH`].
    directions: [DirectionRates; 2],
    /// GPUs that share a port of the processor, and a number for each such port.
    ports: HashMap<u16, usize>,
    /// Copies are divided by these figures for good.
    pub(crate) are_fixed: bool,
}

/// What holds for the copies of all GPUs in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DirectionRates {
    /// Of all PCIe links together, where that was measured.
    pub host_bytes_per_s: Option<f64>,
    pub relaying: Relaying,
    /// The size from which on a copy over several paths is the faster one; `u64::MAX` for never.
    pub break_even_bytes: u64,
    /// The size from which on a copy that is waited for is the mover's; `u64::MAX` for never.
    pub mover_bytes: u64,
}

/// What it costs to go over a relay.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Relaying {
    /// What a relay carries in the end of what its PCIe link would.
    pub efficiency: f64,
    /// From the start of a copy until a relay's first bytes arrive, beyond what they take on the
    /// wire.
    pub latency_s: f64,
}

/// A link of PCIe 5 x16, until it is measured. Only the proportions matter for how a copy is
/// divided.
const LINK_BYTES_PER_S: f64 = 54e9;
/// What relaying costs, until it is measured.
pub(crate) const RELAYING: Relaying = Relaying { efficiency: 0.92, latency_s: 30e-6 };

/// Until it is measured. On most hosts stream copies are ahead of the mover at any size.
impl Default for DirectionRates {
    fn default() -> DirectionRates {
        let (break_even_bytes, mover_bytes) = (2 << 20, u64::MAX);
        DirectionRates { host_bytes_per_s: None, relaying: RELAYING, break_even_bytes, mover_bytes }
    }
}

impl Rates {
    pub fn of(&self, direction: Direction) -> &DirectionRates {
        &self.directions[direction as usize]
    }

    /// The same with those of a direction changed.
    pub fn with(mut self, direction: Direction, change: impl FnOnce(&mut DirectionRates)) -> Rates {
        change(&mut self.directions[direction as usize]);
        self
    }

    /// Notes a PCIe link's rate.
    pub fn with_link(mut self, device: u16, direction: Direction, bytes_per_s: f64) -> Rates {
        self.links.insert((device, direction), bytes_per_s);
        self
    }

    /// Notes which GPUs are behind the same port of the processor.
    pub(crate) fn with_ports(mut self, topology: &Topology) -> Rates {
        let mut behind: BTreeMap<&str, Vec<u16>> = BTreeMap::new();
        for gpu in &topology.gpus {
            gpu.pci.port().into_iter().for_each(|port| behind.entry(port).or_default().push(gpu.index));
        }
        let shared = behind.into_values().filter(|gpus| gpus.len() > 1).enumerate();
        self.ports = shared.flat_map(|(port, gpus)| gpus.into_iter().map(move |gpu| (gpu, port))).collect();
        self
    }

    /// The same, from which copies do not depart whatever they measure: for who measures these
    /// figures, or compares.
    pub fn fixed(mut self) -> Rates {
        self.are_fixed = true;
        self
    }

    /// The size below which a copy is faster alone, whichever way it goes.
    pub fn least_bytes(&self) -> u64 {
        let [there, back] = self.directions.map(|direction| direction.break_even_bytes);
        there.min(back)
    }

    fn link(&self, device: u16, direction: Direction) -> f64 {
        self.links.get(&(device, direction)).copied().unwrap_or(LINK_BYTES_PER_S)
    }

    /// The least time that a copy takes over its GPU's own PCIe link.
    pub fn least_alone_s(&self, device: u16, direction: Direction, bytes: u64) -> f64 {
        bytes as f64 / self.link(device, direction).max(1.0)
    }

    /// The least time that a copy takes over all PCIe links of the host, of `gpus` GPUs.
    pub fn least_s(&self, direction: Direction, gpus: usize, bytes: u64) -> f64 {
        let links = LINK_BYTES_PER_S * gpus as f64;
        bytes as f64 / self.of(direction).host_bytes_per_s.unwrap_or(links).max(1.0)
    }

    /// The ways to or from a GPU: its own, then that of each relay.
    pub fn paths(&self, direction: Direction, target: u16, relays: &[u16]) -> PathRates {
        let DirectionRates { relaying, host_bytes_per_s, .. } = *self.of(direction);
        let path = |gpu: u16, efficiency: f64, latency_s| Path {
            bytes_per_s: self.link(gpu, direction) * efficiency,
            latency_s,
            port: self.ports.get(&gpu).copied(),
        };
        let mut paths = vec![path(target, 1.0, 0.0)];
        paths.extend(relays.iter().map(|relay| path(*relay, relaying.efficiency, relaying.latency_s)));
        let sum: f64 = paths.iter().map(|path| path.bytes_per_s).sum();
        let host = host_bytes_per_s.unwrap_or(sum);
        for path in &mut paths {
            path.bytes_per_s *= (host / sum).min(1.0);
        }
        PathRates { paths, ports: self.port_rates(direction) }
    }

    /// What each shared port carries: as much as the fastest of the links behind it.
    fn port_rates(&self, direction: Direction) -> Vec<f64> {
        let mut rates = vec![0.0; self.ports.values().max().map_or(0, |last| last + 1)];
        for (gpu, port) in &self.ports {
            rates[*port] = self.link(*gpu, direction).max(rates[*port]);
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Batch, PROBE_BYTES, shares};
    use crate::topology::{GpuFacts, PciPlace};

    /// A host whose GPUs are behind these ports.
    fn host(ports: &[&str]) -> Topology {
        let gpu = |(index, port): (u16, &&str)| {
            let bridges = Some([*port, "0000:02:00.0"].map(String::from).to_vec());
            GpuFacts { index, pci: PciPlace { bridges, ..PciPlace::default() }, ..GpuFacts::default() }
        };
        Topology { gpus: (0..).zip(ports).map(gpu).collect(), ..Topology::default() }
    }

    #[test]
    fn gpus_behind_one_port_share_what_it_carries() {
        let (one, other) = ("0000:00:01.0", "0000:00:02.0");
        let rates = Rates::default().with_ports(&host(&[one, one, other, other]));
        let paths = rates.paths(Direction::HostToDevice, 0, &[1, 2, 3]);
        let batch = Batch { bytes: 1 << 30, probe: None };
        let used: Vec<bool> = shares(&paths, batch).iter().map(|share| *share > 0).collect();
        assert_eq!(used, [true, false, true, false], "one link of each port");
        assert_eq!(shares(&paths, Batch { probe: Some(1), ..batch })[1], PROBE_BYTES);
        let apart = Rates::default().with_ports(&host(&[one, other]));
        assert!(apart.paths(Direction::HostToDevice, 0, &[1]).ports.is_empty(), "nobody shares");
    }
}
