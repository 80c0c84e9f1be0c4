//! The entry points, as `cuda.h` declares them.

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
