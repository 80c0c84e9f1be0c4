//! One TLS session over a carrier, as a carrier of its own: the handshake within its limit, bytes
//! that are sealed and opened on their way, and what to say to a peer that speaks no TLS.
//!
//! Short slices are gathered into records of 16 KiB, long ones are sealed where they lie, and as
//! many records as make a DATA are one send. Bytes count as sent when their whole record is.

use super::carrier::{Carrier, Ready, Scatter, Wire, slice};
use super::connection::again;
use super::error::Broken;
use super::frame::{CRC_BYTES, Frame, HEADER_BYTES, Header};
use super::greeting::{Refusal, RefusalCode};
use super::tls::{SpeaksFor, TlsConfig};
use super::wake::WakeUp;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, UnbufferedStatus, WriteTraffic};
use std::collections::VecDeque;
use std::io;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// Bytes of a record before it is sealed, at most.
const RECORD_BYTES: usize = 16 << 10;
/// What sealing adds at most, new keys that are announced before the record included.
const SEAL_BYTES: usize = 512;
/// Records that are sealed at once at most: the payload of a DATA, its frame and its CRC.
const RECORDS_MAX: usize = 17;
/// Sealed bytes that wait to be sent, or to be opened, at most.
const BUFFER_BYTES: usize = RECORDS_MAX * (RECORD_BYTES + SEAL_BYTES);
/// The first byte of a record, whatever its kind.
const RECORD_KINDS: std::ops::RangeInclusive<u8> = 20..=24;

/// A carrier whose bytes are sealed.
pub(super) struct TlsSession {
    carrier: Box<dyn Carrier>,
    state: State,
    incoming: Incoming,
    outgoing: Outgoing,
}

enum State {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// Bytes from the carrier on their way to the caller.
struct Incoming {
    /// Received, from `start` to `end`, and not opened.
    sealed: Box<[u8]>,
    start: usize,
    end: usize,
    /// What is sealed is no whole record.
    starved: bool,
    /// Opened, and not taken.
    opened: Vec<u8>,
    /// The peer says nothing more.
    closed: bool,
}

/// Bytes from the caller on their way to the carrier.
struct Outgoing {
    /// From `sent` to `end`.
    sealed: Box<[u8]>,
    sent: usize,
    end: usize,
    /// Where each record ends, and how many bytes of the caller it has.
    records: VecDeque<(usize, usize)>,
    /// The record that short slices are gathered into.
    gathered: Vec<u8>,
}

/// What a handshake waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Handshake {
    Done,
    WantsToReceive,
    WantsToSend,
}

/// What a step of the session came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Something was opened, or is to be said.
    Went,
    /// More has to be received first.
    Starved,
    /// Bytes of the caller were sealed.
    Sealed,
    /// The peer says nothing more.
    Closed,
}

impl TlsSession {
    /// The end that connects.
    pub fn client(carrier: Box<dyn Carrier>, tls: &TlsConfig) -> io::Result<TlsSession> {
        // An address is not told to the peer, and this one is not compared with its certificate
        // either.
        let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
        let connection = UnbufferedClientConnection::new(tls.client(), name).map_err(invalid)?;
        Ok(TlsSession::over(carrier, State::Client(connection)))
    }

    /// The end that accepts.
    pub fn server(carrier: Box<dyn Carrier>, tls: &TlsConfig) -> io::Result<TlsSession> {
        let connection = UnbufferedServerConnection::new(tls.server()).map_err(invalid)?;
        Ok(TlsSession::over(carrier, State::Server(connection)))
    }

    fn over(carrier: Box<dyn Carrier>, state: State) -> TlsSession {
        let incoming = Incoming {
            sealed: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
            starved: true,
            opened: Vec::new(),
            closed: false,
        };
        let outgoing = Outgoing {
            sealed: vec![0; BUFFER_BYTES].into(),
            sent: 0,
            end: 0,
            records: VecDeque::new(),
            gathered: Vec::new(),
        };
        TlsSession { carrier, state, incoming, outgoing }
    }

    /// Goes on with the handshake as far as it can without waiting. When it fails, a peer that
    /// speaks TLS was told why.
    fn shake(&mut self) -> io::Result<Handshake> {
        loop {
            self.outgoing.flush(&mut *self.carrier)?;
            if self.outgoing.end > 0 {
                return Ok(Handshake::WantsToSend);
            }
            let step = self.open(&mut Scatter::default());
            if step.is_err() && self.peer_speaks_tls() {
                // What is to be said about the error is said if the carrier takes it at once.
                let _ = self.open(&mut Scatter::default());
                let _ = self.outgoing.flush(&mut *self.carrier);
            }
            match step? {
                Step::Went | Step::Sealed => {}
                Step::Starved if !self.is_shaking() => return Ok(Handshake::Done),
                Step::Starved => match self.incoming.fill(&mut *self.carrier) {
                    Ok(0) => return Err(io::ErrorKind::ConnectionReset.into()),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Ok(Handshake::WantsToReceive);
                    }
                    Err(error) => return Err(error),
                },
                Step::Closed => return Err(io::ErrorKind::ConnectionReset.into()),
            }
        }
    }

    /// Whether the handshake is still under way.
    fn is_shaking(&self) -> bool {
        match &self.state {
            State::Client(connection) => connection.is_handshaking(),
            State::Server(connection) => connection.is_handshaking(),
        }
    }

    /// Whether what was received begins as a record does.
    fn peer_speaks_tls(&self) -> bool {
        self.unopened().first().is_none_or(|first| RECORD_KINDS.contains(first))
    }

    /// What was received and is not opened.
    fn unopened(&self) -> &[u8] {
        &self.incoming.sealed[self.incoming.start..self.incoming.end]
    }

    /// Whether a receive may find something that the carrier does not show.
    fn has_input(&self) -> bool {
        !self.incoming.opened.is_empty() || self.incoming.closed || !self.incoming.starved
    }

    /// Opens the next record, or does what it asks for.
    fn open(&mut self, into: &mut Scatter<'_>) -> io::Result<Step> {
        let Incoming { sealed, start, end, starved, opened, closed } = &mut self.incoming;
        let mut buffers = StepBuffers { into, opened, outgoing: &mut self.outgoing, slices: &[] };
        let sealed = &mut sealed[*start..*end];
        let (taken, step) = match &mut self.state {
            State::Client(connection) => buffers.act(connection.process_tls_records(sealed)),
            State::Server(connection) => buffers.act(connection.process_tls_records(sealed)),
        };
        *start += taken;
        *starved = matches!(step, Ok(Step::Starved));
        *closed |= matches!(step, Ok(Step::Closed));
        step
    }

    /// Seals as much of the slices as is sent at once.
    fn seal(&mut self, slices: &[libc::iovec]) -> io::Result<()> {
        loop {
            let Incoming { opened, closed, .. } = &mut self.incoming;
            let mut buffers =
                StepBuffers { into: &mut Scatter::default(), opened, outgoing: &mut self.outgoing, slices };
            let (_, step) = match &mut self.state {
                State::Client(connection) => buffers.act(connection.process_tls_records(&mut [])),
                State::Server(connection) => buffers.act(connection.process_tls_records(&mut [])),
            };
            match step? {
                Step::Sealed => return Ok(()),
                Step::Went => {}
                Step::Closed => *closed = true,
                Step::Starved => return Err(invalid("the handshake is not over")),
            }
        }
    }
}

impl Wire for TlsSession {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        // What was sealed before is the beginning of these slices.
        if !self.outgoing.owes() {
            self.seal(slices)?;
        }
        match self.outgoing.flush(&mut *self.carrier)? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            sent => Ok(sent),
        }
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: the caller says that the slices are writable.
        let mut into = unsafe { Scatter::over(slices) };
        let taken = put(&mut into, &self.incoming.opened);
        self.incoming.opened.drain(..taken);
        while !into.is_full() {
            let step = if self.incoming.closed { Step::Closed } else { self.open(&mut into)? };
            match step {
                Step::Went | Step::Sealed => {}
                Step::Closed => return Ok(into.placed),
                Step::Starved => match self.incoming.fill(&mut *self.carrier) {
                    Ok(0) => self.incoming.closed = true,
                    Ok(_) => {}
                    Err(_) if into.placed > 0 => return Ok(into.placed),
                    Err(error) => return Err(error),
                },
            }
        }
        Ok(into.placed)
    }
}

impl Carrier for TlsSession {
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        if !self.has_input() {
            return self.carrier.wait(waker, sending, timeout);
        }
        let ready = self.carrier.wait(waker, sending, Some(Duration::ZERO))?;
        Ok(Ready { readable: true, ..ready })
    }

    fn shake_hands(&mut self, waker: &WakeUp, limit_us: u64, stop: &dyn Fn() -> bool) -> Result<(), Broken> {
        let (began, limit) = (Instant::now(), Duration::from_micros(limit_us));
        self.carrier.shake_hands(waker, limit_us, stop)?;
        loop {
            let sending = match self.shake() {
                Ok(Handshake::Done) => return Ok(()),
                Ok(Handshake::WantsToSend) => true,
                Ok(Handshake::WantsToReceive) => false,
                Err(_) if !self.peer_speaks_tls() => return Err(stranger(self.unopened())),
                Err(error) => return Err(broken(error)),
            };
            let left = limit.saturating_sub(began.elapsed());
            if stop() {
                return Err(Broken::Ended);
            }
            if left.is_zero() {
                return Err(Broken::Frozen { limit_us });
            }
            self.carrier.wait(waker, sending, Some(left)).map_err(broken)?;
        }
    }

    /// The nodes that the peer's certificate speaks for.
    fn speaks_for(&self) -> SpeaksFor {
        let certificates = match &self.state {
            State::Client(connection) => connection.peer_certificates(),
            State::Server(connection) => connection.peer_certificates(),
        };
        certificates.and_then(<[_]>::first).map_or(SpeaksFor::Only(Vec::new()), SpeaksFor::of)
    }

    fn reset(self: Box<Self>) {
        self.carrier.reset();
    }

    /// In plain text to a peer that speaks no TLS, and not at all in the middle of a handshake.
    fn part(mut self: Box<Self>, farewell: &[u8]) {
        if !self.is_shaking() {
            if !farewell.is_empty() {
                // SAFETY: the farewell is readable. Whoever does not listen is not told.
                let _ = unsafe { self.send(&[slice(farewell.as_ptr().cast_mut(), farewell.len())]) };
            }
            self.carrier.part(&[]);
        } else if self.peer_speaks_tls() {
            self.carrier.part(&[]);
        } else {
            self.carrier.part(farewell);
        }
    }
}

/// Where the bytes of a step come from and go to.
struct StepBuffers<'a, 'b> {
    into: &'a mut Scatter<'b>,
    opened: &'a mut Vec<u8>,
    outgoing: &'a mut Outgoing,
    /// To be sealed, if there are any.
    slices: &'a [libc::iovec],
}

impl StepBuffers<'_, '_> {
    /// Does what the session asks for. Says how many of the received bytes are done with.
    fn act<Data>(&mut self, status: UnbufferedStatus<'_, '_, Data>) -> (usize, io::Result<Step>) {
        let UnbufferedStatus { mut discard, state } = status;
        let step = match state {
            Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
                match traffic.next_record() {
                    Some(Ok(record)) => {
                        discard += record.discard;
                        let taken = put(self.into, record.payload);
                        self.opened.extend(&record.payload[taken..]);
                    }
                    Some(Err(error)) => break Err(invalid(error)),
                    None => break Ok(Step::Went),
                }
            },
            Ok(ConnectionState::EncodeTlsData(mut said)) => {
                self.outgoing.append(0, |room| said.encode(room)).map(|()| Step::Went)
            }
            Ok(ConnectionState::TransmitTlsData(said)) => {
                // It goes before everything that is sealed from now on.
                said.done();
                Ok(Step::Went)
            }
            Ok(ConnectionState::WriteTraffic(mut traffic)) if !self.slices.is_empty() => {
                self.outgoing.seal(self.slices, &mut traffic).map(|()| Step::Sealed)
            }
            Ok(ConnectionState::WriteTraffic(_) | ConnectionState::BlockedHandshake) => Ok(Step::Starved),
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(Step::Closed),
            Ok(_) => Err(invalid("early data, which nobody asked for")),
            Err(error) => Err(invalid(error)),
        };
        (discard, step)
    }
}

impl Incoming {
    /// Receives once. 0: the peer sends nothing more.
    fn fill(&mut self, carrier: &mut dyn Carrier) -> io::Result<usize> {
        self.sealed.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = &mut self.sealed[self.end..];
        if room.is_empty() {
            return Err(invalid("a record longer than any may be"));
        }
        // SAFETY: the room is this session's own.
        let received = unsafe { carrier.receive(&[slice(room.as_mut_ptr(), room.len())]) }?;
        self.end += received;
        self.starved &= received == 0;
        Ok(received)
    }
}

impl Outgoing {
    /// Whether bytes of the caller were sealed and are not sent.
    fn owes(&self) -> bool {
        self.records.iter().any(|(_, bytes)| *bytes > 0)
    }

    /// Appends what `seal` writes into the room it is given, with `bytes` of the caller in it.
    fn append<E: std::fmt::Display>(
        &mut self,
        bytes: usize,
        seal: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> io::Result<()> {
        self.end += seal(&mut self.sealed[self.end..]).map_err(invalid)?;
        self.records.push_back((self.end, bytes));
        Ok(())
    }

    /// Seals slices, as many as are sent at once. Their memory is readable: `Wire::send` was
    /// promised that.
    fn seal<Data>(&mut self, slices: &[libc::iovec], traffic: &mut WriteTraffic<'_, Data>) -> io::Result<()> {
        let mut gathered = std::mem::take(&mut self.gathered);
        let room = RECORD_BYTES * (RECORDS_MAX - self.records.len().min(RECORDS_MAX - 1));
        let mut left = room;
        for slice in slices.iter().filter(|slice| slice.iov_len > 0) {
            let len = slice.iov_len.min(left);
            left -= len;
            // SAFETY: the caller of `Wire::send` says that the slices are readable.
            let mut bytes = unsafe { std::slice::from_raw_parts(slice.iov_base.cast::<u8>(), len) };
            while !bytes.is_empty() {
                let short = RECORD_BYTES - gathered.len();
                let (now, rest) = bytes.split_at(bytes.len().min(short));
                bytes = rest;
                if now.len() == RECORD_BYTES {
                    self.append(RECORD_BYTES, |room| traffic.encrypt(now, room))?;
                    continue;
                }
                gathered.extend(now);
                if gathered.len() == RECORD_BYTES {
                    self.append(RECORD_BYTES, |room| traffic.encrypt(&gathered, room))?;
                    gathered.clear();
                }
            }
        }
        if !gathered.is_empty() {
            self.append(gathered.len(), |room| traffic.encrypt(&gathered, room))?;
            gathered.clear();
        }
        self.gathered = gathered;
        Ok(())
    }

    /// Sends what the carrier takes, and says how many bytes of the caller have left with whole
    /// records.
    fn flush(&mut self, carrier: &mut dyn Carrier) -> io::Result<usize> {
        while self.sent < self.end {
            let rest = &self.sealed[self.sent..self.end];
            // SAFETY: the sealed bytes are this session's own.
            match unsafe { carrier.send(&[slice(rest.as_ptr().cast_mut(), rest.len())]) } {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let mut left = 0;
        while let Some((_, bytes)) = self.records.pop_front_if(|(end, _)| *end <= self.sent) {
            left += bytes;
        }
        if self.sent == self.end {
            (self.sent, self.end) = (0, 0);
        }
        Ok(left)
    }
}

fn put(into: &mut Scatter<'_>, opened: &[u8]) -> usize {
    // SAFETY: the bytes are borrowed. Nobody's slices lie in what a session has opened.
    unsafe { into.put(opened.as_ptr(), opened.len()) }
}

/// An error of the session itself, not of the system.
fn invalid(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

fn broken(error: io::Error) -> Broken {
    again(error).err().unwrap_or(Broken::Closed)
}

/// What a peer means that speaks no TLS: a refusal in plain text, or that this end is to refuse it.
fn stranger(bytes: &[u8]) -> Broken {
    if let Some(refusal) = plain_refusal(bytes) {
        return Broken::Refused(refusal);
    }
    Broken::turned(RefusalCode::NotEncrypted, "this node speaks TLS only")
}

fn plain_refusal(bytes: &[u8]) -> Option<Refusal> {
    let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let header = Header::parse(header).ok()?;
    let body = rest.get(..header.body as usize).filter(|body| body.len() >= CRC_BYTES)?;
    match Frame::parse(&header, body) {
        Ok(Frame::Refused(refusal)) => Some(refusal),
        _ => None,
    }
}
