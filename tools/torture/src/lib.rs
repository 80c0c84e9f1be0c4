//! Torture for stores of KV: faults, crashes and misuse, judged by the bytes that come back.
//!
//! A store under test runs in a worker, a process that speaks the [`protocol`] on its standard
//! input and output. The suite puts values whose every byte it can predict, does harm to the files,
//! the system calls or the process, and judges each value that comes back. A store may always have
//! lost a value; it may never return another, hang, or take more disk than it was given. Workers
//! for Forebay's disk tier, for a node with a client, for a store of one file per object and for
//! LMCache's local disk backend are included; any other store needs a worker of its own.
//!
//! Knows bytes, files and processes.

mod case;
mod cases;
mod disk;
pub mod faults;
pub mod faulty_kernel;
mod misdirected;
mod model;
pub mod power;
pub mod protocol;
mod random;
pub mod report;
mod rig;
pub mod serve;
pub mod subjects;
pub mod suite;
mod value;
pub mod worker;

pub use report::{Outcome, Report};
pub use rig::{Scale, Seen};
pub use suite::{Store, Suite};
