//! The kernels of a GPU: loaded from PTX that is part of this library, so that nobody needs a
//! compiler.

use crate::device::{Device, Stream};
use crate::driver::{CudaError, abi, abi::Address, call};
use libc::c_void;
use std::ffi::CStr;
use std::sync::Arc;

/// Source and build script are in the folder `kernels`.
const PTX: &str = concat!(include_str!("../kernels/pieces.ptx"), "\0");
const THREADS: u32 = 512;
/// Bytes that a block copies in one go; a piece is not spread over more blocks than it keeps busy.
const BLOCK_BYTES: u64 = THREADS as u64 * 16 * 4;

/// Contiguous bytes that go from one address to another. The layout is the kernel's.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub from: Address,
    pub to: Address,
    pub bytes: u64,
}

impl Piece {
    /// Whether another piece begins, on both sides, where this one ends.
    pub(crate) fn goes_on_with(&self, next: &Piece) -> bool {
        self.from + self.bytes == next.from && self.to + self.bytes == next.to
    }
}

/// A kernel, loaded for one device.
#[derive(Debug)]
pub struct Kernel {
    device: Arc<Device>,
    module: abi::ModuleHandle,
    function: abi::FunctionHandle,
}

// SAFETY: modules and functions may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads the kernel of a name. The text ends with a zero byte.
    pub fn load(device: &Arc<Device>, ptx: &'static str, name: &CStr) -> Result<Kernel, CudaError> {
        assert!(ptx.ends_with('\0'), "the driver reads as far as a zero byte");
        let _current = device.enter()?;
        let driver = device.driver();
        let mut kernel = Kernel {
            device: Arc::clone(device),
            module: std::ptr::null_mut(),
            function: std::ptr::null_mut(),
        };
        // SAFETY: results are written to valid places; the text and the name end with a zero byte.
        unsafe {
            call!(driver, module_load(&mut kernel.module, ptx.as_ptr().cast()))?;
            call!(driver, module_function(&mut kernel.function, kernel.module, name.as_ptr()))?;
        }
        Ok(kernel)
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Puts it into a stream, with as many blocks as two factors say.
    ///
    /// # Safety
    ///
    /// The device's context is current. The parameters have the types of the kernel's, and what it
    /// does with them is allowed.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        (wide, deep): (u32, u32),
        threads: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let (driver, parameters) = (self.device.driver(), parameters.as_mut_ptr());
        let (stream, more) = (stream.handle(), std::ptr::null_mut());
        // SAFETY: by this function's contract.
        unsafe {
            call!(driver, launch(self.function, wide, deep, 1, threads, 1, 1, 0, stream, parameters, more))
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // The driver refused to load it.
        if self.module.is_null() {
            return;
        }
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: loaded by `load`, unloaded once.
        unsafe { (self.device.driver().table().module_unload)(self.module) };
    }
}

/// The kernels that copy, loaded for one device.
#[derive(Debug)]
pub struct Kernels {
    pieces: Kernel,
}

impl Kernels {
    pub fn device(&self) -> &Arc<Device> {
        self.pieces.device()
    }

    /// Loads them, and has the driver prepare them fully: it would otherwise do so at the first
    /// launch, and may then wait for work that is under way.
    pub fn load(device: &Arc<Device>) -> Result<Kernels, CudaError> {
        let _current = device.enter()?;
        let kernels = Kernels { pieces: Kernel::load(device, PTX, c"forebay_pieces")? };
        let stream = Stream::new(device)?;
        // SAFETY: no pieces, so no address is used.
        unsafe { kernels.copy(&stream, 0, 0, 0, 1)? };
        stream.synchronize()?;
        Ok(kernels)
    }

    /// Copies `count` pieces of `bytes` in all, listed at an address that the GPU reaches, with at
    /// most `blocks` blocks.
    ///
    /// # Safety
    ///
    /// The list holds `count` pieces and stays so until the copy is done. Until then all ranges are
    /// valid for the stream's device, and nothing else touches the targets or writes the sources.
    pub unsafe fn copy(
        &self,
        stream: &Stream,
        list: Address,
        count: u32,
        bytes: u64,
        blocks: u32,
    ) -> Result<(), CudaError> {
        let wide = count.clamp(1, blocks);
        let useful = (bytes / u64::from(count.max(1))).div_ceil(BLOCK_BYTES).max(1);
        let deep = u64::from(blocks / wide).min(useful) as u32;
        let (mut list, mut count) = (list, count);
        let mut parameters = [(&raw mut list).cast(), (&raw mut count).cast()];
        // SAFETY: the parameters have the types of the kernel's; the rest is this function's
        // contract.
        unsafe { self.pieces.launch(stream, (wide, deep), THREADS, &mut parameters) }
    }
}
