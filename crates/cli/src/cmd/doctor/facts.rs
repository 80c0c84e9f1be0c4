//! What `forebay doctor` looks at. It gathers and judges nothing; what it cannot see is `None` or
//! says why.

use super::super::node_socket::{self, Seen};
use super::super::program::{self, Version};
use super::super::python::{Packages, Python};
use super::super::run;
use forebay_cuda::driver::{Driver, LoadError};
use forebay_cuda::topology::{MemoryFacts, Root, Topology};
use forebay_node::MemoryBound;
use forebay_store::disk::Uring;
use std::path::{Path, PathBuf};

/// Of a queue that is opened and closed again.
const URING_DEPTH: u32 = 8;
const SHARED: &str = "/dev/shm";
/// The PCI vendor, and what the class of a GPU begins with.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

/// All of it.
pub struct Facts {
    /// The glibc that this program has and the one that the libraries beside it need, or why that
    /// is not known.
    pub glibc: Result<(Version, Version), String>,
    /// Why io_uring cannot be used, where it cannot.
    pub uring: Result<(), String>,
    pub memory: MemoryFacts,
    pub memory_left: Option<MemoryBound>,
    /// Bytes that are left in `/dev/shm`.
    pub shared_left: Option<u64>,
    pub gpus: Gpus,
    /// The Python that was asked, and what it has, or why it does not say.
    pub python: (String, Result<Packages, String>),
    pub node: Node,
}

pub enum Gpus {
    /// What the driver says.
    Seen(Topology),
    /// There is no driver, and the host has so many GPUs of NVIDIA's on PCIe.
    NoDriver {
        on_pci: usize,
        error: LoadError,
    },
    Broken(LoadError),
}

pub struct Node {
    pub socket: PathBuf,
    pub seen: Seen,
}

impl Facts {
    /// Of this host, now. `socket` is where a node should be; otherwise the usual places are looked
    /// at.
    pub fn gather(socket: Option<&Path>) -> Facts {
        let python = Python::find();
        let packages = python.ask().map_err(|error| error.to_string());
        Facts {
            glibc: glibc(),
            uring: uring(),
            memory: MemoryFacts::read(),
            memory_left: MemoryBound::tightest(),
            shared_left: left_in(Path::new(SHARED)),
            gpus: Gpus::see(),
            python: (python.name(), packages),
            node: Node::see(socket),
        }
    }
}

fn glibc() -> Result<(Version, Version), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let library = run::library_near(&program).map_err(|error| error.to_string())?;
    let versions = program::glibc(&program, &library);
    versions.ok_or_else(|| format!("{} does not say which glibc it needs", library.display()))
}

/// Opens a queue for a file without a name.
fn uring() -> Result<(), String> {
    let file = tempfile::tempfile().map_err(|error| format!("no file to try it with: {error}"))?;
    Uring::open(&file, URING_DEPTH).map(drop).map_err(|error| error.to_string())
}

fn left_in(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

impl Gpus {
    fn see() -> Gpus {
        let seen = Driver::load().and_then(|driver| Ok(Topology::read(driver)?));
        match seen {
            Ok(topology) => Gpus::Seen(topology),
            Err(error @ LoadError::NoLibrary { .. }) => {
                Gpus::NoDriver { on_pci: gpus_on_pci(&Root::default()), error }
            }
            Err(error) => Gpus::Broken(error),
        }
    }
}

/// GPUs that the kernel sees, with a driver or without.
fn gpus_on_pci(root: &Root) -> usize {
    const FOLDER: &str = "sys/bus/pci/devices";
    let is_gpu = |device: &String| {
        let says = |file: &str| root.text(&format!("{FOLDER}/{device}/{file}")).unwrap_or_default();
        says("vendor") == NVIDIA && says("class").starts_with(DISPLAY)
    };
    root.names(FOLDER).iter().filter(|device| is_gpu(device)).count()
}

impl Node {
    /// The first that is there; the last place if none is.
    fn see(socket: Option<&Path>) -> Node {
        let mut places = socket.map_or_else(node_socket::usual, |socket| vec![socket.into()]);
        let last = places.pop().unwrap_or_default();
        let found = places.into_iter().map(|socket| (node_socket::look(&socket), socket));
        let first = found.into_iter().find(|(seen, _)| !matches!(seen, Seen::Nobody(_)));
        let (seen, socket) = first.unwrap_or_else(|| (node_socket::look(&last), last));
        Node { socket, seen }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_without_a_driver_are_seen_on_pci() {
        let folder = tempfile::tempdir().unwrap();
        for (device, vendor, class) in [
            ("0000:00:01.0", "0x10de", "0x030200"),
            ("0000:00:02.0", "0x10de", "0x040300"),
            ("0000:00:03.0", "0x1af4", "0x030000"),
        ] {
            let device = folder.path().join("sys/bus/pci/devices").join(device);
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            std::fs::write(device.join("class"), format!("{class}\n")).unwrap();
        }
        assert_eq!(gpus_on_pci(&Root::new(folder.path())), 1);
        assert_eq!(gpus_on_pci(&Root::new(&folder.path().join("none"))), 0);
    }
}
