//! How bytes move: regions, transfers, lots, links, paths, and the schedule that joins them.
//!
//! Every movement is a [`Transfer`]. A transfer is cut into *lots*; lots are pulled by *paths*; a
//! path is one or more hops joined by staging slots; a hop runs on a *link*; every link has a
//! bounded window. [`Mover`] is that schedule as a sans-IO state machine: it is told the time and
//! what completed, and says what to start next. [`MoverThread`] runs one `Mover` on a thread of its
//! own over real [`Link`]s.
//!
//! # Example
//!
//! A mover with one link, driven by hand:
//!
//! ```
//! use forebay_transfer::*;
//!
//! let mut mover = Mover::new(Limits::default());
//! let host = mover.add_region(Place::Host(0), 4096);
//! let device = mover.add_region(Place::Device(0), 4096);
//! let link = mover.add_link(LinkSpec::new("pcie0", 2, 64 << 20));
//! mover.add_path(PathSpec::direct(Place::Host(0), Place::Device(0), link))?;
//!
//! let pair = SpanPair::new(Span::new(host, 0, 4096), Span::new(device, 0, 4096));
//! let transfer = mover.submit(0, Transfer::new(vec![pair], Class::Demand))?;
//!
//! let start = mover.poll(0).expect("an idle path pulls the lot at once");
//! mover.complete(10, start.op, Outcome::Moved { bytes: 4096 });
//! assert_eq!(mover.next_event(), Some(Event::Ended(transfer, End::Done { bytes: 4096 })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod alarm;
mod arena;
mod backoff;
mod combining_lock;
mod driver;
mod flips;
mod host;
mod inbox;
mod ipc;
mod link;
pub mod listen;
pub mod lock;
mod log_gate;
mod lot;
pub mod mapped;
mod memory;
mod mover;
mod path;
mod process;
mod queue;
mod raisable;
mod region;
pub mod size;
mod split_mix;
mod telemetry;
mod thread;
mod trace_context;
mod transfer;

pub use arena::{Arena, ArenaError, Pages};
pub use backoff::Backoff;
pub use combining_lock::{CombiningLock, Left, PostError};
pub use driver::{Completion, Link, LinkOp, Outcome};
pub use flips::{BitFlips, ChanceError};
pub use host::{HostLink, MAX_COPY_THREADS};
pub use inbox::{Inbox, Waker};
pub use ipc::{Ipc, OnCopied};
pub use link::{LinkId, LinkSpec};
pub use log_gate::LogGate;
pub use lot::{MAX_LOT_BYTES, MIN_LOT_BYTES, PAGE_BYTES};
pub use memory::{Backing, HostBuffer, Memory};
pub use mover::{Event, Limits, Mover, OpId, Start};
pub use path::{Hop, PathError, PathId, PathSpec, Staging};
pub use process::{Forked, InProcess, Process};
pub use queue::STARVE_LOTS;
pub use raisable::RaisableClass;
pub use region::{Place, Refused, RegionId, Span, SpanPair};
pub use split_mix::SplitMix;
pub use telemetry::{ClassTelemetry, LinkTelemetry, Telemetry};
pub use thread::{Closed, MoverHandle, MoverThread, SubmitError, Submitted};
pub use trace_context::TraceContext;
pub use transfer::{Class, End, Failure, Reason, Transfer, TransferId};
