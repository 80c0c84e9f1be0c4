//! A CUDA runtime for tests of interposition: `libcudart.so.13` as far as copies need it. It knows
//! how the real runtime finds the driver, and does the same: `dlopen("libcuda.so.1")`,
//! `dlsym("cuGetProcAddress_v2")`, then each entry point by name, version and flags.

mod driver;
mod runtime;
