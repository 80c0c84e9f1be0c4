//! The clients of a node, all together: what each may have, who is connected, what is counted, and
//! whether the node still takes anybody. Each connection's thread has a share of it.

use super::client::Client;
use super::control_counts::Controls;
use super::described::DescribedByClients;
use super::ring_counts::RingCounts;
use crate::config::LimitsConfig;
use crate::hand_over::{Layout, NotGiven, Successor, check_offer};
use crate::peering::Peering;
use forebay_client::protocol::answer::{NodeStat, REFUSALS, Refusal};
use forebay_client::protocol::frame::Unfinished;
use forebay_kv::ChunkId;
use forebay_otlp::Spans;
use forebay_store::{Left, Store};
use forebay_transfer::listen::{Admission, Room};
use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{LogGate, MoverHandle};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

type OnSuccessor = Box<dyn Fn(Successor) + Send>;

pub struct Clients {
    pub store: Store,
    pub mover: MoverHandle,
    pub instance: [u8; 16],
    pub limits: LimitsConfig,
    pub admission: Admission,
    /// Connections that have not said who they are, by process.
    pub room: Arc<Room<i32>>,
    pub unfinished: Arc<Unfinished>,
    pub spans: Arc<Spans>,
    remote: OnceLock<Arc<Peering>>,
    /// The memory with which the node began, if it did not begin empty.
    pub inherited: OnceLock<Inherited>,
    registered: Mutex<HashMap<u64, Weak<Client>>>,
    next_number: AtomicU64,
    /// Threads of clients that are let in.
    connected: AtomicUsize,
    /// Threads of connections that are not let in yet.
    greeting: AtomicUsize,
    /// What clients say of their namespaces and requests.
    pub described: Mutex<DescribedByClients>,
    pub rings: RingCounts,
    pub controls: Controls,
    counts: Counts,
    /// Who is told of a node that wants this one's memory.
    on_successor: Mutex<Option<(Layout, OnSuccessor)>>,
    /// One for each kind of refusal, so that none hides another.
    refused_gates: [LogGate; REFUSALS],
    expired_gate: LogGate,
    corrupt_gate: LogGate,
    /// Whether the store tells what has left it.
    is_told: Mutex<bool>,
    draining: AtomicBool,
    stopped: AtomicBool,
    /// Something was let go.
    lighter: Condvar,
    waiting: Mutex<()>,
}

#[derive(Debug, Default)]
struct Counts {
    hits_memory: AtomicU64,
    hits_disk: AtomicU64,
    hits_peers: AtomicU64,
    refused: AtomicU64,
    orphans: AtomicU64,
    corrupt: AtomicU64,
    not_given: AtomicU64,
}

/// A client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientStat {
    /// What it calls itself.
    pub name: String,
    pub leases: usize,
    /// Slots that it writes.
    pub slots: usize,
}

/// Memory of another node, or of a life of this one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inherited {
    pub chunks: usize,
    /// From when it was asked for until clients were let in.
    pub took: Duration,
}

/// A client among all of them, until this is dropped.
pub struct Registration {
    clients: Arc<Clients>,
    number: u64,
}

/// The right of a connection's thread to run, counted until this is dropped.
pub struct ThreadPermit {
    clients: Arc<Clients>,
    count: fn(&Clients) -> &AtomicUsize,
}

impl Clients {
    pub fn new(
        store: Store,
        mover: MoverHandle,
        instance: [u8; 16],
        spans: Arc<Spans>,
        admission: Admission,
        limits: &LimitsConfig,
    ) -> Clients {
        Clients {
            store,
            mover,
            instance,
            limits: *limits,
            admission,
            room: Room::new("the clients' socket", limits.unauthenticated),
            unfinished: Arc::new(Unfinished::new(limits.unfinished)),
            spans,
            remote: OnceLock::new(),
            inherited: OnceLock::new(),
            registered: Mutex::default(),
            next_number: AtomicU64::new(0),
            connected: AtomicUsize::new(0),
            greeting: AtomicUsize::new(0),
            described: Mutex::default(),
            rings: RingCounts::default(),
            controls: Controls::default(),
            counts: Counts::default(),
            on_successor: Mutex::default(),
            refused_gates: [const { LogGate::new() }; REFUSALS],
            expired_gate: LogGate::new(),
            corrupt_gate: LogGate::new(),
            is_told: Mutex::default(),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            lighter: Condvar::new(),
            waiting: Mutex::default(),
        }
    }

    pub fn now_us(&self) -> u64 {
        self.mover.now_us()
    }

    /// Other nodes, if there may be any.
    pub fn remote(&self) -> Option<&Arc<Peering>> {
        self.remote.get()
    }

    /// There are other nodes from now on.
    pub fn set_remote(&self, remote: Arc<Peering>) {
        // Set once: nobody else does.
        let _ = self.remote.set(remote);
    }

    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// The node goes on after all.
    pub fn end_draining(&self) {
        self.draining.store(false, Ordering::Release);
    }

    /// From now on `on_successor` is told of nodes that can go on with a memory of this layout.
    pub fn set_on_successor(&self, layout: Layout, on_successor: impl Fn(Successor) + Send + 'static) {
        *self.on_successor.lock() = Some((layout, Box::new(on_successor)));
    }

    /// A node of a user that may wants this one's memory.
    pub fn meet(&self, successor: Successor, offer: &[u8]) {
        let on_successor = self.on_successor.lock();
        let checked = match &*on_successor {
            Some((layout, on_successor)) => check_offer(offer, *layout).map(|()| on_successor),
            None => Err(NotGiven::Nobody),
        };
        match checked {
            Ok(on_successor) => on_successor(successor),
            Err(why) => self.refuse_successor(successor, &why),
        }
    }

    pub fn refuse_successor(&self, successor: Successor, why: &NotGiven) {
        self.counts.not_given.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(process = successor.process(), reason = %why, "memory not handed over");
        successor.refuse(why);
    }

    /// Nodes that wanted this one's memory and did not get it.
    pub fn not_given(&self) -> u64 {
        self.counts.not_given.load(Ordering::Relaxed)
    }

    /// Slots that clients write.
    pub fn slots(&self) -> usize {
        self.all().iter().map(|client| client.leases().slots()).sum()
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    fn all(&self) -> Vec<Arc<Client>> {
        self.registered.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Whether a chunk is here, whoever's it is.
    pub fn has(&self, id: &ChunkId) -> bool {
        let found = self.store.whereabouts(id);
        found.in_memory || found.on_disk
    }

    /// One more client's thread, if there may be.
    pub fn enter(self: &Arc<Self>) -> Option<ThreadPermit> {
        let room = |connected: usize| (connected < self.limits.clients).then_some(connected + 1);
        let entered = self.connected.fetch_update(Ordering::AcqRel, Ordering::Acquire, room);
        entered.ok().map(|_| ThreadPermit { clients: Arc::clone(self), count: |clients| &clients.connected })
    }

    /// One more thread of a connection that is not let in yet; their room bounds them.
    pub fn greet(self: &Arc<Self>) -> ThreadPermit {
        self.greeting.fetch_add(1, Ordering::AcqRel);
        ThreadPermit { clients: Arc::clone(self), count: |clients| &clients.greeting }
    }

    pub fn register(self: &Arc<Self>, client: &Arc<Client>) -> Registration {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        self.registered.lock().insert(number, Arc::downgrade(client));
        Registration { clients: Arc::clone(self), number }
    }

    /// A client let something go.
    pub fn let_go(&self) {
        if self.is_draining() || self.is_stopped() {
            drop(self.waiting.lock());
            self.lighter.notify_all();
        }
    }

    /// Waits until no client holds anything, and says what they hold when the time is over.
    pub fn wait_until_light(&self, until: Instant) -> usize {
        let mut waiting = self.waiting.lock();
        loop {
            let held: usize = self.all().iter().map(|client| client.leases().count()).sum();
            let left = until.saturating_duration_since(Instant::now());
            if held == 0 || left.is_zero() {
                return held;
            }
            self.lighter.wait_for(&mut waiting, left);
        }
    }

    /// No connection goes on from now on, and none comes.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.all().iter().for_each(|client| client.answers.wake_up().wake());
    }

    /// Waits until the threads of all connections have ended, or the time is over.
    pub fn wait_until_gone(&self, until: Instant) {
        let mut waiting = self.waiting.lock();
        self.room.clear();
        while self.connected.load(Ordering::Acquire) + self.greeting.load(Ordering::Acquire) > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.lighter.wait_for(&mut waiting, left);
        }
    }

    /// A client watches: from now on the store tells what leaves it, until no client watches any
    /// more.
    pub fn tell_who_watches(self: &Arc<Self>) -> std::io::Result<()> {
        let mut is_told = self.is_told.lock();
        if !*is_told {
            let clients = Arc::downgrade(self);
            self.store.on_leave(move |left| match clients.upgrade() {
                Some(clients) => clients.tell_left(left),
                None => ControlFlow::Break(()),
            })?;
            *is_told = true;
        }
        Ok(())
    }

    fn tell_left(&self, left: Left<'_>) -> ControlFlow<()> {
        let mut is_told = self.is_told.lock();
        let mut watching = self.all();
        watching.retain(|client| client.watches());
        if watching.is_empty() {
            *is_told = false;
            return ControlFlow::Break(());
        }
        drop(is_told);
        watching.iter().for_each(|client| client.tell_left(left, |id| self.has(id)));
        ControlFlow::Continue(())
    }

    pub fn count_hits(&self, memory: usize, disk: usize, peers: usize) {
        let counts = &self.counts;
        counts.hits_memory.fetch_add(memory as u64, Ordering::Relaxed);
        counts.hits_disk.fetch_add(disk as u64, Ordering::Relaxed);
        counts.hits_peers.fetch_add(peers as u64, Ordering::Relaxed);
    }

    /// A client is not let in.
    pub fn count_refused(&self, refusal: Refusal, why: &str) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        let gate = self.refused_gates.get(refusal as usize);
        if let Some(repeated) = gate.and_then(LogGate::pass) {
            tracing::warn!(kind = ?refusal, reason = why, repeated, "client refused");
        }
    }

    /// A connection that has not said who it is gave way to another.
    pub fn count_evicted(&self) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Slots whose client went without a word.
    pub fn count_orphans(&self, client: &str, slots: usize) {
        self.counts.orphans.fetch_add(slots as u64, Ordering::Relaxed);
        tracing::warn!(client, slots, "slots kept until the client's process has exited");
    }

    /// A chunk is not what was stored; it is dropped.
    pub fn count_corrupt(&self, client: &str) {
        self.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        if let Some(repeated) = self.corrupt_gate.pass() {
            tracing::error!(client, repeated, "corrupt chunk in memory");
        }
    }

    /// Leases ended that their client did not renew.
    pub fn note_expired(&self, client: &str, leases: usize) {
        if let Some(repeated) = self.expired_gate.pass() {
            tracing::warn!(client, leases, repeated, "leases expired");
        }
    }

    pub fn clients(&self) -> Vec<ClientStat> {
        let stat = |client: Arc<Client>| {
            let leases = client.leases();
            ClientStat { name: client.name.clone(), leases: leases.leases(), slots: leases.slots() }
        };
        self.all().into_iter().map(stat).collect()
    }

    pub fn stat(&self) -> NodeStat {
        let stat = self.store.stat();
        let clients = self.clients();
        let (pulled, not_pulled) = self.remote().map_or((0, 0), |remote| remote.pulled());
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        NodeStat {
            capacity_bytes: stat.capacity_bytes,
            used_bytes: stat.arena.used_bytes,
            chunks: stat.chunks as u64,
            corrupt: load(&counts.corrupt),
            clients: clients.len() as u64,
            leases: clients.iter().map(|client| client.leases as u64).sum(),
            slots: clients.iter().map(|client| client.slots as u64).sum(),
            orphans: load(&counts.orphans),
            refused: load(&counts.refused),
            hits: [load(&counts.hits_memory), load(&counts.hits_disk), load(&counts.hits_peers)],
            pulled,
            not_pulled,
        }
    }
}

impl std::fmt::Debug for Clients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clients").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.clients.registered.lock().remove(&self.number);
    }
}

impl Drop for ThreadPermit {
    fn drop(&mut self) {
        (self.count)(&self.clients).fetch_sub(1, Ordering::AcqRel);
        self.clients.let_go();
    }
}
