//! Virtual memory management.

use crate::abi::{AccessDesc, AllocationProp, Code, LOCATION_DEVICE};
use crate::caller::{get, get_all, put};
use crate::entry::entries;
use crate::memory::Kind;

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
