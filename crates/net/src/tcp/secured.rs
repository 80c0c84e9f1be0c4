//! A TLS session as the carrier of a connection: the handshake within its limit, waits that know
//! what was received already, and what to say to a peer that speaks no TLS.

use super::broken::Broken;
use super::carrier::Carrier;
use super::carrier::Ready;
use super::carrier::Wire;
use super::connection::again;
use super::frame::{CRC_BYTES, Frame, HEADER_BYTES, Header};
use super::greeting::{Refusal, RefusalCode};
use super::payload::slice;
use super::session::{Session, Shaken};
use super::tls::SpeaksFor;
use super::wake::WakeUp;
use std::io;
use std::time::{Duration, Instant};

impl Carrier for Session {
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
                Ok(Shaken::Done) => return Ok(()),
                Ok(Shaken::WantsToSend) => true,
                Ok(Shaken::WantsToReceive) => false,
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

    fn speaks_for(&self) -> SpeaksFor {
        self.certified()
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

fn broken(error: io::Error) -> Broken {
    again(error).err().unwrap_or(Broken::Closed)
}

/// What a peer means that speaks no TLS: a refusal in plain text, or that this end is to refuse it.
fn stranger(bytes: &[u8]) -> Broken {
    if let Some(refusal) = plain_refusal(bytes) {
        return Broken::Refused(refusal);
    }
    let text = "this node speaks TLS only".into();
    Broken::Turned(Refusal { code: RefusalCode::NotEncrypted, text })
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
