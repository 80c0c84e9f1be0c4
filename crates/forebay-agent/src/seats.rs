//! Places of the mover that stand for peers, and seats there: links of the mover in which flows sit while they live. A mover
//! never forgets a link, so a flow that has ended leaves its seat to the next one, and a peer that has ended its place. This
//! file knows who sits where; it must never know whom a flow connects to.

use crate::flows::Advice;
use crate::gauge::Gauge;
use crate::trouble::AgentError;
use forebay_links::tcp::TcpFlow;
use forebay_mover::{
    Completion, Link, LinkId, LinkOp, LinkSpec, Memory, MoverHandle, OpId, Outcome, Place, RouteSpec,
};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lots that may be on a flow: one travels while the next ones are made ready.
const WINDOW_LOTS: u32 = 3;
const WINDOW_BYTES: u64 = 64 << 20;

/// Told when another number of flows may be better.
pub(crate) type OnAdvice = Arc<dyn Fn(Advice) + Send + Sync>;

/// Whoever sits in a seat.
struct Sitter {
    flow: TcpFlow,
    gauge: Arc<Gauge>,
    on_advice: OnAdvice,
}

/// A link of the mover: who sits in it now.
#[derive(Clone, Default)]
struct Chair(Arc<Mutex<Option<Sitter>>>);

impl Chair {
    fn lock(&self) -> MutexGuard<'_, Option<Sitter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link for Chair {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let mut sitter = self.lock();
        let Some(sitter) = sitter.as_mut() else {
            return done.finish(Outcome::Failed { error: "there is no connection".into() });
        };
        let bytes = op.bytes;
        let began_us = sitter.gauge.lot_began(bytes);
        let (gauge, on_advice) = (Arc::clone(&sitter.gauge), Arc::clone(&sitter.on_advice));
        let done = done.inspect(move |outcome| match gauge.lot_ended(began_us, bytes, outcome) {
            Advice::Stay => {}
            advice => on_advice(advice),
        });
        sitter.flow.start(op, memory, done);
    }

    fn cancel(&mut self, op: OpId) {
        if let Some(sitter) = self.lock().as_mut() {
            sitter.flow.cancel(op);
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
    /// Seats a flow and says where.
    pub fn seat(
        &mut self,
        yard: &Yard,
        flow: TcpFlow,
        gauge: Arc<Gauge>,
        on_advice: OnAdvice,
    ) -> Result<usize, AgentError> {
        let empty = self.seats.iter().position(|(_, chair)| chair.lock().is_none());
        let seat = match empty {
            Some(seat) => seat,
            None => self.add_seat(yard)?,
        };
        let (link, chair) = &self.seats[seat];
        *chair.lock() = Some(Sitter { flow, gauge, on_advice });
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
        yard.mover.add_route(RouteSpec::direct(yard.here, self.place, link))??;
        yard.mover.add_route(RouteSpec::direct(self.place, yard.here, link))??;
        self.seats.push((link, chair));
        Ok(seat)
    }

    /// Nothing new goes to this seat any more. The flow, to be dropped without any lock: that waits for what it has begun.
    pub fn unseat(&mut self, yard: &Yard, seat: usize) -> Option<TcpFlow> {
        let (link, chair) = self.seats.get(seat)?;
        // A mover that has ended starts nothing new either.
        let _ = yard.mover.set_link_up(*link, false);
        let sitter = chair.lock().take();
        sitter.map(|sitter| sitter.flow)
    }
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
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.iter().position(|berth| Arc::strong_count(&berth.uses) == 1);
        at.map(|at| free.swap_remove(at)).unwrap_or_else(|| {
            let place = Place::Peer(self.next.fetch_add(1, Ordering::Relaxed));
            Berth { place, uses: Arc::default(), seats: Vec::new() }
        })
    }

    /// Takes back a place in which nobody sits any more.
    pub fn take_back(&self, berth: Berth) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(berth);
    }
}
