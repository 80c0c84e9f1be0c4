//! Nodes among each other: finding chunks on other nodes, pulling them, and leasing one's own to
//! them.
//!
//! A pull has four steps. **Lookup** (`hints`, `choice`): who has a chunk, and whom to ask.
//! **Lease** (`owner` at the peer, `lease_queue` here): the peer keeps chunks still and says where
//! they lie. **Read** (`pull`): the mover reads them into slots of the arena, and every byte is
//! compared with its checksum. **Arrival** (`arrivals`): everybody who waits is told. `forget` has
//! chunks leave this node and its peers, and `bar` keeps them from coming back. `messages` is what
//! nodes say. What a directory or a peer says is never believed: it costs a question at most.

mod arrivals;
mod bar;
mod choice;
mod forget;
mod hints;
mod lease_queue;
mod messages;
mod owner;
mod pull;

use crate::config::{LimitsConfig, PeersConfig, RailConfig};
use crate::directory::{Directory, Holders};
use arrivals::{Arrivals, Job, OnPulled};
use choice::Candidate;
use forebay_kv::ChunkId;
use forebay_net::{Access, Agent, AgentConfig, AgentError, PeerStat, ServerStats, Service, Unreachable};
use forebay_otlp::{ActiveSpan, SpanKind, Spans};
use forebay_store::{Changed, Store, TenantId};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, LogGate, MoverHandle, Place, RaisableClass, TraceContext};
use hints::Hints;
use lease_queue::LeaseQueue;
use messages::{Answer, LOOKUP_IDS_MAX, Question, TenantKey};
use owner::{Owner, PeerService};
use pull::Pull;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

pub(crate) use forget::Forgotten;

/// How long a lookup waits for peers that are connected.
const LOOK_LIMIT_US: u64 = 50_000;
/// How long a peer that is not connected may take to come about; nobody waits for it.
const CONNECT_LIMIT_US: u64 = 5_000_000;
/// How long a peer may take to hear what is not worth waiting for.
const TELL_LIMIT_US: u64 = 5_000_000;
/// Chunks behind the wanted one that are pulled along with it.
const BATCH: usize = 16;

/// What pulls need.
pub(crate) struct Puller {
    /// Weak, so that it never ends on a thread of its own, to which a share of this may have come.
    agent: Weak<Agent>,
    pub store: Store,
    pub token: Vec<u8>,
    mover: MoverHandle,
    /// `None` ends the thread.
    jobs: Sender<Option<Job>>,
    known: Mutex<Hints>,
    arrivals: Arc<Mutex<Arrivals>>,
    lease_queue: Mutex<LeaseQueue<Pull>>,
    counts: Counts,
    retried_gate: LogGate,
    corrupt_gate: LogGate,
    spans: Arc<Spans>,
}

#[derive(Debug, Default)]
struct Counts {
    pulled: AtomicU64,
    failed: AtomicU64,
    denied: AtomicU64,
    corrupt: AtomicU64,
    retried: AtomicU64,
    /// Questions to forget chunks that a peer did not answer, by peer.
    unforgotten: Mutex<HashMap<String, (u64, LogGate)>>,
}

/// Other nodes, from this one's side.
pub(crate) struct Peering {
    agent: Arc<Agent>,
    puller: Arc<Puller>,
    worker: Option<JoinHandle<()>>,
    owner: Arc<Owner>,
    directory: Arc<dyn Directory>,
    /// Peers that the agent was told of.
    listed_peers: Arc<Mutex<HashMap<String, SocketAddr>>>,
}

/// A chunk of which other nodes have a copy.
#[derive(Debug, Clone)]
pub(crate) struct PullRequest {
    pub tenant: TenantId,
    /// The chunk and those that follow it in its sequence and are likely to be wanted next.
    pub ids: Vec<ChunkId>,
    pub parent: Option<ChunkId>,
    pub class: Class,
    /// When it is of no use any more, in the mover's clock.
    pub deadline_us: Option<u64>,
    /// What it is a part of, if that is traced.
    pub under: Option<TraceContext>,
}

/// Is told how many chunks there are.
type OnFound = Box<dyn FnOnce(usize) + Send>;

/// What went on between nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeeringStat {
    pub peers: Vec<PeerStat>,
    /// Chunks that came from peers, verified.
    pub pulled: u64,
    /// Chunks that were to come, and did not.
    pub not_pulled: u64,
    /// Leases that a peer denied although it was said to have the chunk.
    pub denied: u64,
    /// Chunks that came with other bytes than were leased.
    pub corrupt: u64,
    /// Chunks that one peer leased and another one was asked for, since they did not come.
    pub retried: u64,
    /// Chunks that were leased to peers.
    pub lent: u64,
    /// Questions of peers that were refused.
    pub refused: u64,
    /// Chunks of this node that peers found wrong.
    pub complaints: u64,
    /// Of those, chunks that were wrong here too, and were dropped.
    pub wrong: u64,
    /// Questions to forget chunks that a peer did not answer, by peer.
    pub unforgotten: Vec<(String, u64)>,
}

/// Answers of peers that a lookup waits for.
struct PendingLookup {
    puller: Arc<Puller>,
    tenant: TenantId,
    ids: Vec<ChunkId>,
    on_found: Option<OnFound>,
}

impl Peering {
    /// Listens for peers and leases to them what is here. The store's mover must be `mover`, its
    /// arena at `here`.
    pub fn start(
        config: &PeersConfig,
        name: &str,
        (store, mover, here): (&Store, &MoverHandle, Place),
        limits: &LimitsConfig,
        directory: Arc<dyn Directory>,
        spans: Arc<Spans>,
    ) -> Result<Peering, AgentError> {
        let (token, lent_per_peer) = (config.token.clone(), config.lent_per_peer);
        let arrivals = Arc::new(Mutex::new(Arrivals::new(limits.loads())));
        let here_and_coming = (store.clone(), Arc::clone(&arrivals));
        let owner = Owner::new(here_and_coming, mover.clone(), token, lent_per_peer, Arc::clone(&spans));
        let owner = Arc::new(owner);
        let agent = AgentConfig {
            node: Some(crate::directory::node_of_name(name)),
            listen: Some(config.listen),
            advertise: config.advertise,
            token: config.token.clone(),
            tls: config.tls.clone(),
            plain_beyond_loopback: config.plain_beyond_loopback,
            flows_max: config.flows_max,
            progress_limit_us: config.progress_limit_ms.saturating_mul(1000),
            pending_max: limits.unauthenticated,
            greeting_limit_us: limits.authentication_ms.saturating_mul(1000),
            accepted_max: config.connections_max,
            accepted_per_peer_max: config.connections_per_peer,
            rails: config.rails.iter().map(RailConfig::options).collect::<Result<_, _>>()?,
            service: Some(Arc::new(PeerService(Arc::clone(&owner))) as Arc<dyn Service>),
            ..AgentConfig::named(name)
        };
        let agent = Agent::start_on(agent, mover.clone(), here)?;
        let registered = agent.register(store.arena_memory(), Access::LEASED_READ)?;
        owner.open(agent.leases().clone(), registered.offered());
        let system = |source| AgentError::System { what: "a thread", source };
        let (jobs, queue) = channel::<Option<Job>>();
        let worker = std::thread::Builder::new()
            .name("forebay-peering".into())
            .spawn(move || queue.into_iter().map_while(|job| job).for_each(|job| job()))
            .map_err(system)?;
        let agent = Arc::new(agent);
        let puller = Puller {
            agent: Arc::downgrade(&agent),
            store: store.clone(),
            token: config.token.clone(),
            mover: mover.clone(),
            jobs,
            known: Mutex::default(),
            arrivals,
            lease_queue: Mutex::default(),
            counts: Counts::default(),
            retried_gate: LogGate::new(),
            corrupt_gate: LogGate::new(),
            spans,
        };
        let announcer = Arc::clone(&directory);
        let announce = move |changed: Changed<'_>| match changed {
            Changed::Some { added, removed } => announcer.announce(added, removed),
            Changed::All(here) => announcer.announce_all(here),
        };
        store.on_change(announce).map_err(system)?;
        let (puller, worker) = (Arc::new(puller), Some(worker));
        let peering = Peering { agent, puller, worker, owner, directory, listed_peers: Arc::default() };
        peering.sync_peers();
        Ok(peering)
    }

    pub fn address(&self) -> Option<SocketAddr> {
        self.agent.address()
    }

    pub fn stat(&self) -> PeeringStat {
        let counts = &self.puller.counts;
        let of_owner = self.owner.counts();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PeeringStat {
            peers: self.agent.stats(),
            pulled: load(&counts.pulled),
            not_pulled: load(&counts.failed),
            denied: load(&counts.denied),
            corrupt: load(&counts.corrupt),
            retried: load(&counts.retried),
            lent: load(&of_owner.leased),
            refused: load(&of_owner.refused),
            complaints: load(&of_owner.complaints),
            wrong: load(&of_owner.wrong),
            unforgotten: self.puller.unforgotten(),
        }
    }

    /// What went on at the port where peers connect.
    pub fn port(&self) -> Option<ServerStats> {
        self.agent.port_stats()
    }

    /// Whether peers can find this node, with those that it does not reach, a line each; or why
    /// not.
    pub fn readiness(&self) -> Result<String, String> {
        if let Some(conflict) = self.directory.conflict() {
            return Err(conflict);
        }
        let unreached = self.agent.stats().into_iter().filter_map(|peer| Some((peer.name, peer.unreached?)));
        let line = |(name, unreached): (String, Unreachable)| {
            format!("peer {name} is not reached ({}): {}\n", unreached.reason.label(), unreached.why)
        };
        Ok(unreached.map(line).collect())
    }

    /// Tells the agent of nodes that are new in the directory, and to forget those that are gone,
    /// in the background.
    fn sync_peers(&self) {
        let listed: HashMap<String, SocketAddr> =
            self.directory.nodes().into_iter().map(|node| (node.name, node.address)).collect();
        if *self.listed_peers.lock() == listed {
            return;
        }
        let (listed_peers, puller) = (Arc::clone(&self.listed_peers), Arc::clone(&self.puller));
        self.puller.later(move || {
            let Some(agent) = puller.agent() else { return };
            // Only now: another lookup may have had the same done meanwhile.
            let before = listed_peers.lock().clone();
            for name in before.keys().filter(|name| !listed.contains_key(*name)) {
                tracing::info!(peer = name, "peer left the directory");
                // One that is gone already is gone.
                let _ = agent.remove_peer(name);
            }
            let is_new = |(name, address): &(&String, &SocketAddr)| before.get(*name) != Some(*address);
            for (name, address) in listed.iter().filter(is_new) {
                match agent.add_address(name, *address) {
                    Ok(_) => {
                        tracing::info!(peer = name, %address, "peer joined the directory");
                        puller.connect(name);
                    }
                    Err(error) => tracing::warn!(peer = name, %address, reason = %error, "peer not taken"),
                }
            }
            *listed_peers.lock() = listed;
        });
    }

    /// Who is said to have each chunk, as far as it is known, of those that can be asked.
    fn holders(&self, tenant: TenantId, ids: &[ChunkId]) -> Vec<Vec<String>> {
        let said = match self.directory.holders(ids) {
            Holders::Said(said) => said,
            Holders::Unknown => {
                let now_us = self.puller.mover.now_us();
                let mut known = self.puller.known.lock();
                return ids.iter().map(|id| known.peers(now_us, tenant, id)).collect();
            }
        };
        let listed_peers = self.listed_peers.lock();
        let nodes = self.directory.nodes().into_iter().filter(|node| listed_peers.contains_key(&node.name));
        let names: HashMap<[u8; 16], String> = nodes.map(|node| (node.node, node.name)).collect();
        let names_of =
            |nodes: Vec<[u8; 16]>| nodes.iter().filter_map(|node| names.get(node).cloned()).collect();
        said.into_iter().map(names_of).collect()
    }

    /// How many of these chunks, from the first on, every peer has that has the first one:
    /// whichever of them is asked, it can lease them all.
    fn together(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let holders = self.holders(tenant, &ids[..ids.len().min(BATCH)]);
        let Some(first) = holders.first() else { return 0 };
        holders.iter().take_while(|peers| first.iter().all(|peer| peers.contains(peer))).count()
    }

    /// Peers that may have a chunk, the best one first.
    fn ranked(&self, tenant: TenantId, id: &ChunkId, bytes: u64) -> Vec<String> {
        let holders = self.holders(tenant, std::slice::from_ref(id)).pop().unwrap_or_default();
        let stats = self.agent.stats().into_iter();
        let candidate = |stat: PeerStat| Candidate {
            is_up: stat.state == "up",
            name: stat.name,
            moved_bytes: stat.counts.moved_bytes(),
            busy_us: stat.counts.busy_us,
            queued_bytes: stat.counts.in_flight_bytes(),
        };
        choice::rank(stats.filter(|stat| holders.contains(&stat.name)).map(candidate).collect(), bytes)
    }

    /// Asks every peer that is connected; those that are not are greeted, and will be asked another
    /// time.
    fn ask_around(&self, tenant: TenantId, ids: &[ChunkId], on_found: OnFound) {
        let ids = ids[..ids.len().min(LOOKUP_IDS_MAX)].to_vec();
        let ask = Question::Lookup(TenantKey::of(&self.puller.token, tenant), ids.clone()).encode();
        let puller = Arc::clone(&self.puller);
        let pending = Arc::new(Mutex::new(PendingLookup { puller, tenant, ids, on_found: Some(on_found) }));
        for peer in self.agent.stats() {
            if peer.state != "up" {
                self.puller.connect(&peer.name);
                continue;
            }
            let (pending, name) = (Arc::clone(&pending), peer.name.clone());
            // A peer that was forgotten a moment ago has nothing.
            let _ = self.agent.call(&peer.name, ask.clone(), LOOK_LIMIT_US, move |reply| {
                if let Ok(Ok(Answer::Found(chunks))) = reply.map(|bytes| Answer::decode(&bytes)) {
                    pending.lock().heard(&name, chunks as usize);
                }
            });
        }
        // With the last answer the last share of `pending` goes, and tells what was found.
    }
}

impl Drop for Peering {
    fn drop(&mut self) {
        let _ = self.puller.jobs.send(None);
        if let Some(worker) = self.worker.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = worker.join();
        }
        // What waits for a pull that was dropped would keep itself alive.
        let left_over = std::mem::take(&mut *self.puller.arrivals.lock());
        drop(left_over);
        let left_over = std::mem::take(&mut *self.puller.lease_queue.lock());
        drop(left_over);
    }
}

impl PendingLookup {
    fn heard(&self, peer: &str, chunks: usize) {
        let ids = &self.ids[..chunks.min(self.ids.len())];
        let now_us = self.puller.mover.now_us();
        self.puller.known.lock().note(now_us, self.tenant, ids, peer);
    }
}

impl Drop for PendingLookup {
    fn drop(&mut self) {
        let now_us = self.puller.mover.now_us();
        let found = self.puller.known.lock().prefix(now_us, self.tenant, &self.ids);
        if let Some(on_found) = self.on_found.take() {
            on_found(found);
        }
    }
}

impl Peering {
    /// How many of `ids`, which follow what this node has, other nodes have. `on_found` is called
    /// exactly once, soon, on any thread.
    pub fn lookup(&self, tenant: TenantId, ids: &[ChunkId], on_found: OnFound) {
        self.sync_peers();
        let ids = self.puller.known.lock().before_unfit(tenant, ids);
        if ids.is_empty() {
            return on_found(0);
        }
        match self.directory.holders(ids) {
            Holders::Said(_) => on_found(self.lookup_known(tenant, ids)),
            Holders::Unknown => self.ask_around(tenant, ids, on_found),
        }
    }

    /// The same as far as it is known without asking.
    pub fn lookup_known(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let ids = self.puller.known.lock().before_unfit(tenant, ids);
        self.holders(tenant, ids).iter().take_while(|peers| !peers.is_empty()).count()
    }

    /// Fetches the first chunk that is wanted into this node's memory, verified. `on_end` is called
    /// exactly once, on any thread.
    pub fn pull(&self, wanted: PullRequest, on_end: OnPulled) {
        let PullRequest { tenant, ids, parent, class, deadline_us, under } = wanted;
        let Some(first) = ids.first() else { return on_end(Err("no chunk".into())) };
        if let Some(guard) = self.puller.store.read_guard_by_id(tenant, first) {
            return on_end(Ok(guard));
        }
        // The first one is asked for in any case.
        let together = self.together(tenant, &ids).max(1);
        let class = RaisableClass::new(self.puller.store_mover(), class);
        let batch = match self.puller.claim(tenant, &ids[..together], &class, on_end) {
            0 => return,
            batch => ids[..batch].to_vec(),
        };
        let trace = ActiveSpan::begin(&self.puller.spans, under, "pull", SpanKind::Internal);
        let peers = self.ranked(tenant, first, 1 << 20);
        let puller = Arc::clone(&self.puller);
        Pull { puller, tenant, ids: batch, parent, class, deadline_us, peers, is_repeated: false, trace }
            .start();
    }

    /// Chunks that were fetched, and that were to be.
    pub fn pulled(&self) -> (u64, u64) {
        let counts = &self.puller.counts;
        (counts.pulled.load(Ordering::Relaxed), counts.failed.load(Ordering::Relaxed))
    }

    /// Leases nothing more to other nodes. What they have from this one stays leased.
    pub fn stop(&self) {
        self.owner.stop();
    }

    /// No node reaches this one from now on. When this returns another process can listen where
    /// this one did.
    pub fn close_port(&self) {
        self.agent.close_port();
    }

    /// Waits until other nodes have nothing from this one, and says how many leases they have when
    /// the time is over.
    pub fn wait_until_back(&self, until: Instant) -> usize {
        self.owner.wait_until_back(until)
    }
}

impl Puller {
    /// A peer was asked and leases nothing, or has its lease back: who waited for that asks.
    pub fn close(&self, peer: &str) {
        let next = self.lease_queue.lock().close(peer);
        next.into_iter().for_each(Pull::start);
    }

    /// `None`: the node is ending.
    pub fn agent(&self) -> Option<Arc<Agent>> {
        self.agent.upgrade()
    }

    /// The mover that moves what is pulled.
    pub fn store_mover(&self) -> &MoverHandle {
        &self.mover
    }

    /// Has a thread do it that may wait.
    pub fn later(&self, job: impl FnOnce() + Send + 'static) {
        // What is left over when the node ends is dropped, and says so to whoever waits.
        let _ = self.jobs.send(Some(Box::new(job)));
    }

    /// Makes a peer's acquaintance, so that it can be asked next time.
    fn connect(&self, name: &str) {
        let nothing = Question::Lookup(TenantKey::of(&self.token, TenantId::default()), Vec::new());
        // Whoever is not there now is greeted again.
        let _ = self.agent().map(|agent| agent.call(name, nothing.encode(), CONNECT_LIMIT_US, |_| {}));
    }

    /// Waits for the first of `ids`. Says how many of them the caller has to pull: none if somebody
    /// else pulls it already, who does it as urgently from now on.
    fn claim(&self, tenant: TenantId, ids: &[ChunkId], class: &RaisableClass, on_end: OnPulled) -> usize {
        let mut arrivals = self.arrivals.lock();
        let Some(on_end) = arrivals.wait_for_end(tenant, &ids[0], on_end) else {
            let joined = arrivals.class(tenant, &ids[0]);
            drop(arrivals);
            joined.into_iter().for_each(|joined| joined.raise(class.get()));
            return 0;
        };
        let now_us = self.mover.now_us();
        let along = match arrivals.room(now_us, tenant, &ids[0]) {
            Ok(along) => along.min(BATCH - 1),
            Err(not_taken) => {
                drop(arrivals);
                on_end(Err(not_taken.to_string()));
                return 0;
            }
        };
        let free = |id: &&ChunkId| {
            arrivals.may_come_along(now_us, tenant, id)
                && self.store.lookup(tenant, std::slice::from_ref(*id)) == 0
        };
        let batch = 1 + ids[1..].iter().take(along).take_while(free).count();
        ids[..batch].iter().for_each(|id| arrivals.add(tenant, id, class.clone()));
        // It has just been added.
        let _ = arrivals.wait_for_end(tenant, &ids[0], on_end);
        batch
    }

    /// Does it as soon as a chunk has a slot, or will have none: those that follow it may have one
    /// only then.
    pub fn when_placed(&self, tenant: TenantId, id: &ChunkId, job: impl FnOnce() + Send + 'static) {
        let job = self.arrivals.lock().wait_for_slot(tenant, id, Box::new(job));
        if let Some(job) = job {
            job();
        }
    }

    /// A chunk has a slot.
    pub fn placed(&self, tenant: TenantId, id: &ChunkId) {
        let jobs = self.arrivals.lock().place(tenant, id);
        jobs.into_iter().for_each(|job| self.later(job));
    }

    /// What a peer leased did not come, and is asked for at another peer.
    pub fn displaced(&self, tenant: TenantId, id: &ChunkId, peer: &str, why: &str) {
        self.counts.retried.fetch_add(1, Ordering::Relaxed);
        self.arrivals.lock().displace(tenant, id);
        if let Some(repeated) = self.retried_gate.pass() {
            tracing::warn!(
                peer,
                reason = why,
                repeated,
                "chunk of a peer did not come; another peer is asked"
            );
        }
    }

    /// A chunk is here, or will not be: everybody who waits is told, each with a guard of their
    /// own.
    pub fn ended(&self, tenant: TenantId, id: &ChunkId, outcome: Result<(), String>) {
        let counter = if outcome.is_ok() { &self.counts.pulled } else { &self.counts.failed };
        counter.fetch_add(1, Ordering::Relaxed);
        self.tell(tenant, id, outcome);
    }

    /// The same for a chunk that has come here by another way.
    pub fn is_here(&self, tenant: TenantId, id: &ChunkId) {
        self.tell(tenant, id, Ok(()));
    }

    fn tell(&self, tenant: TenantId, id: &ChunkId, outcome: Result<(), String>) {
        let waiting = self.arrivals.lock().end(tenant, id);
        waiting.jobs.into_iter().for_each(|job| self.later(job));
        for on_end in waiting.on_ends {
            let guard = || {
                self.store.read_guard_by_id(tenant, id).ok_or("evicted as soon as it was there".to_owned())
            };
            on_end(outcome.clone().and_then(|()| guard()));
        }
    }

    /// A peer does not lease what it was said to have.
    pub fn denied(&self, tenant: TenantId, ids: &[ChunkId], peer: &str) {
        self.counts.denied.fetch_add(1, Ordering::Relaxed);
        self.has_none(tenant, ids, peer);
    }

    /// A peer has none of these chunks.
    fn has_none(&self, tenant: TenantId, ids: &[ChunkId], peer: &str) {
        let mut known = self.known.lock();
        ids.iter().for_each(|id| known.deny(tenant, id, peer));
    }

    /// A chunk was forgotten while it was on its way.
    pub fn is_forgotten(&self, tenant: TenantId, id: &ChunkId) -> bool {
        self.arrivals.lock().is_forgotten(tenant, id)
    }

    /// No slab here holds a chunk: whoever looks for it finds it on no peer.
    pub fn does_not_fit(&self, tenant: TenantId, id: &ChunkId) {
        self.known.lock().note_unfit(tenant, *id);
    }

    /// A peer leased one thing and gave another: it is not believed to have the chunk, and told, so
    /// that it looks for itself.
    pub fn is_wrong(&self, tenant: TenantId, id: &ChunkId, peer: &str) {
        self.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        if let Some(repeated) = self.corrupt_gate.pass() {
            tracing::error!(peer, repeated, "corrupt chunk from a peer");
        }
        self.known.lock().deny(tenant, id, peer);
        let wrong = Question::Wrong(TenantKey::of(&self.token, tenant), *id).encode();
        // One that does not hear it goes on leasing what nobody takes.
        let _ = self.agent().map(|agent| agent.call(peer, wrong, TELL_LIMIT_US, |_| {}));
    }
}
