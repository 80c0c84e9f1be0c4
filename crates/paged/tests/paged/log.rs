//! What goes wrong is told in the log, by one line each that names the job.

use super::*;
use std::sync::{Arc, Mutex, OnceLock};

/// What this process has logged, of all tests.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn log() -> &'static Lines {
    static LINES: OnceLock<Lines> = OnceLock::new();
    LINES.get_or_init(|| {
        let lines = Lines::default();
        let own = lines.clone();
        // Lines come from threads of the cache, so it takes them of all threads.
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || own.clone()).finish();
        tracing::subscriber::set_global_default(log).unwrap();
        lines
    })
}

/// The lines of a job, from the message on.
fn lines_of(job: u64) -> Vec<String> {
    let told = String::from_utf8(log().0.lock().unwrap().clone()).unwrap();
    let of_job = told.lines().filter(|line| line.contains(&format!(" job={job} ")));
    of_job.map(|line| line.split_once("forebay_paged::").unwrap().1.to_owned()).collect()
}

fn assert_told(job: u64, told: &[&str]) {
    let lines = lines_of(job);
    assert!(
        lines.len() == told.len() && lines.iter().zip(told).all(|(line, says)| line.contains(says)),
        "{lines:?} are not {told:?}"
    );
}

#[test]
fn a_corrupt_layer_is_told_and_that_it_cost_tokens() {
    log();
    let site = Site::new();
    let node = site.node();
    let engine = site.engine(2, 0, 16);
    let blocks = engine.blocks(TOKENS, 3);
    engine.store(7_101, &blocks, TOKENS, 1);
    corrupt(&node, &ids(TOKENS, 1)[2], 5_000);
    engine.load(engine.request(7_102, &blocks, TOKENS, 1, true));
    assert_told(
        7_102,
        &["corrupt layer job=7102 chunk=2", "load ended short job=7102 tokens=128 wanted=277"],
    );
    assert_told(7_101, &[]);
}

#[test]
fn a_load_that_its_time_limit_ends_is_told_as_such() {
    log();
    let site = Site::new();
    let _node = site.node();
    let blocks = site.engine(2, 0, 16).blocks(TOKENS, 5);
    let (engine, gate) = site.gated_engine(2, PagedOptions { threads: 1, ..site.options() });
    gate.open();
    engine.load(LoadRequest { limit_us: 0, ..engine.request(7_201, &blocks, TOKENS, 1, true) });
    let short = "load ended short job=7201 tokens=0 wanted=277 reason=\"not there within 0 us\"";
    assert_told(7_201, &["load timed out job=7201 limit_us=0 layerwise=true", short]);
}

#[test]
fn chunks_that_are_not_stored_are_told_with_the_reason() {
    log();
    let site = Site::new();
    let _node = site.node();
    let mut options = site.options();
    options.storing_bytes_max = 3 * LAYERS as u64 * 64 * 2 * CELL as u64;
    let (engine, gate) = site.gated_engine(2, options);
    engine.begin_store(7_301, &engine.blocks(TOKENS, 5), TOKENS, 1);
    gate.open();
    assert!(engine.paged.wait_stored(&[7_301], Some(TIMEOUT)));
    assert_told(7_301, &["chunks not stored job=7301 chunks=2 reason=\"too many bytes are on their way\""]);
}

#[test]
fn chunks_that_the_node_refuses_are_told_with_what_it_says() {
    log();
    let site = Site::new();
    let mut config = forebay_node::NodeConfig::new(site.socket(), 16 << 20);
    config.memory.largest_chunk = 4096;
    let _node = forebay_node::Node::start(&config).unwrap();
    let engine = site.engine(2, 0, 16);
    engine.store(7_351, &engine.blocks(TOKENS, 5), TOKENS, 1);
    assert_told(7_351, &["chunks not stored job=7351 chunks=5 reason=\"the chunk takes"]);
}

#[test]
fn a_cache_without_a_node_tells_why_nothing_is_loaded_or_stored() {
    log();
    let site = Site::new();
    let engine = site.engine(2, 0, 16);
    let blocks = engine.blocks(TOKENS, 5);
    engine.load(engine.request(7_401, &blocks, TOKENS, 1, true));
    engine.store(7_402, &blocks, TOKENS, 1);
    assert_told(7_401, &["load ended short job=7401 tokens=0 wanted=277 reason="]);
    assert_told(7_402, &["chunks not stored job=7402 chunks=5 reason="]);
}

#[test]
fn a_node_that_comes_and_goes_is_told_each_time() {
    log();
    let site = Site::new();
    // Arenas of other tests have other lengths.
    let node = site.node_of(24 << 20);
    let found = || String::from_utf8(log().0.lock().unwrap().clone()).unwrap();
    let engine = site.engine(2, 0, 16);
    let arena_bytes = node.store().arena_memory().len();
    let line = format!("node found arena_bytes={arena_bytes}");
    eventually("the node is told", || found().matches(&line).count() == 1);
    let lost = found().matches("node lost").count();
    drop(node);
    eventually("its end is told", || found().matches("node lost").count() > lost);
    drop(engine);
}
