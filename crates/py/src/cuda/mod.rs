//! Memory and copies of GPUs as Python has them. The files here know Python's objects and who keeps
//! memory alive.

mod copier;
mod pinned;
mod places;

pub use copier::Copier;
pub use pinned::{PinnedBuffer, PinnedPool};
pub use places::AgentGpus;

use crate::errors::failed;
use forebay_cuda::driver::Driver;
use forebay_transfer::lock::Mutex;
use pyo3::PyResult;

/// The driver, loaded once for the whole process. Where there is none, it is looked for again the
/// next time.
fn driver() -> PyResult<&'static Driver> {
    static DRIVER: Mutex<Option<&'static Driver>> = Mutex::new(None);
    let mut known = DRIVER.lock();
    match *known {
        Some(driver) => Ok(driver),
        None => Ok(known.insert(Driver::load().map_err(failed)?)),
    }
}
