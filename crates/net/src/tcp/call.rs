//! Calls of the asking end: what is asked of a peer beside its memory, and how each call ends,
//! exactly once. This file knows numbers, limits and time.
//!
//! Calls have numbers of their own and travel between the DATA of operations. A call that this end
//! has given up stays in the peer's hands until it answers, so it still counts as one of those that
//! may be unanswered; its answer comes after its end.

use super::error::Broken;
use super::frame::{CALL_BYTES_MAX, CALLS_MAX, DATA_BYTES_MAX, Frame};
use std::collections::{BTreeMap, VecDeque};
use thiserror::Error;

/// Calls of a flow at most that wait until fewer than [`CALLS_MAX`] are unanswered.
pub const CALLS_WAITING_MAX: usize = 1_024;

/// Why a call was not answered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CallError {
    #[error("the peer declined: {0}")]
    Refused(String),
    #[error("no answer: {0}")]
    Broken(#[from] Broken),
    #[error("no answer within {limit_us} us")]
    Late { limit_us: u64 },
    #[error("a call of {bytes} bytes; allowed: {CALL_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("{CALLS_WAITING_MAX} calls of the flow wait to be sent; no more may")]
    TooMany,
}

pub(super) type CallEnd = Result<Vec<u8>, CallError>;

/// The calls of one flow that have not ended, and those that were given up.
pub(super) struct Calls {
    next_number: u64,
    waiting: VecDeque<Waiting>,
    /// Unanswered, by number. `None`: given up.
    told: BTreeMap<u64, Option<Limit>>,
    ended: Vec<(u64, CallEnd)>,
}

struct Waiting {
    number: u64,
    body: Vec<u8>,
    limit: Limit,
}

#[derive(Debug, Clone, Copy)]
struct Limit {
    limit_us: u64,
    until_us: u64,
}

impl Limit {
    fn is_over(&self, now_us: u64) -> bool {
        self.until_us <= now_us
    }

    fn late(&self) -> CallEnd {
        Err(CallError::Late { limit_us: self.limit_us })
    }
}

impl Default for Calls {
    fn default() -> Calls {
        Calls { next_number: 1, waiting: VecDeque::new(), told: BTreeMap::new(), ended: Vec::new() }
    }
}

impl Calls {
    pub fn submit(&mut self, now_us: u64, body: Vec<u8>, limit_us: u64) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        let limit = Limit { limit_us, until_us: now_us.saturating_add(limit_us) };
        if body.len() > CALL_BYTES_MAX as usize {
            self.ended.push((number, Err(CallError::TooLong { bytes: body.len() })));
        } else if self.waiting.len() >= CALLS_WAITING_MAX {
            self.ended.push((number, Err(CallError::TooMany)));
        } else {
            self.waiting.push_back(Waiting { number, body, limit });
        }
        number
    }

    /// Appends the calls that may be sent now, no more than about one DATA at a time. Says whether
    /// there was one.
    pub fn tell(&mut self, out: &mut Vec<u8>) -> bool {
        let before = out.len();
        while self.told.len() < CALLS_MAX.into() && out.len() - before < DATA_BYTES_MAX as usize {
            let Some(Waiting { number, body, limit }) = self.waiting.pop_front() else { break };
            Frame::Call(body).put(number, out);
            self.told.insert(number, Some(limit));
        }
        out.len() > before
    }

    /// The peer has answered, perhaps what was given up.
    pub fn answered(&mut self, number: u64, answer: Result<Vec<u8>, String>) -> Result<(), Broken> {
        self.told.remove(&number).ok_or_else(|| Broken::unexpected("an answer to no call", number))?;
        self.ended.push((number, answer.map_err(CallError::Refused)));
        Ok(())
    }

    /// Whether the peer has a call, and has not answered it.
    pub fn is_unanswered(&self, number: u64) -> bool {
        self.told.contains_key(&number)
    }

    /// Gives up what is late.
    pub fn expire(&mut self, now_us: u64) {
        let ended = &mut self.ended;
        for (number, told) in &mut self.told {
            if let Some(limit) = told.take_if(|limit| limit.is_over(now_us)) {
                ended.push((*number, limit.late()));
            }
        }
        self.waiting.retain(|call| {
            let over = call.limit.is_over(now_us);
            if over {
                ended.push((call.number, call.limit.late()));
            }
            !over
        });
    }

    /// When [`expire`](Calls::expire) has to be called.
    pub fn next_timeout_us(&self) -> Option<u64> {
        let waiting = self.waiting.iter().map(|call| call.limit.until_us);
        self.told.values().flatten().map(|limit| limit.until_us).chain(waiting).min()
    }

    /// Ends everything. The connection is closed.
    pub fn fail_all(&mut self, broken: &Broken) {
        let told = std::mem::take(&mut self.told);
        let told = told.into_iter().filter_map(|(number, limit)| limit.map(|_| number));
        let waiting = std::mem::take(&mut self.waiting).into_iter().map(|call| call.number);
        self.ended.extend(told.chain(waiting).map(|number| (number, Err(broken.clone().into()))));
    }

    /// What has ended since the last call, and what was answered after its end.
    pub fn take_ended(&mut self) -> std::vec::Drain<'_, (u64, CallEnd)> {
        self.ended.drain(..)
    }

    /// Whether every call has ended.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.told.values().all(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_calls_are_unanswered_than_may_be_and_no_more_wait() {
        let mut calls = Calls::default();
        let most = usize::from(CALLS_MAX) + CALLS_WAITING_MAX;
        for _ in 0..CALLS_MAX {
            calls.submit(0, vec![1], 10);
        }
        let mut out = Vec::new();
        assert!(calls.tell(&mut out) && !calls.tell(&mut out));
        for _ in 0..=CALLS_WAITING_MAX {
            calls.submit(0, vec![1], 10);
        }
        assert!(!calls.tell(&mut out), "one more is unanswered than may be");
        let ended: Vec<_> = calls.take_ended().collect();
        assert_eq!(ended, [(most as u64 + 1, Err(CallError::TooMany))]);
        calls.submit(0, vec![0; CALL_BYTES_MAX as usize + 1], 10);
        let too_long = CallError::TooLong { bytes: CALL_BYTES_MAX as usize + 1 };
        assert_eq!(calls.take_ended().next().map(|(_, end)| end), Some(Err(too_long)));
        calls.expire(9);
        assert_eq!((calls.next_timeout_us(), calls.take_ended().count()), (Some(10), 0));
        calls.expire(10);
        assert_eq!((calls.next_timeout_us(), calls.take_ended().count()), (None, most));
        // Those that were given up are still in the peer's hands.
        calls.submit(0, vec![1], 10);
        assert!(calls.is_idle() || !calls.tell(&mut out));
        calls.answered(1, Ok(vec![])).unwrap();
        assert!(calls.tell(&mut out));
        assert_eq!(calls.take_ended().collect::<Vec<_>>(), [(1, Ok(vec![]))], "after its end");
        assert!(calls.answered(1, Ok(vec![])).is_err(), "a second answer");
    }

    #[test]
    fn long_calls_leave_room_for_data_in_between() {
        let mut calls = Calls::default();
        for _ in 0..4 {
            calls.submit(0, vec![0; DATA_BYTES_MAX as usize], 10);
        }
        let mut out = Vec::new();
        assert!(calls.tell(&mut out));
        assert!(out.len() < 2 * DATA_BYTES_MAX as usize);
    }
}
