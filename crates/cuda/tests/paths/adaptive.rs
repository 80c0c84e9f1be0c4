//! Shares that follow what the links carry: a link that slows has less within two batches, one that
//! recovers has its part again, and one that is stuck has nothing.

use crate::common::{Fake, Host, World, alone, pattern};
use forebay_cuda::CopierOptions;
use forebay_cuda::device::{DeviceMemory, Event, Stream};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::rates::Rates;
use forebay_cuda::stream_copy::{Batch, CopyStream, Sent};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 24 * MIB;
/// So slow that threads and memory of a busy machine are no part of it.
const RATES: (&str, &str) = ("FAKE_CUDA_RATES", "h2d=0.3,d2h=0.3");
/// What goes over a relay as fast as the target's own link, and over one that is 4 times as slow.
const EVEN: Range<f64> = 0.33..0.67;
const SLOW: Range<f64> = 0.13..0.28;
const TWO_GPUS: (&str, &str) = ("FAKE_CUDA_GPUS", "2");

/// Batches of a copy stream.
struct Site<'a> {
    world: World<'a>,
    copy_stream: CopyStream,
    bytes: u64,
    host: Arc<Host>,
    memory: DeviceMemory,
}

impl Site<'_> {
    fn new(fake: &Fake, direction: Direction, rates: Option<Rates>) -> Site<'_> {
        Site::of(fake, direction, rates, BYTES)
    }

    fn of(fake: &Fake, direction: Direction, rates: Option<Rates>, bytes: u64) -> Site<'_> {
        let world = fake.measuring_world(CopierOptions { rates, ..CopierOptions::default() });
        let copy_stream = world.copier.stream_copies().copy_stream(0, direction).unwrap().unwrap();
        let (host, memory) = (world.host(bytes), world.memory(0, bytes));
        host.fill(&pattern(7, bytes));
        Site { world, copy_stream, bytes, host, memory }
    }

    /// Sends a batch; what of it went over the relay.
    fn send(&self, direction: Direction) -> (f64, Event) {
        let relayed = || self.world.copier.stream_copies().counters().relayed_bytes.load(Ordering::Relaxed);
        let (from, to) = direction.in_order(self.host.address(), self.memory.address());
        let pieces = [Piece { from, to, bytes: self.bytes }];
        let batch = Batch { pieces: &pieces, after: None, is_open: true, awaited_bytes: None, sums: None };
        let (before, ended) = (relayed(), Event::to_sleep_for(self.copy_stream.device()).unwrap());
        // SAFETY: the memory outlives the copies; they all copy the same bytes.
        let sent = unsafe { self.world.copier.stream_copies().send(&self.copy_stream, &batch, &ended) };
        assert!(matches!(sent, Ok(Sent::Queued(Ok(_)))), "{sent:?}");
        ((relayed() - before) as f64 / self.bytes as f64, ended)
    }

    /// Copies so many batches one after another; what of the last one went over the relay.
    fn copy(&self, direction: Direction, batches: usize) -> f64 {
        let copied = (0..batches).map(|_| {
            let (share, ended) = self.send(direction);
            ended.synchronize().unwrap();
            share
        });
        copied.last().unwrap()
    }
}

/// Shares of batches while a link is whole, slow, and whole again.
fn shares(fake: &Fake, direction: Direction, link: &str) -> [f64; 3] {
    let site = Site::new(fake, direction, None);
    let even = site.copy(direction, 4);
    fake.control(&format!("rates {link}=0.075"));
    site.copy(direction, 2);
    let slow = site.copy(direction, 1);
    fake.control(&format!("rates {link}=0.3"));
    site.copy(direction, 2);
    let again = site.copy(direction, 1);
    let Site { world, copy_stream, host, memory, .. } = site;
    drop((copy_stream, host, memory));
    world.end();
    [even, slow, again]
}

/// Of three attempts one has to give what is expected: a busy machine holds copies up at times, and
/// what is measured then is no link's rate.
fn in_one_of_three<const N: usize>(expected: [Range<f64>; N], attempt: impl Fn() -> [f64; N]) {
    let is_right = |found: &[f64; N]| expected.iter().zip(found).all(|(range, found)| range.contains(found));
    let mut seen = Vec::new();
    while !seen.last().is_some_and(is_right) {
        assert!(seen.len() < 3, "{expected:?}: {seen:?}");
        seen.push(attempt());
    }
}

#[test]
fn a_link_that_slows_has_less_within_two_batches_and_has_it_back_when_it_recovers() {
    let test = "adaptive::a_link_that_slows_has_less_within_two_batches_and_has_it_back_when_it_recovers";
    alone(test, &[RATES, TWO_GPUS], |fake| {
        for (direction, link) in [(Direction::HostToDevice, "h2d.1"), (Direction::DeviceToHost, "d2h.1")] {
            in_one_of_three([EVEN, SLOW, EVEN], || shares(fake, direction, link));
        }
    });
}

#[test]
fn a_targets_own_link_that_slows_leaves_more_to_its_relay() {
    let test = "adaptive::a_targets_own_link_that_slows_leaves_more_to_its_relay";
    alone(test, &[RATES, TWO_GPUS], |fake| {
        let slows = || shares(fake, Direction::HostToDevice, "h2d.0");
        in_one_of_three([EVEN, 1.0 - SLOW.end..1.0 - SLOW.start, EVEN], slows);
    });
}

#[test]
fn copies_in_a_callers_stream_follow_too() {
    alone("adaptive::copies_in_a_callers_stream_follow_too", &[RATES, TWO_GPUS], |fake| {
        let site = Site::new(fake, Direction::HostToDevice, None);
        let stream = Stream::new(site.memory.device()).unwrap();
        let _current = site.memory.device().enter().unwrap();
        let copies = site.world.copier.stream_copies();
        let relayed = || copies.counters().relayed_bytes.load(Ordering::Relaxed);
        let copy = || {
            let before = relayed();
            let piece = Piece { from: site.host.address(), to: site.memory.address(), bytes: BYTES };
            // SAFETY: the memory outlives the stream's work.
            unsafe { copies.copy(&[piece], stream.handle()).unwrap() };
            stream.synchronize().unwrap();
            (relayed() - before) as f64 / BYTES as f64
        };
        in_one_of_three([SLOW], || {
            fake.control("rates h2d.1=0.3");
            (0..4).for_each(|_| _ = copy());
            fake.control("rates h2d.1=0.075");
            (0..2).for_each(|_| _ = copy());
            [copy()]
        });
    });
}

#[test]
fn a_dead_link_gets_nothing_and_its_bytes_come_when_it_lives_again() {
    let test = "adaptive::a_dead_link_gets_nothing_and_its_bytes_come_when_it_lives_again";
    alone(test, &[RATES, TWO_GPUS], |fake| {
        let site = Site::new(fake, Direction::HostToDevice, None);
        site.copy(Direction::HostToDevice, 3);
        fake.control("freeze h2d.1");
        let mut sent = vec![site.send(Direction::HostToDevice)];
        assert!(sent[0].0 > 0.3, "nobody knows yet");
        // It is seen to have begun, and a while later not to have ended.
        for _ in 0..2 {
            sent.push(site.send(Direction::HostToDevice));
            std::thread::sleep(Duration::from_millis(700));
        }
        let later: Vec<_> = (0..4).map(|_| site.send(Direction::HostToDevice)).collect();
        assert!(later.iter().all(|(share, _)| *share == 0.0), "{later:?}");
        fake.control("release h2d.1");
        sent.iter().chain(&later).for_each(|(_, ended)| ended.synchronize().unwrap());
        let share = site.copy(Direction::HostToDevice, 40);
        assert!(share > 0.3, "{share} of a link that lives again");
        site.host.fill(&vec![0; BYTES as usize]);
        let back = site.world.copier.stream_copies().copy_stream(0, Direction::DeviceToHost);
        let site = Site { copy_stream: back.unwrap().unwrap(), ..site };
        site.copy(Direction::DeviceToHost, 1);
        assert!(site.host.bytes() == pattern(7, BYTES));
    });
}

#[test]
fn measuring_costs_a_pair_of_events_for_each_path_and_makes_none() {
    let test = "adaptive::measuring_costs_a_pair_of_events_for_each_path_and_makes_none";
    alone(test, &[TWO_GPUS], |fake| {
        let direction = Direction::HostToDevice;
        let records = |rates| {
            let site = Site::of(fake, direction, rates, 4 * BYTES);
            site.copy(direction, 2);
            let before = [fake.stat("cuEventRecord"), fake.stat("cuEventCreate")];
            let (share, ended) = site.send(direction);
            let after = [fake.stat("cuEventRecord"), fake.stat("cuEventCreate")];
            ended.synchronize().unwrap();
            // Enough for all slots of the relay, which have an event each, whatever it measured.
            assert!(share > 0.3, "{share}");
            // One event is the test's own.
            assert_eq!(after[1] - before[1], 1);
            (after[0] - before[0], share)
        };
        let (measured, fixed) = (records(None), records(Some(Rates::default().fixed())));
        assert_eq!(measured.0, fixed.0 + 4, "{measured:?} {fixed:?}");
    });
}

#[test]
fn what_paths_carry_is_told_for_each_of_them() {
    alone("adaptive::what_paths_carry_is_told_for_each_of_them", &[RATES, TWO_GPUS], |fake| {
        let site = Site::new(fake, Direction::HostToDevice, None);
        // The driver of the tests keeps 0.3 GB/s as well as a busy machine lets it.
        in_one_of_three([0.2e9..0.45e9, 0.2e9..0.45e9], || {
            site.copy(Direction::HostToDevice, 4);
            let rates = site.world.copier.stream_copies().path_rates();
            let measured: Vec<_> = rates.iter().filter(|rate| rate.is_measured).collect();
            assert_eq!((rates.len(), measured.len()), (8, 2), "{rates:?}");
            for (over, rate) in (0..).zip(&measured) {
                assert_eq!((rate.gpu, rate.direction, rate.over), (0, Direction::HostToDevice, over));
            }
            [measured[0].bytes_per_s, measured[1].bytes_per_s]
        });
    });
}
