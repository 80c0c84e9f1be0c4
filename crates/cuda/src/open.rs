//! Which GPUs are opened, and what becomes of those that cannot be: they are left out and named,
//! and the others are used. In an exclusive compute mode a process takes no GPU but its own.

use crate::device::Device;
use crate::driver::{CudaError, Driver, abi};
use crate::gpu::Gpu;
use crate::kernels::Kernels;
use std::sync::Arc;
use thiserror::Error;

/// Why a GPU was left out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LeftOut {
    #[error("its compute mode is prohibited")]
    Prohibited,
    #[error("its compute mode is exclusive and this process does not use it")]
    Exclusive,
    #[error("it is an instance of a partitioned GPU (MIG), whose memory no other one reaches")]
    Part,
    #[error(transparent)]
    Refused(#[from] CudaError),
}

/// Opens GPUs and loads their kernels. Each that is left out is logged.
///
/// # Errors
/// If none is left: why the first one was left out.
pub fn open(driver: &'static Driver, wanted: &[u16]) -> Result<Vec<Arc<Kernels>>, LeftOut> {
    let own = own(driver, wanted);
    let open = |index: &u16| {
        let opened =
            open_one(driver, *index, own.contains(index)).and_then(|device| Ok(Kernels::load(&device)?));
        opened.map(Arc::new).inspect_err(|why| tracing::warn!(gpu = index, reason = %why, "GPU is left out"))
    };
    those_that_open(wanted.iter().map(open))
}

/// What could be opened, or why the first one could not where nothing could.
pub fn those_that_open<T>(tried: impl Iterator<Item = Result<T, LeftOut>>) -> Result<Vec<T>, LeftOut> {
    let (opened, refused): (Vec<_>, Vec<_>) = tried.partition(Result::is_ok);
    match refused.into_iter().next() {
        Some(Err(why)) if opened.is_empty() => Err(why),
        _ => Ok(opened.into_iter().flatten().collect()),
    }
}

/// GPUs on which this process has a context; the first one that is wanted if it has none yet.
fn own(driver: &'static Driver, wanted: &[u16]) -> Vec<u16> {
    let is_own = |index: &u16| Gpu::find(driver, *index).and_then(|gpu| gpu.has_context()).unwrap_or(false);
    let own: Vec<u16> = wanted.iter().copied().filter(is_own).collect();
    if own.is_empty() { wanted.iter().copied().take(1).collect() } else { own }
}

/// Opens a GPU. In an exclusive compute mode only the process that has a context on it may.
pub fn open_one(driver: &'static Driver, index: u16, is_own: bool) -> Result<Arc<Device>, LeftOut> {
    match Gpu::find(driver, index)?.attribute(abi::ATTRIBUTE_COMPUTE_MODE)? {
        abi::COMPUTE_MODE_DEFAULT => {}
        abi::COMPUTE_MODE_PROHIBITED => return Err(LeftOut::Prohibited),
        _ if is_own => {}
        _ => return Err(LeftOut::Exclusive),
    }
    Ok(Device::open(driver, index)?)
}
