//! One end in one process: memory that is offered to peers, peers that are reached when they are
//! needed, and requests that read and write their memory. An [`Agent`] is what a program has one
//! of. The bytes are moved by a [`forebay_transfer`] mover over flows, and never touched here.
//!
//! | file | what |
//! |---|---|
//! | `agent`, `config` | what a program calls |
//! | `memory`, `addresses`, `descriptors`, `prepared`, `metadata` | memory by address, and what peers are told of it |
//! | `request`, `notify`, `notifications`, `call_handler`, `about` | what goes to a peer and comes from one |
//! | `peer`, `connect`, `connection_state`, `flow_control` | the way to a peer: flows come about, end, and are more or fewer |
//! | [`transport`], `transports`, `rails`, `capabilities`, `upgrade` | what carries bytes beside TCP, and which of it two ends share |
//! | `endpoints`, `device`, `timer`, `bytes` | places, GPUs and links of the mover; what is due; fields of messages |
//! | `stat`, `peer_metrics`, `peer_log`, `error` | what is told: snapshots, counts, log lines, reasons |
//! | `ipc`, `host_process` | GPUs of one host that copy by themselves |
//! | [`tcp`] | a flow: the protocol of `docs/reference/wire.md` on a socket, or on what stands in for one |
//! | [`ucx`] | transports over libucp |
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

mod about;
mod addresses;
mod agent;
mod bytes;
mod call_handler;
mod capabilities;
mod config;
mod connect;
mod connection_state;
mod descriptors;
mod device;
mod endpoints;
mod error;
mod flow_control;
mod host_process;
mod ipc;
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
    Access, CallError, Identity, LEASE_SPANS_MAX, LEASES_MAX, LeaseEnd, LeaseTable, LeasedSpan, NoLease,
    PeerRegion, RefusalCode, Reply, STAGING_SLOTS, ServerStats, Service, StagingMemory, TlsConfig, TlsError,
    UnreachableReason,
};
pub use about::About;
pub use agent::{Agent, Prepared};
pub use capabilities::{RAILS_MAX, WhyIdle};
pub use config::AgentConfig;
pub use descriptors::{BLOCKS_MAX, BadRun, Descriptors, Run, Select};
pub use device::{Device, FLOW_SLOT_BYTES, FLOW_SLOTS};
pub use error::{AgentError, PeerError, Unreachable};
pub use forebay_transfer::mapped::Absent;
pub use memory::Registration;
pub use metadata::{BadMetadata, NAME_BYTES_MAX, address_in};
pub use notifications::{
    NOTIFICATION_BYTES_MAX, NOTIFICATIONS_MAX, NOTIFICATIONS_OPEN_BYTES_MAX, NOTIFICATIONS_OPEN_MAX,
};
pub use peer::TCP;
pub use peer_metrics::{Counts, Histogram, IPC, PathCounts, Stages};
pub use prepared::{BadBlocks, Op};
pub use request::{End, Request, State};
pub use stat::{FlowStat, IdleRail, PeerStat};
pub use transports::{NoSuchTransport, RailOptions, TRANSPORTS};
