//! What two agents say to each other to find the transports that both have. Pure bytes: `rails.rs`
//! answers, and `upgrade.rs` asks.
//!
//! ```text
//! question  u8 0
//!   answer  u8 version: 1; host: 16 bytes, zeros if it is not known; u8 rails, and as many u8: codes
//! offer     u8 1; u8 code; u8 which of the rails with that code; the rest is the transport's own
//!   answer  the transport's own
//! ```
//! The answer to an offer is refused where there is no such rail. Agents that know nothing of rails
//! refuse both. Codes that one end does not know mean nothing to it.

use crate::tcp::Broken;
use crate::transport::{Reach, TransportError, TransportInfo};
use thiserror::Error;

const VERSION: u8 = 1;
const QUESTION: u8 = 0;
const OFFER: u8 = 1;
/// Rails of an agent at most.
pub const RAILS_MAX: usize = 16;

/// Tells hosts from each other. `None`: not known, so it is like no other.
pub(crate) type Host = Option<[u8; 16]>;

/// Why a rail of this agent carries nothing to a peer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WhyIdle {
    #[error("the peer did not say which rails it has: {0}")]
    Unasked(String),
    #[error("the peer has no rail of this fabric")]
    NotThere,
    #[error("the peer is on another host")]
    OtherHost,
    #[error("rails of fabric {0:?} carry the bytes")]
    NotNeeded(&'static str),
    #[error("it cannot be opened: {0}")]
    Unopened(TransportError),
    #[error("no flow came about: {0}")]
    Failed(TransportError),
    #[error("its flow was lost: {0}")]
    Lost(Broken),
}

impl WhyIdle {
    /// The name of what went wrong, for counters, if something did.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        match self {
            WhyIdle::Unasked(_) => Some("rail_unasked"),
            WhyIdle::Unopened(_) => Some("rail_unopened"),
            WhyIdle::Failed(_) => Some("rail_failed"),
            WhyIdle::Lost(_) => Some("rail_lost"),
            WhyIdle::NotThere | WhyIdle::OtherHost | WhyIdle::NotNeeded(_) => None,
        }
    }
}

/// The host of an agent, and the codes of its rails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capabilities {
    pub host: Host,
    pub codes: Vec<u8>,
}

impl Capabilities {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.host.unwrap_or_default());
        out.push(self.codes.len() as u8);
        out.extend(&self.codes);
        out
    }

    /// `None`: these are none, or of another version.
    pub fn parse(bytes: &[u8]) -> Option<Capabilities> {
        let (version, rest) = bytes.split_first()?;
        let (host, rest) = rest.split_first_chunk::<16>()?;
        let (rails, codes) = rest.split_first()?;
        let whole = *version == VERSION && codes.len() == usize::from(*rails);
        let host = Some(*host).filter(|host| *host != [0; 16]);
        whole.then(|| Capabilities { host, codes: codes.to_vec() })
    }

    /// Why a rail of an agent on `host` cannot carry bytes to the peer with these capabilities.
    pub fn why_idle(&self, host: Host, own: &TransportInfo) -> Option<WhyIdle> {
        let same_host = host.is_some() && host == self.host;
        match own.reach {
            _ if !self.codes.contains(&own.code) => Some(WhyIdle::NotThere),
            Reach::Host if !same_host => Some(WhyIdle::OtherHost),
            _ => None,
        }
    }
}

/// What one agent asks another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Question<'a> {
    Capabilities,
    /// A connection to the peer's rail with this code, the `nth` modulo as many as there are.
    Offer {
        code: u8,
        nth: u8,
        offer: &'a [u8],
    },
}

impl<'a> Question<'a> {
    pub fn put(&self, out: &mut Vec<u8>) {
        match self {
            Question::Capabilities => out.push(QUESTION),
            Question::Offer { code, nth, offer } => {
                out.extend([OFFER, *code, *nth]);
                out.extend(*offer);
            }
        }
    }

    pub fn parse(bytes: &'a [u8]) -> Option<Question<'a>> {
        match bytes {
            [QUESTION] => Some(Question::Capabilities),
            [OFFER, code, nth, offer @ ..] => Some(Question::Offer { code: *code, nth: *nth, offer }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transports::TRANSPORTS;
    use proptest::prelude::*;

    fn any_capabilities() -> impl Strategy<Value = Capabilities> {
        let codes = prop::collection::vec(0u8..6, 0..RAILS_MAX);
        let host = prop::option::of(prop::array::uniform16(1u8..3));
        (host, codes).prop_map(|(host, codes)| Capabilities { host, codes })
    }

    proptest! {
        #[test]
        fn what_was_said_is_understood(
            said in any_capabilities(), code in any::<u8>(), nth in any::<u8>(), offer in any::<Vec<u8>>()
        ) {
            prop_assert_eq!(Capabilities::parse(&said.to_bytes()), Some(said));
            for question in [Question::Capabilities, Question::Offer { code, nth, offer: &offer }] {
                let mut bytes = Vec::new();
                question.put(&mut bytes);
                prop_assert_eq!(Question::parse(&bytes), Some(question));
            }
        }

        #[test]
        fn any_bytes_are_understood_or_not(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = (Capabilities::parse(&bytes), Question::parse(&bytes));
        }

        #[test]
        fn a_rail_is_common_only_if_both_ends_have_it_and_memory_only_on_one_host(
            one in any_capabilities(), other in any_capabilities()
        ) {
            for info in TRANSPORTS.iter().map(|transport| transport.info()) {
                let there = other.codes.contains(&info.code);
                let same_host = one.host.is_some() && one.host == other.host;
                let reached = info.reach == Reach::Network || same_host;
                prop_assert_eq!(other.why_idle(one.host, &info).is_none(), there && reached);
            }
        }
    }
}
