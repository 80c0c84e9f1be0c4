//! Guarantees of an engine with a store: what another engine computed is loaded and not computed
//! again, and whatever happens to a chunk on its way, the tokens stay right.

mod common;

use common::{Client, FAST, config, oracle, tokens};
use forebay_emulator::{Engine, EngineConfig, EngineHandle, StoreConnection};
use forebay_steps::Launch;
use forebay_store::admission::Policy;
use forebay_store::chunk_store::TenantStore;
use forebay_store::disk::{Action, Completed, DiskFile, DiskLink, DiskOptions, Kernel, Request, Threads};
use forebay_store::ssd::{Existing, FileMedium, Ssd, SsdOptions, Volume, init};
use forebay_store::{Store, TenantId, TierConfig, WriteBackConfig};
use forebay_transfer::Pages;
use forebay_transfer::Waker;
use forebay_transfer::{BitFlips, HostLink};
use forebay_transfer::{
    Completion, Limits, Link, LinkOp, LinkSpec, Memory, MoverThread, Outcome, PathSpec, Place,
};
use http::Method;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use testkit::eventually_async;

const SECONDS: Duration = Duration::from_secs(1);
const MIB: u64 = 1 << 20;

/// A chunk of these engines: 256 tokens x 48 layers x 4 bytes.
const CHUNK_BYTES: u64 = 48 << 10;

/// A store that engines reach over a link each way.
struct Rig {
    mover: MoverThread,
    store: Store,
}

impl Rig {
    /// A store of `capacity_bytes`; what it stores comes in over a host link, what it loads goes
    /// out over `load`.
    fn new(capacity_bytes: u64, load: Box<dyn Link>) -> Rig {
        let mover = MoverThread::spawn(Limits::default()).expect("a mover");
        let tier = TierConfig { slab_bytes: MIB / 4, ..TierConfig::new(capacity_bytes) };
        let store = Store::open(&mover.handle(), Place::Host(0), Pages::Base, tier).expect("a store");
        Rig::join(mover, store, load)
    }

    /// A store with a log below it.
    fn with_log(log: &Path) -> Rig {
        Rig::with_volume(Volume::open(log, DiskOptions::default()).expect("a log"))
    }

    /// A store with a log below it, on a disk where each read takes `delay` longer.
    fn with_slow_log(log: &Path, delay: Duration) -> Rig {
        let (medium, options) = (FileMedium::open(log).expect("a log"), DiskOptions::default());
        let file = DiskFile::open(log).expect("a file");
        let inner = Threads::open(&file, options.depth).expect("threads");
        let link = DiskLink::over(Box::new(Slow { inner, delay }), file, options).expect("a link");
        Rig::with_volume(Volume { link, medium: Arc::new(medium) })
    }

    fn with_volume(volume: Volume) -> Rig {
        let mover = MoverThread::spawn(Limits::default()).expect("a mover");
        let ssd = Ssd::open(&mover.handle(), Place::Host(0), vec![volume], SsdOptions::default());
        let tier = TierConfig { slab_bytes: MIB / 4, ..TierConfig::new(32 * MIB) };
        let write_back = WriteBackConfig::new(Policy::All, 32 * MIB, 64 * MIB, CHUNK_BYTES);
        let (handle, ssd) = (mover.handle(), ssd.expect("an SSD"));
        let store = Store::open_with_ssd(&handle, Place::Host(0), Pages::Base, tier, ssd, &write_back);
        Rig::join(mover, store.expect("a store"), Box::new(HostLink::new(1).expect("a host link")))
    }

    fn join(mover: MoverThread, store: Store, load: Box<dyn Link>) -> Rig {
        let handle = mover.handle();
        let spec = |name: &str| LinkSpec::new(name, 4, 64 << 20);
        let copy = HostLink::new(1).expect("a host link");
        let stores = handle.add_link(spec("store"), Box::new(copy)).expect("added");
        let loads = handle.add_link(spec("load"), load).expect("added");
        for device in [Place::Device(0), Place::Device(1)] {
            handle.add_path(PathSpec::direct(device, Place::Host(0), stores)).expect("alive").expect("added");
            handle.add_path(PathSpec::direct(Place::Host(0), device, loads)).expect("alive").expect("added");
        }
        Rig { mover, store }
    }

    fn healthy() -> Rig {
        Rig::new(32 * MIB, Box::new(HostLink::new(1).expect("a host link")))
    }

    async fn spawn(&self, config: &EngineConfig, device: u16) -> (EngineHandle, Client) {
        let connection = StoreConnection {
            store: Arc::new(TenantStore::new(self.store.clone(), TenantId::default())),
            mover: self.mover.handle(),
            device: Place::Device(device),
        };
        let engine = Engine::spawn(config.clone(), Some(connection)).await.expect("it starts");
        let client = Client::new(engine.address());
        (engine, client)
    }

    async fn wait_for_chunks(&self, chunks: usize) {
        eventually_async("the chunks are stored", || self.store.stat().chunks >= chunks).await;
    }
}

/// Takes its time with each read.
struct Slow {
    inner: Threads,
    delay: Duration,
}

// SAFETY: the inner kernel does everything.
unsafe impl Kernel for Slow {
    unsafe fn start(&mut self, key: u64, request: Request) {
        if request.action == Action::Read {
            std::thread::sleep(self.delay);
        }
        // SAFETY: as the caller promises.
        unsafe { self.inner.start(key, request) }
    }

    fn wait(&mut self, completed: &mut Vec<Completed>) -> std::io::Result<()> {
        self.inner.wait(completed)
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }

    fn name(&self) -> &'static str {
        "slow"
    }
}

fn cached(usage: &Value) -> (u64, u64) {
    let details = &usage["prompt_tokens_details"];
    let number = |name: &str| details[name].as_u64().unwrap_or_else(|| panic!("no {name} in {usage}"));
    (number("cached_tokens"), number("external_cached_tokens"))
}

#[tokio::test]
async fn what_one_engine_computed_another_one_loads() {
    let rig = Rig::healthy();
    let mut config = config();
    // Stores may hold a quarter of the pool: 8 chunks, so that none is left out.
    config.profile.memory.pool_tokens = 8_192;
    let oracle = oracle(&config);
    let (first, client) = rig.spawn(&config, 0).await;
    let prompt = tokens(1_100, 1);
    let (cold, usage) = client.complete(&prompt, 200).await;
    assert_eq!((oracle.wrong_tokens(&prompt, &cold), cached(&usage)), (0, (0, 0)));
    // 1,100 and 200 tokens are 5 chunks; the last of them is mostly output.
    rig.wait_for_chunks(5).await;

    let (second, other) = rig.spawn(&config, 1).await;
    let turn = [&prompt[..], &cold[..], &tokens(30, 2)[..]].concat();
    let (warm, usage) = other.complete(&turn, 20).await;
    assert_eq!(oracle.wrong_tokens(&turn, &warm), 0);
    assert_eq!(cached(&usage), (1_280, 1_280));
    let (again, usage) = other.complete(&turn, 20).await;
    assert_eq!((again, cached(&usage)), (warm, (1_328, 0)), "now it is in its own blocks");
    let stats = second.stats();
    assert_eq!((stats.store.loaded_chunks, stats.store.corrupt_chunks), (5, 0));
    assert_eq!(stats.scheduler.store_hits_tokens, 1_280);
    first.shutdown(SECONDS).await;
    second.shutdown(SECONDS).await;
}

/// An engine for which a chunk takes long enough to compute, 80 ms, that a disk is quicker, also
/// one on a busy machine, and a step not so long that computing a few costs nothing.
fn worth_loading() -> EngineConfig {
    let mut config = EngineConfig { clock_ratio: 0.2, launch: Launch::Graph, ..config() };
    config.profile.memory.pool_tokens = 8_192;
    config
}

/// Has the chunks of prompts computed and written to the log.
async fn leave_on_disk(log: &Path, config: &EngineConfig, prompts: &[Vec<u32>]) {
    let rig = Rig::with_log(log);
    let (engine, client) = rig.spawn(config, 0).await;
    for prompt in prompts {
        client.complete(prompt, 1).await;
    }
    rig.wait_for_chunks(prompts.iter().map(|prompt| prompt.len() / 256).sum()).await;
    engine.shutdown(SECONDS).await;
    rig.store.close().expect("everything is durable");
}

#[tokio::test]
async fn a_prefix_that_a_slow_disk_has_is_computed_again_and_one_that_a_fast_disk_has_is_loaded() {
    let config = worth_loading();
    let oracle = oracle(&config);
    let prompts = [tokens(1_100, 1), tokens(1_100, 2)];
    // A chunk of the slow disk takes a second or more, one that is computed 80 ms.
    for (delay_ms, loaded, recomputed) in [(1_000, 4, 4), (0, 8, 0)] {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("log");
        init(&log, 64 * MIB, MIB, Existing::Keep).expect("a log");
        leave_on_disk(&log, &config, &prompts).await;
        let rig = Rig::with_slow_log(&log, Duration::from_millis(delay_ms));
        // With the first prompt the engine finds out what the disk can do, at the second one it
        // knows.
        let (engine, client) = rig.spawn(&config, 0).await;
        let mut hits = Vec::new();
        for prompt in &prompts {
            let (answer, usage) = client.complete(prompt, 3).await;
            assert_eq!(oracle.wrong_tokens(prompt, &answer), 0, "{delay_ms} ms");
            hits.push(cached(&usage).1);
        }
        assert_eq!(hits, [1_024, if recomputed > 0 { 0 } else { 1_024 }], "{delay_ms} ms");
        let stats = engine.stats().store;
        let decided = (stats.gate_loaded_chunks, stats.gate_recomputed_chunks);
        assert_eq!(decided, (loaded, recomputed), "{delay_ms} ms");
        assert_eq!((stats.missing_chunks, stats.unmoved_chunks), (0, 0), "{delay_ms} ms");
        let (_, metrics) = client.get("/metrics").await;
        let counted = format!(r#"decision="recomputed"}} {recomputed}"#);
        assert!(metrics.contains(&counted), "{metrics}");
        engine.shutdown(SECONDS).await;
    }
}

#[tokio::test]
async fn what_an_earlier_process_left_on_disk_is_loaded_and_counted_as_such() {
    let directory = tempfile::tempdir().expect("a directory");
    let log = directory.path().join("log");
    init(&log, 64 * MIB, MIB, Existing::Keep).expect("a log");
    let config = worth_loading();
    let oracle = oracle(&config);
    let prompt = tokens(1_100, 1);
    leave_on_disk(&log, &config, std::slice::from_ref(&prompt)).await;

    let rig = Rig::with_log(&log);
    let (engine, client) = rig.spawn(&config, 0).await;
    let (warm, usage) = client.complete(&prompt, 20).await;
    assert_eq!((oracle.wrong_tokens(&prompt, &warm), cached(&usage)), (0, (1_024, 1_024)));
    assert_eq!(usage["prompt_tokens_details"]["ssd_cached_tokens"], 1_024);
    let stats = engine.stats();
    assert_eq!((stats.store.loaded_chunks, stats.store.disk_chunks), (4, 4));
    assert_eq!((stats.store.gate_loaded_chunks, stats.store.gate_recomputed_chunks), (4, 0));
    assert_eq!((stats.scheduler.store_hits_tokens, stats.scheduler.disk_hits_tokens), (1_024, 1_024));
    let (_, metrics) = client.get("/metrics").await;
    assert!(metrics.contains(r#"tier="disk"} 1024"#) && metrics.contains(r#"tier="memory"} 0"#), "{metrics}");
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn a_prompt_that_is_stored_whole_still_computes_one_token() {
    let rig = Rig::healthy();
    let config = config();
    let oracle = oracle(&config);
    let (first, client) = rig.spawn(&config, 0).await;
    let prompt = tokens(512, 1);
    client.complete(&prompt, 1).await;
    rig.wait_for_chunks(2).await;
    let (second, other) = rig.spawn(&config, 1).await;
    let (warm, usage) = other.complete(&prompt, 5).await;
    assert_eq!((oracle.wrong_tokens(&prompt, &warm), cached(&usage)), (0, (511, 511)));
    first.shutdown(SECONDS).await;
    second.shutdown(SECONDS).await;
}

#[tokio::test]
async fn what_fell_out_of_the_gpu_comes_back_from_the_store() {
    let rig = Rig::healthy();
    let mut config = config();
    config.profile.memory.pool_tokens = 4_096;
    let oracle = oracle(&config);
    let (engine, client) = rig.spawn(&config, 0).await;
    for round in 0..3 {
        for seed in 0..8 {
            let prompt = [tokens(300, 100), tokens(700, seed)].concat();
            let (answer, usage) = client.complete(&prompt, 30).await;
            assert_eq!(oracle.wrong_tokens(&prompt, &answer), 0, "round {round}, prompt {seed}");
            // Eight prompts do not fit the GPU. Each has four chunks, with its output, and shares
            // the first.
            assert!(round == 0 || cached(&usage).0 >= 768, "round {round}, prompt {seed}: {usage}");
            let seen = if round == 0 { seed + 1 } else { 8 };
            rig.wait_for_chunks(1 + 3 * seen as usize).await;
        }
    }
    assert!(engine.stats().store.loaded_chunks > 0);
    engine.shutdown(SECONDS).await;
}

/// Two engines over a link that flips bits, many turns each. Gives wrong tokens, corrupt chunks
/// that were caught, and flipped bits.
async fn run_with_flips(chance: f64) -> (usize, u64, u64) {
    let flipped = Arc::new(AtomicU64::new(0));
    let copy = HostLink::new(1).expect("a host link");
    let link = BitFlips::new(copy, chance, 7, Arc::clone(&flipped)).expect("a chance");
    let rig = Rig::new(32 * MIB, Box::new(link));
    let config = config();
    let oracle = oracle(&config);
    let engines = [rig.spawn(&config, 0).await, rig.spawn(&config, 1).await];
    let mut wrong = 0;
    for seed in 0..10 {
        let prompt = tokens(1_024, seed);
        for (_, client) in &engines {
            let (answer, _) = client.complete(&prompt, 10).await;
            wrong += oracle.wrong_tokens(&prompt, &answer);
            rig.wait_for_chunks(1).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let mut caught = 0;
    for (engine, _) in engines {
        caught += engine.stats().store.corrupt_chunks;
        engine.shutdown(SECONDS).await;
    }
    (wrong, caught, flipped.load(Ordering::Relaxed))
}

#[cfg(not(feature = "unverified"))]
#[tokio::test]
async fn corrupt_chunks_are_caught_and_tokens_stay_right() {
    let (wrong, caught, flipped) = run_with_flips(1e-5).await;
    assert!(flipped > 0, "the link must do damage");
    assert!(caught > 0, "{flipped} bits were flipped");
    assert_eq!(wrong, 0, "{caught} corrupt chunks were caught");
}

#[cfg(feature = "unverified")]
#[tokio::test]
async fn without_the_check_corrupt_chunks_become_wrong_tokens() {
    let (wrong, caught, flipped) = run_with_flips(1e-5).await;
    assert!(flipped > 0, "the link must do damage");
    assert_eq!(caught, 0, "nothing is checked");
    assert!(wrong > 0, "{flipped} flipped bits must show");
}

/// Flips one bit of the very last byte that each operation moves.
#[cfg(not(feature = "unverified"))]
struct LastByte(HostLink);

#[cfg(not(feature = "unverified"))]
impl Link for LastByte {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let last = op.pairs.last().and_then(|pair| memory.host(&pair.to)).expect("pairs of host memory");
        let last_byte = std::sync::atomic::AtomicPtr::new(last.0.as_ptr().wrapping_add(last.1 - 1));
        let done = done.inspect(move |_| {
            // SAFETY: the byte is the last one of a span of this operation, which owns it until
            // `done` is finished.
            unsafe { *last_byte.load(Ordering::Relaxed) ^= 1 };
        });
        self.0.start(op, memory, done);
    }
}

#[cfg(not(feature = "unverified"))]
#[tokio::test]
async fn a_single_wrong_bit_in_the_last_layer_is_caught() {
    let rig = Rig::new(32 * MIB, Box::new(LastByte(HostLink::new(1).unwrap())));
    let config = config();
    let oracle = oracle(&config);
    let (first, client) = rig.spawn(&config, 0).await;
    let prompt = tokens(300, 1);
    client.complete(&prompt, 1).await;
    rig.wait_for_chunks(1).await;
    let (second, other) = rig.spawn(&config, 1).await;
    let (answer, usage) = other.complete(&prompt, 5).await;
    assert_eq!((oracle.wrong_tokens(&prompt, &answer), cached(&usage)), (0, (0, 0)));
    assert_eq!(second.stats().store.corrupt_chunks, 1);
    assert_eq!(rig.store.stat().faults.corrupt, 1);
    first.shutdown(SECONDS).await;
    second.shutdown(SECONDS).await;
}

/// Two engines with small pools over a store that is too small for all, a link that flips bits,
/// clients that go away.
#[cfg(not(feature = "unverified"))]
#[tokio::test]
async fn every_token_is_right_whatever_else_goes_wrong() {
    let copy = HostLink::new(1).unwrap();
    let link = BitFlips::new(copy, 1e-6, 11, Arc::default()).unwrap();
    let rig = Rig::new(2 * MIB, Box::new(link));
    let mut config = config();
    config.profile.memory.pool_tokens = 2_048;
    let oracle = oracle(&config);
    let engines = [rig.spawn(&config, 0).await, rig.spawn(&config, 1).await];
    let mut turns: Vec<Vec<u32>> =
        (0..12).map(|seed| [tokens(300, seed % 3), tokens(400, seed)].concat()).collect();
    for round in 0..4 {
        let ask = turns.iter().zip(0..).map(async |(turn, number): (&Vec<u32>, usize)| {
            let client = &engines[(number + round) % 2].1;
            let body = json!({ "prompt": turn, "max_tokens": 1_000, "stream": true }).to_string();
            if number % 4 == 0 {
                drop(client.send(Method::POST, "/v1/completions", body).await);
            }
            client.complete(turn, 150).await.0
        });
        let answers = futures_util::future::join_all(ask).await;
        for (turn, answer) in turns.iter_mut().zip(answers) {
            assert_eq!(oracle.wrong_tokens(turn, &answer), 0, "round {round}");
            turn.extend(answer);
            turn.extend(tokens(50, round as u32));
        }
    }
    let (mut loaded, mut preempted) = (0, 0);
    for (engine, _) in engines {
        eventually_async("all blocks are free", || engine.stats().blocks_used == 0).await;
        loaded += engine.stats().store.loaded_chunks;
        preempted += engine.stats().scheduler.preemptions;
        engine.shutdown(SECONDS).await;
    }
    assert!(loaded > 0 && preempted > 0, "{loaded} chunks loaded, {preempted} requests preempted");
}

/// Fails every operation.
struct Broken;

impl Link for Broken {
    fn start(&mut self, _: LinkOp, _: &Arc<Memory>, done: Completion) {
        done.finish(Outcome::Failed { error: "broken".into() });
    }
}

#[tokio::test]
async fn a_link_that_fails_costs_a_computation_and_nothing_else() {
    let rig = Rig::new(32 * MIB, Box::new(Broken));
    let config = config();
    let oracle = oracle(&config);
    let (first, client) = rig.spawn(&config, 0).await;
    let prompt = tokens(1_024, 1);
    client.complete(&prompt, 5).await;
    rig.wait_for_chunks(4).await;
    let (second, other) = rig.spawn(&config, 1).await;
    let (answer, usage) = other.complete(&prompt, 5).await;
    assert_eq!((oracle.wrong_tokens(&prompt, &answer), cached(&usage)), (0, (0, 0)));
    let store = second.stats().store;
    assert_eq!((store.loaded_chunks, store.unmoved_chunks, store.unused_chunks), (0, 1, 3));
    first.shutdown(SECONDS).await;
    second.shutdown(SECONDS).await;
}

#[tokio::test]
async fn a_full_store_refuses_and_the_engine_goes_on() {
    // Room for a few chunks; what is leased may not be evicted.
    let rig = Rig::new(MIB, Box::new(HostLink::new(1).unwrap()));
    let config = config();
    let oracle = oracle(&config);
    let (engine, client) = rig.spawn(&config, 0).await;
    let room = MIB / CHUNK_BYTES;
    let mut held = Vec::new();
    for seed in 0..12 {
        let prompt = tokens(1_024, seed);
        let (answer, _) = client.complete(&prompt, 5).await;
        assert_eq!(oracle.wrong_tokens(&prompt, &answer), 0);
        let ids = forebay_kv::chunk_ids(&config.namespace, &prompt, 256);
        tokio::time::sleep(Duration::from_millis(5)).await;
        held.push(rig.store.lease(TenantId::default(), &ids, 60_000_000));
    }
    let stat = rig.store.stat();
    assert!((1..=room).contains(&(stat.chunks as u64)), "{} chunks in room for {room}", stat.chunks);
    assert!(stat.refusals.full > 0, "{:?}", stat.refusals);
    eventually_async("all stores have ended", || engine.stats().blocks_used == 0).await;
    assert!(engine.stats().store.refused_chunks > 0);
    engine.shutdown(SECONDS).await;
}

#[tokio::test]
async fn loading_takes_the_model_time_of_the_real_bytes() {
    let rig = Rig::healthy();
    let mut config = config();
    // 1,024 tokens of 98,304 bytes take 1 s at 0.1 GB/s.
    config.profile.host_link.gb_per_s = 0.1;
    let (first, client) = rig.spawn(&EngineConfig { clock_ratio: FAST, ..config.clone() }, 0).await;
    let prompt = tokens(1_030, 1);
    client.complete(&prompt, 1).await;
    rig.wait_for_chunks(4).await;
    config.clock_ratio = 10.0;
    let (second, other) = rig.spawn(&config, 1).await;
    let start = Instant::now();
    let (_, usage) = other.complete(&prompt, 1).await;
    let took = start.elapsed();
    assert_eq!(cached(&usage), (1_024, 1_024));
    assert!(took >= Duration::from_millis(100), "{took:?}");
    first.shutdown(SECONDS).await;
    second.shutdown(SECONDS).await;
}

/// Hands operations over when it is told to.
struct Held(std::sync::mpsc::Sender<(LinkOp, Completion)>);

impl Link for Held {
    fn start(&mut self, op: LinkOp, _: &Arc<Memory>, done: Completion) {
        drop(self.0.send((op, done)));
    }
}

#[tokio::test]
async fn a_request_aborted_while_it_loads_keeps_its_blocks_until_nothing_writes_them() {
    let (sender, held) = std::sync::mpsc::channel();
    let rig = Rig::new(32 * MIB, Box::new(Held(sender)));
    let config = config();
    let (first, client) = rig.spawn(&config, 0).await;
    let prompt = tokens(1_024, 1);
    client.complete(&prompt, 1).await;
    rig.wait_for_chunks(4).await;
    let (second, other) = rig.spawn(&config, 1).await;
    let body = json!({ "prompt": prompt, "stream": true }).to_string();
    let response = other.send(Method::POST, "/v1/completions", body).await;
    eventually_async("it waits for its chunks", || second.stats().blocks_used == 64).await;
    drop((response, other));
    eventually_async("it is aborted", || second.stats().aborted == 1).await;
    assert_eq!(second.stats().blocks_used, 64, "the link may still write them");
    let over = Arc::new(AtomicBool::new(false));
    let (is_over, until) = (Arc::clone(&over), Instant::now() + 120 * SECONDS);
    let ended = tokio::task::spawn_blocking(move || {
        // Lots beyond the link's window come as those before them end.
        while !is_over.load(Ordering::Relaxed) && Instant::now() < until {
            if let Ok((_, done)) = held.recv_timeout(Duration::from_millis(20)) {
                done.finish(Outcome::Failed { error: "given up".into() });
            }
        }
    });
    eventually_async("its blocks are free", || second.stats().blocks_used == 0).await;
    over.store(true, Ordering::Relaxed);
    ended.await.unwrap();
    first.shutdown(SECONDS).await;
    second.shutdown(SECONDS).await;
}
