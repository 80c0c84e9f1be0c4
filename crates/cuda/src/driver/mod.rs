//! The CUDA driver, loaded at run time: no toolkit is needed to build or to run, and a machine
//! without a GPU runs everything else.

pub mod abi;
mod batch;
mod error;
mod table;

pub use batch::{BatchCopy, CopyList};
pub use error::{CudaError, LoadError};
pub use table::Table;
pub(crate) use table::call;

use abi::{Dlsym, GetProcAddress, Status};
use libc::{c_int, c_void};
use std::ffi::{CStr, CString};

/// Where the driver is looked for.
const LIBRARY: &CStr = c"libcuda.so.1";
/// Names another library, for tests and for drivers that are installed in odd places.
pub const LIBRARY_VARIABLE: &str = "FOREBAY_LIBCUDA";
/// Drivers that speak the interface of [`table::VERSION`] report at least this.
const OLDEST: c_int = table::VERSION;

/// A loaded and initialised driver. It is never unloaded: streams and threads may outlive whoever
/// loaded it.
pub struct Driver {
    table: Table,
    batch_copy: Option<BatchCopy>,
    version: c_int,
}

impl Driver {
    /// Loads the driver and initialises it.
    pub fn load() -> Result<&'static Driver, LoadError> {
        let name = match std::env::var(LIBRARY_VARIABLE) {
            Ok(path) => CString::new(path).map_err(|_| LoadError::Path)?,
            Err(_) => LIBRARY.to_owned(),
        };
        // SAFETY: opening a library runs its constructors; that of the driver has no preconditions.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if library.is_null() {
            return Err(LoadError::NoLibrary { path: name.to_string_lossy().into(), error: open_error() });
        }
        // SAFETY: `library` is an open library.
        unsafe { Driver::from_library(libc::dlsym, library) }
    }

    /// Takes over a driver that is loaded already and initialises it.
    ///
    /// # Safety
    ///
    /// `dlsym` behaves as the C library's, and `library` is an open handle of a CUDA driver that is
    /// never closed.
    pub unsafe fn from_library(dlsym: Dlsym, library: *mut c_void) -> Result<&'static Driver, LoadError> {
        // SAFETY: by this function's contract.
        let find = unsafe { dlsym(library, c"cuGetProcAddress_v2".as_ptr()) };
        if find.is_null() {
            return Err(LoadError::MissingSymbol { symbol: "cuGetProcAddress_v2" });
        }
        // SAFETY: this is the signature of the function of that name.
        let find = unsafe { std::mem::transmute::<*mut c_void, GetProcAddress>(find) };
        let table = Table::fill(|symbol| by_name(find, symbol, table::VERSION))
            .map_err(|symbol| LoadError::MissingSymbol { symbol })?;
        let mut driver = Driver { table, batch_copy: BatchCopy::find(find), version: 0 };
        driver.initialise()?;
        Ok(Box::leak(Box::new(driver)))
    }

    fn initialise(&mut self) -> Result<(), LoadError> {
        let mut version = 0;
        // SAFETY: initialising has no preconditions; the version is written to a valid place.
        unsafe {
            call!(self, init(0))?;
            call!(self, driver_version(&mut version))?;
        }
        if version < OLDEST {
            return Err(LoadError::TooOld { version, oldest: OLDEST });
        }
        self.version = version;
        Ok(())
    }

    /// The newest CUDA version that the driver supports, as 1000 x major + 10 x minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Many copies by one call, where the driver has that.
    pub fn batch_copy(&self) -> Option<BatchCopy> {
        self.batch_copy
    }

    /// Turns a status into a result that names the call.
    pub fn check(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == abi::SUCCESS {
            Ok(())
        } else {
            Err(CudaError { call, status, name: self.name_of(status) })
        }
    }

    fn name_of(&self, status: Status) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the name is written to a valid place.
        let known = unsafe { (self.table.error_name)(status, &mut name) };
        if known != abi::SUCCESS || name.is_null() {
            return "unknown".into();
        }
        // SAFETY: the driver gives a string that lives as long as it does.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into()
    }
}

/// While it lives, calls of this thread do not break captures that other threads have under way.
#[derive(Debug)]
pub struct Relaxed {
    driver: &'static Driver,
    mode: c_int,
    /// Not to be sent: the mode belongs to the thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Relaxed {
    /// Asking about an event, say, counts as unsafe during a capture, whichever thread asks about
    /// whichever event. What this library asks about is never part of a capture, so it is safe.
    pub fn enter(driver: &'static Driver) -> Relaxed {
        let mut mode = abi::CAPTURE_MODE_RELAXED;
        // SAFETY: the mode is exchanged at a valid place. There is nothing to be done about a
        // failure.
        unsafe { (driver.table.capture_mode_exchange)(&mut mode) };
        Relaxed { driver, mode, _thread: std::marker::PhantomData }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `enter`.
        unsafe { (self.driver.table.capture_mode_exchange)(&mut self.mode) };
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("version", &self.version).finish_non_exhaustive()
    }
}

/// The driver's function of a name, with the ABI of a version.
fn by_name(find: GetProcAddress, symbol: &str, version: c_int) -> Option<*mut c_void> {
    let name = CString::new(symbol).ok()?;
    let (mut function, mut found) = (std::ptr::null_mut(), 0);
    // SAFETY: the name is a C string and both results are written to valid places.
    let status = unsafe { find(name.as_ptr(), &mut function, version, 0, &mut found) };
    (status == abi::SUCCESS).then_some(function)
}

/// What the last failed `dlopen` of this thread said.
fn open_error() -> String {
    // SAFETY: the C library gives null or a string that is valid until this thread's next call.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "no reason was given".into();
    }
    // SAFETY: as above; it is copied at once.
    unsafe { CStr::from_ptr(error) }.to_string_lossy().into()
}
