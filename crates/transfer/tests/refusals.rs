//! Bad input to the mover is refused with the field, the value and what is allowed, and changes
//! nothing.

#![allow(clippy::unwrap_used)]

use forebay_transfer::{
    Class, Limits, LinkSpec, Mover, PathError, PathSpec, Place, Refused, RegionId, Span, SpanPair, Staging,
    Transfer,
};
use std::time::{Duration, Instant};

const HOST: Place = Place::Host(0);
const DEVICE: Place = Place::Device(0);

fn mover(limits: Limits) -> (Mover, RegionId, RegionId) {
    let mut mover = Mover::new(limits);
    let (host, device) = (mover.add_region(HOST, 1000), mover.add_region(DEVICE, 1000));
    let link = mover.add_link(LinkSpec::new("link", 1, 1 << 20));
    mover.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap();
    (mover, host, device)
}

fn one(from: Span, to: Span) -> Transfer {
    Transfer::new(vec![SpanPair::new(from, to)], Class::Demand)
}

#[test]
fn spans_outside_their_region_are_refused_also_when_they_overflow() {
    let (mut mover, host, device) = mover(Limits::default());
    for offset in [1, 1000, u64::MAX] {
        let refused = mover.submit(0, one(Span::new(host, offset, 1000), Span::new(device, 0, 1000)));
        assert!(matches!(refused, Err(Refused::OutOfBounds { region_bytes: 1000, .. })), "{refused:?}");
    }
    assert_eq!(mover.telemetry().transfers_active, 0);
}

#[test]
fn unequal_and_empty_pairs_are_refused() {
    let (mut mover, host, device) = mover(Limits::default());
    let refused = mover.submit(0, one(Span::new(host, 0, 5), Span::new(device, 0, 6)));
    assert_eq!(refused, Err(Refused::Length { from_bytes: 5, to_bytes: 6 }));
    let refused = mover.submit(0, one(Span::new(host, 0, 0), Span::new(device, 0, 0)));
    assert_eq!(refused, Err(Refused::Length { from_bytes: 0, to_bytes: 0 }));
}

#[test]
fn places_that_no_path_joins_are_refused() {
    let (mut mover, host, device) = mover(Limits::default());
    let refused = mover.submit(0, one(Span::new(device, 0, 5), Span::new(host, 0, 5)));
    assert_eq!(refused, Err(Refused::NoPath { from: DEVICE, to: HOST }));
}

#[test]
fn full_queues_refuse_and_say_the_limit() {
    let (mut mover, host, device) = mover(Limits { transfers: 1, pairs_per_transfer: 2, attempts: 1 });
    let pair = SpanPair::new(Span::new(host, 0, 1), Span::new(device, 0, 1));
    let refused = mover.submit(0, Transfer::new(vec![pair; 3], Class::Demand));
    assert_eq!(refused, Err(Refused::TooManyPairs { pairs: 3, limit: 2 }));
    mover.submit(0, Transfer::new(vec![pair], Class::Demand)).unwrap();
    let refused = mover.submit(0, Transfer::new(vec![pair], Class::Demand));
    assert_eq!(refused, Err(Refused::TooManyTransfers { queued: 1, limit: 1 }));
}

#[test]
fn a_region_in_use_is_not_forgotten_and_a_forgotten_one_is_not_used() {
    let (mut mover, host, device) = mover(Limits::default());
    let transfer = one(Span::new(host, 0, 10), Span::new(device, 0, 10));
    mover.submit(0, transfer.clone()).unwrap();
    assert_eq!(mover.remove_region(host), Err(Refused::RegionInUse { region: host, users: 1 }));
    let start = mover.poll(0).unwrap();
    mover.complete(1, start.op, forebay_transfer::Outcome::Moved { bytes: 10 });
    mover.remove_region(host).unwrap();
    assert_eq!(mover.submit(2, transfer), Err(Refused::UnknownRegion { region: host }));
}

#[test]
fn impossible_paths_are_refused() {
    let (mut mover, host, _) = mover(Limits::default());
    let link = mover.add_link(LinkSpec::new("other", 1, 1));
    let staging = |slots, slot_bytes| Staging { region: host, slots, slot_bytes };
    let mut path = PathSpec::relayed(HOST, DEVICE, [link, link], staging(0, 10), false);
    assert_eq!(mover.add_path(path.clone()), Err(PathError::EmptyStaging { slots: 0, slot_bytes: 10 }));
    path.staging = vec![staging(101, 10)];
    assert!(matches!(mover.add_path(path.clone()), Err(PathError::Staging(Refused::OutOfBounds { .. }))));
    path.staging = vec![staging(10, 10)];
    mover.add_path(path.clone()).unwrap();
    path.staging = vec![staging(5, 20)];
    assert!(matches!(mover.add_path(path.clone()), Err(PathError::CutOtherwise { known: 10, slots: 5, .. })));
    path.staging.clear();
    assert_eq!(mover.add_path(path), Err(PathError::Shape { hops: 2, staging: 0 }));
}

#[test]
fn a_transfer_between_many_regions_is_taken_in_in_a_moment() {
    const REGIONS: usize = 16_384;
    const PAIRS: usize = 500_000;
    let mut mover = Mover::new(Limits::default());
    let link = mover.add_link(LinkSpec::new("link", 1, 1 << 20));
    mover.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap();
    let [hosts, devices] = [HOST, DEVICE].map(|place| {
        let regions = (0..REGIONS).map(|_| mover.add_region(place, 100));
        regions.collect::<Vec<_>>()
    });
    // One block of each layer's region, then the next block of each.
    let span = |regions: &[RegionId], at: usize| Span::new(regions[at % REGIONS], (at / REGIONS) as u64, 1);
    let pairs = (0..PAIRS).map(|at| SpanPair::new(span(&hosts, at), span(&devices, at))).collect();
    let began = Instant::now();
    mover.submit(0, Transfer::new(pairs, Class::Demand)).unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}
