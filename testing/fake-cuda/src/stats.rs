//! What was called and what moved over which link.

use std::collections::HashMap;

/// A way that bytes take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// Over a GPU's PCIe link, from host memory.
    HostToDevice(usize),
    /// Over a GPU's PCIe link, to host memory.
    DeviceToHost(usize),
    /// Over NVLink, from one GPU to another.
    Peer(usize, usize),
    /// Inside one GPU.
    Local(usize),
    /// From host memory to host memory.
    Host,
}

/// Counters since the start.
#[derive(Default)]
pub struct Stats {
    calls: HashMap<&'static str, u64>,
    bytes: HashMap<Way, u64>,
}

impl Stats {
    pub fn called(&mut self, symbol: &'static str) {
        *self.calls.entry(symbol).or_default() += 1;
    }

    pub fn moved(&mut self, way: Way, bytes: u64) {
        *self.bytes.entry(way).or_default() += bytes;
    }

    pub fn calls(&self, symbol: &str) -> u64 {
        self.calls.get(symbol).copied().unwrap_or(0)
    }

    /// Bytes of a way by its name: `h2d.0`, `d2h.1`, `p2p.1.0` (from, to), `d2d.0`, `host`.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        let mut parts = name.split('.');
        let kind = parts.next()?;
        let mut gpu = || parts.next()?.parse().ok();
        let way = match kind {
            "h2d" => Way::HostToDevice(gpu()?),
            "d2h" => Way::DeviceToHost(gpu()?),
            "p2p" => Way::Peer(gpu()?, gpu()?),
            "d2d" => Way::Local(gpu()?),
            "host" => Way::Host,
            _ => return None,
        };
        Some(self.bytes.get(&way).copied().unwrap_or(0))
    }
}
