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
    /// Bytes per second of all PCIe links together.
    host: HashMap<Direction, f64>,
    relays: HashMap<Direction, Relaying>,
    break_even_bytes: HashMap<Direction, u64>,
    mover_bytes: HashMap<Direction, u64>,
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
/// Smaller copies are faster alone, until it is measured.
const BREAK_EVEN_BYTES: u64 = 2 << 20;
/// Larger copies that are waited for are the mover's. None, until it is measured: on most hosts
/// stream copies are ahead at any size.
const MOVER_BYTES: u64 = u64::MAX;
/// What relaying costs, until it is measured.
pub(crate) const RELAYING: Relaying = Relaying { efficiency: 0.92, latency_s: 30e-6 };

impl Rates {
    /// The size from which on a copy over several paths is the faster one.
    pub fn break_even_bytes(&self, direction: Direction) -> u64 {
        self.break_even_bytes.get(&direction).copied().unwrap_or(BREAK_EVEN_BYTES)
    }

    /// The size below which a copy is faster alone, whichever way it goes.
    pub fn least_bytes(&self) -> u64 {
        Direction::BOTH.map(|direction| self.break_even_bytes(direction)).into_iter().min().unwrap_or(0)
    }

    /// The least time that a copy takes over its GPU's own PCIe link.
    pub fn least_alone_s(&self, device: u16, direction: Direction, bytes: u64) -> f64 {
        bytes as f64 / self.links.get(&(device, direction)).copied().unwrap_or(LINK_BYTES_PER_S).max(1.0)
    }

    /// The least time that a copy takes over all PCIe links of the host, of `gpus` GPUs.
    pub fn least_s(&self, direction: Direction, gpus: usize, bytes: u64) -> f64 {
        let links = LINK_BYTES_PER_S * gpus as f64;
        bytes as f64 / self.host.get(&direction).copied().unwrap_or(links).max(1.0)
    }

    /// The size from which on the mover is faster than a stream copy, for a copy that is waited
    /// for.
    pub fn mover_bytes(&self, direction: Direction) -> u64 {
        self.mover_bytes.get(&direction).copied().unwrap_or(MOVER_BYTES)
    }

    /// Sets the size from which on a copy goes over several paths; `u64::MAX` for never.
    pub fn with_break_even_bytes(mut self, direction: Direction, bytes: u64) -> Rates {
        self.break_even_bytes.insert(direction, bytes);
        self
    }

    /// Sets the size from which on a copy that is waited for is the mover's; `u64::MAX` for never.
    pub fn with_mover_bytes(mut self, direction: Direction, bytes: u64) -> Rates {
        self.mover_bytes.insert(direction, bytes);
        self
    }

    /// Notes a PCIe link's rate.
    pub fn with_link(mut self, device: u16, direction: Direction, bytes_per_s: f64) -> Rates {
        self.links.insert((device, direction), bytes_per_s);
        self
    }

    /// Notes what all PCIe links carry together.
    pub fn with_host(mut self, direction: Direction, bytes_per_s: f64) -> Rates {
        self.host.insert(direction, bytes_per_s);
        self
    }

    /// Notes what relaying costs.
    pub fn with_relaying(mut self, direction: Direction, relaying: Relaying) -> Rates {
        self.relays.insert(direction, relaying);
        self
    }

    /// The ways to or from a GPU: its own, then that of each relay.
    pub fn paths(&self, direction: Direction, target: u16, relays: &[u16]) -> Vec<Path> {
        let link = |device| self.links.get(&(device, direction)).copied().unwrap_or(LINK_BYTES_PER_S);
        let relaying = self.relays.get(&direction).copied().unwrap_or(RELAYING);
        let mut paths = vec![Path { bytes_per_s: link(target), latency_s: 0.0 }];
        paths.extend(relays.iter().map(|relay| Path {
            bytes_per_s: link(*relay) * relaying.efficiency,
            latency_s: relaying.latency_s,
        }));
        let sum: f64 = paths.iter().map(|path| path.bytes_per_s).sum();
        let host = self.host.get(&direction).copied().unwrap_or(sum);
        for path in &mut paths {
            path.bytes_per_s *= (host / sum).min(1.0);
        }
        paths
    }
}
