//! Numbers and layouts of `cuda.h` that the fake driver shares with its callers.

use std::ffi::{CStr, c_void};

macro_rules! codes {
    ($($name:ident = $value:literal $text:literal;)*) => {
        impl Code {
            $(#[allow(dead_code, reason = "some are only named, never given")]
            pub const $name: Code = Code($value);)*

            /// The name in `cuda.h`, as C text.
            pub fn name(self) -> Option<&'static CStr> {
                match self.0 {
                    $($value => CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()).ok(),)*
                    _ => None,
                }
            }
        }
    };
}

/// A `CUresult` that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub i32);

codes! {
    SUCCESS = 0 "CUDA_SUCCESS";
    INVALID_VALUE = 1 "CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2 "CUDA_ERROR_OUT_OF_MEMORY";
    NOT_INITIALIZED = 3 "CUDA_ERROR_NOT_INITIALIZED";
    DEVICE_UNAVAILABLE = 46 "CUDA_ERROR_DEVICE_UNAVAILABLE";
    NO_DEVICE = 100 "CUDA_ERROR_NO_DEVICE";
    INVALID_DEVICE = 101 "CUDA_ERROR_INVALID_DEVICE";
    INVALID_IMAGE = 200 "CUDA_ERROR_INVALID_IMAGE";
    INVALID_CONTEXT = 201 "CUDA_ERROR_INVALID_CONTEXT";
    MAP_FAILED = 205 "CUDA_ERROR_MAP_FAILED";
    ALREADY_MAPPED = 208 "CUDA_ERROR_ALREADY_MAPPED";
    NOT_MAPPED = 211 "CUDA_ERROR_NOT_MAPPED";
    ECC_UNCORRECTABLE = 214 "CUDA_ERROR_ECC_UNCORRECTABLE";
    PEER_ACCESS_UNSUPPORTED = 217 "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";
    INVALID_PTX = 218 "CUDA_ERROR_INVALID_PTX";
    OPERATING_SYSTEM = 304 "CUDA_ERROR_OPERATING_SYSTEM";
    INVALID_HANDLE = 400 "CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND = 500 "CUDA_ERROR_NOT_FOUND";
    NOT_READY = 600 "CUDA_ERROR_NOT_READY";
    ILLEGAL_ADDRESS = 700 "CUDA_ERROR_ILLEGAL_ADDRESS";
    LAUNCH_OUT_OF_RESOURCES = 701 "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    LAUNCH_TIMEOUT = 702 "CUDA_ERROR_LAUNCH_TIMEOUT";
    PEER_ACCESS_ALREADY_ENABLED = 704 "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
    PEER_ACCESS_NOT_ENABLED = 705 "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED";
    HOST_MEMORY_ALREADY_REGISTERED = 712 "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    HOST_MEMORY_NOT_REGISTERED = 713 "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    LAUNCH_FAILED = 719 "CUDA_ERROR_LAUNCH_FAILED";
    NOT_PERMITTED = 800 "CUDA_ERROR_NOT_PERMITTED";
    NOT_SUPPORTED = 801 "CUDA_ERROR_NOT_SUPPORTED";
    STREAM_CAPTURE_UNSUPPORTED = 900 "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    STREAM_CAPTURE_INVALIDATED = 901 "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    STREAM_CAPTURE_MERGE = 902 "CUDA_ERROR_STREAM_CAPTURE_MERGE";
    STREAM_CAPTURE_UNMATCHED = 903 "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
    STREAM_CAPTURE_IMPLICIT = 906 "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    CAPTURED_EVENT = 907 "CUDA_ERROR_CAPTURED_EVENT";
    STREAM_CAPTURE_WRONG_THREAD = 908 "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
    UNKNOWN = 999 "CUDA_ERROR_UNKNOWN";
}

/// What every call comes to.
pub type Outcome<T = ()> = Result<T, Code>;

/// `CU_STREAM_LEGACY`: the legacy default stream, also for callers that mean the per-thread one by
/// 0.
pub const STREAM_LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
pub const STREAM_PER_THREAD: usize = 2;
/// `CU_STREAM_NON_BLOCKING`.
pub const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_DISABLE_TIMING: u32 = 2;

/// `CUmemoryType`.
pub const MEMORY_HOST: u32 = 1;
/// `CUmemoryType`.
pub const MEMORY_DEVICE: u32 = 2;

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Uuid(pub [u8; 16]);

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; 64]);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

/// `CUmemLocationType` of a device.
pub const LOCATION_DEVICE: u32 = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProp {
    pub kind: u32,
    pub handle_types: u32,
    pub location: Location,
    pub win32: *mut c_void,
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: u32,
}
