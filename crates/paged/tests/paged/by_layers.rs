//! Awaited loads from SSD: the first layer of all chunks comes before the second of any.

use crate::rig::*;

/// Heads so many that a layer of a chunk fills pages, and is read by itself.
const WIDE: usize = 352;

#[test]
fn layers_of_chunks_on_disk_come_one_after_the_other_and_a_bad_one_costs_its_chunk_alone() {
    let site = Site::new();
    let mut config = site.config_with_disk();
    let layer_bytes = CHUNK_TOKENS as usize * WIDE * CELL;
    config.memory.largest_chunk = (LAYERS * layer_bytes).next_multiple_of(4096) as u64;
    config.ssd[0].size = 64 << 20;
    config.ssd[0].segment_size = 8 << 20;
    let node = forebay_node::Node::start(&config).unwrap();
    let tokens = 4 * CHUNK_TOKENS as usize;
    let writer = site.engine(WIDE, 0, 16);
    let blocks = writer.blocks(tokens, 3);
    writer.store(1, &blocks, tokens, 1);
    drop(writer);
    node.drain(TIMEOUT).unwrap();

    let node = forebay_node::Node::start(&config).unwrap();
    let reader = site.engine(WIDE, 0, 16);
    reader.paged.load(reader.request(1, &blocks, tokens, 1, true), 0).unwrap();
    for layer in 0..LAYERS {
        reader.paged.wait_layer(layer as u32, 0).unwrap();
        assert!(layer + 1 == LAYERS || reader.is_layer_true(layer, &blocks, 0..tokens));
    }
    assert_eq!(reader.end_of(1).tokens, tokens as u64);
    assert!(reader.is_true(&blocks, 0..tokens));
    // One context for each layer of each chunk, and no chunk by another way.
    assert_eq!((node.rings().done, node.rings().failed), ((LAYERS * 4) as u64, 0));
    drop(reader);
    node.drain(TIMEOUT).unwrap();

    let log = std::fs::File::options().read(true).write(true).open(&config.ssd[0].path).unwrap();
    let begins: Vec<u8> =
        (0..64).flat_map(|cell| truth(2, 2 * CHUNK_TOKENS as usize + cell, 0)).take(48).collect();
    let bytes = std::fs::read(&config.ssd[0].path).unwrap();
    let at = (0..bytes.len()).step_by(4096).find(|at| bytes[*at..].starts_with(&begins)).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&log, b"damage", at as u64 + 4_000).unwrap();
    log.sync_all().unwrap();
    let _node = forebay_node::Node::start(&config).unwrap();
    let reader = site.engine(WIDE, 0, 16);
    let end = reader.load(reader.request(1, &blocks, tokens, 1, true));
    assert_eq!(end.tokens, 2 * u64::from(CHUNK_TOKENS));
    assert_eq!(end.why.unwrap(), "layer 2 is not there: not read");
    assert!(reader.is_true(&blocks, 0..end.tokens as usize));
}
