//! Guarantees of layouts: every byte of a cache belongs to exactly one layer, block, head and token.

use std::collections::BTreeSet;

use forebay_kv::{AxisOrder, Extent, Layout, LayoutError, PoolShape};
use proptest::prelude::*;

fn orders() -> impl Strategy<Value = AxisOrder> {
    prop::sample::select(AxisOrder::ALL.to_vec())
}

fn shapes() -> impl Strategy<Value = PoolShape> {
    (1u32..5, 1u32..5, 1u32..5, 1u32..5, 1u32..4).prop_map(
        |(layers, blocks, heads, block_tokens, cell_bytes)| PoolShape {
            layers,
            blocks,
            heads,
            block_tokens,
            cell_bytes,
        },
    )
}

fn bytes_of(extents: impl IntoIterator<Item = Extent>) -> Vec<u64> {
    extents.into_iter().flat_map(|extent| extent.offset..extent.end()).collect()
}

#[test]
fn strides_are_those_that_vllm_registers() {
    // Seen in vLLM 0.26 on the CPU: one layer of shape (16384, 2, 16, 128) with strides (4096, 2048, 128, 1),
    // in bf16.
    let shape = PoolShape { layers: 1, blocks: 16_384, heads: 2, block_tokens: 16, cell_bytes: 256 };
    let layout = Layout::new(AxisOrder::Lbhnc, shape).unwrap();
    let cell = layout.extents(0, 1, 1..2, 3..4).unwrap();
    assert_eq!(cell.contiguous(), Some(Extent { offset: 2 * (4096 + 2048 + 3 * 128), len: 256 }));
    assert_eq!(layout.tensor_bytes(), 16_384 * 4096 * 2);
}

#[test]
fn what_is_contiguous_follows_from_the_order() {
    let shape = PoolShape { layers: 3, blocks: 5, heads: 4, block_tokens: 16, cell_bytes: 8 };
    for (order, page, one_head, one_token, block) in [
        (AxisOrder::Lbhnc, 1, 1, 4, false),
        (AxisOrder::Lbnhc, 1, 16, 1, false),
        (AxisOrder::Lhbnc, 4, 1, 4, false),
        (AxisOrder::Blhnc, 1, 1, 4, true),
        (AxisOrder::Blnhc, 1, 16, 1, true),
        (AxisOrder::Bhlnc, 4, 1, 4, true),
    ] {
        let layout = Layout::new(order, shape).unwrap();
        assert_eq!(layout.page(1, 2).unwrap().pieces, page, "page of {order}");
        assert_eq!(layout.extents(1, 2, 3..4, 0..16).unwrap().pieces, one_head, "head of {order}");
        assert_eq!(layout.extents(1, 2, 0..4, 9..10).unwrap().pieces, one_token, "token of {order}");
        assert_eq!(layout.whole_block(2).unwrap().is_some(), block, "block of {order}");
    }
}

#[test]
fn an_impossible_shape_is_refused_by_name() {
    let shape = PoolShape { layers: 1, blocks: 1, heads: 0, block_tokens: 16, cell_bytes: 8 };
    assert_eq!(Layout::new(AxisOrder::Lbhnc, shape), Err(LayoutError::Zero { field: "heads" }));
    let all = u32::MAX;
    let shape = PoolShape { layers: all, blocks: all, heads: all, block_tokens: all, cell_bytes: all };
    assert!(matches!(Layout::new(AxisOrder::Blnhc, shape), Err(LayoutError::TooLarge { .. })));
}

#[test]
fn nothing_outside_the_cache_has_a_place() {
    let shape = PoolShape { layers: 2, blocks: 3, heads: 4, block_tokens: 5, cell_bytes: 8 };
    let layout = Layout::new(AxisOrder::Lbhnc, shape).unwrap();
    assert!(layout.extents(2, 0, 0..4, 0..5).is_err());
    assert!(layout.extents(0, 3, 0..4, 0..5).is_err());
    assert!(layout.extents(0, 0, 0..5, 0..5).is_err());
    assert!(layout.extents(0, 0, 0..4, 0..6).is_err());
    assert!(layout.extents(0, 0, 2..2, 0..5).is_err());
    #[expect(clippy::reversed_empty_ranges)]
    let backwards = layout.extents(0, 0, 3..2, 0..5);
    assert_eq!(
        backwards.unwrap_err().to_string(),
        "head 3..2 is out of range; allowed: a range that is not empty within 0..4"
    );
    assert!(layout.whole_block(3).is_err());
    assert!(layout.tensor_of(2).is_err());
}

proptest! {
    #[test]
    fn the_cells_of_a_cache_are_disjoint_and_cover_it(order in orders(), shape in shapes()) {
        let layout = Layout::new(order, shape).unwrap();
        let mut seen = BTreeSet::new();
        for layer in 0..shape.layers {
            for block in 0..shape.blocks {
                for head in 0..shape.heads {
                    for token in 0..shape.block_tokens {
                        let cell = layout.extents(layer, block, head..head + 1, token..token + 1).unwrap();
                        prop_assert_eq!(cell.bytes(), u64::from(shape.cell_bytes));
                        for byte in bytes_of(cell.extents()) {
                            prop_assert!(byte < layout.tensor_bytes());
                            prop_assert!(seen.insert((layout.tensor_of(layer).unwrap(), byte)), "twice: {}", byte);
                        }
                    }
                }
            }
        }
        prop_assert_eq!(seen.len() as u64, u64::from(layout.tensors()) * layout.tensor_bytes());
    }

    #[test]
    fn a_rectangle_is_its_cells_in_as_few_pieces_as_touch(
        order in orders(),
        shape in shapes(),
        at in any::<[prop::sample::Index; 6]>(),
    ) {
        let layout = Layout::new(order, shape).unwrap();
        let pick = |index: usize, len: u32| at[index].index(len as usize) as u32;
        let (layer, block) = (pick(0, shape.layers), pick(1, shape.blocks));
        let heads = pick(2, shape.heads);
        let heads = heads..heads + 1 + pick(3, shape.heads - heads);
        let tokens = pick(4, shape.block_tokens);
        let tokens = tokens..tokens + 1 + pick(5, shape.block_tokens - tokens);

        let mut cells = Vec::new();
        for head in heads.clone() {
            for token in tokens.clone() {
                let cell = layout.extents(layer, block, head..head + 1, token..token + 1).unwrap();
                cells.extend(bytes_of(cell.extents()));
            }
        }
        cells.sort_unstable();
        let rectangle = layout.extents(layer, block, heads, tokens).unwrap();
        let gaps = cells.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() as u64;
        prop_assert_eq!(rectangle.pieces, gaps + 1);
        prop_assert_eq!(bytes_of(rectangle.extents()), cells);
    }

    #[test]
    fn a_whole_block_is_the_pages_of_all_layers(order in orders(), shape in shapes(), at in any::<prop::sample::Index>()) {
        let layout = Layout::new(order, shape).unwrap();
        let block = at.index(shape.blocks as usize) as u32;
        let mut pages: Vec<_> = (0..shape.layers)
            .flat_map(|layer| {
                let tensor = layout.tensor_of(layer).unwrap();
                bytes_of(layout.page(layer, block).unwrap().extents()).into_iter().map(move |byte| (tensor, byte))
            })
            .collect();
        pages.sort_unstable();
        let contiguous = pages.windows(2).all(|pair| pair[1] == (pair[0].0, pair[0].1 + 1));
        let whole = layout.whole_block(block).unwrap();
        prop_assert_eq!(whole.is_some(), contiguous);
        if let Some(whole) = whole {
            prop_assert_eq!(bytes_of([whole]), pages.into_iter().map(|(_, byte)| byte).collect::<Vec<_>>());
        }
    }
}
