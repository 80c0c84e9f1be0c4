//! Hand-overs between GPUs' pages of two processes: the decoder's kernels read what the prefiller
//! exports. Bytes that change while they are read are never taken for the prompt's.

use crate::other::Other;
use crate::rig::*;
use cuda_testkit::{Fake, alone};
use forebay_paged::LoadEnd;
use forebay_paged::direct::{Key, OfferEnd, ReadRequest, ReadSource};
use std::time::{Duration, Instant};
use testkit::eventually;

const KEY: Key = [3; 16];
const TWO: [(&str, &str); 2] = [("FAKE_CUDA_GPUS", "2"), ("XDG_CACHE_HOME", "/nonexistent")];
const TTL: Duration = Duration::from_secs(60);
/// A question to an engine that is frozen is given up in 3 s, and a lease ends after 5.
const FROZEN: Duration = Duration::from_secs(9);

/// A prefiller in a process of its own, and what it says of itself.
struct Prefiller {
    process: Other,
    metadata: Vec<u8>,
}

impl Prefiller {
    fn start(test: &str) -> Prefiller {
        let mut process = Other::start(test, &[]);
        let metadata = process.says("metadata");
        Prefiller { process, metadata: from_words(&metadata) }
    }
}

fn words(bytes: &[u8]) -> String {
    bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(" ")
}

fn from_words(words: &str) -> Vec<u8> {
    words.split(' ').map(|byte| byte.parse().unwrap()).collect()
}

/// An engine that offers what `truth` says of seed 7.
fn offering(site: &Site, fake: &Fake) -> Engine {
    let engine = site.direct(fake, "prefiller");
    (0..LAYERS).for_each(|layer| engine.write(engine.layer(layer), layer, 7));
    offer(&engine);
    engine
}

fn offer(engine: &Engine) {
    engine.paged.offer(KEY, [5; 32], &engine.tables(&blocks(3)), TOKENS as u64, TTL).unwrap();
}

/// What the other process does: it offers its pages, and does what it is told until nobody talks to
/// it any more.
fn be_prefiller(fake: &Fake) {
    let site = Site::new();
    let engine = offering(&site, fake);
    println!("metadata {}", words(&engine.paged.metadata().unwrap()));
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "close" => engine.paged.close(),
            "offer" => {
                eventually("the offer before has ended", || !engine.paged.take_offers_ended().is_empty());
                offer(&engine);
                println!("offered again");
            }
            commands => fake.control(commands),
        }
    }
}

/// How the engine's offer ends. Other sequences have its pages at once.
fn reused_after(engine: &Engine) -> OfferEnd {
    let mut ended = Vec::new();
    eventually("the offer ends", || {
        ended.extend(engine.paged.take_offers_ended());
        !ended.is_empty()
    });
    (0..LAYERS).for_each(|layer| engine.write(engine.layer(layer), layer, 8));
    ended[0].how
}

fn request(engine: &Engine, metadata: &[u8], to: &[i64]) -> ReadRequest {
    let sources = vec![ReadSource { metadata: metadata.to_vec(), key: KEY, heads: None, readers: 1 }];
    let (tables, tokens) = (engine.tables(to), TOKENS as u64);
    ReadRequest { job: 1, sources, digest: [5; 32], tables, first_token: 0, tokens, wait: Duration::ZERO }
}

fn read(engine: &Engine, metadata: &[u8], to: &[i64]) -> LoadEnd {
    engine.paged.read(request(engine, metadata, to), engine.handle()).unwrap();
    engine.end_of(1)
}

/// Begins a read whose kernels stand still.
fn begin_reading(fake: &Fake, engine: &Engine, metadata: &[u8]) {
    fake.control("freeze compute.0");
    engine.paged.read(request(engine, metadata, &blocks(9)), engine.handle()).unwrap();
    eventually("the prefiller has answered", || fake.stat("cuIpcOpenMemHandle_v2") > 0);
}

#[test]
fn a_decoder_reads_another_processs_pages_with_every_byte_right() {
    let test = "direct::a_decoder_reads_another_processs_pages_with_every_byte_right";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        let to = blocks(9);
        // A kernel of the engine still reads the pages that are about to be written.
        engine.kernel(engine.layer(0), &engine.scratch[0]);
        let end = read(&engine, &prefiller.metadata, &to);
        assert_eq!((end.tokens, end.why), (TOKENS as u64, None));
        assert!(engine.has(&to, &blocks(3), 7, TOKENS));
        assert_eq!(engine.paged.stats().bytes_read, (LAYERS * blocks(3).len() * PAGE_BYTES) as u64);
        let again = read(&engine, &prefiller.metadata, &to);
        assert_eq!(again.tokens, 0, "it was offered once");
        prefiller.process.end();
    });
}

#[test]
fn a_prefillers_memory_stays_mapped_until_it_is_gone() {
    let test = "direct::a_prefillers_memory_stays_mapped_until_it_is_gone";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (mut prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        let to = blocks(9);
        assert_eq!(read(&engine, &prefiller.metadata, &to).tokens, TOKENS as u64);
        let opened = fake.stat("cuIpcOpenMemHandle_v2");
        // Longer than it takes until it is looked whether the prefiller is there.
        std::thread::sleep(Duration::from_millis(2_500));
        assert_eq!(fake.stat("cuIpcCloseMemHandle"), 0);
        prefiller.process.tell("offer");
        assert_eq!(prefiller.process.says("offered"), "again");
        assert_eq!(read(&engine, &prefiller.metadata, &to).tokens, TOKENS as u64);
        assert_eq!(fake.stat("cuIpcOpenMemHandle_v2"), opened, "it was mapped once");
        prefiller.process.end();
        eventually("its memory is let go of", || fake.stat("cuIpcCloseMemHandle") == opened);
    });
}

#[test]
fn memory_of_a_prefiller_in_whose_place_another_process_has_come_is_let_go_of() {
    let test = "direct::memory_of_a_prefiller_in_whose_place_another_process_has_come_is_let_go_of";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (former, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        let to = blocks(9);
        assert_eq!(read(&engine, &former.metadata, &to).tokens, TOKENS as u64);
        let opened = fake.stat("cuIpcOpenMemHandle_v2");
        drop(former);
        // It has the same name, and is there when it is looked next whether the former one is.
        let prefiller = Prefiller::start(test);
        eventually("the new one is read", || read(&engine, &prefiller.metadata, &to).tokens > 0);
        eventually("the former one's memory is let go of", || fake.stat("cuIpcCloseMemHandle") == opened);
        prefiller.process.end();
    });
}

#[test]
fn a_prefiller_that_dies_or_freezes_before_it_is_asked_costs_a_read() {
    let test = "direct::a_prefiller_that_dies_or_freezes_before_it_is_asked_costs_a_read";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        for signal in ["KILL", "STOP"] {
            let site = Site::new();
            let (prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
            prefiller.process.signal(signal);
            let began = Instant::now();
            let end = read(&engine, &prefiller.metadata, &blocks(9));
            assert!(end.tokens == 0 && end.why.is_some(), "{signal}");
            assert!(began.elapsed() < FROZEN, "{signal}: {:?}", began.elapsed());
        }
    });
}

#[test]
fn a_copy_that_the_driver_refuses_costs_a_read_and_gives_the_lease_back() {
    let test = "direct::a_copy_that_the_driver_refuses_costs_a_read_and_gives_the_lease_back";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        fake.control("fail cuLaunchKernel 1 1");
        let end = read(&engine, &prefiller.metadata, &blocks(9));
        assert!(end.tokens == 0 && end.why.unwrap().contains("cuLaunchKernel"));
        prefiller.process.end();
    });
}

#[test]
fn bytes_that_go_wrong_between_two_gpus_are_never_data() {
    let test = "direct::bytes_that_go_wrong_between_two_gpus_are_never_data";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        for how in ["flipped", "exchanged"] {
            let site = Site::new();
            let (prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
            fake.control(&format!("flaw compute.0 {how}"));
            let end = read(&engine, &prefiller.metadata, &blocks(9));
            assert!(end.tokens == 0 && end.why.unwrap().contains("are not those of the peer"), "{how}");
            let stats = engine.paged.stats();
            assert_eq!((stats.reads_failed, stats.reads_corrupt, stats.bytes_read), (1, 1, 0), "{how}");
            prefiller.process.end();
        }
    });
}

#[test]
fn a_prefiller_that_dies_or_freezes_while_it_is_read_costs_a_read() {
    let test = "direct::a_prefiller_that_dies_or_freezes_while_it_is_read_costs_a_read";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        for signal in ["KILL", "STOP"] {
            let site = Site::new();
            let (prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
            begin_reading(fake, &engine, &prefiller.metadata);
            prefiller.process.signal(signal);
            let began = Instant::now();
            fake.control("release compute.0");
            let end = engine.end_of(1);
            assert!(end.tokens == 0 && end.why.is_some(), "{signal}");
            assert!(began.elapsed() < FROZEN, "{signal}: {:?}", began.elapsed());
        }
    });
}

#[test]
fn a_prefiller_that_says_no_sums_costs_a_read() {
    let test = "direct::a_prefiller_that_says_no_sums_costs_a_read";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (mut prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        prefiller.process.tell("freeze compute.0");
        let began = Instant::now();
        let end = read(&engine, &prefiller.metadata, &blocks(9));
        assert!(end.tokens == 0 && end.why.is_some());
        assert!(began.elapsed() < FROZEN, "{:?}", began.elapsed());
        prefiller.process.tell("release compute.0");
        prefiller.process.end();
    });
}

#[test]
fn a_prefiller_that_closes_waits_for_its_reader() {
    let test = "direct::a_prefiller_that_closes_waits_for_its_reader";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (mut prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        begin_reading(fake, &engine, &prefiller.metadata);
        prefiller.process.tell("close");
        std::thread::sleep(Duration::from_millis(200));
        fake.control("release compute.0");
        let end = engine.end_of(1);
        assert_eq!((end.tokens, end.why), (TOKENS as u64, None));
        assert!(engine.has(&blocks(9), &blocks(3), 7, TOKENS));
        prefiller.process.end();
    });
}

/// What the other process does: it reads, with kernels that stand still until it is told to go on.
fn be_decoder(fake: &Fake) {
    let site = Site::new();
    let engine = site.direct(fake, "decoder");
    begin_reading(fake, &engine, &from_words(&std::env::var(METADATA).unwrap()));
    println!("reads now");
    std::io::stdin().lines().next();
    fake.control("release compute.0");
    let end = engine.end_of(1);
    println!("ended with {} tokens: {:?}", end.tokens, end.why);
}

/// Tells a decoder where to read.
const METADATA: &str = "FOREBAY_TEST_METADATA";

#[test]
fn blocks_of_a_decoder_that_dies_or_freezes_come_back_and_are_never_data_for_it() {
    let test = "direct::blocks_of_a_decoder_that_dies_or_freezes_come_back_and_are_never_data_for_it";
    alone(test, &TWO, |fake| {
        if Other::is_this() {
            return be_decoder(fake);
        }
        for (signal, how) in [("KILL", OfferEnd::ReaderGone), ("STOP", OfferEnd::Expired)] {
            let site = Site::new();
            let engine = offering(&site, fake);
            let metadata = words(&engine.paged.metadata().unwrap());
            let mut decoder = Other::start(test, &[(METADATA, &metadata)]);
            decoder.says("reads");
            decoder.signal(signal);
            let began = Instant::now();
            assert_eq!(reused_after(&engine), how);
            assert!(began.elapsed() < FROZEN, "{signal}: {:?}", began.elapsed());
            if signal == "STOP" {
                decoder.signal("CONT");
                decoder.tell("go on");
                let end = decoder.says("ended with");
                assert!(end.starts_with("0 tokens"), "{end}");
                decoder.end();
            }
        }
    });
}
