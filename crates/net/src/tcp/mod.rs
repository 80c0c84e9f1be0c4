//! The protocol with which memory of other processes and machines is read and written over a
//! connection. It runs over TCP and over every other carrier: shared memory, RDMA. One connection
//! is one *flow*, one link of the mover. `docs/reference/wire.md` describes the bytes.
//!
//! Pure parts: `runs`, `command`, `greeting` and `frame` are the bytes; `payload` is where they
//! lie; `exports` is what a node offers; `connection` turns bytes into frames and payload in place,
//! `requester` and `responder` say what the two ends do, with `call` and `service` for what is
//! asked beside memory, and `reads` and `writes` for what is under way at the owning end; bytes of
//! GPUs pass through `staging`. Driver: `socket`, with TLS over it in `tls` and `tls_session`.
//! Glue: [`Flow`], the asking end, and [`TcpServer`], the owning end, with a thread for each
//! connection. Knows the wire and whose memory is meant.

mod call;
mod carrier;
mod command;
mod connection;
mod error;
mod export;
mod exports;
mod flow;
mod flow_driver;
mod frame;
mod greeting;
mod handle;
mod leases;
mod payload;
mod peer;
mod reads;
mod requester;
mod responder;
mod runs;
mod server;
mod service;
#[cfg(test)]
mod simulation;
mod socket;
mod staging;
mod tls;
mod tls_session;
mod wake;
mod writes;

pub use call::{CALLS_WAITING_MAX, CallError};
pub use carrier::{Carrier, Ready, Wire};
pub(crate) use carrier::{Scatter, slice};
pub(crate) use command::{Command, Fault};
pub use command::{FaultCode, PeerRegion};
pub use error::{BadFrame, Broken, FlowError, OP_BYTES_MAX, SPANS_MAX, UnreachableReason, VERSION};
pub(crate) use export::OpKind;
pub use export::{Access, DeviceMemory};
pub(crate) use exports::Granted;
pub use exports::{ExportError, Exports};
pub use flow::Flow;
pub use frame::{CALL_BYTES_MAX, CALLS_MAX, DATA_BYTES_MAX, OPS_MAX, REGIONS_MAX};
pub use greeting::{Identity, Refusal, RefusalCode, TOKEN_BYTES_MAX};
pub use handle::{FlowHandle, FlowOptions, FlowStats, PeerInfo};
pub use leases::{LEASE_SPANS_MAX, LEASES_MAX, LeaseEnd, LeaseTable, LeasedSpan, NoLease};
pub use peer::PeerRegions;
pub use runs::BadRuns;
pub use server::{Acceptor, ServerOptions, ServerStats, TcpServer};
pub use service::{Reply, Service};
pub use staging::{STAGING_SLOTS, Stager, StagingMemory};
pub use tls::{SpeaksFor, TlsConfig, TlsError, is_beyond_loopback};
pub(crate) use wake::Event;
pub use wake::WakeUp;
