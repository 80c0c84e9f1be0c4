//! `libforebay_preload.so`: loaded into a program by `LD_PRELOAD`, it stands between the program
//! and the CUDA driver and offers large copies to the library that knows several links,
//! `libforebay_cuda.so`. What that declines, the driver does.
//!
//! It knows the driver's entry points for copies by name and version, and how programs find them.
//! It never moves a byte, never calls CUDA before the program's first large copy. Every process
//! that a program starts loads it, so it has no dependency and does nothing at start but ask to be
//! told of forks.
//!
//! Pure parts: `names`, `reason`. Driver: `system`, `real` and `driver` (addresses and calls of
//! others), `dlsym` and `entries` (what others call). Glue: `mode`, `library`, `offer`, `counts`,
//! `process`.

// In a test of the pure parts nothing is exported, so nobody calls most of it.
#![cfg_attr(test, allow(dead_code))]

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the hook of dlsym is written for x86_64 and aarch64");

mod counts;
mod dlsym;
mod driver;
mod entries;
mod library;
mod mode;
mod names;
mod offer;
mod process;
mod real;
mod reason;
mod system;
