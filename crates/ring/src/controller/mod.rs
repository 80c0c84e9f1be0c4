//! A strict NVMe controller in this process, for tests and for kernels that have no drive: over
//! host memory behind a trait, with an image as its drive. It refuses what the specification
//! forbids, with the status that the specification names, and fails on request. It shares no code
//! with the encoders. Time passes only by `step`.

mod admin;
mod data;
mod entry;
mod faults;
mod io;
mod memory;
mod queues;
mod settings;
mod status;

pub use data::{Extent, from_prps, from_sgl};
pub use faults::Faults;
pub use memory::{HostMemory, OutsideMemory, WordMemory};
pub use queues::DoorbellError;
pub use settings::{Settings, SglSetting};
pub use status::Status;

use entry::{ENTRY_BYTES, Entry};
use faults::FaultPlan;
use io::Drive;
use queues::{CompletionQueue, Queues, Ring, SubmissionQueue, Unfinished};
use std::collections::VecDeque;
use std::ops::Bound;
use thiserror::Error;

/// The admin queues, as the host sets them in AQA, ASQ and ACQ.
#[derive(Debug, Clone, Copy)]
pub struct AdminQueues {
    pub sq_address: u64,
    pub sq_entries: u32,
    pub cq_address: u64,
    pub cq_entries: u32,
}

/// Why the controller does not become ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum EnableError {
    #[error("{field} is {entries}; 2 to 4,096 are allowed")]
    Entries { field: &'static str, entries: u32 },
    #[error("{field} is {address:#x}; it must be a page's address, and the whole queue within memory")]
    Address { field: &'static str, address: u64 },
}

/// A command that was fetched and has not ended.
#[derive(Debug)]
struct Work {
    queue: u16,
    completion_queue: u16,
    entry: Entry,
    due: u64,
}

/// A completion that waits for room in its queue.
#[derive(Debug, Clone, Copy)]
struct Post {
    queue: u16,
    completion_queue: u16,
    cid: u16,
    result: u32,
    status: Status,
}

/// The controller.
#[derive(Debug)]
pub struct Controller<M> {
    memory: M,
    settings: Settings,
    drive: Drive,
    queues: Queues,
    work: Vec<Work>,
    posts: VecDeque<Post>,
    plan: FaultPlan,
    now: u64,
    /// The submission queue that was served last.
    served: u16,
    doorbell_errors: Vec<DoorbellError>,
}

impl<M: HostMemory> Controller<M> {
    /// A controller that is not enabled.
    pub fn new(memory: M, settings: Settings, faults: Faults) -> Controller<M> {
        Controller {
            memory,
            settings,
            drive: Drive::new(&settings),
            queues: Queues::default(),
            work: Vec::new(),
            posts: VecDeque::new(),
            plan: FaultPlan::new(faults),
            now: 0,
            served: 0,
            doorbell_errors: Vec::new(),
        }
    }

    /// Sets CC.EN: the controller is ready when this returns.
    pub fn enable(&mut self, admin: AdminQueues) -> Result<(), EnableError> {
        self.disable();
        let sq = self.admin_ring(("ASQ", "AQA.ASQS"), admin.sq_address, admin.sq_entries, 64)?;
        let cq = self.admin_ring(("ACQ", "AQA.ACQS"), admin.cq_address, admin.cq_entries, 16)?;
        self.queues.submission.insert(0, SubmissionQueue { ring: sq, completion_queue: 0 });
        self.queues.completion.insert(0, CompletionQueue::new(cq.address, cq.entries));
        Ok(())
    }

    fn admin_ring(
        &self,
        (address_field, size_field): (&'static str, &'static str),
        address: u64,
        entries: u32,
        entry_bytes: u64,
    ) -> Result<Ring, EnableError> {
        if !(2..=4096).contains(&entries) {
            return Err(EnableError::Entries { field: size_field, entries });
        }
        let is_reachable = self.memory.contains(address, u64::from(entries) * entry_bytes);
        if !address.is_multiple_of(self.settings.page_bytes) || !is_reachable {
            return Err(EnableError::Address { field: address_field, address });
        }
        Ok(Ring::new(address, entries))
    }

    /// Clears CC.EN: all queues and commands are gone, and memory is touched no more.
    pub fn disable(&mut self) {
        self.queues = Queues::default();
        self.work.clear();
        self.posts.clear();
    }

    /// A 32-bit write to the register file at or behind the first doorbell.
    pub fn write_doorbell(&mut self, offset: u64, value: u32) {
        let stride = 4 << self.settings.doorbell_stride_log2;
        if let Err(error) = self.queues.ring(offset, stride, value) {
            self.doorbell_errors.push(error);
        }
    }

    /// Doorbells that were rung in vain.
    pub fn doorbell_errors(&self) -> &[DoorbellError] {
        &self.doorbell_errors
    }

    /// The namespace's bytes.
    pub fn image(&self) -> &[u8] {
        &self.drive.image
    }

    /// Does a little: at most one command is fetched, one carried out, and one completion posted.
    /// Says whether anything is under way.
    pub fn step(&mut self) -> bool {
        self.now += 1;
        self.finish_posts();
        self.fetch();
        self.execute();
        self.post();
        let is_waited_for = |queue: &CompletionQueue| queue.unfinished.is_some();
        let is_queued = |queue: &SubmissionQueue| !queue.ring.is_empty();
        !self.work.is_empty()
            || !self.posts.is_empty()
            || self.queues.completion.values().any(is_waited_for)
            || self.queues.submission.values().any(is_queued)
    }

    /// Fetches a command, from one queue after the other.
    fn fetch(&mut self) {
        let Some(id) = self.next_queue() else { return };
        let Some(queue) = self.queues.submission.get_mut(&id) else { return };
        let address = queue.ring.address + u64::from(queue.ring.head) * ENTRY_BYTES as u64;
        queue.ring.head = queue.ring.after(queue.ring.head);
        let completion_queue = queue.completion_queue;
        self.served = id;
        let mut entry = Entry([0; ENTRY_BYTES]);
        let read = self.memory.read(address, &mut entry.0);
        debug_assert!(read.is_ok(), "submission queues lie within memory");
        if self.is_outstanding(id, entry.cid()) {
            let (status, result, cid) = (Status::COMMAND_ID_CONFLICT, 0, entry.cid());
            self.posts.push_back(Post { queue: id, completion_queue, cid, result, status });
            return;
        }
        let due = if id == 0 { self.now } else { self.now + self.plan.delay() };
        self.work.push(Work { queue: id, completion_queue, entry, due });
    }

    /// The next submission queue with commands, in a round.
    fn next_queue(&self) -> Option<u16> {
        let after = (Bound::Excluded(self.served), Bound::Unbounded);
        let queues = &self.queues.submission;
        let mut round = queues.range(after).chain(queues.iter());
        round.find(|(_, queue)| !queue.ring.is_empty()).map(|(id, _)| *id)
    }

    fn is_outstanding(&self, queue: u16, cid: u16) -> bool {
        self.work.iter().any(|work| work.queue == queue && work.entry.cid() == cid)
    }

    /// Carries out a command that is due. Data moves only now, so a host that ends a command before
    /// its completion finds old bytes.
    fn execute(&mut self) {
        let due: Vec<usize> = (0..self.work.len()).filter(|&at| self.work[at].due <= self.now).collect();
        if due.is_empty() {
            return;
        }
        let work = self.work.remove(due[self.plan.choose(due.len())]);
        if work.queue == 0 {
            let outcome = admin::execute(&self.memory, &self.settings, &mut self.queues, &work.entry);
            self.abort_work_of_deleted_queues();
            self.complete(&work, outcome, 1);
            return;
        }
        let fate = self.plan.fate();
        let outcome = match fate.status {
            Some(status) => Err(status),
            None => self.drive.execute(&self.memory, &self.settings, &work.entry).map(|()| 0),
        };
        self.complete(&work, outcome, fate.completions);
    }

    fn complete(&mut self, work: &Work, outcome: Result<u32, Status>, times: usize) {
        let Work { queue, completion_queue, entry, .. } = *work;
        let (result, status) = match outcome {
            Ok(result) => (result, Status::SUCCESS),
            Err(status) => (0, status),
        };
        let post = Post { queue, completion_queue, cid: entry.cid(), result, status };
        self.posts.extend(std::iter::repeat_n(post, times));
    }

    fn abort_work_of_deleted_queues(&mut self) {
        let is_gone = |work: &mut Work| !self.queues.submission.contains_key(&work.queue);
        let aborted: Vec<Work> = self.work.extract_if(.., is_gone).collect();
        for work in &aborted {
            self.complete(work, Err(Status::ABORTED_SQ_DELETION), 1);
        }
    }

    /// Posts the first completion whose queue has room.
    fn post(&mut self) {
        let has_room = |post: &Post| {
            self.queues.completion.get(&post.completion_queue).is_none_or(CompletionQueue::has_room)
        };
        let Some(post) =
            self.posts.iter().position(has_room).and_then(|position| self.posts.remove(position))
        else {
            return;
        };
        let sq_head = self.queues.submission.get(&post.queue).map_or(0, |queue| queue.ring.head);
        // A completion queue is deleted only after its submission queues: nobody waits for it then.
        let Some(queue) = self.queues.completion.get_mut(&post.completion_queue) else { return };
        let address = queue.ring.address + u64::from(queue.ring.tail) * 16;
        let mut words = [0; 12];
        words[..4].copy_from_slice(&post.result.to_le_bytes());
        words[8..].copy_from_slice(&(u32::from(post.queue) << 16 | sq_head).to_le_bytes());
        let status = u32::from(post.status.0) << 17;
        let last_word = status | u32::from(queue.phase) << 16 | u32::from(post.cid);
        let due = self.now + self.plan.phase_delay();
        queue.unfinished = Some(Unfinished { due, last_word });
        let written = self.memory.write(address, &words);
        debug_assert!(written.is_ok(), "completion queues lie within memory");
        self.finish_posts();
    }

    /// Writes the last words that are due.
    fn finish_posts(&mut self) {
        for queue in self.queues.completion.values_mut() {
            let Some(unfinished) = queue.unfinished.filter(|unfinished| unfinished.due <= self.now) else {
                continue;
            };
            let address = queue.ring.address + u64::from(queue.ring.tail) * 16 + 12;
            let written = self.memory.publish(address, unfinished.last_word);
            debug_assert!(written.is_ok(), "completion queues lie within memory");
            queue.unfinished = None;
            queue.advance();
        }
    }
}
