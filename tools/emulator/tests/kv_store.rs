//! Guarantees of an engine whose store is not its own: it may go away and come back at any moment,
//! and have chunks from elsewhere. Tokens stay right, and what was computed for that reason is
//! counted by it.

mod common;

use common::{Client, config, oracle, tokens};
use forebay_emulator::scheduler::Residence;
use forebay_emulator::{Engine, EngineConfig, EngineHandle, StoreConnection};
use forebay_kv::ChunkId;
use forebay_steps::Launch;
use forebay_store::chunk_store::{ChunkLease, ChunkStore, Miss, NotTaken, OnLoaded, OnStored, TenantStore};
use forebay_store::{Store, TenantId, TierConfig};
use forebay_transfer::HostLink;
use forebay_transfer::Pages;
use forebay_transfer::{Class, Limits, LinkSpec, MoverThread, PathSpec, Place, Span};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use testkit::eventually_async;

/// Where a store that can go away stands. Shared by its leases.
#[derive(Debug, Default)]
struct Fate {
    gone: AtomicBool,
    /// It goes away as soon as it has granted a lease.
    goes_after_lease: AtomicBool,
    /// Its leases are dead when they are used.
    kills_leases: AtomicBool,
}

/// A store that can go away, and has all chunks but the first from a peer.
#[derive(Debug)]
struct Elsewhere {
    inner: TenantStore,
    fate: Arc<Fate>,
}

#[derive(Debug)]
struct ElsewhereLease {
    inner: Box<dyn ChunkLease>,
    fate: Arc<Fate>,
}

impl Fate {
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

impl ChunkStore for Elsewhere {
    fn is_reachable(&self) -> bool {
        !self.fate.is_gone()
    }

    fn lookup(&self, ids: &[ChunkId]) -> usize {
        if self.fate.is_gone() { 0 } else { self.inner.lookup(ids) }
    }

    fn used(&self, ids: &[ChunkId], chunk_bytes: u64) {
        self.inner.used(ids, chunk_bytes);
    }

    fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Box<dyn ChunkLease> {
        let lease = ElsewhereLease { inner: self.inner.lease(ids, ttl_us), fate: Arc::clone(&self.fate) };
        if self.fate.goes_after_lease.load(Ordering::Acquire) {
            self.fate.gone.store(true, Ordering::Release);
        }
        Box::new(lease)
    }

    fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: OnStored,
    ) -> Result<(), NotTaken> {
        match self.fate.is_gone() {
            true => Err(NotTaken),
            false => self.inner.store_chunk(id, parent, layers, class, on_end),
        }
    }
}

impl ChunkLease for ElsewhereLease {
    fn residence(&self) -> Residence {
        let chunks = self.inner.residence().chunks();
        let memory = chunks.min(1);
        Residence { memory, disk: 0, peers: chunks - memory }
    }

    fn load_chunk(
        &self,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: OnLoaded,
    ) -> Result<(), Miss> {
        if self.fate.is_gone() {
            return Err(Miss::Unmoved);
        }
        self.inner.load_chunk(chunk, targets, class, deadline_us, on_end)
    }

    fn verify(&self, chunk: usize, layer: usize, bytes: &[u8]) -> Result<(), Miss> {
        if self.fate.kills_leases.load(Ordering::Acquire) {
            return Err(Miss::DeadLease);
        }
        self.inner.verify(chunk, layer, bytes)
    }
}

/// Two engines over one such store, of which the first has computed `prompt`: four chunks.
struct Rig {
    fate: Arc<Fate>,
    config: EngineConfig,
    prompt: Vec<u32>,
    first: EngineHandle,
    second: EngineHandle,
    client: Client,
    _mover: MoverThread,
}

impl Rig {
    async fn new() -> Rig {
        let mover = MoverThread::spawn(Limits::default()).expect("a mover");
        let handle = mover.handle();
        let tier = TierConfig { slab_bytes: 1 << 18, ..TierConfig::new(32 << 20) };
        let store = Store::open(&handle, Place::Host(0), Pages::Base, tier).expect("a store");
        let link = Box::new(HostLink::new(1).expect("a host link"));
        let link = handle.add_link(LinkSpec::new("copy", 4, 64 << 20), link).expect("added");
        let fate = Arc::new(Fate::default());
        let mut config = config();
        config.profile.memory.pool_tokens = 8_192;
        // Short steps: what fits into a step that runs anyway is not loaded from peers.
        config.launch = Launch::Graph;
        let mut engines = Vec::new();
        for device in [Place::Device(0), Place::Device(1)] {
            for (from, to) in [(Place::Host(0), device), (device, Place::Host(0))] {
                handle.add_path(PathSpec::direct(from, to, link)).expect("alive").expect("added");
            }
            let inner = TenantStore::new(store.clone(), TenantId::default());
            let store = Arc::new(Elsewhere { inner, fate: Arc::clone(&fate) });
            let connection = StoreConnection { store, mover: handle.clone(), device };
            engines.push(Engine::spawn(config.clone(), Some(connection)).await.expect("it starts"));
        }
        let [second, first] = [engines.pop(), engines.pop()].map(|engine| engine.expect("two"));
        let prompt = tokens(1_100, 1);
        Client::new(first.address()).complete(&prompt, 1).await;
        eventually_async("four chunks are stored", || store.stat().chunks >= 4).await;
        let client = Client::new(second.address());
        Rig { fate, config, prompt, first, second, client, _mover: mover }
    }

    /// What the second engine answers, after a look at whether it is right, by `(external, peer)`
    /// tokens of its usage.
    async fn ask(&self) -> (u64, u64) {
        let (answer, usage) = self.client.complete(&self.prompt, 20).await;
        assert_eq!(oracle(&self.config).wrong_tokens(&self.prompt, &answer), 0);
        let details = &usage["prompt_tokens_details"];
        let number = |name: &str| details[name].as_u64().expect("a number");
        (number("external_cached_tokens"), number("peer_cached_tokens"))
    }

    async fn stop(self) {
        self.first.shutdown(Duration::from_secs(1)).await;
        self.second.shutdown(Duration::from_secs(1)).await;
    }
}

#[tokio::test]
async fn what_came_from_a_peer_is_counted_as_such() {
    let rig = Rig::new().await;
    assert_eq!(rig.ask().await, (1_024, 768));
    let stats = rig.second.stats();
    assert_eq!((stats.store.loaded_chunks, stats.store.peer_chunks, stats.store.disk_chunks), (4, 3, 0));
    assert_eq!((stats.scheduler.store_hits_tokens, stats.scheduler.peer_hits_tokens), (1_024, 768));
    let (_, metrics) = rig.client.get("/metrics").await;
    assert!(metrics.contains(r#"tier="peer"} 768"#) && metrics.contains(r#"source="peer"} 3"#), "{metrics}");
    rig.stop().await;
}

#[tokio::test]
async fn an_engine_whose_node_is_gone_computes_everything_itself() {
    let rig = Rig::new().await;
    rig.fate.gone.store(true, Ordering::Release);
    assert_eq!(rig.ask().await, (0, 0));
    let store = rig.second.stats().store;
    assert_eq!((store.unasked_chunks, store.loaded_chunks, store.node_gone_chunks), (4, 0, 0));
    assert!(store.refused_chunks > 0, "nobody takes what it computed");
    rig.stop().await;
}

#[tokio::test]
async fn chunks_that_are_lost_with_their_node_are_counted_by_that_reason() {
    let rig = Rig::new().await;
    rig.fate.goes_after_lease.store(true, Ordering::Release);
    assert_eq!(rig.ask().await, (0, 0));
    let store = rig.second.stats().store;
    assert_eq!((store.node_gone_chunks, store.unmoved_chunks, store.missing_chunks), (1, 0, 0));
    rig.stop().await;
}

#[tokio::test]
async fn bytes_under_a_dead_lease_are_not_used() {
    let rig = Rig::new().await;
    rig.fate.kills_leases.store(true, Ordering::Release);
    assert_eq!(rig.ask().await, (0, 0));
    let store = rig.second.stats().store;
    assert_eq!((store.dead_lease_chunks, store.loaded_chunks, store.unasked_chunks), (1, 0, 0));
    rig.stop().await;
}

#[tokio::test]
async fn a_node_that_comes_back_is_used_again() {
    let rig = Rig::new().await;
    rig.fate.gone.store(true, Ordering::Release);
    let other = tokens(600, 9);
    rig.client.complete(&other, 1).await;
    rig.fate.gone.store(false, Ordering::Release);
    assert_eq!(rig.ask().await, (1_024, 768));
    rig.stop().await;
}
