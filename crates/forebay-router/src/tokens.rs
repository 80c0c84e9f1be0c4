//! How many tokens a prompt has, guessed from its bytes. It knows sums of bytes and tokens from answered requests; it
//! must never know a tokenizer: running one costs 31 ms for 100 KB of prompt, this costs a division.

use crate::request::PromptKind;

/// Bytes and tokens are halved when this many tokens have been summed, so that the ratio follows the traffic.
const WINDOW_TOKENS: f64 = 4_000_000.0;

/// The weight of the starting ratio, in tokens: a few real answers outweigh it.
const PRIOR_TOKENS: f64 = 1_000.0;

/// The ratio of prompt bytes (of its JSON form) to tokens, learned per kind of prompt from `usage.prompt_tokens`.
#[derive(Debug)]
pub struct BytesPerToken {
    text: Sums,
    messages: Sums,
    token_ids: Sums,
}

#[derive(Debug, Clone, Copy)]
struct Sums {
    bytes: f64,
    tokens: f64,
}

impl Default for BytesPerToken {
    /// Starts at 4 bytes a token for text and chat (the usual rule of thumb for English) and 6 for lists of token ids
    /// (five digits and a comma).
    fn default() -> BytesPerToken {
        let start = |ratio: f64| Sums { bytes: ratio * PRIOR_TOKENS, tokens: PRIOR_TOKENS };
        BytesPerToken { text: start(4.0), messages: start(4.0), token_ids: start(6.0) }
    }
}

impl BytesPerToken {
    /// The learned ratio, always positive.
    pub fn ratio(&self, kind: PromptKind) -> f64 {
        let sums = match kind {
            PromptKind::Text => self.text,
            PromptKind::Messages => self.messages,
            PromptKind::TokenIds => self.token_ids,
        };
        sums.bytes / sums.tokens
    }

    /// The estimated tokens of a prompt of `bytes`, at least 1.
    pub fn estimate(&self, kind: PromptKind, bytes: usize) -> u64 {
        ((bytes as f64 / self.ratio(kind)).round() as u64).max(1)
    }

    /// Learns from an answered request. Prompts without bytes or tokens teach nothing.
    pub fn learn(&mut self, kind: PromptKind, bytes: usize, tokens: u64) {
        if bytes == 0 || tokens == 0 {
            return;
        }
        let sums = match kind {
            PromptKind::Text => &mut self.text,
            PromptKind::Messages => &mut self.messages,
            PromptKind::TokenIds => &mut self.token_ids,
        };
        sums.bytes += bytes as f64;
        sums.tokens += tokens as f64;
        if sums.tokens > WINDOW_TOKENS {
            let keep = WINDOW_TOKENS / 2.0 / sums.tokens;
            sums.bytes *= keep;
            sums.tokens *= keep;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_converges_to_what_the_engine_counts() {
        let mut ratio = BytesPerToken::default();
        for _ in 0..20 {
            ratio.learn(PromptKind::TokenIds, 68_900, 10_000);
        }
        assert!((ratio.estimate(PromptKind::TokenIds, 689_000) as f64 / 100_000.0 - 1.0).abs() < 0.01);
        assert_eq!(ratio.estimate(PromptKind::Text, 400), 100, "other kinds are not touched");
    }

    #[test]
    fn old_traffic_is_outweighed_by_new() {
        let mut ratio = BytesPerToken::default();
        for _ in 0..1_000 {
            ratio.learn(PromptKind::Text, 30_000, 10_000);
        }
        for _ in 0..1_000 {
            ratio.learn(PromptKind::Text, 50_000, 10_000);
        }
        assert!(ratio.ratio(PromptKind::Text) > 4.8, "{}", ratio.ratio(PromptKind::Text));
    }

    #[test]
    fn nothing_and_huge_counts_keep_the_ratio_finite() {
        let mut ratio = BytesPerToken::default();
        ratio.learn(PromptKind::Text, 0, 7);
        ratio.learn(PromptKind::Text, 7, 0);
        assert_eq!(ratio.ratio(PromptKind::Text), 4.0);
        ratio.learn(PromptKind::Text, 1, u64::MAX);
        assert!(ratio.ratio(PromptKind::Text) > 0.0);
        assert!(ratio.estimate(PromptKind::Text, 0) == 1);
    }
}
