//! `generate`: sessions of agents drawn from stated marginals, so that the project has traces of
//! its own. The same marginals and seed give the same trace; more sessions add to it and change
//! none.

mod context;
mod marginals;
mod session;

pub use marginals::{
    Conversation, LogNormal, MAX_BLOCK_TOKENS, MAX_SESSIONS, MAX_SYSTEM_PROMPTS, Marginals, MarginalsError,
    Service, SubAgents, SystemPrompt,
};

use crate::request::TraceRequest;
use session::Session;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The requests of a generated trace, in order of arrival. Memory holds the prompts of all sessions
/// that are not over.
///
/// ```
/// use forebay_trace::generate::{Generator, Marginals};
///
/// let marginals = Marginals { sessions: 3, ..Marginals::DEMO.parse().unwrap() };
/// let requests: Vec<_> = Generator::new(&marginals, 1).unwrap().collect();
/// assert!(requests.iter().filter(|request| request.parent_session.is_none()).count() >= 3 * 4);
/// assert!(requests.is_sorted_by_key(|request| request.arrival_us));
/// ```
pub struct Generator<'a> {
    sessions: Vec<Session<'a>>,
    /// The sessions that have another request, by its arrival.
    next: BinaryHeap<Reverse<(u64, usize)>>,
}

impl<'a> Generator<'a> {
    /// A generator, unless the marginals make no sense.
    pub fn new(marginals: &'a Marginals, seed: u64) -> Result<Generator<'a>, MarginalsError> {
        marginals.check()?;
        let sessions: Vec<_> =
            (0..marginals.sessions).map(|number| Session::new(marginals, seed, number)).collect();
        let arrivals = sessions.iter().enumerate();
        let next = arrivals
            .filter_map(|(index, session)| Some(Reverse((session.next_arrival_us()?, index))))
            .collect();
        Ok(Generator { sessions, next })
    }
}

impl Iterator for Generator<'_> {
    type Item = TraceRequest;

    fn next(&mut self) -> Option<TraceRequest> {
        let Reverse((_, index)) = self.next.pop()?;
        let session = &mut self.sessions[index];
        let request = session.next();
        if let Some(arrival_us) = session.next_arrival_us() {
            self.next.push(Reverse((arrival_us, index)));
        }
        request
    }
}
