//! When each request of a replay is due. It knows arrival times, think times and which turn waits
//! for which answer. Time is passed in: microseconds of model time since the start of the replay.

use crate::request::TraceRequest;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// What decides when a request is sent. Trace time is never compressed; only the clock ratio scales
/// all times alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pacing {
    /// At its time in the trace, whether or not earlier answers have come.
    Open,
    /// A session's first turn at its time in the trace; each further turn when the previous answer
    /// has ended and the recorded think time has passed. A trace without think times but with
    /// service times gives the pause between the recorded answer and the next turn; with neither, a
    /// turn keeps the trace's distance to the previous turn's arrival, but never precedes the
    /// previous answer. Sub-agents are sessions of their own.
    Closed,
}

/// The requests that are not sent yet.
#[derive(Debug)]
pub struct Schedule {
    pacing: Pacing,
    /// Arrival of the first request: the start of the replay.
    origin_us: Option<u64>,
    /// By the time that each is due, then by the order of the trace.
    due: BTreeMap<(u64, u64), TraceRequest>,
    /// Sessions with a turn due or under way (closed loop only).
    sessions: HashMap<String, Session>,
    /// Top-level sessions under way at most (closed loop only).
    sessions_max: usize,
    /// Those, with how many of their sessions, sub-agents' included, are under way.
    begun: HashMap<String, usize>,
    /// First turns that are due and whose top-level session, by whose name they are here, has no
    /// place yet.
    held: HashMap<String, Vec<Due>>,
    /// Those sessions in the order in which they get one.
    held_order: VecDeque<String>,
    next_sequence: u64,
    len: usize,
}

/// A request and the time at which it is due.
#[derive(Debug, Clone, PartialEq)]
pub struct Due {
    /// When, since the start of the replay.
    pub due_us: u64,
    pub request: TraceRequest,
}

#[derive(Debug)]
struct Session {
    /// The top-level session that it belongs to.
    root: String,
    has_begun: bool,
    /// The turn under way: its times in the trace, and when it was due here.
    turn_arrival_us: u64,
    turn_service_us: Option<u64>,
    turn_due_us: u64,
    waiting: VecDeque<TraceRequest>,
}

impl Schedule {
    /// An empty schedule. In a closed loop at most `sessions_max` top-level sessions are under way:
    /// the next one begins when another has ended.
    pub fn new(pacing: Pacing, sessions_max: Option<usize>) -> Schedule {
        Schedule {
            pacing,
            origin_us: None,
            due: BTreeMap::new(),
            sessions: HashMap::new(),
            sessions_max: sessions_max.unwrap_or(usize::MAX),
            begun: HashMap::new(),
            held: HashMap::new(),
            held_order: VecDeque::new(),
            next_sequence: 0,
            len: 0,
        }
    }

    /// Adds the next request of the trace. The first one added starts the replay's time.
    pub fn add(&mut self, request: TraceRequest) {
        self.len += 1;
        let origin_us = *self.origin_us.get_or_insert(request.arrival_us);
        let due_us = request.arrival_us.saturating_sub(origin_us);
        if self.pacing == Pacing::Closed {
            if let Some(session) = self.sessions.get_mut(&request.session) {
                session.waiting.push_back(request);
                return;
            }
            self.sessions.insert(request.session.clone(), Session::starting(&request, due_us));
        }
        self.put(due_us, request);
    }

    /// When the next request is due; `None` while there is none that does not wait for an answer.
    pub fn next_due_us(&self) -> Option<u64> {
        self.due.first_key_value().map(|(&(due_us, _), _)| due_us)
    }

    /// The next request that is due by `now_us`.
    pub fn take(&mut self, now_us: u64) -> Option<Due> {
        while self.next_due_us()? <= now_us {
            let ((due_us, _), request) = self.due.pop_first()?;
            let due = Due { due_us, request };
            if self.begin(&due) {
                self.len -= 1;
                return Some(due);
            }
            self.hold(due);
        }
        None
    }

    /// Whether a request may go now: unless it is the first of a session that has no place yet.
    fn begin(&mut self, Due { due_us, request }: &Due) -> bool {
        let Some(session) = self.sessions.get_mut(&request.session) else { return true };
        if session.has_begun {
            return true;
        }
        let is_known = self.begun.contains_key(&session.root);
        if !is_known && self.begun.len() >= self.sessions_max {
            return false;
        }
        session.has_begun = true;
        let root = session.root.clone();
        *self.begun.entry(root.clone()).or_default() += 1;
        self.release(&root, *due_us);
        true
    }

    /// Puts a first turn aside until its top-level session has a place.
    fn hold(&mut self, due: Due) {
        let root = due.request.root_session().to_owned();
        if !self.held.contains_key(&root) {
            self.held_order.push_back(root.clone());
        }
        self.held.entry(root).or_default().push(due);
    }

    /// All first turns that wait for this top-level session are due. Says whether there were any.
    fn release(&mut self, root: &str, now_us: u64) -> bool {
        let first_turns = self.held.remove(root).unwrap_or_default();
        let any = !first_turns.is_empty();
        for Due { due_us, request } in first_turns {
            self.put(due_us.max(now_us), request);
        }
        any
    }

    /// A session has ended. If its top-level session has with it, the first one that waits gets
    /// its place.
    fn leave(&mut self, root: &str, now_us: u64) {
        let Some(sessions) = self.begun.get_mut(root) else { return };
        *sessions -= 1;
        if *sessions > 0 {
            return;
        }
        self.begun.remove(root);
        // Some got a place in another way: through a sub-agent that was due when one was free.
        while let Some(next) = self.held_order.pop_front() {
            if self.release(&next, now_us) {
                return;
            }
        }
    }

    /// The session's turn under way ended, well or not: in a closed loop its next turn becomes due.
    pub fn ended(&mut self, session: &str, now_us: u64) {
        let Some(state) = self.sessions.get_mut(session) else { return };
        let Some(request) = state.waiting.pop_front() else {
            if let Some(Session { root, .. }) = self.sessions.remove(session) {
                self.leave(&root, now_us);
            }
            return;
        };
        let due_us = state.next_due_us(&request, now_us);
        state.turn_arrival_us = request.arrival_us;
        state.turn_service_us = request.service_us;
        state.turn_due_us = due_us;
        self.put(due_us, request);
    }

    /// Requests that were added and not taken.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether every request that was added has been taken.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn put(&mut self, due_us: u64, request: TraceRequest) {
        self.due.insert((due_us, self.next_sequence), request);
        self.next_sequence += 1;
    }
}

impl Session {
    fn starting(request: &TraceRequest, due_us: u64) -> Session {
        Session {
            root: request.root_session().to_owned(),
            has_begun: false,
            turn_arrival_us: request.arrival_us,
            turn_service_us: request.service_us,
            turn_due_us: due_us,
            waiting: VecDeque::new(),
        }
    }

    /// When the next turn is due if the turn under way ended at `now_us`; see [`Pacing::Closed`].
    fn next_due_us(&self, next: &TraceRequest, now_us: u64) -> u64 {
        let distance_us = next.arrival_us.saturating_sub(self.turn_arrival_us);
        let pause_us =
            next.think_us.or(self.turn_service_us.map(|service_us| distance_us.saturating_sub(service_us)));
        match pause_us {
            Some(pause_us) => now_us.saturating_add(pause_us),
            None => now_us.max(self.turn_due_us.saturating_add(distance_us)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(session: &str, turn: u32, arrival_us: u64, think_us: Option<u64>) -> TraceRequest {
        let request = serde_json::json!({
            "session": session, "turn": turn, "arrival_us": arrival_us, "think_us": think_us,
            "input_tokens": 1, "output_tokens": 1,
        });
        serde_json::from_value(request).unwrap()
    }

    fn taken(due: Option<Due>) -> (String, u32, u64) {
        let due = due.expect("a request is due");
        (due.request.session, due.request.turn, due.due_us)
    }

    #[test]
    fn an_open_loop_follows_the_trace_and_waits_for_no_answer() {
        let mut schedule = Schedule::new(Pacing::Open, None);
        schedule.add(request("a", 0, 5_000, None));
        schedule.add(request("a", 1, 5_300, Some(1_000_000)));
        assert_eq!(taken(schedule.take(0)), ("a".into(), 0, 0));
        assert_eq!(schedule.take(299), None);
        assert_eq!(schedule.next_due_us(), Some(300));
        assert_eq!(taken(schedule.take(300)), ("a".into(), 1, 300));
        assert!(schedule.is_empty());
    }

    #[test]
    fn a_closed_loop_waits_for_the_answer_and_the_think_time() {
        let mut schedule = Schedule::new(Pacing::Closed, None);
        schedule.add(request("a", 0, 0, None));
        schedule.add(request("a", 1, 10, Some(700)));
        assert_eq!(taken(schedule.take(0)), ("a".into(), 0, 0));
        assert_eq!(schedule.next_due_us(), None, "turn 1 waits for an answer");
        assert!(!schedule.is_empty());
        schedule.ended("a", 2_000);
        assert_eq!(schedule.take(2_699), None);
        assert_eq!(taken(schedule.take(2_700)), ("a".into(), 1, 2_700));
    }

    #[test]
    fn without_think_times_the_pause_is_what_the_recorded_service_left() {
        let mut schedule = Schedule::new(Pacing::Closed, None);
        schedule.add(TraceRequest { service_us: Some(600), ..request("a", 0, 100, None) });
        schedule.add(request("a", 1, 1_100, None));
        schedule.take(0);
        schedule.ended("a", 50);
        assert_eq!(taken(schedule.take(450)), ("a".into(), 1, 450));
    }

    #[test]
    fn without_think_and_service_times_a_turn_keeps_the_distance_of_the_trace() {
        let mut schedule = Schedule::new(Pacing::Closed, None);
        for (turn, arrival_us) in [(0, 100), (1, 1_100), (2, 1_500)] {
            schedule.add(request("a", turn, arrival_us, None));
        }
        schedule.take(0);
        schedule.ended("a", 400);
        assert_eq!(taken(schedule.take(1_000)), ("a".into(), 1, 1_000));
        // The answer comes later than the next arrival: the turn goes at once.
        schedule.ended("a", 5_000);
        assert_eq!(taken(schedule.take(5_000)), ("a".into(), 2, 5_000));
    }

    #[test]
    fn a_session_that_returns_after_its_last_turn_starts_anew() {
        let mut schedule = Schedule::new(Pacing::Closed, None);
        schedule.add(request("a", 0, 0, None));
        schedule.take(0);
        schedule.ended("a", 10);
        schedule.add(request("a", 1, 50, None));
        assert_eq!(taken(schedule.take(50)), ("a".into(), 1, 50));
    }

    #[test]
    fn no_more_sessions_are_under_way_than_may_be_and_the_next_begins_when_one_ends() {
        let mut schedule = Schedule::new(Pacing::Closed, Some(1));
        for (session, turn) in [("a", 0), ("b", 0), ("c", 0), ("a", 1)] {
            schedule.add(request(session, turn, 0, Some(10)));
        }
        assert_eq!(taken(schedule.take(0)), ("a".into(), 0, 0));
        assert_eq!((schedule.take(0), schedule.next_due_us(), schedule.len()), (None, None, 3));
        schedule.ended("a", 100);
        // Its second turn is due after the think time; the others wait for its end.
        assert_eq!((schedule.take(109), schedule.next_due_us()), (None, Some(110)));
        assert_eq!(taken(schedule.take(110)), ("a".into(), 1, 110));
        schedule.ended("a", 200);
        assert_eq!(taken(schedule.take(200)), ("b".into(), 0, 200));
        assert_eq!(schedule.take(1_000), None);
        schedule.ended("b", 300);
        assert_eq!(taken(schedule.take(300)), ("c".into(), 0, 300));
        assert!(schedule.is_empty());
    }

    #[test]
    fn a_sub_agent_needs_no_place_of_its_own() {
        let mut schedule = Schedule::new(Pacing::Closed, Some(1));
        schedule.add(request("a", 0, 0, None));
        schedule.add(TraceRequest { parent_session: Some("a".into()), ..request("a/1", 0, 0, None) });
        schedule.add(request("b", 0, 0, None));
        assert_eq!(taken(schedule.take(0)), ("a".into(), 0, 0));
        assert_eq!(taken(schedule.take(0)), ("a/1".into(), 0, 0));
        schedule.ended("a", 10);
        assert_eq!(schedule.take(10), None, "its sub-agent is under way");
        schedule.ended("a/1", 20);
        assert_eq!(taken(schedule.take(20)), ("b".into(), 0, 20));
    }

    fn sub_agent(session: &str, parent: &str) -> TraceRequest {
        TraceRequest { parent_session: Some(parent.into()), ..request(session, 0, 0, None) }
    }

    #[test]
    fn a_session_that_gets_a_place_takes_its_waiting_sub_agents_along() {
        let mut schedule = Schedule::new(Pacing::Closed, Some(1));
        for first in [request("a", 0, 0, None), request("b", 0, 0, None), sub_agent("b/1", "b")] {
            schedule.add(first);
        }
        for first in [request("c", 0, 0, None), sub_agent("b/2", "b")] {
            schedule.add(first);
        }
        assert_eq!(taken(schedule.take(0)), ("a".into(), 0, 0));
        assert_eq!(schedule.take(0), None);
        schedule.ended("a", 10);
        for session in ["b", "b/1", "b/2"] {
            assert_eq!(taken(schedule.take(10)), (session.into(), 0, 10));
        }
        assert_eq!(schedule.take(10), None, "c has no place yet");
        ["b", "b/1", "b/2"].into_iter().for_each(|session| schedule.ended(session, 20));
        assert_eq!(taken(schedule.take(20)), ("c".into(), 0, 20));
    }

    #[test]
    fn a_sub_agent_that_finds_a_free_place_takes_its_waiting_session_along() {
        let mut schedule = Schedule::new(Pacing::Closed, Some(1));
        for first in [request("a", 0, 0, None), request("c", 0, 0, None), request("b", 0, 0, None)] {
            schedule.add(first);
        }
        schedule.add(TraceRequest { arrival_us: 5, ..sub_agent("b/1", "b") });
        assert_eq!(taken(schedule.take(0)), ("a".into(), 0, 0));
        assert_eq!(schedule.take(0), None, "c and b wait");
        schedule.ended("a", 10);
        // It was due before c, whose turn it is from now on.
        assert_eq!(taken(schedule.take(10)), ("b/1".into(), 0, 5));
        assert_eq!(taken(schedule.take(10)), ("b".into(), 0, 5));
        assert_eq!(schedule.take(10), None);
        ["b", "b/1"].into_iter().for_each(|session| schedule.ended(session, 20));
        assert_eq!(taken(schedule.take(20)), ("c".into(), 0, 20));
    }

    proptest! {
        #[test]
        fn every_request_is_taken_once_in_turn_order_and_never_early(
            shape in prop::collection::vec((0usize..4, 0u64..1_000, prop::option::of(0u64..500)), 1..60),
            service_us in 0u64..700,
            closed in any::<bool>(),
            sessions_max in prop::option::of(1usize..3),
        ) {
            let pacing = if closed { Pacing::Closed } else { Pacing::Open };
            let mut schedule = Schedule::new(pacing, sessions_max);
            let mut arrival_us = 0;
            let mut turns = [0u32; 4];
            for &(session, gap_us, think_us) in &shape {
                arrival_us += gap_us;
                let request = request(&session.to_string(), turns[session], arrival_us, think_us);
                // The odd ones are sub-agents.
                let parent_session = (session % 2 == 1).then(|| (session - 1).to_string());
                schedule.add(TraceRequest { parent_session, ..request });
                turns[session] += 1;
            }
            let mut next_turn = HashMap::<String, u32>::new();
            let mut last_due_us = 0;
            let mut count = 0;
            while let Some(due_us) = schedule.next_due_us() {
                prop_assert!(due_us == 0 || schedule.take(due_us - 1).is_none());
                // A session that may not begin yet is put aside, and none is taken.
                let Some(due) = schedule.take(due_us) else {
                    prop_assert!(sessions_max.is_some_and(|most| schedule.begun.len() == most));
                    continue;
                };
                prop_assert!(sessions_max.is_none_or(|most| schedule.begun.len() <= most));
                let turn = next_turn.entry(due.request.session.clone()).or_default();
                prop_assert_eq!(due.request.turn, *turn);
                *turn += 1;
                count += 1;
                last_due_us = last_due_us.max(due_us);
                schedule.ended(&due.request.session, last_due_us + service_us);
            }
            prop_assert_eq!(count, shape.len());
            prop_assert!(schedule.is_empty());
        }
    }
}
