//! Prompts as text, for endpoints that take no token ids.

use std::sync::LazyLock;

/// Common English words, each of which common tokenizers take for one token with the space before
/// it.
static WORDS: LazyLock<Vec<&str>> = LazyLock::new(|| TEXT.split(' ').collect());
const TEXT: &str = "\
    time year people way day man thing woman life child world school state family student group \
    country problem hand part place case week company system program question work government \
    number night point home water room mother area money story fact month lot right study book \
    eye job word business issue side kind head house service friend father power hour game line \
    end member law car city community name president team minute idea body information back \
    parent face others level office door health person art war history party result change \
    morning reason research girl guy moment air teacher force education foot boy age policy \
    process music market sense nation plan college interest experience effect use class control \
    care field development role effort rate heart show leader light voice wife police mind price \
    report decision son view relationship town road arm difference value building action model \
    season society tax director position player record paper space ground form event official \
    matter center couple site project activity star table need court oil situation cost industry \
    figure street image phone data picture practice piece land product doctor wall patient worker \
    news test movie north love support technology step baby computer type attention film tree \
    source organization hair window culture chance brother energy period course summer plant \
    opportunity term letter condition choice rule daughter south husband floor campaign material \
    population call economy hospital church risk fire future bank west sport board top subject \
    officer rest behavior performance fight goal bed order author blood agency nature color store \
    sound movement page race concern";

/// A text with a word for each token: prompts with a common beginning stay so, and have about as
/// many tokens. Different tokens may become the same word; whole blocks of them do not.
pub(super) fn text(tokens: &[u32]) -> String {
    let words: Vec<&str> = tokens.iter().map(|&token| WORDS[token as usize % WORDS.len()]).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_prompt_becomes_as_many_words_and_keeps_its_beginning() {
        let tokens: Vec<u32> = (0..1_000).map(|token| token * 7).collect();
        let (short, long) = (text(&tokens[..600]), text(&tokens));
        assert!(long.starts_with(&(short + " ")));
        assert_eq!(long.split(' ').count(), tokens.len());
        assert_eq!(WORDS.iter().collect::<HashSet<_>>().len(), WORDS.len());
    }
}
