//! One connection as a state machine: bytes become frames and payload in place, frames and payload
//! become bytes. Both ends use it, with a [`Role`] that knows what to say. Time and the wire are
//! passed in, so that a test can cut, delay and damage at every byte.
//!
//! Payload is received straight into the spans it is for; only what came together with a header is
//! copied there.

use super::carrier::{Ready, Wire, slice};
use super::error::Broken;
use super::frame::{CRC_BYTES, Frame, HEADER_BYTES, Header, crc32c};
use super::payload::{Discard, Owners, PayloadPart};
use crc_fast::Digest;
use std::io;

/// Slices of one system call at most (`IOV_MAX`).
const SLICES_MAX: usize = 1_024;
/// Bytes that are received at once where no payload is due. Small operations are whole in it.
const STASH_BYTES: usize = 16 << 10;
/// Sends and receives of one pump at most, so that callers are heard in between.
const ROUNDS: usize = 16;
/// Buffers on the way take this much whether or not the peer is alive. Whoever sends more without
/// being held up is slow, and the peer is not to blame.
const BUFFERED_BYTES: usize = 1 << 20;

/// How a part came to its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// With the CRC it was sent with.
    Intact,
    /// With another one.
    Corrupt,
    /// Its owner withdrew the memory meanwhile.
    Withdrawn,
}

/// What an end of a connection says and does.
pub(super) trait Role {
    /// A frame came.
    fn frame(&mut self, now_us: u64, operation: u64, frame: Frame) -> Result<(), Broken>;
    /// A header came; its body follows. An error: it is not wanted.
    fn begins(&self, _header: &Header) -> Result<(), Broken> {
        Ok(())
    }
    /// A DATA came; its bytes follow. Where do they go? `None`: there is no room before something
    /// has happened at this end; it is asked again then.
    fn inbound(&mut self, operation: u64, bytes: u32) -> Result<Option<PayloadPart>, Broken>;
    /// The bytes of a DATA have come.
    fn placed(&mut self, operation: u64, arrival: Arrival) -> Result<(), Broken>;
    /// Appends the frames that are to be sent now, and says which DATA follows them.
    fn outbound(&mut self, out: &mut Vec<u8>) -> Option<(u64, PayloadPart)>;
    /// The bytes of a DATA have been sent. `withdrawn`: some were zeros, because their owner
    /// withdrew them.
    fn sent(&mut self, operation: u64, withdrawn: bool);
    /// Whether anything is due from the peer.
    fn awaits(&self) -> bool;
    /// Whether bytes that are found after a long silence are void, because the peer has given up by
    /// then.
    fn distrusts_late_bytes(&self) -> bool;
    /// When [`expire`](Role::expire) has to be called.
    fn next_timeout_us(&self) -> Option<u64>;
    /// Does what is due.
    fn expire(&mut self, now_us: u64) -> Result<(), Broken>;
}

/// What a pump has left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Pumped {
    pub send_blocked: bool,
    /// Nothing is received before something has happened at this end.
    pub stalled: bool,
    /// There may be more to do at once.
    pub more: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Nothing,
    /// The wire takes no more for now.
    Blocked,
    All,
}

/// An end of a connection.
pub(super) struct Connection<R> {
    pub role: R,
    intake: Intake,
    outlet: Outlet,
    void: Discard,
    progress_limit_us: u64,
    /// When the peer gave the last sign of life: sent something, or took what had filled the
    /// buffers.
    moved_us: u64,
    /// When something became due of which nothing was before.
    due_us: u64,
    awaited: bool,
    /// The buffers on the way are full.
    held_up: bool,
    /// Bytes sent since the last sign of life.
    bytes_since_progress: usize,
}

/// Bytes on their way in.
struct Intake {
    state: State,
    stash: Box<[u8]>,
    start: usize,
    end: usize,
}

#[expect(clippy::large_enum_variant, reason = "there is one of it for each connection")]
enum State {
    Header,
    Body {
        header: Header,
        body: Vec<u8>,
    },
    /// The payload of a DATA is due for which there is no room yet.
    Stalled {
        operation: u64,
        bytes: u32,
    },
    Payload {
        operation: u64,
        part: PayloadPart,
        sum: Digest,
        withdrawn: bool,
    },
    Trailer {
        operation: u64,
        sum: u32,
        withdrawn: bool,
    },
}

/// Bytes on their way out: frames, then perhaps the payload of a DATA and its CRC.
#[derive(Default)]
struct Outlet {
    frames: Vec<u8>,
    frames_sent: usize,
    data: Option<Data>,
}

struct Data {
    operation: u64,
    part: PayloadPart,
    crc: [u8; CRC_BYTES],
    crc_sent: usize,
    withdrawn: bool,
}

impl<R: Role> Connection<R> {
    pub fn new(role: R, progress_limit_us: u64, now_us: u64) -> Connection<R> {
        let stash = vec![0; STASH_BYTES].into();
        Connection {
            role,
            intake: Intake { state: State::Header, stash, start: 0, end: 0 },
            outlet: Outlet::default(),
            void: Discard::default(),
            progress_limit_us,
            moved_us: now_us,
            due_us: now_us,
            awaited: false,
            held_up: false,
            bytes_since_progress: 0,
        }
    }

    /// Sends and receives what can be without waiting. `ready`: what a wait has found.
    pub fn pump(&mut self, now_us: u64, wire: &mut dyn Wire, mut ready: Ready) -> Result<Pumped, Broken> {
        if self.role.distrusts_late_bytes() {
            self.check_progress(now_us)?;
        }
        // First, so that what becomes due is sent by this very call.
        self.role.expire(now_us)?;
        if !self.awaited && self.is_awaiting() {
            // Nothing was due until now: the silence before does not count.
            self.due_us = now_us;
        }
        if self.held_up && ready.writable {
            self.held_up = false;
            self.moved(now_us);
        }
        self.resume(now_us)?;
        let mut pumped = Pumped::default();
        for _ in 0..ROUNDS {
            let sent = self.send(now_us, wire)?;
            let received = ready.readable && self.receive(now_us, wire, &mut ready.readable)?;
            pumped.send_blocked = sent == Sent::Blocked;
            pumped.more = sent == Sent::All || received;
            if !pumped.more {
                break;
            }
        }
        self.check_progress(now_us)?;
        self.awaited = self.is_awaiting();
        pumped.stalled = self.is_stalled();
        Ok(pumped)
    }

    /// When [`pump`](Connection::pump) has to be called even if nothing happens on the wire.
    pub fn next_timeout_us(&self) -> Option<u64> {
        let frozen_us = self.is_awaiting().then(|| self.frozen_at_us());
        [frozen_us, self.role.next_timeout_us()].into_iter().flatten().min()
    }

    /// Whether the peer must do something before this end is content: send what is due, or take
    /// what is sent.
    fn is_awaiting(&self) -> bool {
        self.role.awaits() || !self.outlet.is_empty()
    }

    fn check_progress(&self, now_us: u64) -> Result<(), Broken> {
        let frozen = self.is_awaiting() && now_us >= self.frozen_at_us();
        if frozen { Err(self.frozen()) } else { Ok(()) }
    }

    fn frozen_at_us(&self) -> u64 {
        self.moved_us.max(self.due_us).saturating_add(self.progress_limit_us)
    }

    fn frozen(&self) -> Broken {
        Broken::Frozen { limit_us: self.progress_limit_us }
    }

    /// The peer is said to be frozen. That is believed unless it gave a sign of life in the last
    /// half of the limit.
    pub fn fail_if_silent(&self, now_us: u64) -> Result<(), Broken> {
        let believed = now_us.saturating_sub(self.moved_us) >= self.progress_limit_us / 2;
        if believed { Err(self.frozen()) } else { Ok(()) }
    }

    fn moved(&mut self, now_us: u64) {
        self.moved_us = now_us;
        self.bytes_since_progress = 0;
    }

    /// Sends once. Once held up, not before a wait has said that the wire takes more: what little
    /// room is left then is in this end's own buffers, and says nothing of the peer.
    fn send(&mut self, now_us: u64, wire: &mut dyn Wire) -> Result<Sent, Broken> {
        if self.held_up {
            return Ok(Sent::Blocked);
        }
        if self.outlet.is_empty() {
            if !self.role.awaits() {
                self.due_us = now_us;
            }
            self.outlet.load(&mut self.role);
        }
        if self.outlet.is_empty() {
            return Ok(Sent::Nothing);
        }
        let left = self.outlet.left();
        self.outlet.send(wire)?;
        self.bytes_since_progress += left - self.outlet.left();
        if self.bytes_since_progress > BUFFERED_BYTES {
            self.moved(now_us);
        }
        self.held_up = !self.outlet.is_empty();
        if self.held_up {
            return Ok(Sent::Blocked);
        }
        if let Some(data) = self.outlet.data.take() {
            self.role.sent(data.operation, data.withdrawn);
        }
        Ok(Sent::All)
    }

    /// Receives once. Says whether anything came; `readable` becomes false when there is no more.
    fn receive(&mut self, now_us: u64, wire: &mut dyn Wire, readable: &mut bool) -> Result<bool, Broken> {
        if self.is_stalled() {
            return Ok(false);
        }
        let received = self.intake.receive(wire, &mut self.void, readable)?;
        if received {
            self.moved(now_us);
            while self.step(now_us)? {}
        }
        Ok(received)
    }

    fn is_stalled(&self) -> bool {
        matches!(self.intake.state, State::Stalled { .. })
    }

    /// Goes on with what there was no room for.
    fn resume(&mut self, now_us: u64) -> Result<(), Broken> {
        if let State::Stalled { operation, bytes } = self.intake.state {
            self.begin_payload(operation, bytes)?;
            while !self.is_stalled() && self.step(now_us)? {}
        }
        Ok(())
    }

    fn begin_payload(&mut self, operation: u64, bytes: u32) -> Result<(), Broken> {
        let part = self.role.inbound(operation, bytes)?;
        debug_assert!(part.as_ref().is_none_or(|part| part.len() == bytes as usize));
        self.intake.state = match part {
            Some(part) => State::Payload { operation, part, sum: crc32c(), withdrawn: false },
            None => State::Stalled { operation, bytes },
        };
        Ok(())
    }

    /// Takes one thing off the stash. Says whether there may be another.
    fn step(&mut self, now_us: u64) -> Result<bool, Broken> {
        let Some(found) = self.intake.step()? else { return Ok(false) };
        match found {
            Found::Nothing => {
                if let State::Body { header, .. } = &self.intake.state {
                    self.role.begins(header)?;
                }
            }
            Found::Arrived(operation, arrival) => self.role.placed(operation, arrival)?,
            Found::Frame(operation, Frame::Data(bytes)) => self.begin_payload(operation, bytes)?,
            Found::Frame(operation, frame) => self.role.frame(now_us, operation, frame)?,
        }
        Ok(true)
    }
}

/// What a step has found.
enum Found {
    Nothing,
    Frame(u64, Frame),
    Arrived(u64, Arrival),
}

impl Intake {
    fn receive(
        &mut self,
        wire: &mut dyn Wire,
        void: &mut Discard,
        readable: &mut bool,
    ) -> Result<bool, Broken> {
        let mut slices = Vec::with_capacity(16);
        if self.start > 0 {
            self.stash.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        // While payload is due the stash is empty, and takes no byte of the payload after it.
        let mut stash_bytes = STASH_BYTES - self.end;
        let mut payload_bytes = 0;
        let owners = self.owners();
        let held = owners.hold();
        if let State::Payload { part, withdrawn, .. } = &mut self.state {
            if held.is_none() {
                part.discard_rest();
                *withdrawn = true;
            }
            let all = part.incoming(void, &mut slices, SLICES_MAX - 1);
            stash_bytes = if all { CRC_BYTES + HEADER_BYTES } else { 0 };
            payload_bytes = slices.iter().map(|slice| slice.iov_len).sum();
        }
        if stash_bytes > 0 {
            slices.push(slice(self.stash[self.end..].as_mut_ptr(), stash_bytes));
        }
        // SAFETY: the owners are held, and the stash and the void are this connection's own.
        let received = match unsafe { wire.receive(&slices) } {
            Ok(0) => return Err(Broken::Closed),
            Ok(received) => received,
            Err(error) => {
                *readable = error.kind() == io::ErrorKind::Interrupted;
                return again(error).map(|()| false);
            }
        };
        *readable = received == payload_bytes + stash_bytes;
        let placed = received.min(payload_bytes);
        if let State::Payload { part, sum, .. } = &mut self.state {
            part.advance(placed, Some(sum));
        }
        drop(held);
        self.end += received - placed;
        Ok(true)
    }

    /// Whom the payload that is due belongs to.
    fn owners(&self) -> Owners {
        match &self.state {
            State::Payload { part, .. } => part.owners(),
            _ => Owners::default(),
        }
    }

    fn step(&mut self) -> Result<Option<Found>, Broken> {
        let waiting = self.end - self.start;
        match &mut self.state {
            State::Header => {
                let Some(bytes) = self.stash[self.start..self.end].first_chunk() else { return Ok(None) };
                let header = Header::parse(bytes)?;
                self.start += HEADER_BYTES;
                self.state = State::Body { header, body: Vec::new() };
                Ok(Some(Found::Nothing))
            }
            State::Body { header, body } => {
                let taken = waiting.min(header.body as usize - body.len());
                body.extend(&self.stash[self.start..self.start + taken]);
                self.start += taken;
                if body.len() < header.body as usize {
                    return Ok(None);
                }
                let (operation, frame) = (header.operation, Frame::parse(header, body)?);
                self.state = State::Header;
                Ok(Some(Found::Frame(operation, frame)))
            }
            State::Stalled { .. } => Ok(None),
            State::Payload { operation, part, sum, withdrawn } => {
                let taken = waiting.min(part.left());
                let owners = part.owners();
                let held = owners.hold();
                if held.is_none() {
                    part.discard_rest();
                    *withdrawn = true;
                }
                part.put(&self.stash[self.start..self.start + taken], sum);
                drop(held);
                self.start += taken;
                if part.left() > 0 {
                    return Ok(None);
                }
                let (operation, withdrawn) = (*operation, *withdrawn);
                self.state = State::Trailer { operation, sum: sum.finalize() as u32, withdrawn };
                Ok(Some(Found::Nothing))
            }
            State::Trailer { operation, sum, withdrawn } => {
                let Some(crc) = self.stash[self.start..self.end].first_chunk() else { return Ok(None) };
                self.start += CRC_BYTES;
                let arrival = match u32::from_le_bytes(*crc) == *sum {
                    _ if *withdrawn => Arrival::Withdrawn,
                    true => Arrival::Intact,
                    false => Arrival::Corrupt,
                };
                let found = Found::Arrived(*operation, arrival);
                self.state = State::Header;
                Ok(Some(found))
            }
        }
    }
}

impl Outlet {
    fn is_empty(&self) -> bool {
        self.left() == 0
    }

    fn left(&self) -> usize {
        let data = self.data.as_ref().map_or(0, |data| data.part.left() + CRC_BYTES - data.crc_sent);
        self.frames.len() - self.frames_sent + data
    }

    fn load(&mut self, role: &mut impl Role) {
        self.frames.clear();
        self.frames_sent = 0;
        let Some((operation, part)) = role.outbound(&mut self.frames) else { return };
        Frame::Data(part.len() as u32).put(operation, &mut self.frames);
        // If the memory was withdrawn, sending finds that and sends zeros, which nobody uses,
        // whatever their CRC.
        let crc = part.owners().hold().map_or(0, |_held| part.crc()).to_le_bytes();
        self.data = Some(Data { operation, part, crc, crc_sent: 0, withdrawn: false });
    }

    fn send(&mut self, wire: &mut dyn Wire) -> Result<(), Broken> {
        let mut slices = Vec::with_capacity(16);
        let frames = &self.frames[self.frames_sent..];
        let frames_left = frames.len();
        if frames_left > 0 {
            slices.push(slice(frames.as_ptr().cast_mut(), frames_left));
        }
        let owners = self.data.as_ref().map(|data| data.part.owners()).unwrap_or_default();
        let held = owners.hold();
        if let Some(data) = &mut self.data {
            if held.is_none() {
                data.part.discard_rest();
                data.withdrawn = true;
            }
            data.part.outgoing(&mut slices, SLICES_MAX - 1);
            let crc = &data.crc[data.crc_sent..];
            slices.push(slice(crc.as_ptr().cast_mut(), crc.len()));
        }
        // SAFETY: the owners are held, and the rest is this connection's own.
        let sent = match unsafe { wire.send(&slices) } {
            Ok(sent) => sent,
            Err(error) => return again(error),
        };
        let of_frames = sent.min(frames_left);
        self.frames_sent += of_frames;
        if let Some(data) = &mut self.data {
            let of_part = (sent - of_frames).min(data.part.left());
            data.part.advance(of_part, None);
            data.crc_sent += sent - of_frames - of_part;
        }
        drop(held);
        Ok(())
    }
}

/// Whether an error means no more than "later".
pub(super) fn again(error: io::Error) -> Result<(), Broken> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        io::ErrorKind::InvalidData => Err(Broken::Tls(error.to_string())),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Err(Broken::Closed),
        _ => Err(Broken::System(error.to_string())),
    }
}
