//! What each session has really said so far, so that a turn's prompt carries the tokens that the
//! engine produced and not the ones that the trace's engine did.
//!
//! A replay that invents new tokens for earlier answers makes every later turn miss the cache
//! behind them, and so measures the wrong thing.

use crate::request::TraceRequest;
use crate::tokens::block_tokens;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The transcripts of all sessions, at most `tokens_max` tokens together: the sessions unused for
/// longest are forgotten first, and a forgotten session's next turn starts from the tokens of its
/// blocks.
#[derive(Debug)]
pub struct Transcripts {
    vocab: u32,
    tokens_max: usize,
    tokens: usize,
    sessions: HashMap<String, Transcript>,
    /// Sessions by last use, oldest first.
    by_use: BTreeMap<u64, String>,
    next_use: u64,
}

/// A prompt that is ready to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Exactly the trace's `input_tokens` token ids.
    pub tokens: Arc<[u32]>,
    /// How many of them, from the start, come from the transcript.
    pub carried_tokens: u32,
    /// The session's previous answer is still under way, so it is not carried.
    pub early: bool,
}

#[derive(Debug)]
struct Transcript {
    turn: u32,
    blocks: Vec<u64>,
    prompt: Arc<[u32]>,
    /// `None` until the answer has ended.
    answer: Option<Vec<u32>>,
    last_use: u64,
}

/// Block size for traces that have none; their blocks are all distinct, so it only sets how tokens
/// are generated.
const UNBLOCKED_TOKENS: u32 = 512;

impl Transcripts {
    /// No sessions yet; token ids will be below `vocab`.
    pub fn new(vocab: u32, tokens_max: usize) -> Transcripts {
        Transcripts {
            vocab,
            tokens_max,
            tokens: 0,
            sessions: HashMap::new(),
            by_use: BTreeMap::new(),
            next_use: 0,
        }
    }

    /// The prompt of a request, which becomes the session's transcript.
    pub fn prompt(&mut self, request: &TraceRequest) -> Prompt {
        let previous = self.forget(&request.session);
        let mut tokens = Vec::with_capacity(request.input_tokens as usize);
        if let Some(previous) = &previous {
            previous.append_shared(request, &mut tokens);
        }
        let carried_tokens = tokens.len() as u32;
        self.add_fresh(request, &mut tokens);
        let prompt: Arc<[u32]> = tokens.into();
        self.remember(request, prompt.clone());
        let early = previous.is_some_and(|previous| previous.answer.is_none());
        Prompt { tokens: prompt, carried_tokens, early }
    }

    /// The answer to a turn has ended with these tokens, which may be none. An answer to a turn
    /// that is not the session's latest any more changes nothing; of several answers to turns of
    /// one number the last one counts.
    pub fn answered(&mut self, session: &str, turn: u32, answer: Vec<u32>) {
        if let Some(transcript) = self.sessions.get_mut(session)
            && transcript.turn == turn
        {
            self.tokens += answer.len();
            self.tokens -= transcript.answer.replace(answer).map_or(0, |before| before.len());
            self.forget_oldest();
        }
    }

    /// Tokens from the prompt's blocks for all that was not carried.
    fn add_fresh(&self, request: &TraceRequest, tokens: &mut Vec<u32>) {
        let size = if request.block_tokens == 0 { UNBLOCKED_TOKENS } else { request.block_tokens };
        let length = request.input_tokens as usize;
        while tokens.len() < length {
            let (block, offset) = (tokens.len() / size as usize, tokens.len() % size as usize);
            let id = request.blocks.get(block).copied().unwrap_or_else(|| own_block(request, block as u64));
            let take = (size as usize - offset).min(length - tokens.len());
            tokens.extend(block_tokens(id, size, self.vocab).skip(offset).take(take));
        }
    }

    fn remember(&mut self, request: &TraceRequest, prompt: Arc<[u32]>) {
        let last_use = self.next_use;
        self.next_use += 1;
        self.tokens += prompt.len();
        self.by_use.insert(last_use, request.session.clone());
        let transcript =
            Transcript { turn: request.turn, blocks: request.blocks.clone(), prompt, answer: None, last_use };
        self.sessions.insert(request.session.clone(), transcript);
        self.forget_oldest();
    }

    fn forget(&mut self, session: &str) -> Option<Transcript> {
        let transcript = self.sessions.remove(session)?;
        self.tokens -= transcript.len();
        self.by_use.remove(&transcript.last_use);
        Some(transcript)
    }

    fn forget_oldest(&mut self) {
        while self.tokens > self.tokens_max
            && let Some((_, session)) = self.by_use.pop_first()
        {
            self.forget(&session);
        }
    }
}

impl Transcript {
    fn len(&self) -> usize {
        self.prompt.len() + self.answer.as_ref().map_or(0, Vec::len)
    }

    /// Appends the leading tokens that `request` shares with this transcript. A turn that continues
    /// the previous prompt carries that prompt and its answer; after a reset or a compaction only
    /// the common blocks are carried.
    fn append_shared(&self, request: &TraceRequest, tokens: &mut Vec<u32>) {
        let size = request.block_tokens as usize;
        let common = self.blocks.iter().zip(&request.blocks).take_while(|(old, new)| old == new).count();
        let length = request.input_tokens as usize;
        // Without blocks nothing says what is shared.
        let continues = size > 0 && length >= self.prompt.len() && common >= self.prompt.len() / size;
        let carried = if continues { length } else { (common * size).min(length) };
        tokens.extend(self.prompt.iter().take(carried));
        if continues {
            let answer = self.answer.as_deref().unwrap_or_default();
            tokens.extend(answer.iter().take(carried - tokens.len()));
        }
    }
}

/// An id for a block that the trace does not name: it belongs to this request alone.
fn own_block(request: &TraceRequest, block: u64) -> u64 {
    let seed = (u64::from(request.turn) << 32) ^ block;
    xxhash_rust::xxh3::xxh3_64_with_seed(request.session.as_bytes(), seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: u32 = 1_000;

    fn request(
        session: &str,
        turn: u32,
        input_tokens: u32,
        block_tokens: u32,
        blocks: &[u64],
    ) -> TraceRequest {
        let request = serde_json::json!({
            "session": session, "turn": turn, "arrival_us": 0, "input_tokens": input_tokens, "output_tokens": 8,
            "block_tokens": block_tokens, "blocks": blocks,
        });
        serde_json::from_value(request).unwrap()
    }

    fn transcripts() -> Transcripts {
        Transcripts::new(VOCAB, 1 << 20)
    }

    fn block(id: u64, size: u32) -> Vec<u32> {
        block_tokens(id, size, VOCAB).collect()
    }

    #[test]
    fn a_first_prompt_is_made_of_its_blocks_and_has_the_length_of_the_trace() {
        let prompt = transcripts().prompt(&request("a", 0, 40, 16, &[1, 2, 3]));
        let expected = [block(1, 16), block(2, 16), block(3, 16)[..8].to_vec()].concat();
        assert_eq!(prompt.tokens[..], expected);
        assert_eq!((prompt.carried_tokens, prompt.early), (0, false));
    }

    #[test]
    fn sessions_with_common_blocks_have_common_tokens() {
        let mut transcripts = transcripts();
        let first = transcripts.prompt(&request("a", 0, 48, 16, &[1, 2, 3]));
        let second = transcripts.prompt(&request("b", 0, 48, 16, &[1, 2, 9]));
        assert_eq!(first.tokens[..32], second.tokens[..32]);
        assert_ne!(first.tokens[32..], second.tokens[32..]);
    }

    #[test]
    fn the_next_turn_carries_the_prompt_and_the_answer_that_was_really_given() {
        let mut transcripts = transcripts();
        // 40 tokens fill two blocks and a half; the half block's id is another one in the next
        // turn.
        let first = transcripts.prompt(&request("a", 0, 40, 16, &[1, 2, 3]));
        transcripts.answered("a", 0, (900..908).collect());
        let second = transcripts.prompt(&request("a", 1, 64, 16, &[1, 2, 4, 5]));
        assert_eq!(second.tokens[..40], first.tokens[..]);
        assert_eq!(second.tokens[40..48], (900..908).collect::<Vec<u32>>());
        assert_eq!(second.tokens[48..], block(5, 16));
        assert_eq!(second.carried_tokens, 48);
    }

    #[test]
    fn fresh_tokens_continue_their_block_where_the_answer_ends_within_it() {
        let mut transcripts = transcripts();
        transcripts.prompt(&request("a", 0, 32, 16, &[1, 2]));
        transcripts.answered("a", 0, vec![900; 5]);
        let second = transcripts.prompt(&request("a", 1, 48, 16, &[1, 2, 3]));
        assert_eq!(second.tokens[32..37], [900; 5]);
        assert_eq!(second.tokens[37..], block(3, 16)[5..]);
    }

    #[test]
    fn a_prompt_that_ends_within_the_previous_answer_carries_only_that_part() {
        let mut transcripts = transcripts();
        transcripts.prompt(&request("a", 0, 32, 16, &[1, 2]));
        transcripts.answered("a", 0, (900..908).collect());
        let second = transcripts.prompt(&request("a", 1, 35, 16, &[1, 2, 3]));
        assert_eq!(second.tokens[32..], [900, 901, 902]);
        assert_eq!(second.carried_tokens, 35);
    }

    #[test]
    fn after_a_reset_only_the_common_blocks_are_carried() {
        let mut transcripts = transcripts();
        transcripts.prompt(&request("a", 0, 32, 16, &[1, 2]));
        transcripts.answered("a", 0, vec![900; 16]);
        let second = transcripts.prompt(&request("a", 1, 64, 16, &[1, 2, 3, 4]));
        transcripts.answered("a", 1, vec![901; 16]);
        // The answer of turn 0 lies in block 3, which the compacted prompt keeps; block 4 is gone.
        let third = transcripts.prompt(&request("a", 2, 64, 16, &[1, 2, 3, 7]));
        assert_eq!(third.tokens[..48], second.tokens[..48]);
        assert_eq!(third.tokens[32..48], [900; 16]);
        assert_eq!(third.tokens[48..], block(7, 16));
        assert_eq!(third.carried_tokens, 48);
    }

    #[test]
    fn a_shorter_prompt_is_a_reset_even_when_its_blocks_agree() {
        let mut transcripts = transcripts();
        transcripts.prompt(&request("a", 0, 47, 16, &[1, 2, 3]));
        transcripts.answered("a", 0, vec![900; 8]);
        let second = transcripts.prompt(&request("a", 1, 40, 16, &[1, 2, 6]));
        assert_eq!(second.carried_tokens, 32);
        assert_eq!(second.tokens[32..], block(6, 16)[..8]);
    }

    #[test]
    fn a_turn_sent_before_the_previous_answer_ended_is_early() {
        let mut transcripts = transcripts();
        let first = transcripts.prompt(&request("a", 0, 32, 16, &[1, 2]));
        let second = transcripts.prompt(&request("a", 1, 48, 16, &[1, 2, 3]));
        assert!(second.early);
        assert_eq!(second.tokens[..32], first.tokens[..]);
        // The late answer must not become part of a turn that it does not precede.
        transcripts.answered("a", 1, vec![901; 8]);
        transcripts.answered("a", 0, vec![900; 8]);
        let third = transcripts.prompt(&request("a", 2, 64, 16, &[1, 2, 3, 4]));
        assert_eq!(third.tokens[..48], second.tokens[..]);
        assert_eq!(third.tokens[48..56], [901; 8]);
        assert!(!third.early);
    }

    #[test]
    fn of_two_answers_to_turns_of_one_number_the_later_one_is_kept() {
        let mut transcripts = Transcripts::new(VOCAB, 100);
        // Traces in which a conversation branches have such turns.
        transcripts.prompt(&request("a", 1, 32, 16, &[1, 2]));
        transcripts.prompt(&request("a", 1, 32, 16, &[1, 3]));
        for answer in [900, 901, 902, 903] {
            transcripts.answered("a", 1, vec![answer; 20]);
        }
        assert_eq!(transcripts.tokens, 52);
        let next = transcripts.prompt(&request("a", 2, 64, 16, &[1, 3, 4, 5]));
        assert_eq!(next.tokens[32..52], [903; 20]);
    }

    #[test]
    fn requests_without_blocks_share_nothing() {
        let mut transcripts = transcripts();
        let first = transcripts.prompt(&request("a", 0, 700, 0, &[]));
        transcripts.answered("a", 0, vec![900; 8]);
        let second = transcripts.prompt(&request("a", 1, 700, 0, &[]));
        assert_eq!(second.carried_tokens, 0);
        assert_ne!(first.tokens[..512], second.tokens[..512]);
        assert_ne!(first.tokens[512..], first.tokens[..188]);
    }

    #[test]
    fn the_tokens_held_never_exceed_the_limit_and_the_oldest_session_goes_first() {
        let mut transcripts = Transcripts::new(VOCAB, 100);
        transcripts.prompt(&request("a", 0, 32, 16, &[1, 2]));
        transcripts.prompt(&request("b", 0, 32, 16, &[1, 2]));
        transcripts.answered("a", 0, vec![900; 8]);
        transcripts.prompt(&request("b", 1, 48, 16, &[1, 2, 3]));
        assert_eq!(transcripts.tokens, 88);
        transcripts.answered("b", 1, vec![901; 20]);
        assert_eq!(transcripts.tokens, 68, "session a is the one unused for longest");
        assert_eq!(transcripts.prompt(&request("a", 1, 48, 16, &[1, 2, 3])).carried_tokens, 0);
        transcripts.prompt(&request("c", 0, 1_000, 16, &[1]));
        assert!(transcripts.tokens <= 100);
        assert_eq!(transcripts.sessions.len(), transcripts.by_use.len());
    }
}
