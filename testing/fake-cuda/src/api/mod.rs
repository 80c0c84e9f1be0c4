//! The entry points, as `cuda.h` declares them. These files know signatures, argument checks and which state a call asks
//! for; they must never know how it is kept.

mod context;
mod control;
mod copy;
mod device;
mod event;
mod graph;
mod ipc;
mod memory;
mod module;
mod procs;
mod stream;
mod vmm;
