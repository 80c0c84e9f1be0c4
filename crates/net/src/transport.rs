//! A transport carries the bytes of a connection in place of a socket: shared memory, RDMA, and so
//! on. This file is the contract between transports and everything else.
//!
//! TCP is no transport in this sense. Every peer is reached over TCP first, and that connection
//! carries control; what two agents have in common beside it is found out there, and bytes move to
//! the best of it. Where a transport fails, bytes go over TCP, with the reason kept, counted and
//! logged.
//!
//! # How to add a transport
//!
//! 1. Write a module with a type that is a [`Transport`], one that is an [`OpenTransport`], and one
//!    that is a [`Carrier`] and so a [`Wire`](crate::tcp::Wire): a stream of bytes that never
//!    waits. Both traits are in `tcp/carrier.rs`. `tests/transport.rs` of this crate has a small
//!    complete transport.
//! 2. Add `mod` for it to `lib.rs`, and add it to the list in `transports.rs`, with a `use`. A
//!    program may also give an agent a transport of its own:
//!    [`RailOptions`](crate::RailOptions) takes any.
//! 3. Give it a `code` that no other transport has or had: 1, 2 and 3 are taken by UCX
//!    (`ucx/fabric.rs`). Add the code to `docs/reference/wire.md`.
//! 4. Add its name to the types of `forebay.Rail` in `python/forebay/_forebay.pyi`, to the table
//!    and the list of `paths` in `docs/python.md`, to the tables in
//!    `docs/reference/configuration.md` and `bench/README.md`, to the example in `docs/node.md`, to
//!    the help of `--rail` in `tools/bench/src/net.rs`, and to comments in `crates/py/src/rail.rs`
//!    and `crates/node/src/config/peers.rs`.
//! 5. Three tests hold an error's text with all names, `"memory", "rdma" and "tcp"`. Change it in
//!    `crates/node/src/config/tests.rs`, `crates/cli/tests/bench_net.rs` and
//!    `tests/test_py_rails.py`.
//!
//! Configuration, the command line, Python, metrics and stats take the names from its
//! [`TransportInfo`]. The protocol of `docs/reference/wire.md` runs on every
//! carrier, so checks of identity, leases, bounds and checksums, limits, TLS and accounting are not
//! a transport's business.
//!
//! A carrier is handed the addresses of each send and receive. One that needs registered memory
//! keeps it to itself, as `ucx/buffers.rs` does: no peer ever learns an address from here
//! (`docs/decisions/020-transports-behind-one-trait.md`).

use crate::tcp::{Acceptor, Broken, Carrier, Flow, FlowOptions, Identity, PeerInfo, PeerRegions};
use std::fmt;
use thiserror::Error;

/// What is known of a transport before it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransportInfo {
    /// Its name in configuration: `memory`.
    pub name: &'static str,
    /// The label of its bytes in metrics and stats: `ucx_memory`.
    pub path: &'static str,
    /// How agents name it to each other. Never reused for another one.
    pub code: u8,
    /// Bytes go over the transport with the lowest rank of those that work. Where ranks are equal,
    /// the rail that the agent was given first is tried first.
    pub rank: u8,
    pub reach: Reach,
}

/// Whom a transport reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Processes of the same host. Silence there means that the peer itself is frozen.
    Host,
    /// Other hosts, over a network of its own, which may fail while the peer lives.
    Network,
}

pub trait Transport: Send + Sync {
    /// What is known of it without opening it.
    fn info(&self) -> TransportInfo;

    /// Opens it on these devices, named as the transport names them; none: on all.
    fn open(&self, devices: &[String]) -> Result<Box<dyn OpenTransport>, TransportError>;
}

/// A transport that is open. Connections are made on it, from any thread.
pub trait OpenTransport: Send + Sync {
    /// Makes an endpoint, has `exchange` bring its description to the peer's
    /// [`accept`](OpenTransport::accept) and the answer back, and joins the two. Descriptions mean
    /// something to the transport only. Both travel over a connection on which the two agents know
    /// each other.
    fn connect(&self, exchange: &mut Exchange<'_>) -> Result<Connected, TransportError>;

    /// Makes an endpoint that is joined to the offered one: its carrier, and the answer to the
    /// offer.
    fn accept(&self, offer: &[u8]) -> Result<(Box<dyn Carrier>, Vec<u8>), TransportError>;
}

/// Brings an offer to the peer, and its answer back.
pub type Exchange<'a> = dyn FnMut(Vec<u8>) -> Result<Vec<u8>, TransportError> + 'a;

/// An endpoint that is joined to a peer's.
pub struct Connected {
    pub carrier: Box<dyn Carrier>,
    /// Which hardware carries them, and why no other does, for people.
    pub report: String,
}

/// Why a transport carries nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TransportError {
    #[error("{0}")]
    Failed(String),
    #[error("the peer took no offer: {0}")]
    Declined(String),
    #[error("the greeting failed: {0}")]
    Greeting(Broken),
    #[error("this end's server has ended")]
    NoServer,
}

/// Connects over a rail and greets the peer: the connection as a link of a mover, who is at the
/// other end, and which hardware carries it.
pub fn connect(
    transport: &dyn OpenTransport,
    me: Identity,
    regions: PeerRegions,
    options: &FlowOptions,
    mut exchange: impl FnMut(Vec<u8>) -> Result<Vec<u8>, TransportError>,
) -> Result<(Flow, PeerInfo, String), TransportError> {
    let Connected { carrier, report } = transport.connect(&mut exchange)?;
    let (flow, peer) = Flow::over(carrier, me, regions, options).map_err(TransportError::Greeting)?;
    Ok((flow, peer, report))
}

/// Takes up a peer's offer: what comes over the new connection is served as if it had come through
/// the server's port. The offer must come from a peer that was let in: transports believe what it
/// says.
pub fn accept(
    transport: &dyn OpenTransport,
    acceptor: &Acceptor,
    offer: &[u8],
) -> Result<Vec<u8>, TransportError> {
    let (carrier, answer) = transport.accept(offer)?;
    if acceptor.adopt(carrier) { Ok(answer) } else { Err(TransportError::NoServer) }
}

impl fmt::Debug for dyn Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.info().name)
    }
}
