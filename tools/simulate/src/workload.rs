//! What is asked of the cluster: sessions of turns, made from the requests of a trace. It knows
//! lengths, pauses and which prompts begin alike. It knows no engine.

use crate::prefixes::{NodeId, Prefixes, PrefixesBuilder};
use forebay_trace::request::TraceRequest;
use std::collections::HashMap;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The tokens of its prompt and answer begin this leaf's sequence.
    pub leaf: NodeId,
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// Pause after the answer before it.
    pub think_us: u64,
    pub arrival_us: u64,
}

/// A conversation: a turn begins when the one before it is answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Session {
    pub turns: Vec<Turn>,
}

/// All sessions, in the order of their first arrival.
#[derive(Debug, Default)]
pub struct Workload {
    pub sessions: Vec<Session>,
    pub prefixes: Prefixes,
}

/// A session whose last prompts may still grow.
struct Open {
    session: usize,
    /// The turns from this one on begin with one another.
    first_of_run: usize,
    last: TraceRequest,
}

impl Workload {
    /// Makes sessions of a trace's requests. A prompt and its answer are at most `most_tokens`
    /// long.
    ///
    /// A prompt that continues the one before it also continues its answer, which is in the
    /// engine's cache then: it is at least a token longer than both.
    pub fn new<E>(
        requests: impl IntoIterator<Item = Result<TraceRequest, E>>,
        most_tokens: u32,
    ) -> Result<Workload, E> {
        let (mut workload, mut builder) = (Workload::default(), PrefixesBuilder::default());
        let mut open: HashMap<String, Open> = HashMap::new();
        for request in requests {
            let request = request?;
            match open.get_mut(&request.session) {
                Some(session) => workload.add_turn(session, request, most_tokens, &mut builder),
                None => {
                    let session = workload.sessions.len();
                    let turns = vec![turn(&request, 0, most_tokens)];
                    workload.sessions.push(Session { turns });
                    open.insert(request.session.clone(), Open { session, first_of_run: 0, last: request });
                }
            }
        }
        let mut open: Vec<Open> = open.into_values().collect();
        open.sort_by_key(|open| open.session);
        open.iter().for_each(|open| workload.close_run(open, &mut builder));
        workload.prefixes = builder.finish();
        Ok(workload)
    }

    pub fn turns(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    fn add_turn(
        &mut self,
        open: &mut Open,
        request: TraceRequest,
        most_tokens: u32,
        builder: &mut PrefixesBuilder,
    ) {
        let before = self.sessions[open.session].turns.last();
        let known = before.map_or(0, |turn| turn.input_tokens + turn.output_tokens);
        let continues =
            continues(&open.last, &request) && known < most_tokens.saturating_sub(request.output_tokens);
        if !continues {
            self.close_run(open, builder);
            open.first_of_run = self.sessions[open.session].turns.len();
        }
        let least_tokens = if continues { known + 1 } else { 0 };
        self.sessions[open.session].turns.push(turn(&request, least_tokens, most_tokens));
        open.last = request;
    }

    /// The turns of the run get their leaf.
    fn close_run(&mut self, open: &Open, builder: &mut PrefixesBuilder) {
        let run = &mut self.sessions[open.session].turns[open.first_of_run..];
        let tokens = run.iter().map(|turn| turn.input_tokens + turn.output_tokens).max();
        let leaf = builder.add(&open.last, tokens.unwrap_or(0));
        run.iter_mut().for_each(|turn| turn.leaf = leaf);
    }
}

/// Whether a prompt begins with the one before it. A block that was the last and not whole may
/// have another id since.
fn continues(before: &TraceRequest, request: &TraceRequest) -> bool {
    let whole = before.blocks.len().min((before.input_tokens / before.block_tokens.max(1)) as usize);
    whole > 0 && request.blocks.starts_with(&before.blocks[..whole])
}

fn turn(request: &TraceRequest, least_tokens: u32, most_tokens: u32) -> Turn {
    let output_tokens = request.output_tokens.clamp(1, most_tokens.saturating_sub(1).max(1));
    Turn {
        leaf: NodeId(0),
        input_tokens: request.input_tokens.max(least_tokens).min(most_tokens - output_tokens).max(1),
        output_tokens,
        think_us: request.think_us.unwrap_or(0),
        arrival_us: request.arrival_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn request(session: &str, input_tokens: u32, blocks: &[u64]) -> Result<TraceRequest, Infallible> {
        let (session, blocks) = (session.to_owned(), blocks.to_vec());
        let base = TraceRequest { session, input_tokens, output_tokens: 100, ..TraceRequest::default() };
        Ok(TraceRequest { block_tokens: 16, blocks, ..base })
    }

    #[test]
    fn turns_that_continue_one_another_share_a_leaf_and_grow_by_their_answers() {
        let trace = [
            request("a", 40, &[1, 2]),
            request("b", 32, &[1, 7]),
            request("a", 70, &[1, 2, 3, 4]),
            request("a", 35, &[1, 9]),
        ];
        let workload = Workload::new(trace, 1_000).unwrap();
        let [a, b] = [0, 1].map(|session: usize| &workload.sessions[session].turns);
        assert_eq!((a[0].leaf == a[1].leaf, a[1].leaf == a[2].leaf), (true, false));
        assert_eq!(a.iter().map(|turn| turn.input_tokens).collect::<Vec<_>>(), [40, 141, 35]);
        let [first, other] = [a[0], b[0]].map(|turn| workload.prefixes.path(turn.leaf, turn.input_tokens));
        assert_eq!((first[0].node, first[0].end), (other[0].node, 16), "the first block is shared");
        assert_ne!(first[1].node, other[1].node);
    }

    #[test]
    fn no_prompt_and_answer_are_longer_than_the_engine_takes() {
        let trace = [request("a", 400, &[1]), request("a", 1_000, &[1]), request("b", 1, &[])];
        let workload = Workload::new(trace, 450).unwrap();
        let turns = workload.sessions.iter().flat_map(|session| &session.turns);
        for turn in turns {
            assert!(turn.input_tokens + turn.output_tokens <= 450, "{turn:?}");
        }
    }
}
