//! Memory that the driver pinned: copies read and write it without a copy of the driver's own
//! between.

use super::error::PinError;
use crate::device::Device;
use crate::driver::{abi, call};
use crate::topology::MemoryFacts;
use std::ptr::NonNull;
use std::sync::Arc;

/// The longest range that is registered at once where nobody else uses the GPUs. Drivers refuse
/// single registrations of some hundred GiB.
pub const MOST_BYTES: u64 = 64 << 30;
/// The longest where others do: calls of other processes wait while the driver registers, which
/// takes about 0.1 s a GiB.
pub const PIECE_BYTES_MAX: u64 = 512 << 20;

/// One registration, undone when it is dropped.
#[derive(Debug)]
pub struct Pin {
    device: Arc<Device>,
    start: NonNull<u8>,
}

// SAFETY: the address is only given to the driver, whose functions are thread-safe.
unsafe impl Send for Pin {}
// SAFETY: as above.
unsafe impl Sync for Pin {}

impl Pin {
    /// Pins a range for all GPUs, through the context of any one.
    ///
    /// # Safety
    ///
    /// The range is mapped for as long as the value lives.
    pub unsafe fn new(device: &Arc<Device>, start: NonNull<u8>, bytes: u64) -> Result<Pin, PinError> {
        let failed = |error| PinError::Pin { bytes, error, host: Box::new(MemoryFacts::read()) };
        let driver = device.driver();
        let _current = device.enter().map_err(failed)?;
        let flags = abi::HOST_REGISTER_PORTABLE | abi::HOST_REGISTER_DEVICEMAP;
        // SAFETY: the range is mapped, by this function's contract.
        unsafe { call!(driver, host_register(start.as_ptr().cast(), bytes as abi::Size, flags)) }
            .map_err(failed)?;
        Ok(Pin { device: Arc::clone(device), start })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: registered by `new`, undone once. It fails only when the driver has shut down or
        // the context is lost, and the registration with it.
        unsafe { (self.device.driver().table().host_unregister)(self.start.as_ptr().cast()) };
    }
}
