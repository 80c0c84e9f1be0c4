//! Which requests belong together, so that a sample has all of them or none. Where a trace records
//! sessions these are the top-level sessions. Where it does not, a prompt that continues an earlier
//! one belongs to that one's family: what looks like reuse between strangers is then, mostly, the
//! next turn of one conversation.

use crate::latest::Latest;
use crate::prefix::{KeyHasher, prefix_keys};
use crate::request::TraceRequest;
use xxhash_rust::xxh3::xxh3_64;

/// How many ends of prompts are remembered, two for each of the latest prompts. A later
/// continuation is a stranger.
const REMEMBERED_ENDS: usize = 1 << 21;

/// Prompts that share no more than this many blocks are strangers: whole services begin with the
/// same block.
const COMMON_BLOCKS: usize = 1;

/// Tells families apart.
pub(super) enum Families {
    /// By the session that the trace records.
    Recorded,
    /// By what prompts continue.
    Inferred(PromptEnds),
}

impl Families {
    /// Families for a trace that does or does not record sessions.
    pub(super) fn new(sessions_recorded: bool) -> Families {
        if sessions_recorded {
            Families::Recorded
        } else {
            Families::Inferred(PromptEnds(Latest::new(REMEMBERED_ENDS)))
        }
    }

    /// The family of the next request: a hash that is evenly spread.
    pub(super) fn of(&mut self, request: &TraceRequest) -> u64 {
        let own = xxh3_64(request.root_session().as_bytes());
        match self {
            Families::Recorded => own,
            Families::Inferred(ends) => ends.family_of(request, own),
        }
    }
}

/// The families of the latest prompts, by the keys of their last two blocks: the last one may be
/// partial, and then the next turn fills it and has it under another key.
pub(super) struct PromptEnds(Latest<u64, u64, KeyHasher>);

impl PromptEnds {
    /// The family of the longest earlier prompt that this one continues, or `own`.
    fn family_of(&mut self, request: &TraceRequest, own: u64) -> u64 {
        let keys: Vec<u64> = prefix_keys(request).skip(COMMON_BLOCKS).collect();
        let family = keys.iter().rev().find_map(|key| self.0.get(key)).copied().unwrap_or(own);
        for &end in keys.iter().rev().take(2) {
            self.0.insert(end, family);
        }
        family
    }
}

#[cfg(test)]
mod tests {
    use super::{Latest, PromptEnds};
    use crate::request::TraceRequest;

    fn family(ends: &mut PromptEnds, name: u64, blocks: &[u64]) -> u64 {
        let request = TraceRequest { block_tokens: 512, blocks: blocks.to_vec(), ..TraceRequest::default() };
        ends.family_of(&request, name)
    }

    #[test]
    fn a_prompt_that_continues_another_is_of_its_family() {
        let mut ends = PromptEnds(Latest::new(100));
        assert_eq!(family(&mut ends, 1, &[0, 10, 11]), 1);
        assert_eq!(family(&mut ends, 2, &[0, 20, 21]), 2, "the first block alone is common to all");
        assert_eq!(family(&mut ends, 3, &[0, 10, 12, 13]), 1, "the partial block 11 has become 12");
        assert_eq!(family(&mut ends, 4, &[0, 10, 12, 13, 14, 15]), 1);
        assert_eq!(family(&mut ends, 5, &[0, 10, 11, 16]), 1, "a second answer to the first prompt");
        assert_eq!(family(&mut ends, 6, &[0, 20]), 2, "the whole blocks of an earlier prompt alone");
        assert_eq!(family(&mut ends, 7, &[]), 7);
        assert_eq!(family(&mut ends, 8, &[0, 30]), 8);
        assert_eq!(family(&mut ends, 9, &[0, 31]), 9, "short prompts have no more in common than others");
    }

    #[test]
    fn the_memory_of_past_prompts_is_bounded() {
        let mut ends = PromptEnds(Latest::new(4));
        (0..100).for_each(|name| assert_eq!(family(&mut ends, name, &[0, 10 + name, 1_000 + name]), name));
        assert_eq!(ends.0.lengths(), (4, 4));
        assert_eq!(family(&mut ends, 200, &[0, 109, 1_099, 5]), 99);
        assert_eq!(family(&mut ends, 201, &[0, 10, 1_000, 5]), 201);
    }
}
