//! The hook of `dlsym`: programs that load the driver themselves (Python's ctypes, cuda-bindings,
//! the CUDA runtime, static or not) get our functions for the entry points that we know. All else
//! goes to the next `dlsym` by a jump.
//!
//! A jump, since the C library takes the address that a call returns to for its caller, and answers
//! `RTLD_NEXT` by it. A call from here would send another interposer's `dlsym(RTLD_NEXT, ...)` back
//! to that interposer, for ever.

use crate::entries::{entry, hand_out};
use crate::mode::{Mode, mode};
use crate::names::{LINKED, LOOKED_UP, by_symbol};
use crate::offer::is_inside;
use crate::real::{REAL_DLSYM, find_linked, look_up, look_up_next, real_dlsym};
use crate::system::{RTLD_DEFAULT, RTLD_NEXT};
use std::ffi::{CStr, c_char, c_void};

/// What `answer` says to the assembly, in two registers.
#[repr(C)]
struct Answer {
    address: *mut c_void,
    /// 0: not ours, jump to the next.
    decided: usize,
}

const NOT_OURS: Answer = Answer { address: std::ptr::null_mut(), decided: 0 };

#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8", // calls are made with the stack at a multiple of 16
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jnz 2f",
        "mov rax, [rip + {real}]",
        "jmp rax",
        "2:",
        "ret",
        answer = sym answer,
        real = sym REAL_DLSYM,
    )
}

#[cfg(target_arch = "aarch64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "hint #34", // bti c
        "stp x29, x30, [sp, #-32]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {answer}",
        "mov x9, x0",
        "mov x10, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbnz x10, 2f",
        "adrp x16, {real}",
        "ldr x16, [x16, :lo12:{real}]",
        "br x16",
        "2:",
        "mov x0, x9",
        "ret",
        answer = sym answer,
        real = sym REAL_DLSYM,
    )
}

/// Whether we are switched off, as far as it matters for a name. Programs without CUDA do not read
/// the mode.
fn mode_is_off(name: &CStr) -> bool {
    let is_ours = name == c"dlsym" || name.to_bytes().starts_with(b"cu");
    is_ours && mode() == Mode::Off
}

/// What is found under a name as if we were not there: we are the first in the program, and the
/// next after us would be found.
fn behind(handle: *mut c_void, name: &CStr) -> Answer {
    let found = look_up(handle, name);
    let is_own = found == dlsym as *mut c_void
        || by_symbol(name).is_some_and(|function| found == entry(LINKED, function));
    if is_own && !found.is_null() { Answer { address: look_up_next(name), decided: 1 } } else { NOT_OURS }
}

/// Decides a call of `dlsym`. Afterwards [`REAL_DLSYM`] is known, if it can be.
unsafe extern "C" fn answer(handle: *mut c_void, name: *const c_char) -> Answer {
    real_dlsym();
    // Whoever asks for the next after itself must not be given us, who may lie before it.
    if handle == RTLD_NEXT || name.is_null() {
        return NOT_OURS;
    }
    // SAFETY: the caller's name for `dlsym` ends in NUL.
    let name = unsafe { CStr::from_ptr(name) };
    if mode_is_off(name) {
        return behind(handle, name);
    }
    if !name.to_bytes().starts_with(b"cu") || is_inside() {
        return NOT_OURS;
    }
    let Some(function) = by_symbol(name) else { return NOT_OURS };
    let found = look_up(handle, name);
    if found == entry(LINKED, function) {
        // The whole program was asked, and we are the first in it. Without a driver the right
        // answer is the next: there is none, with the text for dlerror.
        let there = find_linked(function, entry).is_some();
        return Answer { address: if there { found } else { look_up(RTLD_NEXT, name) }, decided: 1 };
    }
    if handle == RTLD_DEFAULT {
        return Answer { address: found, decided: 1 };
    }
    Answer { address: hand_out(LOOKED_UP, function, found), decided: 1 }
}
