//! The end that owns the memory: it lets a peer in, carries out its operations on what is offered,
//! and says no with a reason. Nothing that a peer says is trusted.
//!
//! Each operation is answered exactly once: DONE, FAILED or CANCELLED. DATA of a WRITE that was
//! answered early is thrown away until the peer has heard. What is under way is in `reads` and
//! `writes`; this file takes frames and gives answers.

use super::command::{Command, Fault, FaultCode};
use super::connection::{Arrival, Role};
use super::error::{BadFrame, Broken, OP_BYTES_MAX, SPANS_MAX, VERSION};
use super::export::OpKind;
use super::exports::{Exports, Grant};
use super::frame::{Frame, Header, Kind, OPS_MAX};
use super::greeting::{Hello, Identity, Refusal, RefusalCode, Welcome};
use super::payload::PayloadPart;
use super::reads::{Cancelled, Next, Reads};
use super::service::CallSession;
use super::staging::{Staging, Wake};
use super::writes::Writes;
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
    writes: Writes,
    reads: Reads,
    answers: Vec<u8>,
    faults: Vec<FaultCode>,
    /// Has the connection's thread look what has ended.
    wake: Wake,
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
            writes: Writes::default(),
            reads: Reads::default(),
            answers: Vec::new(),
            faults: Vec::new(),
            wake: Arc::new(|| {}),
        }
    }

    /// Has `wake` called when a copy between a GPU and staging has ended.
    pub fn waking(mut self, wake: Wake) -> Responder {
        self.wake = wake;
        self
    }

    /// Begins nothing new from now on.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Whether nothing is under way and nothing is left to be said.
    pub fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.answers.is_empty() && self.writes.is_empty() && self.session.is_idle()
    }

    /// What operations failed with since the last call.
    pub fn take_faults(&mut self) -> std::vec::Drain<'_, FaultCode> {
        self.faults.drain(..)
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
    fn begin(&mut self, number: u64, command: &Command, op_kind: OpKind) -> Result<(), Broken> {
        let unexpected = |what| Broken::unexpected(what, number);
        if number <= self.last_number {
            return Err(unexpected("an operation out of order"));
        }
        if self.writes.is_due() {
            return Err(unexpected("an operation before the bytes of the one before"));
        }
        if self.reads.len() >= OPS_MAX.into() {
            return Err(unexpected("more operations than were allowed"));
        }
        self.last_number = number;
        self.writes.forget_answered();
        let grant = match self.closing {
            true => Err(Fault::new(FaultCode::Closing, "the node is about to end")),
            false => self.exports.resolve(command, op_kind),
        };
        let wake = Arc::clone(&self.wake);
        let open = move |grant: &Grant| grant.stager().map(|stager| Staging::open(stager, &wake)).transpose();
        let begun = match (grant, op_kind) {
            (Ok(grant), OpKind::Read) => self.reads.push(number, grant, open),
            (Ok(grant), OpKind::Write) => self.writes.begin(number, Some(grant), open),
            (Err(fault), OpKind::Read) => Err(fault),
            (Err(fault), OpKind::Write) => self.writes.begin(number, None, open).and(Err(fault)),
        };
        begun.or_else(|fault| self.answer(number, Frame::Failed(fault)))
    }

    fn cancel(&mut self, number: u64) -> Result<(), Broken> {
        if number > self.last_number {
            return Err(Broken::unexpected("a CANCEL of what was not asked for", number));
        }
        // What is not found here was answered before; that answer is the end of it.
        if !self.writes.cancel(number) && self.reads.cancel(number) == Cancelled::Now {
            self.answer(number, Frame::Cancelled)?;
        }
        self.answer_writes()
    }

    /// Answers the WRITEs that are over.
    fn answer_writes(&mut self) -> Result<(), Broken> {
        let answers = self.writes.take_answers(&self.exports);
        answers.into_iter().try_for_each(|(number, frame)| self.answer(number, frame))
    }
}

impl Role for Responder {
    fn frame(&mut self, _now_us: u64, operation: u64, frame: Frame) -> Result<(), Broken> {
        match (frame, self.peer) {
            (Frame::Hello(hello), None) => self.greet(&hello),
            (Frame::Read(command), Some(_)) => self.begin(operation, &command, OpKind::Read),
            (Frame::Write(command), Some(_)) => self.begin(operation, &command, OpKind::Write),
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

    fn inbound(&mut self, number: u64, bytes: u32) -> Result<Option<PayloadPart>, Broken> {
        let part = self.writes.inbound(number, bytes, &self.exports)?;
        self.answer_writes().map(|()| part)
    }

    fn placed(&mut self, _number: u64, arrival: Arrival) -> Result<(), Broken> {
        let text = "the bytes that arrived are not those that were sent";
        self.writes.placed(arrival, || Fault::new(FaultCode::Corrupt, text));
        self.answer_writes()
    }

    fn outbound(&mut self, out: &mut Vec<u8>) -> Option<(u64, PayloadPart)> {
        out.append(&mut self.answers);
        self.session.tell(out);
        loop {
            match self.reads.next(&self.exports) {
                Next::Part(number, part) => return Some((number, part)),
                Next::Failed(number, fault) => {
                    self.faults.push(fault.code);
                    Frame::Failed(fault).put(number, out);
                }
                Next::Nothing => return None,
            }
        }
    }

    fn sent(&mut self, number: u64, withdrawn: bool) {
        if let Some(frame) = self.reads.sent(number, withdrawn, &self.exports) {
            // Reads are bounded in number, so their answers need no limit of their own.
            if let Frame::Failed(fault) = &frame {
                self.faults.push(fault.code);
            }
            frame.put(number, &mut self.answers);
        }
    }

    fn awaits(&self) -> bool {
        self.writes.is_due()
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
        self.reads.copy_ended();
        self.writes.copy_ended();
        self.answer_writes()?;
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
