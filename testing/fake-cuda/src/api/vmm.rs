//! Virtual memory management.

use crate::abi::{AccessDesc, AllocationProp, Code, LOCATION_DEVICE};
use crate::caller::{get, get_all, put};
use crate::entry::entries;
use crate::memory::Kind;
use crate::vmm::{GRANULARITY, Handle, POSIX_FD};
use rustix::fd::{BorrowedFd, IntoRawFd};
use rustix::fs::fstat;
use std::ffi::c_void;

entries! {
    cuMemGetAllocationGranularity = "cuMemGetAllocationGranularity" @ 10020
    (bytes: *mut usize, prop: *const AllocationProp, _option: u32) |call| {
        call.ready()?;
        get(prop)?;
        put(bytes, GRANULARITY as usize)
    }
    cuMemCreate = "cuMemCreate" @ 10020
    (handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64) |call| {
        call.ready()?;
        call.unsafe_in_capture()?;
        let prop = get(prop)?;
        if flags != 0 || prop.kind != 1 || prop.location.kind != LOCATION_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        if prop.handle_types & !POSIX_FD != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let gpu = call.device(prop.location.id)?;
        let created = call.create_physical(gpu, bytes as u64, prop.handle_types)?;
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
    cuMemAddressFree = "cuMemAddressFree" @ 10020 (address: u64, bytes: usize) |call| {
        call.ready()?;
        call.unreserve(address, bytes as u64)
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
    cuMemExportToShareableHandle = "cuMemExportToShareableHandle" @ 10020
    (shared: *mut c_void, handle: u64, kind: u32, flags: u64) |call| {
        call.ready()?;
        let found = call.handles.get(&handle).ok_or(Code::INVALID_VALUE)?;
        if flags != 0 || kind != POSIX_FD || found.types & kind == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let file = found.file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?;
        put(shared as *mut i32, file.into_raw_fd())
    }
    cuMemImportFromShareableHandle = "cuMemImportFromShareableHandle" @ 10020
    (handle: *mut u64, shared: *mut c_void, kind: u32) |call| {
        let gpu = call.current()?;
        if kind != POSIX_FD || (shared as isize) < 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller gives a descriptor that stays open for the call; a wrong number is
        // found out at once.
        let file = unsafe { BorrowedFd::borrow_raw(shared as isize as i32) };
        let bytes = fstat(file).map_err(|_| Code::INVALID_VALUE)?.st_size as u64;
        let file = file.try_clone_to_owned().map_err(|_| Code::OPERATING_SYSTEM)?;
        let imported = call.add_physical(Handle { gpu, bytes, types: POSIX_FD, file });
        put(handle, imported)
    }
}
