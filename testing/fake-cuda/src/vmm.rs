//! Virtual memory management: physical memory and addresses apart. No peer reaches such memory
//! unless it was given access by name.

use crate::abi::{Code, Outcome};
use crate::driver::State;
use crate::memory::{Area, Kind, Mapping, zeroes};
use rustix::fd::OwnedFd;

/// Handles, mappings and reservations are multiples of it.
pub const GRANULARITY: u64 = 2 << 20;

/// Physical memory.
pub struct Handle {
    pub gpu: usize,
    pub bytes: u64,
    pub file: OwnedFd,
}

fn granular(number: u64) -> bool {
    number.is_multiple_of(GRANULARITY)
}

impl State {
    /// New physical memory.
    pub fn create_physical(&mut self, gpu: usize, bytes: u64) -> Outcome<u64> {
        if bytes == 0 || !granular(bytes) {
            return Err(Code::INVALID_VALUE);
        }
        self.room_for(gpu, bytes)?;
        let file = zeroes(bytes)?;
        let id = self.new_handle() as u64;
        self.handles.insert(id, Handle { gpu, bytes, file });
        Ok(id)
    }

    /// New addresses.
    pub fn reserve(&mut self, bytes: u64) -> Outcome<u64> {
        if bytes == 0 || !granular(bytes) {
            return Err(Code::INVALID_VALUE);
        }
        let mapping = Mapping::reserved(bytes + GRANULARITY)?;
        let base = mapping.at.next_multiple_of(GRANULARITY);
        self.reserved.insert(base, (bytes, mapping));
        Ok(base)
    }

    /// Puts physical memory behind reserved addresses.
    pub fn map(&mut self, at: u64, bytes: u64, offset: u64, handle: u64) -> Outcome {
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
    pub fn set_access(&mut self, at: u64, bytes: u64, gpu: usize, flags: u32) -> Outcome {
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
