//! How transfers and links share: whose lot is next, and which link takes it. In virtual time, with
//! no faults.

#![allow(clippy::unwrap_used)]

mod sim;

use forebay_transfer::{
    Class, Hop, LinkSpec, MAX_LOT_BYTES, PathSpec, Place, STARVE_LOTS, Span, SpanPair, Staging, Transfer,
};
use sim::{Sim, SimLink};

const HOST: Place = Place::Host(0);
const DEVICE: Place = Place::Device(0);
const MIB: u64 = 1 << 20;

/// Moves `bytes` over direct links of the given rates (bytes per microsecond) and returns the rate
/// reached.
fn rate_over(rates: &[u64], bytes: u64) -> f64 {
    let mut sim = Sim::new(3);
    let (source, target) = (sim.add_region(HOST, bytes as usize), sim.add_region(DEVICE, bytes as usize));
    for (index, rate) in rates.iter().enumerate() {
        let model = SimLink { latency_us: 20, jitter_us: 5, ..SimLink::of_rate(rate * 1_000_000) };
        let id = sim.add_link(LinkSpec::new(format!("link{index}"), 3, 64 * MIB), model);
        sim.mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap();
    }
    let pair = SpanPair::new(Span::new(source, 0, bytes), Span::new(target, 0, bytes));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    sim.run();
    assert_eq!(sim.bytes(source), sim.bytes(target));
    bytes as f64 / sim.ended[0].at_us as f64
}

#[test]
fn a_link_moves_bytes_at_its_rate() {
    let mut sim = Sim::new(7);
    let (source, target) = (sim.add_region(HOST, 8 << 20), sim.add_region(DEVICE, 8 << 20));
    let link = sim.add_link(LinkSpec::new("pcie0", 2, 32 * MIB), SimLink::of_rate(1_000_000_000));
    sim.mover.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap();
    let whole = SpanPair::new(Span::new(source, 0, 8 * MIB), Span::new(target, 0, 8 * MIB));
    sim.submit_at(0, Transfer::new(vec![whole], Class::Demand));
    sim.run();
    assert_eq!(sim.bytes(source), sim.bytes(target));
    // 8 MiB at 1 GB/s, each lot rounded up to a microsecond.
    assert!((8_389..8_400).contains(&sim.ended[0].at_us));
}

#[test]
fn k_equal_links_carry_k_times_one() {
    let bytes = 128 * MIB;
    let one = rate_over(&[2_000], bytes);
    for k in [2, 3, 4, 8] {
        let all = rate_over(&vec![2_000; k], bytes);
        assert!(all >= 0.97 * k as f64 * one, "{k} links carry {:.3} times one", all / one);
    }
}

#[test]
fn a_link_slowed_tenfold_pulls_less_and_holds_nobody_up() {
    for k in 2..=4 {
        let mut rates = vec![2_000; k];
        rates[0] = 200;
        let sum: u64 = rates.iter().sum();
        let reached = rate_over(&rates, 128 * MIB);
        assert!(reached >= 0.95 * sum as f64, "{k} links: {:.3} of the sum", reached / sum as f64);
    }
}

#[test]
fn the_last_lot_is_left_to_a_faster_link() {
    // 4 MiB over 2000 and 20 bytes/us: one minimal lot alone would keep the slow link busy for 26
    // ms.
    let mut sim = Sim::new(3);
    let (source, target) = (sim.add_region(HOST, 4 << 20), sim.add_region(DEVICE, 4 << 20));
    for (name, rate) in [("fast", 2_000_000_000), ("slow", 20_000_000)] {
        let spec = LinkSpec { rate_hint_bytes_per_s: rate, ..LinkSpec::new(name, 2, 64 * MIB) };
        let id = sim.add_link(spec, SimLink::of_rate(rate));
        sim.mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap();
    }
    let pair = SpanPair::new(Span::new(source, 0, 4 * MIB), Span::new(target, 0, 4 * MIB));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    sim.run();
    assert!(sim.ended[0].at_us < 3_000, "took {} us", sim.ended[0].at_us);
}

#[test]
fn no_class_starves_beyond_the_bound() {
    let mut sim = Sim::new(5);
    let model = SimLink::of_rate(1_000_000_000);
    let id = sim.add_link(LinkSpec::new("link", 1, 64 * MIB), model);
    sim.mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap();
    let bytes = 40 * MIB;
    let mut sources = Vec::new();
    for class in Class::ALL {
        let (source, target) = (sim.add_region(HOST, bytes as usize), sim.add_region(DEVICE, bytes as usize));
        sources.push(source);
        let pair = SpanPair::new(Span::new(source, 0, bytes), Span::new(target, 0, bytes));
        sim.submit_at(0, Transfer::new(vec![pair], class));
    }
    sim.run();
    for (class, source) in Class::ALL.iter().zip(&sources).skip(1) {
        let mut passed_over = 0;
        let last = sim.ran.iter().rposition(|ran| ran.pairs[0].from.region == *source).unwrap();
        for ran in &sim.ran[..last] {
            passed_over = if ran.pairs[0].from.region == *source { 0 } else { passed_over + 1 };
            assert!(passed_over <= STARVE_LOTS + 2, "{class:?} was passed over {passed_over} times");
        }
    }
    let position =
        |nth: usize| sim.ran.iter().position(|ran| ran.pairs[0].from.region == sources[nth]).unwrap();
    assert!(position(0) < position(1) && position(1) < position(2) && position(2) < position(3));
}

#[test]
fn within_a_class_the_earliest_deadline_goes_first() {
    let mut sim = Sim::new(5);
    let id = sim.add_link(LinkSpec::new("link", 1, 64 * MIB), SimLink::of_rate(1_000_000_000));
    sim.mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap();
    let (source, target) = (sim.add_region(HOST, 4096), sim.add_region(DEVICE, 4096));
    let deadlines = [None, Some(900), Some(300), Some(600)];
    for (nth, deadline_us) in deadlines.iter().enumerate() {
        let (from, to) =
            (Span::new(source, nth as u64 * 1024, 1024), Span::new(target, nth as u64 * 1024, 1024));
        sim.submit_at(
            0,
            Transfer {
                pairs: vec![SpanPair::new(from, to)],
                class: Class::Demand,
                deadline_us: *deadline_us,
            },
        );
    }
    // The first is taken as it arrives: nothing else is known by then.
    sim.run();
    let order: Vec<u64> = sim.ran.iter().map(|ran| ran.pairs[0].from.offset / 1024).collect();
    assert_eq!(order, [0, 2, 3, 1]);
}

/// GPU 1's own traffic and a relay for GPU 0 share GPU 1's PCIe link. Returns, for each of GPU 1's
/// lots, how long it took.
fn own_traffic_us(with_relay: bool) -> Vec<u64> {
    let mut sim = Sim::new(11);
    let peer = Place::Device(1);
    let bytes = 512 * MIB;
    let rate = SimLink::of_rate(10_000_000_000);
    let pcie0 = sim.add_link(LinkSpec::new("pcie0", 2, 64 * MIB), rate.clone());
    let pcie1 = sim.add_link(LinkSpec::new("pcie1", 2, 64 * MIB), rate.clone());
    let nvlink = sim.add_link(LinkSpec::new("nvlink10", 2, 64 * MIB), SimLink::of_rate(100_000_000_000));
    let slots = sim.add_region(peer, 64 << 20);
    sim.mover.add_path(PathSpec::direct(HOST, DEVICE, pcie0)).unwrap();
    sim.mover.add_path(PathSpec::direct(HOST, peer, pcie1)).unwrap();
    if with_relay {
        let staging = Staging { region: slots, slots: 4, slot_bytes: 16 * MIB };
        let hops = vec![Hop { link: pcie1, guest: true }, Hop { link: nvlink, guest: false }];
        sim.mover.add_path(PathSpec { from: HOST, to: DEVICE, hops, staging: vec![staging] }).unwrap();
    }
    let (big, big_target) = (sim.add_region(HOST, bytes as usize), sim.add_region(DEVICE, bytes as usize));
    let (own, own_target) = (sim.add_region(HOST, 64 << 20), sim.add_region(peer, 64 << 20));
    let whole = SpanPair::new(Span::new(big, 0, bytes), Span::new(big_target, 0, bytes));
    sim.submit_at(0, Transfer::new(vec![whole], Class::Demand));
    for nth in 0..20 {
        let (from, to) =
            (Span::new(own, nth * 100_000, 100_000), Span::new(own_target, nth * 100_000, 100_000));
        // Even the least urgent class of an owner goes before a guest.
        sim.submit_at(1_000 + nth * 1_111, Transfer::new(vec![SpanPair::new(from, to)], Class::Scrub));
    }
    sim.run();
    assert_eq!(sim.violations, Vec::<String>::new());
    sim.ran
        .iter()
        .filter(|ran| ran.pairs[0].from.region == own)
        .map(|ran| ran.completed_us - ran.started_us)
        .collect()
}

#[test]
fn a_relay_delays_a_peers_own_traffic_by_at_most_one_lot() {
    let (alone, beside) = (own_traffic_us(false), own_traffic_us(true));
    assert_eq!(alone.len(), beside.len());
    let one_lot_us = MAX_LOT_BYTES / 10_000;
    for (alone_us, beside_us) in alone.iter().zip(&beside) {
        assert!(*beside_us <= alone_us + one_lot_us, "{beside_us} us beside a relay, {alone_us} us alone");
    }
    assert!(
        beside.iter().sum::<u64>() > alone.iter().sum::<u64>(),
        "the relay never ran, so the test shows nothing"
    );
}

#[test]
fn a_relay_adds_its_rate() {
    let mut sim = Sim::new(11);
    let bytes = 512 * MIB;
    let pcie0 = sim.add_link(LinkSpec::new("pcie0", 2, 64 * MIB), SimLink::of_rate(10_000_000_000));
    sim.mover.add_path(PathSpec::direct(HOST, DEVICE, pcie0)).unwrap();
    for peer in 1..4u16 {
        let pcie =
            sim.add_link(LinkSpec::new(format!("pcie{peer}"), 2, 64 * MIB), SimLink::of_rate(10_000_000_000));
        let nvlink = sim
            .add_link(LinkSpec::new(format!("nvlink{peer}"), 2, 64 * MIB), SimLink::of_rate(100_000_000_000));
        let region = sim.add_region(Place::Device(peer), 16 << 20);
        let staging = Staging { region, slots: 4, slot_bytes: 4 * MIB };
        sim.mover.add_path(PathSpec::relayed(HOST, DEVICE, [pcie, nvlink], staging, true)).unwrap();
    }
    let (source, target) = (sim.add_region(HOST, bytes as usize), sim.add_region(DEVICE, bytes as usize));
    let pair = SpanPair::new(Span::new(source, 0, bytes), Span::new(target, 0, bytes));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    sim.run();
    assert_eq!(sim.bytes(source), sim.bytes(target));
    let gain = bytes as f64 / sim.ended[0].at_us as f64 / 10_000.0;
    assert!(gain >= 3.85, "four links carry {gain:.2} times one");
}

#[test]
fn a_transfer_that_is_raised_goes_before_those_that_it_would_have_waited_for() {
    const EACH: u64 = 8 * MIB;
    let ended = |raised: Option<Class>| {
        let mut sim = Sim::new(7);
        let (source, target) =
            (sim.add_region(HOST, 3 * EACH as usize), sim.add_region(DEVICE, 3 * EACH as usize));
        let link = sim.add_link(LinkSpec::new("pcie0", 1, MIB), SimLink::of_rate(1_000_000_000));
        sim.mover.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap();
        for (nth, class) in [Class::Prefetch, Class::Demand, Class::Demand].into_iter().enumerate() {
            let at = nth as u64 * EACH;
            let pair = SpanPair::new(Span::new(source, at, EACH), Span::new(target, at, EACH));
            sim.submit_at(0, Transfer::new(vec![pair], class));
        }
        // Parts of all of them have been cut by then.
        raised.into_iter().for_each(|class| sim.raise_at(100, 0, class));
        sim.run();
        assert_eq!(sim.bytes(source), sim.bytes(target));
        let first = sim.ended.iter().min_by_key(|ended| ended.id).unwrap();
        first.at_us
    };
    let (alone_us, all_us) = (EACH / 1000, 3 * EACH / 1000);
    assert!(ended(None) > all_us - 2_000, "it waits for both");
    assert!(ended(Some(Class::Demand)) < alone_us + 2_000, "it is the first of its new class");
    assert_eq!(ended(Some(Class::WriteBack)), ended(None), "nothing is made less urgent");
}
