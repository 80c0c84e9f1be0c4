//! What happened to transfers of KV lately: which sessions moved, and how well it was predicted
//! what transfers cost. It decides whether another may start, and takes time as an argument.

use crate::generations::Generations;
use std::collections::VecDeque;

/// A session moves at most once in this time.
const MOVE_INTERVAL_US: u64 = 30_000_000;
/// Moving back must save this many times as much.
const BACK_FACTOR: f64 = 2.0;
/// Sessions whose last move is remembered.
const SESSIONS: usize = 64 * 1024;
/// Predictions whose errors are remembered.
const ERRORS: usize = 32;
/// A prediction moves the average of relative errors by this part of the difference.
const AVERAGED: f64 = 16.0;
/// Transfers that take longer than predicted by this share on average are stopped.
const ERROR_MAX: f64 = 0.5;
/// Until one is tried again.
const STOPPED_US: u64 = 30_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransferKind {
    /// A session's KV goes to another engine before its next prompt is computed.
    Pull,
    /// A prompt's KV goes from the engine that computed it to the one that says the answer.
    HandOver,
}

/// What is remembered.
#[derive(Debug)]
pub struct Transfers {
    moves: Generations<Move>,
    pulls: Record,
    hand_overs: Record,
}

/// A session's last move.
#[derive(Debug, Clone, Copy)]
struct Move {
    from: usize,
    at_us: u64,
}

/// How transfers of one kind went.
#[derive(Debug, Default)]
struct Record {
    /// Seconds by which the last ones took longer than predicted.
    errors_s: VecDeque<f64>,
    /// Average of what they took longer, as a share of the prediction.
    excess: f64,
    /// After too many bad predictions: when one is tried.
    stopped_until_us: Option<u64>,
    /// The one that is tried is under way.
    is_tried: bool,
}

impl Default for Transfers {
    fn default() -> Transfers {
        Transfers {
            moves: Generations::new(SESSIONS),
            pulls: Record::default(),
            hand_overs: Record::default(),
        }
    }
}

impl Transfers {
    /// By how much a transfer must save more than usual if the session's home becomes `to`; `None`
    /// if it may not move yet.
    pub fn margin_factor(&self, session: u64, home: Option<usize>, to: usize, now_us: u64) -> Option<f64> {
        let last = self.moves.get(session).filter(|_| home.is_some_and(|home| home != to));
        match last {
            Some(Move { at_us, .. }) if now_us < at_us + MOVE_INTERVAL_US => None,
            Some(Move { from, .. }) if from == to => Some(BACK_FACTOR),
            _ => Some(1.0),
        }
    }

    /// Whether a transfer of this kind may start.
    pub fn may_start(&self, kind: TransferKind, now_us: u64) -> bool {
        let record = self.record(kind);
        record.stopped_until_us.is_none_or(|until_us| now_us >= until_us && !record.is_tried)
    }

    /// Seconds by which predictions of this kind are usually wrong, in either direction: the
    /// median.
    pub fn usual_error_s(&self, kind: TransferKind) -> f64 {
        let mut errors: Vec<f64> = self.record(kind).errors_s.iter().map(|error| error.abs()).collect();
        let middle = errors.len() / 2;
        if errors.is_empty() {
            return 0.0;
        }
        *errors.select_nth_unstable_by(middle, f64::total_cmp).1
    }

    /// A session's requests go to another engine from now on.
    pub fn moved(&mut self, session: u64, from: usize, now_us: u64) {
        self.moves.insert(session, Move { from, at_us: now_us });
    }

    /// A transfer has started. Says whether it is the one that is tried.
    pub fn started(&mut self, kind: TransferKind) -> bool {
        let record = self.record_mut(kind);
        record.is_tried = record.stopped_until_us.is_some();
        record.is_tried
    }

    /// The first token of a request whose KV was moved came after so many seconds. `is_tried` is
    /// what [`Transfers::started`] said of it.
    pub fn ended(
        &mut self,
        kind: TransferKind,
        is_tried: bool,
        predicted_s: f64,
        realised_s: f64,
        now_us: u64,
    ) {
        let record = self.record_mut(kind);
        let excess = (realised_s - predicted_s) / predicted_s.max(1e-3);
        record.errors_s.push_back(realised_s - predicted_s);
        if record.errors_s.len() > ERRORS {
            record.errors_s.pop_front();
        }
        if is_tried {
            record.is_tried = false;
            if excess <= ERROR_MAX {
                record.excess = 0.0;
                record.stopped_until_us = None;
                return;
            }
        }
        record.excess += (excess - record.excess) / AVERAGED;
        if record.excess > ERROR_MAX {
            record.stopped_until_us = Some(now_us + STOPPED_US);
        }
    }

    /// A transfer has ended, and nobody knows how long it took.
    pub fn untold(&mut self, kind: TransferKind, is_tried: bool) {
        if is_tried {
            self.record_mut(kind).is_tried = false;
        }
    }

    fn record(&self, kind: TransferKind) -> &Record {
        match kind {
            TransferKind::Pull => &self.pulls,
            TransferKind::HandOver => &self.hand_overs,
        }
    }

    fn record_mut(&mut self, kind: TransferKind) -> &mut Record {
        match kind {
            TransferKind::Pull => &mut self.pulls,
            TransferKind::HandOver => &mut self.hand_overs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_US: u64 = 1_000_000;

    #[test]
    fn a_session_moves_once_in_half_a_minute_and_back_only_for_twice_as_much() {
        let mut transfers = Transfers::default();
        assert_eq!(transfers.margin_factor(7, Some(0), 1, 0), Some(1.0));
        transfers.moved(7, 0, 0);
        assert_eq!(transfers.margin_factor(7, Some(1), 2, 29 * SECOND_US), None);
        assert_eq!(transfers.margin_factor(7, Some(1), 1, SECOND_US), Some(1.0), "it stays where it is");
        assert_eq!(transfers.margin_factor(7, Some(1), 2, 30 * SECOND_US), Some(1.0));
        assert_eq!(transfers.margin_factor(7, Some(1), 0, 30 * SECOND_US), Some(2.0));
        assert_eq!(transfers.margin_factor(8, Some(1), 0, 0), Some(1.0), "another session has not moved");
    }

    #[test]
    fn transfers_that_take_much_longer_than_predicted_are_stopped_until_one_is_as_predicted() {
        let mut transfers = Transfers::default();
        let kind = TransferKind::HandOver;
        (0..12).for_each(|_| transfers.ended(kind, false, 1.0, 2.0, 0));
        assert!(!transfers.may_start(kind, 29 * SECOND_US));
        assert!(transfers.may_start(TransferKind::Pull, 0), "the other kind goes on");
        assert!(transfers.may_start(kind, 30 * SECOND_US));
        assert!(transfers.started(kind));
        assert!(!transfers.may_start(kind, 31 * SECOND_US), "one is tried at a time");
        transfers.ended(kind, false, 1.0, 1.0, 32 * SECOND_US);
        assert!(!transfers.may_start(kind, 80 * SECOND_US), "another one, from before, says nothing");
        transfers.ended(kind, true, 1.0, 3.0, 40 * SECOND_US);
        assert!(!transfers.may_start(kind, 69 * SECOND_US));
        assert!(transfers.started(kind));
        transfers.ended(kind, true, 1.0, 1.1, 71 * SECOND_US);
        assert!(transfers.may_start(kind, 71 * SECOND_US));
    }

    #[test]
    fn the_usual_error_is_the_median_of_the_last_ones() {
        let mut transfers = Transfers::default();
        assert_eq!(transfers.usual_error_s(TransferKind::Pull), 0.0);
        let mut ended = |error_s| transfers.ended(TransferKind::Pull, false, 1.0, 1.0 + error_s, 0);
        (0..32).for_each(|_| ended(8.0));
        (0..32).for_each(|error| ended(f64::from(error) / 100.0));
        assert!((transfers.usual_error_s(TransferKind::Pull) - 0.16).abs() < 1e-9);
    }

    #[test]
    fn errors_in_both_directions_do_not_cancel() {
        let mut transfers = Transfers::default();
        for error_s in [0.5, -0.5].repeat(16) {
            transfers.ended(TransferKind::Pull, false, 1.0, 1.0 + error_s, 0);
        }
        transfers.ended(TransferKind::Pull, false, 1.0, 1.0, 0);
        assert_eq!(transfers.usual_error_s(TransferKind::Pull), 0.5);
    }
}
