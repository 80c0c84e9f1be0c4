//! GPUs as places of the agent. Whoever knows GPUs brings their links and pinned memory; here bytes
//! of GPUs get their ways to peers, over staging that the mover shares out. Knows places, links and
//! how much memory lies between them.

use crate::error::AgentError;
use crate::tcp::{Stager, StagingMemory};
use forebay_transfer::lock::{Mutex, RwLock};
use forebay_transfer::{LinkId, MoverHandle, PathSpec, Place, RegionId, Staging};
use std::collections::HashMap;
use std::sync::Arc;

/// Slots between a GPU and a connection, for all GPUs and both directions: as many as lots on the
/// connection at a time, and one that is copied meanwhile.
pub const FLOW_SLOTS: u32 = 4;
/// Bytes of each: long enough that a lot's way there and back is short beside it.
pub const FLOW_SLOT_BYTES: u64 = 2 << 20;

/// A GPU on the agent's mover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    pub place: Place,
    /// Carries bytes of it to host memory, and
    pub to_host: LinkId,
    /// the other way.
    pub from_host: LinkId,
}

/// Ways between GPUs and peers.
pub(crate) struct DeviceWays {
    mover: MoverHandle,
    here: Place,
    /// Held across words with the mover.
    known: Mutex<Known>,
    /// On which GPU each registered region lies. Asked on the mover's thread too.
    regions: RwLock<HashMap<RegionId, Place>>,
}

#[derive(Default)]
struct Known {
    stager: Option<Arc<Stager>>,
    devices: Vec<Device>,
    /// Links to peers, which a mover never forgets.
    links: Vec<PeerLink>,
}

struct PeerLink {
    peer: Place,
    link: LinkId,
    /// Made with the first GPU.
    staging: Option<Staging>,
}

impl DeviceWays {
    pub fn new(mover: MoverHandle, here: Place) -> DeviceWays {
        DeviceWays { mover, here, known: Mutex::default(), regions: RwLock::default() }
    }

    /// Makes a GPU a place of the agent. One that is known stays as it is.
    pub fn add_device(&self, device: Device, memory: StagingMemory) -> Result<(), AgentError> {
        let mut known = self.known.lock();
        if known.devices.iter().any(|other| other.place == device.place) {
            return Ok(());
        }
        let stager = Stager { mover: self.mover.clone(), here: self.here, memory };
        let stager = Arc::clone(known.stager.get_or_insert_with(|| Arc::new(stager)));
        for link in &mut known.links {
            self.staging(link, &stager)?;
        }
        self.mover.add_path(PathSpec::direct(device.place, self.here, device.to_host))??;
        self.mover.add_path(PathSpec::direct(self.here, device.place, device.from_host))??;
        for link in &mut known.links {
            self.join(link, &device, &stager)?;
        }
        known.devices.push(device);
        Ok(())
    }

    /// A link to a peer has come about: GPUs get a way over it.
    pub fn add_link(&self, peer: Place, link: LinkId) -> Result<(), AgentError> {
        let mut known = self.known.lock();
        let mut link = PeerLink { peer, link, staging: None };
        if let Some(stager) = known.stager.clone() {
            for device in &known.devices {
                self.join(&mut link, device, &stager)?;
            }
        }
        known.links.push(link);
        Ok(())
    }

    /// What stages memory of a GPU for peers, if the GPU is known.
    pub fn stager(&self, place: Place) -> Result<Arc<Stager>, AgentError> {
        let known = self.known.lock();
        let is_known = known.devices.iter().any(|device| device.place == place);
        known.stager.clone().filter(|_| is_known).ok_or(AgentError::NoSuchDevice { place })
    }

    /// Memory of a GPU is registered.
    pub fn add_region(&self, region: RegionId, place: Place) {
        self.regions.write().insert(region, place);
    }

    pub fn forget_region(&self, region: RegionId) {
        self.regions.write().remove(&region);
    }

    /// The GPU that a registered region lies on. `None`: it is host memory.
    pub fn place_of(&self, region: RegionId) -> Option<Place> {
        self.regions.read().get(&region).copied()
    }

    fn join(&self, link: &mut PeerLink, device: &Device, stager: &Stager) -> Result<(), AgentError> {
        let staging = self.staging(link, stager)?;
        let (there, back) = ([device.to_host, link.link], [link.link, device.from_host]);
        self.mover.add_path(PathSpec::relayed(device.place, link.peer, there, staging, false))??;
        self.mover.add_path(PathSpec::relayed(link.peer, device.place, back, staging, false))??;
        Ok(())
    }

    fn staging(&self, link: &mut PeerLink, stager: &Stager) -> Result<Staging, AgentError> {
        if let Some(staging) = link.staging {
            return Ok(staging);
        }
        let bytes = u64::from(FLOW_SLOTS) * FLOW_SLOT_BYTES;
        let memory = (stager.memory)(bytes as usize).map_err(AgentError::Staging)?;
        let region = self.mover.register(self.here, memory)?;
        Ok(*link.staging.insert(Staging { region, slot_bytes: FLOW_SLOT_BYTES, slots: FLOW_SLOTS }))
    }
}
