//! QEMU's NVMe controller as a fixture for tests: somebody else's reading of the specification, to
//! hold against our commands and queues. A test writes registers, doorbells, queues and data as a
//! driver does; no guest system, root or KVM is needed.
//!
//! QEMU runs under TCG with a firmware of ours, which only relays accesses to registers. The
//! guest's memory is shared with the test's process, so queues, PRP lists, SGLs and data are plain
//! memory there. [`Drive`], [`Queue`] and [`Shape`] are a driver for tests, made of
//! `forebay-ring`'s commands, lists and queues.
//!
//! A QEMU that is installed is used. Otherwise apt-get fetches Debian's packages into the target
//! folder, once; nothing is installed.
//!
//! [`GpuDriver`] has a GPU drive a pair of queues by itself: QEMU's, or those of our own controller
//! ([`SoftDrive`]).
//!
//! # What it cannot show
//! * Doorbells go through shared memory and the firmware. That a store of a CPU or GPU to a BAR
//!   reaches a device over PCIe, and in which order, is not tested.
//! * DMA is a copy within host memory: nothing is shown about DMA into GPU memory, IOMMUs or
//!   peer-to-peer PCIe.
//! * QEMU lets pass what the specification forbids: a PRP1 that is not aligned to a dword, an SGL
//!   longer than its transfer, DMA to addresses without memory, a doorbell beyond its queue.
//! * QEMU 7.2 refuses some lists that are right: chains of SGL segments whose last two before the
//!   last one are of one size. [`Shape`] makes none of these.
//! * Time: the guest is emulated, so rates and latencies say nothing about a drive.

mod drive;
mod error;
mod firmware;
mod gpu;
mod mailbox;
mod memory;
mod packages;
mod qemu;
mod queue;
mod round_trip;
mod shape;
mod soft;

pub use drive::Drive;
pub use error::Error;
pub use gpu::{Counts, GpuDriver, NotDriven, QueuePlaces};
pub use memory::GuestMemory;
pub use qemu::{AdminQueues, Qemu, Settings};
pub use queue::Queue;
pub use round_trip::{Place, round_trip};
pub use shape::{Area, Shape};
pub use soft::SoftDrive;
