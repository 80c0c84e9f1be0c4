//! The UCX link: flows over what libucp finds, InfiniBand, RoCE and shared memory. The library is loaded at run time; where
//! it is missing, everything else works and [`UcxRail::open`] says why this does not.
//!
//! A connection over UCX speaks the wire of the TCP link; `crate::tcp` has all that is said and checked. Pure parts here:
//! `card` is what two ends tell each other first, `window` puts messages in order, `report` reads what UCX prints,
//! `patience` is how long a wait lasts. Driver: `sys` is the library's interface, `worker` its calls, `desk` its callbacks,
//! `slots` all the memory that it sees, and `pipe` a stream of bytes made of its messages. Glue: `rail` and `flow`. Knows
//! transports and how bytes travel on them; must never know what is asked of a peer.

mod card;
mod desk;
mod error;
mod flow;
mod patience;
mod pipe;
mod process;
mod rail;
mod report;
mod slots;
mod sys;
#[cfg(test)]
mod tests;
mod window;
mod worker;

pub use error::UcxError;
pub use flow::UcxFlow;
pub use rail::{Fabric, RailOptions, UcxRail};
pub use report::{Lane, RailReport, Transport, WhyNot};

/// The library.
const LIBRARY: &std::ffi::CStr = c"libucp.so.0";
