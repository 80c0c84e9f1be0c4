//! Text and tokens of a model that has no tokenizer: every piece of text has an id, and every id
//! has a word.
//!
//! Text is cut from left to right into pieces: one space at most, then up to five letters, digits
//! and underscores, or a single other character. So a longer text starts with the pieces of a
//! shorter one, except perhaps for the last piece of that. A piece that is the word of a token is
//! that token; any other piece is hashed to an id. An answer that comes back in the next prompt is
//! therefore the same tokens again.

use std::fmt::Write;
use xxhash_rust::xxh3::xxh3_64;

/// Letters of a piece at most: words of agents' prompts have 4 to 5 characters a token with real
/// vocabularies.
const PIECE_CHARS: usize = 5;

/// Digits of the longest word of a token: that of `u32::MAX`.
const MAX_ID_DIGITS: usize = 10;

/// Appends the word of a token: a space, the letter t and the id.
///
/// ```
/// let mut text = String::new();
/// forebay_emulator::text::push_word(&mut text, 1234);
/// assert_eq!(text, " t1234");
/// assert_eq!(forebay_emulator::text::encode(&text, 151_936), [1234]);
/// ```
pub fn push_word(text: &mut String, token: u32) {
    // Writing to a String cannot fail.
    let _ = write!(text, " t{token}");
}

/// The words of tokens, one after another.
pub fn decode(tokens: &[u32]) -> String {
    let mut text = String::with_capacity(tokens.len() * 8);
    tokens.iter().for_each(|token| push_word(&mut text, *token));
    text
}

/// The tokens of a text, each below `vocab` (0 is taken as 1).
pub fn encode(text: &str, vocab: u32) -> Vec<u32> {
    let vocab = vocab.max(1);
    let mut tokens = Vec::with_capacity(text.len() / 4);
    let mut rest = text;
    while let Some((token, piece_bytes)) = next_token(rest, vocab) {
        tokens.push(token);
        rest = &rest[piece_bytes..];
    }
    tokens
}

/// The first token of a text that is not empty, and the bytes that it takes.
fn next_token(text: &str, vocab: u32) -> Option<(u32, usize)> {
    if let Some((token, bytes)) = leading_word(text)
        && token < vocab
    {
        return Some((token, bytes));
    }
    let bytes = piece_bytes(text)?;
    // Below vocab, so that it fits.
    Some(((xxh3_64(&text.as_bytes()[..bytes]) % u64::from(vocab)) as u32, bytes))
}

/// The token whose word a text starts with, if it starts with a whole one.
fn leading_word(text: &str) -> Option<(u32, usize)> {
    let digits = text.strip_prefix(" t")?;
    let count = digits.bytes().take(MAX_ID_DIGITS + 1).take_while(u8::is_ascii_digit).count();
    let number = &digits[..count];
    let canonical = !number.starts_with('0') || count == 1;
    let ends_here = !digits[count..].chars().next().is_some_and(is_word_char);
    let token = number.parse().ok().filter(|_| canonical && ends_here)?;
    Some((token, 2 + count))
}

/// Bytes of the first piece of a text; `None` for an empty text.
fn piece_bytes(text: &str) -> Option<usize> {
    let space = usize::from(text.starts_with(' '));
    let letters = text[space..].chars().take(PIECE_CHARS).take_while(|letter| is_word_char(*letter));
    let letters_bytes: usize = letters.map(char::len_utf8).sum();
    match (letters_bytes, text.chars().next()) {
        (_, None) => None,
        (0, Some(first)) => Some(first.len_utf8()),
        (letters_bytes, _) => Some(space + letters_bytes),
    }
}

fn is_word_char(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_that_are_no_tokens_are_text() {
        let vocab = 1_000;
        assert_eq!(encode(" t999", vocab), [999]);
        for (text, number) in [(" t007", 7), (" t00", 0), (" t12x", 12), ("t12", 12), (" t12_", 12)] {
            assert_ne!(encode(text, vocab)[0], number, "{text}");
        }
        assert_eq!(encode(" t0", vocab), [0]);
        assert_eq!(encode(" t1000", vocab).len(), 1, "a word above the vocabulary is text");
        assert_eq!(encode("", vocab), Vec::<u32>::new());
        assert_eq!(encode(" t99999999999999999999", vocab).len(), 5, "pieces of at most five letters");
    }

    proptest! {
        #[test]
        fn emitted_words_come_back_as_their_tokens(tokens in prop::collection::vec(0u32..151_936, 0..50), tail in "[a-z ]{0,10}") {
            let text = decode(&tokens);
            prop_assert_eq!(encode(&text, 151_936), &tokens[..]);
            let followed = encode(&format!("{text}\n{tail}"), 151_936);
            prop_assert_eq!(&followed[..tokens.len()], &tokens[..]);
        }

        #[test]
        fn a_longer_text_starts_with_the_tokens_of_a_shorter_one(text in "\\PC{0,80}", more in "\\PC{0,20}") {
            let short = encode(&text, 5_000);
            let long = encode(&format!("{text}{more}"), 5_000);
            // The last piece may grow, and what was cut as text may turn out to begin a word of up
            // to three pieces.
            let firm = short.len().saturating_sub(3);
            prop_assert_eq!(&long[..firm.min(long.len())], &short[..firm]);
            prop_assert!(long.iter().all(|token| *token < 5_000));
        }
    }
}
