//! Memory that the driver pinned: copies read and write it without a copy of the driver's own
//! between.

use super::error::PinError;
use crate::device::Device;
use crate::driver::{abi, call};
use crate::topology::MemoryFacts;
use forebay_transfer::Backing;
use std::ptr::NonNull;
use std::sync::Arc;

/// The longest range that is registered at once. Drivers refuse single registrations of some
/// hundred GiB.
pub const MOST_BYTES: u64 = 64 << 30;

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

/// Memory that was there already, such as the arena of a node, pinned in pieces of at most
/// [`MOST_BYTES`].
///
/// One copy must not go across two pieces: see [`piece_bytes`](Registered::piece_bytes).
pub struct Registered {
    /// Dropped first: the memory outlives its registrations.
    pieces: Vec<Pin>,
    memory: Arc<dyn Backing>,
    piece_bytes: u64,
}

impl Registered {
    /// Pins all of `memory`. None of it stays pinned when part of it cannot be.
    pub fn new(device: &Arc<Device>, memory: Arc<dyn Backing>) -> Result<Registered, PinError> {
        Registered::in_pieces(device, memory, MOST_BYTES)
    }

    /// The same in pieces of `piece_bytes`, which is at least 1 and a multiple of a page.
    pub fn in_pieces(
        device: &Arc<Device>,
        memory: Arc<dyn Backing>,
        piece_bytes: u64,
    ) -> Result<Registered, PinError> {
        let len = memory.len() as u64;
        let mut pieces = Vec::new();
        for offset in (0..len).step_by(usize::try_from(piece_bytes).unwrap_or(usize::MAX)) {
            // SAFETY: the offset lies inside the backing, whose bytes are mapped while it lives.
            let start = unsafe { memory.as_ptr().add(offset as usize) };
            let Some(start) = NonNull::new(start) else { break };
            // SAFETY: `memory` is dropped after the pieces.
            pieces.push(unsafe { Pin::new(device, start, piece_bytes.min(len - offset)) }?);
        }
        Ok(Registered { pieces, memory, piece_bytes })
    }

    /// Every multiple of this, counted from the first byte, is where one registration ends and the
    /// next begins.
    pub fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }
}

// SAFETY: the bytes are those of `memory`, which it keeps.
unsafe impl Backing for Registered {
    fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registered").field("bytes", &self.len()).field("pieces", &self.pieces.len()).finish()
    }
}
