//! What the encoders write, the controller's decoders read as the same memory in the same order.

use crate::lists::{LISTS, Lists, of_extents, of_segments, total};
use forebay_ring::controller::{SglSetting, from_prps, from_sgl};
use forebay_ring::nvme::sgl::Kind;
use forebay_ring::nvme::{Descriptor, Format, ListPage, Prp, PrpError, Segment, SglError, SglSupport};
use forebay_ring::nvme::{prp, sgl};
use proptest::prelude::*;

const PAGE: u64 = 4096;
const DATA: u64 = 0x4000_0000;

fn contiguous(address: u64, bytes: u64) -> Vec<Segment> {
    vec![Segment { address, bytes }]
}

/// Segments that PRPs can describe: only the first begins, and only the last ends, inside a page.
fn prp_segments(page: u64) -> impl Strategy<Value = Vec<Segment>> {
    let places = prop::collection::vec((0_u64..1 << 20, 1_u64..4), 1..6);
    (places, 0..page / 4, 0..page).prop_map(move |(places, dwords, cut)| {
        let whole = |(place, pages): (u64, u64)| Segment { address: place * page, bytes: pages * page };
        let mut segments: Vec<Segment> = places.into_iter().map(whole).collect();
        segments[0].address += dwords * 4;
        segments[0].bytes -= dwords * 4;
        let last = segments.len() - 1;
        segments[last].bytes -= cut.min(segments[last].bytes - 1);
        segments
    })
}

fn sgl_segments() -> impl Strategy<Value = Vec<Segment>> {
    let segment = (0_u64..1 << 40, 1_u64..1 << 17);
    prop::collection::vec(segment.prop_map(|(address, bytes)| Segment { address, bytes }), 1..40)
}

/// Decodes what was encoded, as the controller does.
fn decode_prp(lists: &Lists, page: u64, encoded: Prp, bytes: u64) -> Vec<(u64, u64)> {
    of_extents(&from_prps(lists, page, (encoded.prp1, encoded.prp2), bytes).unwrap())
}

fn decode_sgl(lists: &Lists, first: Descriptor, bytes: u64) -> Vec<(u64, u64)> {
    of_extents(&from_sgl(lists, SglSetting::AnyAlignment, first.halves(), bytes).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30_000))]

    #[test]
    fn prps_are_the_same_memory_in_the_same_order(
        (page, segments) in (12_u32..17).prop_flat_map(|log2| (Just(1 << log2), prp_segments(1 << log2))),
        list_qword in 0_u64..512,
    ) {
        let mut lists = Lists::of_pages(page, list_qword * 8, 2);
        let (encoded, _) = prp::encode(&segments, page, &mut lists.pages()).unwrap();
        prop_assert_eq!(decode_prp(&lists, page, encoded, total(&segments)), of_segments(&segments));
    }

    #[test]
    fn scatter_gather_lists_are_the_same_memory_in_the_same_order(
        segments in sgl_segments(),
        sizes in prop::collection::vec(2_usize..20, 1..40),
    ) {
        let sizes: Vec<usize> = sizes.into_iter().map(|descriptors| descriptors * 16).collect();
        let mut lists = Lists::new(0, &sizes);
        match sgl::encode(&segments, false, &mut lists.pages()) {
            Ok((first, _)) => {
                prop_assert_eq!(decode_sgl(&lists, first, total(&segments)), of_segments(&segments));
            }
            Err(error) => {
                // Each page that leads on has one descriptor less for data.
                let room: usize = sizes.iter().map(|bytes| bytes / 16 - 1).sum::<usize>() + 1;
                prop_assert_eq!(error, SglError::ListPages(sizes.len()));
                prop_assert!(room < segments.len());
            }
        }
    }
}

#[test]
fn the_second_prp_is_unused_then_a_page_and_then_a_list() {
    let mut lists = Lists::of_pages(PAGE, 0, 1);
    let mut encode = |bytes| prp::encode(&contiguous(DATA + 512, bytes), PAGE, &mut lists.pages()).unwrap();
    let prp1 = DATA + 512;
    assert_eq!(encode(PAGE - 512), (Prp { prp1, prp2: 0 }, 0));
    assert_eq!(encode(PAGE - 511), (Prp { prp1, prp2: DATA + PAGE }, 0));
    assert_eq!(encode(2 * PAGE - 512), (Prp { prp1, prp2: DATA + PAGE }, 0));
    assert_eq!(encode(2 * PAGE - 511), (Prp { prp1, prp2: LISTS }, 1));
}

#[test]
fn a_list_of_prps_goes_on_when_its_entries_do_not_fit_and_not_before() {
    for (entries, first_qword, pages) in [
        (511, 0, 1),
        (512, 0, 1),
        (513, 0, 2),
        (1023, 0, 2),
        (1024, 0, 3),
        (2, 511, 2),
        (2, 510, 1),
        (3, 510, 2),
    ] {
        let segments = contiguous(DATA, (entries + 1) * PAGE);
        let mut lists = Lists::of_pages(PAGE, first_qword * 8, 3);
        let (encoded, used) = prp::encode(&segments, PAGE, &mut lists.pages()).unwrap();
        assert_eq!(used, pages, "{entries} entries from qword {first_qword}");
        assert_eq!(encoded.prp2, LISTS + first_qword * 8);
        assert_eq!(decode_prp(&lists, PAGE, encoded, total(&segments)), of_segments(&segments));
    }
}

#[test]
fn scatter_gather_lists_have_one_block_in_the_command_or_chained_segments() {
    let cases = [
        (1, 0, Kind::DataBlock, 4096),
        (2, 1, Kind::LastSegment, 32),
        (255, 1, Kind::LastSegment, 255 * 16),
        (256, 1, Kind::LastSegment, 4096),
        (257, 2, Kind::Segment, 4096),
        (511, 2, Kind::Segment, 4096),
        (512, 3, Kind::Segment, 4096),
    ];
    for (count, pages, kind, bytes) in cases {
        let segment = |at: u64| Segment { address: DATA + at * 8192, bytes: PAGE };
        let segments: Vec<Segment> = (0..count).map(segment).collect();
        let mut lists = Lists::of_pages(PAGE, 0, 3);
        let (first, used) = sgl::encode(&segments, true, &mut lists.pages()).unwrap();
        assert_eq!((used, first.kind, first.bytes), (pages, kind, bytes), "{count} segments");
        assert_eq!(decode_sgl(&lists, first, total(&segments)), of_segments(&segments));
    }
}

#[test]
fn what_prps_cannot_describe_is_refused_with_the_place() {
    let encode = |segments: &[Segment], page| prp::encode(segments, page, &mut []).unwrap_err();
    let two =
        |first, second| [Segment { address: DATA, bytes: first }, Segment { address: second, bytes: PAGE }];
    assert_eq!(encode(&[], PAGE), PrpError::Nothing);
    assert_eq!(encode(&contiguous(DATA, 1), 2048), PrpError::PageBytes(2048));
    assert_eq!(encode(&contiguous(DATA + 2, 512), PAGE), PrpError::Start(DATA + 2));
    assert_eq!(encode(&two(512, 2 * DATA), PAGE), PrpError::Gap { segment: 0, address: DATA + 512 });
    assert_eq!(encode(&two(PAGE, 2 * DATA + 4), PAGE), PrpError::Gap { segment: 1, address: 2 * DATA + 4 });
    assert_eq!(
        encode(&contiguous(u64::MAX - 3, 8), PAGE),
        PrpError::Range { segment: 0, address: u64::MAX - 3, bytes: 8 }
    );
    assert_eq!(encode(&contiguous(DATA, 3 * PAGE), PAGE), PrpError::ListPages(0));
}

#[test]
fn a_page_for_prps_that_the_drive_could_not_follow_is_refused() {
    let long = contiguous(DATA, 600 * PAGE);
    let encode = |first: (u64, usize), second: (u64, usize)| {
        let (mut one, mut other) = (vec![0; first.1], vec![0; second.1]);
        let pages = &mut [
            ListPage { address: first.0, bytes: &mut one },
            ListPage { address: second.0, bytes: &mut other },
        ];
        prp::encode(&long, PAGE, pages).map(|_| ()).unwrap_err()
    };
    // Only the last eight bytes of a page can lead to another one.
    assert_eq!(encode((LISTS, 2048), (LISTS + PAGE, 4096)), PrpError::ListPages(2));
    assert_eq!(
        encode((LISTS + 4, 4092), (LISTS + PAGE, 4096)),
        PrpError::ListPage { page: 0, address: LISTS + 4, bytes: 4092 }
    );
    assert_eq!(
        encode((LISTS, 4096), (LISTS + PAGE + 8, 4088)),
        PrpError::ListPage { page: 1, address: LISTS + PAGE + 8, bytes: 4088 }
    );
}

#[test]
fn what_a_scatter_gather_list_cannot_describe_is_refused_with_the_place() {
    let mut lists = Lists::of_pages(PAGE, 0, 1);
    let mut encode = |segments: &[Segment]| sgl::encode(segments, true, &mut lists.pages()).unwrap_err();
    let good = Segment { address: DATA, bytes: 4 };
    assert_eq!(encode(&[]), SglError::Nothing);
    for (address, bytes) in [(DATA, 0), (DATA, 1 << 32), (u64::MAX - 3, 8)] {
        let refused = SglError::Range { segment: 1, address, bytes };
        assert_eq!(encode(&[good, Segment { address, bytes }]), refused);
    }
    for (address, bytes) in [(DATA + 2, 4), (DATA, 6)] {
        let refused = SglError::Alignment { segment: 1, address, bytes };
        assert_eq!(encode(&[good, Segment { address, bytes }]), refused);
    }
    assert_eq!(sgl::encode(&[good, good], true, &mut []).unwrap_err(), SglError::ListPages(0));
    let page = &mut [ListPage { address: LISTS + 4, bytes: &mut [0; 64] }];
    let refused = SglError::ListPage { page: 0, address: LISTS + 4, bytes: 64 };
    assert_eq!(sgl::encode(&[good, good], true, page).unwrap_err(), refused);
}

#[test]
fn lists_are_chosen_for_long_segments_or_where_pages_leave_gaps() {
    let segments = |bytes| [Segment { address: DATA, bytes }, Segment { address: 2 * DATA, bytes }];
    let choose = |support, segments: &[Segment]| Format::choose(support, segments, PAGE);
    assert_eq!(choose(SglSupport::Bytes, &segments(32 << 10)), Format::Sgl);
    assert_eq!(choose(SglSupport::Bytes, &segments(28 << 10)), Format::Prp);
    assert_eq!(choose(SglSupport::None, &segments(32 << 10)), Format::Prp);
    assert_eq!(choose(SglSupport::Bytes, &segments(512)), Format::Sgl, "the first ends inside a page");
    assert_eq!(choose(SglSupport::Bytes, &contiguous(DATA + 2, 512)), Format::Sgl);
    assert_eq!(choose(SglSupport::Dwords, &contiguous(DATA + 2, 64 << 10)), Format::Prp);
}
