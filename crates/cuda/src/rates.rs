//! What paths carry: the figures by which a stream copy is divided, as they were measured or,
//! before that, as they are assumed.

use crate::links::Direction;
use crate::plan::Path;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Rates of the PCIe links of a host, and what relaying costs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rates {
    /// Bytes per second of each GPU's PCIe link while the others are idle.
    links: HashMap<(u16, Direction), f64>,
    /// In the order of [`Direction::BOTH`].
    directions: [DirectionRates; 2],
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
    pub fn paths(&self, direction: Direction, target: u16, relays: &[u16]) -> Vec<Path> {
        let DirectionRates { relaying, host_bytes_per_s, .. } = *self.of(direction);
        let mut paths = vec![Path { bytes_per_s: self.link(target, direction), latency_s: 0.0 }];
        paths.extend(relays.iter().map(|relay| Path {
            bytes_per_s: self.link(*relay, direction) * relaying.efficiency,
            latency_s: relaying.latency_s,
        }));
        let sum: f64 = paths.iter().map(|path| path.bytes_per_s).sum();
        let host = host_bytes_per_s.unwrap_or(sum);
        for path in &mut paths {
            path.bytes_per_s *= (host / sum).min(1.0);
        }
        paths
    }
}
