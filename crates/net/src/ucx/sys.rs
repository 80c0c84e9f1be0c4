//! The C interface of libucp, as far as it is used: structures, constants and a table of functions
//! that is filled at run time. Nothing is linked, so a machine without the library runs everything
//! else. This file knows the ABI of UCX 1.x.
//!
//! Parameter structures say by a mask which of their fields are meant, so later versions read these
//! as they are.

use super::error::UcxError;
use libc::{c_char, c_int, c_uint, c_void, size_t};
use std::ffi::CStr;
use std::sync::OnceLock;

const LIBRARY: &CStr = c"libucp.so.0";

/// The version of the interface that the structures below are of.
pub const API: (c_uint, c_uint) = (1, 13);

/// `ucs_status_t`, a packed enumeration.
pub type Status = i8;
pub const OK: Status = 0;
pub const IN_PROGRESS: Status = 1;
pub const INVALID_PARAM: Status = -5;
pub const MESSAGE_TRUNCATED: Status = -9;
pub const NO_DEVICE: Status = -14;
pub const BUSY: Status = -15;
pub const CONNECTION_RESET: Status = -25;
const LAST_STATUS: isize = -100;

/// What calls that may go on afterwards give back: null, a request, or a status.
pub type StatusPtr = *mut c_void;

/// What a [`StatusPtr`] says.
pub enum Begun {
    /// It is over already, and no callback is called.
    Done,
    /// It goes on.
    Request(*mut c_void),
    /// It has failed, and no callback is called.
    Failed(Status),
}

pub fn begun(pointer: StatusPtr) -> Begun {
    match pointer as isize {
        0 => Begun::Done,
        status @ LAST_STATUS..0 => Begun::Failed(status as Status),
        _ => Begun::Request(pointer),
    }
}

macro_rules! opaque {
    ($($name:ident),*) => { $(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )* };
}
opaque!(Config, Context, Worker, Endpoint, Address);

pub const PARAM_FEATURES: u64 = 1 << 0;
pub const PARAM_MT_WORKERS_SHARED: u64 = 1 << 5;
pub const FEATURE_WAKEUP: u64 = 1 << 4;
pub const FEATURE_AM: u64 = 1 << 6;

#[repr(C)]
pub struct Params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: size_t,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: size_t,
    pub estimated_num_ppn: size_t,
    pub name: *const c_char,
}

pub const WORKER_THREAD_MODE: u64 = 1 << 0;
pub const WORKER_FLAGS: u64 = 1 << 5;
pub const THREAD_MODE_SERIALIZED: c_uint = 1;
pub const WORKER_IGNORE_REQUEST_LEAK: u64 = 1 << 0;

#[repr(C)]
pub struct WorkerParams {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; 16],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: size_t,
    pub client_id: u64,
}

pub const EP_REMOTE_ADDRESS: u64 = 1 << 0;
pub const EP_ERR_HANDLING_MODE: u64 = 1 << 1;
pub const EP_ERR_HANDLER: u64 = 1 << 2;
pub const ERR_HANDLING_MODE_NONE: c_uint = 0;
pub const ERR_HANDLING_MODE_PEER: c_uint = 1;

#[repr(C)]
pub struct SockAddr {
    pub address: *const c_void,
    pub len: c_uint,
}

#[repr(C)]
pub struct EpParams {
    pub field_mask: u64,
    pub address: *const Address,
    pub err_mode: c_uint,
    pub err_handler: Option<unsafe extern "C" fn(arg: *mut c_void, ep: *mut Endpoint, status: Status)>,
    pub err_handler_arg: *mut c_void,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: SockAddr,
    pub conn_request: *mut c_void,
    pub name: *const c_char,
    pub local_sockaddr: SockAddr,
}

pub const OP_CALLBACK: u32 = 1 << 1;
pub const OP_USER_DATA: u32 = 1 << 2;
pub const OP_FLAGS: u32 = 1 << 4;
pub const EP_CLOSE_FORCE: u32 = 1 << 0;

pub type SendCallback = unsafe extern "C" fn(request: *mut c_void, status: Status, user_data: *mut c_void);
pub type ReceiveCallback =
    unsafe extern "C" fn(request: *mut c_void, status: Status, length: size_t, user_data: *mut c_void);

#[repr(C)]
pub union Callback {
    pub send: SendCallback,
    pub receive: ReceiveCallback,
    pub none: *const c_void,
}

#[repr(C)]
pub struct RequestParam {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub callback: Callback,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    pub recv_info: *mut c_void,
    pub memh: *mut c_void,
}

impl RequestParam {
    /// A request whose end the callback is told, with this ticket.
    pub fn told(callback: Callback, ticket: *mut c_void) -> RequestParam {
        let op_attr_mask = OP_CALLBACK | OP_USER_DATA;
        RequestParam { op_attr_mask, callback, user_data: ticket, ..RequestParam::plain() }
    }

    /// A request with no wishes.
    pub fn plain() -> RequestParam {
        // SAFETY: all fields are numbers or pointers that may be null; the mask says that none is
        // meant.
        let mut param: RequestParam = unsafe { std::mem::zeroed() };
        param.callback = Callback { none: std::ptr::null() };
        param
    }
}

pub const AM_HANDLER_ALL: u64 = 0b1111;
pub const AM_WHOLE_MESSAGE: u32 = 1 << 0;
pub const AM_PERSISTENT_DATA: u32 = 1 << 1;
pub const AM_RECEIVED_DATA: u64 = 1 << 16;
pub const AM_RECEIVED_RNDV: u64 = 1 << 17;

pub type AmCallback = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_len: size_t,
    data: *mut c_void,
    len: size_t,
    param: *const AmReceived,
) -> Status;

#[repr(C)]
pub struct AmHandler {
    pub field_mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub callback: AmCallback,
    pub arg: *mut c_void,
}

#[repr(C)]
pub struct AmReceived {
    pub attributes: u64,
    pub reply_ep: *mut Endpoint,
}

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library.
        pub struct Ucp {
            $(pub $field: unsafe extern "C" fn($($arg: $type),*) $(-> $result)?,)*
        }

        impl Ucp {
            fn load(handle: *mut c_void) -> Result<Ucp, UcxError> {
                Ok(Ucp { $(
                    // SAFETY: the symbol, which is not null, is a function of this type: the
                    // interface of UCX says so.
                    $field: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) $(-> $result)?>(
                            symbol(handle, $symbol)?,
                        )
                    },
                )* })
            }
        }
    };
}

functions! {
    version = c"ucp_get_version": fn(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
    status_string = c"ucs_status_string": fn(status: Status) -> *const c_char;
    config_read = c"ucp_config_read": fn(prefix: *const c_char, file: *const c_char, config: *mut *mut Config) -> Status;
    config_modify = c"ucp_config_modify": fn(config: *mut Config, name: *const c_char, value: *const c_char) -> Status;
    config_release = c"ucp_config_release": fn(config: *mut Config);
    init = c"ucp_init_version": fn(major: c_uint, minor: c_uint, params: *const Params, config: *const Config, context: *mut *mut Context) -> Status;
    cleanup = c"ucp_cleanup": fn(context: *mut Context);
    context_print = c"ucp_context_print_info": fn(context: *mut Context, stream: *mut libc::FILE);
    worker_create = c"ucp_worker_create": fn(context: *mut Context, params: *const WorkerParams, worker: *mut *mut Worker) -> Status;
    worker_destroy = c"ucp_worker_destroy": fn(worker: *mut Worker);
    worker_address = c"ucp_worker_get_address": fn(worker: *mut Worker, address: *mut *mut Address, len: *mut size_t) -> Status;
    worker_release_address = c"ucp_worker_release_address": fn(worker: *mut Worker, address: *mut Address);
    worker_progress = c"ucp_worker_progress": fn(worker: *mut Worker) -> c_uint;
    worker_event_fd = c"ucp_worker_get_efd": fn(worker: *mut Worker, fd: *mut c_int) -> Status;
    worker_arm = c"ucp_worker_arm": fn(worker: *mut Worker) -> Status;
    worker_set_am_handler = c"ucp_worker_set_am_recv_handler": fn(worker: *mut Worker, handler: *const AmHandler) -> Status;
    ep_create = c"ucp_ep_create": fn(worker: *mut Worker, params: *const EpParams, ep: *mut *mut Endpoint) -> Status;
    ep_print = c"ucp_ep_print_info": fn(ep: *mut Endpoint, stream: *mut libc::FILE);
    ep_close = c"ucp_ep_close_nbx": fn(ep: *mut Endpoint, param: *const RequestParam) -> StatusPtr;
    am_send = c"ucp_am_send_nbx": fn(ep: *mut Endpoint, id: c_uint, header: *const c_void, header_len: size_t, bytes: *const c_void, count: size_t, param: *const RequestParam) -> StatusPtr;
    am_receive = c"ucp_am_recv_data_nbx": fn(worker: *mut Worker, offered: *mut c_void, bytes: *mut c_void, count: size_t, param: *const RequestParam) -> StatusPtr;
    am_release = c"ucp_am_data_release": fn(worker: *mut Worker, data: *mut c_void);
    request_status = c"ucp_request_check_status": fn(request: *mut c_void) -> Status;
    request_free = c"ucp_request_free": fn(request: *mut c_void);
}

impl Ucp {
    /// The library of this machine. Loaded once and never unloaded: it keeps threads' and
    /// processes' state of its own.
    pub fn get() -> Result<&'static Ucp, UcxError> {
        static LOADED: OnceLock<Result<Ucp, UcxError>> = OnceLock::new();
        LOADED.get_or_init(Ucp::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Ucp, UcxError> {
        // SAFETY: the name ends with a zero; what the library runs at its start is safe on any
        // thread.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(UcxError::NoLibrary { why: last_error() });
        }
        let ucp = Ucp::load(handle)?;
        match ucp.release() {
            version @ (major, minor, _) if major != API.0 || minor < API.1 => {
                Err(UcxError::Version { version })
            }
            _ => Ok(ucp),
        }
    }

    /// Major, minor and release number.
    pub fn release(&self) -> (u32, u32, u32) {
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: three numbers are written.
        unsafe { (self.version)(&mut major, &mut minor, &mut release) };
        (major, minor, release)
    }

    /// A status in words.
    pub fn text(&self, status: Status) -> String {
        // SAFETY: it gives back a text that ends with a zero and is never freed.
        unsafe { CStr::from_ptr((self.status_string)(status)) }.to_string_lossy().into_owned()
    }

    /// `Err` if the status says so.
    pub fn check(&self, doing: &'static str, status: Status) -> Result<(), UcxError> {
        if status == OK { Ok(()) } else { Err(UcxError::Ucx { doing, why: self.text(status) }) }
    }

    /// What a function prints.
    pub fn printed(&self, print: impl FnOnce(*mut libc::FILE)) -> String {
        let (mut start, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: both are written when the stream is flushed or closed.
        let stream = unsafe { libc::open_memstream(&mut start, &mut len) };
        if stream.is_null() {
            return String::new();
        }
        print(stream);
        // SAFETY: the stream is open; closing it leaves `len` bytes at `start`, which are this
        // function's to free.
        unsafe {
            libc::fclose(stream);
            let text = std::slice::from_raw_parts(start.cast::<u8>(), len);
            let text = String::from_utf8_lossy(text).into_owned();
            libc::free(start.cast());
            text
        }
    }
}

fn symbol(handle: *mut c_void, name: &'static CStr) -> Result<*mut c_void, UcxError> {
    // SAFETY: the handle is an open library's, and the name ends with a zero.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() { Err(UcxError::NoSymbol { name: name.to_string_lossy() }) } else { Ok(found) }
}

fn last_error() -> String {
    // SAFETY: it gives back null or a text that ends with a zero, this thread's until its next
    // call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason was given".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn structures_are_laid_out_as_the_headers_have_them() {
        assert_eq!((size_of::<Params>(), offset_of!(Params, mt_workers_shared)), (80, 48));
        assert_eq!((size_of::<WorkerParams>(), offset_of!(WorkerParams, events)), (200, 144));
        assert_eq!((offset_of!(WorkerParams, event_fd), offset_of!(WorkerParams, client_id)), (160, 192));
        assert_eq!((size_of::<EpParams>(), offset_of!(EpParams, err_handler)), (104, 24));
        assert_eq!((offset_of!(EpParams, flags), offset_of!(EpParams, name)), (48, 80));
        assert_eq!((size_of::<RequestParam>(), offset_of!(RequestParam, callback)), (72, 16));
        assert_eq!((offset_of!(RequestParam, user_data), offset_of!(RequestParam, memh)), (32, 64));
        assert_eq!((size_of::<AmHandler>(), size_of::<Status>()), (32, 1));
    }
}
