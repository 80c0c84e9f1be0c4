//! Caches in host memory and a real node: what is stored by one engine is loaded by another,
//! whatever their shapes, and what goes wrong costs tokens, never truth.
#![allow(clippy::unwrap_used)]

mod by_layers;
mod direct;
mod log;
mod rig;
mod shapes;

use forebay_paged::cache::{ALL_PAGES, CacheShape, Group, Layer};
use forebay_paged::cost_model::Tier;
use forebay_paged::page_tables::{BadPages, PageTables};
use forebay_paged::pages::Source;
use forebay_paged::{JobStored, LOADS_MAX, LoadRequest, NotBegun, PagedCache, PagedOptions};
use forebay_store::TenantId;
use forebay_transfer::{Backing, HostBuffer};
use rig::*;
use std::time::Duration;
use testkit::eventually;

const TOKENS: usize = 4 * CHUNK_TOKENS as usize + 21;

/// A node that has what the first engine stored, and another engine of the same shape.
fn stored() -> (Site, forebay_node::Node, Engine, Engine) {
    let site = Site::new();
    let node = site.node();
    let (writer, reader) = (site.engine(2, 0, 16), site.engine(2, 0, 16));
    writer.store(1, &writer.blocks(TOKENS, 3), TOKENS, 1);
    (site, node, writer, reader)
}

/// Turns a bit of a chunk as it lies in the arena of a node in this process.
fn corrupt(node: &forebay_node::Node, id: &forebay_kv::ChunkId, at: usize) {
    let loan = node.store().read_guard_by_id(TenantId(0), id).unwrap();
    // SAFETY: inside of the arena, which lives as long as the node; nobody else writes the chunk
    // now.
    unsafe { *node.store().arena_memory().as_ptr().add(loan.offset_bytes() as usize + at) ^= 1 };
}

#[test]
fn what_one_engine_stores_another_loads_with_every_byte_right_the_tail_included() {
    let (_site, _node, writer, reader) = stored();
    assert_eq!(writer.paged.take_ended().1, [JobStored { job: 1, missing: vec![] }]);
    for layerwise in [true, false] {
        let blocks = reader.blocks(TOKENS, 9 + usize::from(layerwise));
        reader.load_all(reader.request(7, &blocks, TOKENS, 1, layerwise), &blocks);
    }
    let stats = reader.paged.stats();
    assert_eq!((stats.loads, stats.loads_short, stats.chunks_memory), (2, 0, 10));
    assert_eq!((stats.bytes_memory, stats.bytes_disk, stats.bytes_peer), (stats.bytes_loaded, 0, 0));
    assert_eq!(writer.paged.stats().stores_done, 5);
    assert_eq!(writer.paged.stats().bytes_storing, 0);
}

#[test]
fn a_layer_that_was_waited_for_is_there_and_after_the_last_one_the_load_has_ended() {
    let (_site, _node, _writer, reader) = stored();
    let blocks = reader.blocks(TOKENS, 5);
    reader.paged.load(reader.request(1, &blocks, TOKENS, 1, true), 0).unwrap();
    for layer in 0..LAYERS {
        reader.paged.wait_layer(layer as u32, 0).unwrap();
        assert!(reader.is_layer_true(layer, &blocks, 0..TOKENS));
    }
    assert_eq!(reader.paged.take_ended().0.len(), 1);
    assert!(matches!(reader.paged.wait_layer(LAYERS as u32, 0), Err(NotBegun::Value { .. })));
}

#[test]
fn how_long_a_step_waited_is_told_of_each_load_that_it_waits_for_and_of_no_other() {
    let (site, _node, writer, _) = stored();
    let blocks = writer.blocks(TOKENS, 5);
    let (engine, gate) = site.gated_engine(2, site.options());
    let late = Duration::from_millis(120);
    engine.paged.load(engine.request(1, &blocks, TOKENS, 1, true), 0).unwrap();
    engine.paged.load(engine.request(2, &blocks, TOKENS, 1, false), 0).unwrap();
    eventually("copies stand at the gate", || gate.held() > 1);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            std::thread::sleep(late);
            gate.open();
        });
        (0..LAYERS).for_each(|layer| engine.paged.wait_layer(layer as u32, 0).unwrap());
    });
    assert!(engine.paged.wait_loaded(&[1, 2], Some(TIMEOUT)));
    let [stall] = engine.paged.take_stalls().try_into().unwrap();
    assert!(stall.job == 1 && stall.time >= late / 2 && stall.time < TIMEOUT, "{stall:?}");
    assert!((1..=LAYERS as u64).contains(&stall.layers_late), "{stall:?}");
    let stats = engine.paged.stats();
    let all = (stall.layers_late, stall.time.as_micros() as u64);
    assert_eq!((stats.layers_late, stats.bubble_us), all, "the totals are the sums");

    // Of one that was there before anybody asked for its layers.
    engine.paged.load(engine.request(3, &blocks, TOKENS, 1, true), 0).unwrap();
    assert!(engine.paged.wait_loaded(&[3], Some(TIMEOUT)));
    (0..LAYERS).for_each(|layer| engine.paged.wait_layer(layer as u32, 0).unwrap());
    let stalls: Vec<_> =
        engine.paged.take_stalls().iter().map(|one| (one.job, one.time, one.layers_late)).collect();
    assert_eq!(stalls, [(3, Duration::ZERO, 0)]);
    assert_eq!((engine.paged.stats().layers_late, engine.paged.stats().bubble_us), all);
}

#[test]
fn pages_that_are_not_wanted_are_not_touched() {
    let (_site, _node, _writer, reader) = stored();
    let blocks = without(&reader.blocks(TOKENS, 0), &[0, 1, 2, 6, 9]);
    reader.load_all(reader.request(1, &blocks, TOKENS, 1, true), &blocks);
    assert!(reader.is_clean_beside(&blocks));
}

#[test]
fn a_corrupt_byte_costs_its_chunk_and_those_behind_it_and_is_never_among_the_good_ones() {
    let (_site, node, _writer, reader) = stored();
    corrupt(&node, &ids(TOKENS, 1)[2], 5_000);
    let blocks = reader.blocks(TOKENS, 5);
    let end = reader.load(reader.request(1, &blocks, TOKENS, 1, true));
    assert_eq!(end.tokens, 2 * u64::from(CHUNK_TOKENS));
    assert!(end.why.unwrap().contains("layer"));
    assert!(reader.is_true(&blocks, 0..2 * CHUNK_TOKENS as usize));
    assert_eq!(reader.paged.stats().chunks_corrupt, 1);
    eventually("the node has looked for itself", || node.stat().corrupt == 1);
    let again = reader.load(reader.request(2, &blocks, TOKENS, 1, true));
    assert_eq!(again.tokens, 2 * u64::from(CHUNK_TOKENS), "nobody finds it any more");
}

#[test]
fn a_corrupt_chunk_is_found_also_where_chunks_of_one_layer_lie_in_a_row_on_both_sides() {
    let site = Site::new();
    let node = site.node();
    let (page, tokens) = (4096, 2 * CHUNK_TOKENS as usize);
    let memory = HostBuffer::new(8 * page);
    let (address, bytes) = (memory.as_ptr() as u64, page as u64);
    let layer = Layer { address, pages: 8, stride_bytes: bytes, page_bytes: bytes, group: 0 };
    let group = Group { page_tokens: CHUNK_TOKENS, heads: 1, kept_pages: ALL_PAGES };
    let shape = CacheShape::new(vec![layer], vec![group], CHUNK_TOKENS).unwrap();
    // SAFETY: the memory is dropped after the cache, which closes it.
    let paged = unsafe { PagedCache::on_host(shape.clone(), site.options()) }.unwrap();
    assert!(memory.write(0, &vec![7; 8 * page]));
    let tables = || PageTables::new(&shape, vec![vec![2, 3]], tokens as u64, false).unwrap();
    paged.store(1, vec![new_chunks(tokens, 1)], tables(), 0).unwrap();
    assert!(paged.wait_stored(&[1], Some(TIMEOUT)));
    corrupt(&node, &ids(tokens, 1)[1], 100);
    let sources = vec![(ids(tokens, 1), Source::same(&shape))];
    let (tokens, limit_us) = (tokens as u64, 60_000_000);
    let request = LoadRequest {
        job: 2,
        sources,
        tables: tables(),
        tokens,
        layerwise: false,
        limit_us,
        within: None,
        tenant: None,
    };
    paged.load(request, 0).unwrap();
    assert!(paged.wait_loaded(&[2], Some(TIMEOUT)));
    let (ends, _) = paged.take_ended();
    assert_eq!((ends[0].tokens, paged.stats().chunks_corrupt), (u64::from(CHUNK_TOKENS), 1));
}

#[test]
fn chunks_of_another_shape_are_refused_and_nothing_is_written() {
    let site = Site::new();
    let _node = site.node();
    let (writer, reader) = (site.engine(2, 0, 16), site.engine(4, 0, 16));
    writer.store(1, &writer.blocks(TOKENS, 3), TOKENS, 1);
    let blocks = reader.blocks(TOKENS, 5);
    let end = reader.load(reader.request(1, &blocks, TOKENS, 1, true));
    assert_eq!(end.tokens, 0);
    assert!(end.why.unwrap().contains("heads"), "which says what does not fit");
    assert!(reader.is_clean_beside(&[]));
}

#[test]
fn without_a_node_loads_end_with_nothing_and_stores_end_and_the_next_node_is_found() {
    let site = Site::new();
    let engine = site.engine(2, 0, 16);
    assert!(!engine.paged.is_connected());
    let blocks = engine.blocks(TOKENS, 5);
    let end = engine.load(engine.request(1, &blocks, TOKENS, 1, true));
    assert_eq!(end.tokens, 0);
    assert!(end.why.as_ref().is_some_and(|why| why.contains("node.sock: No such file")), "{:?}", end.why);
    engine.store(1, &blocks, TOKENS, 1);
    assert_eq!(engine.paged.stats().stores_failed, 5);

    let node = site.node();
    eventually("the node is found", || engine.paged.is_connected());
    engine.store(2, &blocks, TOKENS, 1);
    assert_eq!(engine.load(engine.request(2, &blocks, TOKENS, 1, true)).tokens, TOKENS as u64);

    drop(node);
    eventually("its end is seen", || !engine.paged.is_connected());
    assert_eq!(engine.load(engine.request(3, &blocks, TOKENS, 1, true)).tokens, 0);
    let node = site.node();
    // The first one may have let the engine in once more on its way out.
    eventually("the next node is found", || !node.clients().is_empty() && engine.paged.is_connected());
    assert_eq!(engine.load(engine.request(4, &blocks, TOKENS, 1, true)).tokens, 0, "it is empty");
    engine.store(3, &blocks, TOKENS, 1);
    engine.load_all(engine.request(5, &blocks, TOKENS, 1, true), &blocks);
}

#[test]
fn a_node_that_dies_while_much_is_loaded_costs_tokens_and_never_truth() {
    for _ in 0..5 {
        let (_site, node, _writer, reader) = stored();
        let blocks = reader.blocks(TOKENS, 5);
        for job in 0..8 {
            reader.paged.load(reader.request(job, &blocks, TOKENS, 1, true), 0).unwrap();
        }
        drop(node);
        for layer in 0..LAYERS {
            reader.paged.wait_layer(layer as u32, 0).unwrap();
        }
        let (ends, _) = reader.paged.take_ended();
        assert_eq!(ends.len(), 8);
        let most = ends.iter().map(|end| end.tokens).max().unwrap_or(0);
        assert!(reader.is_true(&blocks, 0..most as usize));
    }
}

#[test]
fn what_loads_take_is_measured_of_all_that_run_beside_each_other_and_not_of_those_that_fail() {
    let (_site, _node, _writer, reader) = stored();
    let jobs: Vec<u64> = (1..=LOADS_MAX as u64 / 2).collect();
    let blocks = reader.blocks(TOKENS, 5);
    for job in &jobs {
        reader.paged.load(reader.request(*job, &blocks, TOKENS, 1, false), 0).unwrap();
    }
    assert!(reader.paged.wait_loaded(&jobs, Some(TIMEOUT)));
    let measured = reader.paged.take_measured();
    assert!(measured.iter().all(|one| one.tier == Tier::Memory && one.time > Duration::ZERO), "{measured:?}");
    assert_eq!(measured.iter().map(|one| one.bytes).sum::<u64>(), reader.paged.stats().bytes_loaded);
    assert!(reader.paged.take_measured().is_empty(), "each once");
    reader.paged.take_ended();
    let absent = reader.load(reader.request(100, &reader.blocks(TOKENS, 3), TOKENS, 2, false));
    assert_eq!((absent.tokens, reader.paged.take_measured()), (0, vec![]));
}

#[test]
fn what_a_disk_takes_is_measured_with_prompts_whose_beginning_is_in_memory() {
    let site = Site::new();
    let config = site.config_with_disk();
    let node = forebay_node::Node::start(&config).unwrap();
    let (chunk_tokens, tokens) = (CHUNK_TOKENS as usize, 16 * CHUNK_TOKENS as usize);
    let writer = site.engine(2, 0, 16);
    let blocks = writer.blocks(tokens, 3);
    writer.store(1, &blocks, tokens, 1);
    writer.store(2, &blocks, tokens, 2);
    drop(writer);
    node.drain(TIMEOUT).unwrap();

    let _node = forebay_node::Node::start(&config).unwrap();
    let reader = site.engine(2, 0, 16);
    let load = |chunks: usize, salt| {
        let (tokens, before) = (chunks * chunk_tokens, reader.paged.stats().chunks_memory);
        let end = reader.load(reader.request(1, &blocks[..tokens / 16], tokens, salt, false));
        assert_eq!((end.tokens, end.why), (tokens as u64, None));
        let measured = reader.paged.take_measured().into_iter().map(|one| (one.tier, one.bytes)).collect();
        (reader.paged.stats().chunks_memory - before, measured)
    };
    let chunk_bytes = LAYERS as u64 * u64::from(CHUNK_TOKENS) * 2 * CELL as u64;
    assert_eq!(load(4, 1), (0, vec![(Tier::Disk, 4 * chunk_bytes)]));
    assert_eq!(
        load(16, 1),
        (4, vec![(Tier::Disk, 12 * chunk_bytes)]),
        "what was in memory is not the disk's"
    );
    assert_eq!(load(16, 1), (16, vec![(Tier::Memory, 16 * chunk_bytes)]));
    // What little of it comes from the disk is measured while it comes from there.
    assert_eq!(load(12, 2), (0, vec![(Tier::Disk, 12 * chunk_bytes)]));
    assert_eq!(load(16, 2), (12, vec![(Tier::Disk, 4 * chunk_bytes)]));
    let stats = reader.paged.stats();
    let counted = (stats.bytes_memory, stats.bytes_disk, stats.bytes_peer);
    assert_eq!(counted, ((4 + 16 + 12) * chunk_bytes, (4 + 12 + 12 + 4) * chunk_bytes, 0));
    assert_eq!(stats.bytes_loaded, stats.bytes_memory + stats.bytes_disk);
}

#[test]
fn stores_beyond_the_limit_are_refused_and_counted_and_a_full_node_is_no_error() {
    let site = Site::new();
    let _node = site.node();
    let mut options = site.options();
    options.storing_bytes_max = 3 * LAYERS as u64 * 64 * 2 * CELL as u64;
    let limit = options.storing_bytes_max;
    let (engine, gate) = site.gated_engine(2, options);
    let blocks = engine.blocks(TOKENS, 5);
    engine.begin_store(1, &blocks, TOKENS, 1);
    let begun = engine.paged.stats();
    gate.open();
    assert!(engine.paged.wait_stored(&[1], Some(TIMEOUT)));
    assert_eq!((begun.stores_refused, begun.bytes_storing), (2, limit));
    let stats = engine.paged.stats();
    let ended = (stats.stores_refused, stats.stores_done, stats.stores_failed, stats.bytes_storing);
    assert_eq!(ended, (2, 3, 0, 0));
    assert_eq!(engine.paged.take_ended().1, [JobStored { job: 1, missing: vec![3, 4] }]);
}

#[test]
fn more_chunks_than_the_node_takes_or_brings_at_a_time_wait_for_their_turn() {
    let site = Site::new();
    let mut config = site.config_with_disk();
    (config.limits.slots_per_client, config.limits.loads_per_client) = (4, 4);
    let node = forebay_node::Node::start(&config).unwrap();
    let options = || PagedOptions { chunks_at_a_time: 4, ..site.options() };
    let tokens = 16 * CHUNK_TOKENS as usize;
    let writer = Engine::new(2, 0, 16, options());
    let blocks = writer.blocks(tokens, 3);
    writer.store(1, &blocks, tokens, 1);
    let stats = writer.paged.stats();
    assert_eq!((stats.stores_done, stats.stores_failed), (16, 0));
    drop(writer);
    node.drain(TIMEOUT).unwrap();

    let _node = forebay_node::Node::start(&config).unwrap();
    let reader = Engine::new(2, 0, 16, options());
    reader.load_all(reader.request(1, &blocks, tokens, 1, true), &blocks);
    assert_eq!(reader.paged.stats().chunks_disk, 16, "the node had to bring all of them");
}

#[test]
fn pages_that_are_not_there_for_every_token_are_refused_before_anything_is_begun() {
    let site = Site::new();
    let _node = site.node();
    let engine = site.engine(2, 0, 16);
    let (blocks, few) = (engine.blocks(TOKENS, 3), 2 * CHUNK_TOKENS as usize);
    let store = |chunks, blocks: &[i64], tokens| {
        engine
            .paged
            .store(1, vec![chunks], engine.tables(blocks, tokens), 0)
            .map_err(|error| error.to_string())
    };
    let refused = store(new_chunks(TOKENS, 1), &without(&blocks, &[6]), TOKENS).unwrap_err();
    assert!(refused.contains("page -1 of block 6"), "{refused}");
    let refused = store(new_chunks(TOKENS, 1), &engine.blocks(few, 3), few).unwrap_err();
    assert!(refused.contains("the pages of group 0 are 8; allowed: 18 or more"), "{refused}");
    let mut long = new_chunks(few, 1);
    long[1].tokens += 1;
    let refused = store(long, &blocks, TOKENS).unwrap_err();
    assert!(refused.contains("the tokens of a chunk is 65; allowed: 64"), "{refused}");
    let request = LoadRequest {
        tables: engine.tables(&engine.blocks(few, 3), few),
        ..engine.request(1, &blocks, TOKENS, 1, true)
    };
    assert!(matches!(engine.paged.load(request, 0), Err(NotBegun::Pages(BadPages::Short { .. }))));
    let other = site.engine(4, 0, 32);
    let request = LoadRequest {
        tables: other.tables(&other.blocks(few, 3), few),
        ..engine.request(1, &blocks, few, 1, true)
    };
    assert!(matches!(engine.paged.load(request, 0), Err(NotBegun::Pages(BadPages::Short { .. }))));
    let stats = engine.paged.stats();
    assert_eq!((stats.loads, stats.stores), (0, 0));
    assert_eq!(engine.paged.take_ended(), (Vec::new(), Vec::new()));
}

#[test]
fn a_load_of_a_known_number_or_one_too_many_leaves_those_under_way_alone() {
    let site = Site::new();
    let _node = site.node();
    let tokens = CHUNK_TOKENS as usize;
    let writer = site.engine(2, 0, 16);
    let blocks = writer.blocks(tokens, 3);
    writer.store(1, &blocks, tokens, 1);
    let (engine, gate) = site.gated_engine(2, site.options());
    let begin = |job| engine.paged.load(engine.request(job, &blocks, tokens, 1, false), 0);
    let all: Vec<u64> = (0..LOADS_MAX as u64).collect();
    let begun = all.iter().all(|job| begin(*job).is_ok());
    let (known, refused) = (begin(5), begin(5_000));
    let (at_once, _) = engine.paged.take_ended();
    gate.open();
    assert!(begun && refused.is_ok() && engine.paged.wait_loaded(&all, Some(TIMEOUT)));
    assert!(known.unwrap_err().to_string().contains("job is 5; allowed: a number of which no load"));
    assert_eq!((at_once.len(), at_once[0].job, at_once[0].tokens), (1, 5_000, 0));
    let mut ends = engine.paged.take_ended().0;
    ends.sort_by_key(|end| end.job);
    assert_eq!(ends.iter().map(|end| end.job).collect::<Vec<_>>(), all, "each ends once");
    assert!(ends.iter().all(|end| end.tokens == tokens as u64));
}

#[test]
fn a_cache_that_is_closed_keeps_nothing_of_the_node_mapped() {
    let site = Site::new();
    // No other test's arena is as long.
    let bytes = 11 << 20;
    let _node = site.node_of(bytes);
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_arena = |line: &&str| {
            let ends: Vec<u64> =
                line.split([' ', '-']).take(2).map(|end| u64::from_str_radix(end, 16).unwrap()).collect();
            line.contains("forebay-arena") && ends[1] - ends[0] == bytes
        };
        maps.lines().filter(is_arena).count()
    };
    let before = mapped();
    let engine = site.engine(2, 0, 16);
    assert_eq!(mapped(), before + 1);
    let blocks = engine.blocks(TOKENS, 5);
    engine.store(1, &blocks, TOKENS, 1);
    assert_eq!(engine.load(engine.request(1, &blocks, TOKENS, 1, true)).tokens, TOKENS as u64);
    engine.paged.close();
    eventually("it is unmapped", || mapped() == before);
}

#[test]
fn a_cache_that_is_closed_while_busy_is_touched_by_nobody_afterwards() {
    let (_site, _node, _writer, reader) = stored();
    let blocks = reader.blocks(TOKENS, 5);
    for job in 0..8 {
        reader.paged.load(reader.request(job, &blocks, TOKENS, 1, job % 2 == 0), 0).unwrap();
        reader.begin_store(job, &blocks, TOKENS, 50 + job as u8);
    }
    reader.paged.close();
    let zeros = vec![0; reader.memory[0].len()];
    reader.memory.iter().for_each(|layer| assert!(layer.write(0, &zeros)));
    std::thread::sleep(Duration::from_millis(30));
    assert!(reader.is_clean_beside(&[]));
    assert!(reader.paged.wait_loaded(&(0..8).collect::<Vec<_>>(), Some(TIMEOUT)), "they have ended");
    assert!(reader.paged.wait_stored(&(0..8).collect::<Vec<_>>(), Some(TIMEOUT)), "they have ended");
    let request = reader.request(20, &blocks, TOKENS, 1, true);
    assert!(matches!(reader.paged.load(request, 0), Err(NotBegun::Closed)));
    reader.paged.close();
}

#[test]
fn a_node_that_refuses_slots_is_no_error_and_counted() {
    let site = Site::new();
    let mut config = forebay_node::NodeConfig::new(site.socket(), 16 << 20);
    config.memory.largest_chunk = 4096;
    let _node = forebay_node::Node::start(&config).unwrap();
    let engine = site.engine(2, 0, 16);
    let blocks = engine.blocks(TOKENS, 5);
    engine.store(1, &blocks, TOKENS, 1);
    let stats = engine.paged.stats();
    assert_eq!((stats.stores_failed, stats.stores_done, stats.bytes_storing), (5, 0, 0));
    assert_eq!(engine.load(engine.request(1, &blocks, TOKENS, 1, true)).tokens, 0);
}

#[test]
fn where_the_host_cannot_read_pages_streams_follow_and_what_the_node_drops_is_a_miss() {
    let site = Site::new();
    let node = site.node();
    let writer = site.blind_engine(2, 0, 16);
    let (reader, blocks) = (site.blind_engine(2, 0, 16), writer.blocks(TOKENS, 5));
    writer.store(1, &blocks, TOKENS, 1);
    let begin = |job| reader.paged.load(reader.request(job, &blocks, TOKENS, 1, true), 7).unwrap();
    begin(1);
    for layer in 0..LAYERS {
        reader.paged.wait_layer(layer as u32, 7).unwrap();
    }
    let followed = reader.followed();
    // A layer that came before it was waited for is not followed.
    let in_order = followed.is_sorted_by(|before, after| before.0 < after.0);
    let known = followed.iter().all(|(layer, stream)| *layer < LAYERS as _ && *stream == 7);
    assert!(in_order && known, "each layer at most once, in order: {followed:?}");
    assert_eq!(reader.end_of(1).tokens, TOKENS as u64);
    assert!(reader.is_true(&blocks, 0..TOKENS));
    drop(node);
    begin(2);
    assert_eq!(reader.end_of(2).tokens, 0);
}

#[test]
fn a_load_whose_time_is_over_ends_and_nothing_more_is_copied() {
    let (site, _node, writer, _) = stored();
    let blocks = writer.blocks(TOKENS, 5);
    // One thread: what is due comes before answers of the node.
    let (engine, gate) = site.gated_engine(2, PagedOptions { threads: 1, ..site.options() });
    engine.paged.load(LoadRequest { limit_us: 0, ..engine.request(1, &blocks, TOKENS, 1, true) }, 0).unwrap();
    let has_ended = engine.paged.wait_loaded(&[1], Some(TIMEOUT));
    let held = gate.held();
    gate.open();
    assert!(has_ended && held == 0);
    let end = engine.end_of(1);
    assert_eq!((end.tokens, end.why), (0, Some("not there within 0 us".into())));
    assert!(engine.is_clean_beside(&[]));
}

#[test]
fn a_load_in_the_background_of_which_something_comes_now_and_then_may_outlast_its_limit() {
    let (site, _node, writer, _) = stored();
    let blocks = writer.blocks(TOKENS, 5);
    let (engine, gate) = site.gated_engine(2, site.options());
    let limit = Duration::from_secs(1);
    let request =
        LoadRequest { limit_us: limit.as_micros() as u64, ..engine.request(1, &blocks, TOKENS, 1, false) };
    engine.paged.load(request, 0).unwrap();
    for _ in 0..LAYERS {
        std::thread::sleep(limit * 2 / 5);
        eventually("a copy stands at the gate", || gate.held() > 0);
        gate.let_one();
    }
    let end = engine.end_of(1);
    gate.open();
    assert_eq!((end.tokens, end.why), (TOKENS as u64, None));
    assert!(engine.is_true(&blocks, 0..TOKENS));
}
