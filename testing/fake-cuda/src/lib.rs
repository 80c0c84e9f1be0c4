//! A CUDA driver without a GPU, for tests. It is loaded as `libcuda.so.1` and knows what programs
//! may rely on of the real one: streams are in order and nothing else is, copies move their bytes
//! when they run and not when they are posted, device memory is nobody's to dereference, errors
//! stick to contexts. It moves real bytes with real threads over links whose rates are settings,
//! runs the kernels that it knows by name, fails on request, and reports what a program must not do
//! even where a real driver would let it pass.
//!
//! Everything is one `driver::State` behind one lock. A call (in `api`) checks its arguments and
//! enqueues operations (`op`, `queue`); an operation runs when all that it is ordered after has
//! ended, on an engine's thread (`engine`), in pieces that take as long as the links say (`links`).
//! Whether two operations that touch the same bytes are ordered at all is checked with vector
//! clocks (`order`).
//!
//! Settings (environment): `FAKE_CUDA_GPUS` (4), `FAKE_CUDA_MEMORY_MIB` of each (8192),
//! `FAKE_CUDA_VERSION` (13000), `FAKE_CUDA_NAME` (`Fake H200`), `FAKE_CUDA_RATES`
//! (`h2d=2,d2h=2,p2p=12,host_h2d=6,host_d2h=6,h2d.1=0.5`, GB/s; not given: as fast as memcpy),
//! `FAKE_CUDA_FAULTS` (commands as of `commands`, separated by `;`), `CUDA_VISIBLE_DEVICES`
//! (ordinals).
//!
//! For tests in the same process, beside the driver's own symbols:
//! `fake_cuda_control(command) -> int`, `fake_cuda_stat(name) -> u64`, `fake_cuda_misuse() -> u64`,
//! `fake_cuda_report(buffer, bytes) -> u64`.

mod abi;
mod api;
mod caller;
mod capture;
mod clock;
mod commands;
mod driver;
mod engine;
mod entry;
mod faults;
mod kernels;
mod links;
mod memory;
mod misuse;
mod op;
mod order;
mod queue;
mod settings;
mod stats;
mod stream;
mod waits;
