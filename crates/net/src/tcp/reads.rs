//! READs of a peer whose bytes are not all sent, in the order in which they came. Bytes of GPUs are
//! copied into staging ahead of the wire, as many parts as there are slots. Knows which part is
//! next and when a READ is over; what is answered goes back to the responder.

use super::command::{Fault, FaultCode};
use super::export::OpKind;
use super::exports::{Exports, Grant};
use super::frame::{DATA_BYTES_MAX, Frame};
use super::payload::PayloadPart;
use super::staging::{CopyEnd, Slot, Staging};
use std::collections::VecDeque;

/// The READs of a connection.
#[derive(Default)]
pub(super) struct Reads {
    queue: VecDeque<Reading>,
    /// The slot of the part that is on the wire.
    sending: Option<Slot>,
    /// Opened by the first READ of a GPU's memory. Last, so that nothing names its memory any more.
    staging: Option<Staging>,
}

struct Reading {
    number: u64,
    grant: Grant,
    on_wire: bool,
    cancelled: bool,
    /// Parts whose bytes are copied into staging, in the order of the wire.
    staged: VecDeque<StagedPart>,
}

struct StagedPart {
    slot: u32,
    part: PayloadPart,
    copied: Copied,
}

enum Copied {
    UnderWay,
    Done(Slot),
    Failed(Fault),
}

/// What is to be sent.
pub(super) enum Next {
    Part(u64, PayloadPart),
    Failed(u64, Fault),
    /// Nothing, or nothing before a copy has ended.
    Nothing,
}

/// What became of a READ that is to end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cancelled {
    Now,
    /// After the part that is on the wire.
    Later,
    /// It was over before.
    Unknown,
}

impl Reads {
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes a READ in. `open`: makes the slots that READs of GPUs' memory need, if there are none
    /// yet.
    pub fn push(
        &mut self,
        number: u64,
        grant: Grant,
        open: impl FnOnce(&Grant) -> Result<Option<Staging>, String>,
    ) -> Result<(), Fault> {
        if grant.payload.is_staged() && self.staging.is_none() {
            self.staging = open(&grant).map_err(no_staging)?;
        }
        let staged = VecDeque::new();
        self.queue.push_back(Reading { number, grant, on_wire: false, cancelled: false, staged });
        Ok(())
    }

    pub fn cancel(&mut self, number: u64) -> Cancelled {
        let Some(at) = self.queue.iter().position(|read| read.number == number) else {
            return Cancelled::Unknown;
        };
        self.queue[at].cancelled = true;
        if self.queue[at].on_wire {
            return Cancelled::Later;
        }
        self.remove(at);
        Cancelled::Now
    }

    /// The next part of the oldest READ, unless its bytes are on their way into staging still.
    pub fn next(&mut self, exports: &Exports) -> Next {
        self.stage_ahead(exports);
        let Some(read) = self.queue.front_mut() else { return Next::Nothing };
        let number = read.number;
        let part = match exports.still_leased(&read.grant) {
            Err(fault) => Err(fault),
            Ok(()) if !read.grant.payload.is_staged() => {
                Ok(read.grant.payload.cut_to_send(DATA_BYTES_MAX as usize))
            }
            Ok(()) => match read.staged.pop_front() {
                Some(StagedPart { part, copied: Copied::Done(slot), .. }) => {
                    self.sending = Some(slot);
                    Ok(part)
                }
                Some(StagedPart { copied: Copied::Failed(fault), .. }) => Err(fault),
                Some(under_way) => {
                    read.staged.push_front(under_way);
                    return Next::Nothing;
                }
                None if self.staging.as_ref().is_some_and(Staging::is_lost) => Err(lost_fault()),
                None => return Next::Nothing,
            },
        };
        match part {
            Ok(part) => {
                read.on_wire = true;
                Next::Part(number, part)
            }
            Err(fault) => {
                self.remove(0);
                Next::Failed(number, fault)
            }
        }
    }

    /// Has as many parts copied as there are free slots, the oldest READ's first.
    fn stage_ahead(&mut self, exports: &Exports) {
        let Some(staging) = &self.staging else { return };
        let wanted = |read: &&mut Reading| read.grant.payload.is_staged() && !read.is_over();
        for read in self.queue.iter_mut().filter(wanted) {
            while read.grant.payload.left() > 0 && exports.still_leased(&read.grant).is_ok() {
                let Some(slot) = staging.take() else { return };
                if !read.stage(staging, slot) {
                    break;
                }
            }
        }
    }

    /// A copy has ended. Of a READ that is over only the slot is left.
    pub fn copy_ended(&mut self) {
        let Some(staging) = &self.staging else { return };
        for CopyEnd { operation, number, slot, outcome } in staging.take_ended() {
            let read = self.queue.iter_mut().find(|read| read.number == operation);
            let under_way =
                |staged: &&mut StagedPart| staged.slot == number && matches!(staged.copied, Copied::UnderWay);
            let staged = read.and_then(|read| read.staged.iter_mut().find(under_way));
            match (staged, slot, outcome) {
                (Some(staged), Some(slot), Ok(())) => staged.copied = Copied::Done(slot),
                (staged, slot, outcome) => {
                    let why = outcome.err().unwrap_or_default();
                    let fault = copy_fault("from", &why);
                    staged.into_iter().for_each(|staged| staged.copied = Copied::Failed(fault.clone()));
                    slot.into_iter().for_each(|slot| staging.give_back(slot));
                }
            }
        }
    }

    /// A part has been sent. How its READ ends, if it is over.
    pub fn sent(&mut self, number: u64, withdrawn: bool, exports: &Exports) -> Option<Frame> {
        if let (Some(staging), Some(slot)) = (&self.staging, self.sending.take()) {
            staging.give_back(slot);
        }
        let read = self.queue.front_mut().filter(|read| read.number == number)?;
        read.on_wire = false;
        let answer = read.answer(withdrawn, exports)?;
        self.remove(0);
        Some(answer)
    }

    fn remove(&mut self, at: usize) {
        let (Some(read), Some(staging)) = (self.queue.remove(at), &self.staging) else { return };
        for staged in read.staged {
            // Slots of copies that are under way come back when those end.
            if let Copied::Done(slot) = staged.copied {
                staging.give_back(slot);
            }
        }
    }
}

impl Reading {
    /// Has the next part copied into a slot. Says whether it could be.
    fn stage(&mut self, staging: &Staging, slot: Slot) -> bool {
        let (Some(place), Some(owners)) = (staging.place(&slot), self.grant.begin_copy()) else {
            staging.give_back(slot);
            let (part, copied) = (PayloadPart::hollow(0), Copied::Failed(Fault::withdrawn()));
            self.staged.push_back(StagedPart { slot: u32::MAX, part, copied });
            return false;
        };
        let (part, pairs) = self.grant.payload.cut_staged(OpKind::Read, DATA_BYTES_MAX as usize, place);
        let number = slot.number();
        if pairs.is_empty() {
            self.staged.push_back(StagedPart { slot: number, part, copied: Copied::Done(slot) });
        } else {
            self.staged.push_back(StagedPart { slot: number, part, copied: Copied::UnderWay });
            staging.copy(self.number, slot, pairs, owners);
        }
        true
    }

    /// Whether no further part of it will be sent.
    fn is_over(&self) -> bool {
        let failed = |staged: &StagedPart| matches!(staged.copied, Copied::Failed(_));
        self.cancelled || self.staged.iter().any(failed)
    }

    /// How it goes on after a part: not at all, with this answer.
    fn answer(&self, withdrawn: bool, exports: &Exports) -> Option<Frame> {
        if self.cancelled {
            return Some(Frame::Cancelled);
        }
        if withdrawn {
            return Some(Frame::Failed(Fault::withdrawn()));
        }
        match exports.still_leased(&self.grant) {
            Err(fault) => Some(Frame::Failed(fault)),
            Ok(()) if self.grant.payload.left() == 0 && self.staged.is_empty() => Some(Frame::Done),
            Ok(()) => None,
        }
    }
}

pub(super) fn copy_fault(way: &str, why: &str) -> Fault {
    Fault::new(FaultCode::Copy, format!("the copy {way} GPU memory failed: {why}"))
}

pub(super) fn no_staging(why: String) -> Fault {
    Fault::new(FaultCode::Copy, format!("there is no staging for GPU memory: {why}"))
}

pub(super) fn lost_fault() -> Fault {
    Fault::new(FaultCode::Copy, "copies that were given up hold all staging for GPU memory")
}
