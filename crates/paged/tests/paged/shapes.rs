//! Engines whose ranks, heads, kept pages or blocks differ: each gets the bytes that are its own.

use crate::TOKENS;
use crate::rig::*;
use forebay_paged::pages::Source;
use forebay_paged::{JobStored, LoadRequest};

#[test]
fn the_chunks_of_two_ranks_become_the_pages_of_one_and_the_other_way_round() {
    let site = Site::new();
    let _node = site.node();
    let (left, right, both) = (site.engine(2, 0, 16), site.engine(2, 2, 16), site.engine(4, 0, 16));
    for (rank, writer) in [&left, &right].into_iter().enumerate() {
        writer.store(1, &writer.blocks(TOKENS, rank), TOKENS, 1 + rank as u8);
    }
    let blocks = both.blocks(TOKENS, 7);
    let source = |rank: u32| Source { heads: whole(0, 2 * rank, 2), page_tokens: None };
    let sources = (0..2).map(|rank| (ids(TOKENS, 1 + rank as u8), source(rank))).collect();
    both.load_all(LoadRequest { sources, ..both.request(1, &blocks, TOKENS, 0, true) }, &blocks);

    both.store(2, &blocks, TOKENS, 9);
    for (rank, reader) in [(0, site.engine(2, 0, 16)), (1, site.engine(2, 2, 16))] {
        let blocks = reader.blocks(TOKENS, 13);
        let source = Source { heads: whole(2 * rank, 0, 2), page_tokens: None };
        let sources = vec![(ids(TOKENS, 9), source)];
        reader.load_all(LoadRequest { sources, ..reader.request(1, &blocks, TOKENS, 0, false) }, &blocks);
    }
}

#[test]
fn of_heads_that_are_stored_one_by_one_an_engine_of_any_number_loads_its_own() {
    let site = Site::new();
    let _node = site.node();
    // Ranks by their first head, and how many heads they have, of 4.
    let ranks = |heads: usize| (0..4).step_by(heads).map(move |first| (first, heads));
    let salt = |stored: usize, head: usize| (10 * stored + head) as u8;
    for stored in [1, 2, 4] {
        for (first, heads) in ranks(stored) {
            let writer = site.engine(heads, first, 16);
            let blocks = writer.blocks(TOKENS, first);
            writer.compute(&blocks, TOKENS);
            let parts = (first..first + heads).map(|head| new_chunks(TOKENS, salt(stored, head))).collect();
            writer.paged.store(1, parts, writer.tables(&blocks, TOKENS), 0).unwrap();
            assert!(writer.paged.wait_stored(&[1], Some(TIMEOUT)));
            assert_eq!(writer.paged.take_ended().1, [JobStored { job: 1, missing: vec![] }]);
            assert_eq!(writer.paged.stats().stores_done, 5 * heads as u64);
        }
        for (first, heads) in [1, 2, 4].into_iter().flat_map(ranks) {
            let reader = site.engine(heads, first, 16);
            let blocks = without(&reader.blocks(TOKENS, 7), &[2, 17]);
            let source = |here| Source { heads: whole(0, here as u32, 1), page_tokens: None };
            let sources = (0..heads).map(|here| (ids(TOKENS, salt(stored, first + here)), source(here)));
            let request = reader.request(1, &blocks, TOKENS, 0, true);
            reader.load_all(LoadRequest { sources: sources.collect(), ..request }, &blocks);
            assert!(reader.is_clean_beside(&blocks));
        }
    }
}

#[test]
fn parts_are_as_many_as_cut_all_heads_evenly_and_a_chunk_without_one_of_them_is_missing() {
    let site = Site::new();
    let _node = site.node();
    let mut options = site.options();
    // Room for two whole chunks and three of four parts of the next one.
    options.storing_bytes_max = (2 * 4 + 3) * LAYERS as u64 * 64 * CELL as u64;
    let (engine, gate) = site.gated_engine(4, options);
    let blocks = engine.blocks(TOKENS, 5);
    let tokens = 3 * CHUNK_TOKENS as usize;
    let store = |parts| {
        engine.paged.store(1, parts, engine.tables(&blocks, tokens), 0).map_err(|error| error.to_string())
    };
    let refused = store(vec![new_chunks(tokens, 1); 3]).unwrap_err();
    assert!(refused.contains("the number of parts is 3; allowed: a divisor of 4, the heads"), "{refused}");
    assert!(store(Vec::new()).unwrap_err().contains("the number of parts is 0"));
    let uneven = vec![new_chunks(tokens, 1), new_chunks(tokens - 1, 2)];
    assert!(store(uneven).unwrap_err().contains("the chunks of part 1 is 3; allowed: 3, of as many tokens"));
    store((0..4).map(|head| new_chunks(tokens, head)).collect()).unwrap();
    gate.open();
    assert!(engine.paged.wait_stored(&[1], Some(TIMEOUT)));
    assert_eq!(engine.paged.take_ended().1, [JobStored { job: 1, missing: vec![2] }]);
    assert_eq!((engine.paged.stats().stores_refused, engine.paged.stats().stores_done), (1, 11));
}

#[test]
fn a_chunk_that_keeps_its_last_pages_has_no_others_and_comes_back_also_in_parts() {
    let site = Site::new();
    let _node = site.node();
    let [left, right, both] =
        [(2, 0), (2, 2), (4, 0)].map(|(heads, first)| site.engine_that_keeps(1, heads, first));
    // Of 4 pages of a chunk the first 3. The tail ends within a page, and keeps 2.
    let dropped = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14];
    let held = |engine: &Engine, seed| without(&engine.blocks(TOKENS, seed), &dropped);
    let source =
        |first_there, first_here| Source { heads: whole(first_there, first_here, 2), page_tokens: None };
    for (rank, writer) in [&left, &right].into_iter().enumerate() {
        writer.store(1, &held(writer, rank), TOKENS, 1 + rank as u8);
        let kept_bytes = (LAYERS * (4 + 2) * 16 * 2 * CELL) as u64;
        assert_eq!(writer.paged.stats().bytes_stored, kept_bytes, "no other pages were stored");
    }
    let blocks = both.blocks(TOKENS, 7);
    let sources = vec![(ids(TOKENS, 1), source(0, 0)), (ids(TOKENS, 2), source(0, 2))];
    let end = both.load(LoadRequest { sources, ..both.request(1, &blocks, TOKENS, 0, true) });
    assert_eq!((end.tokens, end.why), (TOKENS as u64, None));
    let kept = without(&blocks, &dropped);
    assert!(both.is_true(&kept, 0..TOKENS));
    assert!(both.is_clean_beside(&kept), "what a chunk does not keep is not written");

    both.store(2, &kept, TOKENS, 9);
    for (first, reader) in [(0, &left), (2, &right)] {
        let blocks = held(reader, 33);
        let sources = vec![(ids(TOKENS, 9), source(first, 0))];
        reader.load_all(LoadRequest { sources, ..reader.request(1, &blocks, TOKENS, 0, false) }, &blocks);
    }
    let same = site.engine_that_keeps(1, 4, 0);
    let blocks = held(&same, 13);
    same.load_all(same.request(1, &blocks, TOKENS, 9, true), &blocks);
    assert!(same.is_clean_beside(&blocks));

    let lacking = without(&kept, &[7]);
    let tables = same.tables(&lacking, TOKENS);
    let refused = same.paged.store(3, vec![new_chunks(TOKENS, 10)], tables, 0).unwrap_err().to_string();
    assert!(refused.contains("page -1 of block 7"), "{refused}");
    let end = site.engine(4, 0, 16).load(same.request(1, &blocks, TOKENS, 9, true));
    assert_eq!(end.tokens, 0, "one that keeps all pages has no use for them");
}

#[test]
fn blocks_of_another_size_become_pages_of_this_one() {
    for (there, here) in [(16, 32), (32, 16)] {
        let site = Site::new();
        let _node = site.node();
        let (writer, reader) = (site.engine(2, 0, there), site.engine(2, 0, here));
        let tokens = 2 * CHUNK_TOKENS as usize + 37;
        writer.store(1, &writer.blocks(tokens, 3), tokens, 1);
        let blocks = without(&reader.blocks(tokens, 9), &[1]);
        let source = Source { heads: whole(0, 0, 2), page_tokens: Some(there as u32) };
        let sources = vec![(ids(tokens, 1), source)];
        reader.load_all(LoadRequest { sources, ..reader.request(1, &blocks, tokens, 0, true) }, &blocks);
        assert!(reader.is_clean_beside(&blocks));
    }
}
