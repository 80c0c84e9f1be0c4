//! The two ways between host memory and a GPU.

use crate::kernels::Piece;
use forebay_transfer::Place;

/// Where host memory is. PCIe links of all GPUs reach all of it; which do so faster is measured,
/// not assumed.
pub const HOST: Place = Place::Host(0);
/// Where host memory is that relays of the node's process reach too.
pub const SHARED: Place = Place::Host(1);

/// Which way a PCIe link goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    HostToDevice,
    DeviceToHost,
}

impl Direction {
    pub const BOTH: [Direction; 2] = [Direction::HostToDevice, Direction::DeviceToHost];

    /// What is on the host's side and what is on the GPU's, in the order in which bytes pass them.
    pub fn in_order<T>(self, host: T, device: T) -> (T, T) {
        match self {
            Direction::HostToDevice => (host, device),
            Direction::DeviceToHost => (device, host),
        }
    }

    /// Where bytes that go this way between host memory and a GPU are read, and where they arrive.
    pub fn ends(self, host: Place, device: u16) -> (Place, Place) {
        self.in_order(host, Place::Device(device))
    }

    /// (host address, device address, bytes) of a piece that goes this way.
    pub fn sides(self, piece: &Piece) -> (u64, u64, u64) {
        let (host, device) = self.in_order(piece.from, piece.to);
        (host, device, piece.bytes)
    }

    /// What it is called in the names of links.
    pub fn name(self) -> &'static str {
        match self {
            Direction::HostToDevice => "h2d",
            Direction::DeviceToHost => "d2h",
        }
    }
}
