//! Whether the block ids of a trace cover its prompts, which they do not where blocks have another
//! size than the reader takes them for.

use crate::request::TraceRequest;
use std::fmt;

/// Requests whose ids leave more of the prompt out than a partial block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Requests of a trace that has blocks.
    pub requests: u64,
    /// Those of them with at least one id.
    pub with_ids: u64,
    /// Those whose ids are too few.
    pub short: u64,
    /// The first of those that have ids: how many, of so many tokens each, for a prompt of so many
    /// tokens.
    pub first: Option<(usize, u32, u32)>,
}

impl Coverage {
    pub(super) fn add(&mut self, request: &TraceRequest) {
        let Some(whole) = request.input_tokens.checked_div(request.block_tokens) else { return };
        let ids = request.blocks.len();
        self.requests += 1;
        self.with_ids += u64::from(ids > 0);
        if ids < whole as usize {
            self.short += 1;
            if ids > 0 {
                self.first.get_or_insert((ids, request.block_tokens, request.input_tokens));
            }
        }
    }

    /// Whether a reader of the trace should know: a trace without any ids only has no prefix
    /// information.
    pub fn is_worth_a_note(&self) -> bool {
        self.with_ids > 0 && self.short > 0
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the ids of {} of {} requests do not cover their prompts", self.short, self.requests)?;
        match self.first {
            Some((ids, block_tokens, prompt)) => write!(
                out,
                ", the first {ids} of {block_tokens} tokens for a prompt of {prompt}: figures of reuse are wrong if \
                 the blocks have another size, which --block-tokens gives"
            ),
            None => write!(out, ", for they have none: those requests share nothing"),
        }
    }
}
