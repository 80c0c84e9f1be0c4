//! Loads on fake GPUs of which chunks never come, or which the driver refuses something.

#[path = "../../tests/gpu/rig.rs"]
#[expect(dead_code, reason = "the tests outside use the rest")]
pub(super) mod rig;

use crate::LoadRequest;
use crate::pages::Source;
use cuda_testkit::{Fake, alone, symbol};
use forebay_node::{Node, NodeConfig, SsdConfig, WriteBackPolicy};
use rig::*;
use std::ffi::{c_int, c_void};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use testkit::eventually;

pub(super) const ONE: [(&str, &str); 2] = [("FAKE_CUDA_GPUS", "1"), ("XDG_CACHE_HOME", "/nonexistent")];

#[test]
fn only_short_layers_that_an_engine_waits_for_are_few_at_a_time() {
    let of = |awaited_bytes| super::limit_of(awaited_bytes, super::LOAD_LIMIT);
    assert_eq!(of(None), super::LOAD_LIMIT);
    assert_eq!(of(Some((8 << 20) - 1)), super::SHORT_LAYERS_LIMIT);
    assert_eq!(of(Some(8 << 20)), super::LOAD_LIMIT);
}

#[test]
fn a_wait_for_chunks_that_never_came_is_told_though_others_came_at_once() {
    alone("gpu::tests::a_wait_for_chunks_that_never_came_is_told_though_others_came_at_once", &ONE, |fake| {
        let site = Site::new();
        let mut config = NodeConfig::new(site.socket(), 64 << 20);
        config.copy_threads = 1;
        config.ssd = vec![SsdConfig {
            path: site.socket().with_extension("log"),
            size: 64 << 20,
            segment_size: 4 << 20,
            create: true,
        }];
        config.write_back = WriteBackPolicy::All;
        let node = Node::start(&config).unwrap();
        let writer = site.engine(fake);
        writer.store(1, &blocks(3), 1, 7);
        drop(writer);
        node.drain(TIMEOUT).unwrap();
        let _node = Node::start(&config).unwrap();
        let engine = site.engine(fake);
        // The first chunk is in memory from here on.
        engine.begin_chunk(9, &blocks(3)[..CHUNK_TOKENS / PAGE_TOKENS], 1);
        assert_eq!(engine.end_of(9).tokens, CHUNK_TOKENS as u64);
        // Others have all places, and keep them.
        let (put, take) = channel();
        for _ in 0..crate::paged::CHUNKS_AT_A_TIME {
            let put = put.clone();
            engine.paged.shared.fetches.acquire(move |place| drop(put.send(place)));
        }
        let limit = Duration::from_millis(400);
        let request = LoadRequest {
            job: 2,
            sources: vec![(ids(1), Source::same(engine.paged.cache()))],
            tables: engine.tables(&blocks(9)),
            tokens: TOKENS as u64,
            layerwise: true,
            limit_us: limit.as_micros() as u64,
            within: None,
            tenant: None,
        };
        engine.paged.load(request, engine.handle()).unwrap();
        let begun = Instant::now();
        engine.paged.wait_layer(0, engine.handle()).unwrap();
        let waited = begun.elapsed();
        (1..LAYERS).for_each(|layer| engine.paged.wait_layer(layer as u32, engine.handle()).unwrap());
        assert_eq!(engine.end_of(2).tokens, CHUNK_TOKENS as u64);
        let [stall] = engine.paged.take_stalls()[..] else { panic!("one load was waited for") };
        drop(take);
        assert!(waited > limit / 2, "{waited:?}");
        assert!(stall.time > waited / 2, "the engine stood still for {waited:?}, which is told as {stall:?}");
    });
}

/// Copies of a load are queued and stand still; then the driver refuses to have the engine's stream
/// wait.
fn refused_once(fake: &Fake, engine: &Engine) {
    engine.store(1, &blocks(3), 1, 7);
    fake.control("freeze h2d.0; freeze compute.0");
    engine.begin_load(2, &blocks(20), 1, true);
    std::thread::sleep(Duration::from_millis(200));
    fake.control("fail cuStreamWaitEvent 1 2");
    engine.paged.wait_layer(0, engine.handle()).unwrap_err();
    assert_eq!(fake.stat("live.failing"), 0);
}

#[test]
fn a_captured_stream_is_left_alone_also_behind_a_wait_that_was_refused() {
    alone("gpu::tests::a_captured_stream_is_left_alone_also_behind_a_wait_that_was_refused", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        refused_once(fake, &engine);
        let mut graph = std::ptr::null_mut::<c_void>();
        let (captured, _current) = (engine.stream.handle(), engine.device.enter().unwrap());
        let waits = fake.stat("cuStreamWaitEvent");
        // SAFETY: these are the signatures, and the stream lives.
        let refused = unsafe {
            let begin: unsafe extern "C" fn(*mut c_void, u32) -> c_int =
                std::mem::transmute(symbol("cuStreamBeginCapture_v2"));
            assert_eq!(begin(captured.cast(), 0), 0);
            let refused = engine.paged.wait_layer(0, engine.handle());
            let end: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int =
                std::mem::transmute(symbol("cuStreamEndCapture"));
            assert_eq!(end(captured.cast(), &mut graph), 0, "the capture is whole");
            refused
        };
        fake.control("release h2d.0; release compute.0");
        engine.end_of(2);
        assert_eq!(fake.stat("cuStreamWaitEvent"), waits, "something of ours is in the graph");
        assert!(refused.unwrap_err().to_string().contains("captured"));
    });
}

#[test]
fn a_wait_behind_one_that_was_refused_begins_where_the_stream_comes_to_it() {
    alone(
        "gpu::tests::a_wait_behind_one_that_was_refused_begins_where_the_stream_comes_to_it",
        &ONE,
        |fake| {
            let site = Site::new();
            let _node = site.node();
            let engine = site.engine(fake);
            refused_once(fake, &engine);
            std::thread::sleep(Duration::from_millis(500));
            (0..LAYERS).for_each(|layer| engine.paged.wait_layer(layer as u32, engine.handle()).unwrap());
            fake.control("release h2d.0; release compute.0");
            engine.end_of(2);
            let [stall] = engine.paged.take_stalls()[..] else { panic!("one load was waited for") };
            assert!(stall.time < Duration::from_millis(400), "{stall:?}");
        },
    );
}

/// Copies by engines and kernels that were queued until now.
pub(super) fn queued(fake: &Fake) -> u64 {
    ["cuMemcpyBatchAsync", "cuMemcpyAsync", "forebay_pieces"].map(|call| fake.stat(call)).iter().sum()
}

#[test]
fn stores_yield_to_loads_and_go_on_when_these_have_ended() {
    alone("gpu::tests::stores_yield_to_loads_and_go_on_when_these_have_ended", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        engine.store(1, &blocks(3), 1, 7);
        // Nothing is loaded: all of a store is on its way at a time.
        fake.control("freeze d2h.0; freeze compute.0");
        let before = queued(fake);
        engine.begin_store(2, &blocks(5), 2);
        let chunks = TOKENS.div_ceil(CHUNK_TOKENS) as u64;
        eventually("a store has room where nothing is loaded", || queued(fake) - before == chunks);
        fake.control("release d2h.0; release compute.0");
        assert!(engine.paged.wait_stored(&[2], Some(TIMEOUT)), "every store ends");
        // A load stands still: one part of a store at a time.
        fake.control("freeze h2d.0; freeze d2h.0; freeze compute.0");
        let before = queued(fake);
        engine.begin_load(3, &blocks(20), 1, false);
        eventually("the load is on its way", || queued(fake) > before);
        std::thread::sleep(Duration::from_millis(200));
        let before = queued(fake);
        engine.begin_store(4, &blocks(7), 4);
        eventually("one part always has room", || queued(fake) > before);
        std::thread::sleep(Duration::from_millis(300));
        let beside_the_load = queued(fake) - before;
        fake.control("release h2d.0; release compute.0");
        assert_eq!(engine.end_of(3).tokens, TOKENS as u64);
        fake.control("release d2h.0");
        assert!(engine.paged.wait_stored(&[4], Some(TIMEOUT)), "every store ends");
        assert_eq!(queued(fake) - before, chunks);
        assert_eq!(beside_the_load, 1, "a store takes what the load needs");
    });
}
