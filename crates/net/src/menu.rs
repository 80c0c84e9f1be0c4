//! What agents say to each other of their rails, and which rails two ends have in common. Pure; this file must never know
//! how a rail is opened, or make a flow.
//!
//! ```text
//! question  u8 0
//!   answer  u8 version: 1; host: 16 bytes, zeros if it is not known; u8 rails, and as many u8: their fabrics
//! offer     u8 1; u8 fabric; u8 which of the rails of that fabric; the rest is a card of `crate::ucx`
//!   answer  a card
//! ```
//! The answer to an offer is refused where there is no such rail. Agents that know nothing of rails refuse both.

use crate::tcp::Broken;
use crate::ucx::{Fabric, UcxError};
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
    /// The peer does not speak of rails.
    #[error("the peer did not say which rails it has: {0}")]
    Unasked(String),
    /// The peer has none of this fabric.
    #[error("the peer has no rail of this fabric")]
    NotThere,
    /// Memory cannot be shared with another host.
    #[error("the peer is on another host")]
    OtherHost,
    /// A rail of a better fabric does.
    #[error("rails of fabric {0:?} carry the bytes")]
    NotNeeded(Fabric),
    /// It cannot be opened here.
    #[error("it cannot be opened: {0}")]
    Unopened(UcxError),
    /// No flow came about.
    #[error("no flow came about: {0}")]
    Failed(UcxError),
    /// There was a flow, and it ended.
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

/// The rails that an agent has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Menu {
    pub host: Host,
    pub fabrics: Vec<Fabric>,
}

impl Menu {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.host.unwrap_or_default());
        out.push(self.fabrics.len() as u8);
        out.extend(self.fabrics.iter().map(|fabric| fabric.code() as u8));
        out
    }

    /// `None`: it is none, or of another version. Fabrics that are not known here are nothing to this end.
    pub fn parse(bytes: &[u8]) -> Option<Menu> {
        let (version, rest) = bytes.split_first()?;
        let (host, rest) = rest.split_first_chunk::<16>()?;
        let (rails, fabrics) = rest.split_first()?;
        let whole = *version == VERSION && fabrics.len() == usize::from(*rails);
        let fabrics = fabrics.iter().filter_map(|code| fabric(*code)).collect();
        whole.then_some(Menu { host: Some(*host).filter(|host| *host != [0; 16]), fabrics })
    }

    /// For each rail of this end why it cannot carry flows to the peer with `theirs`; `None`: it can.
    pub fn compare(&self, theirs: &Menu) -> Vec<Option<WhyIdle>> {
        let same_host = self.host.is_some() && self.host == theirs.host;
        let why = |fabric: &Fabric| match fabric {
            _ if !theirs.fabrics.contains(fabric) => Some(WhyIdle::NotThere),
            Fabric::Memory if !same_host => Some(WhyIdle::OtherHost),
            _ => None,
        };
        self.fabrics.iter().map(why).collect()
    }
}

/// What one agent says to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Word<'a> {
    /// Which rails are there?
    Question,
    /// A connection to the peer's rail of this fabric, the `nth` modulo as many as there are.
    Offer { fabric: Fabric, nth: u8, card: &'a [u8] },
}

impl<'a> Word<'a> {
    pub fn put(&self, out: &mut Vec<u8>) {
        match self {
            Word::Question => out.push(QUESTION),
            Word::Offer { fabric, nth, card } => {
                out.extend([OFFER, fabric.code() as u8, *nth]);
                out.extend(*card);
            }
        }
    }

    pub fn parse(bytes: &'a [u8]) -> Option<Word<'a>> {
        match bytes {
            [QUESTION] => Some(Word::Question),
            [OFFER, code, nth, card @ ..] => Some(Word::Offer { fabric: fabric(*code)?, nth: *nth, card }),
            _ => None,
        }
    }
}

fn fabric(code: u8) -> Option<Fabric> {
    Fabric::ALL.into_iter().find(|fabric| fabric.code() == u32::from(code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_menu() -> impl Strategy<Value = Menu> {
        let fabrics = prop::collection::vec(prop::sample::select(Fabric::ALL.to_vec()), 0..RAILS_MAX);
        let host = prop::option::of(prop::array::uniform16(1u8..));
        (host, fabrics).prop_map(|(host, fabrics)| Menu { host, fabrics })
    }

    proptest! {
        #[test]
        fn what_was_said_is_understood(menu in any_menu(), nth in any::<u8>(), card in any::<Vec<u8>>()) {
            prop_assert_eq!(Menu::parse(&menu.to_bytes()), Some(menu));
            for word in [Word::Question, Word::Offer { fabric: Fabric::Rdma, nth, card: &card }] {
                let mut bytes = Vec::new();
                word.put(&mut bytes);
                prop_assert_eq!(Word::parse(&bytes), Some(word));
            }
        }

        #[test]
        fn any_bytes_are_understood_or_not(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = (Menu::parse(&bytes), Word::parse(&bytes));
        }

        #[test]
        fn a_rail_is_common_only_if_both_ends_have_it_and_memory_only_on_one_host(one in any_menu(), other in any_menu()) {
            for (fabric, why) in one.fabrics.iter().zip(one.compare(&other)) {
                let there = other.fabrics.contains(fabric);
                let reached = *fabric != Fabric::Memory || (one.host.is_some() && one.host == other.host);
                prop_assert_eq!(why.is_none(), there && reached);
            }
            prop_assert!(one.host.is_none() || one.compare(&one).iter().all(Option::is_none));
        }
    }
}
