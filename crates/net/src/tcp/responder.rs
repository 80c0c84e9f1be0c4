//! The end that owns the memory: it lets a peer in, carries out its operations on what is offered,
//! and says no with a reason. Nothing that a peer says is trusted.
//!
//! Each operation is answered exactly once: DONE, FAILED or CANCELLED. DATA of a WRITE that was
//! answered early is thrown away until the peer has heard.

use super::command::{Command, Fault, FaultCode};
use super::connection::{Arrival, Role};
use super::error::{BadFrame, Broken, OP_BYTES_MAX, SPANS_MAX, VERSION};
use super::export::Wish;
use super::exports::{Exports, Grant};
use super::frame::{DATA_BYTES_MAX, Frame, Header, Kind, OPS_MAX};
use super::greeting::{Hello, Identity, Refusal, RefusalCode, Welcome};
use super::payload::PayloadPart;
use super::service::CallSession;
use std::collections::VecDeque;
use std::sync::Arc;

/// Answers that may wait for a peer that does not take them, in bytes. One that goes on asking is
/// cut off.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Decides who is let in.
pub(super) type Authenticator = Box<dyn FnMut(&Hello) -> Result<(), Refusal> + Send>;

/// The answering end of a connection.
pub(super) struct Responder {
    me: Identity,
    exports: Arc<Exports>,
    authenticator: Authenticator,
    session: CallSession,
    /// The peer, once it is let in. Until when it has to be, otherwise.
    peer: Option<Identity>,
    greet_until_us: u64,
    closing: bool,
    last_number: u64,
    write: Option<Writing>,
    reads: VecDeque<Reading>,
    answers: Vec<u8>,
    faults: Vec<FaultCode>,
}

/// The WRITE whose bytes are due. An answered one takes no more of them.
struct Writing {
    number: u64,
    grant: Option<Grant>,
}

/// A READ whose bytes are not all sent.
struct Reading {
    number: u64,
    grant: Grant,
    on_wire: bool,
    cancelled: bool,
}

impl Responder {
    pub fn new(
        me: Identity,
        exports: Arc<Exports>,
        authenticator: Authenticator,
        session: CallSession,
        greet_until_us: u64,
    ) -> Responder {
        Responder {
            me,
            exports,
            authenticator,
            session,
            peer: None,
            greet_until_us,
            closing: false,
            last_number: 0,
            write: None,
            reads: VecDeque::new(),
            answers: Vec::new(),
            faults: Vec::new(),
        }
    }

    /// Begins nothing new from now on.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Whether nothing is under way and nothing is left to be said.
    pub fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.answers.is_empty() && !self.is_writing() && self.session.is_idle()
    }

    /// What operations failed with since the last call.
    pub fn take_faults(&mut self) -> std::vec::Drain<'_, FaultCode> {
        self.faults.drain(..)
    }

    fn is_writing(&self) -> bool {
        self.write.as_ref().is_some_and(|write| write.grant.is_some())
    }

    fn answer(&mut self, number: u64, frame: Frame) -> Result<(), Broken> {
        if let Frame::Failed(fault) = &frame {
            self.faults.push(fault.code);
        }
        frame.put(number, &mut self.answers);
        let unexpected = || Broken::unexpected("more than it takes answers to", number);
        if self.answers.len() > ANSWER_BYTES_MAX { Err(unexpected()) } else { Ok(()) }
    }

    fn greet(&mut self, hello: &Hello) -> Result<(), Broken> {
        let (first, last) = hello.versions;
        if !(first..=last).contains(&VERSION) {
            let text = format!("this node speaks version {VERSION}, the peer {first} to {last}");
            return Err(Broken::turned(RefusalCode::Version, text));
        }
        if hello.to_instance != [0; 16] && hello.to_instance != self.me.instance {
            return Err(Broken::turned(RefusalCode::Instance, "the node was started anew since"));
        }
        if self.closing {
            return Err(Broken::turned(RefusalCode::Closing, "the node is about to end"));
        }
        (self.authenticator)(hello).map_err(Broken::Turned)?;
        self.peer = Some(hello.from);
        let welcome = Welcome {
            version: VERSION,
            ops_max: OPS_MAX,
            spans_max: SPANS_MAX,
            op_bytes_max: OP_BYTES_MAX,
            from: self.me,
        };
        Frame::Welcome(welcome).put(0, &mut self.answers);
        Frame::Regions(self.exports.regions()).put(0, &mut self.answers);
        Ok(())
    }

    /// Takes an operation in, or says why not.
    fn begin(&mut self, number: u64, command: &Command, wish: Wish) -> Result<(), Broken> {
        let unexpected = |what| Broken::unexpected(what, number);
        if number <= self.last_number {
            return Err(unexpected("an operation out of order"));
        }
        if self.is_writing() {
            return Err(unexpected("an operation before the bytes of the one before"));
        }
        if self.reads.len() >= OPS_MAX.into() {
            return Err(unexpected("more operations than were allowed"));
        }
        self.last_number = number;
        self.write = None;
        let grant = match self.closing {
            true => Err(Fault::new(FaultCode::Closing, "the node is about to end")),
            false => self.exports.resolve(command, wish),
        };
        match (grant, wish) {
            (Ok(grant), Wish::Read) => {
                self.reads.push_back(Reading { number, grant, on_wire: false, cancelled: false });
            }
            (Ok(grant), Wish::Write) => self.write = Some(Writing { number, grant: Some(grant) }),
            (Err(fault), _) => {
                if wish == Wish::Write {
                    self.write = Some(Writing { number, grant: None });
                }
                self.answer(number, Frame::Failed(fault))?;
            }
        }
        Ok(())
    }

    fn cancel(&mut self, number: u64) -> Result<(), Broken> {
        if number > self.last_number {
            return Err(Broken::unexpected("a CANCEL of what was not asked for", number));
        }
        if let Some(write) = self.write.as_mut().filter(|write| write.number == number) {
            return match write.grant.take() {
                Some(_) => self.answer(number, Frame::Cancelled),
                None => Ok(()),
            };
        }
        // What is not found here was answered before; that answer is the end of it.
        let Some(at) = self.reads.iter().position(|read| read.number == number) else { return Ok(()) };
        self.reads[at].cancelled = true;
        if self.reads[at].on_wire {
            return Ok(());
        }
        self.reads.remove(at);
        self.answer(number, Frame::Cancelled)
    }

    /// Ends the WRITE whose bytes are due with a reason.
    fn fail_write(&mut self, fault: Fault) -> Result<(), Broken> {
        let Some(write) = self.write.as_mut() else { return Ok(()) };
        let (number, unanswered) = (write.number, write.grant.take().is_some());
        if unanswered { self.answer(number, Frame::Failed(fault)) } else { Ok(()) }
    }

    /// Ends the WRITE if all its bytes are in place.
    fn finish_write(&mut self) -> Result<(), Broken> {
        let Some(Writing { number, grant: Some(grant) }) = &self.write else { return Ok(()) };
        let number = *number;
        if grant.payload.left() > 0 {
            return Ok(());
        }
        match self.exports.still_leased(grant) {
            Ok(()) => {
                self.write = None;
                self.answer(number, Frame::Done)
            }
            Err(fault) => self.fail_write(fault),
        }
    }

    /// How a READ goes on after a part: not at all, with this answer.
    fn read_answer(&self, read: &Reading, withdrawn: bool) -> Option<Frame> {
        if read.cancelled {
            return Some(Frame::Cancelled);
        }
        if withdrawn {
            return Some(Frame::Failed(withdrawn_fault()));
        }
        match self.exports.still_leased(&read.grant) {
            Err(fault) => Some(Frame::Failed(fault)),
            Ok(()) if read.grant.payload.left() == 0 => Some(Frame::Done),
            Ok(()) => None,
        }
    }
}

fn withdrawn_fault() -> Fault {
    Fault::new(FaultCode::StaleGeneration, "the region was withdrawn meanwhile")
}

impl Role for Responder {
    fn frame(&mut self, _now_us: u64, operation: u64, frame: Frame) -> Result<(), Broken> {
        match (frame, self.peer) {
            (Frame::Hello(hello), None) => self.greet(&hello),
            (Frame::Read(command), Some(_)) => self.begin(operation, &command, Wish::Read),
            (Frame::Write(command), Some(_)) => self.begin(operation, &command, Wish::Write),
            (Frame::Cancel, Some(_)) => self.cancel(operation),
            (Frame::Ping, Some(_)) => self.answer(0, Frame::Pong),
            (Frame::Call(body), Some(peer)) => self.session.call(peer, operation, body, self.closing),
            _ => Err(Broken::unexpected("a frame that may not come now", operation)),
        }
    }

    /// Of a peer that is not let in yet nothing is kept but a HELLO.
    fn begins(&self, header: &Header) -> Result<(), Broken> {
        match (self.peer, header.kind) {
            (None, kind) if kind != Kind::Hello => {
                Err(Broken::unexpected("a frame that may not come before HELLO", header.operation))
            }
            _ => Ok(()),
        }
    }

    fn inbound(&mut self, number: u64, bytes: u32) -> Result<PayloadPart, Broken> {
        let unexpected = |what| Broken::unexpected(what, number);
        let Some(write) = self.write.as_ref().filter(|write| write.number == number) else {
            return Err(unexpected("a DATA for nothing"));
        };
        let lease = write.grant.as_ref().map(|grant| self.exports.still_leased(grant));
        if let Some(Err(fault)) = lease {
            self.fail_write(fault)?;
        }
        let grant = self.write.as_mut().and_then(|write| write.grant.as_mut());
        match grant {
            None => Ok(PayloadPart::hollow(bytes as usize)),
            Some(grant) if u64::from(bytes) > grant.payload.left() => {
                Err(unexpected("more bytes than the operation has"))
            }
            Some(grant) => Ok(grant.payload.cut(bytes as usize)),
        }
    }

    fn placed(&mut self, _number: u64, arrival: Arrival) -> Result<(), Broken> {
        match arrival {
            Arrival::Intact => self.finish_write(),
            Arrival::Withdrawn => self.fail_write(withdrawn_fault()),
            Arrival::Corrupt => {
                let text = "the bytes that arrived are not those that were sent";
                self.fail_write(Fault::new(FaultCode::Corrupt, text))
            }
        }
    }

    fn outbound(&mut self, out: &mut Vec<u8>) -> Option<(u64, PayloadPart)> {
        out.append(&mut self.answers);
        self.session.tell(out);
        while let Some(read) = self.reads.front_mut() {
            match self.exports.still_leased(&read.grant) {
                Ok(()) => {
                    read.on_wire = true;
                    let part = read.grant.payload.cut_to_send(DATA_BYTES_MAX as usize);
                    return Some((read.number, part));
                }
                Err(fault) => {
                    self.faults.push(fault.code);
                    Frame::Failed(fault).put(read.number, out);
                    self.reads.pop_front();
                }
            }
        }
        None
    }

    fn sent(&mut self, number: u64, withdrawn: bool) {
        let Some(read) = self.reads.front_mut().filter(|read| read.number == number) else { return };
        read.on_wire = false;
        let answer = self.reads.front().and_then(|read| self.read_answer(read, withdrawn));
        if let Some(frame) = answer {
            self.reads.pop_front();
            // Reads are bounded in number, so their answers need no limit of their own.
            if let Frame::Failed(fault) = &frame {
                self.faults.push(fault.code);
            }
            frame.put(number, &mut self.answers);
        }
    }

    fn awaits(&self) -> bool {
        self.is_writing()
    }

    /// A peer that heard nothing for so long has told its caller that the operation failed. What it
    /// sent before must not be written now.
    fn distrusts_late_bytes(&self) -> bool {
        true
    }

    fn next_timeout_us(&self) -> Option<u64> {
        self.peer.is_none().then_some(self.greet_until_us)
    }

    fn expire(&mut self, now_us: u64) -> Result<(), Broken> {
        if self.peer.is_some() || now_us < self.greet_until_us {
            return Ok(());
        }
        Err(Broken::turned(RefusalCode::NotForebay, "no HELLO came in time"))
    }
}

/// What to tell a peer before the connection is closed, if anything. A browser is told in its own
/// language.
pub(super) fn farewell(broken: &Broken) -> Option<Vec<u8>> {
    let refusal = match broken {
        Broken::Bad(BadFrame::Http) => {
            let text = "This port speaks Forebay's own protocol, not HTTP.\n";
            let length = text.len();
            let head = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n";
            return Some(format!("{head}Content-Length: {length}\r\n\r\n{text}").into_bytes());
        }
        Broken::Bad(bad) => Refusal { code: bad.into(), text: bad.to_string() },
        Broken::Turned(refusal) => refusal.clone(),
        // Told by an alert. A reset would overtake it.
        Broken::Tls(_) => return Some(Vec::new()),
        _ => return None,
    };
    let mut bytes = Vec::new();
    Frame::Refused(refusal).put(0, &mut bytes);
    Some(bytes)
}
