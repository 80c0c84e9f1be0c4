//! Memory of other processes.

use crate::abi::{Code, IpcHandle};
use crate::caller::put;
use crate::entry::entries;
use crate::memory::Kind;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag, and not an option.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

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
