//! Many copies by one call, `cuMemcpyBatchAsync`, which drivers have since CUDA 12.8.

use super::abi::{Address, GetProcAddress, Size, Status, StreamHandle};
use super::{CudaError, Driver, by_name};
use libc::{c_int, c_uint, c_void};

/// The version whose ABI is meant: later ones have another.
const VERSION: c_int = 12_080;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: the source is read in the stream's order.
const IN_STREAM_ORDER: c_uint = 1;
/// `CU_STREAM_LEGACY`.
const LEGACY: usize = 1;

/// `CUmemcpyAttributes`.
#[repr(C)]
struct Attributes {
    order: c_uint,
    /// Kind and id of a place; hints for managed memory alone.
    source: [c_int; 2],
    target: [c_int; 2],
    flags: c_uint,
}

type Copy = unsafe extern "C" fn(
    *mut Address,
    *mut Address,
    *mut Size,
    Size,
    *mut Attributes,
    *mut Size,
    Size,
    *mut Size,
    StreamHandle,
) -> Status;

/// The driver's function.
#[derive(Debug, Clone, Copy)]
pub struct BatchCopy(Copy);

/// Copies that one call is to make. Filled, queued and emptied again and again, it allocates once.
#[derive(Debug, Default)]
pub struct CopyList {
    to: Vec<Address>,
    from: Vec<Address>,
    bytes: Vec<Size>,
}

impl CopyList {
    pub fn with_room(copies: usize) -> CopyList {
        let room = || Vec::with_capacity(copies);
        CopyList { to: room(), from: room(), bytes: Vec::with_capacity(copies) }
    }

    pub fn add(&mut self, from: Address, to: Address, bytes: u64) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes as Size);
    }

    pub fn len(&self) -> usize {
        self.to.len()
    }

    pub fn is_empty(&self) -> bool {
        self.to.is_empty()
    }

    fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
    }
}

impl BatchCopy {
    /// The function, if the driver has it.
    pub(super) fn find(find: GetProcAddress) -> Option<BatchCopy> {
        let found = by_name(find, "cuMemcpyBatchAsync", VERSION).filter(|found| !found.is_null())?;
        // SAFETY: the driver gives the function of this name with the ABI of the version asked for.
        Some(BatchCopy(unsafe { std::mem::transmute::<*mut c_void, Copy>(found) }))
    }

    /// Whether a stream takes batches. The legacy default stream does not.
    pub fn fits(stream: StreamHandle) -> bool {
        !stream.is_null() && stream as usize != LEGACY
    }

    /// Queues all copies of a list, in no particular order among themselves, and empties it.
    ///
    /// # Safety
    ///
    /// The stream's context is current, and [fits](BatchCopy::fits). What holds for `cuMemcpyAsync`
    /// holds for all ranges, and no two of them overlap.
    pub unsafe fn queue(
        self,
        driver: &Driver,
        list: &mut CopyList,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        if list.is_empty() {
            return Ok(());
        }
        let mut attributes = Attributes { order: IN_STREAM_ORDER, source: [0; 2], target: [0; 2], flags: 0 };
        let (mut first, mut failed) = (0, 0);
        // SAFETY: the lists are of one length and are read before the call returns; the attributes
        // are for all from the first on. For the rest, by this function's contract.
        let status = unsafe {
            (self.0)(
                list.to.as_mut_ptr(),
                list.from.as_mut_ptr(),
                list.bytes.as_mut_ptr(),
                list.bytes.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                stream,
            )
        };
        list.clear();
        driver.check("cuMemcpyBatchAsync", status)
    }
}
