//! Caches on GPUs of the fake driver and a real node: every byte is right whichever way it went, in
//! the order of the engine's stream, and what goes wrong ends jobs and nothing else. The driver
//! finds operations that touch the same bytes in no order.
#![allow(clippy::unwrap_used)]

mod direct;
mod other;
mod rig;
mod short;

use cuda_testkit::{Fake, alone, symbol};
use forebay_node::Node;
use forebay_paged::{JobStored, Verify};
use rig::*;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};
use testkit::eventually;

const BLOCKS: usize = TOKENS.div_ceil(PAGE_TOKENS);
const ONE: [(&str, &str); 2] = [("FAKE_CUDA_GPUS", "1"), ("XDG_CACHE_HOME", "/nonexistent")];
/// As ONE, with a driver that has no batches.
const OLD: [(&str, &str); 3] =
    [("FAKE_CUDA_GPUS", "1"), ("FAKE_CUDA_VERSION", "12040"), ("XDG_CACHE_HOME", "/nonexistent")];
const THREE: [(&str, &str); 2] = [("FAKE_CUDA_GPUS", "3"), ("XDG_CACHE_HOME", "/nonexistent")];

fn there_and_back(fake: &Fake) {
    let site = Site::new();
    let _node = site.node();
    let (writer, reader) = (site.engine(fake), site.verifying(fake, Verify::Both));
    let from = blocks(3);
    writer.store(1, &from, 1, 7);
    assert_eq!(writer.paged.take_ended().1, [JobStored { job: 1, missing: vec![] }]);
    assert_eq!(writer.paged.stats().stores_done, 13);
    for (job, layerwise) in [(1, true), (2, false)] {
        let (to, batches) = (blocks(9 + job as usize), fake.stat("cuMemcpyBatchAsync"));
        reader.begin_load(job, &to, 1, layerwise);
        if layerwise {
            // What the engine does with a layer comes behind it in its stream; nobody on the host
            // waits.
            for layer in 0..LAYERS {
                reader.paged.wait_layer(layer as u32, reader.handle()).unwrap();
                reader.kernel(reader.layer(layer), &reader.scratch[layer]);
            }
            for layer in 0..LAYERS {
                let found = reader.read(&reader.scratch[layer]);
                assert!(reader.is_true(layer, &found, &to, &from, 7, TOKENS), "layer {layer}");
            }
        }
        let end = reader.end_of(job);
        assert_eq!((end.tokens, end.why), (TOKENS as u64, None));
        assert!(reader.has(&to, &from, 7, TOKENS));
        if layerwise {
            assert_eq!(fake.stat("cuMemcpyBatchAsync"), batches, "the engine waits for a little");
        }
    }
}

#[test]
fn what_one_cache_stores_another_loads_with_every_byte_right_over_one_lane() {
    alone("what_one_cache_stores_another_loads_with_every_byte_right_over_one_lane", &ONE, there_and_back);
}

#[test]
fn what_one_cache_stores_another_loads_with_every_byte_right_by_a_driver_without_batches() {
    let test = "what_one_cache_stores_another_loads_with_every_byte_right_by_a_driver_without_batches";
    alone(test, &OLD, |fake| {
        there_and_back(fake);
        assert_eq!(fake.stat("cuMemcpyBatchAsync"), 0);
    });
}

#[test]
fn what_one_cache_stores_another_loads_with_every_byte_right_over_all_lanes() {
    let test = "what_one_cache_stores_another_loads_with_every_byte_right_over_all_lanes";
    alone(test, &THREE, |fake| {
        there_and_back(fake);
        assert!(fake.stat("bytes.h2d.1") + fake.stat("bytes.h2d.2") > 0, "no relay had a part in it");
    });
}

#[test]
fn what_is_for_one_gpu_goes_over_no_link_of_its_siblings() {
    alone("what_is_for_one_gpu_goes_over_no_link_of_its_siblings", &THREE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let (first, last) = (site.rank(fake, &[0, 1]), site.rank(fake, &[0, 1, 2]));
        let (from, to) = (blocks(3), blocks(9));
        first.store(1, &from, 1, 7);
        let carried = || [1, 2].map(|gpu| fake.stat(&format!("bytes.h2d.{gpu}")));
        let before = carried();
        for (engine, relays) in [(&first, [false, true]), (&last, [false, false])] {
            let since = carried();
            engine.begin_load(2, &to, 1, false);
            assert_eq!((engine.end_of(2).tokens, carried()[0]), (TOKENS as u64, before[0]));
            assert!(engine.has(&to, &from, 7, TOKENS));
            assert_eq!([0, 1].map(|gpu| carried()[gpu] > since[gpu]), relays);
        }
    });
}

#[test]
fn how_long_the_engines_stream_waited_for_a_load_is_told() {
    alone("how_long_the_engines_stream_waited_for_a_load_is_told", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), blocks(9));
        engine.store(1, &from, 1, 7);
        engine.paged.take_ended();
        // The copies are in their streams all the same, so the host waits for little.
        fake.control("freeze h2d.0; freeze compute.0");
        engine.begin_load(2, &to, 1, true);
        for layer in 0..LAYERS {
            engine.paged.wait_layer(layer as u32, engine.handle()).unwrap();
        }
        std::thread::sleep(Duration::from_millis(300));
        fake.control("release h2d.0; release compute.0");
        engine.end_of(2);
        let [stall] = engine.paged.take_stalls()[..] else { panic!("one load was waited for") };
        assert!((250..5_000).contains(&stall.time.as_millis()), "{stall:?}");
        assert!((1..=LAYERS as u64).contains(&stall.layers_late), "{stall:?}");
        // What is there long before it is waited for costs nothing.
        engine.begin_load(3, &to, 1, true);
        for layer in 0..LAYERS {
            std::thread::sleep(Duration::from_millis(50));
            engine.paged.wait_layer(layer as u32, engine.handle()).unwrap();
        }
        engine.end_of(3);
        let late = engine.paged.take_stalls()[0];
        assert!(late.time.as_millis() < 250, "{late:?}");
    });
}

#[test]
fn for_a_layer_that_is_there_the_driver_is_not_called() {
    alone("for_a_layer_that_is_there_the_driver_is_not_called", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        engine.store(1, &blocks(3), 1, 7);
        let calls =
            || ["cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing"].map(|call| fake.stat(call));
        // Each layer comes long after the one before.
        fake.control("delay h2d.0 50000; delay compute.0 50000");
        engine.begin_load(2, &blocks(20), 1, true);
        engine.paged.wait_layer(0, engine.handle()).unwrap();
        engine.stream.synchronize().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let before = calls();
        engine.paged.wait_layer(0, engine.handle()).unwrap();
        assert_eq!(calls(), before);
        assert!(!engine.paged.wait_loaded(&[2], Some(Duration::ZERO)), "nobody looks at a load that is over");
        fake.control("delay h2d.0 0; delay compute.0 0");
        engine.end_of(2);
    });
}

#[test]
fn how_long_copies_could_not_even_be_queued_is_told_as_a_wait_of_the_stream() {
    alone("how_long_copies_could_not_even_be_queued_is_told_as_a_wait_of_the_stream", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), blocks(9));
        engine.store(1, &from, 1, 7);
        // So much is under way that nothing of the last load is.
        fake.control("freeze h2d.0");
        let (others, last) = (100..112, 2);
        let free: Vec<i64> = (0..PAGES as i64).filter(|page| !to.contains(page)).collect();
        let pages_of_chunk = free.chunks(CHUNK_TOKENS / PAGE_TOKENS);
        others.clone().zip(pages_of_chunk).for_each(|(job, pages)| engine.begin_chunk(job, pages, 1));
        std::thread::sleep(Duration::from_millis(50));
        engine.begin_load(last, &to, 1, true);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                fake.control("release h2d.0");
            });
            let begun = Instant::now();
            engine.paged.wait_layer(0, engine.handle()).unwrap();
            assert!(begun.elapsed() >= Duration::from_millis(200), "the host has waited, not the stream");
        });
        (1..LAYERS).for_each(|layer| engine.paged.wait_layer(layer as u32, engine.handle()).unwrap());
        others.chain([last]).for_each(|job| assert!(engine.paged.wait_loaded(&[job], Some(TIMEOUT))));
        let [stall] = engine.paged.take_stalls()[..] else { panic!("one load was waited for") };
        assert!((200..5_000).contains(&stall.time.as_millis()), "{stall:?}");
        let stats = engine.paged.stats();
        assert_eq!((stats.layers_late, stats.bubble_us), (stall.layers_late, stall.time.as_micros() as u64));
    });
}

#[test]
fn a_store_comes_behind_what_was_queued_before_it() {
    alone("a_store_comes_behind_what_was_queued_before_it", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), blocks(20));
        for layer in 0..LAYERS {
            engine.write(engine.layer(layer), layer, 1);
            engine.write(&engine.scratch[layer], layer, 2);
        }
        // The kernels that write the pages have not begun yet.
        fake.control("freeze p2p.0");
        (0..LAYERS).for_each(|layer| engine.kernel(&engine.scratch[layer], engine.layer(layer)));
        engine.begin_store(1, &from, 1);
        assert!(!engine.paged.wait_stored(&[1], Some(Duration::from_millis(50))));
        fake.control("release p2p.0");
        assert!(engine.paged.wait_stored(&[1], Some(TIMEOUT)));
        engine.begin_load(2, &to, 1, false);
        assert_eq!(engine.end_of(2).tokens, TOKENS as u64);
        assert!(engine.has(&to, &from, 2, TOKENS));
    });
}

#[test]
fn a_load_comes_behind_what_was_queued_before_it_whether_the_engine_waits_for_it_or_not() {
    let test = "a_load_comes_behind_what_was_queued_before_it_whether_the_engine_waits_for_it_or_not";
    alone(test, &THREE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), blocks(20));
        engine.store(1, &from, 1, 5);
        for layerwise in [true, false] {
            fake.control("freeze p2p.0");
            // Somebody's last kernels still write pages that are the load's now.
            (0..LAYERS).for_each(|layer| engine.kernel(&engine.scratch[layer], engine.layer(layer)));
            engine.begin_load(1, &to, 1, layerwise);
            if layerwise {
                engine.paged.wait_loads(engine.handle()).unwrap();
                (0..LAYERS).for_each(|layer| engine.kernel(engine.layer(layer), &engine.scratch[layer]));
            }
            assert!(!engine.paged.wait_loaded(&[1], Some(Duration::from_millis(50))));
            fake.control("release p2p.0");
            assert_eq!(engine.end_of(1).tokens, TOKENS as u64);
            assert!(engine.has(&to, &from, 5, TOKENS));
        }
    });
}

#[test]
fn a_load_whose_stream_is_not_there_yet_holds_up_no_other() {
    alone("a_load_whose_stream_is_not_there_yet_holds_up_no_other", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let (busy, idle) = (site.engine(fake), site.engine(fake));
        let (from, to) = (blocks(3), blocks(20));
        busy.store(1, &from, 1, 5);
        fake.control("freeze p2p.0");
        busy.kernel(&busy.scratch[0], busy.layer(0));
        busy.begin_load(1, &to, 1, false);
        idle.begin_load(1, &to, 1, false);
        assert_eq!(idle.end_of(1).tokens, TOKENS as u64);
        assert!(!busy.paged.wait_loaded(&[1], Some(Duration::ZERO)));
        fake.control("release p2p.0");
        assert_eq!(busy.end_of(1).tokens, TOKENS as u64);
        assert!(busy.has(&to, &from, 5, TOKENS) && idle.has(&to, &from, 5, TOKENS));
    });
}

/// An engine whose chunks are in its node, and copies to its GPU that stand still: before a load
/// layer by layer, then before one in the background. Loads of one kind come in order also where
/// they write the same pages.
fn before_each_kind_of_load(fake: &Fake, then: impl Fn(&Site, Node, &Engine, bool)) {
    for layerwise in [true, false] {
        let site = Site::new();
        let node = site.node();
        let engine = site.engine(fake);
        engine.store(1, &blocks(3), 1, 5);
        fake.control("freeze h2d.0; freeze compute.0");
        then(&site, node, &engine, layerwise);
    }
}

#[test]
fn a_node_that_dies_costs_tokens_and_never_truth_and_the_next_one_is_used() {
    let dies = |fake: &Fake| {
        before_each_kind_of_load(fake, |site, node, engine, layerwise| {
            let (from, to) = (blocks(3), |job: u64| blocks(20 + job as usize * BLOCKS * 11));
            let registered = || fake.stat("cuMemHostRegister_v2") - fake.stat("cuMemHostUnregister");
            assert!(registered() > 0);
            (0..4).for_each(|job| engine.begin_load(job, &to(job), 1, layerwise));
            drop(node);
            fake.control("release h2d.0; release compute.0");
            assert!(engine.paged.wait_loaded(&[0, 1, 2, 3], Some(TIMEOUT)), "every load ends");
            for end in engine.paged.take_ended().0 {
                assert!(engine.has(&to(end.job), &from, 5, end.tokens as usize));
            }
            eventually("its death is seen", || !engine.paged.is_connected());
            // The host may not have room for the next node's memory beside it, and the engine is
            // idle.
            eventually("its memory is let go of", || registered() == 0);
            let _node = site.node();
            eventually("the next node is found", || engine.paged.is_connected());
            eventually("its memory is pinned before anybody uses it", || registered() > 0);
            engine.store(2, &from, 2, 6);
            engine.begin_load(9, &to(0), 2, false);
            assert_eq!(engine.end_of(9).tokens, TOKENS as u64);
            assert!(engine.has(&to(0), &from, 6, TOKENS));
        });
    };
    alone("a_node_that_dies_costs_tokens_and_never_truth_and_the_next_one_is_used", &ONE, dies);
}

#[test]
fn what_was_copied_when_its_lease_was_over_is_not_used() {
    let is_over = |fake: &Fake| {
        before_each_kind_of_load(fake, |_, node, engine, layerwise| {
            let calls =
                || fake.stat("cuMemcpyBatchAsync") + fake.stat("cuMemcpyAsync") + fake.stat("cuLaunchKernel");
            let queued = calls();
            engine.begin_load(1, &blocks(20), 1, layerwise);
            eventually("copies are on their way", || calls() > queued);
            drop(node);
            eventually("the node is missed", || !engine.paged.is_connected());
            fake.control("release h2d.0; release compute.0");
            assert_eq!(engine.end_of(1).tokens, 0, "layerwise: {layerwise}");
        });
    };
    alone("what_was_copied_when_its_lease_was_over_is_not_used", &ONE, is_over);
}

/// A call of a job that the driver refuses, or none.
struct Refusal<'a> {
    fake: &'a Fake,
    command: &'a str,
    was_met: Cell<bool>,
}

impl Refusal<'_> {
    /// It is a call from here on.
    fn begin(&self) {
        self.fake.control(self.command);
    }

    /// Up to here. Says whether it was met.
    fn end(&self) -> bool {
        self.was_met.set(!self.command.is_empty() && self.fake.stat("live.failing") == 0);
        self.fake.control("mend");
        self.was_met.get()
    }
}

/// Does a job again and again: with one of its calls refused, each in its turn, and then with none.
fn with_each_call_refused(fake: &Fake, mut job: impl FnMut(&Refusal)) {
    let mut with_refused = |command: &str| {
        let refusal = Refusal { fake, command, was_met: Cell::default() };
        job(&refusal);
        refusal.was_met.get()
    };
    let calls =
        ["cuMemcpyBatchAsync", "cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"];
    for call in calls {
        let mut nth = 1;
        while with_refused(&format!("fail {call} {nth} 719")) {
            with_refused("");
            nth += 1;
        }
    }
}

#[test]
fn a_refused_call_costs_a_load_and_the_next_one_is_whole() {
    alone("a_refused_call_costs_a_load_and_the_next_one_is_whole", &THREE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), blocks(20));
        engine.store(1, &from, 1, 5);
        for layerwise in [false, true] {
            with_each_call_refused(fake, |refusal| {
                refusal.begin();
                let mut tokens = 0;
                if engine.try_load(1, &to, 1, layerwise) {
                    // An engine that is told of an error uses nothing.
                    let waited = !layerwise || engine.paged.wait_loads(engine.handle()).is_ok();
                    let end = engine.end_of(1);
                    tokens = if waited { end.tokens as usize } else { 0 };
                }
                assert!(refusal.end() || tokens == TOKENS, "{}: {tokens}", refusal.command);
                assert!(engine.has(&to, &from, 5, tokens), "{}: {tokens}", refusal.command);
            });
        }
    });
}

#[test]
fn a_refused_call_costs_chunks_of_a_store_and_never_their_truth() {
    alone("a_refused_call_costs_chunks_of_a_store_and_never_their_truth", &THREE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), blocks(20));
        (0..LAYERS).for_each(|layer| engine.write(&engine.scratch[layer], layer, 5));
        let fill = |shift: usize| {
            let from = |layer: usize| &engine.scratch[(layer + shift) % LAYERS];
            (0..LAYERS).for_each(|layer| engine.kernel(from(layer), engine.layer(layer)));
        };
        let mut salt = 0_u8;
        with_each_call_refused(fake, |refusal| {
            salt = salt.wrapping_add(1);
            fill(0);
            refusal.begin();
            if engine.try_store(1, &from, salt) {
                assert!(engine.paged.wait_stored(&[1], Some(TIMEOUT)), "{}", refusal.command);
                engine.paged.take_ended();
            }
            let was_refused = refusal.end();
            // Nobody reads the pages any more.
            fill(1);
            engine.begin_load(2, &to, salt, false);
            let tokens = engine.end_of(2).tokens as usize;
            assert!(was_refused || tokens == TOKENS, "{}: {tokens}", refusal.command);
            assert!(engine.has(&to, &from, 5, tokens), "{}: {tokens}", refusal.command);
        });
    });
}

#[test]
fn a_load_for_which_no_list_has_a_place_ends_with_the_reason() {
    alone("a_load_for_which_no_list_has_a_place_ends_with_the_reason", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), blocks(20));
        engine.store(1, &from, 1, 5);
        // Nobody learns that a list was read, so that none becomes free.
        let refused: Vec<_> = (1..2000).map(|nth| format!("fail cuEventQuery {nth} 719")).collect();
        fake.control(&refused.join(";"));
        let end = (0..64).map(|job| {
            engine.begin_load(job, &to, 1, true);
            engine.end_of(job)
        });
        let why = end.filter_map(|end| end.why).next().expect("more loads than there are lists");
        assert!(why.contains("places of lists"), "{why}");
        fake.control("mend");
        engine.begin_load(99, &to, 1, true);
        assert_eq!(engine.end_of(99).tokens, TOKENS as u64);
        assert!(engine.has(&to, &from, 5, TOKENS));
    });
}

#[test]
fn a_lost_gpu_ends_all_jobs_with_the_reason() {
    alone("a_lost_gpu_ends_all_jobs_with_the_reason", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to) = (blocks(3), |job: u64| blocks(20 + job as usize * BLOCKS * 11));
        engine.store(1, &from, 1, 5);
        fake.control("freeze h2d.0; freeze d2h.0");
        (0..3).for_each(|job| engine.begin_load(job, &to(job), 1, false));
        engine.begin_store(9, &from, 2);
        fake.control("poison 0 719; release h2d.0; release d2h.0");
        assert!(engine.paged.wait_loaded(&[0, 1, 2], Some(TIMEOUT)));
        assert!(engine.paged.wait_stored(&[9], Some(TIMEOUT)));
        let (loads, stores) = engine.paged.take_ended();
        assert!(loads.iter().any(|end| end.why.as_ref().is_some_and(|why| why.contains("719"))), "{loads:?}");
        assert_eq!((loads.len(), stores.iter().map(|end| end.job).collect()), (3, vec![1, 9]));
        engine.paged.close();
    });
}

#[test]
fn a_load_whose_relay_is_lost_meanwhile_is_never_said_to_be_right_with_other_bytes() {
    let name = "a_load_whose_relay_is_lost_meanwhile_is_never_said_to_be_right_with_other_bytes";
    alone(name, &THREE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        let (from, to, others) = (blocks(3), blocks(40), blocks(80));
        engine.store(1, &from, 1, 5);
        let over_relay = || fake.stat("bytes.h2d.1") + fake.stat("bytes.h2d.2");
        let before = over_relay();
        engine.begin_load(2, &to, 1, false);
        assert_eq!(engine.end_of(2).why, None);
        assert!(over_relay() > before, "relays have no part in a load of this size");
        // The driver lets others go on as if a relay that it lost had done its part.
        fake.control("freeze h2d.1");
        engine.begin_load(3, &others, 1, false);
        std::thread::sleep(Duration::from_millis(50));
        fake.control("abandon 1 700; release h2d.1");
        // A relay that was slow has no part in some loads. One that stays slow has a part in none.
        let is_told = |job| {
            let end = engine.end_of(job);
            let is_told = end.why.as_ref().is_some_and(|why| why.contains("relay"));
            assert!(is_told || engine.has(&others, &from, 5, TOKENS), "{end:?}");
            is_told
        };
        let meets_it = |job| {
            engine.begin_load(job, &others, 1, false);
            is_told(job)
        };
        let _ = is_told(3) || (4..12).any(meets_it);
        engine.begin_load(12, &to, 1, false);
        assert_eq!(engine.end_of(12).why, None, "the other relay and the GPU's own link are there");
        assert!(engine.has(&to, &from, 5, TOKENS));
    });
}

#[test]
fn a_cache_that_is_closed_while_busy_is_touched_by_nobody_afterwards() {
    alone("a_cache_that_is_closed_while_busy_is_touched_by_nobody_afterwards", &THREE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let engine = site.engine(fake);
        // An engine does not give the same pages to two jobs.
        let pages = |part: usize| -> Vec<i64> {
            (part * BLOCKS..(part + 1) * BLOCKS).map(|page| page as i64).collect()
        };
        engine.store(1, &pages(0), 1, 5);
        fake.control("delay h2d.0 300; delay d2h.0 300; delay h2d.1 300");
        for job in 0..3 {
            engine.begin_load(job, &pages(1 + 2 * job as usize), 1, job % 2 == 0);
            engine.begin_store(10 + job, &pages(2 * job as usize), 20 + job as u8);
        }
        engine.paged.close();
        let zeros = vec![0; LAYER_BYTES];
        (0..LAYERS).for_each(|layer| engine.write_all(engine.layer(layer), &zeros));
        std::thread::sleep(Duration::from_millis(20));
        (0..LAYERS).for_each(|layer| assert!(engine.read(engine.layer(layer)) == zeros));
        // Memory is given back at once: the driver says if something still uses it.
        drop(engine);
        let live = ["live.host", "live.streams", "live.events", "live.allocations"];
        eventually("nothing is left", || live.map(|what| fake.stat(what)) == [0; 4]);
    });
}

#[test]
fn an_arena_of_which_a_part_could_not_be_pinned_once_is_loaded_from_again() {
    alone("an_arena_of_which_a_part_could_not_be_pinned_once_is_loaded_from_again", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let writer = site.engine(fake);
        let (from, to) = (blocks(3), blocks(20));
        writer.store(1, &from, 1, 5);
        fake.control("fail cuMemHostRegister_v2 1 2");
        let reader = site.engine(fake);
        eventually("the host was short of memory", || fake.stat("live.failing") == 0);
        let since = Instant::now();
        let mut job = 1;
        let came = loop {
            reader.begin_load(job, &to, 1, false);
            let end = reader.end_of(job);
            if end.tokens == TOKENS as u64 || since.elapsed() > TIMEOUT {
                break end;
            }
            job += 1;
            std::thread::sleep(Duration::from_millis(100));
        };
        assert_eq!((came.tokens, came.why), (TOKENS as u64, None));
        assert!(reader.has(&to, &from, 5, TOKENS));
    });
}

#[test]
fn captures_of_others_go_on_and_a_captured_stream_is_left_alone() {
    alone("captures_of_others_go_on_and_a_captured_stream_is_left_alone", &ONE, |fake| {
        let site = Site::new();
        let _node = site.node();
        let (engine, other) = (site.engine(fake), site.engine(fake));
        let (from, to) = (blocks(3), blocks(20));
        engine.store(1, &from, 1, 5);
        let mut graph = std::ptr::null_mut::<c_void>();
        let captured = other.stream.handle();
        let _current = other.device.enter().unwrap();
        // SAFETY: these are the signatures, and the stream lives.
        unsafe {
            let begin: unsafe extern "C" fn(*mut c_void, u32) -> c_int =
                std::mem::transmute(symbol("cuStreamBeginCapture_v2"));
            assert_eq!(begin(captured.cast(), 0), 0);
        }
        engine.begin_load(1, &to, 1, true);
        engine.paged.wait_loads(engine.handle()).unwrap();
        assert_eq!(engine.end_of(1).tokens, TOKENS as u64);
        let refused =
            engine.paged.store(2, vec![Vec::new()], engine.tables(&from), captured as u64).unwrap_err();
        assert!(refused.to_string().contains("captured"), "{refused}");
        // SAFETY: as above.
        unsafe {
            let end: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int =
                std::mem::transmute(symbol("cuStreamEndCapture"));
            assert_eq!(end(captured.cast(), &mut graph), 0, "the capture is whole");
            let destroy: unsafe extern "C" fn(*mut c_void) -> c_int =
                std::mem::transmute(symbol("cuGraphDestroy"));
            destroy(graph);
        }
        assert!(engine.has(&to, &from, 5, TOKENS));
    });
}
