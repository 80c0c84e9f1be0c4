//! A rail: the library opened for the transports of one fabric, on some or all devices. Flows are made on it. This file says
//! what is asked of UCX; it must never know what a flow carries.

use super::error::UcxError;
use super::report::{self, Transport};
use super::sys::{self, Ucp};
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What connects two ends. A rail has one, since each tells in its own way that a peer has died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fabric {
    /// Memory that processes of one host share.
    Memory,
    /// InfiniBand and RoCE.
    Rdma,
    /// Sockets. Whoever can reach UCX's port can have it write anywhere in this process (`docs/decisions/004-ucx-link.md`),
    /// so only on devices that nobody else is on.
    Tcp,
}

impl Fabric {
    /// All there are, the best first.
    pub const ALL: [Fabric; 3] = [Fabric::Memory, Fabric::Rdma, Fabric::Tcp];

    /// As ends name it to each other.
    pub fn code(self) -> u32 {
        match self {
            Fabric::Memory => 1,
            Fabric::Rdma => 2,
            Fabric::Tcp => 3,
        }
    }

    /// As UCX's setting `TLS` names its transports.
    fn transports(self) -> &'static str {
        match self {
            Fabric::Memory => "sm",
            Fabric::Rdma => "ib",
            Fabric::Tcp => "tcp",
        }
    }

    /// The fabric of a transport; `None` for those that no rail uses.
    pub(super) fn of(transport: &str) -> Option<Fabric> {
        match transport {
            "posix" | "sysv" | "cma" | "knem" | "xpmem" => Some(Fabric::Memory),
            "tcp" => Some(Fabric::Tcp),
            _ if ["rc", "dc", "ud"].iter().any(|verbs| transport.starts_with(verbs)) => Some(Fabric::Rdma),
            _ => None,
        }
    }
}

/// What a rail is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailOptions {
    /// What it uses.
    pub fabric: Fabric,
    /// On which devices, as UCX names them: `mlx5_0:1`, `eth0`. None named: all.
    pub devices: Vec<String>,
}

/// UCX opened for one fabric. Cheap to clone.
#[derive(Debug, Clone)]
pub struct UcxRail {
    pub(super) context: Arc<Context>,
}

/// UCX's context. Workers, each on one thread at a time, share it.
#[derive(Debug)]
pub(super) struct Context {
    pub ucp: &'static Ucp,
    pub handle: *mut sys::Context,
    pub options: RailOptions,
    pub transports: Vec<Transport>,
    quarantined: AtomicU64,
}

// SAFETY: the context was opened for several workers, so UCX locks what they share.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// A pipe's slots are lost.
    pub fn quarantine(&self) {
        self.quarantined.fetch_add(1, Ordering::Relaxed);
    }

    pub fn quarantined(&self) -> u64 {
        self.quarantined.load(Ordering::Relaxed)
    }
}

impl Drop for Context {
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

impl UcxRail {
    /// Opens UCX. The environment's `UCX_` settings hold, except for those that make the rail what it is.
    pub fn open(options: RailOptions) -> Result<UcxRail, UcxError> {
        let ucp = Ucp::get()?;
        if let Some(name) = options.devices.iter().find(|name| !is_device(name)) {
            return Err(UcxError::DeviceName { name: name.clone() });
        }
        // Large messages are fetched by the end that they are for: nobody ever writes into another's memory.
        let mut settings =
            vec![("TLS", options.fabric.transports().to_string()), ("RNDV_SCHEME", "get_zcopy".to_string())];
        if !options.devices.is_empty() {
            let devices = if options.fabric == Fabric::Memory { "SHM_DEVICES" } else { "NET_DEVICES" };
            settings.push((devices, options.devices.join(",")));
        }
        let no_transport = || UcxError::NoTransport {
            fabric: options.fabric,
            devices: options.devices.clone(),
            has: match machine() {
                Ok(machine) if !machine.is_empty() => {
                    machine.iter().map(Transport::to_string).collect::<Vec<_>>().join(", ")
                }
                _ => "none".into(),
            },
        };
        let handle = init(ucp, &settings)?.ok_or_else(no_transport)?;
        let transports = transports(ucp, handle);
        let context =
            Context { ucp, handle, options: options.clone(), transports, quarantined: AtomicU64::new(0) };
        // UCX opens a context for what is there, and says only in its log what is not.
        let whole =
            context.transports.iter().any(|transport| Fabric::of(&transport.name) == Some(options.fabric));
        if whole { Ok(UcxRail { context: Arc::new(context) }) } else { Err(no_transport()) }
    }

    /// What it uses.
    pub fn fabric(&self) -> Fabric {
        self.context.options.fabric
    }

    /// The transports that flows of this rail may use.
    pub fn transports(&self) -> &[Transport] {
        &self.context.transports
    }
}

/// Whether a name can be one of a device. Commas and the like would make it several, or something else.
fn is_device(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    !name.is_empty() && name.bytes().all(allowed)
}

/// Everything that UCX can use on this machine.
pub(super) fn machine() -> Result<Vec<Transport>, UcxError> {
    let ucp = Ucp::get()?;
    let Some(handle) = init(ucp, &[("TLS", "all".into())])? else { return Ok(Vec::new()) };
    let transports = transports(ucp, handle);
    // SAFETY: nobody else has it.
    unsafe { (ucp.cleanup)(handle) };
    Ok(transports)
}

fn transports(ucp: &Ucp, handle: *mut sys::Context) -> Vec<Transport> {
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
