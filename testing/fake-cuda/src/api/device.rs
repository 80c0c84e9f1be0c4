//! What is to be said about the driver and its GPUs.

use crate::abi::{Code, Outcome, Uuid};
use crate::caller::{put, put_text};
use crate::driver::State;
use crate::entry::entries;
use std::ffi::c_char;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`.
const COMPUTE_MODE: i32 = 20;

impl State {
    /// The physical GPU of an ordinal.
    pub fn device(&self, ordinal: i32) -> Outcome<usize> {
        self.ready()?;
        let visible = usize::try_from(ordinal).ok().and_then(|ordinal| self.settings.visible.get(ordinal));
        visible.copied().ok_or(Code::INVALID_DEVICE)
    }

    /// A physical GPU's ordinal; -1: not visible.
    pub fn ordinal(&self, gpu: usize) -> i32 {
        self.settings.visible.iter().position(|&visible| visible == gpu).map_or(-1, |ordinal| ordinal as i32)
    }

    /// Whether one GPU can reach the other's memory.
    pub fn can_peer(&self, from: usize, to: usize) -> bool {
        from != to && !self.faults.p2p_off
    }
}

entries! {
    cuInit = "cuInit" @ 2000 (flags: u32) |call| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if call.settings.visible.is_empty() {
            return Err(Code::NO_DEVICE);
        }
        call.initialised = true;
        Ok(())
    }
    cuDriverGetVersion = "cuDriverGetVersion" @ 2020 (version: *mut i32) |call| {
        put(version, call.settings.version)
    }
    cuDeviceGetCount = "cuDeviceGetCount" @ 2000 (count: *mut i32) |call| {
        call.ready()?;
        put(count, call.settings.visible.len() as i32)
    }
    cuDeviceGet = "cuDeviceGet" @ 2000 (device: *mut i32, ordinal: i32) |call| {
        call.device(ordinal)?;
        put(device, ordinal)
    }
    cuDeviceGetName = "cuDeviceGetName" @ 2000 (name: *mut c_char, bytes: i32, device: i32) |call| {
        call.device(device)?;
        put_text(name, bytes.max(0) as usize, &call.settings.name)
    }
    cuDeviceGetUuid_v2 = "cuDeviceGetUuid" @ 11040 (uuid: *mut Uuid, device: i32) |call| {
        let gpu = call.device(device)?;
        let mut named = *b"fake-cuda-gpu-\0\0";
        named[15] = gpu as u8;
        put(uuid, Uuid(named))
    }
    cuDeviceGetAttribute = "cuDeviceGetAttribute" @ 2000 (value: *mut i32, attribute: i32, device: i32) |call| {
        let gpu = call.device(device)?;
        // Nobody asks for any other one.
        put(value, if attribute == COMPUTE_MODE { call.gpus[gpu].compute_mode } else { 0 })
    }
    cuDeviceGetPCIBusId = "cuDeviceGetPCIBusId" @ 4010 (id: *mut c_char, bytes: i32, device: i32) |call| {
        let gpu = call.device(device)?;
        // One bus each.
        put_text(id, bytes.max(0) as usize, &format!("0000:{:02X}:00.0", 0x10 + gpu))
    }
    cuDeviceTotalMem_v2 = "cuDeviceTotalMem" @ 3020 (bytes: *mut usize, device: i32) |call| {
        call.device(device)?;
        put(bytes, call.settings.memory_bytes as usize)
    }
    cuDeviceCanAccessPeer = "cuDeviceCanAccessPeer" @ 4000 (can: *mut i32, device: i32, peer: i32) |call| {
        let (from, to) = (call.device(device)?, call.device(peer)?);
        put(can, call.can_peer(from, to).into())
    }
    cuDeviceGetP2PAttribute = "cuDeviceGetP2PAttribute" @ 8000
    (value: *mut i32, attribute: i32, from: i32, to: i32) |call| {
        let (from, to) = (call.device(from)?, call.device(to)?);
        if from == to {
            return Err(Code::INVALID_DEVICE);
        }
        match attribute {
            1 => put(value, 0),
            2..=4 => put(value, call.can_peer(from, to).into()),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}
