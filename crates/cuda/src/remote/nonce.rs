//! A few random bytes at the start of memory that another process opens, to be sure that it opened
//! the right one: handles of small allocations name more than the allocation.

use crate::device::{Device, HostMemory, Stream};
use crate::driver::{CudaError, abi::Address};
use std::sync::Arc;

/// Writes the bytes to an address of the device.
pub fn write(device: &Arc<Device>, to: Address, nonce: [u8; 16]) -> Result<(), CudaError> {
    let host = HostMemory::new(device, nonce.len())?;
    // SAFETY: the allocation is as long as stated and nobody else has it.
    unsafe { std::ptr::copy_nonoverlapping(nonce.as_ptr(), host.start(), nonce.len()) };
    copy(device, host.start() as Address, to, nonce.len())
}

/// Reads as many from an address that the device reaches.
pub fn read(device: &Arc<Device>, from: Address) -> Result<[u8; 16], CudaError> {
    let mut nonce = [0; 16];
    let host = HostMemory::new(device, nonce.len())?;
    copy(device, from, host.start() as Address, nonce.len())?;
    // SAFETY: as above; the copy is over.
    unsafe { std::ptr::copy_nonoverlapping(host.start(), nonce.as_mut_ptr(), nonce.len()) };
    Ok(nonce)
}

fn copy(device: &Arc<Device>, from: Address, to: Address, bytes: usize) -> Result<(), CudaError> {
    let stream = Stream::new(device)?;
    let _current = device.enter()?;
    // SAFETY: the callers' ranges are allocated, and this waits until the copy is over.
    unsafe { stream.copy(from, to, bytes as u64)? };
    stream.synchronize()
}
