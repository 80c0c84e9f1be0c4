//! What is to be said about the driver and its GPUs.

use crate::abi::{Code, Outcome, Uuid};
use crate::caller::{put, put_text, text};
use crate::driver::{State, sound};
use crate::entry::entries;
use std::ffi::c_char;

/// An H200 of the Hopper generation, as far as anybody asks.
const ATTRIBUTES: &[(i32, i32)] = &[
    (1, 1024), // threads per block
    (10, 32),  // warp size
    (15, 1),   // overlaps copies and kernels
    (16, 132), // multiprocessors
    (19, 1),   // maps host memory
    (31, 1),   // concurrent kernels
    (39, 2048),
    (40, 3), // copy engines
    (41, 1), // unified addressing
    (75, 9), // compute capability 9.0
    (76, 0),
    (78, 1), // stream priorities
    (83, 1), // managed memory
    (89, 1),
    (91, 1), // host pointers of registered memory are device pointers
    (92, 0), // stream memory operations of the first kind: as real drivers say since CUDA 12
    (93, 0),
    (94, 0),
    (97, 232_448),
    (99, 1),  // registers host memory
    (102, 1), // virtual memory management
    (103, 1), // exports as file descriptors
    (122, 1), // 64-bit stream memory operations
    (123, 1),
    (125, 0), // no IPC events
    (134, 0), // NUMA node of the host memory nearby
];

impl State {
    /// The physical GPU of an ordinal.
    pub fn device(&self, ordinal: i32) -> Outcome<usize> {
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

/// Where a GPU sits: one bus each.
fn bus(gpu: usize) -> i32 {
    0x10 + gpu as i32
}

fn bus_id(gpu: usize) -> String {
    format!("0000:{:02X}:00.0", bus(gpu))
}

entries! {
    cuInit = "cuInit" @ 2000 (flags: u32) |call| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if !sound() || call.settings.visible.is_empty() {
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
        call.ready()?;
        call.device(ordinal)?;
        put(device, ordinal)
    }
    cuDeviceGetName = "cuDeviceGetName" @ 2000 (name: *mut c_char, bytes: i32, device: i32) |call| {
        call.ready()?;
        call.device(device)?;
        put_text(name, bytes.max(0) as usize, "Fake H200")
    }
    cuDeviceGetUuid = "cuDeviceGetUuid" @ 9020 (uuid: *mut Uuid, device: i32) |call| {
        call.ready()?;
        let gpu = call.device(device)?;
        put(uuid, uuid_of(gpu))
    }
    cuDeviceGetUuid_v2 = "cuDeviceGetUuid" @ 11040 (uuid: *mut Uuid, device: i32) |call| {
        call.ready()?;
        let gpu = call.device(device)?;
        put(uuid, uuid_of(gpu))
    }
    cuDeviceGetAttribute = "cuDeviceGetAttribute" @ 2000 (value: *mut i32, attribute: i32, device: i32) |call| {
        call.ready()?;
        let gpu = call.device(device)?;
        let known = ATTRIBUTES.iter().find(|&&(number, _)| number == attribute).map_or(0, |&(_, value)| value);
        let found = match attribute {
            20 => call.gpus[gpu].compute_mode,
            33 => bus(gpu),
            _ => known,
        };
        put(value, found)
    }
    cuDeviceGetPCIBusId = "cuDeviceGetPCIBusId" @ 4010 (id: *mut c_char, bytes: i32, device: i32) |call| {
        call.ready()?;
        let gpu = call.device(device)?;
        put_text(id, bytes.max(0) as usize, &bus_id(gpu))
    }
    cuDeviceGetByPCIBusId = "cuDeviceGetByPCIBusId" @ 4010 (device: *mut i32, id: *const c_char) |call| {
        call.ready()?;
        let id = text(id)?;
        let ordinal = call.settings.visible.iter().position(|&gpu| bus_id(gpu).eq_ignore_ascii_case(id));
        put(device, ordinal.ok_or(Code::INVALID_DEVICE)? as i32)
    }
    cuDeviceTotalMem_v2 = "cuDeviceTotalMem" @ 3020 (bytes: *mut usize, device: i32) |call| {
        call.ready()?;
        call.device(device)?;
        put(bytes, call.settings.memory_bytes as usize)
    }
    cuDeviceCanAccessPeer = "cuDeviceCanAccessPeer" @ 4000 (can: *mut i32, device: i32, peer: i32) |call| {
        call.ready()?;
        let (from, to) = (call.device(device)?, call.device(peer)?);
        put(can, call.can_peer(from, to).into())
    }
    cuDeviceGetP2PAttribute = "cuDeviceGetP2PAttribute" @ 8000
    (value: *mut i32, attribute: i32, from: i32, to: i32) |call| {
        call.ready()?;
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

fn uuid_of(gpu: usize) -> Uuid {
    let mut uuid = *b"fake-cuda-gpu-\0\0";
    uuid[15] = gpu as u8;
    Uuid(uuid)
}
