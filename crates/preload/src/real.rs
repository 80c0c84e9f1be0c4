//! The functions that ours stand for. A program finds an entry point in one of three ways, and the
//! function that it gets from us calls exactly the one that it would have got without us. So other
//! interposers, before or behind us, keep their place, and no two can send a call back and forth.
//! Knows addresses, not what they do.

use crate::names::{FUNCTIONS, Function, LINKED, NAMES, WAYS, Way};
use crate::system::{RTLD_NEXT, file_of, loaded, next_of_version};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::AcqRel, Ordering::Acquire, Ordering::Release};

pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The `dlsym` behind ours, of another interposer or of the C library: where the assembly of
/// `dlsym` jumps to. Never null: before it is found, nothing is.
pub(crate) static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(find_nothing as *mut c_void);

/// The C library's, which alone answers `RTLD_NEXT` for whoever calls it.
static LIBC_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(find_nothing as *mut c_void);

static REAL: [[AtomicPtr<c_void>; FUNCTIONS]; WAYS] =
    [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; _] }; _];

/// The driver's own, for calls that come back to us.
static DRIVERS: [AtomicPtr<c_void>; FUNCTIONS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; _];

/// The first version of `dlsym` of each architecture, which all later C libraries have too, and the
/// one since it moved into libc. Only by a version can it be found without calling it, and
/// interposers have none.
#[cfg(target_arch = "x86_64")]
const DLSYM_VERSIONS: [&CStr; 2] = [c"GLIBC_2.2.5", c"GLIBC_2.34"];
#[cfg(target_arch = "aarch64")]
const DLSYM_VERSIONS: [&CStr; 2] = [c"GLIBC_2.17", c"GLIBC_2.34"];

unsafe extern "C" fn find_nothing(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    std::ptr::null_mut()
}

/// The `dlsym` behind ours. It is looked for by the first call; several may do so at once, and find
/// the same.
pub(crate) fn real_dlsym() -> Dlsym {
    if REAL_DLSYM.load(Acquire) == find_nothing as *mut c_void {
        let mut versions = DLSYM_VERSIONS.iter().map(|version| next_of_version(c"dlsym", version));
        if let Some(of_libc) = versions.find(|found| !found.is_null()) {
            LIBC_DLSYM.store(of_libc, Release);
            let next = look_up_next(c"dlsym");
            REAL_DLSYM.store(if next.is_null() { of_libc } else { next }, Release);
        }
    }
    as_dlsym(&REAL_DLSYM)
}

fn as_dlsym(place: &AtomicPtr<c_void>) -> Dlsym {
    // SAFETY: `find_nothing` or what the loader knows as `dlsym`: both have this signature.
    unsafe { std::mem::transmute::<*mut c_void, Dlsym>(place.load(Acquire)) }
}

/// What comes after this library under a name. The loader looks at where its call returns to, and
/// that is in here: the result is looked at, so that the call is not the last thing done and does
/// not become a jump.
pub(crate) fn look_up_next(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends in NUL.
    let found = unsafe { as_dlsym(&LIBC_DLSYM)(RTLD_NEXT, name.as_ptr()) };
    std::hint::black_box(found)
}

/// What the `dlsym` behind ours finds.
pub(crate) fn look_up(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the name ends in NUL; a bad handle is the program's, which would have passed it on
    // itself.
    unsafe { real_dlsym()(handle, name.as_ptr()) }
}

/// Our function for an entry point that was found in one way.
type Ours = fn(Way, Function) -> *mut c_void;

/// The function that ours stands for, if there is one.
#[inline]
pub(crate) fn real(way: Way, function: Function, ours: Ours) -> Option<*mut c_void> {
    let found = REAL.get(way)?.get(function)?.load(Acquire);
    if !found.is_null() {
        return Some(found);
    }
    if way == LINKED { find_linked(function, ours) } else { None }
}

/// What a program bound to our symbol was meant to be bound to: the next in the program's own list
/// or, if the driver was loaded later, the driver's.
#[cold]
pub(crate) fn find_linked(function: Function, ours: Ours) -> Option<*mut c_void> {
    let symbol = NAMES.get(function)?.symbol;
    real_dlsym();
    let mut found = look_up_next(symbol);
    if found.is_null() {
        found = look_up(driver_handle()?, symbol);
    }
    if found.is_null() || found == ours(LINKED, function) {
        return None;
    }
    REAL.first()?.get(function)?.store(found, Release);
    Some(found)
}

/// The driver's function, for a call by our symbol out of what ours had called: an interposer
/// behind us that looks at the whole program for the next function finds us, the first, and would
/// have the call go round for ever.
#[cold]
pub(crate) fn drivers(function: Function) -> Option<*mut c_void> {
    let slot = DRIVERS.get(function)?;
    if slot.load(Acquire).is_null() {
        let symbol = NAMES.get(function)?.symbol;
        // SAFETY: the name ends in NUL, and the handle is the driver's.
        slot.store(unsafe { as_dlsym(&LIBC_DLSYM)(driver_handle()?, symbol.as_ptr()) }, Release);
    }
    let found = slot.load(Acquire);
    (!found.is_null()).then_some(found)
}

/// Has our function stand for `found`. It does not if it stands for another one already: a second
/// driver or wrapper is in the program then.
pub(crate) fn stand_for(way: Way, function: Function, found: *mut c_void) -> bool {
    let Some(slot) = REAL.get(way).and_then(|slots| slots.get(function)) else { return false };
    match slot.compare_exchange(std::ptr::null_mut(), found, AcqRel, Acquire) {
        Ok(_) => true,
        Err(earlier) if earlier == found => true,
        // Unloaded since, as by those that only ask whether there is a driver: whoever still calls
        // it would crash anyway.
        Err(earlier) if file_of(earlier).is_none() => {
            slot.store(found, Release);
            true
        }
        Err(_) => false,
    }
}

/// A handle of the driver, if it is loaded: by its name, or else by the file of a function that
/// somebody found.
pub(crate) fn driver_handle() -> Option<*mut c_void> {
    loaded(c"libcuda.so.1").or_else(|| {
        let mut known = REAL.iter().flatten().map(|slot| slot.load(Acquire));
        loaded(file_of(known.find(|address| !address.is_null())?)?)
    })
}
