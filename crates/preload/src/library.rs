//! The copying library: found, loaded and asked to start by the first copy that is large enough, at
//! a moment when that is allowed; never tried twice. Knows its interface (`include/forebay_copy.h`)
//! and where it lies.

use crate::driver::Driver;
use crate::real::{Dlsym, real_dlsym};
use crate::reason::Reason;
use crate::system::{Line, environment, file_of, getpid, line_file, load};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{
    AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};

const ABI: u32 = 2;
const FILE: &[u8] = b"libforebay_cuda.so";
const FILE_VARIABLE: &CStr = c"FOREBAY_CUDA_LIBRARY";

/// Copies below this size do not start the library. It then says itself from where on copies are
/// its.
const STARTS_FROM_BYTES: u64 = 2 << 20;

/// `bytes` from one address to another.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
}

type CopyFunction = unsafe extern "C" fn(*const Pair, u64, u32, *mut c_void, u32, *mut i32) -> i32;

/// What the library offers: `forebay_copy_api`.
#[repr(C)]
pub(crate) struct CopyApi {
    abi: u32,
    size: u32,
    /// The library may change it at any time.
    min_bytes: AtomicU64,
    copy: Option<CopyFunction>,
    /// The program's calls of these names, with what they would have called.
    pub enable_peer: unsafe extern "C" fn(*mut c_void, u32, EnablePeer) -> i32,
    pub disable_peer: unsafe extern "C" fn(*mut c_void, DisablePeer) -> i32,
    /// The program is about to reset the primary context of a GPU.
    pub reset: unsafe extern "C" fn(i32),
}

type EnablePeer = unsafe extern "C" fn(*mut c_void, u32) -> i32;
type DisablePeer = unsafe extern "C" fn(*mut c_void) -> i32;
type Open = unsafe extern "C" fn(Dlsym, *mut c_void, i32) -> *const CopyApi;

const NOT_TRIED: u32 = 0;
const STARTING: u32 = 1;
const READY: u32 = 2;
const MISSING: u32 = 3;
const STAYS_OUT: u32 = 4;
const FORKED: u32 = 5;

static STATE: AtomicU32 = AtomicU32::new(NOT_TRIED);
static API: AtomicPtr<CopyApi> = AtomicPtr::new(std::ptr::null_mut());
static OWNER: AtomicI32 = AtomicI32::new(0);

/// The library, if a copy of `bytes` is for it.
#[inline]
pub(crate) fn wanted(bytes: u64, stream: *mut c_void, flags: u32) -> Result<&'static CopyApi, Reason> {
    // SAFETY: null, or the library's own object, which is there until the process ends: it is never
    // unloaded.
    let api = unsafe { API.load(Acquire).as_ref() };
    let min_bytes = api.map_or(STARTS_FROM_BYTES, |api| api.min_bytes.load(Relaxed));
    if bytes < min_bytes || bytes == 0 {
        return Err(Reason::SMALL);
    }
    match api {
        // A process made by a bare clone(2) was not told that it is another.
        Some(api) if OWNER.load(Relaxed) == getpid() => Ok(api),
        Some(_) => Err(Reason::FORKED),
        None => start(stream, flags),
    }
}

/// The library, if it was opened by this process.
pub(crate) fn opened() -> Option<&'static CopyApi> {
    // SAFETY: as above.
    let api = unsafe { API.load(Acquire).as_ref() };
    api.filter(|_| OWNER.load(Relaxed) == getpid())
}

impl CopyApi {
    /// Offers a copy: what the driver's call would have returned, or why not.
    pub(crate) fn copy(
        &self,
        pairs: &[Pair],
        direction: u32,
        stream: *mut c_void,
        flags: u32,
    ) -> Result<i32, Reason> {
        let copy = self.copy.ok_or(Reason::FAULT)?;
        let mut result = 0;
        // SAFETY: the library's function, by its interface; `pairs` and `result` are valid until it
        // returns.
        let declined =
            unsafe { copy(pairs.as_ptr(), pairs.len() as u64, direction, stream, flags, &mut result) };
        if declined == 0 { Ok(result) } else { Err(Reason::of_library(declined)) }
    }
}

/// In a process that was forked. If the library had started, its threads and the driver are the
/// parent's: stay out for good.
pub(crate) fn forked() {
    if STATE.load(Acquire) != NOT_TRIED {
        STATE.store(FORKED, Release);
        API.store(std::ptr::null_mut(), Release);
    }
}

#[cold]
fn start(stream: *mut c_void, flags: u32) -> Result<&'static CopyApi, Reason> {
    not_tried()?;
    let driver = Driver::at_rest(stream, flags)?;
    if STATE.compare_exchange(NOT_TRIED, STARTING, AcqRel, Acquire).is_err() {
        return Err(not_tried().err().unwrap_or(Reason::STARTING));
    }
    OWNER.store(getpid(), Relaxed);
    match open(driver) {
        Ok(api) => {
            API.store(std::ptr::from_ref(api).cast_mut(), Release);
            STATE.store(READY, Release);
            Ok(api)
        }
        Err(state) => {
            STATE.store(state, Release);
            Err(not_tried().err().unwrap_or(Reason::NO_LIBRARY))
        }
    }
}

/// An error once the library was tried.
fn not_tried() -> Result<(), Reason> {
    match STATE.load(Acquire) {
        NOT_TRIED => Ok(()),
        MISSING => Err(Reason::NO_LIBRARY),
        STAYS_OUT => Err(Reason::STAYS_OUT),
        FORKED => Err(Reason::FORKED),
        _ => Err(Reason::STARTING),
    }
}

/// Loads and opens the library, or gives the state that is left.
fn open(driver: Driver) -> Result<&'static CopyApi, u32> {
    let mut path = Line::new();
    let Some(file) = library_path(&mut path) else {
        complain(b"its path", b"too long, or not to be found");
        return Err(MISSING);
    };
    let library = load(file).map_err(|why| {
        complain(file.to_bytes(), why.to_bytes());
        MISSING
    })?;
    let found = crate::real::look_up(library, c"forebay_copy_open");
    if found.is_null() {
        complain(file.to_bytes(), b"has no forebay_copy_open");
        return Err(MISSING);
    }
    // SAFETY: the symbol's signature, by the library's interface.
    let opener = unsafe { std::mem::transmute::<*mut c_void, Open>(found) };
    // SAFETY: a context is current, and nobody's capture is disturbed. What comes back lives as
    // long as the process.
    let api = driver
        .relaxed(|| unsafe { opener(real_dlsym(), driver.handle, line_file()).as_ref() })
        .ok_or(STAYS_OUT)?;
    if api.abi != ABI || (api.size as usize) < size_of::<CopyApi>() || api.copy.is_none() {
        complain(file.to_bytes(), b"is not of this version");
        return Err(STAYS_OUT);
    }
    Ok(api)
}

/// What the user says, or the file beside this library.
fn library_path(path: &mut Line) -> Option<&CStr> {
    if let Some(file) = environment(FILE_VARIABLE) {
        return path.push(file.to_bytes()).then(|| path.as_c()).flatten();
    }
    let own = file_of(library_path as *const c_void)?.to_bytes();
    let folder = own.get(..=own.iter().rposition(|&byte| byte == b'/')?)?;
    let whole = path.push(folder) && path.push(FILE);
    whole.then(|| path.as_c()).flatten()
}

/// Says why copies stay the driver's: once in a process, since the library is tried once.
fn complain(file: &[u8], why: &[u8]) {
    let mut line = Line::new();
    for part in [b"forebay: copies are left to the driver: ", file, b": ", why, b"\n"] {
        line.push(part);
    }
    line.print();
}
