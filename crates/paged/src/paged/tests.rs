//! Loads behind others that have the places: a real node, and a window whose places the test takes
//! and leaves.

#[path = "../../tests/paged/rig.rs"]
#[expect(dead_code, reason = "the tests outside use the rest")]
mod rig;

use super::*;
use crate::limiter::Permit;
use forebay_node::Node;
use rig::{CHUNK_TOKENS, Engine, Site, TIMEOUT};
use std::collections::VecDeque;
use std::time::Instant;

const TOKENS: usize = 4 * CHUNK_TOKENS as usize;

/// A node that has the chunks of three prompts on its disk, and an engine that asks for one chunk
/// at a time.
fn engine_of_a_disk(site: &Site) -> (Node, Engine) {
    let config = site.config_with_disk();
    let node = Node::start(&config).unwrap();
    let writer = site.engine(2, 0, 16);
    (1..=3).for_each(|salt| writer.store(salt.into(), &writer.blocks(TOKENS, 3), TOKENS, salt));
    drop(writer);
    node.drain(TIMEOUT).unwrap();
    let node = Node::start(&config).unwrap();
    (node, Engine::new(2, 0, 16, PagedOptions { chunks_at_a_time: 1, ..site.options() }))
}

/// Chunks before those of all loads to come. They leave one by one.
#[derive(Clone)]
struct Front(Arc<Mutex<VecDeque<Permit>>>);

impl Front {
    fn new(engine: &Engine, chunks: usize) -> Front {
        let front = Front(Arc::default());
        for _ in 0..chunks {
            let taken = front.clone();
            engine.paged.shared.fetches.acquire(move |place| taken.0.lock().push_back(place));
        }
        front
    }

    fn leave(&self) {
        let place = self.0.lock().pop_front();
        assert!(place.is_some());
        drop(place);
    }
}

fn begin(engine: &Engine, job: u64, layerwise: bool, limit: Duration) -> Vec<i64> {
    let blocks = engine.blocks(TOKENS, 20 * job as usize);
    let limit_us = limit.as_micros() as u64;
    let request = LoadRequest { limit_us, ..engine.request(job, &blocks, TOKENS, job as u8, layerwise) };
    engine.paged.load(request, 0).unwrap();
    blocks
}

#[test]
fn a_load_behind_others_that_go_on_has_all_the_time_that_they_take_unless_a_step_waits_for_it() {
    let (site, limit) = (Site::new(), Duration::from_secs(1));
    let (_node, engine) = engine_of_a_disk(&site);
    let front = Front::new(&engine, 10);
    let blocks = begin(&engine, 1, false, limit);
    begin(&engine, 2, true, limit);
    for _ in 0..9 {
        std::thread::sleep(limit / 5);
        front.leave();
    }
    assert!(!engine.paged.wait_loaded(&[1], Some(Duration::ZERO)), "it waits for its turn");
    let end = engine.end_of(2);
    assert_eq!((end.tokens, end.why), (0, Some("not there within 1000000 us".into())));
    front.leave();
    let end = engine.end_of(1);
    assert_eq!((end.tokens, end.why), (TOKENS as u64, None));
    assert!(engine.is_true(&blocks, 0..TOKENS));
    assert_eq!(engine.paged.stats().chunks_disk, 8, "the node had to bring all of them");
}

#[test]
fn behind_others_of_which_nothing_comes_every_load_ends_in_its_time() {
    let (site, limit) = (Site::new(), Duration::from_millis(400));
    let (_node, engine) = engine_of_a_disk(&site);
    let front = Front::new(&engine, 2);
    let begun = Instant::now();
    let jobs = [1, 2, 3];
    jobs.iter().for_each(|job| drop(begin(&engine, *job, false, limit)));
    std::thread::sleep(limit / 2);
    front.leave();
    let last_left = Instant::now();
    assert!(engine.paged.wait_loaded(&jobs, Some(TIMEOUT)), "whatever has the places keeps them");
    let (ended, least) = (Instant::now(), limit + limit / 2);
    assert!(ended - begun >= least, "what has left put it off");
    assert!(ended - last_left < 20 * limit, "all of them at a time, and not one after the other");
    let ends = engine.paged.take_ended().0;
    assert_eq!(ends.len(), 3);
    for end in ends {
        assert_eq!((end.tokens, end.why), (0, Some("nothing has come for 400000 us".into())));
    }
    assert!(engine.is_clean_beside(&[]));
    front.leave();
    begin(&engine, 1, false, TIMEOUT);
    assert_eq!(engine.end_of(1).tokens, TOKENS as u64, "those after them are not worse off");
}
