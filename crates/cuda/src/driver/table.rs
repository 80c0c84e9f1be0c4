//! The table of driver functions, filled when the driver is loaded. Each is asked for by its plain
//! name and the version whose ABI is meant, so the driver itself picks the variant.

use super::abi::*;
use libc::{c_char, c_int, c_uint, c_void};

/// The version of the interface that the signatures below are of: the oldest driver that is
/// supported.
pub const VERSION: c_int = 12_040;

macro_rules! table {
    ($($name:ident: $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions of one loaded driver.
        pub struct Table {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        /// Their names.
        #[allow(non_upper_case_globals)]
        impl Table {
            $(pub const $name: &str = $symbol;)*
        }

        impl Table {
            /// Fills every entry, or gives the name of the first that `find` lacks.
            pub(super) fn fill(
                mut find: impl FnMut(&'static str) -> Option<*mut c_void>,
            ) -> Result<Table, &'static str> {
                Ok(Table {
                    $($name: {
                        let found = find($symbol).filter(|found| !found.is_null()).ok_or($symbol)?;
                        // SAFETY: the driver gives the function of this name with the ABI of
                        // `VERSION`, whose signature the table states; it is not null.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> Status>(found) }
                    },)*
                })
            }
        }
    };
}

/// Calls a function of a driver, which a failure names. Calling it is as unsafe as the function.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $driver.check($crate::driver::Table::$name, ($driver.table().$name)($($argument),*))
    };
}
pub(crate) use call;

table! {
    init: "cuInit" (c_uint);
    driver_version: "cuDriverGetVersion" (*mut c_int);
    error_name: "cuGetErrorName" (Status, *mut *const c_char);

    device_count: "cuDeviceGetCount" (*mut c_int);
    device_get: "cuDeviceGet" (*mut DeviceId, c_int);
    device_name: "cuDeviceGetName" (*mut c_char, c_int, DeviceId);
    device_uuid: "cuDeviceGetUuid" (*mut Uuid, DeviceId);
    device_attribute: "cuDeviceGetAttribute" (*mut c_int, c_int, DeviceId);
    device_bus_id: "cuDeviceGetPCIBusId" (*mut c_char, c_int, DeviceId);
    device_total_memory: "cuDeviceTotalMem" (*mut Size, DeviceId);
    device_can_access_peer: "cuDeviceCanAccessPeer" (*mut c_int, DeviceId, DeviceId);
    device_p2p_attribute: "cuDeviceGetP2PAttribute" (*mut c_int, c_int, DeviceId, DeviceId);

    primary_context_retain: "cuDevicePrimaryCtxRetain" (*mut ContextHandle, DeviceId);
    primary_context_release: "cuDevicePrimaryCtxRelease" (DeviceId);
    primary_context_state: "cuDevicePrimaryCtxGetState" (DeviceId, *mut c_uint, *mut c_int);
    context_push: "cuCtxPushCurrent" (ContextHandle);
    context_pop: "cuCtxPopCurrent" (*mut ContextHandle);
    context_current: "cuCtxGetCurrent" (*mut ContextHandle);
    context_device: "cuCtxGetDevice" (*mut DeviceId);
    context_enable_peer: "cuCtxEnablePeerAccess" (ContextHandle, c_uint);
    context_priorities: "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);

    memory_allocate: "cuMemAlloc" (*mut Address, Size);
    memory_free: "cuMemFree" (Address);
    memory_info: "cuMemGetInfo" (*mut Size, *mut Size);
    host_allocate: "cuMemHostAlloc" (*mut *mut c_void, Size, c_uint);
    host_free: "cuMemFreeHost" (*mut c_void);
    host_register: "cuMemHostRegister" (*mut c_void, Size, c_uint);
    host_unregister: "cuMemHostUnregister" (*mut c_void);
    host_device_address: "cuMemHostGetDevicePointer" (*mut Address, *mut c_void, c_uint);
    pointer_attributes: "cuPointerGetAttributes" (c_uint, *const c_int, *const *mut c_void, Address);
    ipc_export: "cuIpcGetMemHandle" (*mut IpcHandle, Address);
    ipc_open: "cuIpcOpenMemHandle" (*mut Address, IpcHandle, c_uint);
    ipc_close: "cuIpcCloseMemHandle" (Address);

    copy_async: "cuMemcpyAsync" (Address, Address, Size, StreamHandle);
    set_async: "cuMemsetD8Async" (Address, u8, Size, StreamHandle);

    stream_create: "cuStreamCreateWithPriority" (*mut StreamHandle, c_uint, c_int);
    stream_destroy: "cuStreamDestroy" (StreamHandle);
    stream_query: "cuStreamQuery" (StreamHandle);
    stream_synchronize: "cuStreamSynchronize" (StreamHandle);
    stream_wait_event: "cuStreamWaitEvent" (StreamHandle, EventHandle, c_uint);
    stream_context: "cuStreamGetCtx" (StreamHandle, *mut ContextHandle);
    stream_id: "cuStreamGetId" (StreamHandle, *mut u64);
    stream_is_capturing: "cuStreamIsCapturing" (StreamHandle, *mut c_int);

    capture_mode_exchange: "cuThreadExchangeStreamCaptureMode" (*mut c_int);

    event_create: "cuEventCreate" (*mut EventHandle, c_uint);
    event_destroy: "cuEventDestroy" (EventHandle);
    event_record: "cuEventRecord" (EventHandle, StreamHandle);
    event_query: "cuEventQuery" (EventHandle);
    event_synchronize: "cuEventSynchronize" (EventHandle);
    event_elapsed: "cuEventElapsedTime" (*mut f32, EventHandle, EventHandle);

    module_load: "cuModuleLoadData" (*mut ModuleHandle, *const c_void);
    module_unload: "cuModuleUnload" (ModuleHandle);
    module_function: "cuModuleGetFunction" (*mut FunctionHandle, ModuleHandle, *const c_char);
    launch: "cuLaunchKernel" (
        FunctionHandle,
        c_uint, c_uint, c_uint,
        c_uint, c_uint, c_uint,
        c_uint,
        StreamHandle,
        *mut *mut c_void,
        *mut *mut c_void
    );
}
