//! The ABI of the CUDA driver, as far as it is used: handles, constants and structures of cuda.h.

// The constants have the names of cuda.h without its prefixes, and its documentation.

use libc::{c_char, c_int, c_uint, c_void, size_t};

/// `CUresult`.
pub type Status = c_int;
/// `CUdevice`.
pub type DeviceId = c_int;
/// `CUdeviceptr`. With unified addressing, which every supported device has, a host address is one
/// too.
pub type Address = u64;
/// `CUcontext`.
pub type ContextHandle = *mut c_void;
/// `CUstream`. Null is the legacy default stream.
pub type StreamHandle = *mut c_void;
/// `CUevent`.
pub type EventHandle = *mut c_void;
/// `CUmodule`.
pub type ModuleHandle = *mut c_void;
/// `CUfunction`.
pub type FunctionHandle = *mut c_void;

/// The stream that a thread has of its own where programs were built so.
pub const PER_THREAD_STREAM: StreamHandle = 2 as StreamHandle;

pub const SUCCESS: Status = 0;
pub const OUT_OF_MEMORY: Status = 2;
pub const NOT_FOUND: Status = 500;
pub const NOT_READY: Status = 600;
pub const PEER_ACCESS_ALREADY_ENABLED: Status = 704;
pub const PEER_ACCESS_NOT_ENABLED: Status = 705;
pub const CONTEXT_IS_DESTROYED: Status = 709;
pub const HOST_MEMORY_ALREADY_REGISTERED: Status = 712;

pub const STREAM_NON_BLOCKING: c_uint = 1;
pub const EVENT_BLOCKING_SYNC: c_uint = 1;
pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const HOST_REGISTER_PORTABLE: c_uint = 1;
pub const HOST_REGISTER_DEVICEMAP: c_uint = 2;
pub const IPC_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
pub const CAPTURE_NONE: c_int = 0;
pub const CAPTURE_MODE_RELAXED: c_int = 2;

pub const ATTRIBUTE_COMPUTE_MODE: c_int = 20;
pub const ATTRIBUTE_HOST_PAGE_TABLES: c_int = 100;

pub const COMPUTE_MODE_DEFAULT: c_int = 0;
pub const COMPUTE_MODE_PROHIBITED: c_int = 2;

pub const P2P_PERFORMANCE_RANK: c_int = 1;

pub const POINTER_CONTEXT: c_int = 1;
pub const POINTER_MEMORY_TYPE: c_int = 2;
pub const POINTER_IS_MANAGED: c_int = 8;
pub const POINTER_DEVICE_ORDINAL: c_int = 9;
pub const POINTER_IS_IPC_CAPABLE: c_int = 10;
pub const POINTER_RANGE_START: c_int = 11;
pub const POINTER_RANGE_SIZE: c_int = 12;

pub const MEMORY_TYPE_HOST: c_uint = 1;
pub const MEMORY_TYPE_DEVICE: c_uint = 2;

/// `CUuuid`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

/// `CUipcMemHandle`: names a device allocation of another process.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; 64]);

/// Looks a symbol up in an open library, as `dlsym` does.
pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// `cuGetProcAddress_v2`.
pub type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> Status;

/// Sizes, as the C interface has them.
pub type Size = size_t;
