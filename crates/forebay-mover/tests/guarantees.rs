//! What the mover promises, as properties over random link sets, loads and faults in virtual time.

#![allow(clippy::unwrap_used)]

use forebay_mover::sim::{Sim, SimLink};
use forebay_mover::{
    Class, End, Event, Hop, Limits, LinkSpec, MAX_LOT_BYTES, Mover, Outcome, PAGE_BYTES, Place, RegionId,
    RouteSpec, STARVE_LOTS, Span, SpanPair, Staging, Transfer,
};
use proptest::prelude::*;
use std::collections::VecDeque;

const HOST: Place = Place::Host(0);
const DEVICE: Place = Place::Device(0);
const MIB: u64 = 1 << 20;

#[derive(Debug, Clone)]
struct AnyLink {
    window_lots: u32,
    window_bytes: u64,
    model: SimLink,
    timeout_us: u64,
}

#[derive(Debug, Clone)]
struct AnyTransfer {
    at_us: u64,
    class: Class,
    deadline_us: Option<u64>,
    /// Lengths of scattered blocks.
    blocks: Vec<u64>,
    cancel_after_us: Option<u64>,
}

#[derive(Debug, Clone)]
struct World {
    direct: Vec<AnyLink>,
    relayed: Vec<(AnyLink, AnyLink, u32, u64)>,
    transfers: Vec<AnyTransfer>,
    seed: u64,
}

fn any_link(faulty: bool) -> impl Strategy<Value = AnyLink> {
    let fault = move |p: f64| {
        if faulty { prop_oneof![3 => Just(0.0), 1 => 0.0..p].boxed() } else { Just(0.0).boxed() }
    };
    let shape = (1..5u32, (64 << 10)..(8 * MIB), (50..5_000u64), 0..200u64, 0..100u64);
    let faults = (fault(0.3), fault(0.4), fault(0.2), fault(0.03), prop::option::of(0..200_000u64));
    (shape, faults).prop_map(move |((window_lots, window_bytes, rate, latency_us, jitter_us), faults)| {
        let (stall, short, error, lost, dies_at_us) = faults;
        let model = SimLink {
            rate_bytes_per_s: rate * 1_000_000,
            latency_us,
            jitter_us,
            stall: (stall, 3_000),
            short,
            error,
            corrupt: 0.0,
            lost: (lost, 3_000_000),
            dies_at_us: dies_at_us.filter(|_| faulty),
        };
        AnyLink { window_lots, window_bytes, model, timeout_us: 1_000_000 }
    })
}

fn any_transfer(cancels: bool) -> impl Strategy<Value = AnyTransfer> {
    let class = prop::sample::select(Class::ALL.to_vec());
    let blocks = prop_oneof![
        prop::collection::vec(1..2_000u64, 1..40),
        prop::collection::vec((1 << 10)..(1500 << 10) as u64, 1..6)
    ];
    let cancel = if cancels { prop::option::of(0..5_000u64).boxed() } else { Just(None).boxed() };
    (0..20_000u64, class, prop::option::of(0..30_000u64), blocks, cancel).prop_map(
        |(at_us, class, deadline_us, blocks, cancel_after_us)| AnyTransfer {
            at_us,
            class,
            deadline_us,
            blocks,
            cancel_after_us,
        },
    )
}

fn any_world(faulty: bool) -> impl Strategy<Value = World> {
    let relayed = (any_link(faulty), any_link(faulty), 1..4u32, (16 << 10)..(2 * MIB));
    (
        prop::collection::vec(any_link(faulty), 1..4),
        prop::collection::vec(relayed, 0..3),
        prop::collection::vec(any_transfer(faulty), 1..12),
        any::<u64>(),
    )
        .prop_map(|(direct, relayed, transfers, seed)| World { direct, relayed, transfers, seed })
}

struct Built {
    sim: Sim,
    source: RegionId,
    target: RegionId,
    /// The target's bytes before anything moved.
    before: Vec<u8>,
}

fn link(sim: &mut Sim, name: String, link: &AnyLink) -> forebay_mover::LinkId {
    let mut spec = LinkSpec::new(name, link.window_lots, link.window_bytes);
    spec.op_timeout_us = link.timeout_us;
    sim.add_link(spec, link.model.clone())
}

/// Blocks lie in order in the source and in reverse order, with gaps, in the target.
fn build(world: &World) -> Built {
    let total: u64 = world.transfers.iter().flat_map(|transfer| &transfer.blocks).map(|len| len + 1).sum();
    let mut sim = Sim::new(world.seed);
    let (source, target) = (sim.add_region(HOST, total as usize), sim.add_region(DEVICE, total as usize));
    for (index, direct) in world.direct.iter().enumerate() {
        let id = link(&mut sim, format!("direct{index}"), direct);
        sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
    }
    for (index, (first, second, slots, slot_bytes)) in world.relayed.iter().enumerate() {
        let (first, second) =
            (link(&mut sim, format!("out{index}"), first), link(&mut sim, format!("in{index}"), second));
        let region =
            sim.add_region(Place::Device(1 + index as u16), (u64::from(*slots) * slot_bytes) as usize);
        let staging = Staging { region, slots: *slots, slot_bytes: *slot_bytes };
        sim.mover
            .add_route(RouteSpec::relayed(HOST, DEVICE, [first, second], staging, index % 2 == 1))
            .unwrap();
    }
    let (mut from, mut to) = (0, total);
    for (nth, transfer) in world.transfers.iter().enumerate() {
        let mut pairs = Vec::new();
        for len in &transfer.blocks {
            to -= len + 1;
            pairs.push(SpanPair::new(Span::new(source, from, *len), Span::new(target, to, *len)));
            from += len + 1;
        }
        sim.submit_at(
            transfer.at_us,
            Transfer {
                pairs,
                class: transfer.class,
                deadline_us: transfer.deadline_us.map(|after| transfer.at_us + after),
            },
        );
        if let Some(after_us) = transfer.cancel_after_us {
            sim.cancel_at(transfer.at_us + after_us, nth);
        }
    }
    let before = sim.bytes(target).to_vec();
    Built { sim, source, target, before }
}

fn arrived(built: &Built, pair: &SpanPair) -> bool {
    let slice =
        |region, span: &Span| built.sim.bytes(region)[span.offset as usize..][..span.len as usize].to_vec();
    slice(built.source, &pair.from) == slice(built.target, &pair.to)
}

/// A pair without the parts that `unmoved` covers.
fn moved_parts(pair: &SpanPair, unmoved: &[SpanPair]) -> Vec<SpanPair> {
    let mut missing: Vec<(u64, u64)> = unmoved
        .iter()
        .filter(|part| part.to.offset >= pair.to.offset && part.to.offset < pair.to.offset + pair.to.len)
        .map(|part| (part.to.offset - pair.to.offset, part.to.len))
        .collect();
    missing.sort_unstable();
    let mut parts = Vec::new();
    let mut at = 0;
    for (start, len) in missing.into_iter().chain([(pair.to.len, 0)]) {
        if start > at {
            let part = |span: &Span| Span::new(span.region, span.offset + at, start - at);
            parts.push(SpanPair::new(part(&pair.from), part(&pair.to)));
        }
        at = start + len;
    }
    parts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn without_faults_every_span_moves_in_full_and_no_window_is_exceeded(world in any_world(false)) {
        let mut built = build(&world);
        built.sim.run();
        prop_assert_eq!(&built.sim.violations, &Vec::<String>::new());
        prop_assert_eq!(built.sim.ended.len(), world.transfers.len());
        for ended in &built.sim.ended {
            let transfer = built.sim.transfer(ended.id).unwrap();
            let bytes = transfer.pairs.iter().map(|pair| pair.from.len).sum();
            prop_assert_eq!(&ended.end, &End::Done { bytes });
            prop_assert!(transfer.pairs.iter().all(|pair| arrived(&built, pair)));
        }
    }

    #[test]
    fn under_faults_each_transfer_ends_once_and_names_exactly_what_did_not_move(world in any_world(true)) {
        let mut built = build(&world);
        built.sim.run();
        prop_assert_eq!(&built.sim.violations, &Vec::<String>::new());
        prop_assert_eq!(built.sim.ended.len() + built.sim.refused.len(), world.transfers.len());
        let mut ids: Vec<_> = built.sim.ended.iter().map(|ended| ended.id).collect();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), built.sim.ended.len());
        for ended in &built.sim.ended {
            let transfer = built.sim.transfer(ended.id).unwrap();
            let total: u64 = transfer.pairs.iter().map(|pair| pair.from.len).sum();
            match &ended.end {
                End::Done { bytes } => {
                    prop_assert_eq!(*bytes, total);
                    prop_assert!(transfer.pairs.iter().all(|pair| arrived(&built, pair)));
                }
                End::Failed(failure) => {
                    let unmoved: u64 = failure.unmoved.iter().map(|pair| pair.from.len).sum();
                    prop_assert_eq!(failure.moved_bytes + unmoved, total, "{:?}", failure);
                    let timed_out = matches!(failure.reason, forebay_mover::Reason::TimedOut { .. });
                    prop_assert!(unmoved > 0 || timed_out);
                    for pair in &transfer.pairs {
                        for part in moved_parts(pair, &failure.unmoved) {
                            prop_assert!(arrived(&built, &part), "{:?} should have arrived", part);
                        }
                    }
                }
                End::Cancelled { moved_bytes, .. } => prop_assert!(*moved_bytes <= total),
            }
        }
        prop_assert_eq!(built.sim.mover.telemetry().transfers_active, 0);
        prop_assert_eq!(built.sim.mover.telemetry().waiting_bytes, 0);
    }

    #[test]
    fn bytes_outside_the_targets_are_never_touched(world in any_world(true)) {
        let mut built = build(&world);
        built.sim.run();
        let mut is_target = vec![false; built.before.len()];
        for ended in &built.sim.ended {
            for pair in &built.sim.transfer(ended.id).unwrap().pairs {
                is_target[pair.to.offset as usize..][..pair.to.len as usize].fill(true);
            }
        }
        let after = built.sim.bytes(built.target);
        prop_assert!((0..after.len()).all(|at| is_target[at] || after[at] == built.before[at]));
    }

    #[test]
    fn pairs_are_cut_between_pages_whatever_the_slots_and_whatever_fails(mut world in any_world(true)) {
        let relayed = world.relayed.iter_mut().flat_map(|(first, second, ..)| [first, second]);
        // A short result is continued at the byte where it ended.
        world.direct.iter_mut().chain(relayed).for_each(|link| link.model.short = 0.0);
        let mut built = build(&world);
        built.sim.run();
        let pairs: Vec<_> =
            built.sim.ended.iter().flat_map(|ended| &built.sim.transfer(ended.id).unwrap().pairs).collect();
        for ran in built.sim.ran.iter().flat_map(|ran| &ran.pairs) {
            for span in [ran.from, ran.to].into_iter().filter(|span| [built.source, built.target].contains(&span.region)) {
                let holds = |whole: &&Span| {
                    whole.region == span.region && (whole.offset..whole.offset + whole.len).contains(&span.offset)
                };
                let whole = pairs.iter().flat_map(|pair| [&pair.from, &pair.to]).find(holds).unwrap();
                let (start, end) = (span.offset - whole.offset, span.offset - whole.offset + span.len);
                prop_assert!(start % PAGE_BYTES == 0, "{:?} of {:?}", span, whole);
                prop_assert!(end % PAGE_BYTES == 0 || end == whole.len, "{:?} of {:?}", span, whole);
            }
        }
    }

    #[test]
    fn a_link_with_room_is_never_idle_while_a_lot_waits(windows in prop::collection::vec(1..4usize, 1..5), bytes in 1..40 * MIB) {
        // Equal rates, so that leaving a lot to a faster route cannot be the reason to idle.
        let mut mover = Mover::new(Limits::default());
        let (source, target) = (mover.add_region(HOST, bytes), mover.add_region(DEVICE, bytes));
        for window_lots in &windows {
            let id = mover.add_link(LinkSpec::new("link", *window_lots as u32, 64 * MIB));
            mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
        }
        let pair = SpanPair::new(Span::new(source, 0, bytes), Span::new(target, 0, bytes));
        mover.submit(0, Transfer::new(vec![pair], Class::Demand)).unwrap();
        let mut now_us = 0;
        let mut queues = vec![VecDeque::new(); windows.len()];
        let mut busy_until_us = vec![0; windows.len()];
        loop {
            while let Some(start) = mover.poll(now_us) {
                let link = start.link.index();
                busy_until_us[link] = busy_until_us[link].max(now_us) + start.bytes;
                queues[link].push_back((busy_until_us[link], start));
            }
            let waiting_bytes = mover.telemetry().waiting_bytes;
            let idle = queues.iter().any(|queue| queue.is_empty());
            prop_assert!(!idle || waiting_bytes == 0, "a link is idle with {} bytes waiting", waiting_bytes);
            let next = queues.iter().enumerate().filter_map(|(link, queue)| Some((queue.front()?.0, link))).min();
            let Some((at_us, link)) = next else { break };
            now_us = at_us;
            let (_, start) = queues[link].pop_front().unwrap();
            mover.complete(now_us, start.op, Outcome::Moved { bytes: start.bytes });
        }
        prop_assert_eq!(mover.telemetry().links.iter().map(|link| link.bytes).sum::<u64>(), bytes);
    }
}

/// Moves `bytes` over direct links of the given rates (bytes per microsecond) and returns the rate reached.
fn rate_over(rates: &[u64], bytes: u64) -> f64 {
    let mut sim = Sim::new(3);
    let (source, target) = (sim.add_region(HOST, bytes as usize), sim.add_region(DEVICE, bytes as usize));
    for (index, rate) in rates.iter().enumerate() {
        let model = SimLink { latency_us: 20, jitter_us: 5, ..SimLink::of_rate(rate * 1_000_000) };
        let id = sim.add_link(LinkSpec::new(format!("link{index}"), 3, 64 * MIB), model);
        sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
    }
    let pair = SpanPair::new(Span::new(source, 0, bytes), Span::new(target, 0, bytes));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    sim.run();
    assert_eq!(sim.bytes(source), sim.bytes(target));
    bytes as f64 / sim.ended[0].at_us as f64
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
    // 4 MiB over 2000 and 20 bytes/us: one minimal lot alone would keep the slow link busy for 26 ms.
    let mut sim = Sim::new(3);
    let (source, target) = (sim.add_region(HOST, 4 << 20), sim.add_region(DEVICE, 4 << 20));
    for (name, rate) in [("fast", 2_000_000_000), ("slow", 20_000_000)] {
        let spec = LinkSpec { rate_hint_bytes_per_s: rate, ..LinkSpec::new(name, 2, 64 * MIB) };
        let id = sim.add_link(spec, SimLink::of_rate(rate));
        sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
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
    sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
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
    sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
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

/// GPU 1's own traffic and a relay for GPU 0 share GPU 1's PCIe link. Returns, for each of GPU 1's lots, how long it took.
fn own_traffic_us(with_relay: bool) -> Vec<u64> {
    let mut sim = Sim::new(11);
    let peer = Place::Device(1);
    let bytes = 512 * MIB;
    let rate = SimLink::of_rate(10_000_000_000);
    let pcie0 = sim.add_link(LinkSpec::new("pcie0", 2, 64 * MIB), rate.clone());
    let pcie1 = sim.add_link(LinkSpec::new("pcie1", 2, 64 * MIB), rate.clone());
    let nvlink = sim.add_link(LinkSpec::new("nvlink10", 2, 64 * MIB), SimLink::of_rate(100_000_000_000));
    let slots = sim.add_region(peer, 64 << 20);
    sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, pcie0)).unwrap();
    sim.mover.add_route(RouteSpec::direct(HOST, peer, pcie1)).unwrap();
    if with_relay {
        let staging = Staging { region: slots, slots: 4, slot_bytes: 16 * MIB };
        let hops = vec![Hop { link: pcie1, guest: true }, Hop { link: nvlink, guest: false }];
        sim.mover.add_route(RouteSpec { from: HOST, to: DEVICE, hops, staging: vec![staging] }).unwrap();
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
    sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, pcie0)).unwrap();
    for peer in 1..4u16 {
        let pcie =
            sim.add_link(LinkSpec::new(format!("pcie{peer}"), 2, 64 * MIB), SimLink::of_rate(10_000_000_000));
        let nvlink = sim
            .add_link(LinkSpec::new(format!("nvlink{peer}"), 2, 64 * MIB), SimLink::of_rate(100_000_000_000));
        let region = sim.add_region(Place::Device(peer), 16 << 20);
        let staging = Staging { region, slots: 4, slot_bytes: 4 * MIB };
        sim.mover.add_route(RouteSpec::relayed(HOST, DEVICE, [pcie, nvlink], staging, true)).unwrap();
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
fn a_cancel_returns_only_when_quiet() {
    let mut sim = Sim::new(2);
    let id = sim.add_link(LinkSpec::new("link", 2, 64 * MIB), SimLink::of_rate(1_000_000_000));
    sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
    let (source, target) = (sim.add_region(HOST, 32 << 20), sim.add_region(DEVICE, 32 << 20));
    let pair = SpanPair::new(Span::new(source, 0, 32 * MIB), Span::new(target, 0, 32 * MIB));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    sim.cancel_at(100, 0);
    sim.run();
    let last_write_us = sim.ran.iter().map(|ran| ran.completed_us).max().unwrap();
    assert!(matches!(sim.ended[0].end, End::Cancelled { moved_bytes, .. } if moved_bytes < 32 * MIB));
    assert_eq!(sim.ended[0].at_us, last_write_us);
    assert!(last_write_us > 100);
    assert_eq!(sim.violations, Vec::<String>::new());
}

#[test]
fn a_link_that_fails_at_once_does_not_swallow_the_transfer() {
    let mut sim = Sim::new(2);
    for (name, model) in [
        ("broken", SimLink { error: 1.0, ..SimLink::of_rate(1_000_000_000_000) }),
        ("healthy", SimLink::of_rate(1_000_000_000)),
    ] {
        let id = sim.add_link(LinkSpec::new(name, 2, 64 * MIB), model);
        sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
    }
    let (source, target) = (sim.add_region(HOST, 64 << 20), sim.add_region(DEVICE, 64 << 20));
    let pair = SpanPair::new(Span::new(source, 0, 64 * MIB), Span::new(target, 0, 64 * MIB));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    sim.run();
    assert_eq!(sim.ended[0].end, End::Done { bytes: 64 * MIB });
    assert_eq!(sim.bytes(source), sim.bytes(target));
}

#[test]
fn corrupt_bytes_fail_the_transfer_and_are_not_tried_again() {
    let mut sim = Sim::new(2);
    let id = sim.add_link(
        LinkSpec::new("link", 1, 64 * MIB),
        SimLink { corrupt: 1.0, ..SimLink::of_rate(1_000_000) },
    );
    sim.mover.add_route(RouteSpec::direct(HOST, DEVICE, id)).unwrap();
    let (source, target) = (sim.add_region(HOST, 4096), sim.add_region(DEVICE, 4096));
    let pair = SpanPair::new(Span::new(source, 0, 4096), Span::new(target, 0, 4096));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    sim.run();
    let End::Failed(failure) = &sim.ended[0].end else { panic!("{:?}", sim.ended[0].end) };
    assert_eq!(failure.unmoved, vec![pair]);
    assert_eq!(sim.ran.len(), 1);
}

#[test]
fn a_lost_operation_quarantines_its_spans_until_it_completes() {
    let mut mover = Mover::new(Limits::default());
    let (source, target) = (mover.add_region(HOST, 100), mover.add_region(DEVICE, 100));
    let link = mover.add_link(LinkSpec { op_timeout_us: 50, ..LinkSpec::new("link", 1, MIB) });
    mover.add_route(RouteSpec::direct(HOST, DEVICE, link)).unwrap();
    let (from, to) = (Span::new(source, 0, 100), Span::new(target, 0, 100));
    let id = mover.submit(0, Transfer::new(vec![SpanPair::new(from, to)], Class::Demand)).unwrap();
    let start = mover.poll(0).unwrap();
    assert_eq!(mover.next_timeout_us(0), Some(50));
    mover.expire(49);
    assert_eq!(mover.next_event(), None);
    mover.expire(50);
    let Some(forebay_mover::Event::Ended(ended, End::Failed(failure))) = mover.next_event() else { panic!() };
    assert_eq!((ended, failure.quarantined), (id, vec![from, to]));
    assert!(mover.remove_region(target).is_err(), "the lost operation may still write there");
    mover.complete(1_000, start.op, Outcome::Moved { bytes: 100 });
    assert_eq!(mover.next_event(), Some(forebay_mover::Event::Quiet(id, vec![from, to])));
    assert!(mover.remove_region(target).is_ok());
}

#[test]
fn a_transfer_whose_last_lot_waits_for_a_link_that_dies_ends() {
    let mut mover = Mover::new(Limits::default());
    let (source, target) = (mover.add_region(HOST, 200), mover.add_region(DEVICE, 200));
    let region = mover.add_region(Place::Device(1), 200);
    let [out, into] = ["out", "in"].map(|name| mover.add_link(LinkSpec::new(name, 1, 100)));
    let staging = Staging { region, slots: 2, slot_bytes: 100 };
    mover.add_route(RouteSpec::relayed(HOST, DEVICE, [out, into], staging, false)).unwrap();
    let transfers = [0, 100].map(|at| {
        let pair = SpanPair::new(Span::new(source, at, 100), Span::new(target, at, 100));
        mover.submit(0, Transfer::new(vec![pair], Class::Demand)).unwrap()
    });
    // The first one is on its second link; the other one has got as far as the staging and waits.
    for _ in transfers {
        let first_hop = mover.poll(0).unwrap();
        mover.complete(1, first_hop.op, Outcome::Moved { bytes: 100 });
        mover.poll(1);
    }
    mover.link_down(2, into);
    let ended = std::iter::from_fn(|| mover.next_event()).next().unwrap();
    assert!(matches!(ended, Event::Ended(id, End::Failed(_)) if id == transfers[1]), "{ended:?}");
}

#[test]
fn routes_with_the_same_staging_share_its_slots() {
    let mut mover = Mover::new(Limits::default());
    let source = mover.add_region(HOST, 400);
    let region = mover.add_region(Place::Device(9), 100);
    let staging = Staging { region, slots: 1, slot_bytes: 100 };
    let targets = [0, 1].map(|device| {
        let target = mover.add_region(Place::Device(device), 200);
        let links = ["out", "in"].map(|name| mover.add_link(LinkSpec::new(name, 4, 1000)));
        mover.add_route(RouteSpec::relayed(HOST, Place::Device(device), links, staging, false)).unwrap();
        target
    });
    for target in targets {
        let pair = SpanPair::new(Span::new(source, 0, 100), Span::new(target, 0, 100));
        mover.submit(0, Transfer::new(vec![pair], Class::Demand)).unwrap();
    }
    let first = mover.poll(0).unwrap();
    assert_eq!(mover.poll(0), None, "the only slot is taken");
    mover.complete(1, first.op, Outcome::Moved { bytes: 100 });
    let second_hop = mover.poll(1).unwrap();
    assert_eq!((second_hop.pairs[0].from.region, mover.poll(1)), (region, None));
    mover.complete(2, second_hop.op, Outcome::Moved { bytes: 100 });
    assert_eq!(mover.poll(2).unwrap().pairs[0].to.region, region, "the other route has the slot now");
}

#[test]
fn a_link_that_was_late_once_is_used_again() {
    let mut mover = Mover::new(Limits::default());
    let (source, target) = (mover.add_region(HOST, 64 * MIB), mover.add_region(DEVICE, 64 * MIB));
    let [_, late] = ["good", "late"].map(|name| {
        let link = mover.add_link(LinkSpec::new(name, 1, 64 * MIB));
        mover.add_route(RouteSpec::direct(HOST, DEVICE, link)).unwrap();
        link
    });
    // Every operation takes a millisecond, and the first one of the late link so much more. Gives the bytes of that link.
    let mut copy = |begin_us: u64, mut late_us: u64| {
        let before = mover.telemetry().links[late.index()].bytes;
        let pair = SpanPair::new(Span::new(source, 0, 64 * MIB), Span::new(target, 0, 64 * MIB));
        mover.submit(begin_us, Transfer::new(vec![pair], Class::Demand)).unwrap();
        let (mut now_us, mut under_way) = (begin_us, Vec::new());
        loop {
            while let Some(start) = mover.poll(now_us) {
                let extra_us = if start.link == late { std::mem::take(&mut late_us) } else { 0 };
                under_way.push((now_us + 1_000 + extra_us, start));
            }
            under_way.sort_by_key(|(at_us, _)| std::cmp::Reverse(*at_us));
            let Some((at_us, start)) = under_way.pop() else { break };
            now_us = at_us;
            mover.complete(now_us, start.op, Outcome::Moved { bytes: start.bytes });
        }
        assert!(matches!(mover.next_event(), Some(Event::Ended(_, End::Done { .. }))));
        mover.telemetry().links[late.index()].bytes - before
    };
    copy(0, 2_500_000);
    let bytes = copy(4_000_000, 0);
    assert!(bytes > 16 * MIB, "{bytes} of 64 MiB over one of two equal links");
}
