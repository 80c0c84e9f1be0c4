//! Memory of this end that is registered, of the host and of GPUs: for its own requests a region of
//! the mover, for peers an offer by address.

use crate::addresses::{Addresses, BadRange};
use crate::descriptors::Descriptors;
use crate::error::AgentError;
use crate::ipc::grants::Grants;
use crate::prepared::Blocks;
use crate::request::Requests;
use crate::tcp::{Access, DeviceMemory, Exports, PeerRegion, Stager};
use forebay_transfer::lock::Mutex;
use forebay_transfer::mapped::{self, Absent};
use forebay_transfer::{Backing, MoverHandle, Place, Refused, RegionId};
use std::sync::Arc;

/// Memory that an agent offers, and uses itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registration {
    base: u64,
    len: u64,
    region: RegionId,
    offered: PeerRegion,
}

impl Registration {
    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// What it is to this agent's mover.
    pub fn region(&self) -> RegionId {
        self.region
    }

    pub fn offered(&self) -> PeerRegion {
        self.offered
    }
}

/// What is registered.
pub(crate) struct OwnMemory {
    mover: MoverHandle,
    here: Place,
    exports: Arc<Exports>,
    registered: Mutex<Registered>,
}

#[derive(Default)]
struct Registered {
    memory: Addresses<Registration>,
    /// What is being given back, and what could not be: it may still be touched.
    leaving: Vec<Registration>,
    next_key: u64,
}

impl Registered {
    fn check(&self, base: u64, len: u64) -> Result<(), AgentError> {
        let end = base.saturating_add(len);
        let touches = |other: &&Registration| base < other.base + other.len && other.base < end;
        if let Some(other) = self.leaving.iter().find(touches) {
            let registered = other.base..other.base + other.len;
            return Err(AgentError::Overlap { given: base..end, registered });
        }
        self.memory.check(base, len).map_err(|bad| match bad {
            BadRange::Unsound => Absent::Unsound { base, len }.into(),
            BadRange::Overlaps(other) => AgentError::Overlap { given: base..base + len, registered: other },
        })
    }

    /// Keeps what was checked under the same lock.
    fn insert(&mut self, registration: Registration) -> Registration {
        self.next_key += 1;
        let _ = self.memory.insert(registration.base, registration.len, registration);
        registration
    }
}

impl OwnMemory {
    pub fn new(mover: MoverHandle, here: Place, exports: Arc<Exports>) -> OwnMemory {
        OwnMemory { mover, here, exports, registered: Mutex::default() }
    }

    pub fn register(&self, backing: Arc<dyn Backing>, access: Access) -> Result<Registration, AgentError> {
        let (base, len) = (backing.as_ptr() as u64, backing.len() as u64);
        mapped::check(base, len, access.write)?;
        let mut registered = self.registered.lock();
        registered.check(base, len)?;
        let key = registered.next_key;
        let offered = self.exports.offer(key, Arc::clone(&backing), access)?;
        let region = self.mover.register(self.here, backing).inspect_err(|_| {
            self.exports.withdraw(key);
        })?;
        Ok(registered.insert(Registration { base, len, region, offered }))
    }

    /// Registers memory of a GPU, which is a region of the mover already.
    pub fn register_device(
        &self,
        (region, base, len): (RegionId, u64, u64),
        stager: Arc<Stager>,
        access: Access,
    ) -> Result<Registration, AgentError> {
        mapped::check_range(base, len)?;
        let mut registered = self.registered.lock();
        registered.check(base, len)?;
        let memory = DeviceMemory { region, len, stager };
        let offered = self.exports.offer_device(registered.next_key, memory, access)?;
        Ok(registered.insert(Registration { base, len, region, offered }))
    }

    /// Requests that use the memory are cancelled. When this returns, nothing touches it any more.
    /// After an error something may, and it can be tried again.
    pub fn deregister(
        &self,
        registration: Registration,
        requests: &Requests,
        grants: &Grants,
    ) -> Result<(), AgentError> {
        let key = registration.offered.key;
        let mut registered = self.registered.lock();
        let known = registered.memory.find(registration.base).map(|found| *found.what);
        if known == Some(registration) {
            self.exports.withdraw(key);
            registered.memory.remove(registration.base);
            registered.leaving.push(registration);
        } else if !registered.leaving.contains(&registration) {
            return Err(AgentError::NotRegistered { key });
        }
        drop(registered);
        self.unregister(registration, requests)?;
        let quiet = grants.wait_until_quiet(registration.offered);
        quiet.map_err(|peers| AgentError::Reached { base: registration.base, peers })?;
        self.registered.lock().leaving.retain(|other| *other != registration);
        Ok(())
    }

    /// Has the mover forget a region, once: another attempt finds it forgotten.
    fn unregister(&self, registration: Registration, requests: &Requests) -> Result<(), AgentError> {
        loop {
            requests.cancel_with_region(registration.region);
            match self.mover.unregister(registration.region)? {
                Ok(()) | Err(Refused::UnknownRegion { .. }) => return Ok(()),
                // One more may have been posted meanwhile; what is not a request of this agent's is
                // not waited for.
                Err(_) if requests.use_region(registration.region) => {}
                Err(refused) => return Err(refused.into()),
            }
        }
    }

    /// What peers find at which addresses.
    pub fn offered(&self) -> Addresses<PeerRegion> {
        let mut regions = Addresses::default();
        for found in self.registered.lock().memory.iter() {
            // A table without overlaps makes another one.
            let _ = regions.insert(found.base, found.len, found.what.offered);
        }
        regions
    }

    pub fn resolve(&self, list: &Descriptors) -> Result<Blocks, AgentError> {
        let of = |registration: &Registration| Ok::<_, AgentError>(registration.region);
        Blocks::resolve(list, &self.registered.lock().memory, of)
    }
}
