//! Endpoints: places of the mover that stand for peers. Each has link slots, links of the mover
//! that flows are bound to while they live. A mover never forgets a link, so a flow that has ended
//! leaves its slot to the next one, and a peer that is gone its endpoint.

use crate::device::DeviceWays;
use crate::error::AgentError;
use crate::flow_control::Advice;
use crate::ipc::link::{Bound, IpcLink};
use crate::peer_log::PeerLog;
use crate::peer_metrics::PeerMetrics;
use crate::tcp::{Flow, FlowHandle};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{
    Completion, Link, LinkId, LinkOp, LinkSpec, MAX_LOT_BYTES, Memory, MoverHandle, OpId, Outcome, PathSpec,
    Place,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Lots that may be on a flow: one travels while the next ones are made ready.
const WINDOW_LOTS: u32 = 3;
const WINDOW_BYTES: u64 = 64 << 20;
/// Lots between GPUs at a time: one is copied while others are granted and given back.
const IPC_WINDOW_LOTS: u32 = 8;
/// Each lot costs two questions to the owner.
const IPC_LOT_BYTES_MIN: u64 = 4 << 20;
const IPC_WINDOW_BYTES: u64 = IPC_WINDOW_LOTS as u64 * MAX_LOT_BYTES;

/// Told when another number of flows may be better.
pub(crate) type OnAdvice = Arc<dyn Fn(Advice) + Send + Sync>;

/// A flow, and the slot's accounts of it.
pub(crate) struct BoundFlow {
    /// The flow's among its peer's.
    pub number: u64,
    pub flow: Flow,
    pub handle: FlowHandle,
    pub path: &'static str,
    pub metrics: Arc<PeerMetrics>,
    pub log: Arc<PeerLog>,
    pub on_advice: OnAdvice,
}

/// A link of the mover: the flow that is bound to it now.
#[derive(Clone, Default)]
struct LinkSlot(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    by: Option<BoundFlow>,
    /// Gets what comes after the bound flow has broken, until somebody has seen to that.
    stand_in: Option<LinkSlot>,
}

impl Taken {
    /// The slot that lots go to instead. Those of a broken flow come back in the same moment, and
    /// would find no other.
    fn deputy(&self) -> Option<LinkSlot> {
        let broken = self.by.as_ref().is_some_and(|bound| bound.handle.stats().broken.is_some());
        self.stand_in.clone().filter(|_| broken)
    }
}

impl Link for LinkSlot {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let mut taken = self.0.lock();
        if let Some(mut deputy) = taken.deputy() {
            drop(taken);
            return deputy.start(op, memory, done);
        }
        let Some(bound) = taken.by.as_mut() else {
            return done.finish(Outcome::Failed { error: "there is no connection".into() });
        };
        let bytes = op.bytes;
        let path = bound.path;
        let began_us = bound.metrics.lot_began(path, bytes);
        let (metrics, on_advice) = (Arc::clone(&bound.metrics), Arc::clone(&bound.on_advice));
        let log = Arc::clone(&bound.log);
        let done = done.inspect(move |outcome| {
            if let Outcome::Corrupt = outcome {
                log.corrupt(path);
            }
            match metrics.lot_ended(path, began_us, bytes, outcome) {
                Advice::Stay => {}
                advice => on_advice(advice),
            }
        });
        bound.flow.start(op, memory, done);
    }

    fn cancel(&mut self, op: OpId) {
        let mut taken = self.0.lock();
        if let Some(bound) = taken.by.as_mut() {
            bound.flow.cancel(op);
        }
        // It may be there: a flow ignores operations that it does not have.
        if let Some(mut stand_in) = taken.stand_in.clone() {
            drop(taken);
            stand_in.cancel(op);
        }
    }
}

/// A place with its slots. While `uses` is held by others, regions are registered there, and nobody
/// else may have it.
pub(crate) struct Endpoint {
    pub place: Place,
    pub uses: Arc<()>,
    slots: Vec<(LinkId, LinkSlot)>,
    /// Where regions are that GPUs of this end reach by themselves, and the link of each.
    ipc: Option<IpcPlace>,
}

struct IpcPlace {
    place: Place,
    links: Vec<(Place, IpcLink)>,
}

impl Endpoint {
    /// Binds a flow to a slot and says to which. Once it breaks, what still comes goes to the slot
    /// `stand_in`, if it is given.
    pub fn bind(
        &mut self,
        pool: &EndpointPool,
        bound: BoundFlow,
        stand_in: Option<usize>,
    ) -> Result<usize, AgentError> {
        let stand_in = stand_in.and_then(|slot| self.slots.get(slot)).map(|(_, link_slot)| link_slot.clone());
        let empty = self.slots.iter().position(|(_, link_slot)| link_slot.0.lock().by.is_none());
        let slot = match empty {
            Some(slot) => slot,
            None => self.add_slot(pool)?,
        };
        let (link, link_slot) = &self.slots[slot];
        *link_slot.0.lock() = Taken { by: Some(bound), stand_in };
        pool.mover.set_link_up(*link, true)?;
        Ok(slot)
    }

    fn add_slot(&mut self, pool: &EndpointPool) -> Result<usize, AgentError> {
        let (link_slot, slot) = (LinkSlot::default(), self.slots.len());
        let spec = LinkSpec {
            op_timeout_us: pool.op_timeout_us,
            ..LinkSpec::new(format!("{:?}.{slot}", self.place), WINDOW_LOTS, WINDOW_BYTES)
        };
        let link = pool.mover.add_link(spec, Box::new(link_slot.clone()))?;
        pool.mover.add_path(PathSpec::direct(pool.here, self.place, link))??;
        pool.mover.add_path(PathSpec::direct(self.place, pool.here, link))??;
        pool.devices.add_link(self.place, link).inspect_err(|_| {
            // Nothing is bound to it, so nothing may go there.
            let _ = pool.mover.set_link_up(link, false);
        })?;
        self.slots.push((link, link_slot));
        Ok(slot)
    }

    /// A place for memory of the peer's GPUs, which the bound GPU of this end reaches by a link of
    /// its own. No other path leads there.
    pub fn ipc_place(&mut self, pool: &EndpointPool, bound: Bound) -> Result<Place, AgentError> {
        let new = || IpcPlace { place: pool.new_place(), links: Vec::new() };
        let IpcPlace { place, links } = self.ipc.get_or_insert_with(new);
        let (place, device) = (*place, bound.place);
        if let Some((_, link)) = links.iter().find(|(other, _)| *other == device) {
            link.bind(bound);
            return Ok(place);
        }
        let ipc_link = IpcLink::default();
        let name = format!("{device:?}.ipc.{:?}", self.place);
        let op_timeout_us = pool.op_timeout_us;
        let lot_bytes_min = IPC_LOT_BYTES_MIN;
        let spec = LinkSpec::new(name, IPC_WINDOW_LOTS, IPC_WINDOW_BYTES);
        let spec = LinkSpec { op_timeout_us, lot_bytes_min, ..spec };
        let link = pool.mover.add_link(spec, Box::new(ipc_link.clone()))?;
        pool.mover.add_path(PathSpec::direct(device, place, link))??;
        pool.mover.add_path(PathSpec::direct(place, device, link))??;
        ipc_link.bind(bound);
        links.push((device, ipc_link));
        Ok(place)
    }

    /// Has the mover use a slot, or not. What was begun there goes on.
    pub fn set_up(&self, pool: &EndpointPool, slot: usize, up: bool) {
        if let Some((link, _)) = self.slots.get(slot) {
            // A mover that has ended uses none.
            let _ = pool.mover.set_link_up(*link, up);
        }
    }

    /// Nothing new goes to this slot any more, if the flow of that number is there still: its peer
    /// may have had to give up its slots, and got them anew. The flow, to be dropped without any
    /// lock: that waits for what it has begun.
    pub fn unbind(&mut self, pool: &EndpointPool, slot: usize, number: u64) -> Option<Flow> {
        let (link, link_slot) = self.slots.get(slot)?;
        let is_bound = link_slot.0.lock().by.as_ref().is_some_and(|bound| bound.number == number);
        is_bound.then(|| vacate(pool, *link, link_slot)).flatten()
    }
}

fn vacate(pool: &EndpointPool, link: LinkId, link_slot: &LinkSlot) -> Option<Flow> {
    // A mover that has ended starts nothing new either.
    let _ = pool.mover.set_link_up(link, false);
    let taken = std::mem::take(&mut *link_slot.0.lock());
    taken.by.map(|bound| bound.flow)
}

/// Where peers get their places.
pub(crate) struct EndpointPool {
    mover: MoverHandle,
    here: Place,
    /// Ways of GPUs to all places of peers.
    pub devices: DeviceWays,
    /// How long a lot may be on a flow before it counts as lost: longer than flows themselves wait,
    /// so that it never does.
    op_timeout_us: u64,
    next: AtomicU32,
    free: Mutex<Vec<Endpoint>>,
}

impl EndpointPool {
    pub fn new(mover: MoverHandle, here: Place, op_timeout_us: u64) -> EndpointPool {
        let devices = DeviceWays::new(mover.clone(), here);
        EndpointPool { mover, here, devices, op_timeout_us, next: AtomicU32::new(0), free: Mutex::default() }
    }

    /// A place at which no region is registered.
    pub fn endpoint(&self) -> Endpoint {
        let mut free = self.free.lock();
        let at = free.iter().position(|endpoint| Arc::strong_count(&endpoint.uses) == 1);
        at.map(|at| free.swap_remove(at)).unwrap_or_else(|| Endpoint {
            place: self.new_place(),
            uses: Arc::default(),
            slots: Vec::new(),
            ipc: None,
        })
    }

    fn new_place(&self) -> Place {
        Place::Peer(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Takes back a place. The flows that are still bound, to be dropped as [`Endpoint::unbind`]
    /// says.
    #[must_use = "dropping flows waits for what they have begun"]
    pub fn take_back(&self, endpoint: Endpoint) -> Vec<Flow> {
        let left =
            endpoint.slots.iter().filter_map(|(link, link_slot)| vacate(self, *link, link_slot)).collect();
        self.free.lock().push(endpoint);
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::{Access, Exports, FlowOptions, Identity, PeerRegions, ServerOptions, TcpServer};
    use forebay_transfer::{Class, End, HostBuffer, Limits, MoverThread, Span, SpanPair, Transfer};

    fn identity(node: u8) -> Identity {
        Identity::starting([node; 16]).unwrap()
    }

    #[test]
    fn what_a_broken_flow_leaves_goes_to_its_stand_in_before_anybody_sees_to_it() {
        let exports = Arc::new(Exports::default());
        let offered = exports.offer(0, Arc::new(HostBuffer::new(4096)), Access::OPEN).unwrap();
        let local = ([127, 0, 0, 1], 0).into();
        let server = TcpServer::listen(local, identity(1), exports, None, ServerOptions::default()).unwrap();
        let thread = MoverThread::spawn(Limits::default()).unwrap();
        let (mover, here) = (thread.handle(), Place::Host(0));
        let (regions, me, metrics) = (PeerRegions::default(), identity(2), Arc::new(PeerMetrics::new(4)));
        let pool = EndpointPool::new(mover.clone(), here, 30_000_000);
        let mut endpoint = pool.endpoint();
        let mut handles = Vec::new();
        for stand_in in [None, Some(0)] {
            let options = FlowOptions::default();
            let (flow, _) = Flow::connect(server.address(), me, regions.clone(), options).unwrap();
            handles.push(flow.handle());
            let handle = flow.handle();
            let (metrics, on_advice) = (Arc::clone(&metrics), Arc::new(|_| {}));
            let number = handles.len() as u64;
            let log = Arc::new(PeerLog::of("two"));
            let bound = BoundFlow { number, flow, handle, path: "tcp", metrics, log, on_advice };
            endpoint.bind(&pool, bound, stand_in).unwrap();
        }
        endpoint.set_up(&pool, 0, false);
        let ours = mover.register(here, Arc::new(HostBuffer::new(4096))).unwrap();
        let theirs = regions.register(&mover, endpoint.place, offered, 0).unwrap();
        let pair = SpanPair::new(Span::new(ours, 0, 4096), Span::new(theirs, 0, 4096));
        for at in [1, 0] {
            let end = mover.run(Transfer::new(vec![pair], Class::Demand)).unwrap();
            assert_eq!(end, End::Done { bytes: 4096 });
            assert_eq!((handles[at].stats().done, handles[1 - at].stats().done), (1, 1 - at as u64));
            let (sender, receiver) = std::sync::mpsc::channel();
            handles[1].on_broken(move |_| sender.send(()).unwrap());
            handles[1].sever();
            receiver.recv().unwrap();
        }
    }
}
