//! Hand-overs between GPUs' pages of two processes: the decoder's kernels read what the prefiller
//! exports. Bytes that change while they are read are never taken for the prompt's.

use crate::rig::*;
use cuda_testkit::{Fake, alone};
use forebay_paged::LoadEnd;
use forebay_paged::direct::{Key, ReadRequest};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;
use testkit::eventually;

const KEY: Key = [3; 16];
const TWO: [(&str, &str); 2] = [("FAKE_CUDA_GPUS", "2"), ("XDG_CACHE_HOME", "/nonexistent")];
/// Tells the process that is the prefiller.
const PREFILLER: &str = "FOREBAY_TEST_PREFILLER";

/// A prefiller in a process of its own, which offers what `truth` says of seed 7.
struct Prefiller {
    process: Child,
    input: ChildStdin,
    metadata: Vec<u8>,
}

impl Prefiller {
    /// Runs the same test as the prefiller.
    fn start(test: &str) -> Prefiller {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([test, "--exact", "--nocapture"]).env(PREFILLER, "1");
        let mut process = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let said = lines.find_map(|line| line.unwrap().strip_prefix("metadata ").map(str::to_owned));
        let metadata = said.unwrap().split(' ').map(|byte| byte.parse().unwrap()).collect();
        std::thread::spawn(move || lines.count());
        let input = process.stdin.take().unwrap();
        Prefiller { process, input, metadata }
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.process.wait().unwrap().success());
    }
}

/// What the other process does: it offers its pages until nobody talks to it any more.
fn be_prefiller(fake: &Fake) {
    let site = Site::new();
    let engine = site.direct(fake, "prefiller");
    (0..LAYERS).for_each(|layer| engine.write(engine.layer(layer), layer, 7));
    let (tables, ttl) = (engine.tables(&blocks(3)), Duration::from_secs(60));
    engine.paged.offer(KEY, [5; 32], &tables, TOKENS as u64, ttl).unwrap();
    let metadata: Vec<String> = engine.paged.metadata().unwrap().iter().map(u8::to_string).collect();
    println!("metadata {}", metadata.join(" "));
    let mut rest = String::new();
    std::io::stdin().read_to_string(&mut rest).unwrap();
}

fn request(engine: &Engine, metadata: &[u8], to: &[i64]) -> ReadRequest {
    let (metadata, tables, digest) = (metadata.to_vec(), engine.tables(to), [5; 32]);
    ReadRequest { job: 1, metadata, key: KEY, digest, tables, first_token: 0, tokens: TOKENS as u64 }
}

fn read(engine: &Engine, metadata: &[u8], to: &[i64]) -> LoadEnd {
    engine.paged.read(request(engine, metadata, to), engine.handle()).unwrap();
    engine.end_of(1)
}

#[test]
fn a_decoder_reads_another_processs_pages_with_every_byte_right() {
    let test = "direct::a_decoder_reads_another_processs_pages_with_every_byte_right";
    alone(test, &TWO, |fake| {
        if std::env::var(PREFILLER).is_ok() {
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
        eventually("the prefiller's memory is let go of", || fake.stat("cuIpcCloseMemHandle") > 0);
        let again = read(&engine, &prefiller.metadata, &to);
        assert_eq!(again.tokens, 0, "it was offered once");
        prefiller.end();
    });
}

#[test]
fn a_prefiller_that_dies_costs_a_read() {
    let test = "direct::a_prefiller_that_dies_costs_a_read";
    alone(test, &TWO, |fake| {
        if std::env::var(PREFILLER).is_ok() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (mut prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        prefiller.process.kill().unwrap();
        prefiller.process.wait().unwrap();
        let end = read(&engine, &prefiller.metadata, &blocks(9));
        assert!(end.tokens == 0 && end.why.is_some());
    });
}

#[test]
fn a_copy_that_the_driver_refuses_costs_a_read_and_gives_the_lease_back() {
    let test = "direct::a_copy_that_the_driver_refuses_costs_a_read_and_gives_the_lease_back";
    alone(test, &TWO, |fake| {
        if std::env::var(PREFILLER).is_ok() {
            return be_prefiller(fake);
        }
        let site = Site::new();
        let (prefiller, engine) = (Prefiller::start(test), site.direct(fake, "decoder"));
        fake.control("fail cuLaunchKernel 1 1");
        let end = read(&engine, &prefiller.metadata, &blocks(9));
        assert!(end.tokens == 0 && end.why.unwrap().contains("cuLaunchKernel"));
        prefiller.end();
    });
}

#[test]
fn bytes_that_go_wrong_between_two_gpus_are_never_data() {
    let test = "direct::bytes_that_go_wrong_between_two_gpus_are_never_data";
    alone(test, &TWO, |fake| {
        if std::env::var(PREFILLER).is_ok() {
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
            prefiller.end();
        }
    });
}
