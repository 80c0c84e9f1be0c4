//! What an agent says of itself to any peer that was let in: the version of its program, and what
//! time it is there. Pure bytes, but for the clock: `call_handler.rs` answers.
//!
//! ```text
//! answer  u8 version: 1; u64 microseconds since 1970; the program's version: u16 bytes, UTF-8
//! ```
//! An agent that knows nothing of it declines, as it does with any call that means nothing to it.

use crate::bytes::{Field, Reader, parse_text, put_text};
use std::time::{SystemTime, UNIX_EPOCH};

/// First byte of a call that asks for it, and all of the call.
pub(crate) const ABOUT: u8 = 4;
const VERSION: u8 = 1;

/// What an agent says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// Its clock when it answered, in microseconds since 1970.
    pub time_us: u64,
    /// The version of its program.
    pub version: String,
}

impl About {
    /// Of this process.
    // The wall clock is what a peer asks for; no limit and no lease is compared with it.
    #[expect(clippy::disallowed_methods)]
    pub fn now() -> About {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        About { time_us: since.as_micros() as u64, version: env!("CARGO_PKG_VERSION").into() }
    }

    /// The call that asks a peer.
    pub fn question() -> Vec<u8> {
        vec![ABOUT]
    }

    /// Whether a call asks for it.
    pub fn is_asked(call: &[u8]) -> bool {
        call == [ABOUT]
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        (VERSION, self.time_us).put(&mut out);
        put_text(&self.version, &mut out);
        out
    }

    /// `None`: these bytes are no answer, or one of another version.
    pub fn parse(bytes: &[u8]) -> Option<About> {
        let mut reader = Reader(bytes);
        let (version, time_us): (u8, u64) = reader.get()?;
        let text = parse_text(&mut reader)?;
        (version == VERSION).then_some(About { time_us, version: text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_and_nothing_cut_or_lengthened_is() {
        let about = About { time_us: 1_700_000_000_000_000, version: "0.1.0".into() };
        let bytes = about.to_bytes();
        assert_eq!(About::parse(&bytes), Some(about));
        assert!((0..bytes.len()).all(|cut| About::parse(&bytes[..cut]).is_none()));
        assert_eq!(About::parse(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(About::parse(&[&[2], &bytes[1..]].concat()), None, "another version");
    }
}
