//! How many tokens a prompt has, and how many its answer will have. Prompts are guessed from their
//! bytes and from the totals of bytes and tokens of answered requests: a tokenizer takes 31 ms for
//! 100 KB of prompt; this takes a division.

use crate::request::PromptKind;

/// Bytes and tokens are halved when this many tokens have been summed, so that the ratio follows
/// the traffic.
const WINDOW_TOKENS: f64 = 4_000_000.0;

/// The weight of the starting ratio, in tokens: a few real answers outweigh it.
const PRIOR_TOKENS: f64 = 1_000.0;

/// What an image, a sound or a film takes, in tokens, until answers have told.
const MEDIA_TOKENS: f64 = 1_000.0;

/// The weight of that guess, and the most that is remembered, in images.
const PRIOR_MEDIA: f64 = 2.0;
const WINDOW_MEDIA: f64 = 10_000.0;

/// An answer moves the average by this part of the difference.
const ANSWERS: f64 = 64.0;

/// No model answers longer; an engine that says so is wrong.
const ANSWER_TOKENS_MAX: u64 = 1 << 20;

/// Bytes that stand for an image, a sound or a film in the length of a prompt and in its chunks,
/// whatever it is sent as: about [`MEDIA_TOKENS`] tokens of text.
pub const MEDIA_BYTES: usize = 4096;

/// How long a prompt is, as far as its bytes tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    pub kind: PromptKind,
    /// Bytes of its text in JSON, and [`MEDIA_BYTES`] for each of its media.
    pub bytes: usize,
    /// Images, sounds and films in it.
    pub media: usize,
}

impl Length {
    fn text_bytes(&self) -> usize {
        self.bytes.saturating_sub(self.media * MEDIA_BYTES)
    }
}

/// The ratio of prompt bytes (of its JSON form) to tokens, learned per kind of prompt from
/// `usage.prompt_tokens`.
#[derive(Debug)]
pub struct BytesPerToken {
    /// By [`PromptKind`].
    kinds: [Totals; 3],
    /// Tokens of media: here `bytes` is their number.
    media: Totals,
}

#[derive(Debug, Clone, Copy)]
struct Totals {
    bytes: f64,
    tokens: f64,
}

impl Default for BytesPerToken {
    /// Starts at 4 bytes a token for text and chat (the usual rule of thumb for English) and 6 for
    /// lists of token ids (five digits and a comma).
    fn default() -> BytesPerToken {
        let start = |ratio: f64| Totals { bytes: ratio * PRIOR_TOKENS, tokens: PRIOR_TOKENS };
        let media = Totals { bytes: PRIOR_MEDIA, tokens: PRIOR_MEDIA * MEDIA_TOKENS };
        BytesPerToken { kinds: [4.0, 4.0, 6.0].map(start), media }
    }
}

impl BytesPerToken {
    /// The learned ratio, always positive.
    pub fn ratio(&self, kind: PromptKind) -> f64 {
        let totals = self.kinds[kind as usize];
        totals.bytes / totals.tokens
    }

    /// The ratio of all prompts together.
    pub fn average(&self) -> f64 {
        let sum = |of: fn(&Totals) -> f64| self.kinds.iter().map(of).sum::<f64>();
        sum(|kind| kind.bytes) / sum(|kind| kind.tokens)
    }

    /// The estimated tokens of a prompt, at least 1.
    pub fn estimate(&self, length: &Length) -> u64 {
        let text = length.text_bytes() as f64 / self.ratio(length.kind);
        let media = length.media as f64 * self.media.tokens / self.media.bytes;
        ((text + media).round() as u64).max(1)
    }

    /// Learns from an answered request. Prompts without bytes or tokens teach nothing, and those
    /// with media nothing about text: what their text does not explain is what media take.
    pub fn learn(&mut self, length: &Length, tokens: u64) {
        if length.bytes == 0 || tokens == 0 {
            return;
        }
        if length.media > 0 {
            let text = length.text_bytes() as f64 / self.ratio(length.kind);
            self.media.add(length.media as f64, (tokens as f64 - text).max(0.0));
            if self.media.bytes > WINDOW_MEDIA {
                self.media.keep(0.5);
            }
            return;
        }
        let totals = &mut self.kinds[length.kind as usize];
        totals.add(length.bytes as f64, tokens as f64);
        if totals.tokens > WINDOW_TOKENS {
            totals.keep(WINDOW_TOKENS / 2.0 / totals.tokens);
        }
    }
}

impl Totals {
    fn add(&mut self, bytes: f64, tokens: f64) {
        self.bytes += bytes;
        self.tokens += tokens;
    }

    fn keep(&mut self, share: f64) {
        self.bytes *= share;
        self.tokens *= share;
    }
}

/// How long answers are, in tokens: an average that follows the traffic.
#[derive(Debug)]
pub struct AnswerTokens(f64);

/// What a prefill takes: an average that follows the traffic. Nothing, before the first.
#[derive(Debug, Default)]
pub struct AveragePrefill {
    tokens: f64,
    us: f64,
    known: bool,
}

impl AveragePrefill {
    pub fn learn(&mut self, tokens: u64, us: u64) {
        let weight = if self.known { ANSWERS } else { 1.0 };
        self.tokens += (tokens as f64 - self.tokens) / weight;
        self.us += (us as f64 - self.us) / weight;
        self.known = true;
    }

    /// The tokens and microseconds of so many.
    pub fn of(&self, count: u64) -> (u64, u64) {
        ((count as f64 * self.tokens).round() as u64, (count as f64 * self.us).round() as u64)
    }
}

impl Default for AnswerTokens {
    /// Starts where the answers of coding agents are.
    fn default() -> AnswerTokens {
        AnswerTokens(150.0)
    }
}

impl AnswerTokens {
    pub fn estimate(&self) -> u64 {
        self.0.round() as u64
    }

    /// Learns from an answer. One without tokens teaches nothing.
    pub fn learn(&mut self, tokens: u64) {
        if tokens > 0 {
            self.0 += (tokens.min(ANSWER_TOKENS_MAX) as f64 - self.0) / ANSWERS;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn length(kind: PromptKind, bytes: usize) -> Length {
        Length { kind, bytes, media: 0 }
    }

    #[test]
    fn the_ratio_converges_to_what_the_engine_counts() {
        let mut ratio = BytesPerToken::default();
        for _ in 0..20 {
            ratio.learn(&length(PromptKind::TokenIds, 68_900), 10_000);
        }
        assert!(
            (ratio.estimate(&length(PromptKind::TokenIds, 689_000)) as f64 / 100_000.0 - 1.0).abs() < 0.01
        );
        assert_eq!(ratio.estimate(&length(PromptKind::Text, 400)), 100, "other kinds are not touched");
    }

    #[test]
    fn old_traffic_is_outweighed_by_new() {
        let mut ratio = BytesPerToken::default();
        for _ in 0..1_000 {
            ratio.learn(&length(PromptKind::Text, 30_000), 10_000);
        }
        for _ in 0..1_000 {
            ratio.learn(&length(PromptKind::Text, 50_000), 10_000);
        }
        assert!(ratio.ratio(PromptKind::Text) > 4.8, "{}", ratio.ratio(PromptKind::Text));
    }

    #[test]
    fn nothing_and_huge_counts_keep_the_ratio_finite() {
        let mut ratio = BytesPerToken::default();
        ratio.learn(&length(PromptKind::Text, 0), 7);
        ratio.learn(&length(PromptKind::Text, 7), 0);
        assert_eq!(ratio.ratio(PromptKind::Text), 4.0);
        ratio.learn(&length(PromptKind::Text, 1), u64::MAX);
        assert!(ratio.ratio(PromptKind::Text) > 0.0);
        assert!(ratio.estimate(&length(PromptKind::Text, 0)) == 1);
    }

    #[test]
    fn media_teach_nothing_about_text_and_are_learned_by_the_piece() {
        let mut ratio = BytesPerToken::default();
        let text = length(PromptKind::Messages, 40_000);
        let image = |count: usize| Length {
            kind: PromptKind::Messages,
            bytes: 100 + count * MEDIA_BYTES,
            media: count,
        };
        assert_eq!(ratio.estimate(&image(2)), 2_025);
        for _ in 0..50 {
            ratio.learn(&image(3), 25 + 3 * 300);
        }
        assert_eq!(ratio.estimate(&text), 10_000);
        let estimate = ratio.estimate(&image(2));
        assert!(estimate.abs_diff(625) < 20, "{estimate}");
    }

    #[test]
    fn an_average_prefill_follows_the_traffic_and_is_nothing_at_first() {
        let mut average = AveragePrefill::default();
        assert_eq!(average.of(7), (0, 0));
        average.learn(1_000, 50_000);
        assert_eq!(average.of(3), (3_000, 150_000));
        (0..500).for_each(|_| average.learn(0, 0));
        assert!(average.of(1).0 < 10, "{average:?}");
    }

    #[test]
    fn the_length_of_answers_follows_the_traffic() {
        let mut answers = AnswerTokens::default();
        answers.learn(0);
        assert_eq!(answers.estimate(), 150);
        (0..500).for_each(|_| answers.learn(1_000));
        assert!(answers.estimate() > 990, "{}", answers.estimate());
    }
}
