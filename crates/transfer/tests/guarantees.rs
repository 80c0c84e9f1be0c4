//! What the mover promises, as properties over random link sets, loads and faults in virtual time.

#![allow(clippy::unwrap_used)]

mod sim;

use forebay_transfer::{
    Class, End, Limits, LinkSpec, Mover, Outcome, PAGE_BYTES, PathSpec, Place, RegionId, Span, SpanPair,
    Staging, Transfer,
};
use proptest::prelude::*;
use sim::{Sim, SimLink};
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
    raise: Option<(u64, Class)>,
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
    let raise = prop::option::of((0..5_000u64, class.clone()));
    (0..20_000u64, class, prop::option::of(0..30_000u64), blocks, cancel, raise).prop_map(
        |(at_us, class, deadline_us, blocks, cancel_after_us, raise)| AnyTransfer {
            at_us,
            class,
            deadline_us,
            blocks,
            cancel_after_us,
            raise,
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

fn link(sim: &mut Sim, name: String, link: &AnyLink) -> forebay_transfer::LinkId {
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
        sim.mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap();
    }
    for (index, (first, second, slots, slot_bytes)) in world.relayed.iter().enumerate() {
        let (first, second) =
            (link(&mut sim, format!("out{index}"), first), link(&mut sim, format!("in{index}"), second));
        let region =
            sim.add_region(Place::Device(1 + index as u16), (u64::from(*slots) * slot_bytes) as usize);
        let staging = Staging { region, slots: *slots, slot_bytes: *slot_bytes };
        sim.mover
            .add_path(PathSpec::relayed(HOST, DEVICE, [first, second], staging, index % 2 == 1))
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
        if let Some((after_us, class)) = transfer.raise {
            sim.raise_at(transfer.at_us + after_us, nth, class);
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
                    let timed_out = matches!(failure.reason, forebay_transfer::Reason::TimedOut { .. });
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
        // Equal rates, so that leaving a lot to a faster path cannot be the reason to idle.
        let mut mover = Mover::new(Limits::default());
        let (source, target) = (mover.add_region(HOST, bytes), mover.add_region(DEVICE, bytes));
        for window_lots in &windows {
            let id = mover.add_link(LinkSpec::new("link", *window_lots as u32, 64 * MIB));
            mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap();
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
