//! Loads of an engine that sees one GPU, over the links of GPUs that its node has, on the fake
//! driver: every byte is right whatever becomes of the node, and what is small asks nothing of it.
//! The node is a process of its own, which can be killed and stopped.
#![allow(clippy::unwrap_used)]

mod rig;

use cuda_testkit::alone;
use rig::*;
use std::time::{Duration, Instant};
use testkit::eventually;

/// The engine's only GPU. PCIe links are slow, so that relays pay and a node can die in the middle.
const ENV: [(&str, &str); 3] = [
    ("CUDA_VISIBLE_DEVICES", "1"),
    ("FAKE_CUDA_RATES", "h2d=0.1,d2h=0.4,p2p=4,host_h2d=0.4,host_d2h=0.8"),
    ("XDG_CACHE_HOME", "/nonexistent"),
];
/// As slow as a node that is stopped in the middle needs.
const SLOW: [(&str, &str); 3] =
    [ENV[0], ("FAKE_CUDA_RATES", "h2d=0.02,d2h=0.4,p2p=4,host_h2d=0.08,host_d2h=0.8"), ENV[2]];
/// One link of the node's is a tenth as fast as the others.
const UNEQUAL: [(&str, &str); 3] =
    [ENV[0], ("FAKE_CUDA_RATES", "h2d=0.1,h2d.2=0.01,d2h=0.4,p2p=4,host_h2d=0.4,host_d2h=0.8"), ENV[2]];
/// Layers of 24 MiB: enough for loads that nobody waits for layer by layer.
const PAGES: usize = 384;
/// Of 96 MiB, for those that somebody does.
const AWAITED_PAGES: usize = 1536;
/// Of 8 MiB: not enough.
const FEW_PAGES: usize = 128;

/// What a process that this binary started does.
#[test]
fn node() {
    if let Some(folder) = folder_of("node") {
        play_node(&folder);
    }
}

#[test]
fn a_load_goes_over_the_own_link_and_the_nodes_and_every_byte_is_right() {
    alone("a_load_goes_over_the_own_link_and_the_nodes_and_every_byte_is_right", &ENV, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let mut node = NodeProcess::start(folder.path());
        let engine = Engine::open(fake, folder.path(), PAGES);
        engine.wait_attached();
        engine.store(1);
        assert_eq!(node.relays()[2], 0, "nothing was loaded");
        for job in 2..5 {
            let (before, own) = (engine.relayed(), fake.stat("bytes.h2d.1"));
            engine.begin_load(job, 1, false);
            assert_eq!(engine.end_of(job).tokens, engine.tokens());
            let (relayed, all) = (engine.relayed() - before, LAYERS as u64 * engine.layer_bytes());
            assert!((all / 4..all).contains(&relayed), "{relayed} of {all} bytes");
            assert!(fake.stat("bytes.h2d.1") > own, "the own link stood idle");
            engine.check(1, engine.tokens());
            engine.clear();
        }
        assert_eq!(engine.paged.stats().chunks_corrupt, 0);
        assert!(node.relays()[2] > 0);
    });
}

#[test]
fn what_an_engine_does_with_a_layer_comes_behind_every_share_of_it() {
    alone("what_an_engine_does_with_a_layer_comes_behind_every_share_of_it", &ENV, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let _node = NodeProcess::start(folder.path());
        let engine = Engine::open(fake, folder.path(), AWAITED_PAGES);
        engine.wait_attached();
        engine.store(1);
        engine.begin_load(2, 1, true);
        for layer in 0..LAYERS {
            engine.paged.wait_layer(layer as u32, engine.handle()).unwrap();
            engine.use_layer(layer);
            engine.check_in(engine.scratch.address(), layer, 1, engine.tokens());
        }
        assert_eq!(engine.end_of(2).tokens, engine.tokens());
        assert!(engine.relayed() > 0, "no relay had a part in it");
    });
}

#[test]
fn a_byte_that_flips_in_the_arena_is_a_miss_and_never_data() {
    alone("a_byte_that_flips_in_the_arena_is_a_miss_and_never_data", &ENV, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let mut node = NodeProcess::start(folder.path());
        let engine = Engine::open(fake, folder.path(), PAGES);
        engine.wait_attached();
        engine.store(1);
        node.ask(&format!("flip {}", 20 << 20));
        engine.begin_load(2, 1, false);
        let tokens = engine.end_of(2).tokens;
        assert!(engine.relayed() > 0, "no relay had a part in it");
        assert!(tokens < engine.tokens(), "a wrong byte is data");
        assert_eq!(engine.paged.stats().chunks_corrupt, 1);
        engine.check(1, tokens);
    });
}

#[test]
fn a_node_that_is_killed_in_the_middle_of_a_load_costs_no_byte() {
    alone("a_node_that_is_killed_in_the_middle_of_a_load_costs_no_byte", &SLOW, |fake| {
        let folder = tempfile::tempdir().unwrap();
        for (salt, part) in [(1, 64), (2, 8), (3, 2)] {
            let node = NodeProcess::start(folder.path());
            let engine = Engine::open(fake, folder.path(), PAGES);
            engine.wait_attached();
            engine.store(salt);
            engine.begin_load(2, salt, false);
            let enough = engine.layer_bytes() / part;
            eventually("relaying", || engine.relayed() >= enough);
            node.signal(libc::SIGKILL);
            let begun = Instant::now();
            engine.end_of(2);
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
            eventually("the loss is counted", || engine.paged.stats().relays_lost == 1);
            // Its leases are gone with it, but what was on its way has arrived.
            engine.check(salt, engine.tokens());
            assert_eq!(engine.paged.stats().chunks_corrupt, 0);
        }
    });
}

#[test]
fn a_node_that_is_stopped_in_the_middle_of_a_load_is_given_up_and_writes_no_page_later() {
    let test = "a_node_that_is_stopped_in_the_middle_of_a_load_is_given_up_and_writes_no_page_later";
    alone(test, &SLOW, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let node = NodeProcess::start(folder.path());
        let engine = Engine::open(fake, folder.path(), PAGES);
        engine.wait_attached();
        engine.store(1);
        engine.begin_load(2, 1, false);
        eventually("relaying", || engine.relayed() > 0);
        node.signal(libc::SIGSTOP);
        let begun = Instant::now();
        let end = engine.end_of(2);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        assert_eq!((end.tokens, engine.paged.stats().relays_lost), (engine.tokens(), 1));
        engine.check(1, end.tokens);
        // The pages are somebody else's from here on.
        engine.clear();
        node.signal(libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(500));
        assert!(engine.bytes().iter().flatten().all(|byte| *byte == 0), "a late copy wrote a page");
        engine.wait_attached();
        let before = engine.relayed();
        engine.begin_load(3, 1, false);
        let end = engine.end_of(3);
        assert_eq!((end.tokens, end.why), (engine.tokens(), None));
        engine.check(1, engine.tokens());
        assert!(engine.relayed() > before, "a node that goes on is used again");
    });
}

#[test]
fn a_load_that_is_small_asks_nothing_of_the_node() {
    alone("a_load_that_is_small_asks_nothing_of_the_node", &ENV, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let mut node = NodeProcess::start(folder.path());
        let few = Engine::open(fake, folder.path(), FEW_PAGES);
        few.wait_attached();
        few.store(1);
        few.begin_load(2, 1, false);
        assert_eq!(few.end_of(2).tokens, few.tokens());
        few.check(1, few.tokens());
        drop(few);
        // What is awaited layer by layer has to be more.
        let engine = Engine::open(fake, folder.path(), PAGES);
        engine.wait_attached();
        engine.store(2);
        engine.begin_load(2, 2, true);
        for layer in 0..LAYERS {
            engine.paged.wait_layer(layer as u32, engine.handle()).unwrap();
        }
        assert_eq!(engine.end_of(2).tokens, engine.tokens());
        engine.check(2, engine.tokens());
        assert_eq!((node.relays()[2], engine.relayed()), (0, 0));
    });
}

#[test]
fn a_relay_that_is_slow_carries_less() {
    alone("a_relay_that_is_slow_carries_less", &UNEQUAL, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let mut node = NodeProcess::start(folder.path());
        let engine = Engine::open(fake, folder.path(), PAGES);
        engine.wait_attached();
        engine.store(1);
        for job in 2..4 {
            engine.begin_load(job, 1, false);
            assert_eq!(engine.end_of(job).tokens, engine.tokens());
        }
        engine.check(1, engine.tokens());
        let [slow, fast] = [2, 0].map(|gpu| node.ask(&format!("carried {gpu}"))[0]);
        assert!(slow < fast / 2, "{slow} bytes over a link that is a tenth as fast as one of {fast}");
    });
}

/// Loads again and again, until it is killed.
#[test]
fn engine() {
    let Some(folder) = folder_of("engine") else { return };
    let fake = cuda_testkit::Fake { driver: forebay_cuda::driver::Driver::load().unwrap() };
    let engine = Engine::open(&fake, &folder, PAGES);
    engine.wait_attached();
    engine.store(1);
    for job in 2.. {
        engine.begin_load(job, 1, false);
        eventually("relaying", || engine.relayed() > 0);
        println!("\nLOADING");
        engine.end_of(job);
    }
}

#[test]
fn an_engine_that_is_killed_in_the_middle_of_a_load_leaves_nothing_at_the_node() {
    let test = "an_engine_that_is_killed_in_the_middle_of_a_load_leaves_nothing_at_the_node";
    alone(test, &SLOW, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let mut node = NodeProcess::start(folder.path());
        let mut child = play("engine", folder.path(), "1").spawn().unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert!(lines.any(|line| line.unwrap() == "LOADING"));
        assert_eq!(node.relays()[0], 1);
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("the node is rid of it", || node.relays()[..2] == [0, 0]);
        // The next engine has all of it, and finds the arena pinned.
        let registrations = node.ask("registrations");
        let engine = Engine::open(fake, folder.path(), PAGES);
        engine.wait_attached();
        assert_eq!(node.ask("registrations"), registrations);
        engine.begin_load(2, 1, false);
        assert_eq!(engine.end_of(2).tokens, engine.tokens());
        engine.check(1, engine.tokens());
        assert!(engine.relayed() > 0);
    });
}

#[test]
fn a_rank_of_several_and_a_process_with_several_gpus_leave_the_node_alone() {
    let test = "a_rank_of_several_and_a_process_with_several_gpus_leave_the_node_alone";
    alone(test, &ENV, |fake| {
        let folder = tempfile::tempdir().unwrap();
        let mut node = NodeProcess::start(folder.path());
        let rank = Engine::beside(fake, folder.path(), FEW_PAGES, &[0, 1]);
        rank.store(1);
        assert_eq!(rank.paged.stats().relays, 0);
        assert_eq!(node.relays(), [0, 0, 0]);
    });
}
