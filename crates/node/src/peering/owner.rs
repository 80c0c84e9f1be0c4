//! What this node has for its peers: it answers who has what, and leases chunks of the arena to
//! them. It does not trust that whoever asks means well.
//!
//! A chunk on disk comes into memory before it is leased. As long as a lease lives its chunks lie
//! still; after it has ended no read of it ends well, whatever it has got by then.

use super::arrivals::Arrivals;
use super::forget::forget_here;
use super::messages::{Answer, Question, RemoteLease, TenantKey};
use forebay_client::protocol::answer::ChunkPlace;
use forebay_kv::ChunkId;
use forebay_net::{Identity, LeaseTable, LeasedSpan, PeerRegion, Reply, Service};
use forebay_otlp::{ActiveSpan, SpanKind, Spans};
use forebay_store::{Lease, NotFetched, ReadGuard, Store, TenantId};
use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{Class, MoverHandle, TraceContext};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How long a chunk may wait for the disk to be leased: others may be served first.
const READ_LIMIT_US: u64 = 20_000_000;
/// Chunks that are examined at a time because peers found them wrong. Others are not.
const EXAMINING_MAX: usize = 4;
/// Bytes of checksums and places in an answer at most.
const ANSWER_BYTES_MAX: usize = 900 << 10;

/// The owner's end.
pub struct Owner {
    store: Store,
    /// What comes here from peers.
    arrivals: Arc<Mutex<Arrivals>>,
    mover: MoverHandle,
    token: Vec<u8>,
    /// Bytes that may be leased to a peer at a time.
    leased_bytes_max: u64,
    /// What the agent that is asked has: known when it is there.
    opened: OnceLock<(LeaseTable, PeerRegion)>,
    leased: Arc<LeasedBytes>,
    stopped: AtomicBool,
    examining: AtomicUsize,
    counts: OwnerCounts,
    spans: Arc<Spans>,
}

/// Bytes that are leased to each peer, by its instance.
#[derive(Default)]
struct LeasedBytes {
    peers: Mutex<HashMap<[u8; 16], u64>>,
    /// Nobody has anything any more.
    all_back: Condvar,
}

#[derive(Debug, Default)]
pub struct OwnerCounts {
    /// Chunks that were leased.
    pub leased: AtomicU64,
    /// Questions that were refused.
    pub refused: AtomicU64,
    /// Chunks that peers found wrong.
    pub complaints: AtomicU64,
    /// Of those, chunks that were wrong here too.
    pub wrong: AtomicU64,
}

/// Chunks that come together to be leased.
struct LeaseRequest {
    owner: Arc<Owner>,
    from: Identity,
    ttl_us: u64,
    /// Keeps the chunks where they are until they are leased to the peer.
    _lease: Lease,
    state: Mutex<LeaseRequestState>,
}

struct LeaseRequestState {
    guards: Vec<Option<ReadGuard>>,
    missing: usize,
    reply: Option<Traced>,
}

/// Whose chunks are to be leased, for how long, how urgently, and which.
type Wish = (TenantKey, u64, Class, Vec<ChunkId>);

/// Who waits for an answer, and the span that ends with it, if it is traced.
type Traced = (Reply, Option<ActiveSpan>);

impl Owner {
    /// An owner that leases nothing before [`open`](Owner::open).
    pub fn new(
        (store, arrivals): (Store, Arc<Mutex<Arrivals>>),
        mover: MoverHandle,
        token: Vec<u8>,
        leased_bytes_max: u64,
        spans: Arc<Spans>,
    ) -> Owner {
        Owner {
            store,
            arrivals,
            mover,
            token,
            leased_bytes_max,
            opened: OnceLock::new(),
            leased: Arc::default(),
            stopped: AtomicBool::new(false),
            examining: AtomicUsize::new(0),
            counts: OwnerCounts::default(),
            spans,
        }
    }

    /// Leases chunks of this region from now on.
    pub fn open(&self, leases: LeaseTable, region: PeerRegion) {
        // Set once: there is one agent.
        let _ = self.opened.set((leases, region));
    }

    /// Leases nothing more. What is leased stays so.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Waits until nothing is leased, and says how many leases live when the time is over.
    pub fn wait_until_back(&self, until: Instant) -> usize {
        let mut leased = self.leased.peers.lock();
        self.leased.all_back.wait_while_until(&mut leased, |leased| !leased.is_empty(), until);
        let all_back = leased.is_empty();
        drop(leased);
        match self.opened.get() {
            Some((leases, _)) if !all_back => leases.len(),
            _ => 0,
        }
    }

    pub fn counts(&self) -> &OwnerCounts {
        &self.counts
    }

    fn trace(&self, within: TraceContext, from: &Identity) -> Option<ActiveSpan> {
        let mut span = ActiveSpan::begin(&self.spans, Some(within), "lend", SpanKind::Server)?;
        span.note("peer", hex::encode(from.node));
        Some(span)
    }

    fn refuse(&self, reply: Reply, why: String) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        reply.refuse(why);
    }

    fn tenant(&self, key: &TenantKey) -> Result<TenantId, String> {
        if TenantKey::of(&self.token, key.tenant) != *key {
            return Err(format!("the key is not that of {:?} here", key.tenant));
        }
        Ok(key.tenant)
    }

    fn lease(owner: Arc<Owner>, from: Identity, (key, ttl_us, class, ids): Wish, (reply, span): Traced) {
        let tenant = match owner.tenant(&key) {
            Ok(_) if owner.stopped.load(Ordering::Acquire) => {
                return owner.refuse(reply, "shutting down".into());
            }
            Ok(tenant) => tenant,
            Err(why) => return owner.refuse(reply, why),
        };
        let lease = owner.store.lease(tenant, &ids, ttl_us + READ_LIMIT_US);
        let chunks = lease.len();
        if chunks == 0 {
            return owner.refuse(reply, "none of these chunks is here".into());
        }
        let guards = (0..chunks).map(|_| None).collect();
        // One more is missing until all were asked for, so that the end is told once.
        let state = LeaseRequestState { guards, missing: chunks + 1, reply: Some((reply, span)) };
        let deadline_us = Some(owner.mover.now_us() + READ_LIMIT_US);
        let store = owner.store.clone();
        let request = Arc::new(LeaseRequest { owner, from, ttl_us, _lease: lease, state: Mutex::new(state) });
        let gathered = Arc::clone(&request);
        let on_end = move |chunk, guard: Result<_, NotFetched>| gathered.arrived(Some(chunk), guard.ok());
        store.fetch_many(&request._lease, 0..chunks, class, deadline_us, on_end);
        request.arrived(None, None);
    }
}

impl Owner {
    /// Has a lease of this peer live on.
    fn renew(&self, from: &Identity, lease: u64, ttl_us: u64, reply: Reply) {
        let Some((leases, _)) = self.opened.get() else { return self.refuse(reply, "not open yet".into()) };
        match leases.renew(from.instance, lease, ttl_us) {
            Ok(()) => reply.send(Answer::Heard.encode()),
            Err(error) => self.refuse(reply, error.to_string()),
        }
    }

    /// A peer has these chunks forgotten, wherever they are.
    fn forget(&self, key: &TenantKey, ids: &[ChunkId]) -> Result<Answer, String> {
        let (tenant, here) = (self.tenant(key)?, (&self.store, &*self.arrivals));
        let had = forget_here(here, self.mover.now_us(), tenant, ids);
        had.map(Answer::Forgotten).map_err(|error| error.to_string())
    }

    /// A peer found a chunk wrong. Only what is wrong here too is dropped: the peer's memory may be
    /// at fault. It takes as long as reading the chunk, which is too long for the connection's
    /// thread.
    fn examine(owner: &Arc<Owner>, from: Identity, key: &TenantKey, id: ChunkId, reply: Reply) {
        let tenant = match owner.tenant(key) {
            Ok(tenant) => tenant,
            Err(why) => return owner.refuse(reply, why),
        };
        owner.counts.complaints.fetch_add(1, Ordering::Relaxed);
        let room = |examining: usize| (examining < EXAMINING_MAX).then_some(examining + 1);
        if owner.examining.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).is_err() {
            return owner.refuse(reply, format!("{EXAMINING_MAX} chunks are being examined"));
        }
        let examining = Examining(Arc::clone(owner));
        let examine = move || {
            let owner = &examining.0;
            if owner.store.read_guard_by_id(tenant, &id).is_some_and(|guard| !guard.check()) {
                owner.counts.wrong.fetch_add(1, Ordering::Relaxed);
                let node = hex::encode(from.node);
                tracing::error!(node, "corrupt chunk in memory, found by a peer");
            }
            reply.send(Answer::Heard.encode());
        };
        // Without a thread the reply is dropped, which refuses.
        let _ = std::thread::Builder::new().name("forebay-examine".into()).spawn(examine);
    }
}

/// One of those that are examined at a time.
struct Examining(Arc<Owner>);

impl Drop for Examining {
    fn drop(&mut self) {
        self.0.examining.fetch_sub(1, Ordering::AcqRel);
    }
}

impl LeaseRequest {
    fn arrived(&self, chunk: Option<usize>, guard: Option<ReadGuard>) {
        let mut state = self.state.lock();
        if let Some(place) = chunk.and_then(|chunk| state.guards.get_mut(chunk)) {
            *place = guard;
        }
        state.missing -= 1;
        let reply = if state.missing == 0 { state.reply.take() } else { None };
        // The span ends when the answer has gone.
        let Some((reply, mut span)) = reply else { return };
        let guards: Vec<ReadGuard> =
            std::mem::take(&mut state.guards).into_iter().map_while(|guard| guard).collect();
        drop(state);
        match self.grant(guards) {
            Ok(told) => {
                let heard = reply.try_send(told.encode());
                if let (false, Answer::Leased(leased), Some((leases, _))) =
                    (heard, told, self.owner.opened.get())
                {
                    // Nobody knows of it who could give it back.
                    leases.revoke(leased.lease);
                }
            }
            Err(why) => {
                if let Some(span) = &mut span {
                    span.fail(&why);
                }
                self.owner.refuse(reply, why);
            }
        }
    }

    /// Grants a lease of as many chunks as the peer may have.
    fn grant(&self, mut guards: Vec<ReadGuard>) -> Result<Answer, String> {
        let owner = &self.owner;
        let (leases, region) = owner.opened.get().ok_or("not open yet")?;
        let instance = self.from.instance;
        let any = !guards.is_empty();
        let (bytes, others) = {
            let mut leased = owner.leased.peers.lock();
            let has = leased.entry(instance).or_default();
            let fitting = fitting(&guards, owner.leased_bytes_max.saturating_sub(*has));
            guards.truncate(fitting.0);
            *has += fitting.1;
            (fitting.1, *has > fitting.1)
        };
        let chunks: Vec<ChunkPlace> = guards.iter().map(ChunkPlace::from).collect();
        let spans = guards.iter().map(|guard| span(*region, guard)).collect();
        let count = guards.len();
        // Dropped also where there is no lease.
        let kept = Pinned { guards, bytes, instance, leased: Arc::clone(&owner.leased) };
        match count {
            0 if any && others => return Ok(Answer::NotNow),
            0 => return Err("no chunk could be lent: not readable, or larger than what may be lent".into()),
            _ => {}
        }
        let granted = leases.grant(instance, spans, self.ttl_us, move |_| drop(kept));
        let lease = granted.map_err(|error| error.to_string())?;
        owner.counts.leased.fetch_add(count as u64, Ordering::Relaxed);
        let region = (region.key, region.generation, region.len);
        Ok(Answer::Leased(RemoteLease { lease, region, chunks }))
    }
}

/// What a lease keeps.
struct Pinned {
    guards: Vec<ReadGuard>,
    bytes: u64,
    instance: [u8; 16],
    leased: Arc<LeasedBytes>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.guards.clear();
        let mut peers = self.leased.peers.lock();
        if let Some(leased) = peers.get_mut(&self.instance) {
            *leased = leased.saturating_sub(self.bytes);
            if *leased == 0 {
                peers.remove(&self.instance);
            }
        }
        if peers.is_empty() {
            self.leased.all_back.notify_all();
        }
    }
}

/// How many of the chunks, from the first on, fit into an answer and a number of bytes, and how
/// many bytes they are.
fn fitting(guards: &[ReadGuard], bytes_max: u64) -> (usize, u64) {
    let (mut count, mut bytes, mut answer) = (0, 0, 0);
    for guard in guards {
        let shape = guard.shape();
        // A run of its own for each layer, at worst.
        answer += 32 + 16 * shape.layers();
        if bytes + shape.bytes() > bytes_max || answer > ANSWER_BYTES_MAX {
            break;
        }
        (count, bytes) = (count + 1, bytes + shape.bytes());
    }
    (count, bytes)
}

fn span(region: PeerRegion, guard: &ReadGuard) -> LeasedSpan {
    LeasedSpan { region, offset: guard.offset_bytes(), len: guard.shape().bytes() }
}

/// The owner as its agent's service.
pub struct PeerService(pub Arc<Owner>);

impl Service for PeerService {
    fn call(&self, from: Identity, body: Vec<u8>, reply: Reply) {
        let owner = &self.0;
        match Question::decode(&body) {
            Ok(Question::Lookup(key, ids)) => match owner.tenant(&key) {
                Ok(tenant) => reply.send(Answer::Found(owner.store.lookup(tenant, &ids) as u32).encode()),
                Err(why) => owner.refuse(reply, why),
            },
            Ok(Question::Lease(key, ttl_us, class, ids, within)) => {
                let span = within.and_then(|within| owner.trace(within, &from));
                Owner::lease(Arc::clone(owner), from, (key, ttl_us, class, ids), (reply, span));
            }
            Ok(Question::Return(lease)) => {
                if let Some((leases, _)) = owner.opened.get() {
                    // One that has ended is over as well.
                    leases.give_back(from.instance, lease);
                }
                reply.send(Answer::Heard.encode());
            }
            Ok(Question::Renew(lease, ttl_us)) => owner.renew(&from, lease, ttl_us, reply),
            Ok(Question::Wrong(key, id)) => Owner::examine(owner, from, &key, id, reply),
            Ok(Question::Forget(key, ids)) => match owner.forget(&key, &ids) {
                Ok(forgotten) => reply.send(forgotten.encode()),
                Err(why) => owner.refuse(reply, why),
            },
            Err(bad) => owner.refuse(reply, bad.to_string()),
        }
    }

    /// The agent ends the peer's leases.
    fn gone(&self, _from: Identity) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Node, NodeConfig, PeersConfig};
    use forebay_net::{Agent, AgentConfig, PeerError};
    use forebay_store::ChunkShape;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(30);

    const RIGHT: ChunkId = ChunkId::from_bytes([7; 32]);
    const WRONG: ChunkId = ChunkId::from_bytes([8; 32]);

    /// A node with two chunks, and an agent that is its peer.
    struct Rig {
        asker: Agent,
        node: Node,
        _folder: tempfile::TempDir,
    }

    impl Rig {
        fn new() -> Rig {
            let folder = tempfile::tempdir().unwrap();
            let mut config = NodeConfig::new(folder.path().join("node.sock"), 16 << 20);
            config.name = "left".into();
            config.peers = Some(PeersConfig::new(([127, 0, 0, 1], 0).into()));
            let node = Node::start(&config).unwrap();
            for (id, is_right) in [(RIGHT, true), (WRONG, false)] {
                let shape = ChunkShape::new([5000, 6000]).unwrap();
                let slot = node.store().reserve(TenantId(0), id, None, &shape).unwrap().unwrap();
                let mut sums = slot.checksums();
                // Bytes that have other sums than they should are as wrong as bytes that have
                // changed.
                sums[1] ^= u32::from(!is_right);
                slot.commit(&sums).unwrap();
            }
            let asker = Agent::start(AgentConfig { listen: None, ..AgentConfig::named("asker") }).unwrap();
            asker.add_address("left", node.peer_address().unwrap()).unwrap();
            Rig { asker, node, _folder: folder }
        }

        fn ask(&self, ask: &Question) -> Result<Answer, String> {
            Rig::ask_by(&self.asker, ask)
        }

        fn ask_by(asker: &Agent, ask: &Question) -> Result<Answer, String> {
            Rig::ask_bytes(asker, ask.encode())
        }

        fn ask_bytes(asker: &Agent, ask: Vec<u8>) -> Result<Answer, String> {
            let (sender, answered) = channel();
            let on_reply = move |reply: Result<Vec<u8>, PeerError>| {
                let bytes = reply.map_err(|why| why.to_string());
                let told = bytes.and_then(|bytes| Answer::decode(&bytes).map_err(|bad| bad.to_string()));
                drop(sender.send(told));
            };
            asker.call("left", ask, LIMIT.as_micros() as u64, on_reply).unwrap();
            answered.recv_timeout(2 * LIMIT).unwrap()
        }

        fn leased(&self, ttl_us: u64) -> u64 {
            match self.ask(&Question::Lease(key(), ttl_us, Class::Demand, vec![RIGHT], None)) {
                Ok(Answer::Leased(leased)) => leased.lease,
                other => panic!("{other:?}"),
            }
        }
    }

    fn key() -> TenantKey {
        TenantKey::of(b"", TenantId(0))
    }

    #[test]
    fn a_lease_lives_as_long_as_it_is_renewed_and_not_for_others() {
        let rig = Rig::new();
        let ttl_us = 3_000_000;
        let (left, kept) = (rig.leased(ttl_us), rig.leased(ttl_us));
        assert_eq!(rig.ask(&Question::Renew(kept, 60_000_000)), Ok(Answer::Heard));
        let lease_is_over = |lease| rig.ask(&Question::Renew(lease, 1)).is_err();
        std::thread::sleep(Duration::from_micros(ttl_us));
        assert!(lease_is_over(left), "nobody renewed it");
        assert_eq!(rig.ask(&Question::Renew(kept, 60_000_000)), Ok(Answer::Heard));
        let other = Agent::start(AgentConfig { listen: None, ..AgentConfig::named("other") }).unwrap();
        other.add_address("left", rig.node.peer_address().unwrap()).unwrap();
        let rig = Rig { asker: other, ..rig };
        assert!(rig.ask(&Question::Renew(kept, 60_000_000)).is_err(), "it is another's");
    }

    #[test]
    fn a_node_that_ends_leases_nothing_new_and_waits_until_what_it_has_leased_is_back() {
        let rig = Rig::new();
        let lease = rig.leased(60_000_000);
        let Rig { asker, node, _folder } = rig;
        let since = Instant::now();
        let drained = std::thread::spawn(move || node.drain(10 * LIMIT).unwrap());
        let ask = |ask| Rig::ask_by(&asker, &ask);
        while let Ok(Answer::Leased(leased)) =
            ask(Question::Lease(key(), 60_000_000, Class::Demand, vec![RIGHT], None))
        {
            assert_eq!(ask(Question::Return(leased.lease)), Ok(Answer::Heard));
            assert!(since.elapsed() < LIMIT, "it still leases");
        }
        assert_eq!(
            ask(Question::Renew(lease, 60_000_000)),
            Ok(Answer::Heard),
            "what is leased may be read on"
        );
        assert!(!drained.is_finished());
        // The node may have ended before it answers.
        let _ = ask(Question::Return(lease));
        assert_eq!(drained.join().unwrap().cut_off, 0);
        assert!(since.elapsed() < 5 * LIMIT);
    }

    #[test]
    fn a_node_that_ends_waits_for_no_peer_longer_than_it_may() {
        let rig = Rig::new();
        rig.leased(60_000_000);
        assert_eq!(rig.node.drain(Duration::from_millis(50)).unwrap().cut_off, 1);
    }

    #[test]
    fn a_peer_has_its_own_tenants_chunks_forgotten_and_no_others() {
        let rig = Rig::new();
        let forget = |key| rig.ask(&Question::Forget(key, vec![RIGHT, ChunkId::from_bytes([9; 32])]));
        assert!(forget(TenantKey::of(b"guessed", TenantId(0))).is_err());
        let of_another = forget(TenantKey::of(b"", TenantId(1)));
        assert_eq!(of_another, Ok(Answer::Forgotten(vec![false, false])));
        assert_eq!(rig.node.store().lookup(TenantId(0), &[RIGHT]), 1);
        assert_eq!(forget(key()), Ok(Answer::Forgotten(vec![true, false])));
        assert_eq!(
            (rig.node.store().lookup(TenantId(0), &[RIGHT]), rig.node.store().lookup(TenantId(0), &[WRONG])),
            (0, 1)
        );
    }

    #[test]
    fn a_question_that_only_later_programs_know_is_refused_and_the_next_one_is_answered() {
        let rig = Rig::new();
        let mut unknown = Question::Lookup(key(), vec![RIGHT]).encode();
        unknown[1] = 7;
        let refused = Rig::ask_bytes(&rig.asker, unknown).unwrap_err();
        assert!(refused.contains("a question is 7; allowed is 1 to 6"), "{refused}");
        assert_eq!(rig.ask(&Question::Lookup(key(), vec![RIGHT])), Ok(Answer::Found(1)));
        assert!(rig.asker.stats()[0].counts.faults.is_empty(), "the connection is the same");
    }

    #[test]
    fn what_a_peer_finds_wrong_is_dropped_if_it_is_wrong_here_too() {
        let rig = Rig::new();
        let complained = |id| rig.ask(&Question::Wrong(key(), id));
        let counts = || {
            let stat = rig.node.peering_stat().unwrap();
            (stat.complaints, stat.wrong)
        };
        let store = rig.node.store();
        assert_eq!((complained(RIGHT), counts()), (Ok(Answer::Heard), (1, 0)));
        assert_eq!((store.lookup(TenantId(0), &[RIGHT]), store.lookup(TenantId(0), &[WRONG])), (1, 1));
        assert_eq!((complained(WRONG), counts()), (Ok(Answer::Heard), (2, 1)));
        assert_eq!((store.lookup(TenantId(0), &[RIGHT]), store.lookup(TenantId(0), &[WRONG])), (1, 0));
        assert!(rig.ask(&Question::Wrong(TenantKey::of(b"guessed", TenantId(0)), RIGHT)).is_err());
        assert_eq!(counts(), (2, 1), "who does not know the key is not heard");
    }
}
