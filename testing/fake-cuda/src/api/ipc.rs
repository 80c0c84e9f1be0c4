//! Device memory of other processes.
//!
//! A handle names the exporting process and a file descriptor there. A number that was given to
//! another file since, or a process that is gone, is found out by the file's identity.

use crate::abi::{Code, IpcHandle, Outcome};
use crate::caller::put;
use crate::driver::State;
use crate::entry::entries;
use crate::memory::{Kind, Mapping};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, fstat, open};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag, and not an option.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
const MAGIC: u64 = 0x4350_4941_4455_4346;

/// What a handle says: magic, process, descriptor, inode, bytes, physical GPU.
struct Fields([u64; 6]);

impl Fields {
    fn parse(handle: &IpcHandle) -> Option<Fields> {
        let (words, _) = handle.0.as_chunks::<8>();
        let mut fields = [0; 6];
        fields.iter_mut().zip(words).for_each(|(field, word)| *field = u64::from_le_bytes(*word));
        (fields[0] == MAGIC).then_some(Fields(fields))
    }

    fn handle(&self) -> IpcHandle {
        let mut bytes = [0; 64];
        bytes
            .as_chunks_mut::<8>()
            .0
            .iter_mut()
            .zip(self.0)
            .for_each(|(word, field)| *word = field.to_le_bytes());
        IpcHandle(bytes)
    }
}

impl State {
    /// A handle for the allocation that has `at`.
    fn export(&mut self, at: u64) -> Outcome<IpcHandle> {
        let area =
            self.memory.find(at).filter(|area| area.kind == Kind::Device).ok_or(Code::INVALID_VALUE)?;
        let file = area.file.as_ref().ok_or(Code::INVALID_VALUE)?;
        let inode = fstat(file).map_err(|_| Code::OPERATING_SYSTEM)?.st_ino;
        let pid = std::process::id().into();
        Ok(Fields([MAGIC, pid, file.as_raw_fd() as u64, inode, area.bytes, area.gpu as u64]).handle())
    }

    /// Maps another process's memory for a GPU. The same allocation is mapped once, however often
    /// it is opened.
    fn import(&mut self, handle: &IpcHandle, gpu: usize) -> Outcome<u64> {
        let Some(Fields([_, pid, number, inode, bytes, owner])) = Fields::parse(handle) else {
            return Err(Code::INVALID_VALUE);
        };
        if pid == u64::from(std::process::id()) {
            return Err(Code::INVALID_CONTEXT);
        }
        let owner = usize::try_from(owner)
            .ok()
            .filter(|&owner| owner < self.gpus.len())
            .ok_or(Code::INVALID_VALUE)?;
        if owner != gpu && self.faults.p2p_off {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        let key = (pid, inode, gpu);
        if let Some((base, opened)) = self.opened.get_mut(&key) {
            *opened += 1;
            return Ok(*base);
        }
        let file = find(pid, number, inode, bytes)?;
        let backing = Mapping::of(&file, bytes, 0)?;
        let base = self.memory.add_device(Kind::Foreign, owner, bytes, file, backing, vec![owner, gpu])?;
        self.opened.insert(key, (base, 1));
        Ok(base)
    }

    /// Whether closing once more ends the mapping.
    fn close_import(&mut self, base: u64) -> Outcome<bool> {
        let found = self.opened.iter_mut().find(|(_, (opened, _))| *opened == base);
        let (&key, (_, opened)) = found.ok_or(Code::INVALID_VALUE)?;
        *opened -= 1;
        let last = *opened == 0;
        if last {
            self.opened.remove(&key);
        }
        Ok(last)
    }
}

/// The file behind another process's descriptor, if it is still the one that was exported.
fn find(pid: u64, number: u64, inode: u64, bytes: u64) -> Outcome<OwnedFd> {
    let path = format!("/proc/{pid}/fd/{number}");
    let file = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|_| Code::MAP_FAILED)?;
    let found = fstat(&file).map_err(|_| Code::MAP_FAILED)?;
    if found.st_ino == inode && found.st_size as u64 == bytes { Ok(file) } else { Err(Code::MAP_FAILED) }
}

entries! {
    cuIpcGetMemHandle = "cuIpcGetMemHandle" @ 4010 (handle: *mut IpcHandle, at: u64) |call| {
        call.current()?;
        let exported = call.export(at)?;
        put(handle, exported)
    }
    cuIpcOpenMemHandle_v2 = "cuIpcOpenMemHandle" @ 11000 (address: *mut u64, handle: IpcHandle, flags: u32) |call| {
        let gpu = call.current()?;
        call.unsafe_in_capture()?;
        if flags != LAZY_ENABLE_PEER_ACCESS {
            return Err(Code::INVALID_VALUE);
        }
        let base = call.import(&handle, gpu)?;
        put(address, base)
    }
    cuIpcCloseMemHandle = "cuIpcCloseMemHandle" @ 4010 (address: u64) |call| {
        call.current()?;
        call.unsafe_in_capture()?;
        if call.close_import(address)? {
            call.release(address, &[Kind::Foreign])?;
        }
        Ok(())
    }
}
