//! The entry points of the driver that are ours to answer, and by which questions programs get
//! them: the symbol of the shared library, or a name, a version and flags for `cuGetProcAddress`. A
//! question that is not in the table is the driver's to answer: the next major version may give the
//! same name another signature. Knows no addresses.

use std::ffi::CStr;

/// Index of an entry point in [`NAMES`].
pub(crate) type Function = usize;

/// How the program found an entry point.
pub(crate) type Way = usize;
/// The dynamic linker bound the symbol to ours.
pub(crate) const LINKED: Way = 0;
/// `dlsym` on a library's handle.
pub(crate) const LOOKED_UP: Way = 1;
/// `cuGetProcAddress`.
pub(crate) const ASKED: Way = 2;
pub(crate) const WAYS: usize = 3;
pub(crate) const WAY_NAMES: [&str; WAYS] = ["link", "dlsym", "cuGetProcAddress"];

/// Direction of a copy, as the copying library reads it.
pub(crate) const HOST_TO_DEVICE: u32 = 0;
pub(crate) const DEVICE_TO_HOST: u32 = 1;
pub(crate) const DIRECTION_UNKNOWN: u32 = 2;

/// How a copy is asked for, as the copying library reads it.
pub(crate) const SYNCHRONOUS: u32 = 1;
pub(crate) const PER_THREAD: u32 = 2;

/// Flags of `cuGetProcAddress`: none, the legacy default stream, a default stream for each thread.
const FLAG_LEGACY: u64 = 1;
const FLAG_PER_THREAD: u64 = 2;
/// From this version on, default streams of threads exist.
const PER_THREAD_SINCE: i32 = 7000;
/// Versions from here on are not known yet.
const UNKNOWN_SINCE: i32 = 14000;

pub(crate) struct Name {
    /// The symbol that `libcuda.so.1` exports.
    pub symbol: &'static CStr,
    /// What `cuGetProcAddress` calls it.
    base: &'static CStr,
    /// The versions that mean this one: from `since` to below `before`.
    since: i32,
    before: i32,
    pub direction: u32,
    /// [`SYNCHRONOUS`], [`PER_THREAD`].
    pub flags: u32,
}

/// How many there are, and how many of them copy: those come first.
pub(crate) const FUNCTIONS: usize = 22;
pub(crate) const COPIES: usize = 16;

const fn name(
    symbol: &'static CStr,
    base: &'static CStr,
    versions: (i32, i32),
    direction: u32,
    flags: u32,
) -> Name {
    Name { symbol, base, since: versions.0, before: versions.1, direction, flags }
}

const ALWAYS: (i32, i32) = (4000, UNKNOWN_SINCE);
const WIDE_ADDRESSES: (i32, i32) = (3020, UNKNOWN_SINCE);
const FIRST_RESET: (i32, i32) = (7000, 11000);
const RESET: (i32, i32) = (11000, UNKNOWN_SINCE);
const BATCH: (i32, i32) = (12080, 13000);
const BATCH_V2: (i32, i32) = (13000, UNKNOWN_SINCE);

/// All of them, in the order of `entries`.
pub(crate) static NAMES: [Name; FUNCTIONS] = [
    name(c"cuMemcpy", c"cuMemcpy", ALWAYS, DIRECTION_UNKNOWN, SYNCHRONOUS),
    name(c"cuMemcpy_ptds", c"cuMemcpy", ALWAYS, DIRECTION_UNKNOWN, SYNCHRONOUS | PER_THREAD),
    name(c"cuMemcpyHtoD_v2", c"cuMemcpyHtoD", WIDE_ADDRESSES, HOST_TO_DEVICE, SYNCHRONOUS),
    name(c"cuMemcpyHtoD_v2_ptds", c"cuMemcpyHtoD", WIDE_ADDRESSES, HOST_TO_DEVICE, SYNCHRONOUS | PER_THREAD),
    name(c"cuMemcpyDtoH_v2", c"cuMemcpyDtoH", WIDE_ADDRESSES, DEVICE_TO_HOST, SYNCHRONOUS),
    name(c"cuMemcpyDtoH_v2_ptds", c"cuMemcpyDtoH", WIDE_ADDRESSES, DEVICE_TO_HOST, SYNCHRONOUS | PER_THREAD),
    name(c"cuMemcpyAsync", c"cuMemcpyAsync", ALWAYS, DIRECTION_UNKNOWN, 0),
    name(c"cuMemcpyAsync_ptsz", c"cuMemcpyAsync", ALWAYS, DIRECTION_UNKNOWN, PER_THREAD),
    name(c"cuMemcpyHtoDAsync_v2", c"cuMemcpyHtoDAsync", WIDE_ADDRESSES, HOST_TO_DEVICE, 0),
    name(c"cuMemcpyHtoDAsync_v2_ptsz", c"cuMemcpyHtoDAsync", WIDE_ADDRESSES, HOST_TO_DEVICE, PER_THREAD),
    name(c"cuMemcpyDtoHAsync_v2", c"cuMemcpyDtoHAsync", WIDE_ADDRESSES, DEVICE_TO_HOST, 0),
    name(c"cuMemcpyDtoHAsync_v2_ptsz", c"cuMemcpyDtoHAsync", WIDE_ADDRESSES, DEVICE_TO_HOST, PER_THREAD),
    name(c"cuMemcpyBatchAsync", c"cuMemcpyBatchAsync", BATCH, DIRECTION_UNKNOWN, 0),
    name(c"cuMemcpyBatchAsync_ptsz", c"cuMemcpyBatchAsync", BATCH, DIRECTION_UNKNOWN, PER_THREAD),
    name(c"cuMemcpyBatchAsync_v2", c"cuMemcpyBatchAsync", BATCH_V2, DIRECTION_UNKNOWN, 0),
    name(c"cuMemcpyBatchAsync_v2_ptsz", c"cuMemcpyBatchAsync", BATCH_V2, DIRECTION_UNKNOWN, PER_THREAD),
    name(c"cuGetProcAddress", c"cuGetProcAddress", (11030, 12000), DIRECTION_UNKNOWN, 0),
    name(c"cuGetProcAddress_v2", c"cuGetProcAddress", (12000, UNKNOWN_SINCE), DIRECTION_UNKNOWN, 0),
    name(c"cuCtxEnablePeerAccess", c"cuCtxEnablePeerAccess", ALWAYS, DIRECTION_UNKNOWN, 0),
    name(c"cuCtxDisablePeerAccess", c"cuCtxDisablePeerAccess", ALWAYS, DIRECTION_UNKNOWN, 0),
    name(c"cuDevicePrimaryCtxReset", c"cuDevicePrimaryCtxReset", FIRST_RESET, DIRECTION_UNKNOWN, 0),
    name(c"cuDevicePrimaryCtxReset_v2", c"cuDevicePrimaryCtxReset", RESET, DIRECTION_UNKNOWN, 0),
];

/// The entry point that the shared library exports as `symbol`.
pub(crate) fn by_symbol(symbol: &CStr) -> Option<Function> {
    NAMES.iter().position(|name| name.symbol == symbol)
}

/// The entry point that `cuGetProcAddress` gives for `base`, a version and flags.
pub(crate) fn by_query(base: &CStr, version: i32, flags: u64) -> Option<Function> {
    let per_thread = match flags {
        0 | FLAG_LEGACY => false,
        FLAG_PER_THREAD => true,
        _ => return None,
    };
    let function = NAMES.iter().enumerate().position(|(index, name)| {
        // What copies nothing has no twin for threads. For those that look up, flags are of what
        // they find.
        let twin_fits = index >= COPIES || (name.flags & PER_THREAD != 0) == per_thread;
        twin_fits && (name.since..name.before).contains(&version) && name.base == base
    })?;
    (function >= COPIES || !per_thread || version >= PER_THREAD_SINCE).then_some(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queried(base: &CStr, version: i32, flags: u64) -> Option<&'static str> {
        by_query(base, version, flags).map(|function| NAMES[function].symbol.to_str().unwrap())
    }

    #[test]
    fn a_version_chooses_the_signature_of_a_batch() {
        let batch = c"cuMemcpyBatchAsync";
        for (version, flags, symbol) in [
            (12070, 0, None),
            (12080, 0, Some("cuMemcpyBatchAsync")),
            (12090, 1, Some("cuMemcpyBatchAsync")),
            (12080, 2, Some("cuMemcpyBatchAsync_ptsz")),
            (13000, 0, Some("cuMemcpyBatchAsync_v2")),
            (13020, 2, Some("cuMemcpyBatchAsync_v2_ptsz")),
            (14000, 0, None),
        ] {
            assert_eq!(queried(batch, version, flags), symbol, "version {version}, flags {flags}");
        }
    }

    #[test]
    fn a_question_that_is_not_known_is_left_to_the_driver() {
        assert_eq!(queried(c"cuMemcpyHtoDAsync", 2000, 0), None, "32-bit addresses");
        assert_eq!(queried(c"cuMemcpyHtoDAsync", 3020, 2), None, "no streams of threads yet");
        assert_eq!(queried(c"cuMemcpyHtoDAsync", 7000, 4), None, "a flag of the future");
        assert_eq!(queried(c"cuMemcpyHtoDAsync_v2", 3020, 0), None, "a symbol is not a name");
        assert_eq!(queried(c"cuMemcpy2DAsync", 7000, 0), None);
        assert_eq!(by_symbol(c"cuMemcpyHtoDAsync"), None, "32-bit addresses");
        assert_eq!(by_symbol(c"cuMemcpyPeerAsync"), None);
    }

    #[test]
    fn what_the_cuda_runtime_asks_is_known() {
        for (base, version, flags, symbol) in [
            (c"cuMemcpy", 4000, 0, "cuMemcpy"),
            (c"cuMemcpy", 7000, 2, "cuMemcpy_ptds"),
            (c"cuMemcpyAsync", 4000, 0, "cuMemcpyAsync"),
            (c"cuMemcpyAsync", 7000, 2, "cuMemcpyAsync_ptsz"),
            (c"cuMemcpyHtoD", 3020, 0, "cuMemcpyHtoD_v2"),
            (c"cuMemcpyDtoH", 7000, 2, "cuMemcpyDtoH_v2_ptds"),
            (c"cuMemcpyHtoDAsync", 3020, 0, "cuMemcpyHtoDAsync_v2"),
            (c"cuMemcpyDtoHAsync", 7000, 2, "cuMemcpyDtoHAsync_v2_ptsz"),
            (c"cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
            (c"cuGetProcAddress", 12000, 2, "cuGetProcAddress_v2"),
            (c"cuGetProcAddress", 13000, 0, "cuGetProcAddress_v2"),
            (c"cuCtxEnablePeerAccess", 4000, 0, "cuCtxEnablePeerAccess"),
            (c"cuCtxDisablePeerAccess", 4000, 2, "cuCtxDisablePeerAccess"),
            (c"cuDevicePrimaryCtxReset", 7000, 0, "cuDevicePrimaryCtxReset"),
            (c"cuDevicePrimaryCtxReset", 11000, 0, "cuDevicePrimaryCtxReset_v2"),
        ] {
            assert_eq!(queried(base, version, flags), Some(symbol), "{base:?} {version} {flags}");
        }
    }
}
