//! The library opened for the transports of one fabric, on some or all devices. This file says what
//! is asked of UCX.

use super::error::UcxError;
use super::fabric::Fabric;
use super::report::{self, Lane, Resource};
use super::sys::{self, Ucp};
use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// UCX opened for one fabric. Workers, each on one thread at a time, share it.
#[derive(Debug)]
pub struct UcxContext {
    pub(super) ucp: &'static Ucp,
    pub(super) handle: *mut sys::Context,
    fabric: Fabric,
    transports: Vec<Resource>,
    /// What this machine has, as far as UCX can use it; found out when it is first asked for.
    machine: OnceLock<Vec<Resource>>,
    quarantined: AtomicU64,
}

// SAFETY: the context was opened for several workers, so UCX locks what they share.
unsafe impl Send for UcxContext {}
// SAFETY: as above.
unsafe impl Sync for UcxContext {}

impl Drop for UcxContext {
    fn drop(&mut self) {
        // SAFETY: whoever uses the context keeps it alive, so nobody does.
        unsafe { (self.ucp.cleanup)(self.handle) };
    }
}

impl std::fmt::Debug for Ucp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ucp").field("version", &self.release()).finish_non_exhaustive()
    }
}

impl UcxContext {
    /// Opens UCX. The environment's `UCX_` settings hold, except for those that make the rail what
    /// it is.
    pub fn open(fabric: Fabric, devices: &[String]) -> Result<Arc<UcxContext>, UcxError> {
        let ucp = Ucp::get()?;
        if let Some(name) = devices.iter().find(|name| !is_device(name)) {
            return Err(UcxError::DeviceName { name: name.clone() });
        }
        // Large messages are fetched by the end that they are for: nobody ever writes into
        // another's memory.
        let mut settings =
            vec![("TLS", fabric.transports().to_string()), ("RNDV_SCHEME", "get_zcopy".to_string())];
        if !devices.is_empty() {
            let setting = if fabric == Fabric::Memory { "SHM_DEVICES" } else { "NET_DEVICES" };
            settings.push((setting, devices.join(",")));
        }
        let no_transport = || UcxError::NoTransport {
            fabric,
            devices: devices.to_vec(),
            has: match machine() {
                Ok(machine) if !machine.is_empty() => {
                    machine.iter().map(Resource::to_string).collect::<Vec<_>>().join(", ")
                }
                _ => "none".into(),
            },
        };
        let handle = init(ucp, &settings)?.ok_or_else(no_transport)?;
        let transports = transports(ucp, handle);
        let (machine, quarantined) = (OnceLock::new(), AtomicU64::new(0));
        let context = UcxContext { ucp, handle, fabric, transports, machine, quarantined };
        // UCX opens a context for what is there, and says only in its log what is not.
        let whole = context.transports.iter().any(|found| Fabric::of(&found.name) == Some(fabric));
        if whole { Ok(Arc::new(context)) } else { Err(no_transport()) }
    }

    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// What carries the bytes of an endpoint with these lanes.
    pub(super) fn report(&self, taken: &[Lane]) -> String {
        let machine = self.machine.get_or_init(|| machine().unwrap_or_default());
        report::report((self.fabric, self.ucp.release()), machine, &self.transports, taken)
    }

    /// A connection's slots are lost.
    pub(super) fn quarantine(&self) {
        self.quarantined.fetch_add(1, Ordering::Relaxed);
    }

    /// Connections that UCX had not let go of when their time was over. Their slots are never used
    /// again.
    pub fn quarantined(&self) -> u64 {
        self.quarantined.load(Ordering::Relaxed)
    }
}

/// Whether a name can be one of a device. Commas and the like would make it several, or something
/// else.
fn is_device(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    !name.is_empty() && name.bytes().all(allowed)
}

/// Everything that UCX can use on this machine.
fn machine() -> Result<Vec<Resource>, UcxError> {
    let ucp = Ucp::get()?;
    let Some(handle) = init(ucp, &[("TLS", "all".into())])? else { return Ok(Vec::new()) };
    let transports = transports(ucp, handle);
    // SAFETY: nobody else has it.
    unsafe { (ucp.cleanup)(handle) };
    Ok(transports)
}

fn transports(ucp: &Ucp, handle: *mut sys::Context) -> Vec<Resource> {
    // SAFETY: the context is open, and so is the stream.
    report::resources(&ucp.printed(|stream| unsafe { (ucp.context_print)(handle, stream) }))
}

/// Opens a context. `None`: there is no device.
fn init(ucp: &Ucp, settings: &[(&str, String)]) -> Result<Option<*mut sys::Context>, UcxError> {
    let mut config = std::ptr::null_mut();
    // SAFETY: no prefix and no file; the configuration is written, and released below.
    let read = unsafe { (ucp.config_read)(std::ptr::null(), std::ptr::null(), &mut config) };
    ucp.check("reading the configuration", read)?;
    let opened = modify(ucp, config, settings).and_then(|()| init_with(ucp, config));
    // SAFETY: the configuration was read above, and no context keeps it.
    unsafe { (ucp.config_release)(config) };
    opened
}

fn modify(ucp: &Ucp, config: *mut sys::Config, settings: &[(&str, String)]) -> Result<(), UcxError> {
    for (name, value) in settings {
        let text = |text: &str| CString::new(text).map_err(|_| UcxError::DeviceName { name: text.into() });
        let (name, value) = (text(name)?, text(value)?);
        // SAFETY: the configuration is open, and both texts end with a zero.
        ucp.check("setting what to use", unsafe {
            (ucp.config_modify)(config, name.as_ptr(), value.as_ptr())
        })?;
    }
    Ok(())
}

fn init_with(ucp: &Ucp, config: *const sys::Config) -> Result<Option<*mut sys::Context>, UcxError> {
    // SAFETY: all fields are numbers or pointers that may be null; the mask says which are meant.
    let mut params: sys::Params = unsafe { std::mem::zeroed() };
    params.field_mask = sys::PARAM_FEATURES | sys::PARAM_MT_WORKERS_SHARED;
    params.features = sys::FEATURE_AM | sys::FEATURE_WAKEUP;
    params.mt_workers_shared = 1;
    let mut handle = std::ptr::null_mut();
    // SAFETY: parameters and configuration are whole; the context is written.
    match unsafe { (ucp.init)(sys::API.0, sys::API.1, &params, config, &mut handle) } {
        sys::NO_DEVICE => Ok(None),
        status => ucp.check("opening the transports", status).map(|()| Some(handle)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_name_cannot_smuggle_in_another_setting() {
        assert!(is_device("mlx5_0:1") && is_device("eth0.100"));
        for name in ["", "eth0,lo", "^eth0", "eth0 ", "eth0\0"] {
            assert!(!is_device(name), "{name:?}");
        }
    }
}
