//! WRITEs of a peer: the one whose bytes are due, and those whose last bytes are on their way from
//! staging into GPUs. A WRITE is answered when nothing of it can touch memory any more, whatever
//! the answer is. Knows when that is so; the responder tells the peer.

use super::command::Fault;
use super::connection::Arrival;
use super::error::Broken;
use super::export::OpKind;
use super::exports::{Exports, Grant};
use super::frame::Frame;
use super::payload::PayloadPart;
use super::reads::{copy_fault, lost_fault, no_staging};
use super::staging::{CopyEnd, Slot, Staging};
use forebay_transfer::SpanPair;

/// The WRITEs of a connection.
#[derive(Default)]
pub(super) struct Writes {
    due: Option<Due>,
    settling: Vec<Settling>,
    /// Opened by the first WRITE of a GPU's memory.
    staging: Option<Staging>,
}

/// The WRITE whose bytes are due. An answered one takes no more of them.
struct Due {
    number: u64,
    grant: Option<Grant>,
    /// Where the part that comes now lies meanwhile, and where it goes.
    incoming: Option<(Slot, Vec<SpanPair>)>,
    copying: u32,
}

/// A WRITE of which nothing more is due. Answered when no copy of it is under way.
struct Settling {
    number: u64,
    copying: u32,
    ending: Ending,
}

enum Ending {
    /// All bytes have come.
    Done(Grant),
    Early(Frame),
}

impl Writes {
    /// Takes a WRITE in, after the one before. `None`: it was answered already.
    pub fn begin(
        &mut self,
        number: u64,
        grant: Option<Grant>,
        open: impl FnOnce(&Grant) -> Result<Option<Staging>, String>,
    ) -> Result<(), Fault> {
        let staged = grant.as_ref().filter(|grant| grant.payload.is_staged() && self.staging.is_none());
        let opened = staged.map_or(Ok(None), open).map_err(no_staging);
        let grant = grant.filter(|_| opened.is_ok());
        self.due = Some(Due { number, grant, incoming: None, copying: 0 });
        if let Some(staging) = opened? {
            self.staging = Some(staging);
        }
        Ok(())
    }

    /// Nothing more comes of the last one: another operation has begun.
    pub fn forget_answered(&mut self) {
        self.due = None;
    }

    /// Whether bytes are due.
    pub fn is_due(&self) -> bool {
        self.due.as_ref().is_some_and(|due| due.grant.is_some())
    }

    pub fn is_empty(&self) -> bool {
        !self.is_due() && self.settling.is_empty()
    }

    /// Ends a WRITE early. Says whether there is one whose bytes are due, or which was answered.
    pub fn cancel(&mut self, number: u64) -> bool {
        let found = self.due.as_ref().is_some_and(|due| due.number == number);
        if found {
            self.end_early(Frame::Cancelled);
        }
        found || self.settling.iter().any(|settling| settling.number == number)
    }

    /// Where the next bytes go. `None`: all slots are in use; ask again when a copy has ended.
    pub fn inbound(
        &mut self,
        number: u64,
        bytes: u32,
        exports: &Exports,
    ) -> Result<Option<PayloadPart>, Broken> {
        let unexpected = |what| Broken::unexpected(what, number);
        let Some(due) = self.due.as_mut().filter(|due| due.number == number) else {
            return Err(unexpected("a DATA for nothing"));
        };
        let bad = due.grant.as_ref().and_then(|grant| exports.still_leased(grant).err());
        let lost = self.staging.as_ref().is_some_and(Staging::is_lost);
        let staged = due.grant.as_ref().is_some_and(|grant| grant.payload.is_staged());
        if let Some(fault) = bad.or_else(|| (staged && lost).then(lost_fault)) {
            self.end_early(Frame::Failed(fault));
        }
        let due = self.due.as_mut().and_then(|due| Some((due.grant.as_mut()?, &mut due.incoming)));
        let Some((grant, incoming)) = due else { return Ok(Some(PayloadPart::hollow(bytes as usize))) };
        if u64::from(bytes) > grant.payload.left() {
            return Err(unexpected("more bytes than the operation has"));
        }
        if !staged {
            return Ok(Some(grant.payload.cut(bytes as usize)));
        }
        let Some(staging) = &self.staging else { return Ok(None) };
        let Some(slot) = staging.take() else { return Ok(None) };
        let Some(place) = staging.place(&slot) else { return Ok(None) };
        let (part, pairs) = grant.payload.cut_staged(OpKind::Write, bytes as usize, place);
        *incoming = Some((slot, pairs));
        Ok(Some(part))
    }

    /// The bytes of a part have come: into their place, or into a slot from where they are copied.
    pub fn placed(&mut self, arrival: Arrival, corrupt: impl FnOnce() -> Fault) {
        match arrival {
            Arrival::Intact => self.land(),
            Arrival::Withdrawn => self.end_early(Frame::Failed(Fault::withdrawn())),
            Arrival::Corrupt => self.end_early(Frame::Failed(corrupt())),
        }
        let incoming = self.due.as_mut().and_then(|due| due.incoming.take());
        if let (Some((slot, _)), Some(staging)) = (incoming, &self.staging) {
            staging.give_back(slot);
        }
        let is_whole = |due: &Due| due.grant.as_ref().is_some_and(|grant| grant.payload.left() == 0);
        if self.due.as_ref().is_some_and(is_whole)
            && let Some(Due { number, grant: Some(grant), copying, .. }) = self.due.take()
        {
            self.settling.push(Settling { number, copying, ending: Ending::Done(grant) });
        }
    }

    /// Has what is in the slot copied to where it belongs.
    fn land(&mut self) {
        let Some(Due { number, grant: Some(grant), incoming, copying }) = &mut self.due else { return };
        let (Some(staging), Some((slot, pairs))) = (&self.staging, incoming.take()) else { return };
        match grant.begin_copy() {
            Some(owners) if !pairs.is_empty() => {
                *copying += 1;
                staging.copy(*number, slot, pairs, owners);
            }
            Some(_) => staging.give_back(slot),
            None => {
                staging.give_back(slot);
                self.end_early(Frame::Failed(Fault::withdrawn()));
            }
        }
    }

    /// Ends the WRITE whose bytes are due, unless it was answered.
    fn end_early(&mut self, frame: Frame) {
        let Some(due) = &mut self.due else { return };
        if due.grant.take().is_some() {
            let (number, copying) = (due.number, std::mem::take(&mut due.copying));
            self.settling.push(Settling { number, copying, ending: Ending::Early(frame) });
        }
    }

    /// Copies have ended.
    pub fn copy_ended(&mut self) {
        let ended = self.staging.as_ref().map(Staging::take_ended).unwrap_or_default();
        for CopyEnd { operation, slot, outcome, .. } in ended {
            if let (Some(slot), Some(staging)) = (slot, &self.staging) {
                staging.give_back(slot);
            }
            let failed = outcome.err().map(|why| Frame::Failed(copy_fault("into", &why)));
            if let Some(due) = self.due.as_mut().filter(|due| due.number == operation && due.grant.is_some())
            {
                due.copying -= 1;
                failed.into_iter().for_each(|frame| self.end_early(frame));
            } else if let Some(one) = self.settling.iter_mut().find(|one| one.number == operation) {
                one.copying -= 1;
                if let (Some(frame), Ending::Done(_)) = (failed, &one.ending) {
                    one.ending = Ending::Early(frame);
                }
            }
        }
    }

    /// What is to be answered: of each WRITE that is over, once.
    pub fn take_answers(&mut self, exports: &Exports) -> Vec<(u64, Frame)> {
        let over = self.settling.extract_if(.., |settling| settling.copying == 0);
        let answer = |Settling { number, ending, .. }| match ending {
            Ending::Early(frame) => (number, frame),
            Ending::Done(grant) => match exports.still_leased(&grant) {
                Ok(()) => (number, Frame::Done),
                Err(fault) => (number, Frame::Failed(fault)),
            },
        };
        over.map(answer).collect()
    }
}
