//! Flows over UCX, from both ends. The wire is that of `docs/reference/wire.md`: greeting, operations, leases, CRCs and limits are the
//! TCP link's own; only what carries the bytes is another. This file introduces the ends to each other.

use super::card::Card;
use super::error::UcxError;
use super::pipe::Pipe;
use super::rail::{UcxRail, machine};
use super::report::{Lane, RailReport, left};
use crate::tcp::{Door, FlowHandle, FlowOptions, Identity, Peer, PeerRegions, TcpFlow};
use forebay_transfer::{Completion, Link, LinkOp, Memory, OpId};
use std::sync::Arc;

/// A flow over UCX as a link of a mover.
///
/// ```no_run
/// use crate::tcp::*;
/// use crate::ucx::*;
/// # fn ask(_offer: Vec<u8>) -> Result<Vec<u8>, String> { Err("nobody".into()) }
/// let rail = UcxRail::open(RailOptions { fabric: Fabric::Rdma, devices: vec!["mlx5_0:1".into()] })?;
/// let me = Identity::starting([2; 16])?;
/// // `ask` carries the offer to the peer, over a connection on which the two know each other, and brings its answer.
/// let (flow, peer) = UcxFlow::connect(&rail, me, PeerRegions::default(), FlowOptions::default(), ask)?;
/// println!("{}", flow.report()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct UcxFlow {
    flow: TcpFlow,
    rail: UcxRail,
    lanes: Vec<Lane>,
}

impl UcxFlow {
    /// Makes an offer, has `exchange` bring it to the peer and the peer's answer back, and waits until the peer has let this
    /// end in. Both are secrets of the two ends.
    pub fn connect(
        rail: &UcxRail,
        me: Identity,
        regions: PeerRegions,
        options: FlowOptions,
        exchange: impl FnOnce(Vec<u8>) -> Result<Vec<u8>, String>,
    ) -> Result<(UcxFlow, Peer), UcxError> {
        let (mut pipe, own) = Pipe::new(&rail.context)?;
        let answer = exchange(own.to_bytes()).map_err(|why| UcxError::Exchange { why })?;
        pipe.connect(&Card::parse(&answer, &own)?)?;
        let lanes = pipe.lanes();
        let over = TcpFlow::over(Box::new(pipe), me, regions, &options);
        let (flow, peer) = over.map_err(UcxError::Greeting)?;
        Ok((UcxFlow { flow, rail: rail.clone(), lanes }, peer))
    }

    /// Speaks to the flow after it was given to a mover.
    pub fn handle(&self) -> FlowHandle {
        self.flow.handle()
    }

    /// Which transports carry the flow, and why the others of this machine do not.
    pub fn report(&self) -> Result<RailReport, UcxError> {
        let context = &self.rail.context;
        let (fabric, taken) = (context.options.fabric, self.lanes.clone());
        let left = left(fabric, machine()?, &context.transports, &taken);
        Ok(RailReport { fabric, version: context.ucp.release(), taken, left })
    }
}

impl Link for UcxFlow {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        self.flow.start(op, memory, done);
    }

    fn cancel(&mut self, op: OpId) {
        self.flow.cancel(op);
    }
}

impl UcxRail {
    /// Takes up a peer's offer: opens a connection that the door's server serves as one that came through its port, with the
    /// same greeting, limits and counts. The answer is the peer's, over the connection on which its offer came.
    ///
    /// UCX believes what an offer says, so it must come from a peer that was let in.
    pub fn answer(&self, door: &Door, offer: &[u8]) -> Result<Vec<u8>, UcxError> {
        let (mut pipe, own) = Pipe::new(&self.context)?;
        pipe.connect(&Card::parse(offer, &own)?)?;
        if door.adopt(Box::new(pipe)) { Ok(own.to_bytes()) } else { Err(UcxError::NoServer) }
    }

    /// Pipes that UCX had not let go of when their time was over. Their slots are never used again.
    pub fn quarantined(&self) -> u64 {
        self.context.quarantined()
    }
}
