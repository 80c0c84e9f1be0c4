//! Memory of GPUs as memory of an agent. This file knows which ranges are registered, on which GPU
//! each lies, and whether descriptors say so.

use super::driver;
use crate::errors::{failed, invalid, of_agent};
use forebay_cuda::ipc_memory::IpcMemory;
use forebay_cuda::places::{GpuPlaces, NotRegistered};
use forebay_net::{Access, Agent, Device, Registration};
use forebay_transfer::RegionId;
use forebay_transfer::lock::Mutex;
use pyo3::PyResult;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An agent's GPUs. The agent ends before this is dropped.
#[derive(Default)]
pub struct AgentGpus {
    /// `None` before the first registration: nothing is loaded for those who have no GPU.
    places: Mutex<Option<Arc<GpuPlaces>>>,
    /// By first address.
    registered: Mutex<BTreeMap<u64, Range>>,
}

#[derive(Clone, Copy)]
struct Range {
    bytes: u64,
    device: u16,
    region: RegionId,
}

impl AgentGpus {
    pub fn register(
        &self,
        agent: &Agent,
        (address, bytes): (u64, u64),
        device: u16,
        access: Access,
    ) -> PyResult<Registration> {
        let places = self.places(agent)?;
        // SAFETY: Python's callers keep the memory until they deregister it, as they do with host
        // memory by its address.
        let registered = unsafe { places.register(device, address, bytes) };
        let (gpu, region) = registered.map_err(not_registered)?;
        let known = Device { place: gpu.place, to_host: gpu.to_host, from_host: gpu.from_host };
        let own = Arc::clone(&places);
        let pinned = Arc::new(move |bytes| own.pinned(bytes).map_err(|error| error.to_string()));
        let offered = agent
            .add_device(known, pinned)
            .and_then(|()| agent.register_device(gpu.place, (region, address, bytes), access));
        match offered {
            Ok(registration) => {
                self.registered.lock().insert(address, Range { bytes, device, region });
                Ok(registration)
            }
            Err(error) => {
                // Nobody has named it to a transfer yet.
                let _ = agent.mover().unregister(region);
                places.forget(region);
                Err(of_agent(error))
            }
        }
    }

    /// Memory was deregistered, of whichever kind.
    pub fn forget(&self, address: u64) {
        let gone = self.registered.lock().remove(&address);
        if let (Some(range), Some(places)) = (gone, &*self.places.lock()) {
            places.forget(range.region);
        }
    }

    fn places(&self, agent: &Agent) -> PyResult<Arc<GpuPlaces>> {
        let mut places = self.places.lock();
        if let Some(places) = &*places {
            return Ok(Arc::clone(places));
        }
        let made = Arc::new(GpuPlaces::new(driver()?, agent.mover().clone()).map_err(not_registered)?);
        agent.add_ipc(Arc::new(IpcMemory::new(&made))).map_err(of_agent)?;
        Ok(Arc::clone(places.insert(made)))
    }

    /// Whether rows (address, bytes, device, ..) of this end's memory are what they are said to be.
    pub fn check<const N: usize>(&self, rows: &[[u64; N]], is_device: bool) -> PyResult<()> {
        let registered = self.registered.lock();
        if !is_device && registered.is_empty() {
            return Ok(());
        }
        for (nth, row) in rows.iter().enumerate() {
            let (address, device) = (row[0], row[2]);
            let found = registered.range(..=address).next_back();
            let found =
                found.filter(|(base, range)| address - *base < range.bytes).map(|(_, range)| range.device);
            match found {
                Some(lies_on) if !is_device => {
                    return Err(invalid(format!(
                        "descriptor {nth}: {address:#x} is memory of GPU {lies_on}; allowed in a list of DRAM is host memory"
                    )));
                }
                Some(lies_on) if u64::from(lies_on) != device => {
                    return Err(invalid(format!(
                        "descriptor {nth}: device is {device}; {address:#x} was registered on {lies_on}"
                    )));
                }
                None if is_device => {
                    return Err(invalid(format!(
                        "descriptor {nth}: {address:#x} is no registered memory of a GPU; allowed in a list of VRAM is that only"
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn not_registered(why: NotRegistered) -> pyo3::PyErr {
    match why {
        NotRegistered::NoDevice { .. }
        | NotRegistered::OtherDevice { .. }
        | NotRegistered::Foreign { .. }
        | NotRegistered::OtherContext { .. }
        | NotRegistered::TooLong { .. }
        | NotRegistered::Empty { .. } => invalid(why.to_string()),
        why => failed(why),
    }
}
