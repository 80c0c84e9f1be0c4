//! What sessions make of engines: how many are open at once and what KV they hold, and how uneven
//! the work is if each session stays at one engine. It knows arrivals, lengths and new tokens.

use crate::prefix::KeyMap;
use crate::quantile::ValueSummary;
use crate::request::TraceRequest;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// Numbers of engines for which the imbalance is told.
const ENGINES: [usize; 3] = [4, 8, 32];

/// What sessions make of engines.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoadInfo {
    /// Sessions, sub-agents' included, whose first request has come and whose last has not, as each
    /// arriving request finds them; it counts itself.
    pub open_sessions: ValueSummary,
    /// Tokens of their latest prompts and answers: the KV that they will ask for again.
    pub held_tokens: ValueSummary,
    /// How uneven sessions are.
    pub imbalance: Vec<ImbalanceInfo>,
}

/// The work of engines that top-level sessions are given to in turn, and stay at.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ImbalanceInfo {
    pub engines: usize,
    /// New tokens of the busiest engine by the mean of all; 1 is even.
    pub busiest: f64,
}

#[derive(Default)]
pub(super) struct Load {
    sessions: KeyMap<Held>,
    /// When requests arrive, and by how much each changes what its session holds.
    arrivals: Vec<(u64, f32)>,
    /// Top-level sessions by number, in the order of the file.
    roots: KeyMap<usize>,
    work: [Vec<f64>; ENGINES.len()],
}

struct Held {
    tokens: f32,
    first_us: u64,
    last_us: u64,
}

impl Load {
    /// Adds the next request, of which `new_tokens` are to be computed.
    pub(super) fn add(&mut self, request: &TraceRequest, new_tokens: u64) {
        let arrival_us = request.arrival_us;
        let tokens = (u64::from(request.input_tokens) + u64::from(request.output_tokens)) as f32;
        let held = self.sessions.entry(xxh3_64(request.session.as_bytes())).or_insert(Held {
            tokens: 0.0,
            first_us: arrival_us,
            last_us: arrival_us,
        });
        self.arrivals.push((arrival_us, tokens - held.tokens));
        held.tokens = tokens;
        held.first_us = held.first_us.min(arrival_us);
        held.last_us = held.last_us.max(arrival_us);

        let next = self.roots.len();
        let number = *self.roots.entry(xxh3_64(request.root_session().as_bytes())).or_insert(next);
        for (work, engines) in self.work.iter_mut().zip(ENGINES) {
            work.resize(engines, 0.0);
            work[number % engines] += new_tokens as f64;
        }
    }

    /// What came of it; `None` without requests.
    pub(super) fn finish(mut self) -> Option<LoadInfo> {
        let (open_sessions, held_tokens) = self.found_by_arrivals();
        Some(LoadInfo {
            open_sessions: ValueSummary::of(open_sessions)?,
            held_tokens: ValueSummary::of(held_tokens)?,
            imbalance: self.work.iter().map(|work| ImbalanceInfo::of(work)).collect(),
        })
    }

    /// The open sessions, and what they hold, as each arriving request finds them.
    fn found_by_arrivals(&mut self) -> (Vec<f32>, Vec<f32>) {
        let mut starts: Vec<u64> = self.sessions.values().map(|held| held.first_us).collect();
        let mut ends: Vec<(u64, f32)> =
            self.sessions.values().map(|held| (held.last_us, held.tokens)).collect();
        starts.sort_unstable();
        ends.sort_unstable_by_key(|&(end_us, _)| end_us);
        self.arrivals.sort_by_key(|&(arrival_us, _)| arrival_us);
        let (mut begun, mut ended, mut tokens) = (0, 0, 0.0_f64);
        let found = self.arrivals.iter().map(|&(arrival_us, change)| {
            while starts.get(begun).is_some_and(|&start_us| start_us <= arrival_us) {
                begun += 1;
            }
            while let Some(&(end_us, held)) = ends.get(ended)
                && end_us < arrival_us
            {
                tokens -= f64::from(held);
                ended += 1;
            }
            tokens += f64::from(change);
            // The turns of a session may stand in the file in another order.
            ((begun - ended) as f32, tokens.max(0.0) as f32)
        });
        found.unzip()
    }
}

impl ImbalanceInfo {
    fn of(work: &[f64]) -> ImbalanceInfo {
        let mean = work.iter().sum::<f64>() / work.len() as f64;
        let busiest = work.iter().copied().fold(0.0, f64::max) / mean.max(f64::MIN_POSITIVE);
        ImbalanceInfo { engines: work.len(), busiest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(requests: &[(&str, u64, u32, u64)]) -> LoadInfo {
        let mut load = Load::default();
        for &(session, arrival_us, input_tokens, new_tokens) in requests {
            let session = session.to_owned();
            let request = TraceRequest { session, arrival_us, input_tokens, ..TraceRequest::default() };
            load.add(&request, new_tokens);
        }
        load.finish().unwrap()
    }

    #[test]
    fn sessions_are_open_from_their_first_request_to_their_last_and_hold_the_latest_prompt() {
        let found = load(&[("a", 0, 10, 10), ("b", 5, 100, 100), ("a", 10, 30, 20), ("b", 20, 150, 50)]);
        // a; a and b; a and b; b alone.
        assert_eq!((found.open_sessions.mean, found.open_sessions.max), (1.5, 2.0));
        // 10; 110; 130; 150.
        assert_eq!((found.held_tokens.mean, found.held_tokens.max), (100.0, 150.0));
    }

    #[test]
    fn the_order_of_the_file_does_not_make_sessions_negative() {
        let found = load(&[("a", 30, 40, 0), ("a", 0, 10, 0), ("b", 20, 5, 0)]);
        assert_eq!((found.open_sessions.max, found.open_sessions.count), (2.0, 3));
        assert!(found.held_tokens.max >= 5.0);
    }

    #[test]
    fn the_busiest_engine_is_compared_with_the_mean_of_all() {
        let even: Vec<_> = ["a", "b", "c", "d"].map(|session| (session, 0, 10, 10)).into();
        let found = load(&even);
        assert_eq!(found.imbalance[0], ImbalanceInfo { engines: 4, busiest: 1.0 });
        // Four of eight engines have nothing to do.
        assert_eq!(found.imbalance[1], ImbalanceInfo { engines: 8, busiest: 2.0 });
        let found = load(&[("a", 0, 10, 70), ("b", 0, 10, 10), ("c", 0, 10, 10), ("d", 0, 10, 10)]);
        assert_eq!(found.imbalance[0].busiest, 2.8);
    }
}
