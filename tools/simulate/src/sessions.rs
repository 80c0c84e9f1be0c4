//! When which turn of which session is asked, and which answers count. It knows pauses and
//! arrivals. It knows no engine.

use crate::workload::Workload;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// How sessions come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pacing {
    /// So many at a time: a session that ends makes room for the next one, and a turn comes after
    /// the answer before it and a pause.
    Closed { at_once: usize, warm_up: WarmUp },
    /// Every turn at its time in the trace.
    Open,
}

/// What is not counted of a closed loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WarmUp {
    /// The first turns of the first sessions, which begin together. The others wait until all of
    /// these are answered. This is how `bench/vllm_load.py` asks.
    FirstTurns,
    /// The first sessions begin one by one within this time. The first share of all answers is
    /// not counted, nor is what is answered when no session is left to begin.
    Ramp { over_us: u64, share: f64 },
}

/// A turn to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    pub at_us: u64,
    pub session: u32,
    pub turn: u32,
}

/// What follows from an answer.
#[derive(Debug, Default)]
pub struct Answered {
    pub counts: bool,
    pub next: Vec<Next>,
}

#[derive(Debug)]
pub struct Sessions {
    pacing: Pacing,
    /// The turns to ask at the start.
    first: Vec<Next>,
    /// The next session to begin.
    next_session: u32,
    sessions: u32,
    turns: usize,
    answered: usize,
    counted_from_us: Option<u64>,
    counted_until_us: Option<u64>,
}

impl Sessions {
    pub fn new(pacing: Pacing, workload: &Workload, seed: u64) -> Sessions {
        let sessions = workload.sessions.len() as u32;
        let mut random = StdRng::seed_from_u64(seed);
        let first: Vec<Next> = match pacing {
            Pacing::Closed { at_once, warm_up } => (0..sessions.min(at_once as u32))
                .map(|session| {
                    let at_us = match warm_up {
                        WarmUp::Ramp { over_us, .. } => (random.random::<f64>() * over_us as f64) as u64,
                        WarmUp::FirstTurns => 0,
                    };
                    Next { at_us, session, turn: 0 }
                })
                .collect(),
            Pacing::Open => {
                let turns = |(session, turns): (usize, &crate::workload::Session)| {
                    let next = |(turn, at): (usize, &crate::workload::Turn)| Next {
                        at_us: at.arrival_us,
                        session: session as u32,
                        turn: turn as u32,
                    };
                    turns.turns.iter().enumerate().map(next).collect::<Vec<_>>()
                };
                workload.sessions.iter().enumerate().flat_map(turns).collect()
            }
        };
        let next_session = first.len().min(sessions as usize) as u32;
        Sessions {
            pacing,
            first,
            next_session,
            sessions,
            turns: workload.turns(),
            answered: 0,
            counted_from_us: None,
            counted_until_us: None,
        }
    }

    /// The turns that wait for nothing.
    pub fn start(&mut self) -> Vec<Next> {
        std::mem::take(&mut self.first)
    }

    /// From when to when answers were counted in a run that ended at `now_us`.
    pub fn counted_us(&self, now_us: u64) -> (u64, u64) {
        (self.counted_from_us.unwrap_or(0), self.counted_until_us.unwrap_or(now_us))
    }

    /// A turn is answered.
    pub fn answered(&mut self, now_us: u64, workload: &Workload, session: u32, turn: u32) -> Answered {
        self.answered += 1;
        match self.pacing {
            Pacing::Open => Answered { counts: true, next: Vec::new() },
            Pacing::Closed { at_once, warm_up: WarmUp::FirstTurns } => {
                self.after_first_turns(now_us, workload, at_once, session, turn)
            }
            Pacing::Closed { warm_up: WarmUp::Ramp { share, .. }, .. } => {
                let next = self.next_turn(now_us, workload, session, turn);
                let skipped = self.turns as f64 * share;
                let counts = self.answered as f64 > skipped && self.counted_until_us.is_none();
                if counts {
                    self.counted_from_us.get_or_insert(now_us);
                }
                if next.is_none() {
                    self.counted_until_us.get_or_insert(now_us);
                }
                Answered { counts, next: next.into_iter().collect() }
            }
        }
    }

    fn after_first_turns(
        &mut self,
        now_us: u64,
        workload: &Workload,
        at_once: usize,
        session: u32,
        turn: u32,
    ) -> Answered {
        let first = at_once.min(self.sessions as usize);
        if self.answered > first {
            let next = self.next_turn(now_us, workload, session, turn);
            return Answered { counts: true, next: next.into_iter().collect() };
        }
        if self.answered < first {
            return Answered::default();
        }
        self.counted_from_us = Some(now_us);
        let next = (0..first as u32).filter_map(|session| self.next_turn(now_us, workload, session, 0));
        Answered { counts: false, next: next.collect() }
    }

    /// What comes after a turn: the session's next one, or another session.
    fn next_turn(&mut self, now_us: u64, workload: &Workload, session: u32, turn: u32) -> Option<Next> {
        if let Some(next) = workload.sessions[session as usize].turns.get(turn as usize + 1) {
            return Some(Next { at_us: now_us + next.think_us, session, turn: turn + 1 });
        }
        let session = self.next_session;
        (session < self.sessions).then(|| {
            self.next_session += 1;
            Next { at_us: now_us, session, turn: 0 }
        })
    }
}
