//! What becomes of a transfer that is cancelled, or whose links fail, lose an operation or are
//! late: step by step.

#![allow(clippy::unwrap_used)]

mod sim;

use forebay_transfer::{
    Class, End, Event, Hop, Limits, LinkId, LinkSpec, Mover, OpId, Outcome, PathSpec, Place, Refused,
    RegionId, Span, SpanPair, Staging, Transfer, TransferId,
};
use sim::{Sim, SimLink};
use std::time::{Duration, Instant};

const HOST: Place = Place::Host(0);
const DEVICE: Place = Place::Device(0);
const MIB: u64 = 1 << 20;

/// A mover with so many bytes at either end.
struct Rig {
    mover: Mover,
    source: RegionId,
    target: RegionId,
}

impl Rig {
    fn new(bytes: u64) -> Rig {
        let mut mover = Mover::new(Limits::default());
        let (source, target) = (mover.add_region(HOST, bytes), mover.add_region(DEVICE, bytes));
        Rig { mover, source, target }
    }

    /// A direct path over a link whose operations may take so long.
    fn direct(&mut self, window_lots: u32, window_bytes: u64, op_timeout_us: u64) -> LinkId {
        let spec = LinkSpec { op_timeout_us, ..LinkSpec::new("link", window_lots, window_bytes) };
        let link = self.mover.add_link(spec);
        self.mover.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap();
        link
    }

    fn pair(&self, at: u64, len: u64) -> SpanPair {
        SpanPair::new(Span::new(self.source, at, len), Span::new(self.target, at, len))
    }

    fn submit(&mut self, now_us: u64, at: u64, len: u64) -> Result<TransferId, Refused> {
        self.mover.submit(now_us, Transfer::new(vec![self.pair(at, len)], Class::Demand))
    }

    /// Two transfers, of which each has its first hop behind it. The second hop of each begins if
    /// it can.
    fn two_in_staging(&mut self) {
        for at in [0, 100] {
            self.submit(0, at, 100).unwrap();
            let first_hop = self.mover.poll(0).unwrap();
            self.mover.complete(0, first_hop.op, Outcome::Moved { bytes: 100 });
            self.mover.poll(0);
        }
    }

    /// Of two transfers the first one's operation never ends, within 50 us, and keeps all there is:
    /// both fail, and no other is let in.
    fn both_fail_for_a_lost_operation(&mut self) -> OpId {
        let ids = [0, 100].map(|at| self.submit(0, at, 100).unwrap());
        let lost = self.mover.poll(0).unwrap();
        self.mover.expire(50);
        for id in ids {
            let ended = self.mover.next_event();
            assert!(matches!(ended, Some(Event::Ended(ended, End::Failed(_))) if ended == id), "{ended:?}");
        }
        assert_eq!(self.submit(60, 100, 100), Err(Refused::NoPath { from: HOST, to: DEVICE }));
        lost.op
    }

    fn last_is_done(&mut self) {
        let last = std::iter::from_fn(|| self.mover.next_event()).last();
        assert!(matches!(last, Some(Event::Ended(_, End::Done { bytes: 100 }))), "{last:?}");
    }
}

/// A simulation with links of these models, and one transfer of so many bytes over them.
fn sim_of(models: &[(&str, u32, SimLink)], bytes: u64) -> (Sim, SpanPair) {
    let mut sim = Sim::new(2);
    for (name, window_lots, model) in models {
        let id = sim.add_link(LinkSpec::new(*name, *window_lots, 64 * MIB), model.clone());
        sim.mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap();
    }
    let (source, target) = (sim.add_region(HOST, bytes as usize), sim.add_region(DEVICE, bytes as usize));
    let pair = SpanPair::new(Span::new(source, 0, bytes), Span::new(target, 0, bytes));
    sim.submit_at(0, Transfer::new(vec![pair], Class::Demand));
    (sim, pair)
}

#[test]
fn a_cancel_returns_only_when_quiet() {
    let (mut sim, _) = sim_of(&[("link", 2, SimLink::of_rate(1_000_000_000))], 32 * MIB);
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
    let broken = SimLink { error: 1.0, ..SimLink::of_rate(1_000_000_000_000) };
    let healthy = SimLink::of_rate(1_000_000_000);
    let (mut sim, pair) = sim_of(&[("broken", 2, broken), ("healthy", 2, healthy)], 64 * MIB);
    sim.run();
    assert_eq!(sim.ended[0].end, End::Done { bytes: 64 * MIB });
    assert_eq!(sim.bytes(pair.from.region), sim.bytes(pair.to.region));
}

#[test]
fn corrupt_bytes_fail_the_transfer_and_are_not_tried_again() {
    let corrupt = SimLink { corrupt: 1.0, ..SimLink::of_rate(1_000_000) };
    let (mut sim, pair) = sim_of(&[("link", 1, corrupt)], 4096);
    sim.run();
    let End::Failed(failure) = &sim.ended[0].end else { panic!("{:?}", sim.ended[0].end) };
    assert_eq!(failure.unmoved, vec![pair]);
    assert_eq!(sim.ran.len(), 1);
}

#[test]
fn a_rest_that_ends_between_a_poll_and_the_next_look_at_the_clock_is_not_slept_through() {
    let mut rig = Rig::new(100);
    rig.direct(1, MIB, 1_000_000);
    rig.submit(0, 0, 100).unwrap();
    let mover = &mut rig.mover;
    let start = mover.poll(0).unwrap();
    mover.complete(10, start.op, Outcome::Failed { error: "once".into() });
    assert_eq!(mover.poll(11), None, "the link backs off");
    let ends_us = mover.next_timeout_us().unwrap();
    assert_eq!(mover.poll(ends_us - 1), None);
    // Whoever asks a moment later, when the back-off is over, is told all the same.
    assert_eq!(mover.next_timeout_us(), Some(ends_us));
    assert!(mover.poll(ends_us).is_some());
}

#[test]
fn a_lost_operation_quarantines_its_spans_until_it_completes() {
    let mut rig = Rig::new(100);
    rig.direct(1, MIB, 50);
    let (id, SpanPair { from, to }) = (rig.submit(0, 0, 100).unwrap(), rig.pair(0, 100));
    let Rig { mut mover, target, .. } = rig;
    let start = mover.poll(0).unwrap();
    assert_eq!(mover.next_timeout_us(), Some(50));
    mover.expire(49);
    assert_eq!(mover.next_event(), None);
    mover.expire(50);
    let Some(Event::Ended(ended, End::Failed(failure))) = mover.next_event() else { panic!() };
    assert_eq!((ended, failure.quarantined), (id, vec![from, to]));
    assert!(mover.remove_region(target).is_err(), "the lost operation may still write there");
    mover.complete(1_000, start.op, Outcome::Moved { bytes: 100 });
    assert_eq!(mover.next_event(), Some(Event::Quiet(id, vec![from, to])));
    assert!(mover.remove_region(target).is_ok());
}

#[test]
fn nothing_waits_for_a_link_whose_window_is_full_of_lost_operations() {
    let mut rig = Rig::new(200);
    rig.direct(1, MIB, 50);
    let lost = rig.both_fail_for_a_lost_operation();
    // It comes back with the operation.
    rig.mover.complete(1_000, lost, Outcome::Failed { error: "late".into() });
    rig.submit(1_000, 100, 100).unwrap();
    let again = rig.mover.poll(10_000).unwrap();
    rig.mover.complete(10_001, again.op, Outcome::Moved { bytes: 100 });
    rig.last_is_done();
}

#[test]
fn a_lot_in_staging_goes_another_way_when_the_link_that_it_waits_for_is_full_of_lost_operations() {
    let mut rig = Rig::new(200);
    let region = rig.mover.add_region(Place::Device(1), 200);
    let links = [("out", 1_000), ("in", 50)].map(|(name, op_timeout_us)| {
        rig.mover.add_link(LinkSpec { op_timeout_us, ..LinkSpec::new(name, 1, 100) })
    });
    let staging = Staging { region, slots: 2, slot_bytes: 100 };
    rig.mover.add_path(PathSpec::relayed(HOST, DEVICE, links, staging, true)).unwrap();
    rig.two_in_staging();
    let late = rig.direct(1, 100, 1_000);
    rig.mover.expire(50);
    let start = rig.mover.poll(50).expect("the second transfer's lot goes directly");
    assert_eq!((start.link, start.pairs[0].from), (late, Span::new(rig.source, 100, 100)));
    rig.mover.complete(60, start.op, Outcome::Moved { bytes: 100 });
    rig.last_is_done();
}

#[test]
fn nothing_waits_for_staging_whose_slots_lost_operations_keep() {
    let mut rig = Rig::new(200);
    let region = rig.mover.add_region(Place::Device(1), 100);
    let spec = |name| LinkSpec { op_timeout_us: 50, ..LinkSpec::new(name, 4, 64 * MIB) };
    let links = ["out", "in"].map(|name| rig.mover.add_link(spec(name)));
    let staging = Staging { region, slots: 1, slot_bytes: 100 };
    rig.mover.add_path(PathSpec::relayed(HOST, DEVICE, links, staging, false)).unwrap();
    let lost = rig.both_fail_for_a_lost_operation();
    // The slot comes back with the operation.
    rig.mover.complete(1_000, lost, Outcome::Failed { error: "late".into() });
    rig.submit(1_000, 100, 100).unwrap();
    assert!(rig.mover.poll(10_000).is_some());
}

#[test]
fn a_lot_between_hops_goes_another_way_when_lost_operations_keep_the_slots_before_it() {
    let mut rig = Rig::new(200);
    let regions = [1, 2].map(|device| rig.mover.add_region(Place::Device(device), 200));
    let links = [1_000, 50, 1_000].map(|op_timeout_us| {
        rig.mover.add_link(LinkSpec { op_timeout_us, ..LinkSpec::new("link", 4, 64 * MIB) })
    });
    let hops = links.map(|link| Hop { link, guest: false }).to_vec();
    let staging = regions.into_iter().zip([2, 1]);
    let staging = staging.map(|(region, slots)| Staging { region, slots, slot_bytes: 100 }).collect();
    rig.mover.add_path(PathSpec { from: HOST, to: DEVICE, hops, staging }).unwrap();
    rig.two_in_staging();
    let late = rig.direct(4, 64 * MIB, 1_000);
    rig.mover.expire(50);
    let start = rig.mover.poll(5_000).expect("the second transfer's lot goes directly");
    assert_eq!((start.link, start.pairs[0].from), (late, Span::new(rig.source, 100, 100)));
}

#[test]
fn what_several_lost_operations_touch_is_quarantined_until_the_last_of_them_completes() {
    let mut mover = Mover::new(Limits::default());
    let (source, target) = (mover.add_region(HOST, 100), mover.add_region(DEVICE, 300));
    let links = [50, 50, 1_000].map(|op_timeout_us| {
        let link = mover.add_link(LinkSpec { op_timeout_us, ..LinkSpec::new("link", 1, 100) });
        mover.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap();
        link
    });
    // The same bytes to three places.
    let pairs = [0, 100, 200].map(|to| SpanPair::new(Span::new(source, 0, 100), Span::new(target, to, 100)));
    let id = mover.submit(0, Transfer::new(pairs.to_vec(), Class::Demand)).unwrap();
    let starts = links.map(|_| mover.poll(0).unwrap());
    mover.expire(50);
    mover.complete(60, starts[0].op, Outcome::Moved { bytes: 100 });
    mover.complete(70, starts[2].op, Outcome::Moved { bytes: 100 });
    let Some(Event::Ended(ended, End::Failed(failure))) = mover.next_event() else { panic!() };
    let pair = starts[1].pairs[0];
    assert_eq!((ended, failure.quarantined), (id, vec![pair.from, pair.to]));
}

#[test]
fn lost_operations_of_many_spans_become_quiet_in_a_moment() {
    const PAIRS: u64 = 16_384;
    const OPS: u64 = 8;
    let mut mover = Mover::new(Limits::default());
    let [source, target] = [HOST, DEVICE].map(|place| mover.add_region(place, 4 * PAIRS * (OPS + 1)));
    let spec = |op_timeout_us| LinkSpec { op_timeout_us, ..LinkSpec::new("link", OPS as u32, 64 * MIB) };
    let [hangs, lives] = [50, 1_000_000].map(|op_timeout_us| mover.add_link(spec(op_timeout_us)));
    mover.add_path(PathSpec::direct(HOST, DEVICE, hangs)).unwrap();
    mover.add_path(PathSpec::direct(HOST, DEVICE, lives)).unwrap();
    // Every other byte, so that no two pairs are one.
    let pair = |at| SpanPair::new(Span::new(source, 2 * at, 1), Span::new(target, 2 * at, 1));
    let pairs = (0..PAIRS * (OPS + 1)).map(pair).collect();
    mover.submit(0, Transfer::new(pairs, Class::Demand)).unwrap();
    let mut lost: Vec<_> = std::iter::from_fn(|| mover.poll(0)).collect();
    mover.expire(50);
    lost.retain(|start| start.link == hangs);
    assert!(lost.len() >= 4, "{}", lost.len());
    let began = Instant::now();
    lost.iter().for_each(|start| mover.complete(60, start.op, Outcome::Failed { error: "late".into() }));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn a_transfer_whose_last_lot_waits_for_a_link_that_dies_ends() {
    let mut rig = Rig::new(200);
    let region = rig.mover.add_region(Place::Device(1), 200);
    let [out, into] = ["out", "in"].map(|name| rig.mover.add_link(LinkSpec::new(name, 1, 100)));
    let staging = Staging { region, slots: 2, slot_bytes: 100 };
    rig.mover.add_path(PathSpec::relayed(HOST, DEVICE, [out, into], staging, false)).unwrap();
    let transfers = [0, 100].map(|at| rig.submit(0, at, 100).unwrap());
    let mover = &mut rig.mover;
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
fn paths_with_the_same_staging_share_its_slots() {
    let mut mover = Mover::new(Limits::default());
    let source = mover.add_region(HOST, 400);
    let region = mover.add_region(Place::Device(9), 100);
    let staging = Staging { region, slots: 1, slot_bytes: 100 };
    let targets = [0, 1].map(|device| {
        let target = mover.add_region(Place::Device(device), 200);
        let links = ["out", "in"].map(|name| mover.add_link(LinkSpec::new(name, 4, 1000)));
        mover.add_path(PathSpec::relayed(HOST, Place::Device(device), links, staging, false)).unwrap();
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
    assert_eq!(mover.poll(2).unwrap().pairs[0].to.region, region, "the other path has the slot now");
}

#[test]
fn a_link_that_was_late_once_is_used_again() {
    let mut mover = Mover::new(Limits::default());
    let (source, target) = (mover.add_region(HOST, 64 * MIB), mover.add_region(DEVICE, 64 * MIB));
    let [_, late] = ["good", "late"].map(|name| {
        let link = mover.add_link(LinkSpec::new(name, 1, 64 * MIB));
        mover.add_path(PathSpec::direct(HOST, DEVICE, link)).unwrap();
        link
    });
    // Every operation takes a millisecond, and the first one of the late link so much more. Gives
    // the bytes of that link.
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
