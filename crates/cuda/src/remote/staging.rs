//! Staging on the GPUs that relay: how much there is, and an engine's share of it.

use super::nonce;
use super::wire::{Hex, Offer, Uuid};
use crate::device::{Device, DeviceMemory};
use crate::driver::abi::Address;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;

/// Staging on a relay for all engines together.
pub const RELAY_STAGING_BYTES: u64 = 24 << 20;
/// Slots of an engine on a relay in each direction, at least: fewer would not let the two hops
/// overlap.
const SLOTS_MIN: u64 = 4;
const SLOT_BYTES_MAX: u64 = 2 << 20;

#[derive(Debug)]
pub struct RelayGpu {
    pub uuid: Uuid,
    pub device: Arc<Device>,
    used_bytes: Mutex<u64>,
}

/// An engine's staging on a GPU, both directions side by side.
#[derive(Debug)]
pub struct Share {
    gpu: Arc<RelayGpu>,
    slot_bytes: u64,
    slots: u32,
    /// Taken only by `drop`.
    memory: Option<DeviceMemory>,
}

/// Size and number of an engine's slots on a relay in each direction, when there may be `served`
/// engines.
fn slots(served: u64) -> (u64, u32) {
    let each = RELAY_STAGING_BYTES / (2 * served.max(1));
    let slot_bytes = (each / SLOTS_MIN).min(SLOT_BYTES_MAX);
    let slot_bytes = 1 << slot_bytes.ilog2();
    (slot_bytes, (each / slot_bytes) as u32)
}

impl RelayGpu {
    /// A GPU of which no engine has anything yet.
    pub fn new(uuid: Uuid, device: Arc<Device>) -> Arc<RelayGpu> {
        Arc::new(RelayGpu { uuid, device, used_bytes: Mutex::new(0) })
    }

    pub fn used_bytes(&self) -> u64 {
        *self.used_bytes.lock()
    }
}

impl Share {
    /// A share where there may be `served` engines, or why there is none.
    pub fn new(gpu: &Arc<RelayGpu>, served: u64) -> Result<Share, String> {
        let (slot_bytes, slots) = slots(served);
        let bytes = 2 * slot_bytes * u64::from(slots);
        let mut used_bytes = gpu.used_bytes.lock();
        if *used_bytes + bytes > RELAY_STAGING_BYTES {
            let left_bytes = RELAY_STAGING_BYTES - *used_bytes;
            let uuid = gpu.uuid;
            return Err(format!(
                "GPU {uuid}: an engine needs {bytes} bytes of staging; {left_bytes} of {RELAY_STAGING_BYTES} are left"
            ));
        }
        let memory = DeviceMemory::new(&gpu.device, bytes).map_err(|error| error.to_string())?;
        *used_bytes += bytes;
        Ok(Share { gpu: Arc::clone(gpu), slot_bytes, slots, memory: Some(memory) })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.gpu.device
    }

    /// Address and length of the staging of one direction: the first or the second.
    pub fn staging(&self, direction: usize) -> (Address, u64) {
        let bytes = self.slot_bytes * u64::from(self.slots);
        let start = self.memory.as_ref().map_or(0, DeviceMemory::address);
        (start + direction as u64 * bytes, bytes)
    }

    /// What the engine is told of it.
    pub fn offer(&self) -> Result<Offer, String> {
        let Share { gpu, slot_bytes, slots, memory } = self;
        let memory = memory.as_ref().ok_or("no memory")?;
        let mut nonce = [0; 16];
        let filled = rustix::rand::getrandom(&mut nonce[..], rustix::rand::GetRandomFlags::empty());
        if !matches!(filled, Ok(16)) {
            return Err("the system gives no random bytes".into());
        }
        let handle = memory.export().map_err(|error| error.to_string())?;
        nonce::write(&gpu.device, memory.address(), nonce).map_err(|error| error.to_string())?;
        let (gpu, handle, nonce) = (gpu.uuid, Hex(handle.0), Hex(nonce));
        Ok(Offer { gpu, handle, nonce, slot_bytes: *slot_bytes, slots: *slots })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let bytes = self.memory.as_ref().map_or(0, DeviceMemory::bytes);
        self.memory = None;
        *self.gpu.used_bytes.lock() -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_keeps_to_its_staging_however_many_engines_it_serves() {
        for served in 1..=15 {
            let (slot_bytes, slots) = slots(served);
            assert!(u64::from(slots) >= SLOTS_MIN, "{served}");
            assert!(2 * served * slot_bytes * u64::from(slots) <= RELAY_STAGING_BYTES, "{served}");
        }
    }
}
