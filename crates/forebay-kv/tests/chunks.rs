//! Guarantees of chunks: layers one after another, pages one after another, every byte once.

use forebay_kv::{AxisOrder, Cache, ChunkLayout, Chunking, Extent, Geometry, Group, KvDtype, StateShape};
use proptest::prelude::*;

fn key_value(heads: u32, head_dim: u32) -> Cache {
    Cache::KeyValue { heads, head_dim, dtype: KvDtype::Bfloat16, window_tokens: None }
}

/// A hybrid: two kinds of attention, a state layer and an empty layer.
fn hybrid() -> Geometry {
    let state = StateShape { heads: 4, bytes_per_head: 100, groups: 0, bytes_per_group: 0 };
    let groups = vec![
        Group { layers: vec![3, 1], cache: key_value(2, 4) },
        Group { layers: vec![4, 0], cache: key_value(4, 8) },
        Group { layers: vec![2], cache: Cache::State(state) },
    ];
    Geometry::from_groups(6, groups).expect("a valid geometry")
}

#[test]
fn a_layer_of_256_tokens_of_llama_8b_is_one_mebibyte() {
    let cache = key_value(8, 128);
    let llama = Geometry::from_groups(32, vec![Group { layers: (0..32).collect(), cache }]).unwrap();
    let layout = ChunkLayout::new(&llama, AxisOrder::Lbhnc, Chunking::new(256, 16).unwrap());
    assert_eq!(layout.bytes(), 32 << 20);
    assert_eq!(layout.layer(5), Ok(Extent { offset: 5 << 20, len: 1 << 20 }));
    assert_eq!(layout.page(5, 3), Ok(Extent { offset: (5 << 20) + 3 * 65_536, len: 65_536 }));
}

#[test]
fn layers_that_keep_no_tokens_are_not_in_a_chunk() {
    let layout = ChunkLayout::new(&hybrid(), AxisOrder::Lbnhc, Chunking::new(8, 4).unwrap());
    let model_layers: Vec<u32> =
        (0..layout.layers()).map(|layer| layout.model_layer(layer).unwrap()).collect();
    assert_eq!(model_layers, [0, 1, 3, 4]);
    let bytes: Vec<u64> = (0..layout.layers()).map(|layer| layout.layer(layer).unwrap().len).collect();
    assert_eq!(bytes, [8 * 4 * 32, 8 * 2 * 16, 8 * 2 * 16, 8 * 4 * 32]);
    assert!(layout.layer(4).is_err() && layout.model_layer(4).is_err());
    assert_eq!(layout.bytes(), 8 * hybrid().bytes_per_token());
}

#[test]
fn nothing_outside_a_chunk_has_a_place() {
    let layout = ChunkLayout::new(&hybrid(), AxisOrder::Lbhnc, Chunking::new(8, 4).unwrap());
    assert!(layout.page(0, 2).is_err());
    assert!(layout.extents(0, 0, 0..5, 0..4).is_err());
    assert!(layout.extents(1, 0, 0..3, 0..4).is_err());
    assert!(layout.extents(0, 0, 0..4, 0..5).is_err());
    assert!(layout.extents(0, 0, 1..1, 0..4).is_err());
}

proptest! {
    #[test]
    fn the_cells_of_a_chunk_are_disjoint_and_cover_it(
        order in prop::sample::select(AxisOrder::ALL.to_vec()),
        block_tokens in 1u32..5,
        blocks in 1u32..4,
    ) {
        let chunking = Chunking::new(block_tokens * blocks, block_tokens).unwrap();
        let layout = ChunkLayout::new(&hybrid(), order, chunking);
        let mut seen = vec![false; layout.bytes() as usize];
        let mut end_of_last_page = 0;
        for layer in 0..layout.layers() {
            let extent = layout.layer(layer).unwrap();
            let heads = [4, 2, 2, 4][layer as usize];
            for block in 0..blocks {
                let page = layout.page(layer, block).unwrap();
                prop_assert_eq!(page.offset, end_of_last_page);
                end_of_last_page = page.end();
                let whole = layout.extents(layer, block, 0..heads, 0..block_tokens).unwrap();
                prop_assert_eq!(whole.contiguous(), Some(page));
                for (head, token) in (0..heads).flat_map(|head| (0..block_tokens).map(move |token| (head, token))) {
                    let cell = layout.extents(layer, block, head..head + 1, token..token + 1).unwrap();
                    for byte in cell.extents().flat_map(|extent| extent.offset..extent.end()) {
                        prop_assert!((page.offset..page.end()).contains(&byte));
                        prop_assert!(!std::mem::replace(&mut seen[byte as usize], true), "twice: {}", byte);
                    }
                }
            }
            prop_assert_eq!(extent.end(), end_of_last_page);
        }
        prop_assert!(seen.into_iter().all(|seen| seen));
    }
}
