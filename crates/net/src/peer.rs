//! One peer as this agent knows it: the way to it, the flows there, what waits for them, and its
//! memory. This file keeps state; `connect.rs` brings flows about and takes them down.
//!
//! Two locks, because callers on the mover's thread must never wait for somebody who waits for the
//! mover: `state` is held for moments and never across a word with the mover; `site` is for those
//! words, and never taken on the mover's thread.

use crate::addresses::Addresses;
use crate::capabilities::WhyIdle;
use crate::connection_state::ConnectionState;
use crate::descriptors::Descriptors;
use crate::endpoints::{Endpoint, EndpointPool};
use crate::error::{AgentError, PeerError, Unreachable};
use crate::ipc::opened::OpenedRegions;
use crate::notifications::{NOTIFICATIONS_OPEN_BYTES_MAX, NOTIFICATIONS_OPEN_MAX, OutgoingNotifications};
use crate::peer_log::PeerLog;
use crate::peer_metrics::PeerMetrics;
use crate::prepared::Blocks;
use crate::shared::Shared;
use crate::tcp::{Broken, FlowHandle, PeerRegion};
use crate::transport::{Reach, TransportInfo};
use forebay_transfer::lock::{Condvar, Mutex, MutexGuard};
use forebay_transfer::{Backoff, Refused, RegionId};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The path of bytes that no rail carries, as metrics and stats name it.
pub const TCP: &str = "tcp";
/// What may wait for a connection to one peer.
pub(crate) const WAITING_MAX: usize = 65_536;
/// Called once the peer can be spoken to, or with the reason why not.
pub(crate) type OnUp = Box<dyn FnOnce(Result<(), PeerError>) + Send>;

pub(crate) struct Peer {
    pub name: String,
    /// `None`: it does not listen.
    pub address: Option<SocketAddr>,
    /// As its metadata say. `None`: it is known by address only, and whoever answers there is
    /// meant.
    pub instance: Option<[u8; 16]>,
    pub metrics: Arc<PeerMetrics>,
    pub log: Arc<PeerLog>,
    /// Its memory of GPUs, as far as GPUs of this end reach it.
    pub opened: OpenedRegions,
    state: Mutex<State>,
    room: Condvar,
    site: Mutex<Site>,
}

#[derive(Default)]
pub(crate) struct State {
    pub connection: ConnectionState,
    waiting: BTreeMap<u64, OnUp>,
    next_waiting: u64,
    /// Somebody tells them that there is a connection, and goes on until nobody waits.
    pub waiting_are_told: bool,
    pub flows: Vec<PeerFlow>,
    next_flow: u64,
    /// How the last flow ended, or why none came about.
    pub lost: Option<Broken>,
    pub unreached: Option<Unreachable>,
    /// One more flow is being connected.
    pub growing: bool,
    pub outgoing: OutgoingNotifications<Attempt>,
    /// Somebody gives notifications their turns, and goes on until none is due.
    turns_are_given: bool,
    /// Why rails, by number, carry nothing over the connection that is there.
    pub idle_rails: BTreeMap<usize, WhyIdle>,
    /// How long to wait until rails are tried again. `None`: none was lost on this connection.
    pub rail_backoff: Option<Backoff>,
}

pub(crate) struct PeerFlow {
    pub number: u64,
    pub slot: usize,
    pub handle: FlowHandle,
    pub via: Via,
    /// The mover gives it nothing, since rails carry the bytes.
    pub stands_by: bool,
}

/// Sends a notification, once; it settles itself.
pub(crate) type Attempt = Box<dyn FnOnce() + Send>;

/// What carries the bytes of one flow.
#[derive(Debug, Clone)]
pub(crate) enum Via {
    /// Its socket.
    Tcp,
    /// A rail, by its number among those of this agent, with what its transport says of it.
    Rail { nth: usize, info: TransportInfo, report: String },
}

impl Via {
    /// As metrics and stats name it.
    pub fn path(&self) -> &'static str {
        match self {
            Via::Tcp => TCP,
            Via::Rail { info, .. } => info.path,
        }
    }

    pub fn rail(&self) -> Option<usize> {
        match self {
            Via::Tcp => None,
            Via::Rail { nth, .. } => Some(*nth),
        }
    }

    /// Whether silence means that the peer itself is frozen. A network of its own may fail alone:
    /// then TCP goes on, or finds within its own limit that the peer is frozen.
    pub fn shows_a_frozen_peer(&self) -> bool {
        match self {
            Via::Tcp => true,
            Via::Rail { info, .. } => info.reach == Reach::Host,
        }
    }
}

/// What of the peer is known to the mover.
#[derive(Default)]
pub(crate) struct Site {
    pub endpoint: Option<Endpoint>,
    /// Who answered, of a peer that is known by address only.
    pub answered: Option<[u8; 16]>,
    memory: Addresses<Remote>,
    /// Regions of memory that the peer has said no more of; to be forgotten when nothing uses them.
    old: Vec<RegionId>,
}

/// A range of the peer's memory.
struct Remote {
    region: PeerRegion,
    id: OnceLock<RegionId>,
}

impl Peer {
    pub fn new(
        name: String,
        address: Option<SocketAddr>,
        instance: Option<[u8; 16]>,
        flows_max: usize,
    ) -> Arc<Peer> {
        let metrics = Arc::new(PeerMetrics::new(flows_max));
        let (state, site) = (Mutex::default(), Mutex::default());
        let (log, opened) = (Arc::new(PeerLog::of(&name)), OpenedRegions::default());
        Arc::new(Peer { name, address, instance, metrics, log, opened, state, room: Condvar::new(), site })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub fn site(&self) -> MutexGuard<'_, Site> {
        self.site.lock()
    }

    /// Takes a notification of so many bytes in, which has its turn with
    /// [`send_notifications`](Peer::send_notifications). Where there is no room, it waits for some
    /// until then.
    pub fn hold_notification(
        &self,
        bytes: usize,
        wait_until: Option<Instant>,
        notification: impl FnOnce(u64) -> Attempt,
    ) -> Result<(), PeerError> {
        let mut state = self.state();
        while !state.outgoing.has_room(bytes) {
            let left = wait_until.map(|until| until.saturating_duration_since(Instant::now()));
            let Some(left) = left.filter(|left| !left.is_zero()) else {
                let (notifications, held_bytes) = state.outgoing.held();
                return Err(PeerError::Full(format!(
                    "{notifications} notifications of {held_bytes} bytes are on their way to peer {}, and one of {bytes} bytes has no room; allowed: {NOTIFICATIONS_OPEN_MAX} of {NOTIFICATIONS_OPEN_BYTES_MAX} bytes",
                    self.name
                )));
            };
            self.room.wait_for(&mut state, left);
        }
        state.outgoing.open(bytes, notification);
        Ok(())
    }

    /// Gives their turns to notifications, as many as may be on their way.
    pub fn send_notifications(&self) {
        let mut state = self.state();
        // One that fails at once comes back here: whoever is at it already goes on with the next
        // one.
        if std::mem::replace(&mut state.turns_are_given, true) {
            return;
        }
        while let Some(next) = state.outgoing.next_turn() {
            drop(state);
            next();
            state = self.state();
        }
        state.turns_are_given = false;
    }

    pub fn settle_notification(&self, number: u64) {
        self.state().outgoing.settle(number);
        self.room.notify_all();
    }

    pub fn lost_notification(&self, why: &PeerError) {
        self.metrics.fault("not_notified");
        self.log.notification_lost(why);
    }

    pub fn flow(&self) -> Option<FlowHandle> {
        self.state().flows.first().map(|flow| flow.handle.clone())
    }

    /// Why transfers to the peer fail now, if that is because of the peer.
    pub fn error(&self) -> Option<PeerError> {
        let state = self.state();
        if let Some(dead) = state.connection.dead() {
            return Some(dead.clone());
        }
        let broken = state.flows.iter().find_map(|flow| flow.handle.stats().broken);
        let gone = state.lost.clone().filter(|_| state.flows.is_empty());
        broken.or(gone).map(|why| PeerError::Lost { peer: self.name.clone(), why })
    }

    /// What the peer says of its memory. What stays the same keeps its region.
    pub fn set_memory(&self, memory: &Addresses<PeerRegion>) {
        let mut site = self.site();
        let mut before = std::mem::take(&mut site.memory);
        for found in memory.iter() {
            let same = before.find(found.base).is_some_and(|old| {
                old.base == found.base && old.len == found.len && old.what.region == *found.what
            });
            let kept = if same { before.remove(found.base) } else { None };
            let remote = kept.unwrap_or(Remote { region: *found.what, id: OnceLock::new() });
            // They come from a table like this one, so they do not overlap.
            let _ = site.memory.insert(found.base, found.len, remote);
        }
        if before.iter().next().is_some() {
            // What is open of it would stay allocated.
            self.opened.clear();
        }
        site.old.extend(before.iter().filter_map(|old| old.what.id.get()));
    }

    /// Resolves a list of the peer's memory. Ranges become regions of the mover when they are first
    /// asked for.
    pub fn resolve(&self, shared: &Shared, list: &Descriptors) -> Result<Blocks, AgentError> {
        let mut site = self.site();
        let place = site.endpoint(&shared.pool).place;
        Blocks::resolve(list, &site.memory, |remote| {
            if let Some(id) = remote.id.get() {
                return Ok(*id);
            }
            let id = shared.regions.register(&shared.mover, place, remote.region, 0)?;
            Ok(*remote.id.get_or_init(|| id))
        })
    }

    /// Forgets the regions of the peer's memory. Says whether all are forgotten: those that are in
    /// use are not.
    pub fn forget_memory(&self, shared: &Shared) -> bool {
        self.set_memory(&Addresses::default());
        self.forget_old(shared)
    }

    /// Forgets the regions of memory that the peer has said no more of. Says whether all are
    /// forgotten.
    pub fn forget_old(&self, shared: &Shared) -> bool {
        let mut site = self.site();
        let ids = std::mem::take(&mut site.old);
        let in_use = |id: &RegionId| {
            let forgotten = shared.regions.unregister(&shared.mover, *id);
            matches!(forgotten, Ok(Err(Refused::RegionInUse { .. })))
        };
        site.old = ids.into_iter().filter(in_use).collect();
        site.old.is_empty()
    }
}

impl State {
    pub fn is_railed(&self) -> bool {
        self.flows.iter().any(|flow| flow.via.rail().is_some())
    }

    pub fn at_work(&self) -> usize {
        self.flows.iter().filter(|flow| !flow.stands_by).count()
    }

    pub fn slot_over_tcp(&self) -> Option<usize> {
        self.flows.iter().find(|flow| flow.via.rail().is_none()).map(|flow| flow.slot)
    }

    /// The rail with the fewest flows of those that have some.
    pub fn lightest_rail(&self) -> Option<usize> {
        let flows_on = |nth: &usize| self.flows.iter().filter(|flow| flow.via.rail() == Some(*nth)).count();
        self.flows.iter().filter_map(|flow| flow.via.rail()).min_by_key(flows_on)
    }

    /// What no other flow of this peer is called.
    pub fn number_flow(&mut self) -> u64 {
        self.next_flow += 1;
        self.next_flow
    }

    /// Has `then` called when the peer can be spoken to, and says its number; refused where too
    /// many wait.
    pub fn wait(&mut self, then: OnUp) -> Result<u64, OnUp> {
        if self.waiting.len() >= WAITING_MAX {
            return Err(then);
        }
        let number = self.next_waiting;
        self.next_waiting += 1;
        self.waiting.insert(number, then);
        Ok(number)
    }

    /// Whoever waits under this number waits no longer.
    pub fn give_up(&mut self, number: u64) -> Option<OnUp> {
        self.waiting.remove(&number)
    }

    /// Everybody who waits, to be called without the lock.
    pub fn take_waiting(&mut self) -> Vec<OnUp> {
        std::mem::take(&mut self.waiting).into_values().collect()
    }

    pub fn somebody_waits(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl Site {
    pub fn endpoint(&mut self, pool: &EndpointPool) -> &mut Endpoint {
        self.endpoint.get_or_insert_with(|| pool.endpoint())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Agent, AgentConfig, Run};
    use forebay_transfer::HostBuffer;

    #[test]
    fn regions_that_a_peer_has_no_more_are_forgotten() {
        let (one, two) = (AgentConfig::named("one"), AgentConfig::named("two"));
        let (one, two) = (Agent::start(one).unwrap(), Agent::start(two).unwrap());
        for _ in 0..100 {
            let there = two.register(Arc::new(HostBuffer::new(4096)), Access::OPEN).unwrap();
            one.add_peer(&two.metadata()).unwrap();
            let block = Descriptors::from_runs([Run::block(there.base(), 4096)]).unwrap();
            one.prepare_remote("two", &block).unwrap();
            two.deregister(there).unwrap();
        }
        one.add_peer(&two.metadata()).unwrap();
        let peer = one.peer("two").unwrap();
        assert_eq!(peer.site().old.len(), 0);
    }
}
