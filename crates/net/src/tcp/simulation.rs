//! Both ends of a flow over a wire that a test can cut, damage, slow down and freeze at any byte,
//! with real memory at both ends. Nothing here sleeps or knows a socket.
#![allow(clippy::unwrap_used)]

mod calls;
mod hostile;
mod tests;

use super::call::{CallEnd, CallError};
use super::carrier::{Ready, Wire};
use super::command::{Command, Section};
use super::connection::{Connection, Role};
use super::error::{BadFrame, Broken, VERSION};
use super::export::{Access, OpKind, Piece, Stretch};
use super::exports::Exports;
use super::frame::Frame;
use super::greeting::{Hello, Identity};
use super::leases::{LeaseTable, LeasedSpan};
use super::payload::Payload;
use super::requester::{Operation, Requester};
use super::responder::Responder;
use super::runs::runs;
use super::service::{CallSession, Reply, Service};
use forebay_transfer::SplitMix;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Backing, HostBuffer, Outcome};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

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
    /// What it has carried, if somebody wants to know.
    log: Option<Vec<u8>>,
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

impl End {
    /// As a socket: a little room does not count.
    fn ready(&self) -> Ready {
        let pipe = self.out.lock();
        let free = pipe.room - pipe.bytes.len();
        Ready { readable: true, writable: free > pipe.room / 3, reset: false }
    }
}

impl Wire for End {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut pipe = self.out.lock();
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
                pipe.log.iter_mut().for_each(|log| log.push(*byte));
                pipe.carried += 1;
                sent += 1;
            }
        }
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut pipe = self.back.lock();
        let most = pipe.bytes.len().min(1 + self.dice.below(60_000) as usize);
        let mut received = 0;
        for slice in slices {
            let len = slice.iov_len.min(most - received);
            let part: Vec<u8> = pipe.bytes.drain(..len).collect();
            // SAFETY: the caller says that the slices are writable; `part` is no longer than the
            // slice.
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

/// Answers a call with its bytes turned round: at once, or when the test says so, or by a refusal.
#[derive(Default)]
struct Mirror {
    kept: Mutex<Vec<(Vec<u8>, Reply)>>,
    called: Mutex<Vec<(Identity, Vec<u8>)>>,
}

fn mirrored(body: &[u8]) -> Vec<u8> {
    body.iter().rev().copied().collect()
}

impl Service for Mirror {
    fn call(&self, from: Identity, body: Vec<u8>, reply: Reply) {
        self.called.lock().push((from, body.clone()));
        match body.first().map_or(0, |byte| byte % 3) {
            0 => reply.send(mirrored(&body)),
            1 => reply.refuse(format!("{} bytes", body.len())),
            _ => self.kept.lock().push((body, reply)),
        }
    }

    fn gone(&self, _from: Identity) {}
}

/// An operation of the test: spans (ours, theirs, length).
#[derive(Clone)]
struct Plan {
    op_kind: OpKind,
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
    mirror: Arc<Mirror>,
    now_us: u64,
    ended: HashMap<u64, Outcome>,
    replies: HashMap<u64, CallEnd>,
    generation: u64,
    leases: LeaseTable,
    lease: u64,
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

fn asking(hello: Hello) -> Connection<Requester> {
    let requester = Requester::new(hello, 1_000_000, 0);
    Connection::new(requester, LIMIT_US, 0)
}

fn owning(exports: &Arc<Exports>, mirror: &Arc<Mirror>) -> Connection<Responder> {
    let authenticator = Box::new(|_: &Hello| Ok(()));
    let session = CallSession::new(Some(Arc::clone(mirror) as _), || {});
    let responder = Responder::new(identity(2), Arc::clone(exports), authenticator, session, LIMIT_US);
    Connection::new(responder, LIMIT_US, 0)
}

impl World {
    fn new(seed: u64) -> World {
        World::with(seed, Access::OPEN, hello())
    }

    fn with(seed: u64, access: Access, hello: Hello) -> World {
        let mut dice = SplitMix(seed);
        let room = 1 + dice.below(300_000) as usize;
        let pipe = || Arc::new(Mutex::new(Pipe { room, ..Pipe::default() }));
        let (there, back) = (pipe(), pipe());
        let leases = LeaseTable::default();
        let exports = Arc::new(Exports::new(leases.clone()));
        let theirs = noise(seed + 1);
        let region = exports.offer(KEY, Arc::clone(&theirs) as _, access).unwrap();
        let spans = vec![LeasedSpan { region, offset: 0, len: region.len }];
        let lease = leases.grant([1; 16], spans, u64::MAX, |_| {}).unwrap();
        let mirror = Arc::new(Mirror::default());
        World {
            asking: asking(hello),
            owning: owning(&exports, &mirror),
            asking_end: End { out: Arc::clone(&there), back: Arc::clone(&back), dice: SplitMix(dice.draw()) },
            owning_end: End { out: back, back: there, dice: SplitMix(dice.draw()) },
            asking_broken: None,
            owning_broken: None,
            ours: noise(seed + 2),
            theirs,
            exports,
            mirror,
            now_us: 0,
            ended: HashMap::new(),
            replies: HashMap::new(),
            generation: region.generation,
            leases,
            lease,
        }
    }

    /// A world in which so many operations were asked for, with what they are.
    fn asked(seed: u64, operations: u64) -> (World, Vec<Plan>) {
        let (mut world, plans) = (World::new(seed), plans(seed, operations));
        world.submit_all(&plans);
        (world, plans)
    }

    fn submit_all(&mut self, plans: &[Plan]) {
        for plan in plans {
            self.submit(plan, u64::MAX);
        }
    }

    fn submit(&mut self, plan: &Plan, deadline_us: u64) -> u64 {
        let runs = runs(plan.spans.iter().map(|(_, theirs, len)| (*theirs, *len)));
        let section = Section { key: KEY, generation: self.generation, lease: self.lease, runs };
        let piece = |(ours, _, len): &(u64, u64, u64)| {
            assert!(ours + len <= BYTES as u64);
            // SAFETY: checked above.
            let start = unsafe { self.ours.as_ptr().add(*ours as usize) };
            Stretch::Host(Piece { start: NonNull::new(start).unwrap(), len: *len as usize })
        };
        // SAFETY: the world keeps the buffer as long as the connection.
        let payload = unsafe { Payload::new(plan.spans.iter().map(piece).collect(), Arc::new([])) };
        let command = Command { sections: vec![section] };
        self.asking
            .role
            .submit(self.now_us, Operation { op_kind: plan.op_kind, command, payload, deadline_us })
    }

    fn step_asking(&mut self) {
        if self.asking_broken.is_none() {
            let ready = self.asking_end.ready();
            let pumped = self.asking.pump(self.now_us, &mut self.asking_end, ready);
            if let Err(broken) = pumped {
                // As a socket that is reset: what the peer has not received is thrown away.
                for pipe in [&self.asking_end.out, &self.asking_end.back] {
                    let mut pipe = pipe.lock();
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
        for (number, end) in self.asking.role.calls.take_ended() {
            // Only what was given up may be answered after its end.
            let before = self.replies.insert(number, end);
            let open = matches!(before, None | Some(Err(CallError::Late { .. })));
            assert!(open, "call {number} ended twice");
        }
    }

    fn step_owning(&mut self) {
        if self.owning_broken.is_some() {
            return;
        }
        let ready = self.owning_end.ready();
        if let Err(broken) = self.owning.pump(self.now_us, &mut self.owning_end, ready) {
            for pipe in [&self.owning_end.out, &self.owning_end.back] {
                let mut pipe = pipe.lock();
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

    fn steps(&mut self, count: u64) {
        (0..count).for_each(|_| self.step());
    }

    /// Answers the calls that were kept, the last one first.
    fn answer_kept(&self) {
        let kept = std::mem::take(&mut *self.mirror.kept.lock());
        kept.into_iter().rev().for_each(|(body, reply)| reply.send(mirrored(&body)));
    }

    /// Steps until so many operations have ended.
    fn run(&mut self, operations: usize) {
        self.run_until("operations", |world| world.ended.len() >= operations);
    }

    /// Steps until so many calls have ended. What was kept is answered.
    fn run_calls(&mut self, calls: usize) {
        self.run_until("calls", |world| {
            world.answer_kept();
            world.replies.len() >= calls
        });
    }

    /// Steps until something is over, with time passing quickly when nothing happens any more.
    fn run_until(&mut self, what: &str, mut is_over: impl FnMut(&World) -> bool) {
        for step in 0..1_000_000 {
            if is_over(self) {
                return;
            }
            self.step();
            if step > 20_000 {
                self.now_us += 1_000_000;
            }
        }
        panic!("{} operations and {} calls ended; more {what} should", self.ended.len(), self.replies.len());
    }
}

/// Operations whose spans, of both ends, do not overlap, so that the end of each can be judged by
/// itself.
fn plans(seed: u64, count: u64) -> Vec<Plan> {
    let mut dice = SplitMix(seed);
    let share = BYTES as u64 / count;
    let plan = |number: u64| {
        let op_kind = if dice.below(2) == 0 { OpKind::Read } else { OpKind::Write };
        let pieces = 1 + dice.below(40);
        let slot = share / pieces;
        let span = |piece: u64| {
            let len = 1 + dice.below(slot);
            let ours = number * share + (pieces - 1 - piece) * slot + dice.below(slot - len + 1);
            (ours, number * share + piece * slot + dice.below(slot - len + 1), len)
        };
        Plan { op_kind, spans: (0..pieces).map(span).collect() }
    };
    (0..count).map(plan).collect()
}

/// Targets of operations that succeeded hold the source's bytes; all else, apart from the targets
/// of the others, holds what it held before.
fn judge(world: &World, before: (&[u8], &[u8]), plans: &[Plan]) {
    let (ours, theirs) = (bytes(&world.ours), bytes(&world.theirs));
    let (mut our_old, mut their_old) = (before.0.to_vec(), before.1.to_vec());
    for (number, plan) in (1..).zip(plans) {
        let moved = matches!(world.ended.get(&number), Some(Outcome::Moved { .. }));
        for (our, their, len) in &plan.spans {
            let (our, their) = (*our as usize..(our + len) as usize, *their as usize..(their + len) as usize);
            match (plan.op_kind, moved) {
                (OpKind::Read, true) => our_old[our].copy_from_slice(&before.1[their]),
                (OpKind::Write, true) => their_old[their].copy_from_slice(&before.0[our]),
                (OpKind::Read, false) => our_old[our.clone()].copy_from_slice(&ours[our]),
                (OpKind::Write, false) => their_old[their.clone()].copy_from_slice(&theirs[their]),
            }
        }
    }
    assert!(ours == our_old, "bytes of ours are not those they should be");
    assert!(theirs == their_old, "bytes of theirs are not those they should be");
}

const CALL_LIMIT_US: u64 = 60_000_000;

/// Bodies of calls, of many lengths. The first byte says how the peer answers.
fn bodies(seed: u64, count: u64) -> Vec<Vec<u8>> {
    let mut dice = SplitMix(seed);
    let body = |number: u64| {
        let len = [0, 1, 300, 40_000][dice.below(4) as usize] + dice.below(2);
        (0..len).map(|at| (number + at) as u8).collect()
    };
    (0..count).map(body).collect()
}

/// Runs operations, and calls between them, with mischief, and returns the world, judged: every
/// operation and every call has ended once, as it should.
fn run(seed: u64, operations: u64, calls: u64, mischief: impl FnOnce(&mut World)) -> World {
    let (mut world, plans) = World::asked(seed, operations);
    let before = (bytes(&world.ours), bytes(&world.theirs));
    mischief(&mut world);
    let mut called = Vec::new();
    for body in bodies(seed, calls) {
        // A flow that has ended takes no calls in.
        if world.asking_broken.is_some() {
            break;
        }
        world.asking.role.call(world.now_us, body.clone(), CALL_LIMIT_US);
        called.push(body);
        world.step();
    }
    world.run_calls(called.len());
    world.run(plans.len());
    judge(&world, (&before.0, &before.1), &plans);
    for (number, body) in (1..).zip(&called) {
        match (&world.replies[&number], body.first().map_or(0, |byte| byte % 3)) {
            (Ok(reply), 0 | 2) => assert!(*reply == mirrored(body), "call {number}"),
            (Err(CallError::Refused(why)), 1) => assert_eq!(*why, format!("{} bytes", body.len())),
            (Err(CallError::Broken(broken)), _) => assert_eq!(Some(broken), world.asking_broken.as_ref()),
            (end, kind) => panic!("call {number}, kind {kind}: {end:?}"),
        }
    }
    world
}

fn moved(world: &World) -> usize {
    world.ended.values().filter(|outcome| matches!(outcome, Outcome::Moved { .. })).count()
}
