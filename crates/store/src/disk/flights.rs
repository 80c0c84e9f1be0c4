//! Operations under way: which I/Os of which operation wait, are with the kernel or have ended. An
//! operation ends once, when none of its I/Os is with the kernel any more. This file is a state
//! machine that is told results and says what to request next; it must never perform an I/O or know
//! whom an operation belongs to.

use super::kernel::{Action, Completed, Request};
use super::plan::Plan;
use super::progress::{FaultKind, Next, Progress};
use super::stats::DiskStats;
use std::collections::VecDeque;
use thiserror::Error;

/// Plans kept for reuse at most.
const SPARE_PLANS: usize = 64;

/// Why an operation failed: its first I/O that did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{} {left_bytes} bytes at file offset {offset}: {kind}", verb(.action))]
pub struct DiskFault {
    /// What was tried.
    pub action: Action,
    /// Where in the file.
    pub offset: u64,
    /// How much of the I/O was left.
    pub left_bytes: u64,
    /// What happened.
    pub kind: FaultKind,
}

fn verb(action: &Action) -> &'static str {
    match action {
        Action::Read => "reading",
        Action::Write => "writing",
    }
}

/// Operations that have not ended, tagged with what their owner needs to know.
#[derive(Debug)]
pub(crate) struct Flights<T> {
    ops: Vec<Option<Op<T>>>,
    free: Vec<u32>,
    /// I/Os to start: retries first, then in the order of arrival.
    waiting: VecDeque<Key>,
    with_kernel: usize,
    depth: usize,
    block_bytes: u64,
    ended: VecDeque<(T, Result<u64, DiskFault>)>,
    spare: Vec<Plan>,
    pub stats: DiskStats,
}

/// Names an I/O: the operation's place in the table and the I/O's in the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    op: u32,
    io: u32,
}

impl Key {
    fn packed(self) -> u64 {
        u64::from(self.op) << 32 | u64::from(self.io)
    }

    fn unpacked(key: u64) -> Key {
        Key { op: (key >> 32) as u32, io: key as u32 }
    }
}

#[derive(Debug)]
struct Op<T> {
    tag: T,
    action: Action,
    bytes: u64,
    plan: Plan,
    progress: Vec<Progress>,
    /// I/Os that wait or are with the kernel.
    left: usize,
    fault: Option<DiskFault>,
}

impl<T> Flights<T> {
    /// Up to `depth` I/Os are with the kernel at a time. The device can continue an I/O at
    /// multiples of `block_bytes`.
    pub fn new(depth: usize, block_bytes: u64) -> Flights<T> {
        Flights {
            ops: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            with_kernel: 0,
            depth,
            block_bytes,
            ended: VecDeque::new(),
            spare: Vec::new(),
            stats: DiskStats::default(),
        }
    }

    /// Whether every operation has ended and was taken.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.ops.len() && self.ended.is_empty()
    }

    /// An empty plan.
    pub fn spare_plan(&mut self) -> Plan {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes back a plan that is not needed any more.
    pub fn recycle(&mut self, mut plan: Plan) {
        if self.spare.len() < SPARE_PLANS {
            plan.clear();
            self.spare.push(plan);
        }
    }

    /// Takes in a read or write.
    pub fn add(&mut self, tag: T, action: Action, plan: Plan) {
        let progress: Vec<_> = plan.ios().iter().map(|io| Progress::new(action, io.bytes)).collect();
        let bytes = plan.ios().iter().map(|io| io.bytes).sum();
        let left = progress.len();
        let op = Op { tag, action, bytes, plan, progress, left, fault: None };
        let index = self.free.pop().unwrap_or_else(|| {
            self.ops.push(None);
            self.ops.len() as u32 - 1
        });
        self.ops[index as usize] = Some(op);
        self.waiting.extend((0..left as u32).map(|io| Key { op: index, io }));
        if left == 0 {
            self.end(index);
        }
    }

    /// The next request to hand to the kernel, if one waits and the kernel has room. Its slices
    /// stay valid until the key is [completed](Flights::complete) or the table is dropped.
    pub fn next(&mut self) -> Option<(u64, Request)> {
        if self.with_kernel == self.depth {
            return None;
        }
        let key = self.waiting.pop_front()?;
        let request = self.op(key)?.request(key.io as usize)?;
        self.with_kernel += 1;
        Some((key.packed(), request))
    }

    /// Takes in how a request ended. A key that is not with the kernel is ignored.
    pub fn complete(&mut self, completed: Completed) {
        let key = Key::unpacked(completed.key);
        let block_bytes = self.block_bytes;
        let Some(op) = self.op(key) else { return };
        let Some(progress) = op.progress.get_mut(key.io as usize) else { return };
        let next = progress.take(completed.result, block_bytes);
        match next {
            Next::Continue { bytes } => op.plan.advance(key.io as usize, bytes),
            Next::Fail(kind) => op.fault = op.fault.or(Some(op.fault_of(key.io as usize, kind))),
            Next::Done | Next::Again => {}
        }
        let has_failed = op.fault.is_some();
        self.with_kernel -= 1;
        self.stats.count(&next);
        match next {
            Next::Again | Next::Continue { .. } if !has_failed => self.waiting.push_front(key),
            _ => self.io_ended(key, has_failed),
        }
    }

    /// The next operation that ended, with its bytes.
    pub fn next_ended(&mut self) -> Option<(T, Result<u64, DiskFault>)> {
        self.ended.pop_front()
    }

    fn op(&mut self, key: Key) -> Option<&mut Op<T>> {
        self.ops.get_mut(key.op as usize)?.as_mut()
    }

    /// Notes the end of an I/O; that of a failed operation takes with it what had not started.
    fn io_ended(&mut self, key: Key, has_failed: bool) {
        let mut ended = 1;
        if has_failed {
            let waiting = self.waiting.len();
            self.waiting.retain(|other| other.op != key.op);
            ended += waiting - self.waiting.len();
        }
        let Some(op) = self.op(key) else { return };
        op.left -= ended;
        if op.left == 0 {
            self.end(key.op);
        }
    }

    fn end(&mut self, index: u32) {
        let Some(op) = self.ops[index as usize].take() else { return };
        self.free.push(index);
        self.recycle(op.plan);
        if op.fault.is_none() {
            self.stats.moved(op.action, op.bytes);
        }
        self.ended.push_back((op.tag, op.fault.map_or(Ok(op.bytes), Err)));
    }
}

impl<T> Op<T> {
    fn request(&self, io: usize) -> Option<Request> {
        let io = self.plan.ios().get(io)?;
        let slices = self.plan.slices(io);
        let (offset, slice_count) = (io.offset, slices.len() as u32);
        Some(Request { action: self.action, offset, slices: slices.as_ptr(), slice_count })
    }

    fn fault_of(&self, io: usize, kind: FaultKind) -> DiskFault {
        let offset = self.plan.ios().get(io).map_or(0, |io| io.offset);
        let left_bytes = self.progress.get(io).map_or(0, |progress| progress.left_bytes());
        DiskFault { action: self.action, offset, left_bytes, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{DISK_ALIGN_BYTES, Piece};
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::ptr::NonNull;

    const PAGE: u64 = DISK_ALIGN_BYTES;

    fn plan(first_page: u64, ios: u64, pages: u64) -> Plan {
        let mut plan = Plan::default();
        for io in 0..ios {
            let address =
                NonNull::new(std::ptr::without_provenance_mut(((1 << 20) + io * 4096) as usize)).unwrap();
            let offset = (first_page + io * (pages + 1)) * PAGE;
            plan.push(Piece { offset, address, len: (pages * PAGE) as usize }, u64::MAX / PAGE * PAGE)
                .unwrap();
        }
        plan
    }

    fn complete(flights: &mut Flights<u32>, key: u64, result: i32) {
        flights.complete(Completed { key, result });
    }

    #[test]
    fn an_operation_ends_when_its_last_io_does() {
        let mut flights = Flights::new(8, 512);
        flights.add(7, Action::Read, plan(0, 2, 1));
        let (first, second) = (flights.next().unwrap(), flights.next().unwrap());
        assert!(flights.next().is_none());
        complete(&mut flights, second.0, 4096);
        assert!(flights.next_ended().is_none());
        complete(&mut flights, first.0, 4096);
        assert_eq!(flights.next_ended(), Some((7, Ok(8192))));
        assert!(flights.is_empty());
    }

    #[test]
    fn the_kernel_never_has_more_than_the_depth() {
        let mut flights = Flights::new(3, 512);
        flights.add(0, Action::Write, plan(0, 10, 1));
        let mut with_kernel: Vec<u64> = std::iter::from_fn(|| flights.next()).map(|(key, _)| key).collect();
        assert_eq!(with_kernel.len(), 3);
        complete(&mut flights, with_kernel.remove(0), 4096);
        assert!(flights.next().is_some() && flights.next().is_none());
    }

    #[test]
    fn a_failed_operation_starts_nothing_more_and_ends_when_it_is_quiet() {
        let mut flights = Flights::new(2, 512);
        flights.add(1, Action::Write, plan(0, 5, 1));
        let (first, second) = (flights.next().unwrap().0, flights.next().unwrap().0);
        complete(&mut flights, first, -libc::EIO);
        assert!(flights.next().is_none(), "the rest of a failed operation was started");
        assert!(flights.next_ended().is_none(), "ended while an I/O was with the kernel");
        complete(&mut flights, second, 4096);
        assert!(flights.next().is_none());
        let (tag, end) = flights.next_ended().unwrap();
        let fault = end.unwrap_err();
        assert_eq!((tag, fault.action, fault.offset, fault.left_bytes), (1, Action::Write, 0, 4096));
        assert!(fault.to_string().starts_with("writing 4096 bytes at file offset 0: the device failed"));
        assert!(flights.is_empty());
    }

    /// How a kernel answers: a share of the request in 512-byte blocks, or an error.
    #[derive(Debug, Clone)]
    enum Answer {
        Share(u64),
        Errno(i32),
    }

    fn any_answer() -> impl Strategy<Value = Answer> {
        prop_oneof![
            4 => Just(Answer::Share(u64::MAX)),
            4 => (0u64..20).prop_map(Answer::Share),
            2 => Just(Answer::Errno(libc::EINTR)),
            1 => Just(Answer::Errno(libc::EIO)),
        ]
    }

    proptest! {
        /// A random kernel completes in random order with short results and errors. Success means
        /// that each byte of the operation was moved; every operation ends once, and never while
        /// the kernel has something of it.
        #[test]
        fn success_means_every_byte_and_each_operation_ends_once(
            ops in proptest::collection::vec((1u64..6, 1u64..6), 1..12),
            depth in 1usize..8,
            answers in proptest::collection::vec((any_answer(), any::<usize>()), 0..300),
        ) {
            let mut flights = Flights::new(depth, 512);
            let mut moved: BTreeMap<u64, u64> = BTreeMap::new();
            for (tag, (ios, pages)) in ops.iter().enumerate() {
                flights.add(tag as u32, Action::Read, plan(1_000 * tag as u64, *ios, *pages));
            }
            let mut with_kernel: Vec<(u64, Request, u64)> = Vec::new();
            let mut ended = BTreeMap::new();
            let finish = (Answer::Share(u64::MAX), 0);
            for (answer, pick) in answers.into_iter().chain(std::iter::repeat(finish)) {
                while let Some((key, request)) = flights.next() {
                    // SAFETY: the table keeps the slices of a request that has not completed.
                    let slices = unsafe { std::slice::from_raw_parts(request.slices, request.slice_count as usize) };
                    let bytes = slices.iter().map(|slice| slice.iov_len as u64).sum();
                    with_kernel.push((key, request, bytes));
                }
                prop_assert!(with_kernel.len() <= depth);
                while let Some((tag, end)) = flights.next_ended() {
                    prop_assert!(with_kernel.iter().all(|(_, request, _)| request.offset / PAGE / 1_000 != u64::from(tag)));
                    prop_assert!(ended.insert(tag, end).is_none());
                }
                if with_kernel.is_empty() {
                    break;
                }
                let (key, request, bytes) = with_kernel.swap_remove(pick % with_kernel.len());
                let result = match answer {
                    Answer::Share(blocks) => blocks.saturating_mul(512).min(bytes) as i32,
                    Answer::Errno(errno) => -errno,
                };
                *moved.entry(request.offset / PAGE / 1_000).or_default() += result.max(0) as u64;
                complete(&mut flights, key, result);
            }
            prop_assert!(flights.is_empty());
            prop_assert_eq!(ended.len(), ops.len());
            for (tag, end) in ended {
                let (ios, pages) = ops[tag as usize];
                let wanted = ios * pages * PAGE;
                if let Ok(bytes) = end {
                    prop_assert_eq!(bytes, wanted);
                    prop_assert_eq!(moved[&u64::from(tag)], wanted);
                }
            }
        }
    }
}
