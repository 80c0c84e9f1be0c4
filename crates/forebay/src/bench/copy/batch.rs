//! `cuMemcpyBatchAsync`, where the driver has it: since CUDA 12.8. This file knows its ABI; it must never know which
//! pieces are in a batch.

use super::Outcome;
use super::rig::{Ends, Job};
use forebay_cuda::driver::abi::{self, Address, GetProcAddress, Size, Status, StreamHandle};
use libc::{c_int, c_uint, c_void};

/// The version whose ABI is meant: later ones have another.
const VERSION: c_int = 12_080;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: the source is read in the stream's order.
const IN_STREAM_ORDER: c_uint = 1;

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
pub struct Batch(Copy);

impl Batch {
    /// Asks the driver that this process has loaded.
    pub fn find() -> Option<Batch> {
        let (mut function, mut found) = (std::ptr::null_mut::<c_void>(), 0);
        // SAFETY: the driver is loaded for all to see, and this is the signature of its function of that name; the name is a C
        // string and both results are written to valid places.
        let status = unsafe {
            let find = libc::dlsym(libc::RTLD_DEFAULT, c"cuGetProcAddress_v2".as_ptr());
            if find.is_null() {
                return None;
            }
            let find = std::mem::transmute::<*mut c_void, GetProcAddress>(find);
            find(c"cuMemcpyBatchAsync".as_ptr(), &mut function, VERSION, 0, &mut found)
        };
        let found = status == abi::SUCCESS && !function.is_null();
        // SAFETY: the driver gives the function of this name with the ABI of the version asked for.
        found.then(|| Batch(unsafe { std::mem::transmute::<*mut c_void, Copy>(function) }))
    }

    /// Copies, and waits until it is done.
    pub fn copy(&self, ends: &Ends, job: &Job) -> Outcome<()> {
        let (_current, stream) = (ends.device.enter()?, ends.stream(job.direction));
        let mut to: Vec<Address> = job.pieces.iter().map(|piece| piece.to).collect();
        let mut from: Vec<Address> = job.pieces.iter().map(|piece| piece.from).collect();
        let mut bytes: Vec<Size> = job.pieces.iter().map(|piece| piece.bytes as Size).collect();
        let mut attributes = Attributes { order: IN_STREAM_ORDER, source: [0; 2], target: [0; 2], flags: 0 };
        let (mut first, mut failed) = (0, 0);
        // SAFETY: the lists are as long as stated, the attributes are for all from the first on. The ranges are the rig's, and no
        // two copies of the rig at a time share any.
        let status = unsafe {
            (self.0)(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                bytes.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                stream.handle(),
            )
        };
        ends.device.driver().check("cuMemcpyBatchAsync", status)?;
        Ok(stream.synchronize()?)
    }
}
