//! The mover thread with real threads and memory: callers get exactly one end, whatever links do.

#![allow(clippy::unwrap_used)]

use forebay_transfer::{
    Class, Completion, End, HostBuffer, Limits, Link, LinkOp, LinkSpec, Memory, MoverHandle, MoverThread,
    Outcome, PathSpec, Place, RaisableClass, Reason, Refused, RegionId, Span, SpanPair, Transfer,
};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const HOST: Place = Place::Host(0);
const DEVICE: Place = Place::Device(0);

/// Copies on the mover thread itself: the simplest link that keeps the contract.
struct PlainCopy;

impl Link for PlainCopy {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        for pair in &op.pairs {
            let (from, len) = memory.host(&pair.from).unwrap();
            let (to, _) = memory.host(&pair.to).unwrap();
            // SAFETY: both ranges were resolved for this operation, which owns them, and lie in
            // different regions.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
        }
        done.finish(Outcome::Moved { bytes: op.bytes });
    }
}

/// Drops what it is given.
struct Forgetful;

impl Link for Forgetful {
    fn start(&mut self, _: LinkOp, _: &Arc<Memory>, _: Completion) {}
}

/// Hands every operation to the test.
struct Held(mpsc::Sender<(LinkOp, Completion)>);

impl Link for Held {
    fn start(&mut self, op: LinkOp, _: &Arc<Memory>, done: Completion) {
        self.0.send((op, done)).unwrap();
    }
}

struct World {
    thread: MoverThread,
    mover: MoverHandle,
    buffers: [Arc<HostBuffer>; 2],
    regions: [RegionId; 2],
}

fn world(bytes: usize, link: Box<dyn Link>, spec: LinkSpec) -> World {
    let thread = MoverThread::spawn(Limits::default()).unwrap();
    let mover = thread.handle();
    let buffers = [HOST, DEVICE].map(|_| Arc::new(HostBuffer::new(bytes)));
    let regions =
        [0, 1].map(|side| mover.register([HOST, DEVICE][side], Arc::clone(&buffers[side]) as _).unwrap());
    let id = mover.add_link(spec, link).unwrap();
    mover.add_path(PathSpec::direct(HOST, DEVICE, id)).unwrap().unwrap();
    World { thread, mover, buffers, regions }
}

impl World {
    fn transfer(&self, offset: u64, len: u64) -> Transfer {
        let [from, to] = self.regions.map(|region| Span::new(region, offset, len));
        Transfer::new(vec![SpanPair::new(from, to)], Class::Demand)
    }
}

fn spec() -> LinkSpec {
    LinkSpec::new("link", 4, 1 << 30)
}

#[test]
fn transfers_from_many_threads_each_end_once_with_their_bytes_in_place() {
    let (threads, each, len) = (4, 200, 64);
    let world = world(threads * each * len, Box::new(PlainCopy), spec());
    let bytes: Vec<u8> = (0..threads * each * len).map(|at| (at * 31 % 251) as u8).collect();
    world.buffers[0].write(0, &bytes);
    let (ends, received) = mpsc::channel();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (world, ends) = (&world, ends.clone());
            scope.spawn(move || {
                for nth in 0..each {
                    let ends = ends.clone();
                    let transfer = world.transfer(((thread * each + nth) * len) as u64, len as u64);
                    world.mover.submit(transfer, move |end| ends.send(end).unwrap()).unwrap();
                }
            });
        }
    });
    drop(ends);
    let ends: Vec<End> = received.iter().collect();
    assert_eq!(ends, vec![End::Done { bytes: len as u64 }; threads * each]);
    let mut moved = vec![0; bytes.len()];
    world.buffers[1].read(0, &mut moved);
    assert!(moved == bytes);
}

#[test]
fn an_operation_that_a_link_forgets_fails_and_is_not_waited_for() {
    let world = world(100, Box::new(Forgetful), spec());
    let End::Failed(failure) = world.mover.run(world.transfer(0, 100)).unwrap() else { panic!() };
    assert!(matches!(failure.reason, Reason::Link { attempts: 4, .. }), "{:?}", failure.reason);
    assert_eq!(failure.moved_bytes, 0);
}

#[test]
fn a_refusal_arrives_as_the_end() {
    let world = world(100, Box::new(PlainCopy), spec());
    let End::Failed(failure) = world.mover.run(world.transfer(1, 100)).unwrap() else { panic!() };
    assert!(matches!(failure.reason, Reason::Refused(Refused::OutOfBounds { .. })));
}

#[test]
fn a_region_is_not_forgotten_while_a_link_may_touch_it() {
    let (sender, held) = mpsc::channel();
    let world = world(100, Box::new(Held(sender)), spec());
    let (ends, received) = mpsc::channel();
    world.mover.submit(world.transfer(0, 100), move |end| ends.send(end).unwrap()).unwrap();
    let (op, done) = held.recv().unwrap();
    assert!(matches!(world.mover.unregister(world.regions[1]).unwrap(), Err(Refused::RegionInUse { .. })));
    done.finish(Outcome::Moved { bytes: op.bytes });
    received.recv().unwrap();
    world.mover.unregister(world.regions[1]).unwrap().unwrap();
}

#[test]
fn a_cancelled_transfer_ends_when_its_operation_does_and_not_before() {
    let (sender, held) = mpsc::channel();
    let world = world(100, Box::new(Held(sender)), spec());
    let (ends, received) = mpsc::channel();
    let submitted = world.mover.submit(world.transfer(0, 100), move |end| ends.send(end).unwrap()).unwrap();
    let (op, done) = held.recv().unwrap();
    world.mover.cancel(submitted);
    assert!(received.recv_timeout(Duration::from_millis(50)).is_err());
    done.finish(Outcome::Moved { bytes: op.bytes });
    assert_eq!(received.recv().unwrap(), End::Cancelled { moved_bytes: 100, quarantined: Vec::new() });
}

#[test]
fn an_operation_that_overruns_its_limit_is_quarantined_until_it_completes() {
    let (sender, held) = mpsc::channel();
    let world = world(100, Box::new(Held(sender)), LinkSpec { op_timeout_us: 20_000, ..spec() });
    let (quiet, quieted) = mpsc::channel();
    world.mover.on_quiet(move |spans| quiet.send(spans.to_vec()).unwrap()).unwrap();
    let End::Failed(failure) = world.mover.run(world.transfer(0, 100)).unwrap() else { panic!() };
    assert!(matches!(failure.reason, Reason::TimedOut { timeout_us: 20_000, .. }));
    assert!(quieted.try_recv().is_err());
    let (op, done) = held.recv().unwrap();
    done.finish(Outcome::Moved { bytes: op.bytes });
    assert_eq!(quieted.recv().unwrap(), failure.quarantined);
}

#[test]
fn what_has_not_ended_when_the_mover_does_fails_and_names_what_a_link_has_not_let_go_of() {
    let (sender, held) = mpsc::channel();
    let world = world(100, Box::new(Held(sender)), LinkSpec::new("link", 1, 1 << 30));
    let (ends, received) = mpsc::channel();
    for at in 0..3 {
        let ends = ends.clone();
        world.mover.submit(world.transfer(at, 1), move |end| ends.send((at, end)).unwrap()).unwrap();
    }
    let _under_way = held.recv().unwrap();
    drop(world.thread);
    drop(ends);
    let mut ends: Vec<_> = received.iter().collect();
    ends.sort_by_key(|(at, _)| *at);
    let spans = |at| world.regions.map(|region| Span::new(region, at, 1));
    for (at, end) in ends.iter() {
        let [from, to] = spans(*at);
        let End::Failed(failure) = end else { panic!("{end:?}") };
        assert_eq!(
            (&failure.reason, &failure.unmoved[..]),
            (&Reason::Closed, &[SpanPair::new(from, to)][..])
        );
        let under_way = if *at == 0 { spans(0).to_vec() } else { Vec::new() };
        assert_eq!(failure.quarantined, under_way);
    }
    assert_eq!(ends.len(), 3);
    let late = world.mover.submit(Transfer::new(Vec::new(), Class::Demand), |_| ());
    assert!(late.is_err());
}

/// Copies on a thread of its own, which goes on to its end when the link is dropped.
struct Behind(mpsc::Sender<(LinkOp, Completion)>, Option<std::thread::JoinHandle<()>>);

impl Link for Behind {
    fn start(&mut self, op: LinkOp, _: &Arc<Memory>, done: Completion) {
        self.0.send((op, done)).unwrap();
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.0 = mpsc::channel().0;
        self.1.take().unwrap().join().unwrap();
    }
}

#[test]
fn what_a_link_completes_while_the_mover_ends_is_done() {
    let (sender, received) = mpsc::channel::<(LinkOp, Completion)>();
    let thread = std::thread::spawn(move || {
        for (op, done) in received {
            std::thread::sleep(Duration::from_millis(20));
            done.finish(Outcome::Moved { bytes: op.bytes });
        }
    });
    let world = world(100, Box::new(Behind(sender, Some(thread))), spec());
    let (ends, received) = mpsc::channel();
    world.mover.submit(world.transfer(0, 100), move |end| ends.send(end).unwrap()).unwrap();
    drop(world.thread);
    assert_eq!(received.try_recv(), Ok(End::Done { bytes: 100 }));
}

/// Wraps a link and changes each target before anybody learns that it arrived.
struct Wrapped<L>(L);

impl<L: Link> Link for Wrapped<L> {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let (target, memory_then) = (op.pairs[0].to, Arc::clone(memory));
        let done = done.inspect(move |outcome| {
            assert!(matches!(outcome, Outcome::Moved { .. }));
            let (to, _) = memory_then.host(&target).unwrap();
            // SAFETY: the operation that owns the target is not finished yet.
            unsafe { *to.as_ptr() ^= 0xff };
        });
        self.0.start(op, memory, done);
    }
}

#[test]
fn an_inspector_runs_before_the_transfer_ends() {
    let world = world(100, Box::new(Wrapped(PlainCopy)), spec());
    assert_eq!(world.mover.run(world.transfer(0, 100)).unwrap(), End::Done { bytes: 100 });
    let mut first = [0];
    world.buffers[1].read(0, &mut first);
    assert_eq!(first, [0xff]);
}

#[test]
fn a_class_is_raised_before_its_transfer_is_submitted_and_while_that_waits() {
    for raised_first in [true, false] {
        let (sender, held) = mpsc::channel();
        let world = world(300, Box::new(Held(sender)), LinkSpec::new("link", 1, 1 << 30));
        let (ends, received) = mpsc::channel();
        let tell = |name: &'static str| {
            let ends = ends.clone();
            move |_| ends.send(name).unwrap()
        };
        world.mover.submit(world.transfer(0, 100), tell("first")).unwrap();
        let class = RaisableClass::new(&world.mover, Class::Prefetch);
        if raised_first {
            class.raise(Class::Demand);
        }
        class.submit(world.transfer(100, 100), tell("raised")).unwrap();
        world.mover.submit(world.transfer(200, 100), tell("last")).unwrap();
        class.raise(Class::Demand);
        class.raise(Class::Scrub);
        assert_eq!(class.get(), Class::Demand);
        for name in ["first", "raised", "last"] {
            let (op, done) = held.recv().unwrap();
            done.finish(Outcome::Moved { bytes: op.bytes });
            assert_eq!(received.recv().unwrap(), name);
        }
    }
}
