//! The way to a peer as a state machine: nobody asked yet, being connected, backing off after a
//! failure, up, or dead for good. Time is passed in. It says when to connect; `connect.rs` does it.

use crate::error::PeerError;
use forebay_transfer::Backoff;
use std::time::Duration;

/// The pause after the first failure in a row, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(640);
/// A connection that broke sooner than this after it came up has failed as much as one that never
/// did.
const STEADY_US: u64 = 1_000_000;

/// The way to one peer.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    phase: Phase,
    backoff: Backoff,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Connecting,
    Resting,
    Up { since_us: u64 },
    Dead(PeerError),
}

/// What to do with somebody who wants to use the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Want {
    Go,
    /// It is being worked on.
    Wait,
    Connect,
    Never(PeerError),
}

impl Default for ConnectionState {
    fn default() -> ConnectionState {
        ConnectionState { phase: Phase::Idle, backoff: Backoff::new(FIRST_PAUSE, PAUSE_MAX) }
    }
}

impl ConnectionState {
    /// Somebody wants to use it.
    pub fn want(&mut self) -> Want {
        match &self.phase {
            Phase::Up { .. } => Want::Go,
            Phase::Connecting | Phase::Resting => Want::Wait,
            Phase::Dead(why) => Want::Never(why.clone()),
            Phase::Idle => {
                self.phase = Phase::Connecting;
                Want::Connect
            }
        }
    }

    /// A connection came about. Says whether it is wanted: it is not if the connection has died
    /// meanwhile.
    pub fn connected(&mut self, now_us: u64) -> bool {
        if let Phase::Dead(_) = self.phase {
            return false;
        }
        if !matches!(self.phase, Phase::Up { .. }) {
            self.phase = Phase::Up { since_us: now_us };
        }
        true
    }

    /// No connection came about. Says when [`rested`](ConnectionState::rested) is due.
    pub fn failed(&mut self, now_us: u64) -> Option<u64> {
        matches!(self.phase, Phase::Connecting).then(|| self.rest(now_us))
    }

    /// The last connection ended. As [`failed`](ConnectionState::failed), unless it was steady.
    pub fn broken(&mut self, now_us: u64) -> Option<u64> {
        let Phase::Up { since_us } = self.phase else { return None };
        if now_us < since_us.saturating_add(STEADY_US) {
            return Some(self.rest(now_us));
        }
        self.phase = Phase::Idle;
        self.backoff.reset();
        None
    }

    fn rest(&mut self, now_us: u64) -> u64 {
        self.phase = Phase::Resting;
        now_us.saturating_add(self.backoff.pause().as_micros() as u64)
    }

    /// A pause is over. Says whether to connect: only if somebody waits.
    pub fn rested(&mut self, somebody_waits: bool) -> bool {
        if !matches!(self.phase, Phase::Resting) {
            return false;
        }
        self.phase = if somebody_waits { Phase::Connecting } else { Phase::Idle };
        somebody_waits
    }

    /// Nothing will come of it any more. The first cause counts.
    pub fn die(&mut self, why: PeerError) {
        if !matches!(self.phase, Phase::Dead(_)) {
            self.phase = Phase::Dead(why);
        }
    }

    pub fn dead(&self) -> Option<&PeerError> {
        match &self.phase {
            Phase::Dead(why) => Some(why),
            _ => None,
        }
    }

    pub fn word(&self) -> &'static str {
        match self.phase {
            Phase::Idle => "idle",
            Phase::Connecting => "connecting",
            Phase::Resting => "resting",
            Phase::Up { .. } => "up",
            Phase::Dead(_) => "dead",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn removed() -> PeerError {
        PeerError::Removed { peer: "a".into() }
    }

    #[test]
    fn a_connection_backs_off_longer_after_each_failure_and_connects_only_for_somebody() {
        let mut connection = ConnectionState::default();
        assert_eq!(connection.want(), Want::Connect);
        assert_eq!(connection.want(), Want::Wait);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pauses.push(connection.failed(1_000).map(|until_us| until_us - 1_000));
            assert_eq!(connection.want(), Want::Wait);
            assert!(connection.rested(true));
        }
        assert_eq!(pauses[..3], [Some(10_000), Some(20_000), Some(40_000)]);
        assert_eq!(pauses[8], Some(640_000));
        connection.failed(0);
        assert!(!connection.rested(false) && connection.word() == "idle");
    }

    #[test]
    fn a_connection_that_breaks_at_once_backs_off_and_one_that_was_steady_does_not() {
        let mut connection = ConnectionState::default();
        connection.want();
        assert!(connection.connected(0));
        assert!(connection.broken(10).is_some());
        assert!(connection.rested(true) && connection.connected(0));
        assert_eq!(connection.broken(STEADY_US), None);
        assert_eq!(connection.want(), Want::Connect);
    }

    proptest! {
        /// Whatever happens, at most one attempt to connect is under way, and the dead stay dead.
        #[test]
        fn there_is_one_attempt_at_a_time_and_no_life_after_death(events in prop::collection::vec(0u8..7, 0..100)) {
            let mut connection = ConnectionState::default();
            let (mut attempts, mut dead) = (0i32, false);
            for (now_us, event) in events.into_iter().enumerate() {
                match event {
                    0 => attempts += i32::from(connection.want() == Want::Connect),
                    1 if attempts > 0 => {
                        attempts -= 1;
                        prop_assert_eq!(connection.connected(now_us as u64), !dead);
                    }
                    2 if attempts > 0 => {
                        attempts -= 1;
                        prop_assert_eq!(connection.failed(now_us as u64).is_some(), !dead);
                    }
                    3 => drop(connection.broken(now_us as u64)),
                    4 => attempts += i32::from(connection.rested(true)),
                    5 => attempts += i32::from(connection.rested(false)),
                    6 if now_us % 10 == 0 => {
                        connection.die(removed());
                        dead = true;
                    }
                    _ => {}
                }
                prop_assert!((0..=1).contains(&attempts));
                if dead {
                    prop_assert_eq!(connection.want(), Want::Never(removed()));
                }
            }
        }
    }
}
