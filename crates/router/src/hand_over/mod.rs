//! One prompt that one engine computes and hands over to another, which says the answer: what
//! follows what, until when each step must be done, and how it ended. It takes time as an argument
//! and asks nobody; `driver` asks, `params` knows what is said.
//!
//! ```text
//! in turn:  prefilling --answered--> handing --first byte--> over
//! at once:  together ---answered---> handing --first byte--> over
//! ```
//!
//! Whatever goes wrong, the decoder answers as if nobody had prefilled, or fails as any engine may.
//! It ends once.

mod driver;
mod open;
mod params;

pub use driver::{Answerer, begin};
pub use open::OpenHandOver;
pub use params::{Protocol, Ticket};

use serde::{Deserialize, Serialize};

/// A step may take so many times as long as predicted, and [`SPARE_US`] more.
const PATIENCE: u64 = 3;
const SPARE_US: u64 = 1_000_000;

/// Which of the two engines is asked when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// The decoder gets what the prefiller answered.
    InTurn,
    /// The decoder has its room while the prefiller computes.
    AtOnce,
}

/// How a hand-over ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandOverEnd {
    /// The decoder has begun to answer.
    Handed,
    /// It answers as a whole, so that nobody sees when it begins.
    Unseen,
    /// The request is one that engines refuse, handed over or not.
    ClientError,
    /// The prefiller cannot be reached, or closed the connection.
    PrefillLost,
    /// The prefiller answered with an error.
    PrefillRefused,
    /// The prefiller's answer does not say where the KV is.
    NoParameters,
    PrefillLate,
    /// The decoder cannot be reached, or closed the connection.
    DecodeLost,
    /// It answered with an error.
    DecodeRefused,
    DecodeLate,
    /// The client went away.
    Cancelled,
}

impl HandOverEnd {
    /// All of them with their names, in order.
    pub const NAMES: [(HandOverEnd, &'static str); 11] = [
        (HandOverEnd::Handed, "handed"),
        (HandOverEnd::Unseen, "unseen"),
        (HandOverEnd::ClientError, "client-error"),
        (HandOverEnd::PrefillLost, "prefill-lost"),
        (HandOverEnd::PrefillRefused, "prefill-refused"),
        (HandOverEnd::NoParameters, "no-parameters"),
        (HandOverEnd::PrefillLate, "prefill-late"),
        (HandOverEnd::DecodeLost, "decode-lost"),
        (HandOverEnd::DecodeRefused, "decode-refused"),
        (HandOverEnd::DecodeLate, "decode-late"),
        (HandOverEnd::Cancelled, "cancelled"),
    ];

    pub fn name(self) -> &'static str {
        HandOverEnd::NAMES[self as usize].1
    }

    /// Which engine is at fault, if one is.
    pub fn fault(self) -> Option<Fault> {
        match self {
            HandOverEnd::Handed | HandOverEnd::Unseen | HandOverEnd::ClientError | HandOverEnd::Cancelled => {
                None
            }
            HandOverEnd::PrefillLost
            | HandOverEnd::PrefillRefused
            | HandOverEnd::NoParameters
            | HandOverEnd::PrefillLate => Some(Fault::Prefiller),
            HandOverEnd::DecodeLost | HandOverEnd::DecodeRefused | HandOverEnd::DecodeLate => {
                Some(Fault::Decoder)
            }
        }
    }
}

/// Who did not do its part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Prefiller,
    Decoder,
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The prefiller has answered, and what the decoder needs is in it.
    Prefilled,
    /// It has not, and will not.
    PrefillFailed(HandOverEnd),
    /// The first byte of the decoder's answer has come.
    Began,
    /// The decoder has answered with an error.
    DecodeRefused,
    /// It has answered, to a request without parameters, that the client is at fault.
    ClientError,
    /// It failed before an answer.
    DecodeLost,
    /// Time has passed.
    Tick,
}

/// What is to be done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Wait,
    /// Ask the decoder with what the prefiller answered.
    AskDecode,
    /// Drop whatever is under way, and ask the decoder as if nobody had prefilled.
    AskPlainly,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The prefiller has been asked.
    Prefilling,
    /// Both have been asked.
    Together,
    /// The prompt is computed, and the decoder has been asked.
    Handing,
    /// An engine has refused, and the decoder has been asked plainly: what it answers tells whether
    /// it was the client's fault.
    Refused(HandOverEnd),
    Over(HandOverEnd),
}

/// How long the steps should take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Until the prompt is computed.
    pub prefill_us: u64,
    /// From then to the first byte.
    pub hand_us: u64,
}

#[derive(Debug)]
pub struct HandOver {
    state: State,
    /// The decoder's first byte comes with its first token, not with its last one.
    is_stream: bool,
    expected: Expected,
    deadline_us: u64,
}

impl HandOver {
    /// The prefiller is asked now, and with [`Form::AtOnce`] the decoder too. The decoder must have
    /// begun by `by_us`: half of that time is left to it.
    pub fn new(form: Form, is_stream: bool, expected: Expected, now_us: u64, by_us: u64) -> HandOver {
        let state = match form {
            Form::InTurn => State::Prefilling,
            Form::AtOnce => State::Together,
        };
        let patience_us = patience_us(expected.prefill_us).min(by_us.saturating_sub(now_us) / 2);
        HandOver { state, is_stream, expected, deadline_us: now_us + patience_us }
    }

    /// When to come with [`Event::Tick`]; `None` when nothing is waited for any more.
    pub fn deadline_us(&self) -> Option<u64> {
        (!self.is_asked_plainly()).then_some(self.deadline_us)
    }

    /// The decoder computes the prompt itself, or it is over.
    pub fn is_asked_plainly(&self) -> bool {
        matches!(self.state, State::Refused(_) | State::Over(_))
    }

    /// How it ended; `None` while it is under way.
    pub fn end(&self) -> Option<HandOverEnd> {
        match self.state {
            State::Over(end) => Some(end),
            State::Prefilling | State::Together | State::Handing | State::Refused(_) => None,
        }
    }

    /// Something has happened. What comes after the end changes nothing.
    pub fn on(&mut self, now_us: u64, event: Event) -> Action {
        let is_late = now_us >= self.deadline_us;
        match (self.state, event) {
            (State::Over(_), _) => Action::Wait,
            (State::Prefilling, Event::Prefilled) => {
                self.hand(now_us);
                Action::AskDecode
            }
            (State::Together, Event::Prefilled) => {
                self.hand(now_us);
                Action::Wait
            }
            (State::Refused(_), Event::ClientError) => self.over(HandOverEnd::ClientError, Action::Wait),
            (State::Refused(end), Event::Began | Event::DecodeLost) => self.over(end, Action::Wait),
            (State::Refused(_), _) => Action::Wait,
            (State::Prefilling | State::Together, Event::PrefillFailed(HandOverEnd::PrefillRefused)) => {
                self.refused(HandOverEnd::PrefillRefused)
            }
            (State::Prefilling | State::Together, Event::PrefillFailed(end)) => {
                self.over(end, Action::AskPlainly)
            }
            (State::Prefilling | State::Together, Event::Tick) if is_late => {
                self.over(HandOverEnd::PrefillLate, Action::AskPlainly)
            }
            (_, Event::Began) => self.over(HandOverEnd::Handed, Action::Wait),
            (_, Event::DecodeRefused | Event::ClientError) => self.refused(HandOverEnd::DecodeRefused),
            (_, Event::DecodeLost) => self.over(HandOverEnd::DecodeLost, Action::Wait),
            (State::Handing, Event::Tick) if is_late && self.is_stream => {
                self.over(HandOverEnd::DecodeLate, Action::AskPlainly)
            }
            // Nobody sees the first token of an answer that comes as a whole.
            (State::Handing, Event::Tick) if is_late => self.over(HandOverEnd::Unseen, Action::Wait),
            (_, Event::Tick) | (State::Handing, Event::Prefilled | Event::PrefillFailed(_)) => Action::Wait,
        }
    }

    fn hand(&mut self, now_us: u64) {
        self.state = State::Handing;
        self.deadline_us = now_us + patience_us(self.expected.hand_us);
    }

    fn refused(&mut self, end: HandOverEnd) -> Action {
        self.state = State::Refused(end);
        Action::AskPlainly
    }

    fn over(&mut self, end: HandOverEnd, action: Action) -> Action {
        self.state = State::Over(end);
        action
    }
}

fn patience_us(expected_us: u64) -> u64 {
    expected_us.saturating_mul(PATIENCE).saturating_add(SPARE_US)
}

#[cfg(test)]
mod tests;
