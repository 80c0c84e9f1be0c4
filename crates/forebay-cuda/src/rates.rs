//! What paths carry: the figures by which a chain is divided, as they were measured or, before that, as they are assumed. This
//! file knows numbers; it must never know how they came about.

use crate::chain::Path;
use crate::links::Direction;
use std::collections::HashMap;

/// Rates of the lanes of a host, and what relaying costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Rates {
    /// Bytes per second of each GPU's lane while the others are idle.
    lanes: HashMap<(u16, Direction), f64>,
    /// Bytes per second of all lanes together.
    host: HashMap<Direction, f64>,
    relays: HashMap<Direction, Relaying>,
    break_even_bytes: u64,
}

/// What it costs to go over a relay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Relaying {
    /// What a relay carries in the end of what its lane would.
    pub efficiency: f64,
    /// From the start of a copy until a relay's first bytes arrive, beyond what they take on the wire.
    pub latency_s: f64,
}

/// A lane of PCIe 5 x16, until it is measured. Only the proportions matter for how a copy is divided.
const LANE_BYTES_PER_S: f64 = 54e9;
/// Smaller copies are faster alone, until it is measured.
const BREAK_EVEN_BYTES: u64 = 2 << 20;
/// What relaying costs, until it is measured.
const RELAYING: Relaying = Relaying { efficiency: 0.92, latency_s: 30e-6 };

impl Default for Rates {
    fn default() -> Rates {
        let (lanes, host, relays) = (HashMap::new(), HashMap::new(), HashMap::new());
        Rates { lanes, host, relays, break_even_bytes: BREAK_EVEN_BYTES }
    }
}

impl Rates {
    /// The size from which on a copy over several paths is the faster one.
    pub fn break_even_bytes(&self) -> u64 {
        self.break_even_bytes
    }

    /// Sets the size from which on a copy goes over several paths.
    pub fn with_break_even_bytes(mut self, bytes: u64) -> Rates {
        self.break_even_bytes = bytes;
        self
    }

    /// Notes a lane's rate.
    pub fn with_lane(mut self, device: u16, direction: Direction, bytes_per_s: f64) -> Rates {
        self.lanes.insert((device, direction), bytes_per_s);
        self
    }

    /// Notes what all lanes carry together.
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
        let lane = |device| self.lanes.get(&(device, direction)).copied().unwrap_or(LANE_BYTES_PER_S);
        let relaying = self.relays.get(&direction).copied().unwrap_or(RELAYING);
        let mut paths = vec![Path { bytes_per_s: lane(target), latency_s: 0.0 }];
        paths.extend(relays.iter().map(|relay| Path {
            bytes_per_s: lane(*relay) * relaying.efficiency,
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
