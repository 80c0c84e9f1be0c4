//! A transfer that is cut into commands: every byte once and in order, and no command over a limit.

use crate::lists::{Lists, merged, of_segments, total};
use forebay_ring::nvme::{Format, Limits, Piece, Segment, Split, SplitError};
use forebay_ring::nvme::{prp, sgl};
use proptest::prelude::*;

const PAGE: u64 = 4096;

fn limits(format: Format) -> Limits {
    Limits {
        format,
        page_bytes: PAGE,
        max_bytes: 128 << 10,
        max_descriptors: 64,
        block_bytes: 512,
        namespace_blocks: 1 << 30,
    }
}

fn pieces(
    segments: &[Segment],
    first_block: u64,
    limits: Limits,
) -> Result<Vec<(Piece, Vec<Segment>)>, SplitError> {
    let mut split = Split::new(segments, first_block, limits)?;
    let (mut memory, mut pieces) = (Vec::new(), Vec::new());
    while let Some(piece) = split.next_piece(&mut memory)? {
        pieces.push((piece, memory.clone()));
    }
    Ok(pieces)
}

/// Segments of whole blocks from multiples of 4, which need not meet pages.
fn segments() -> impl Strategy<Value = Vec<Segment>> {
    let segment = (0_u64..1 << 28, 0_u64..200, any::<bool>());
    let whole = |(place, blocks, is_page): (u64, u64, bool)| {
        let address = if is_page { place * PAGE } else { place * 4 };
        Segment { address, bytes: blocks * 512 }
    };
    prop::collection::vec(segment.prop_map(whole), 1..20)
        .prop_filter("a transfer has bytes", |segments| total(segments) > 0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn every_byte_is_in_one_command_that_keeps_all_limits(
        segments in segments(),
        first_block in 0_u64..1000,
        is_sgl in any::<bool>(),
        max_blocks in 1_u64..400,
        // A block may lie in two pages.
        max_descriptors in 2_u64..40,
    ) {
        let format = if is_sgl { Format::Sgl } else { Format::Prp };
        let limits = Limits { max_bytes: max_blocks * 512, max_descriptors, ..limits(format) };
        let pieces = pieces(&segments, first_block, limits).unwrap();
        let all = pieces.iter().flat_map(|(_, memory)| memory).map(|part| (part.address, part.bytes));
        prop_assert_eq!(merged(all), of_segments(&segments));
        let mut next_block = first_block;
        for (piece, memory) in &pieces {
            prop_assert_eq!(piece.first_block, next_block);
            next_block += u64::from(piece.blocks);
            prop_assert_eq!(total(memory), u64::from(piece.blocks) * 512);
            prop_assert!(u64::from(piece.blocks) <= max_blocks);
            // A list of the allowed length is enough.
            let mut lists = Lists::of_pages(PAGE, if is_sgl { 0 } else { PAGE - 8 * (max_descriptors - 1) }, 1);
            match format {
                Format::Prp => prop_assert!(prp::encode(memory, PAGE, &mut lists.pages()).is_ok()),
                Format::Sgl => {
                    prop_assert!(memory.len() as u64 <= max_descriptors);
                    prop_assert!(sgl::encode(memory, true, &mut lists.pages()).is_ok());
                }
            }
        }
    }
}

#[test]
fn commands_are_as_long_as_the_limits_allow() {
    let blocks = |bytes, limits| -> Vec<u32> {
        let segments = [Segment { address: 1 << 30, bytes }];
        pieces(&segments, 0, limits).unwrap().iter().map(|(piece, _)| piece.blocks).collect()
    };
    let sgl = limits(Format::Sgl);
    assert_eq!(blocks(300 << 10, sgl), [256, 256, 88], "MDTS of 128 KiB");
    // What is no multiple of a block is rounded down.
    assert_eq!(blocks(2048, Limits { max_bytes: 1535, ..sgl }), [2, 2]);
    let unlimited = Limits { max_bytes: u64::MAX, max_descriptors: u64::MAX, ..sgl };
    assert_eq!(blocks(65_537 * 512, unlimited), [65_536, 1], "the field has 16 bits");
    let large_blocks = Limits { block_bytes: 65_536, ..unlimited };
    assert_eq!(blocks(1 << 32, large_blocks), [65_535, 1], "a descriptor's length has 32 bits");
    let prp = Limits { max_descriptors: 3, ..limits(Format::Prp) };
    assert_eq!(blocks(5 * PAGE, prp), [24, 16], "three pages");
}

#[test]
fn a_block_that_no_command_can_have_is_an_error_and_not_a_loop() {
    let segments = [Segment { address: 4, bytes: 512 }, Segment { address: 1 << 20, bytes: 512 }];
    let halves = segments.map(|segment| Segment { bytes: 256, ..segment });
    assert_eq!(pieces(&segments, 0, limits(Format::Prp)).unwrap().len(), 2, "a gap between blocks");
    let refused = SplitError::NoWholeBlock { segment: 0, offset: 0 };
    assert_eq!(pieces(&halves, 0, limits(Format::Prp)), Err(refused), "a gap in a block");
    let one = Limits { max_descriptors: 1, ..limits(Format::Sgl) };
    assert_eq!(pieces(&halves, 0, one), Err(refused), "a block in two segments");
    assert_eq!(pieces(&halves, 0, limits(Format::Sgl)).unwrap().len(), 1);
}

#[test]
fn a_transfer_that_leaves_the_namespace_is_refused_before_a_byte_is_sent() {
    let segments = [Segment { address: 0, bytes: 1024 }];
    let small = Limits { namespace_blocks: 10, ..limits(Format::Prp) };
    assert!(pieces(&segments, 8, small).is_ok());
    let refused = SplitError::BeyondNamespace { first_block: 9, end: 11, namespace_blocks: 10 };
    assert_eq!(pieces(&segments, 9, small), Err(refused));
    assert!(matches!(pieces(&segments, u64::MAX, small), Err(SplitError::BeyondNamespace { .. })));
    let part = [Segment { address: 0, bytes: 1000 }];
    assert_eq!(pieces(&part, 0, small), Err(SplitError::Bytes { bytes: 1000, block_bytes: 512 }));
    let refused = SplitError::MaxBytes { max_bytes: 511, block_bytes: 512 };
    assert_eq!(pieces(&segments, 0, Limits { max_bytes: 511, ..small }), Err(refused));
}
