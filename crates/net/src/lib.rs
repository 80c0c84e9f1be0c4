//! One end in one process: memory that is offered to peers, peers that are reached when they are needed, and requests that
//! read and write their memory. An [`Agent`] is what a program has one of.
//!
//! Pure parts: `addresses`, `descriptors`, `prepared` and `metadata` are memory by address; `line` is the way to a peer,
//! `flows` how many connections it deserves, `capabilities` which rails two ends have in common, `notifications` what was said already,
//! `leases` who may use what until when. Glue: `agent`, `peer`, `connect`, `upgrade`, `rails`, `request`, `notify`, `calls`,
//! and `timer`, a thread that sleeps until something is due. The bytes are moved by a [`forebay_transfer`] over flows of
//! [`crate::tcp`], each on a socket or on a [`transport`], and never touched here.
//!
//! Knows who has which memory, and when to speak to whom. Must never know what the bytes mean or who in the cluster has them.
//!
//! # Example
//!
//! ```
//! use forebay_net::*;
//! use forebay_transfer::HostBuffer;
//! use std::sync::{Arc, mpsc};
//!
//! let (one, two) = (Agent::start(AgentConfig::named("one"))?, Agent::start(AgentConfig::named("two"))?);
//! let (ours, theirs) = (Arc::new(HostBuffer::new(8192)), Arc::new(HostBuffer::new(8192)));
//! theirs.write(4096, &[7; 4096]);
//! let (here, there) = (one.register(ours.clone(), Access::OPEN)?, two.register(theirs, Access::OPEN)?);
//!
//! // The metadata travel by any way; nothing is connected before it is needed.
//! let peer = one.add_peer(&two.metadata())?;
//! let local = one.prepare_local(&Descriptors::from_blocks([(here.base(), 4096)])?)?;
//! let remote = one.prepare_remote(&peer, &Descriptors::from_blocks([(there.base() + 4096, 4096)])?)?;
//! let done = Some(b"done".to_vec());
//! let request = one.request(Op::Read, (&local, Select::All), (&remote, Select::All), done, None)?;
//! let (sender, receiver) = mpsc::channel();
//! request.post(move |end| drop(sender.send(end)))?;
//!
//! assert_eq!(receiver.recv()?, End::Done { bytes: 4096 });
//! assert_eq!(two.take_notifications(), [("one".to_string(), b"done".to_vec())]);
//! let mut bytes = [0; 4096];
//! assert!(ours.read(0, &mut bytes) && bytes == [7; 4096]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod addresses;
mod agent;
mod bytes;
mod call_handler;
mod capabilities;
mod config;
mod connect;
mod connection_state;
mod descriptors;
mod endpoints;
mod error;
mod event;
mod flow_control;
mod leases;
mod memory;
mod metadata;
mod notifications;
mod notify;
mod peer;
mod peer_log;
mod peer_metrics;
mod prepared;
mod rails;
mod request;
mod shared;
mod stat;
pub mod tcp;
mod timer;
pub mod transport;
mod transports;
pub mod ucx;
mod upgrade;

pub use crate::tcp::{
    Access, CallError, Identity, PeerRegion, RefusalCode, Reply, ServerStats, Service, TlsConfig, TlsError,
    Unreached,
};
pub use agent::{Agent, Prepared};
pub use capabilities::{RAILS_MAX, WhyIdle};
pub use config::AgentConfig;
pub use descriptors::{BLOCKS_MAX, BadRun, Descriptors, Run, Select};
pub use error::{AgentError, NotReached, PeerError};
pub use forebay_transfer::mapped::Absent;
pub use leases::{LEASE_SPANS_MAX, LEASES_MAX, LeaseEnd, LeaseTable, LeasedSpan, NoLease};
pub use memory::Registration;
pub use metadata::{BadMetadata, NAME_BYTES_MAX};
pub use notifications::{
    NOTIFICATION_BYTES_MAX, NOTIFICATIONS_MAX, NOTIFICATIONS_OPEN_BYTES_MAX, NOTIFICATIONS_OPEN_MAX,
};
pub use peer::TCP;
pub use peer_metrics::{Counts, Histogram, PathCounts, Stages};
pub use prepared::{BadBlocks, Op};
pub use request::{End, Request, StageTimes, State};
pub use stat::{FlowStat, IdleRail, PeerStat};
pub use transports::{NoSuchTransport, RailOptions, TRANSPORTS};
