//! A submission queue and its completion queue: slots, phase, command identifiers, and what each
//! command was for. It has one owner and no memory of its own: the caller writes entries, loads
//! words and rings doorbells. A command ends once, by its completion or by a reset.

use super::command::{Command, CommandError, ENTRY_BYTES, MAX_QUEUE_ENTRIES};
use super::completion::{Completion, Status};
use std::collections::VecDeque;
use thiserror::Error;

/// The identifier that the specification keeps for errors of no particular command.
const NO_COMMAND: u16 = 0xffff;

/// Why a queue refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QueueError {
    #[error("{field} is {entries}; 2 to 65,536 are allowed")]
    Entries { field: &'static str, entries: u32 },
    #[error("all {0} slots of the submission queue are taken; one of its entries stays free")]
    SubmissionFull(u32),
    #[error("{0} commands are outstanding; the completion queue has room for no more")]
    CompletionFull(u32),
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// A command that was not taken, and what it was for.
#[derive(Debug)]
pub struct Refused<T> {
    pub reason: QueueError,
    pub purpose: T,
}

/// An entry to be written before the tail's doorbell is rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submitted {
    /// Which entry of the submission queue.
    pub slot: u32,
    pub cid: u16,
    pub entry: [u8; ENTRY_BYTES],
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// With dword 0 of its completion.
    Done(u32),
    Failed(Status),
    /// The controller was reset; whether the command took effect is not known.
    Reset,
}

/// The end of a command.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended<T> {
    pub purpose: T,
    pub cid: u16,
    pub outcome: Outcome,
}

/// A completion that ends nothing. After one the drive is not to be trusted: a command may stay
/// outstanding until the controller is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Fault {
    #[error("command {0} is not outstanding: it ended before, or never began")]
    NotOutstanding(u16),
    #[error("the completion is of submission queue {0}")]
    OtherQueue(u16),
    #[error("the submission queue's head is {head}; {from} to {to} are possible")]
    SqHead { head: u16, from: u32, to: u32 },
}

/// How often each fault was seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    pub not_outstanding: u64,
    pub other_queue: u64,
    pub sq_head: u64,
}

/// What the next entry of the completion queue was.
#[derive(Debug, PartialEq, Eq)]
pub enum Polled<T> {
    Nothing,
    Ended(Ended<T>),
    Fault(Fault),
}

/// A submission queue with a completion queue of its own. `T` is what commands are for: it comes
/// back when they end.
#[derive(Debug)]
pub struct QueuePair<T> {
    id: u16,
    sq: Ring,
    cq: Ring,
    /// What the drive has read of the submission queue, as far as it has told.
    sq_head: u32,
    phase: bool,
    commands: Commands<T>,
    faults: Faults,
}

impl<T> QueuePair<T> {
    /// Queues as they are right after they were created. The memory of the completion queue is
    /// zero, or its old entries would count.
    pub fn new(id: u16, sq_entries: u32, cq_entries: u32) -> Result<QueuePair<T>, QueueError> {
        let (sq, cq) = (Ring::new("sq_entries", sq_entries)?, Ring::new("cq_entries", cq_entries)?);
        // One entry stays free in both: a full ring would look empty, and completions that find no
        // entry are lost.
        let commands = Commands::new(sq_entries.min(cq_entries) - 1);
        Ok(QueuePair { id, sq, cq, sq_head: 0, phase: true, commands, faults: Faults::default() })
    }

    /// Takes a command. The caller writes the entry and rings the doorbell with `sq_tail`, for
    /// one command or for many.
    pub fn submit(&mut self, command: &Command, purpose: T) -> Result<Submitted, Refused<T>> {
        if self.sq.after(self.sq.at) == self.sq_head {
            return Err(Refused { reason: QueueError::SubmissionFull(self.sq.entries - 1), purpose });
        }
        let Some(cid) = self.commands.next_cid() else {
            return Err(Refused { reason: QueueError::CompletionFull(self.outstanding()), purpose });
        };
        match command.encode(cid) {
            Err(reason) => Err(Refused { reason: reason.into(), purpose }),
            Ok(entry) => {
                self.commands.begin(purpose);
                let slot = self.sq.at;
                self.sq.advance();
                Ok(Submitted { slot, cid, entry })
            }
        }
    }

    /// Looks at the next entry of the completion queue. `load` gives a word of an entry, word 3
    /// with acquire ordering. When the caller has polled enough, it rings the doorbell with
    /// `cq_head`, if that has changed: a drive may take the same value twice for an error.
    pub fn poll(&mut self, mut load: impl FnMut(u32, usize) -> u32) -> Polled<T> {
        let slot = self.cq.at;
        let Some(completion) = Completion::read(self.phase, |word| load(slot, word)) else {
            return Polled::Nothing;
        };
        self.cq.advance();
        // Each round through the ring, the drive inverts the bit.
        self.phase ^= self.cq.at == 0;
        match self.end(&completion) {
            Ok(ended) => Polled::Ended(ended),
            Err(fault) => {
                self.faults.count(fault);
                Polled::Fault(fault)
            }
        }
    }

    fn end(&mut self, completion: &Completion) -> Result<Ended<T>, Fault> {
        let Completion { result, sq_head: head, sq_id, cid, status, .. } = *completion;
        if sq_id != self.id {
            return Err(Fault::OtherQueue(sq_id));
        }
        let (from, to) = (self.sq_head, self.sq.at);
        if !self.commands.is_outstanding(cid) {
            return Err(Fault::NotOutstanding(cid));
        }
        if u32::from(head) >= self.sq.entries
            || self.sq.distance(from, head.into()) > self.sq.distance(from, to)
        {
            return Err(Fault::SqHead { head, from, to });
        }
        let purpose = self.commands.end(cid).ok_or(Fault::NotOutstanding(cid))?;
        self.sq_head = head.into();
        let outcome = if status.is_success() { Outcome::Done(result) } else { Outcome::Failed(status) };
        Ok(Ended { purpose, cid, outcome })
    }

    /// Ends all commands, and begins anew with empty queues. To be called when the controller is
    /// quiet, that is, it was disabled and says that it is not ready: until then it may still write
    /// into the memory of commands, and completions of old ones could be taken for new ones. The
    /// memory of the completion queue is to be zeroed as well.
    pub fn reset(&mut self) -> Vec<Ended<T>> {
        self.sq.at = 0;
        self.cq.at = 0;
        self.sq_head = 0;
        self.phase = true;
        self.commands.end_all()
    }

    /// What to write to the submission queue's doorbell.
    pub fn sq_tail(&self) -> u32 {
        self.sq.at
    }

    /// What to write to the completion queue's doorbell.
    pub fn cq_head(&self) -> u32 {
        self.cq.at
    }

    pub fn outstanding(&self) -> u32 {
        self.commands.outstanding
    }

    pub fn faults(&self) -> Faults {
        self.faults
    }
}

impl Faults {
    fn count(&mut self, fault: Fault) {
        match fault {
            Fault::NotOutstanding(_) => self.not_outstanding += 1,
            Fault::OtherQueue(_) => self.other_queue += 1,
            Fault::SqHead { .. } => self.sq_head += 1,
        }
    }
}

/// A place in a ring of entries.
#[derive(Debug)]
struct Ring {
    entries: u32,
    at: u32,
}

impl Ring {
    fn new(field: &'static str, entries: u32) -> Result<Ring, QueueError> {
        match (2..=MAX_QUEUE_ENTRIES).contains(&entries) {
            true => Ok(Ring { entries, at: 0 }),
            false => Err(QueueError::Entries { field, entries }),
        }
    }

    fn after(&self, at: u32) -> u32 {
        if at + 1 == self.entries { 0 } else { at + 1 }
    }

    fn advance(&mut self) {
        self.at = self.after(self.at);
    }

    /// Entries from one place to another.
    fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from { to - from } else { to + self.entries - from }
    }
}

/// Outstanding commands by identifier. The low bits of an identifier are its place, the others
/// count how often the place was used, so that a late completion does not end a new command.
#[derive(Debug)]
struct Commands<T> {
    places: Vec<Place<T>>,
    /// The place that was free for longest is used first.
    free: VecDeque<u16>,
    place_bits: u32,
    outstanding: u32,
}

#[derive(Debug)]
struct Place<T> {
    /// The identifier of the next or present command.
    cid: u16,
    purpose: Option<T>,
}

impl<T> Commands<T> {
    /// Room for so many, up to 65,535.
    fn new(most: u32) -> Commands<T> {
        let numbers = 0..most as u16;
        let places = numbers.clone().map(|cid| Place { cid, purpose: None }).collect();
        let place_bits = most.next_power_of_two().trailing_zeros();
        Commands { places, free: numbers.collect(), place_bits, outstanding: 0 }
    }

    fn next_cid(&self) -> Option<u16> {
        self.free.front().map(|&place| self.places[usize::from(place)].cid)
    }

    /// The command with `next_cid` begins.
    fn begin(&mut self, purpose: T) {
        if let Some(place) = self.free.pop_front() {
            self.places[usize::from(place)].purpose = Some(purpose);
            self.outstanding += 1;
        }
    }

    fn is_outstanding(&self, cid: u16) -> bool {
        let place = self.places.get(self.number(cid));
        place.is_some_and(|place| place.cid == cid && place.purpose.is_some())
    }

    fn end(&mut self, cid: u16) -> Option<T> {
        let number = self.number(cid);
        let place = self.places.get_mut(number).filter(|place| place.cid == cid)?;
        let purpose = place.purpose.take()?;
        place.cid = next_use(cid, self.place_bits);
        self.free.push_back(number as u16);
        self.outstanding -= 1;
        Some(purpose)
    }

    fn end_all(&mut self) -> Vec<Ended<T>> {
        let cids: Vec<u16> =
            self.places.iter().filter(|place| place.purpose.is_some()).map(|place| place.cid).collect();
        let end = |cid| self.end(cid).map(|purpose| Ended { purpose, cid, outcome: Outcome::Reset });
        cids.into_iter().filter_map(end).collect()
    }

    fn number(&self, cid: u16) -> usize {
        (u32::from(cid) & ((1 << self.place_bits) - 1)) as usize
    }
}

/// The next identifier of the same place.
fn next_use(cid: u16, place_bits: u32) -> u16 {
    let next = (u32::from(cid) + (1 << place_bits)) as u16;
    if next == NO_COMMAND { (u32::from(next) + (1 << place_bits)) as u16 } else { next }
}
