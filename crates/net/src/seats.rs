//! Places of the mover that stand for peers, and seats there: links of the mover in which flows sit while they live. A mover
//! never forgets a link, so a flow that has ended leaves its seat to the next one, and a peer that has ended its place. This
//! file knows who sits where; it must never know whom a flow connects to.

use crate::flows::Advice;
use crate::gauge::Gauge;
use crate::tcp::FlowHandle;
use crate::trouble::AgentError;
use forebay_transfer::{
    Completion, Link, LinkId, LinkOp, LinkSpec, Memory, MoverHandle, OpId, Outcome, PathSpec, Place,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Lots that may be on a flow: one travels while the next ones are made ready.
const WINDOW_LOTS: u32 = 3;
const WINDOW_BYTES: u64 = 64 << 20;

/// Told when another number of flows may be better.
pub(crate) type OnAdvice = Arc<dyn Fn(Advice) + Send + Sync>;

/// Whoever sits in a seat.
pub(crate) struct Sitter {
    /// The flow's among its peer's.
    pub number: u64,
    pub flow: Box<dyn Link>,
    pub handle: FlowHandle,
    pub path: &'static str,
    pub gauge: Arc<Gauge>,
    pub on_advice: OnAdvice,
}

/// A link of the mover: who sits in it now.
#[derive(Clone, Default)]
struct Chair(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    by: Option<Sitter>,
    /// Gets what comes after the sitter's flow has broken, until somebody has seen to that.
    stand_in: Option<Chair>,
}

impl Taken {
    /// The chair that lots go to instead. Those of a broken flow come back in the same moment, and would find no other.
    fn deputy(&self) -> Option<Chair> {
        let broken = self.by.as_ref().is_some_and(|sitter| sitter.handle.stats().broken.is_some());
        self.stand_in.clone().filter(|_| broken)
    }
}

impl Link for Chair {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let mut taken = self.0.lock();
        if let Some(mut deputy) = taken.deputy() {
            drop(taken);
            return deputy.start(op, memory, done);
        }
        let Some(sitter) = taken.by.as_mut() else {
            return done.finish(Outcome::Failed { error: "there is no connection".into() });
        };
        let bytes = op.bytes;
        let path = sitter.path;
        let began_us = sitter.gauge.lot_began(path, bytes);
        let (gauge, on_advice) = (Arc::clone(&sitter.gauge), Arc::clone(&sitter.on_advice));
        let done = done.inspect(move |outcome| match gauge.lot_ended(path, began_us, bytes, outcome) {
            Advice::Stay => {}
            advice => on_advice(advice),
        });
        sitter.flow.start(op, memory, done);
    }

    fn cancel(&mut self, op: OpId) {
        let mut taken = self.0.lock();
        if let Some(sitter) = taken.by.as_mut() {
            sitter.flow.cancel(op);
        }
        // It may be there: a flow ignores operations that it does not have.
        if let Some(mut stand_in) = taken.stand_in.clone() {
            drop(taken);
            stand_in.cancel(op);
        }
    }
}

/// A place with its seats. While `uses` is held by others, regions are registered there, and nobody else may have it.
pub(crate) struct Berth {
    pub place: Place,
    pub uses: Arc<()>,
    seats: Vec<(LinkId, Chair)>,
}

impl Berth {
    /// Seats a flow and says where. Once it breaks, what still comes goes to the seat `stand_in`, if it is given.
    pub fn seat(
        &mut self,
        yard: &Yard,
        sitter: Sitter,
        stand_in: Option<usize>,
    ) -> Result<usize, AgentError> {
        let stand_in = stand_in.and_then(|seat| self.seats.get(seat)).map(|(_, chair)| chair.clone());
        let empty = self.seats.iter().position(|(_, chair)| chair.0.lock().by.is_none());
        let seat = match empty {
            Some(seat) => seat,
            None => self.add_seat(yard)?,
        };
        let (link, chair) = &self.seats[seat];
        *chair.0.lock() = Taken { by: Some(sitter), stand_in };
        yard.mover.set_link_up(*link, true)?;
        Ok(seat)
    }

    fn add_seat(&mut self, yard: &Yard) -> Result<usize, AgentError> {
        let (chair, seat) = (Chair::default(), self.seats.len());
        let spec = LinkSpec {
            op_timeout_us: yard.op_timeout_us,
            ..LinkSpec::new(format!("{:?}.{seat}", self.place), WINDOW_LOTS, WINDOW_BYTES)
        };
        let link = yard.mover.add_link(spec, Box::new(chair.clone()))?;
        yard.mover.add_path(PathSpec::direct(yard.here, self.place, link))??;
        yard.mover.add_path(PathSpec::direct(self.place, yard.here, link))??;
        self.seats.push((link, chair));
        Ok(seat)
    }

    /// Has the mover use a seat, or not. What was begun there goes on.
    pub fn set_up(&self, yard: &Yard, seat: usize, up: bool) {
        if let Some((link, _)) = self.seats.get(seat) {
            // A mover that has ended uses none.
            let _ = yard.mover.set_link_up(*link, up);
        }
    }

    /// Nothing new goes to this seat any more, if the flow of that number is there still: its peer may have had to give up its
    /// seats, and sit there anew. The flow, to be dropped without any lock: that waits for what it has begun.
    pub fn unseat(&mut self, yard: &Yard, seat: usize, number: u64) -> Option<Box<dyn Link>> {
        let (link, chair) = self.seats.get(seat)?;
        let sits = chair.0.lock().by.as_ref().is_some_and(|sitter| sitter.number == number);
        sits.then(|| vacate(yard, *link, chair)).flatten()
    }
}

fn vacate(yard: &Yard, link: LinkId, chair: &Chair) -> Option<Box<dyn Link>> {
    // A mover that has ended starts nothing new either.
    let _ = yard.mover.set_link_up(link, false);
    let taken = std::mem::take(&mut *chair.0.lock());
    taken.by.map(|sitter| sitter.flow)
}

/// Where peers get their places.
pub(crate) struct Yard {
    mover: MoverHandle,
    here: Place,
    /// How long a lot may be on a flow before it counts as lost: longer than flows themselves wait, so that it never does.
    op_timeout_us: u64,
    next: AtomicU32,
    free: Mutex<Vec<Berth>>,
}

impl Yard {
    pub fn new(mover: MoverHandle, here: Place, op_timeout_us: u64) -> Yard {
        Yard { mover, here, op_timeout_us, next: AtomicU32::new(0), free: Mutex::default() }
    }

    /// A place at which no region is registered.
    pub fn berth(&self) -> Berth {
        let mut free = self.free.lock();
        let at = free.iter().position(|berth| Arc::strong_count(&berth.uses) == 1);
        at.map(|at| free.swap_remove(at)).unwrap_or_else(|| {
            let place = Place::Peer(self.next.fetch_add(1, Ordering::Relaxed));
            Berth { place, uses: Arc::default(), seats: Vec::new() }
        })
    }

    /// Takes back a place. The flows that still sit there, to be dropped as [`Berth::unseat`] says.
    #[must_use = "dropping flows waits for what they have begun"]
    pub fn take_back(&self, berth: Berth) -> Vec<Box<dyn Link>> {
        let left = berth.seats.iter().filter_map(|(link, chair)| vacate(self, *link, chair)).collect();
        self.free.lock().push(berth);
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::{
        Access, Exports, FlowOptions, Identity, NoLeases, PeerRegions, ServerOptions, TcpFlow, TcpServer,
    };
    use forebay_transfer::{Class, End, HostBuffer, Limits, MoverThread, Span, SpanPair, Transfer};

    fn identity(node: u8) -> Identity {
        Identity::starting([node; 16]).unwrap()
    }

    #[test]
    fn what_a_broken_flow_leaves_goes_to_its_stand_in_before_anybody_sees_to_it() {
        let exports = Arc::new(Exports::new(Arc::new(NoLeases)));
        let offered = exports.offer(0, Arc::new(HostBuffer::new(4096)), Access::OPEN).unwrap();
        let local = ([127, 0, 0, 1], 0).into();
        let server = TcpServer::listen(local, identity(1), exports, ServerOptions::default()).unwrap();
        let thread = MoverThread::spawn(Limits::default()).unwrap();
        let (mover, here) = (thread.handle(), Place::Host(0));
        let (regions, me, gauge) = (PeerRegions::default(), identity(2), Arc::new(Gauge::new(4)));
        let yard = Yard::new(mover.clone(), here, 30_000_000);
        let mut berth = yard.berth();
        let mut handles = Vec::new();
        for stand_in in [None, Some(0)] {
            let options = FlowOptions::default();
            let (flow, _) = TcpFlow::connect(server.address(), me, regions.clone(), options).unwrap();
            handles.push(flow.handle());
            let (handle, flow) = (flow.handle(), Box::new(flow));
            let (gauge, on_advice) = (Arc::clone(&gauge), Arc::new(|_| {}));
            let number = handles.len() as u64;
            let sitter = Sitter { number, flow, handle, path: "tcp", gauge, on_advice };
            berth.seat(&yard, sitter, stand_in).unwrap();
        }
        berth.set_up(&yard, 0, false);
        let ours = mover.register(here, Arc::new(HostBuffer::new(4096))).unwrap();
        let theirs = regions.register(&mover, berth.place, offered, 0).unwrap();
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
