//! Both ends of a flow over a wire that a test can cut, damage, slow down and freeze at any byte, with real memory at both
//! ends. Nothing here sleeps or knows a socket.
#![allow(clippy::unwrap_used)]

use super::command::{Command, PeerRegion, Section};
use super::connection::{Broken, Connection, Role, Wire};
use super::exports::{Access, Exports, Leases, NoLeases, Wish};
use super::frame::{BadFrame, Frame, VERSION};
use super::greeting::{Hello, Identity};
use super::payload::{Payload, Piece};
use super::requester::{Operation, Patience, Requester};
use super::responder::Responder;
use super::runs::runs;
use forebay_mover::sim::SplitMix;
use forebay_mover::{Backing, HostBuffer, Outcome};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Draws a number below a bound.
trait Below {
    fn below(&mut self, bound: u64) -> u64;
}

impl Below for SplitMix {
    fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }
}

const BYTES: usize = 1 << 20;
const LIMIT_US: u64 = 2_000_000;
const KEY: u64 = 5;

/// One direction of a wire.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    /// Bytes that it holds at most.
    room: usize,
    carried: u64,
    /// The byte whose lowest bit is flipped.
    flip_at: Option<u64>,
    /// Carries no more after so many bytes.
    cut_at: Option<u64>,
}

impl Pipe {
    fn is_cut(&self) -> bool {
        self.cut_at.is_some_and(|at| self.carried >= at)
    }
}

type Shared = Arc<Mutex<Pipe>>;

/// An end of the wire, which sends and receives in parts of random length.
struct End {
    out: Shared,
    back: Shared,
    dice: SplitMix,
}

impl Wire for End {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut pipe = self.out.lock().unwrap();
        let room = (pipe.room - pipe.bytes.len()).min(1 + self.dice.below(60_000) as usize);
        let mut sent = 0;
        for slice in slices {
            let len = slice.iov_len.min(room - sent);
            // SAFETY: the caller says that the slices are readable.
            let bytes = unsafe { std::slice::from_raw_parts(slice.iov_base.cast::<u8>(), len) };
            for byte in bytes {
                if pipe.is_cut() {
                    return if sent > 0 { Ok(sent) } else { Err(io::ErrorKind::ConnectionReset.into()) };
                }
                let flip = u8::from(pipe.flip_at == Some(pipe.carried));
                pipe.bytes.push_back(byte ^ flip);
                pipe.carried += 1;
                sent += 1;
            }
        }
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut pipe = self.back.lock().unwrap();
        let most = pipe.bytes.len().min(1 + self.dice.below(60_000) as usize);
        let mut received = 0;
        for slice in slices {
            let len = slice.iov_len.min(most - received);
            let part: Vec<u8> = pipe.bytes.drain(..len).collect();
            // SAFETY: the caller says that the slices are writable; `part` is no longer than the slice.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), slice.iov_base.cast(), len) };
            received += len;
        }
        match received {
            0 if pipe.is_cut() => Ok(0),
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(received),
        }
    }
}

/// A lease that lives until it is ended.
struct Lease(AtomicBool);

impl Leases for Lease {
    fn is_alive(&self, lease: u64, _region: PeerRegion) -> bool {
        lease == 1 && self.0.load(Ordering::Relaxed)
    }
}

/// An operation of the test: spans (ours, theirs, length).
#[derive(Clone)]
struct Plan {
    wish: Wish,
    spans: Vec<(u64, u64, u64)>,
}

struct World {
    asking: Connection<Requester>,
    owning: Connection<Responder>,
    asking_end: End,
    owning_end: End,
    asking_broken: Option<Broken>,
    owning_broken: Option<Broken>,
    ours: Arc<HostBuffer>,
    theirs: Arc<HostBuffer>,
    exports: Arc<Exports>,
    now_us: u64,
    ended: HashMap<u64, Outcome>,
    generation: u64,
}

fn identity(node: u8) -> Identity {
    Identity { node: [node; 16], instance: [node + 100; 16] }
}

fn hello() -> Hello {
    Hello { versions: (VERSION, VERSION), from: identity(1), to_instance: [0; 16], token: Vec::new() }
}

fn noise(seed: u64) -> Arc<HostBuffer> {
    let buffer = HostBuffer::new(BYTES);
    let mut dice = SplitMix(seed);
    let bytes: Vec<u8> = (0..BYTES / 8).flat_map(|_| dice.draw().to_le_bytes()).collect();
    assert!(buffer.write(0, &bytes));
    Arc::new(buffer)
}

fn bytes(buffer: &HostBuffer) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    assert!(buffer.read(0, &mut bytes));
    bytes
}

impl World {
    fn new(seed: u64) -> World {
        World::over(seed, Arc::new(NoLeases), Access::OPEN, hello())
    }

    fn over(seed: u64, leases: Arc<dyn Leases>, access: Access, hello: Hello) -> World {
        let mut dice = SplitMix(seed);
        let room = 1 + dice.below(300_000) as usize;
        let pipe = || Arc::new(Mutex::new(Pipe { room, ..Pipe::default() }));
        let (there, back) = (pipe(), pipe());
        let exports = Arc::new(Exports::new(leases));
        let theirs = noise(seed + 1);
        let generation = exports.offer(KEY, Arc::clone(&theirs) as _, access).unwrap().generation;
        let doorkeeper = Box::new(|_: &Hello| Ok(()));
        let responder = Responder::new(identity(2), Arc::clone(&exports), doorkeeper, LIMIT_US);
        let requester = Requester::new(hello, Patience { ping_after_us: 1_000_000 }, 0);
        World {
            asking: Connection::new(requester, LIMIT_US, 0),
            owning: Connection::new(responder, LIMIT_US, 0),
            asking_end: End { out: Arc::clone(&there), back: Arc::clone(&back), dice: SplitMix(dice.draw()) },
            owning_end: End { out: back, back: there, dice: SplitMix(dice.draw()) },
            asking_broken: None,
            owning_broken: None,
            ours: noise(seed + 2),
            theirs,
            exports,
            now_us: 0,
            ended: HashMap::new(),
            generation,
        }
    }

    fn submit(&mut self, plan: &Plan, deadline_us: u64) -> u64 {
        let runs = runs(plan.spans.iter().map(|(_, theirs, len)| (*theirs, *len)));
        let section = Section { key: KEY, generation: self.generation, lease: 1, runs };
        let piece = |(ours, _, len): &(u64, u64, u64)| {
            assert!(ours + len <= BYTES as u64);
            // SAFETY: checked above.
            let start = unsafe { self.ours.as_ptr().add(*ours as usize) };
            Piece { start: NonNull::new(start).unwrap(), len: *len as usize }
        };
        // SAFETY: the world keeps the buffer as long as the connection.
        let payload = unsafe { Payload::new(plan.spans.iter().map(piece).collect(), Arc::new([])) };
        let command = Command { sections: vec![section] };
        self.asking.role.submit(self.now_us, Operation { wish: plan.wish, command, payload, deadline_us })
    }

    fn step_asking(&mut self) {
        if self.asking_broken.is_none() {
            let pumped = self.asking.pump(self.now_us, &mut self.asking_end, true);
            if let Err(broken) = pumped {
                // As a socket that is reset: what the peer has not received is thrown away.
                for pipe in [&self.asking_end.out, &self.asking_end.back] {
                    let mut pipe = pipe.lock().unwrap();
                    pipe.cut_at = Some(pipe.carried);
                    pipe.bytes.clear();
                }
                self.asking.role.fail_all(&broken);
                self.asking_broken = Some(broken);
            }
        }
        for (number, outcome) in self.asking.role.take_ended() {
            assert!(self.ended.insert(number, outcome).is_none(), "operation {number} ended twice");
        }
    }

    fn step_owning(&mut self) {
        if self.owning_broken.is_some() {
            return;
        }
        if let Err(broken) = self.owning.pump(self.now_us, &mut self.owning_end, true) {
            for pipe in [&self.owning_end.out, &self.owning_end.back] {
                let mut pipe = pipe.lock().unwrap();
                pipe.cut_at = Some(pipe.carried);
            }
            self.owning_broken = Some(broken);
        }
    }

    fn step(&mut self) {
        self.now_us += 10;
        self.step_asking();
        self.step_owning();
    }

    /// Steps until `count` operations have ended, with time passing quickly when nothing happens any more.
    fn run(&mut self, count: usize) {
        for step in 0..1_000_000 {
            if self.ended.len() >= count {
                return;
            }
            self.step();
            if step > 20_000 {
                self.now_us += 1_000_000;
            }
        }
        panic!("{} of {count} operations ended", self.ended.len());
    }
}

/// Operations whose spans, of both ends, do not overlap, so that the end of each can be judged by itself.
fn plans(seed: u64, count: u64) -> Vec<Plan> {
    let mut dice = SplitMix(seed);
    let share = BYTES as u64 / count;
    let plan = |number: u64| {
        let wish = if dice.below(2) == 0 { Wish::Read } else { Wish::Write };
        let pieces = 1 + dice.below(40);
        let slot = share / pieces;
        let span = |piece: u64| {
            let len = 1 + dice.below(slot);
            let ours = number * share + (pieces - 1 - piece) * slot + dice.below(slot - len + 1);
            (ours, number * share + piece * slot + dice.below(slot - len + 1), len)
        };
        Plan { wish, spans: (0..pieces).map(span).collect() }
    };
    (0..count).map(plan).collect()
}

/// Targets of operations that succeeded hold the source's bytes; all else, apart from the targets of the others, holds
/// what it held before.
fn judge(world: &World, before: (&[u8], &[u8]), plans: &[Plan]) {
    let (ours, theirs) = (bytes(&world.ours), bytes(&world.theirs));
    let (mut our_old, mut their_old) = (before.0.to_vec(), before.1.to_vec());
    for (number, plan) in (1..).zip(plans) {
        let moved = matches!(world.ended.get(&number), Some(Outcome::Moved { .. }));
        for (our, their, len) in &plan.spans {
            let (our, their) = (*our as usize..(our + len) as usize, *their as usize..(their + len) as usize);
            match (plan.wish, moved) {
                (Wish::Read, true) => our_old[our].copy_from_slice(&before.1[their]),
                (Wish::Write, true) => their_old[their].copy_from_slice(&before.0[our]),
                (Wish::Read, false) => our_old[our.clone()].copy_from_slice(&ours[our]),
                (Wish::Write, false) => their_old[their.clone()].copy_from_slice(&theirs[their]),
            }
        }
    }
    assert!(ours == our_old, "bytes of ours are not those they should be");
    assert!(theirs == their_old, "bytes of theirs are not those they should be");
}

/// Runs operations with mischief and returns the world, judged, with every operation ended once.
fn run(seed: u64, count: u64, mischief: impl FnOnce(&mut World)) -> World {
    let mut world = World::new(seed);
    let plans = plans(seed, count);
    let before = (bytes(&world.ours), bytes(&world.theirs));
    mischief(&mut world);
    for plan in &plans {
        world.submit(plan, u64::MAX);
    }
    world.run(plans.len());
    judge(&world, (&before.0, &before.1), &plans);
    world
}

fn moved(world: &World) -> usize {
    world.ended.values().filter(|outcome| matches!(outcome, Outcome::Moved { .. })).count()
}

#[test]
fn reads_and_writes_arrive_whole_whatever_the_wire_cuts_them_into() {
    for seed in 0..30 {
        let count = [1, 2, 40][seed as usize % 3];
        let world = run(seed, count, |_| {});
        assert_eq!(moved(&world) as u64, count, "{:?} {:?}", world.asking_broken, world.owning_broken);
    }
}

#[test]
fn a_connection_lost_at_any_byte_ends_each_operation_once_and_never_says_done_too_early() {
    let whole = run(7, 3, |_| {});
    let carried = |pipe: &Shared| pipe.lock().unwrap().carried;
    let (there, back) = (carried(&whole.asking_end.out), carried(&whole.asking_end.back));
    let mut dice = SplitMix(3);
    // Every byte of the greetings and the first frames, then random ones.
    let there: Vec<u64> = (0..200).chain((0..50).map(|_| dice.below(there))).collect();
    let back: Vec<u64> = (0..200).chain((0..50).map(|_| dice.below(back))).collect();
    for at in there {
        let world = run(7, 3, |world| world.asking_end.out.lock().unwrap().cut_at = Some(at));
        assert!(world.asking_broken.is_some() || moved(&world) == 3);
    }
    for at in back {
        let world = run(7, 3, |world| world.asking_end.back.lock().unwrap().cut_at = Some(at));
        assert!(world.asking_broken.is_some() || moved(&world) == 3);
    }
}

#[test]
fn a_flipped_bit_is_never_taken_for_data() {
    let mut corrupt = 0;
    for seed in 0..150u64 {
        let at = if seed % 3 == 0 { seed } else { SplitMix(seed).below(1 << 18) };
        let world = run(11, 6, |world| {
            let end = &world.asking_end;
            let pipe = if seed % 2 == 0 { &end.out } else { &end.back };
            pipe.lock().unwrap().flip_at = Some(at);
        });
        corrupt += world.ended.values().filter(|outcome| **outcome == Outcome::Corrupt).count();
    }
    assert!(corrupt > 10, "{corrupt} operations were found damaged");
}

#[test]
fn after_a_cancelled_operation_has_ended_nothing_of_it_is_written_anywhere() {
    let mut cancelled = 0;
    for steps in 0..150 {
        let mut world = World::new(steps);
        let plans = plans(steps, 8);
        let before = (bytes(&world.ours), bytes(&world.theirs));
        for plan in &plans {
            world.submit(plan, u64::MAX);
        }
        (0..steps / 4).for_each(|_| world.step());
        world.asking.role.cancel_all("cancelled");
        world.run(plans.len());
        judge(&world, (&before.0, &before.1), &plans);
        cancelled += plans.len() - moved(&world);
        // The sources change and the targets are used for something else: nobody may notice.
        let (ours, theirs) = (bytes(&noise(900)), bytes(&noise(901)));
        assert!(world.ours.write(0, &ours) && world.theirs.write(0, &theirs));
        (0..200).for_each(|_| world.step());
        assert!(bytes(&world.ours) == ours && bytes(&world.theirs) == theirs);
        assert_eq!((&world.asking_broken, &world.owning_broken), (&None, &None), "the flow is still good");
        // And the flow still works.
        world.submit(&plans[0], u64::MAX);
        world.run(plans.len() + 1);
        assert!(matches!(world.ended[&9], Outcome::Moved { .. }));
    }
    assert!(cancelled > 100, "{cancelled} operations were cancelled");
}

#[test]
fn silence_before_a_ping_is_not_a_frozen_peer() {
    let mut world = World::new(1);
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    // As with a limit that is shorter than the time after which a flow asks.
    (0..4).for_each(|_| world.step());
    world.now_us += LIMIT_US + 1;
    (0..4).for_each(|_| world.step());
    assert_eq!(world.asking_broken, None);
}

#[test]
fn a_cancel_is_told_by_the_call_in_which_the_deadline_passes() {
    let mut world = World::new(4);
    (0..100).for_each(|_| world.step());
    let deadline_us = world.now_us + 1_000;
    world.submit(&Plan { wish: Wish::Read, ..plans(4, 1).remove(0) }, deadline_us);
    world.step_asking();
    let told = world.asking_end.out.lock().unwrap().carried;
    world.now_us = deadline_us;
    world.step_asking();
    assert!(world.asking_end.out.lock().unwrap().carried > told, "nothing was told");
}

#[test]
fn a_deadline_ends_an_operation_and_leaves_the_flow_good() {
    let mut world = World::new(4);
    let plans = plans(4, 4);
    world.run(0);
    (0..100).for_each(|_| world.step());
    let deadline_us = world.now_us + 1;
    for plan in &plans {
        world.submit(plan, deadline_us);
    }
    world.run(4);
    let late = world.ended.values().filter(|outcome| matches!(outcome, Outcome::Failed { .. })).count();
    assert!(late > 0, "{:?}", world.ended);
    world.submit(&plans[0], u64::MAX);
    world.run(5);
    assert!(matches!(world.ended[&5], Outcome::Moved { .. }));
}

#[test]
fn a_frozen_peer_is_found_in_time_and_writes_nothing_when_it_thaws() {
    for steps in 0..60 {
        let mut world = World::new(steps);
        let plans = plans(steps, 8);
        for plan in &plans {
            world.submit(plan, u64::MAX);
        }
        (0..steps).for_each(|_| world.step());
        let open = plans.len() - world.ended.len();
        let frozen_us = world.now_us;
        while world.ended.len() < plans.len() {
            world.now_us += 1_000;
            world.step_asking();
            assert!(
                world.now_us <= frozen_us + LIMIT_US + 100_000,
                "frozen for {} us",
                world.now_us - frozen_us
            );
        }
        if open > 0 {
            assert_eq!(world.asking_broken, Some(Broken::Frozen { limit_us: LIMIT_US }));
        }
        let theirs = bytes(&noise(77));
        assert!(world.theirs.write(0, &theirs));
        (0..100).for_each(|_| world.step());
        assert!(bytes(&world.theirs) == theirs, "written after the operation had failed");
    }
}

#[test]
fn an_owner_that_slept_in_the_middle_of_a_write_drops_what_came_late() {
    let mut slept = 0;
    for steps in 1..60 {
        let mut world = World::new(steps);
        world.submit(&Plan { wish: Wish::Write, ..plans(steps, 1).remove(0) }, u64::MAX);
        (0..steps).for_each(|_| world.step());
        world.step_asking();
        if !world.owning.role.awaits() {
            continue;
        }
        // The asking end is gone, and the news of it was lost.
        let theirs = bytes(&world.theirs);
        world.now_us += LIMIT_US;
        world.step_owning();
        assert_eq!(world.owning_broken, Some(Broken::Frozen { limit_us: LIMIT_US }));
        assert!(bytes(&world.theirs) == theirs, "late bytes were written");
        slept += 1;
    }
    assert!(slept > 3, "{slept} owners slept in the middle of a write");
}

#[test]
fn a_slow_peer_is_not_a_frozen_one() {
    let mut world = World::new(2);
    (0..100).for_each(|_| world.step());
    let plans = plans(2, 4);
    for plan in &plans {
        world.submit(plan, u64::MAX);
    }
    for _ in 0..10_000 {
        world.now_us += LIMIT_US / 3;
        world.step_asking();
        if world.now_us % LIMIT_US < LIMIT_US / 3 {
            world.step_owning();
        }
    }
    assert_eq!(moved(&world), 4, "{:?} {:?}", world.asking_broken, world.owning_broken);
}

#[test]
fn an_idle_flow_in_use_finds_a_frozen_peer_and_an_unused_one_is_silent() {
    let mut world = World::new(1);
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    // Both ends live: pings are answered, and stop when the flow is no longer in use.
    let mut wakes = 0;
    for _ in 0..1000 {
        (0..4).for_each(|_| world.step());
        let Some(at_us) = world.asking.next_timeout_us() else { break };
        world.now_us = world.now_us.max(at_us);
        wakes += 1;
    }
    assert!((50..70).contains(&wakes), "{wakes} wake-ups");
    assert_eq!((&world.asking_broken, world.asking.next_timeout_us()), (&None, None));
    // Used again, then frozen.
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(2);
    for _ in 0..100 {
        world.now_us += 50_000;
        world.step_asking();
    }
    assert_eq!(world.asking_broken, Some(Broken::Frozen { limit_us: LIMIT_US }));
}

#[test]
fn a_lease_that_ends_meanwhile_ends_the_operation_without_done() {
    let mut refused = 0;
    for steps in 0..60 {
        let lease = Arc::new(Lease(AtomicBool::new(true)));
        let access = Access { leased: true, ..Access::OPEN };
        let mut world = World::over(steps, Arc::clone(&lease) as _, access, hello());
        let plans = plans(steps, 8);
        for plan in &plans {
            world.submit(plan, u64::MAX);
        }
        (0..steps).for_each(|_| world.step());
        lease.0.store(false, Ordering::Relaxed);
        // What the owner puts into the memory from now on must reach nobody as what was read.
        let before = bytes(&world.theirs);
        assert!(world.theirs.write(0, &bytes(&noise(88))));
        world.run(plans.len());
        let ours = bytes(&world.ours);
        for (number, plan) in (1..).zip(&plans) {
            let read = plan.wish == Wish::Read && matches!(world.ended[&number], Outcome::Moved { .. });
            for (our, their, len) in plan.spans.iter().filter(|_| read) {
                let (our, their) = (*our as usize, *their as usize);
                let len = *len as usize;
                assert!(
                    ours[our..our + len] == before[their..their + len],
                    "bytes of a lease that had ended"
                );
            }
        }
        refused += plans.len() - moved(&world);
        assert_eq!(world.asking_broken, None);
    }
    assert!(refused > 50, "{refused} operations were refused");
}

#[test]
fn a_withdrawn_region_is_quiet_at_once_and_its_operations_fail() {
    let mut failed = 0;
    for steps in 0..60 {
        let mut world = World::new(steps);
        let plans = plans(steps, 8);
        for plan in &plans {
            world.submit(plan, u64::MAX);
        }
        (0..steps).for_each(|_| world.step());
        assert!(world.exports.withdraw(KEY));
        let theirs = bytes(&noise(66));
        assert!(world.theirs.write(0, &theirs));
        world.run(plans.len());
        assert!(bytes(&world.theirs) == theirs, "written after the region was withdrawn");
        assert_eq!((&world.asking_broken, &world.owning_broken), (&None, &None));
        failed += plans.len() - moved(&world);
    }
    assert!(failed > 50, "{failed} operations failed");
}

#[test]
fn a_stale_generation_is_refused() {
    let mut world = World::new(1);
    world.generation += 1;
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    let Outcome::Failed { error } = &world.ended[&1] else { panic!("{:?}", world.ended) };
    assert!(error.contains("StaleGeneration"), "{error}");
}

#[test]
fn another_instance_is_refused() {
    let hello = Hello { to_instance: [3; 16], ..hello() };
    let mut world = World::over(1, Arc::new(NoLeases), Access::OPEN, hello);
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    assert!(matches!(world.owning_broken, Some(Broken::Turned(_))), "{:?}", world.owning_broken);
}

/// What a responder says to frames that a peer may send after its HELLO.
fn hostile(list: impl FnOnce(u64) -> Vec<(u64, Frame)>) -> Option<Broken> {
    let world = World::new(5);
    let bytes = frames(&list(world.generation));
    hostile_bytes(world, &bytes)
}

fn hostile_bytes(mut world: World, bytes: &[u8]) -> Option<Broken> {
    let pipe = Arc::clone(&world.owning_end.back);
    let mut left = bytes;
    for _ in 0..10_000 {
        let mut there = pipe.lock().unwrap();
        let (now, rest) = left.split_at(left.len().min(there.room - there.bytes.len()));
        there.bytes.extend(now);
        left = rest;
        drop(there);
        world.now_us += 10;
        world.step_owning();
        world.owning_end.out.lock().unwrap().bytes.clear();
        if left.is_empty() && world.owning.role.is_idle() {
            break;
        }
    }
    world.owning_broken
}

fn frames(frames: &[(u64, Frame)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame::Hello(hello()).put(0, &mut bytes);
    frames.iter().for_each(|(number, frame)| frame.put(*number, &mut bytes));
    bytes
}

fn command(generation: u64, len: u32) -> Command {
    let runs = runs([(0, len.into())]);
    Command { sections: vec![Section { key: KEY, generation, lease: 0, runs }] }
}

#[test]
fn frames_out_of_order_end_the_connection() {
    let unexpected = |found: Option<Broken>| matches!(found, Some(Broken::Bad(BadFrame::Unexpected { .. })));
    let read = |generation| Frame::Read(command(generation, 10));
    let write = |generation| Frame::Write(command(generation, 10));
    assert_eq!(hostile(|generation| vec![(1, read(generation))]), None);
    assert!(unexpected(hostile(|_| vec![(0, Frame::Hello(hello()))])), "two HELLOs");
    assert!(unexpected(hostile(|_| vec![(0, Frame::Done)])), "an answer from the asking end");
    assert!(unexpected(hostile(|_| vec![(1, Frame::Cancel)])), "a CANCEL of nothing");
    assert!(unexpected(hostile(|of| vec![(2, read(of)), (1, read(of))])), "a number that went back");
    assert!(unexpected(hostile(|of| vec![(1, read(of)), (1, read(of))])), "a duplicate");
    assert!(unexpected(hostile(|of| vec![(1, write(of)), (2, write(of))])), "a WRITE in a WRITE");
    assert!(unexpected(hostile(|of| vec![(1, write(of)), (2, Frame::Data(5))])), "DATA of another operation");
    assert!(unexpected(hostile(|of| vec![(1, write(of)), (1, Frame::Data(11))])), "more DATA than spans");
    let mut before_hello = Vec::new();
    read(1).put(1, &mut before_hello);
    assert!(unexpected(hostile_bytes(World::new(5), &before_hello)), "an operation before the greeting");
    assert_eq!(hostile(|_| (0..100).map(|_| (0, Frame::Ping)).collect()), None);
}

#[test]
fn a_peer_that_takes_no_answers_is_cut_off() {
    let mut world = World::new(5);
    let pings: Vec<_> = (0..100_000).map(|_| (0, Frame::Ping)).collect();
    let bytes = frames(&pings);
    let pipe = Arc::clone(&world.owning_end.back);
    pipe.lock().unwrap().room = bytes.len();
    pipe.lock().unwrap().bytes.extend(&bytes);
    while world.owning_broken.is_none() {
        world.now_us += 10;
        world.step_owning();
    }
    assert!(matches!(world.owning_broken, Some(Broken::Bad(_))), "{:?}", world.owning_broken);
}

#[test]
fn random_frames_never_panic_and_never_reach_memory_that_is_not_offered() {
    let mut dice = SplitMix(17);
    for _ in 0..300 {
        let frame = |dice: &mut SplitMix, generation: u64| {
            let number = dice.below(4);
            let mut command = || command(generation, 1 + dice.below(2 * BYTES as u64) as u32);
            let commands = (Frame::Read(command()), Frame::Write(command()));
            let frame = match dice.below(7) {
                0 => commands.0,
                1 => commands.1,
                2 => Frame::Data(1 + dice.below(1000) as u32),
                3 => Frame::Cancel,
                4 => Frame::Ping,
                5 => Frame::Cancelled,
                _ => Frame::Done,
            };
            (number, frame)
        };
        hostile(|generation| (0..20).map(|_| frame(&mut dice, generation)).collect());
    }
}

#[test]
fn a_responder_waits_for_a_greeting_only_so_long() {
    let mut world = World::new(5);
    world.now_us = LIMIT_US;
    world.step_owning();
    assert!(matches!(world.owning_broken, Some(Broken::Turned(_))));
    assert!(world.owning.role.next_timeout_us().is_some());
}
