//! What one preflight asks another, over the connection that nodes use: a call on channel 5, in
//! JSON. Pure: this file knows the words and their bytes. What is asked of nodes too, their time
//! and version, is `forebay_net`'s [`About`](forebay_net::About).

use super::checks::versions::Versions;
use super::way::Way;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// First byte of a call.
const CHANNEL: u8 = 5;
/// Bytes that a datagram begins with which is echoed.
pub const COOKIE_BYTES: usize = 16;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// What is the host like, and how does it reach this address? [`HostFacts`].
    Host { reaching: IpAddr },
    /// [`Segments`].
    Segments,
    /// Measure the pair of yourself and this host, which has to be one of your peers.
    /// [`PairFigures`].
    Measure { with: SocketAddr, plan: Plan },
}

/// What a preflight says of its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    pub versions: Versions,
    /// Its way to the address that was asked about.
    pub back: Option<Way>,
    /// What datagrams to its port have to begin with to be echoed.
    pub cookie: Option<[u8; COOKIE_BYTES]>,
}

/// Segments of TCP that a host has sent since it was started, and those of them that were sent
/// again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segments {
    pub sent: u64,
    pub again: u64,
}

/// How a pair of hosts is measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// How long each case takes.
    pub case_ms: u64,
    /// And how much it moves at most.
    pub case_bytes: u64,
}

/// One way of moving bytes between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Case {
    pub flows: usize,
    pub block_bytes: u64,
    /// From the host that measures to the other; otherwise back.
    pub sends: bool,
}

/// What a case gave.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CaseFigures {
    pub case: Case,
    pub bytes: u64,
    pub seconds: f64,
    /// Transfers that arrived with another checksum than they were sent with.
    pub damaged: u32,
}

/// What was measured of a pair, by one of the two.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairFigures {
    pub cases: Vec<CaseFigures>,
    /// The median of some small questions.
    pub round_trip_us: u64,
    /// What the host that measured, and the other one, sent meanwhile.
    pub segments: [Segments; 2],
}

impl Question {
    pub fn to_call(&self) -> Vec<u8> {
        // Numbers, texts and structures of both always have a JSON form.
        [vec![CHANNEL], serde_json::to_vec(self).unwrap_or_default()].concat()
    }

    /// `None`: the call is not for a preflight. An error says why it cannot be read.
    pub fn of_call(call: &[u8]) -> Option<Result<Question, String>> {
        let (channel, json) = call.split_first()?;
        (*channel == CHANNEL).then(|| read(json))
    }
}

pub fn write<A: Serialize>(answer: &A) -> Vec<u8> {
    serde_json::to_vec(answer).unwrap_or_default()
}

/// Reads what the other end wrote, who may be of another version.
pub fn read<A: DeserializeOwned>(json: &[u8]) -> Result<A, String> {
    serde_json::from_slice(json).map_err(|error| format!("it says what means nothing here: {error}"))
}

impl Segments {
    /// What was sent between two looks.
    pub fn since(self, before: Segments) -> Segments {
        Segments {
            sent: self.sent.saturating_sub(before.sent),
            again: self.again.saturating_sub(before.again),
        }
    }

    /// Part of them that was sent again.
    pub fn lost_share(self) -> f64 {
        self.again as f64 / self.sent.max(1) as f64
    }
}

impl CaseFigures {
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }
}

impl PairFigures {
    /// The best rate with blocks of this size in one direction, in bytes a second.
    pub fn best(&self, sends: bool, block_bytes: u64) -> Option<f64> {
        let of =
            |figures: &&CaseFigures| figures.case.sends == sends && figures.case.block_bytes == block_bytes;
        self.cases.iter().filter(of).map(CaseFigures::bytes_per_s).reduce(f64::max)
    }

    pub fn bytes(&self) -> u64 {
        self.cases.iter().map(|figures| figures.bytes).sum()
    }

    pub fn damaged(&self) -> u32 {
        self.cases.iter().map(|figures| figures.damaged).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_read_as_it_was_asked_and_any_other_call_is_not_one() {
        let asked = [
            Question::Host { reaching: "10.0.0.1".parse().unwrap() },
            Question::Segments,
            Question::Measure {
                with: "[fe80::1]:7600".parse().unwrap(),
                plan: Plan { case_ms: 100, case_bytes: 1 << 28 },
            },
        ];
        for question in asked {
            assert_eq!(Question::of_call(&question.to_call()), Some(Ok(question)));
        }
        assert_eq!(Question::of_call(&[]), None);
        assert_eq!(Question::of_call(&[1, b'"']), None);
        let newer = [&[CHANNEL][..], br#"{"fly":{}}"#].concat();
        assert!(Question::of_call(&newer).unwrap().unwrap_err().contains("unknown variant `fly`"));
    }

    #[test]
    fn segments_that_were_sent_again_are_a_share_of_those_sent() {
        let (before, after) = (Segments { sent: 100, again: 7 }, Segments { sent: 1_100, again: 17 });
        assert!((after.since(before).lost_share() - 0.01).abs() < 1e-9);
        assert_eq!(Segments::default().lost_share(), 0.0);
        assert_eq!(before.since(after), Segments::default(), "a host that was started again");
    }
}
