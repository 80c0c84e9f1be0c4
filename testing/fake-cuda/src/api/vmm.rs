//! Virtual memory management: physical memory and addresses apart. No peer reaches such memory
//! unless it was given access by name.

use crate::abi::{AccessDesc, AllocationProp, Code, LOCATION_DEVICE, Outcome};
use crate::caller::{get, get_all, put};
use crate::driver::State;
use crate::entry::entries;
use crate::memory::{Area, Kind, Mapping, Physical, zeroes};

/// Handles, mappings and reservations are multiples of it.
const GRANULARITY: u64 = 2 << 20;

fn granular(number: u64) -> bool {
    number.is_multiple_of(GRANULARITY)
}

impl State {
    /// New physical memory.
    fn create_physical(&mut self, gpu: usize, bytes: u64) -> Outcome<u64> {
        if bytes == 0 || !granular(bytes) {
            return Err(Code::INVALID_VALUE);
        }
        self.room_for(gpu, bytes)?;
        let file = zeroes(bytes)?;
        let id = self.new_handle() as u64;
        self.handles.insert(id, Physical { gpu, bytes, file });
        Ok(id)
    }

    /// New addresses.
    fn reserve(&mut self, bytes: u64) -> Outcome<u64> {
        if bytes == 0 || !granular(bytes) {
            return Err(Code::INVALID_VALUE);
        }
        let mapping = Mapping::reserved(bytes + GRANULARITY)?;
        let base = mapping.at.next_multiple_of(GRANULARITY);
        self.reserved.insert(base, (bytes, mapping));
        Ok(base)
    }

    /// Puts physical memory behind reserved addresses.
    fn map(&mut self, at: u64, bytes: u64, offset: u64, handle: u64) -> Outcome {
        let inside = |(&base, &(reserved, _)): (&u64, &(u64, Mapping))| {
            base <= at && at - base <= reserved && bytes <= reserved - (at - base)
        };
        if bytes == 0
            || !granular(at)
            || !granular(bytes)
            || !granular(offset)
            || !self.reserved.iter().any(inside)
        {
            return Err(Code::INVALID_VALUE);
        }
        if self.memory.areas().any(|area| area.base < at + bytes && at < area.base + area.bytes) {
            return Err(Code::ALREADY_MAPPED);
        }
        let handle = self.handles.get(&handle).ok_or(Code::INVALID_VALUE)?;
        if offset.checked_add(bytes).is_none_or(|end| end > handle.bytes) {
            return Err(Code::INVALID_VALUE);
        }
        let backing = Mapping::of(&handle.file, bytes, offset)?;
        let file = handle.file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?;
        let (gpu, access) = (handle.gpu, Vec::new());
        self.memory.forget_freed(at, bytes);
        self.memory.add(Area {
            base: at,
            bytes,
            kind: Kind::Virtual,
            gpu,
            access,
            file: Some(file),
            backing: backing.at,
            mappings: vec![backing],
        });
        Ok(())
    }

    /// Sets what a GPU may do with mapped addresses.
    fn set_access(&mut self, at: u64, bytes: u64, gpu: usize, flags: u32) -> Outcome {
        let end = at.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let mut next = at;
        while next < end {
            let area =
                self.memory.find_mut(next).filter(|area| area.kind == Kind::Virtual && area.base == next);
            let area = area.ok_or(Code::INVALID_VALUE)?;
            area.access.retain(|&given| given != gpu);
            if flags != 0 {
                area.access.push(gpu);
            }
            next += area.bytes;
        }
        Ok(())
    }
}

entries! {
    cuMemCreate = "cuMemCreate" @ 10020
    (handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64) |call| {
        call.ready()?;
        call.unsafe_in_capture()?;
        let prop = get(prop)?;
        if flags != 0 || prop.kind != 1 || prop.location.kind != LOCATION_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        if prop.handle_types != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let gpu = call.device(prop.location.id)?;
        let created = call.create_physical(gpu, bytes as u64)?;
        put(handle, created)
    }
    cuMemRelease = "cuMemRelease" @ 10020 (handle: u64) |call| {
        call.ready()?;
        call.handles.remove(&handle).map(drop).ok_or(Code::INVALID_VALUE)
    }
    cuMemAddressReserve = "cuMemAddressReserve" @ 10020
    (address: *mut u64, bytes: usize, _alignment: usize, _wanted: u64, flags: u64) |call| {
        call.ready()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let base = call.reserve(bytes as u64)?;
        put(address, base)
    }
    cuMemMap = "cuMemMap" @ 10020 (address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) |call| {
        call.ready()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        call.map(address, bytes as u64, offset as u64, handle)
    }
    cuMemUnmap = "cuMemUnmap" @ 10020 (address: u64, bytes: usize) |call| {
        call.ready()?;
        call.unsafe_in_capture()?;
        let mut left = bytes as u64;
        let mut next = address;
        while left > 0 {
            let released = call.release(next, &[Kind::Virtual])?;
            next += released;
            left = left.checked_sub(released).ok_or(Code::INVALID_VALUE)?;
        }
        Ok(())
    }
    cuMemSetAccess = "cuMemSetAccess" @ 10020
    (address: u64, bytes: usize, descs: *const AccessDesc, count: usize) |call| {
        call.ready()?;
        for desc in get_all(descs, count)? {
            if desc.location.kind != LOCATION_DEVICE {
                return Err(Code::INVALID_VALUE);
            }
            let gpu = call.device(desc.location.id)?;
            call.set_access(address, bytes as u64, gpu, desc.flags)?;
        }
        Ok(())
    }
}
