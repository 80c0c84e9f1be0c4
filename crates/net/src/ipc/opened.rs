//! What the asking end has open of one peer's memory of GPUs, and who waits for more of it. Knows
//! what is open and for how long; `asker.rs` opens it.

use crate::tcp::{PeerRegion, PeerRegions};
use crate::timer::Timer;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{MoverHandle, Place, Refused, RegionId, SpanPair};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Transfers in a row that fail over IPC before it is left alone, and for how long.
const FAILURES_MAX: u32 = 3;
const LEFT_ALONE: Duration = Duration::from_secs(60);
/// How often, and how long apart, a region that a lost copy may still touch is asked for again.
const FORGET_ATTEMPTS: u32 = 1_000;
const FORGET_AGAIN_US: u64 = 20_000;

/// A region of a peer's GPU, open for one of this end's. Closed when nobody uses it any more.
pub(crate) struct OpenRegion {
    pub id: RegionId,
    parts: Option<Parts>,
    timer: Timer,
}

/// What an open region keeps.
struct Parts {
    id: RegionId,
    mover: MoverHandle,
    regions: PeerRegions,
    /// Mapped memory, until this is dropped.
    _memory: Box<dyn Send + Sync>,
    /// Nobody else may have the place.
    _uses: Arc<()>,
}

impl OpenRegion {
    pub fn new(
        id: RegionId,
        (mover, regions, timer): (MoverHandle, PeerRegions, Timer),
        memory: Box<dyn Send + Sync>,
        uses: Arc<()>,
    ) -> OpenRegion {
        let parts = Some(Parts { id, mover, regions, _memory: memory, _uses: uses });
        OpenRegion { id, parts, timer }
    }
}

impl Drop for OpenRegion {
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        let timer = self.timer.clone();
        // Not here: this may be the mover's thread, which is asked to forget the region.
        self.timer.soon(move || close(parts, timer, FORGET_ATTEMPTS));
    }
}

/// Closes a region as soon as nothing touches it.
fn close(parts: Parts, timer: Timer, attempts: u32) {
    let forgotten = parts.regions.unregister(&parts.mover, parts.id);
    if let (Ok(Err(Refused::RegionInUse { .. })), 1..) = (forgotten, attempts) {
        let again = timer.clone();
        timer.at(timer.now_us() + FORGET_AGAIN_US, move || close(parts, again, attempts - 1));
    }
}

/// What names a region here: at the peer, and for which GPU of this end it is open.
pub(crate) type Name = (PeerRegion, Place);

/// Regions that are open over IPC, by the ones over TCP that a transfer names.
#[derive(Clone)]
pub(crate) struct IpcRegions(pub HashMap<RegionId, Arc<OpenRegion>>);

impl IpcRegions {
    /// The same pairs, over IPC.
    pub fn pairs(&self, pairs: &[SpanPair]) -> Vec<SpanPair> {
        let instead = |region: RegionId| self.0.get(&region).map_or(region, |open| open.id);
        let mut pairs = pairs.to_vec();
        // Neighbours mostly name the same ones, which are looked up once.
        let mut last = None;
        for pair in &mut pairs {
            let named = (pair.from.region, pair.to.region);
            let (from, to) = match last {
                Some((known, found)) if known == named => found,
                _ => (instead(named.0), instead(named.1)),
            };
            last = Some((named, (from, to)));
            (pair.from.region, pair.to.region) = (from, to);
        }
        pairs
    }
}

/// Regions that a transfer needs open for one GPU, by what they are to TCP.
pub(crate) struct OpenRequest {
    pub place: Place,
    pub regions: Vec<(RegionId, PeerRegion)>,
    pub then: OnOpen,
}

/// `None`: not all of them can be.
pub(crate) type OnOpen = Box<dyn FnOnce(Option<IpcRegions>) + Send>;

/// A peer's memory of GPUs, as far as it is open.
#[derive(Default)]
pub(crate) struct OpenedRegions(Mutex<State>);

#[derive(Default)]
struct State {
    /// `None`: it goes over TCP.
    known: HashMap<Name, Option<Arc<OpenRegion>>>,
    waiting: Vec<OpenRequest>,
    /// Somebody opens what is waited for, and goes on until nobody waits.
    is_opening: bool,
    failures: u32,
    left_alone_until: Option<Instant>,
    /// Counts connections, so that what was opened for one is not kept for the next.
    connection: u64,
    uses: u64,
    /// It is looked at later whether it is still used.
    is_watched: bool,
}

/// What to do about a request.
pub(crate) enum OpenStep {
    Go(OnOpen, Option<IpcRegions>),
    /// Somebody is needed who opens them.
    Open,
    Wait,
}

impl State {
    /// `Err`: not all are known.
    fn find(&self, request: &OpenRequest) -> Result<Option<IpcRegions>, ()> {
        if self.left_alone_until.is_some_and(|until| Instant::now() < until) {
            return Ok(None);
        }
        let mut found = HashMap::new();
        for (id, region) in &request.regions {
            match self.known.get(&(*region, request.place)) {
                Some(Some(open)) => drop(found.insert(*id, Arc::clone(open))),
                Some(None) => return Ok(None),
                None => return Err(()),
            }
        }
        Ok(Some(IpcRegions(found)))
    }
}

impl OpenedRegions {
    pub fn want(&self, request: OpenRequest) -> OpenStep {
        let mut state = self.0.lock();
        state.uses += 1;
        match state.find(&request) {
            Ok(found) => OpenStep::Go(request.then, found),
            Err(()) => {
                state.waiting.push(request);
                if std::mem::replace(&mut state.is_opening, true) { OpenStep::Wait } else { OpenStep::Open }
            }
        }
    }

    /// Whoever waits first. `None`: nobody does, and whoever opens is through.
    pub fn next_waiting(&self) -> Option<OpenRequest> {
        let mut state = self.0.lock();
        if state.waiting.is_empty() {
            state.is_opening = false;
            return None;
        }
        Some(state.waiting.remove(0))
    }

    /// What is not known yet of what is requested, and over which connection it is asked for.
    pub fn unknown(&self, request: &OpenRequest) -> (Vec<PeerRegion>, u64) {
        let state = self.0.lock();
        let is_unknown = |region: &PeerRegion| !state.known.contains_key(&(*region, request.place));
        let regions = request.regions.iter().map(|(_, region)| *region).filter(is_unknown);
        (regions.collect(), state.connection)
    }

    /// Keeps what was found over that connection.
    pub fn keep(&self, name: Name, found: Option<Arc<OpenRegion>>, connection: u64) {
        let mut state = self.0.lock();
        if state.connection == connection {
            state.known.insert(name, found);
        }
    }

    /// The regions that are requested, if all of them are open.
    pub fn ipc_regions(&self, request: &OpenRequest) -> Option<IpcRegions> {
        self.0.lock().find(request).ok().flatten()
    }

    /// A transfer has ended. What it used is asked for anew if it failed. Says whether somebody is
    /// to come back with [`rest`](OpenedRegions::rest).
    pub fn ended(&self, used: &IpcRegions, failed: bool) -> bool {
        let mut state = self.0.lock();
        state.failures = if failed { state.failures + 1 } else { 0 };
        if state.failures >= FAILURES_MAX {
            state.left_alone_until = Some(Instant::now() + LEFT_ALONE);
            state.failures = 0;
        }
        if failed {
            let is_used = |open: &Arc<OpenRegion>| used.0.values().any(|other| Arc::ptr_eq(open, other));
            state.known.retain(|_, open| !open.as_ref().is_some_and(is_used));
        }
        !std::mem::replace(&mut state.is_watched, true)
    }

    /// How much it was used so far.
    pub fn uses(&self) -> u64 {
        self.0.lock().uses
    }

    /// Closes everything, unless it was used since. Says whether to come back.
    pub fn rest(&self, uses: u64) -> bool {
        let mut state = self.0.lock();
        state.is_watched = state.uses != uses;
        if !state.is_watched {
            state.known.retain(|_, open| open.is_none());
        }
        state.is_watched
    }

    /// The connection is gone, or what the peer said of its memory: nothing of it is known.
    pub fn clear(&self) {
        let mut state = self.0.lock();
        state.connection += 1;
        (state.failures, state.left_alone_until) = (0, None);
        state.known.clear();
    }
}
