//! What an engine's KV events say of its cache: all data-parallel ranks together, and whether they
//! are believed. It knows reports of ranks and what answers say was cached, and takes time as an
//! argument.
//!
//! Events that answers contradict are not believed for a while, and then asked for anew.

use crate::rank_events::{Held, Report, Unknown};

/// So many answers in a row that had more cached than events say is there contradict them. One
/// alone may have ended just before the cache was emptied.
const CONTRADICTIONS: u32 = 3;
/// A difference below this, or below an eighth, is none: of blocks that are just being stored.
const SLACK_TOKENS: u64 = 1_024;
/// For so long events that were contradicted are not believed.
pub const DOUBT_US: u64 = 30_000_000;

#[derive(Debug, Default)]
pub struct ReportedCache {
    ranks: Vec<Rank>,
    contradictions: u32,
    doubt: Option<Doubt>,
    /// As the log was told last; `None` before the first report.
    state: Option<Result<(), Unknown>>,
}

#[derive(Debug, Clone, Copy)]
struct Rank {
    held: Result<Held, Unknown>,
    /// It is to ask for all events anew.
    must_ask: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// From the next report on.
    Begins,
    Until(u64),
}

/// It is known from now on what the engine holds, or no longer.
pub type Change = Result<(), Unknown>;

/// What follows from a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Noted {
    /// Nothing of it is believed.
    pub is_doubted: bool,
    /// The rank has to ask for all events anew.
    pub must_ask: bool,
    pub change: Option<Change>,
}

impl ReportedCache {
    /// Takes in what one of so many ranks reports.
    pub fn note(&mut self, now_us: u64, rank: usize, ranks: usize, report: &Report) -> Noted {
        let unheard = Rank { held: Err(Unknown::NotConnected), must_ask: false };
        self.ranks.resize(ranks.max(rank + 1), unheard);
        match self.doubt {
            Some(Doubt::Begins) => self.doubt = Some(Doubt::Until(now_us.saturating_add(DOUBT_US))),
            Some(Doubt::Until(until_us)) if now_us >= until_us => self.end_doubt(),
            _ => {}
        }
        let is_doubted = self.doubt.is_some();
        let here = &mut self.ranks[rank];
        let must_ask = std::mem::take(&mut here.must_ask);
        here.held = if is_doubted || must_ask { Err(Unknown::Contradicted) } else { report.held };
        let state = self.ranks.iter().try_for_each(|rank| rank.held.map(|_| ()));
        let change = (self.state != Some(state)).then_some(state);
        self.state = Some(state);
        Noted { is_doubted: is_doubted || must_ask, must_ask, change }
    }

    fn end_doubt(&mut self) {
        self.doubt = None;
        self.ranks.iter_mut().for_each(|rank| rank.must_ask = true);
    }

    /// What all ranks hold; `None` if that is not known.
    pub fn held(&self) -> Option<Held> {
        if self.ranks.is_empty() {
            return None;
        }
        let add = |sum: Held, rank: &Rank| {
            let held = rank.held.ok()?;
            Some(Held {
                blocks: sum.blocks.saturating_add(held.blocks),
                tokens: sum.tokens.saturating_add(held.tokens),
                room_tokens: sum.room_tokens.zip(held.room_tokens).map(|(a, b)| a.saturating_add(b)),
            })
        };
        let nothing = Held { blocks: 0, tokens: 0, room_tokens: Some(0) };
        self.ranks.iter().try_fold(nothing, add)
    }

    /// An answer says that so many tokens of its prompt were cached. Returns whether events are not
    /// believed from now on.
    pub fn answered(&mut self, cached_tokens: u64) -> bool {
        let Some(held) = self.held().filter(|_| self.doubt.is_none()) else { return false };
        if cached_tokens > held.tokens.saturating_add(SLACK_TOKENS.max(held.tokens / 8)) {
            self.contradictions += 1;
        } else if cached_tokens > 0 {
            self.contradictions = 0;
        }
        if self.contradictions < CONTRADICTIONS {
            return false;
        }
        self.contradictions = 0;
        self.doubt = Some(Doubt::Begins);
        self.ranks.iter_mut().for_each(|rank| rank.held = Err(Unknown::Contradicted));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank_events::Counts;

    fn report(held: Result<u64, Unknown>) -> Report {
        let held = held.map(|blocks| Held { blocks, tokens: blocks * 16, room_tokens: Some(blocks * 16) });
        Report { emptied: false, stored_tokens: 0, held, counts: Counts::default() }
    }

    /// An engine of one rank that holds 1,000 blocks.
    fn known() -> ReportedCache {
        let mut cache = ReportedCache::default();
        cache.note(0, 0, 1, &report(Ok(1_000)));
        cache
    }

    #[test]
    fn an_engine_holds_what_its_ranks_hold_if_that_is_known_of_all() {
        let mut cache = ReportedCache::default();
        assert_eq!(cache.held(), None);
        cache.note(0, 1, 2, &report(Ok(5)));
        assert_eq!(cache.held(), None, "nothing is heard of the other one");
        let change = cache.note(0, 0, 2, &report(Ok(7))).change;
        assert_eq!((change, cache.held().map(|held| held.blocks)), (Some(Ok(())), Some(12)));
        assert_eq!(cache.note(0, 0, 2, &report(Ok(8))).change, None, "told once");
        let change = cache.note(0, 1, 2, &report(Err(Unknown::Gap))).change;
        assert_eq!((change, cache.held()), (Some(Err(Unknown::Gap)), None));
    }

    #[test]
    fn room_is_known_when_all_ranks_are_full() {
        let mut cache = ReportedCache::default();
        let mut not_full = report(Ok(5));
        not_full.held.as_mut().unwrap().room_tokens = None;
        cache.note(0, 0, 2, &report(Ok(5)));
        cache.note(0, 1, 2, &not_full);
        assert_eq!(cache.held().unwrap().room_tokens, None);
        cache.note(0, 1, 2, &report(Ok(5)));
        assert_eq!(cache.held().unwrap().room_tokens, Some(160));
    }

    #[test]
    fn events_that_answers_contradict_are_not_believed_for_a_while_and_then_asked_for_anew() {
        let mut cache = known();
        assert!(!cache.answered(20_000) && !cache.answered(20_000), "two may be a coincidence");
        assert!(cache.answered(20_000));
        assert_eq!(cache.held(), None);
        let noted = cache.note(5, 0, 1, &report(Ok(1_000)));
        assert_eq!((noted.is_doubted, noted.must_ask), (true, false));
        assert_eq!(noted.change, Some(Err(Unknown::Contradicted)));
        assert!(!cache.answered(90_000), "nothing is left to contradict");
        assert_eq!(cache.note(4 + DOUBT_US, 0, 1, &report(Ok(1))).change, None);
        let noted = cache.note(5 + DOUBT_US, 0, 1, &report(Ok(1_000)));
        assert_eq!((noted.is_doubted, noted.must_ask, cache.held()), (true, true, None));
        let noted = cache.note(6 + DOUBT_US, 0, 1, &report(Ok(900)));
        assert_eq!((noted.is_doubted, noted.change), (false, Some(Ok(()))));
        assert_eq!(cache.held().map(|held| held.blocks), Some(900));
    }

    #[test]
    fn answers_that_fit_what_is_held_contradict_nothing() {
        let mut cache = known();
        for cached in [20_000, 20_000, 16_000, 20_000, 20_000, 17_900] {
            assert!(!cache.answered(cached));
        }
        // Blocks that the answer itself has just stored.
        assert!((0..9).all(|_| !cache.answered(17_900)));
        assert!(!ReportedCache::default().answered(u64::MAX), "without events");
    }
}
