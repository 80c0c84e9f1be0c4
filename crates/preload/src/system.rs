//! What of the C library is used, and lines for stderr that are put together without allocating.
//! Knows no CUDA.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// A handle of `dlsym` that means: what comes after the caller.
pub(crate) const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
/// A handle of `dlsym` that means: the first in the program.
pub(crate) const RTLD_DEFAULT: *mut c_void = std::ptr::null_mut();

const RTLD_LAZY: c_int = 1;
const RTLD_NOW: c_int = 2;
const RTLD_NOLOAD: c_int = 4;
const STDERR: c_int = 2;
const F_DUPFD_CLOEXEC: c_int = 1030;
/// Where descriptors of our own begin: scripts and programs number theirs from 3 on.
const OWN_FROM: c_int = 200;
#[cfg(target_arch = "x86_64")]
const SYS_FSTAT: c_long = 5;
#[cfg(target_arch = "aarch64")]
const SYS_FSTAT: c_long = 80;

#[repr(C)]
struct DlInfo {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

mod c {
    use super::{DlInfo, c_char, c_int, c_long, c_void};
    unsafe extern "C" {
        pub fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
        pub fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
        pub fn dlerror() -> *const c_char;
        pub fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
        pub fn secure_getenv(name: *const c_char) -> *const c_char;
        pub safe fn getpid() -> c_int;
        pub fn fcntl(file: c_int, command: c_int, ...) -> c_int;
        pub fn syscall(number: c_long, ...) -> c_long;
        pub fn write(file: c_int, bytes: *const c_void, count: usize) -> isize;
        pub safe fn pthread_atfork(
            prepare: Option<extern "C" fn()>,
            parent: Option<extern "C" fn()>,
            child: Option<extern "C" fn()>,
        ) -> c_int;
    }
}
pub(crate) use c::{getpid, pthread_atfork};

/// The address of `name` in one version, in what was loaded after this library.
pub(crate) fn next_of_version(name: &CStr, version: &CStr) -> *mut c_void {
    // SAFETY: both names end in NUL; the call only reads them.
    unsafe { c::dlvsym(RTLD_NEXT, name.as_ptr(), version.as_ptr()) }
}

/// Loads a library with all that it needs, or says why not. It stays loaded.
pub(crate) fn load(path: &CStr) -> Result<*mut c_void, &'static CStr> {
    // SAFETY: the path ends in NUL. What the library does while it is loaded is as trusted as this
    // one: it lies beside it.
    let handle = unsafe { c::dlopen(path.as_ptr(), RTLD_NOW) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: takes nothing; the text is this thread's until its next call, and is printed before.
    let text = unsafe { c::dlerror() };
    // SAFETY: not null, so it is text that ends in NUL.
    Err(if text.is_null() { c"not loaded" } else { unsafe { CStr::from_ptr(text) } })
}

/// A handle to a library that is loaded already. The library then stays loaded.
pub(crate) fn loaded(path: &CStr) -> Option<*mut c_void> {
    // SAFETY: the path ends in NUL; nothing is loaded and so nothing of another runs.
    let handle = unsafe { c::dlopen(path.as_ptr(), RTLD_LAZY | RTLD_NOLOAD) };
    (!handle.is_null()).then_some(handle)
}

/// The file that `address` was loaded from, if it still is.
pub(crate) fn file_of(address: *const c_void) -> Option<&'static CStr> {
    let nothing = std::ptr::null_mut();
    let mut info =
        DlInfo { file: std::ptr::null(), base: nothing, symbol: std::ptr::null(), address: nothing };
    // SAFETY: any address may be asked for; `info` is ours.
    let found = unsafe { c::dladdr(address, &mut info) } != 0 && !info.file.is_null();
    // SAFETY: the loader's text for a loaded file. Our own file and the driver's, which are asked
    // for, are not unloaded.
    found.then(|| unsafe { CStr::from_ptr(info.file) })
}

/// A variable of the environment; none in programs that gain rights when they start.
pub(crate) fn environment(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name ends in NUL.
    let value = unsafe { c::secure_getenv(name.as_ptr()) };
    // SAFETY: the environment's text, read at once; a program that changes it meanwhile breaks C's
    // rules for getenv.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

const LINE_BYTES: usize = 1024;

/// Bytes of fixed room. What does not fit is left out.
pub(crate) struct Line {
    bytes: [u8; LINE_BYTES],
    used: usize,
}

impl Line {
    pub(crate) const fn new() -> Line {
        Line { bytes: [0; LINE_BYTES], used: 0 }
    }

    /// Appends bytes; false if some did not fit.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        let room = self.bytes.get_mut(self.used..).unwrap_or_default();
        let taken = room.len().min(bytes.len());
        for (to, from) in room.iter_mut().zip(bytes) {
            *to = *from;
        }
        self.used += taken;
        taken == bytes.len()
    }

    /// As text for C, unless it is full: then something may be missing.
    pub(crate) fn as_c(&self) -> Option<&CStr> {
        // SAFETY: what is not used is zero, so that the text ends within `bytes`, which it borrows.
        (self.used < LINE_BYTES).then(|| unsafe { CStr::from_ptr(self.bytes.as_ptr().cast()) })
    }

    /// Writes it to what stderr was when the descriptor was kept. Nothing is to be done if that
    /// fails.
    pub(crate) fn print(&self) {
        let file = line_file();
        if file >= 0 {
            // SAFETY: `used` bytes of `bytes` are set, and `used` is never more than there are.
            unsafe { c::write(file, self.bytes.as_ptr().cast(), self.used) };
        }
    }
}

/// What does not fit is no error.
impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

const NOT_KEPT: c_int = -2;
const NO_FILE: c_int = -1;

/// A descriptor of our own for lines, and which file it is: a program may close all descriptors and
/// open others.
static LINES: AtomicI32 = AtomicI32::new(NOT_KEPT);
static LINES_ARE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Keeps what stderr is now for lines: number 2 may be any file later.
pub(crate) fn keep_stderr() {
    if LINES.load(Acquire) != NOT_KEPT {
        return;
    }
    // SAFETY: it makes a descriptor, or fails. The kernel chooses a number that nobody has.
    let kept =
        [OWN_FROM, STDERR + 1].into_iter().map(|from| unsafe { c::fcntl(STDERR, F_DUPFD_CLOEXEC, from) });
    let kept = kept.into_iter().find(|kept| *kept >= 0).unwrap_or(NO_FILE);
    if let Some(identity) = identity(kept) {
        for (place, number) in LINES_ARE.iter().zip(identity) {
            place.store(number, Relaxed);
        }
    }
    LINES.store(kept, Release);
}

/// The descriptor for lines, as long as it is what it was; below 0: none.
pub(crate) fn line_file() -> c_int {
    keep_stderr();
    let kept = LINES.load(Acquire);
    let is = identity(kept);
    let was = [LINES_ARE[0].load(Relaxed), LINES_ARE[1].load(Relaxed)];
    if is == Some(was) { kept } else { NO_FILE }
}

/// Device and inode of an open file.
fn identity(file: c_int) -> Option<[u64; 2]> {
    // `struct stat` of the kernel, which begins with these two. Old C libraries have no `fstat` to
    // link to.
    let mut status = [0_u64; 32];
    // SAFETY: the kernel writes 144 bytes at most; any number may be asked about.
    let result = unsafe { c::syscall(SYS_FSTAT, file as c_long, status.as_mut_ptr()) };
    (file >= 0 && result == 0).then_some([status[0], status[1]])
}

#[cfg(test)]
mod tests {
    use super::{LINE_BYTES, Line};

    #[test]
    fn a_line_leaves_out_what_does_not_fit() {
        let mut line = Line::new();
        assert!(line.push(&[b'x'; LINE_BYTES - 1]));
        assert!(line.as_c().is_some());
        assert!(!line.push(b"yz"));
        assert!(line.as_c().is_none(), "something is missing");
    }
}
