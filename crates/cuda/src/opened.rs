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
    #[error(transparent)]
    Refused(#[from] CudaError),
}

/// Opens GPUs and loads their kernels. Each that is left out is logged.
///
/// # Errors
/// If none is left: why the first one was left out.
pub fn open(driver: &'static Driver, wanted: &[u16]) -> Result<Vec<Arc<Kernels>>, LeftOut> {
    let own = own(driver, wanted);
    let mut first = None;
    let mut opened = Vec::with_capacity(wanted.len());
    for &index in wanted {
        match open_one(driver, index, &own) {
            Ok(gpu) => opened.push(gpu),
            Err(why) => {
                tracing::warn!(gpu = index, reason = %why, "GPU is left out");
                first.get_or_insert(why);
            }
        }
    }
    match first {
        Some(why) if opened.is_empty() => Err(why),
        _ => Ok(opened),
    }
}

/// GPUs on which this process has a context; the first one that is wanted if it has none yet.
fn own(driver: &'static Driver, wanted: &[u16]) -> Vec<u16> {
    let is_own = |index: &u16| Gpu::find(driver, *index).and_then(|gpu| gpu.has_context()).unwrap_or(false);
    let own: Vec<u16> = wanted.iter().copied().filter(is_own).collect();
    if own.is_empty() { wanted.iter().copied().take(1).collect() } else { own }
}

fn open_one(driver: &'static Driver, index: u16, own: &[u16]) -> Result<Arc<Kernels>, LeftOut> {
    match Gpu::find(driver, index)?.attribute(abi::ATTRIBUTE_COMPUTE_MODE)? {
        abi::COMPUTE_MODE_DEFAULT => {}
        abi::COMPUTE_MODE_PROHIBITED => return Err(LeftOut::Prohibited),
        _ if own.contains(&index) => {}
        _ => return Err(LeftOut::Exclusive),
    }
    Ok(Arc::new(Kernels::load(&Device::open(driver, index)?)?))
}
