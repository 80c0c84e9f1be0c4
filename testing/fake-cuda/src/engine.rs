//! Engines: the threads that carry out operations.
//!
//! Each GPU has four: copies from the host, copies to the host, copies from GPU to GPU or inside of
//! one, and kernels. An engine has several operations in hand and does a slice of each in turn, as
//! streams share a link.

use crate::abi::Code;
use crate::driver::{ENGINES, Locked, State, lock, signals};
use crate::faults::{Flaw, Peers};
use crate::kernels::{Store, Sum, Word, remainder};
use crate::memory::Move;
use crate::op::What;
use crate::stats::Way;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Release};
use std::time::{Duration, Instant};

/// Places in [`ENGINES`].
const FROM_HOST: usize = 0;
const TO_HOST: usize = 1;
const PEER: usize = 2;
const COMPUTE: usize = 3;

/// Bytes that are moved for one operation before another has its turn.
const SLICE_BYTES: u64 = 256 << 10;
/// Moves of one slice at most.
const SLICE_MOVES: usize = 1024;
/// Operations in one engine's hands at most.
const JOBS_MAX: usize = 16;

/// Memory to be filled.
struct Fill {
    at: u64,
    bytes: u64,
    byte: u8,
}

/// An operation in an engine's hands.
struct Job {
    id: u64,
    gpu: usize,
    by_kernel: bool,
    moves: Arc<[Move]>,
    /// The move at hand, and its bytes that are done.
    at: usize,
    done: u64,
    fill: Option<Fill>,
    sums: Vec<Sum>,
    stores: Vec<Store>,
    computes: Duration,
}

/// What an engine does before it looks at the state again.
#[derive(Default)]
struct Slice {
    /// (from, to, bytes), as this process may reach them, and what becomes of them.
    copies: Vec<(u64, u64, usize, Peers)>,
    fill: Option<Fill>,
    sums: Vec<Sum>,
    stores: Vec<Store>,
    flaw: Option<Flaw>,
    until: Option<Instant>,
}

impl State {
    /// An operation may begin: some engine's.
    pub fn give_to_engine(&mut self, id: u64) {
        let Some(op) = self.ops.get(&id) else { return };
        let (gpu, kind) = match &op.what {
            What::Moves { moves, .. } => self.copy_engine(op.gpu, moves.first()),
            _ => (op.gpu, COMPUTE),
        };
        let engine = gpu * ENGINES.len() + kind;
        self.engines[engine].ready.push_back(id);
        if !std::mem::replace(&mut self.engines[engine].running, true) {
            std::thread::spawn(move || run(engine));
        }
        self.wake_engine(engine);
    }

    /// Something has changed for an engine.
    pub fn wake_engine(&self, engine: usize) {
        signals().engines[engine].notify_all();
    }

    /// Copies to and from the host go over the link of the GPU that has the memory, whoever posts
    /// them.
    fn copy_engine(&self, gpu: usize, first: Option<&Move>) -> (usize, usize) {
        let Some(&Move { from, to, .. }) = first else { return (gpu, PEER) };
        match (self.memory.gpu_of(from), self.memory.gpu_of(to)) {
            (None, Some(to)) => (to, FROM_HOST),
            (Some(from), None) => (from, TO_HOST),
            _ => (gpu, PEER),
        }
    }

    /// The ways that bytes take. A kernel's bytes all pass the GPU that runs it.
    fn ways(&self, gpu: usize, by_kernel: bool, from: u64, to: u64) -> Vec<Way> {
        let (from, to) = (self.memory.gpu_of(from), self.memory.gpu_of(to));
        if !by_kernel {
            return vec![match (from, to) {
                (None, Some(to)) => Way::HostToDevice(to),
                (Some(from), None) => Way::DeviceToHost(from),
                (Some(from), Some(to)) if from != to => Way::Peer(from, to),
                (Some(gpu), Some(_)) => Way::Local(gpu),
                (None, None) => Way::Host,
            }];
        }
        let first = match from {
            None => Some(Way::HostToDevice(gpu)),
            Some(from) => (from != gpu).then_some(Way::Peer(from, gpu)),
        };
        let second = match to {
            None => Some(Way::DeviceToHost(gpu)),
            Some(to) => (to != gpu).then_some(Way::Peer(gpu, to)),
        };
        let ways: Vec<Way> = first.into_iter().chain(second).collect();
        if ways.is_empty() { vec![Way::Local(gpu)] } else { ways }
    }

    /// Takes an operation into hand. `None`: it has failed.
    fn take_up(&mut self, id: u64) -> Option<Job> {
        let op = self.ops.get(&id)?;
        let (gpu, what) = (op.gpu, op.what.clone());
        if self.gpus[gpu].poison.is_some() {
            return None;
        }
        let mut job = Job {
            id,
            gpu,
            by_kernel: false,
            moves: [].into(),
            at: 0,
            done: 0,
            fill: None,
            sums: Vec::new(),
            stores: Vec::new(),
            computes: Duration::ZERO,
        };
        match what {
            What::Moves { moves, .. } => {
                // Memory of a GPU that was lost meanwhile.
                if let Some(lost) = self.lost_among(&moves) {
                    self.gpus[gpu].poison = Some(lost);
                    return None;
                }
                job.moves = moves;
            }
            What::Fill { at, bytes, byte } => {
                job.fill = Some(Fill { at: self.memory.raw(at), bytes, byte });
            }
            What::Kernel { kernel, args } => match kernel.effect(&self.memory, gpu, &args) {
                Ok(effect) => {
                    let raw = |at| self.memory.raw(at);
                    let sum = |sum: Sum| Sum { from: raw(sum.from), to: raw(sum.to), ..sum };
                    job.sums = effect.work.sums.into_iter().map(sum).collect();
                    let store = |store: Store| Store { to: raw(store.to), ..store };
                    job.stores = effect.work.stores.into_iter().map(store).collect();
                    (job.by_kernel, job.computes) = (true, effect.work.computes);
                    job.moves = effect.work.moves.into();
                    self.ops.get_mut(&id)?.touches = effect.touches;
                }
                Err(error) => {
                    self.misuse.report(format!("kernel {}: {error}", kernel.name));
                    self.gpus[gpu].poison = Some(Code::ILLEGAL_ADDRESS);
                    return None;
                }
            },
            _ => {}
        }
        let op = self.ops.get(&id)?;
        if let Some(other) = self.order.begin(op.stream, op.number, op.name, &op.clock, &op.touches) {
            let name = op.name;
            self.misuse.report(format!(
                "{name} touches the same bytes as {other} in another stream, in no order with it"
            ));
        }
        Some(job)
    }

    /// The error of a GPU whose memory moves touch, if one of them is lost.
    fn lost_among(&self, moves: &[Move]) -> Option<Code> {
        let ends = moves.iter().flat_map(|one| [one.from, one.to]);
        ends.filter_map(|at| self.memory.gpu_of(at)).find_map(|gpu| self.gpus[gpu].poison)
    }

    /// What becomes of bytes on these ways.
    fn fate(&self, ways: &[Way], by_kernel: bool) -> Peers {
        let between = ways.iter().any(|way| matches!(way, Way::Peer(..)));
        match by_kernel {
            _ if !between => Peers::Right,
            true => self.faults.peer_kernels,
            false => self.faults.peer_copies,
        }
    }

    /// What is to go wrong with a slice of an engine's, if that can.
    fn take_flaw(&mut self, engine: usize, slice: &mut Slice) -> Option<Flaw> {
        let flaw = self.faults.flaws.get(&engine).copied()?;
        match flaw {
            Flaw::Flipped => slice.copies.first().map(drop)?,
            Flaw::Exchanged => slice.exchange()?,
        }
        self.faults.flaws.remove(&engine)
    }

    /// The next slice of a job.
    fn slice(&mut self, job: &mut Job, busy: bool) -> Slice {
        let now = Instant::now();
        let (sums, stores) = (std::mem::take(&mut job.sums), std::mem::take(&mut job.stores));
        let mut slice = Slice { fill: job.fill.take(), sums, stores, ..Slice::default() };
        let mut left = SLICE_BYTES;
        while left > 0 && slice.copies.len() < SLICE_MOVES && job.at < job.moves.len() {
            let piece = job.moves[job.at];
            let bytes = left.min(piece.bytes - job.done);
            let ways = self.ways(job.gpu, job.by_kernel, piece.from, piece.to);
            let (from, to) = (self.memory.raw(piece.from) + job.done, self.memory.raw(piece.to) + job.done);
            slice.copies.push((from, to, bytes as usize, self.fate(&ways, job.by_kernel)));
            slice.until = slice.until.max(self.links.reserve(&ways, bytes, now, busy || left < SLICE_BYTES));
            ways.iter().for_each(|&way| self.stats.moved(way, bytes));
            job.done += bytes;
            left -= bytes;
            if job.done == piece.bytes {
                (job.at, job.done) = (job.at + 1, 0);
            }
        }
        if !job.computes.is_zero() {
            slice.until = slice.until.max(Some(now + std::mem::take(&mut job.computes)));
        }
        slice
    }
}

impl Slice {
    /// Has two ranges of one length change places, if there are two.
    fn exchange(&mut self) -> Option<()> {
        let (first, others) = self.copies.split_first_mut()?;
        let other = others.iter_mut().find(|other| other.2 == first.2)?;
        std::mem::swap(&mut first.1, &mut other.1);
        Some(())
    }

    fn carry_out(self) {
        let flipped = self.copies.first().filter(|_| self.flaw == Some(Flaw::Flipped)).copied();
        for (from, to, bytes, fate) in self.copies {
            // SAFETY: enqueueing or taking up has checked both ranges; areas stay while an
            // operation uses them, and memory that the driver does not know is the caller's to keep
            // until the copy has ended.
            unsafe {
                match fate {
                    Peers::Right => std::ptr::copy(from as *const u8, to as *mut u8, bytes),
                    Peers::Zero => std::ptr::write_bytes(to as *mut u8, 0, bytes),
                    Peers::Lost => {}
                }
            };
        }
        if let Some((_, to, bytes, _)) = flipped {
            // SAFETY: as above; a copy has a byte at least.
            unsafe { *(to as *mut u8).add(bytes / 2) ^= 4 };
        }
        if let Some(Fill { at, bytes, byte }) = self.fill {
            // SAFETY: as above.
            unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes as usize) };
        }
        for Sum { from, bytes, to } in self.sums {
            // SAFETY: as above.
            unsafe {
                let bytes = std::slice::from_raw_parts(from as *const u8, bytes as usize);
                (to as *mut u32).write_unaligned(remainder(bytes));
            }
        }
        for Store { to, word } in self.stores {
            // SAFETY: as above; kernels store aligned words, and other processes and devices that
            // read them do so as atomics.
            unsafe {
                match word {
                    Word::Of32(word) => AtomicU32::from_ptr(to as *mut u32).store(word, Release),
                    Word::Of64(word) => AtomicU64::from_ptr(to as *mut u64).store(word, Release),
                }
            }
        }
        if let Some(left) = self.until.and_then(|until| until.checked_duration_since(Instant::now())) {
            std::thread::sleep(left);
        }
    }
}

/// An engine's thread.
fn run(engine: usize) {
    let mut state = lock();
    let mut jobs = VecDeque::new();
    let mut busy = false;
    loop {
        if state.engines[engine].frozen || (jobs.is_empty() && state.engines[engine].ready.is_empty()) {
            busy = false;
            state.wait(&signals().engines[engine]);
            continue;
        }
        if jobs.len() < JOBS_MAX && take_next(&mut state, engine, &mut jobs) {
            continue;
        }
        let Some(mut job) = jobs.pop_front() else { continue };
        let mut slice = state.slice(&mut job, busy);
        slice.flaw = state.take_flaw(engine, &mut slice);
        state.without(|| slice.carry_out());
        busy = true;
        if job.at == job.moves.len() {
            state.finish(job.id);
        } else {
            jobs.push_back(job);
        }
    }
}

/// Takes the next operation that may begin into hand; says whether there was one.
fn take_next(state: &mut Locked, engine: usize, jobs: &mut VecDeque<Job>) -> bool {
    let Some(id) = state.engines[engine].ready.pop_front() else { return false };
    let delay = state.engines[engine].delay;
    if !delay.is_zero() {
        state.without(|| std::thread::sleep(delay));
    }
    match state.take_up(id) {
        Some(job) => jobs.push_back(job),
        None => state.finish(id),
    }
    true
}
