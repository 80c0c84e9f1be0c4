//! Allocating, registering and asking about memory.

use super::context::context_handle;
use crate::abi::{Code, MEMORY_DEVICE, MEMORY_HOST, Outcome};
use crate::caller::{get_all, put};
use crate::driver::State;
use crate::entry::{Call, entries};
use crate::memory::{Area, Kind};
use std::ffi::c_void;

impl State {
    /// Whether a GPU has that much left.
    pub fn room_for(&self, gpu: usize, bytes: u64) -> Outcome {
        if bytes <= self.free_bytes(gpu) { Ok(()) } else { Err(Code::OUT_OF_MEMORY) }
    }

    fn free_bytes(&self, gpu: usize) -> u64 {
        let (_, allocated) = self.memory.count(|area| area.gpu == gpu && area.kind == Kind::Device);
        let created: u64 =
            self.handles.values().filter(|handle| handle.gpu == gpu).map(|handle| handle.bytes).sum();
        self.settings.memory_bytes.saturating_sub(allocated + created)
    }
}

impl Call {
    /// Takes an area away when nothing uses it any more, and gives its size. Who still uses it is
    /// told.
    pub fn release(&mut self, base: u64, kinds: &[Kind]) -> Outcome<u64> {
        let bytes = match self.memory.find(base) {
            Some(area) if area.base == base && kinds.contains(&area.kind) => area.bytes,
            _ => {
                self.misused("no such memory");
                return Err(Code::INVALID_VALUE);
            }
        };
        if let Some(user) = self.using(base, bytes) {
            self.misused(format_args!("memory that {user} uses has not ended"));
        }
        while self.using(base, bytes).is_some() {
            self.wait_for_any();
        }
        self.order.forget(base, bytes);
        self.memory.remove(base, kinds).ok_or(Code::INVALID_VALUE)
    }
}

/// `CU_MEMHOSTREGISTER_IOMEMORY` and everything newer is not for host memory.
const REGISTER_FLAGS: u32 = 0x1 | 0x2 | 0x8;

entries! {
    cuMemAlloc_v2 = "cuMemAlloc" @ 3020 (address: *mut u64, bytes: usize) |call| {
        let gpu = call.current()?;
        call.unsafe_in_capture()?;
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        call.room_for(gpu, bytes as u64)?;
        let base = call.memory.allocate(gpu, bytes as u64)?;
        put(address, base)
    }
    cuMemAllocManaged = "cuMemAllocManaged" @ 6000 (address: *mut u64, bytes: usize, _flags: u32) |call| {
        let gpu = call.current()?;
        call.unsafe_in_capture()?;
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let base = call.memory.allocate_host(Kind::Managed, gpu, bytes as u64)?;
        put(address, base)
    }
    cuMemFree_v2 = "cuMemFree" @ 3020 (address: u64) |call| {
        call.current()?;
        call.unsafe_in_capture()?;
        if address == 0 {
            return Ok(());
        }
        call.release(address, &[Kind::Device, Kind::Managed]).map(drop)
    }
    cuMemGetInfo_v2 = "cuMemGetInfo" @ 3020 (free: *mut usize, total: *mut usize) |call| {
        let gpu = call.current()?;
        put(free, call.free_bytes(gpu) as usize)?;
        put(total, call.settings.memory_bytes as usize)
    }
    cuMemHostAlloc = "cuMemHostAlloc" @ 2020 (address: *mut *mut c_void, bytes: usize, _flags: u32) |call| {
        let gpu = call.current()?;
        call.unsafe_in_capture()?;
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let base = call.memory.allocate_host(Kind::Pinned, gpu, bytes as u64)?;
        put(address, base as *mut c_void)
    }
    cuMemFreeHost = "cuMemFreeHost" @ 2000 (address: *mut c_void) |call| {
        call.current()?;
        call.unsafe_in_capture()?;
        call.release(address as u64, &[Kind::Pinned]).map(drop)
    }
    cuMemHostRegister_v2 = "cuMemHostRegister" @ 6050 (address: *mut c_void, bytes: usize, flags: u32) |call| {
        let gpu = call.current()?;
        call.unsafe_in_capture()?;
        let (base, bytes) = (address as u64, bytes as u64);
        let end = base.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        if base == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if call.memory.areas().any(|area| area.base < end && base < area.base + area.bytes) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        call.memory.add_host(Kind::Registered, gpu, base, bytes, Vec::new());
        Ok(())
    }
    cuMemHostUnregister = "cuMemHostUnregister" @ 4000 (address: *mut c_void) |call| {
        call.current()?;
        call.unsafe_in_capture()?;
        if call.memory.find(address as u64).is_none_or(|area| area.kind != Kind::Registered) {
            return Err(Code::HOST_MEMORY_NOT_REGISTERED);
        }
        call.release(address as u64, &[Kind::Registered]).map(drop)
    }
    cuMemHostGetDevicePointer_v2 = "cuMemHostGetDevicePointer" @ 3020
    (device: *mut u64, address: *mut c_void, _flags: u32) |call| {
        call.current()?;
        let known = call.memory.find(address as u64).is_some_and(|area| !area.kind.on_device());
        if known { put(device, address as u64) } else { Err(Code::INVALID_VALUE) }
    }
    cuPointerGetAttributes = "cuPointerGetAttributes" @ 7000
    (count: u32, attributes: *const i32, values: *const *mut c_void, at: u64) |call| {
        call.ready()?;
        let attributes = get_all(attributes, count as usize)?;
        let values = get_all(values, count as usize)?;
        // `CUpointer_attribute`. Of memory that it does not know, the real driver says zero and no
        // error.
        for (attribute, value) in attributes.into_iter().zip(values) {
            let area = call.memory.find(at);
            match attribute {
                1 => {
                    // What is mapped has no context.
                    let own = area.filter(|area| area.kind == Kind::Device).map(|area| area.gpu);
                    let of = |gpu| context_handle(gpu) + usize::from(call.faults.foreign.contains(&gpu));
                    put(value as *mut usize, own.map_or(0, of))
                }
                2 => put(value as *mut u32, area.map_or(0, memory_type)),
                8 => put(value as *mut u8, area.is_some_and(|area| area.kind == Kind::Managed).into()),
                9 => put(value as *mut i32, area.map_or(-2, |area| call.ordinal(area.gpu))),
                10 => put(value as *mut u8, area.is_some_and(|area| area.kind == Kind::Device).into()),
                11 => put(value as *mut u64, area.map_or(0, |area| area.base)),
                12 => put(value as *mut u64, area.map_or(0, |area| area.bytes)),
                _ => Err(Code::INVALID_VALUE),
            }?;
        }
        Ok(())
    }
}

/// `CUmemoryType`.
fn memory_type(area: &Area) -> u32 {
    let is_device = area.kind.on_device() || area.kind == Kind::Managed;
    if is_device { MEMORY_DEVICE } else { MEMORY_HOST }
}
