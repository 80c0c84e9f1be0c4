//! How a copier is put together: each GPU's PCIe links, and a path over each peer's.

use super::{Made, StartError};
use crate::addresses::Addresses;
use crate::device::{Device, DeviceMemory, Stream};
use crate::kernels::Kernels;
use crate::links::{Direction, HOST, PcieLink, PeerLink, SHARED, link_spec};
use crate::peers::Peers;
use crate::poller::Tracks;
use crate::relay::By;
use forebay_transfer::{LinkId, MoverHandle, PathSpec, Place, Staging};
use std::collections::HashMap;
use std::sync::Arc;

/// Slots on a relay, for all GPUs that it serves, in both directions. Larger ones gain nothing: a
/// PCIe link is busy for tens of microseconds with one of these; smaller ones would make more lots
/// than the control thread can see to.
const RELAY_SLOTS: u32 = 8;
const RELAY_SLOT_BYTES: u64 = 2 << 20;
/// What was built: GPUs that are in use, and the staging of their relays.
pub struct Built {
    pub gpus: Vec<Arc<Kernels>>,
    pub staging: Vec<DeviceMemory>,
    pub peers: Peers,
}

/// Makes all links and paths the mover's. A GPU that has no room for its own is left out.
pub fn build(
    handle: &MoverHandle,
    tracks: &Tracks,
    addresses: &Arc<Addresses>,
    gpus: &[Arc<Kernels>],
    made: &Made,
) -> Result<Built, StartError> {
    let mut build = Build { handle, tracks, addresses, staging: Vec::new() };
    let (gpus, peers) = build.everything(gpus, made)?;
    Ok(Built { gpus, staging: build.staging, peers })
}

/// A copier being put together.
struct Build<'a> {
    handle: &'a MoverHandle,
    tracks: &'a Tracks,
    addresses: &'a Arc<Addresses>,
    staging: Vec<DeviceMemory>,
}

/// A GPU's kernels and PCIe links.
struct Gpu {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    links: HashMap<Direction, LinkId>,
    /// For what it relays.
    staging: Staging,
}

impl Build<'_> {
    fn everything(
        &mut self,
        opened: &[Arc<Kernels>],
        made: &Made,
    ) -> Result<(Vec<Arc<Kernels>>, Peers), StartError> {
        let mut gpus = Vec::with_capacity(opened.len());
        for kernels in opened {
            match self.gpu(kernels) {
                Ok(gpu) => gpus.push(gpu),
                Err(StartError::Cuda(error)) if opened.len() > 1 => {
                    let gpu = kernels.device().index();
                    tracing::warn!(gpu, reason = %error, "GPU is left out");
                }
                Err(error) => return Err(error),
            }
        }
        if gpus.is_empty() {
            return Err(StartError::NoDevices);
        }
        let used: Vec<Arc<Kernels>> = gpus.iter().map(|gpu| Arc::clone(&gpu.kernels)).collect();
        let peers = Peers::check(&used);
        for gpu in &gpus {
            for direction in Direction::BOTH {
                for host in [HOST, SHARED] {
                    let (from, to) = direction.ends(host, gpu.device.index());
                    self.handle.add_path(PathSpec::direct(from, to, gpu.links[&direction]))??;
                }
            }
        }
        for gpu in &gpus {
            let relays = gpus.iter().filter(|peer| peers.relay(gpu.device.index(), peer.device.index()));
            for peer in relays {
                for (direction, relay) in Direction::BOTH.into_iter().zip(made.relays) {
                    self.relay(gpu, peer, direction, relay.staged)?;
                }
            }
        }
        Ok((used, peers))
    }

    fn gpu(&mut self, kernels: &Arc<Kernels>) -> Result<Gpu, StartError> {
        let device = kernels.device();
        let mut links = HashMap::new();
        for direction in Direction::BOTH {
            let link = PcieLink::new(direction, self.tracks, kernels, self.addresses)?;
            let spec = link_spec(format!("gpu{}.{}", device.index(), direction.name()));
            links.insert(direction, self.handle.add_link(spec, Box::new(link))?);
        }
        let staging = self.staging(device)?;
        Ok(Gpu { device: Arc::clone(device), kernels: Arc::clone(kernels), links, staging })
    }

    fn staging(&mut self, device: &Arc<Device>) -> Result<Staging, StartError> {
        let (slots, slot_bytes) = (RELAY_SLOTS, RELAY_SLOT_BYTES);
        let memory = DeviceMemory::new(device, slot_bytes * u64::from(slots))?;
        let region = self.handle.register_opaque(Place::Device(device.index()), memory.bytes())?;
        self.addresses.insert(region, memory.address(), memory.bytes());
        self.staging.push(memory);
        Ok(Staging { region, slot_bytes, slots })
    }

    fn relay(&mut self, gpu: &Gpu, peer: &Gpu, direction: Direction, by: By) -> Result<(), StartError> {
        let engine = match by {
            By::Own => Some(self.tracks.track(Stream::new(&gpu.device)?)),
            By::Peer => Some(self.tracks.track(Stream::new(&peer.device)?)),
            By::Kernel => None,
        };
        let kernel = self.tracks.track(Stream::new(&gpu.device)?);
        let pair = PeerLink::new(engine, kernel, &gpu.kernels, self.addresses)?;
        let link = peer.links[&direction];
        let (first, second) = direction.in_order(peer.device.index(), gpu.device.index());
        let pair = self.handle.add_link(link_spec(format!("gpu{first}>gpu{second}")), Box::new(pair))?;
        let (from, to) = direction.ends(HOST, gpu.device.index());
        let links = direction.in_order(link, pair).into();
        self.handle.add_path(PathSpec::relayed(from, to, links, peer.staging, true))??;
        Ok(())
    }
}
