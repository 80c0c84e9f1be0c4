//! Slices of lists that were built once are what would have been built for the command alone.

use crate::lists::{LISTS, Lists, of_extents, of_segments};
use forebay_ring::controller::{SglSetting, from_prps, from_sgl};
use forebay_ring::nvme::{ListPage, PrpError, PrpRegion, Segment, SglError, SglRegion};
use proptest::prelude::*;

const PAGE: u64 = 4096;
const SEGMENT: u64 = 64 << 10;
const DATA: u64 = 0x4000_0000;
/// Pages of the list: each describes 2 MiB.
const LIST_PAGES: usize = 3;
const REGION: u64 = LIST_PAGES as u64 * 512 * PAGE;
const SEGMENTS: u64 = REGION / SEGMENT;

/// Segments of 64 KiB, of which no two follow each other.
fn segments() -> Vec<Segment> {
    let segment = |at: u64| Segment { address: DATA + (at ^ 1) * SEGMENT, bytes: SEGMENT };
    (0..SEGMENTS).map(segment).collect()
}

/// What of the segments lies between two offsets.
fn part(offset: u64, bytes: u64) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    for (at, segment) in segments().iter().enumerate() {
        let start = at as u64 * SEGMENT;
        let (from, to) = (offset.max(start), (offset + bytes).min(start + SEGMENT));
        if from < to {
            parts.push(Segment { address: segment.address + from - start, bytes: to - from });
        }
    }
    of_segments(&parts)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn a_slice_of_prps_is_its_part_of_the_region(dword in 0..REGION / 4, length in 1..REGION / 4) {
        let mut lists = Lists::of_pages(PAGE, 0, LIST_PAGES);
        let region = PrpRegion::build(&segments(), PAGE, lists.pages()).unwrap();
        let offset = dword * 4;
        let bytes = length.min(region.longest(offset));
        let prp = region.slice(offset, bytes).unwrap();
        drop(region);
        let decoded = from_prps(&lists, PAGE, (prp.prp1, prp.prp2), bytes).unwrap();
        prop_assert_eq!(of_extents(&decoded), part(offset, bytes));
    }

    #[test]
    fn a_slice_of_a_scatter_gather_list_is_its_part_of_the_region(
        first in 0..SEGMENTS, count in 1_u64..40, from in 0..SEGMENT, to in 0..SEGMENT,
    ) {
        let mut lists = Lists::new(0, &[SEGMENTS as usize * 16]);
        let region = SglRegion::build(&segments(), lists.pages()).unwrap();
        let inside = (first * SEGMENT + from.min(to), from.abs_diff(to) + 1);
        let whole = (first * SEGMENT, count.min(SEGMENTS - first) * SEGMENT);
        let slices = [inside, whole].map(|(offset, bytes)| (offset, bytes, region.slice(offset, bytes).unwrap()));
        drop(region);
        for (offset, bytes, first) in slices {
            let decoded = from_sgl(&lists, SglSetting::MultiplesOf4, first.halves(), bytes);
            let is_aligned = offset % 4 == 0 && bytes % 4 == 0;
            prop_assert_eq!(decoded.is_ok(), is_aligned);
            decoded.into_iter().for_each(|decoded| assert_eq!(of_extents(&decoded), part(offset, bytes)));
        }
    }
}

#[test]
fn a_slice_that_needs_two_pages_of_the_list_is_refused_with_what_fits() {
    let mut lists = Lists::of_pages(PAGE, 0, LIST_PAGES);
    let region = PrpRegion::build(&segments(), PAGE, lists.pages()).unwrap();
    // The command has the first page itself, the list's first page the 511 behind it.
    assert_eq!(region.longest(0), 512 * PAGE);
    assert_eq!(region.longest(PAGE - 4), 511 * PAGE + 4);
    assert_eq!(region.longest(511 * PAGE), 513 * PAGE);
    let refused = PrpError::SliceInTwoLists { offset: 0, bytes: 513 * PAGE, longest: 512 * PAGE };
    assert_eq!(region.slice(0, 513 * PAGE), Err(refused));
    for (offset, bytes) in [(0, 0), (2, 4), (REGION, 4), (4, REGION), (u64::MAX - 3, 8)] {
        assert_eq!(region.slice(offset, bytes), Err(PrpError::Slice { offset, bytes, region: REGION }));
    }
}

#[test]
fn a_slice_that_a_descriptor_cannot_end_is_refused() {
    let mut lists = Lists::new(0, &[256, 256, 4096]);
    assert!(matches!(SglRegion::build(&segments(), lists.pages()), Err(SglError::ListPage { page: 2, .. })));
    let mut lists = Lists::new(0, &[512; 3]);
    let region = SglRegion::build(&segments(), lists.pages()).unwrap();
    let refused = |offset, bytes| region.slice(offset, bytes).unwrap_err();
    for (offset, bytes) in [(4, SEGMENT), (0, SEGMENT + 4)] {
        assert_eq!(refused(offset, bytes), SglError::SliceInSegment { offset, bytes, segment: SEGMENT });
    }
    let (offset, bytes) = (31 * SEGMENT, 2 * SEGMENT);
    assert_eq!(refused(offset, bytes), SglError::SliceInTwoLists { offset, bytes });
    assert_eq!(refused(0, 0), SglError::Slice { offset: 0, bytes: 0, region: REGION });
    assert_eq!(refused(4, REGION), SglError::Slice { offset: 4, bytes: REGION, region: REGION });
}

/// Pages of a list in one piece of memory.
fn pages(lists: &mut [u8]) -> Vec<ListPage<'_>> {
    let page = |(at, bytes)| ListPage { address: LISTS + at * PAGE, bytes };
    (0..).zip(lists.chunks_mut(PAGE as usize)).map(page).collect()
}

#[test]
fn lists_of_60_gib_in_segments_of_64_kib_are_120_mib_of_prps_and_15_mib_of_descriptors() {
    const MEMORY: u64 = 60 << 30;
    // As many pages as are needed, and not one less.
    let prp_bytes = MEMORY / PAGE * forebay_ring::nvme::prp::ENTRY_BYTES;
    let sgl_bytes = MEMORY / SEGMENT * forebay_ring::nvme::sgl::DESCRIPTOR_BYTES as u64;
    assert_eq!((prp_bytes, sgl_bytes), (120 << 20, 15 << 20));
    let segment = |at: u64| Segment { address: DATA + at * 2 * SEGMENT, bytes: SEGMENT };
    let segments: Vec<Segment> = (0..MEMORY / SEGMENT).map(segment).collect();
    let mut lists = vec![0; prp_bytes as usize];
    let mut short = pages(&mut lists);
    short.pop();
    let given = short.len();
    assert_eq!(PrpRegion::build(&segments, PAGE, short).unwrap_err(), PrpError::ListPages(given));
    PrpRegion::build(&segments, PAGE, pages(&mut lists)).unwrap();
    let mut short = pages(&mut lists[..sgl_bytes as usize]);
    short.pop();
    let given = short.len();
    assert_eq!(SglRegion::build(&segments, short).unwrap_err(), SglError::ListPages(given));
    SglRegion::build(&segments, pages(&mut lists[..sgl_bytes as usize])).unwrap();
}
