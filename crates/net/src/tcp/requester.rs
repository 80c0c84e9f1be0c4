//! The end that asks: operations on a peer's memory, in order, within the window that the peer
//! allows. Each ends exactly once.
//!
//! An operation ends when nothing of it can touch its spans any more: a WRITE not before the last
//! byte that was begun has left, a READ not before the peer said that no more will come, a
//! cancelled one not before the peer said that it stopped.

use super::call::Calls;
use super::command::{Command, Fault, FaultCode, PeerRegion};
use super::connection::{Arrival, Role};
use super::error::{BadFrame, Broken, VERSION};
use super::export::OpKind;
use super::frame::{DATA_BYTES_MAX, Frame};
use super::greeting::{Hello, Welcome};
use super::payload::{Payload, PayloadPart};
use forebay_transfer::Outcome;
use std::collections::VecDeque;

/// A flow that was used within this time is in use: it asks whether its peer is alive.
const IN_USE_US: u64 = 60_000_000;

/// What is asked of a peer.
pub(super) struct Operation {
    pub op_kind: OpKind,
    /// The peer's spans.
    pub command: Command,
    /// This end's, as long in all.
    pub payload: Payload,
    /// When it has to have ended.
    pub deadline_us: u64,
}

/// The asking end of a connection.
pub(super) struct Requester {
    hello: Option<Hello>,
    to_instance: [u8; 16],
    /// A flow that is in use asks after this much silence whether the peer is alive.
    ping_after_us: u64,
    greeted: Greeted,
    operations: VecDeque<Asked>,
    next_number: u64,
    ended: Vec<(u64, Outcome)>,
    pub calls: Calls,
    used_us: u64,
    heard_us: u64,
    ping: Ping,
}

enum Greeted {
    No,
    Welcomed(Welcome),
    Ready(Welcome, Vec<PeerRegion>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ping {
    None,
    Due,
    Sent,
}

/// An operation that has not ended.
struct Asked {
    number: u64,
    operation: Operation,
    bytes: u64,
    /// The peer has been told, or is about to be.
    told: bool,
    /// A part of it is on its way out.
    on_wire: bool,
    cancel: Cancel,
    corrupt: bool,
    /// What the peer said. The operation ends with it as soon as no part of it is on its way out.
    answer: Option<Outcome>,
}

enum Cancel {
    No,
    Wanted(&'static str),
    Told(&'static str),
}

impl Requester {
    pub fn new(hello: Hello, ping_after_us: u64, now_us: u64) -> Requester {
        Requester {
            to_instance: hello.to_instance,
            hello: Some(hello),
            ping_after_us,
            greeted: Greeted::No,
            operations: VecDeque::new(),
            next_number: 1,
            ended: Vec::new(),
            calls: Calls::default(),
            used_us: now_us,
            heard_us: now_us,
            ping: Ping::None,
        }
    }

    /// The peer and what it offers, once it has let this end in.
    pub fn peer(&self) -> Option<(Welcome, &[PeerRegion])> {
        match &self.greeted {
            Greeted::Ready(welcome, regions) => Some((*welcome, regions)),
            _ => None,
        }
    }

    /// Takes an operation in and names it.
    pub fn submit(&mut self, now_us: u64, operation: Operation) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.used_us = now_us;
        let (bytes, spans) = (operation.payload.left(), operation.command.spans());
        debug_assert_eq!(bytes, operation.command.bytes());
        if let Some(outcome) = self.unfit(bytes, spans) {
            self.ended.push((number, outcome));
            return number;
        }
        self.operations.push_back(Asked {
            number,
            operation,
            bytes,
            told: false,
            on_wire: false,
            cancel: Cancel::No,
            corrupt: false,
            answer: None,
        });
        number
    }

    /// How an operation ends that cannot be asked for at all.
    fn unfit(&self, bytes: u64, spans: u64) -> Option<Outcome> {
        let (spans_max, bytes_max) = match &self.greeted {
            Greeted::No => (u64::MAX, u64::MAX),
            Greeted::Welcomed(welcome) | Greeted::Ready(welcome, _) => {
                (welcome.spans_max.into(), welcome.op_bytes_max)
            }
        };
        if spans == 0 {
            Some(Outcome::Moved { bytes: 0 })
        } else if spans > spans_max || bytes > bytes_max {
            let error = format!("{spans} spans of {bytes} bytes; the peer takes {spans_max} of {bytes_max}");
            Some(Outcome::Failed { error })
        } else {
            None
        }
    }

    /// Takes a call in and names it. Calls have numbers of their own.
    pub fn call(&mut self, now_us: u64, body: Vec<u8>, limit_us: u64) -> u64 {
        self.used_us = now_us;
        self.calls.submit(now_us, body, limit_us)
    }

    /// Asks for an early end of one operation. One that has ended is not missed.
    pub fn cancel(&mut self, number: u64, why: &'static str) {
        if let Ok(at) = self.operations.binary_search_by_key(&number, |asked| asked.number) {
            self.operations[at].want_cancel(why);
            self.end_untold();
        }
    }

    /// Ends everything. The caller has closed the connection: nothing can move any more.
    pub fn fail_all(&mut self, broken: &Broken) {
        for asked in self.operations.drain(..) {
            self.ended.push((asked.number, Outcome::Failed { error: broken.to_string() }));
        }
        self.calls.fail_all(broken);
    }

    /// Which operations have ended since this was asked before.
    pub fn take_ended(&mut self) -> std::vec::Drain<'_, (u64, Outcome)> {
        self.ended.drain(..)
    }

    /// Whether every operation and every call has ended.
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty() && self.calls.is_idle()
    }

    /// Operations that are to be cancelled and of which the peer has not heard have ended.
    fn end_untold(&mut self) {
        let ended = &mut self.ended;
        self.operations.retain(|asked| match asked.cancel {
            Cancel::Wanted(why) if !asked.told => {
                ended.push((asked.number, Outcome::Failed { error: why.into() }));
                false
            }
            _ => true,
        });
    }

    /// The position of an operation of which the peer may speak.
    fn find(&self, number: u64, what: &'static str) -> Result<usize, Broken> {
        let position = self.operations.binary_search_by_key(&number, |asked| asked.number);
        let told =
            position.ok().filter(|at| self.operations[*at].told && self.operations[*at].answer.is_none());
        told.ok_or(Broken::unexpected(what, number))
    }

    fn answer(&mut self, at: usize, outcome: Outcome) {
        self.operations[at].answer = Some(outcome);
        self.settle(at);
    }

    fn settle(&mut self, at: usize) {
        if self.operations[at].on_wire || self.operations[at].answer.is_none() {
            return;
        }
        if let Some(Asked { number, answer: Some(outcome), .. }) = self.operations.remove(at) {
            self.ended.push((number, outcome));
        }
    }

    fn welcomed(&mut self, welcome: Welcome) -> Result<(), Broken> {
        if welcome.version != VERSION {
            return Err(Broken::Bad(BadFrame::Version { version: welcome.version }));
        }
        let anybody = self.to_instance == [0; 16];
        if !anybody && welcome.from.instance != self.to_instance {
            return Err(Broken::Bad(BadFrame::Body {
                what: "another instance than the one that was asked for",
            }));
        }
        self.greeted = Greeted::Welcomed(welcome);
        Ok(())
    }

    fn done(&mut self, number: u64) -> Result<(), Broken> {
        let at = self.find(number, "a DONE for nothing")?;
        let asked = &self.operations[at];
        if asked.operation.payload.left() > 0 || asked.on_wire {
            return Err(Broken::unexpected("a DONE before the last byte", number));
        }
        let outcome = if asked.corrupt { Outcome::Corrupt } else { Outcome::Moved { bytes: asked.bytes } };
        self.answer(at, outcome);
        Ok(())
    }

    fn failed(&mut self, number: u64, fault: &Fault) -> Result<(), Broken> {
        let at = self.find(number, "a FAILED for nothing")?;
        let outcome = match fault.code {
            FaultCode::Corrupt => Outcome::Corrupt,
            FaultCode::Closing | FaultCode::Other => Outcome::Failed { error: fault.to_string() },
            _ => Outcome::Denied { error: fault.to_string() },
        };
        self.answer(at, outcome);
        Ok(())
    }

    fn cancelled(&mut self, number: u64) -> Result<(), Broken> {
        let at = self.find(number, "a CANCELLED for nothing")?;
        let Cancel::Told(why) = self.operations[at].cancel else {
            return Err(Broken::unexpected("a CANCELLED that was not asked for", number));
        };
        self.answer(at, Outcome::Failed { error: why.into() });
        Ok(())
    }

    fn pong(&mut self) -> Result<(), Broken> {
        let asked = std::mem::replace(&mut self.ping, Ping::None) == Ping::Sent;
        if asked { Ok(()) } else { Err(Broken::unexpected("a PONG for nothing", 0)) }
    }

    fn ops_max(&self) -> usize {
        match &self.greeted {
            Greeted::Ready(welcome, _) => welcome.ops_max.into(),
            _ => 0,
        }
    }

    /// When an idle flow that is in use asks whether the peer is alive.
    fn ping_at_us(&self) -> Option<u64> {
        let at_us = self.heard_us.max(self.used_us).saturating_add(self.ping_after_us);
        let in_use = at_us < self.used_us.saturating_add(IN_USE_US) || !self.calls.is_idle();
        let idle = self.operations.is_empty() && self.ping == Ping::None && self.ops_max() > 0;
        (in_use && idle).then_some(at_us)
    }
}

impl Asked {
    fn want_cancel(&mut self, why: &'static str) {
        if let (Cancel::No, None) = (&self.cancel, &self.answer) {
            self.cancel = Cancel::Wanted(why);
        }
    }

    /// The CANCEL that is due. Not in the middle of a part.
    fn tell_cancel(&mut self, out: &mut Vec<u8>) {
        if let (Cancel::Wanted(why), false, None) = (&self.cancel, self.on_wire, &self.answer) {
            Frame::Cancel.put(self.number, out);
            self.cancel = Cancel::Told(why);
        }
    }

    /// Whether there is anything left to say of it, apart from a CANCEL.
    fn goes_on(&self) -> bool {
        matches!(self.cancel, Cancel::No) && self.answer.is_none()
    }

    fn tell(&mut self, out: &mut Vec<u8>) {
        let command = std::mem::take(&mut self.operation.command);
        let frame = match self.operation.op_kind {
            OpKind::Read => Frame::Read(command),
            OpKind::Write => Frame::Write(command),
        };
        frame.put(self.number, out);
        self.told = true;
    }
}

impl Role for Requester {
    fn frame(&mut self, now_us: u64, operation: u64, frame: Frame) -> Result<(), Broken> {
        self.heard_us = now_us;
        match (frame, &self.greeted) {
            (Frame::Refused(refusal), _) => return Err(Broken::Refused(refusal)),
            (Frame::Welcome(welcome), Greeted::No) => return self.welcomed(welcome),
            (Frame::Regions(regions), Greeted::Welcomed(welcome)) => {
                self.greeted = Greeted::Ready(*welcome, regions);
                return Ok(());
            }
            (Frame::Done, Greeted::Ready(..)) => return self.done(operation),
            (Frame::Failed(fault), Greeted::Ready(..)) => return self.failed(operation, &fault),
            (Frame::Cancelled, Greeted::Ready(..)) => return self.cancelled(operation),
            (Frame::Pong, Greeted::Ready(..)) => return self.pong(),
            (Frame::Reply(body), Greeted::Ready(..)) => return self.calls.answered(operation, Ok(body)),
            (Frame::Declined(why), Greeted::Ready(..)) => return self.calls.answered(operation, Err(why)),
            _ => {}
        }
        Err(Broken::Bad(BadFrame::Unexpected { what: "a frame that may not come now", operation }))
    }

    fn inbound(&mut self, number: u64, bytes: u32) -> Result<Option<PayloadPart>, Broken> {
        let at = self.find(number, "a DATA for nothing")?;
        let operation = &mut self.operations[at].operation;
        if operation.op_kind != OpKind::Read || u64::from(bytes) > operation.payload.left() {
            return Err(Broken::unexpected("a DATA that nobody asked for", number));
        }
        Ok(Some(operation.payload.cut(bytes as usize)))
    }

    fn placed(&mut self, number: u64, arrival: Arrival) -> Result<(), Broken> {
        let at = self.find(number, "a DATA for nothing")?;
        self.operations[at].corrupt |= arrival != Arrival::Intact;
        Ok(())
    }

    fn outbound(&mut self, out: &mut Vec<u8>) -> Option<(u64, PayloadPart)> {
        if let Some(hello) = self.hello.take() {
            Frame::Hello(hello).put(0, out);
        }
        if self.ping == Ping::Due {
            Frame::Ping.put(0, out);
            self.ping = Ping::Sent;
        }
        let ops_max = self.ops_max();
        // A call takes a PING along: the answer may take its time, a sign of life may not.
        if ops_max > 0 && self.calls.tell(out) && self.ping == Ping::None {
            Frame::Ping.put(0, out);
            self.ping = Ping::Sent;
        }
        let mut told = self.operations.iter().filter(|asked| asked.told).count();
        for asked in &mut self.operations {
            asked.tell_cancel(out);
        }
        for asked in self.operations.iter_mut().filter(|asked| asked.goes_on()) {
            if !asked.told {
                if told >= ops_max {
                    return None;
                }
                asked.tell(out);
                told += 1;
            }
            if asked.operation.op_kind == OpKind::Write && asked.operation.payload.left() > 0 {
                asked.on_wire = true;
                let part = asked.operation.payload.cut_to_send(DATA_BYTES_MAX as usize);
                return Some((asked.number, part));
            }
        }
        None
    }

    fn sent(&mut self, number: u64, _withdrawn: bool) {
        if let Ok(at) = self.operations.binary_search_by_key(&number, |asked| asked.number) {
            self.operations[at].on_wire = false;
            self.settle(at);
        }
    }

    fn awaits(&self) -> bool {
        let greeting = !matches!(self.greeted, Greeted::Ready(..));
        greeting || self.ping != Ping::None || !self.operations.is_empty()
    }

    fn distrusts_late_bytes(&self) -> bool {
        false
    }

    fn next_timeout_us(&self) -> Option<u64> {
        let waiting = self.operations.iter().filter(|asked| asked.goes_on());
        let deadline_us = waiting.map(|asked| asked.operation.deadline_us).min();
        [deadline_us, self.ping_at_us(), self.calls.next_timeout_us()].into_iter().flatten().min()
    }

    fn expire(&mut self, now_us: u64) -> Result<(), Broken> {
        for asked in &mut self.operations {
            if asked.operation.deadline_us <= now_us {
                asked.want_cancel("the operation's deadline has passed");
            }
        }
        self.end_untold();
        self.calls.expire(now_us);
        if self.ping_at_us().is_some_and(|at_us| at_us <= now_us) {
            self.ping = Ping::Due;
        }
        Ok(())
    }
}
