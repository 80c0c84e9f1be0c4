//! The prefix index of engines: which prompt prefixes each engine is believed to hold. It knows
//! chunks of prompt bytes as chained hashes, what was sent where, and what the answers said was
//! cached. It is a belief: a wrong entry costs a detour, never a wrong answer.

use crate::chain::{CHUNK_BYTES, Chain};
use crate::shadow_cache::{CHUNK, ShadowCache, TICK, is_less, is_more};
use std::collections::VecDeque;
use std::ops::Range;

/// Abandoned visits that are remembered per engine.
const MAX_ABANDONED: usize = 64;

/// What is believed of all engines, each in its slot.
#[derive(Debug)]
pub struct PrefixIndex {
    /// Chunks remembered of one engine, and of all together.
    bounds: Bounds,
    shadows: Vec<Shadow>,
}

/// Memory is bounded: the more caches there are, the fewer chunks are remembered of each.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub chunks_each: usize,
    pub chunks: usize,
}

impl Bounds {
    /// Chunks that are remembered of each of so many caches.
    pub fn share(&self, caches: usize) -> usize {
        self.chunks_each.min(self.chunks / caches.max(1))
    }
}

/// What is believed of one engine.
#[derive(Debug)]
struct Shadow {
    cache: ShadowCache,
    /// The visits that have not been settled and had chunks to compute.
    open: Vec<Open>,
    /// Visits so far.
    visits: u64,
    /// Visits that are neither settled nor abandoned.
    under_way: u32,
    /// Abandoned visits whose marks a later one has replaced: when that one is abandoned as well,
    /// theirs must not come back. Forgotten when nothing is under way.
    abandoned: VecDeque<Visit>,
}

/// An open visit: from `position` on its chunks were still to be computed, the first of them is
/// `key`.
#[derive(Debug)]
struct Open {
    visit: u64,
    position: usize,
    key: u64,
}

/// A prompt on its way through an engine, from [`PrefixIndex::visit`] until
/// [`PrefixIndex::settle`].
#[derive(Debug)]
#[must_use = "a visit that is never settled teaches the index nothing about later ones"]
pub struct Visit {
    backend: usize,
    number: u64,
    chunks: usize,
    predicted: usize,
    /// From this chunk on other visits may still be computing the prompt: missing those chunks
    /// proves nothing.
    in_the_making_from: usize,
    /// Ages of the prompt's known chunks when it was sent, whether believed resident or not: by the
    /// engine's clock.
    ages: Vec<i64>,
    /// The engine's clock before and after the prompt was sent.
    clock: Range<i64>,
}

impl PrefixIndex {
    /// An index without engines.
    pub fn new(bounds: Bounds) -> PrefixIndex {
        PrefixIndex { bounds, shadows: Vec::new() }
    }

    /// Adds a slot, for an engine that holds nothing yet.
    pub fn add_slot(&mut self) {
        self.shadows.push(Shadow {
            cache: ShadowCache::new(0),
            open: Vec::new(),
            visits: 0,
            under_way: 0,
            abandoned: VecDeque::new(),
        });
        let each = self.bounds.share(self.shadows.len());
        self.shadows.iter_mut().for_each(|shadow| shadow.cache.limit(each));
    }

    /// How many of the first chunks of `chain` the engine is believed to hold.
    pub fn hit_chunks(&self, backend: usize, chain: &Chain) -> usize {
        self.shadows[backend].cache.hit_chunks(chain)
    }

    /// Notes that a prompt was sent to an engine, which from now on is believed to hold it.
    pub fn visit(&mut self, backend: usize, chain: &Chain) -> Visit {
        let predicted = self.hit_chunks(backend, chain);
        let shadow = &mut self.shadows[backend];
        let meets = |open: &&Open| chain.keys().get(open.position) == Some(&open.key);
        let in_the_making_from =
            shadow.open.iter().filter(meets).map(|open| open.position).min().unwrap_or(usize::MAX);
        if shadow.under_way == 0 {
            shadow.abandoned.clear();
        }
        shadow.visits += 1;
        shadow.under_way += 1;
        let number = shadow.visits;
        if let Some(&key) = chain.keys().get(predicted) {
            shadow.open.push(Open { visit: number, position: predicted, key });
        }
        let before = shadow.cache.clock;
        let ages = shadow.cache.touch(chain, predicted);
        let clock = before..shadow.cache.clock;
        Visit { backend, number, chunks: chain.chunks(), predicted, in_the_making_from, ages, clock }
    }

    /// The engine has done with the prompt of a visit, which it computed. To be told before
    /// [`PrefixIndex::settle`].
    pub fn used(&mut self, visit: &Visit, chain: &Chain) {
        self.shadows[visit.backend].cache.in_use_until_now(chain, visit.clock.end);
    }

    /// Ends a visit whose prompt was computed. `cached_bytes` is how much of it the engine found
    /// cached, where it said so.
    pub fn settle(&mut self, visit: Visit, cached_bytes: Option<usize>) {
        let shadow = &mut self.shadows[visit.backend];
        shadow.close(&visit);
        let Some(cached_bytes) = cached_bytes else { return };
        let found = (cached_bytes / CHUNK_BYTES).min(visit.chunks);
        shadow.cache.come_fewer(found.saturating_sub(visit.predicted));
        if is_less(found, visit.predicted) && found < visit.in_the_making_from {
            shadow.cache.lost(found, &visit.ages);
        } else if is_more(found, visit.predicted) {
            shadow.cache.held(found, &visit.ages);
        }
    }

    /// Ends a visit whose prompt was perhaps never computed. What is believed is what was believed
    /// before, except for chunks that a later visit has touched.
    pub fn abandon(&mut self, visit: Visit, chain: &Chain) {
        let shadow = &mut self.shadows[visit.backend];
        shadow.close(&visit);
        let came = visit.clock.end - visit.clock.start - TICK;
        shadow.cache.clock -= came;
        shadow.cache.come_fewer((came / CHUNK) as usize);
        let mut touched_later = false;
        for (position, &key) in chain.keys().iter().enumerate() {
            if shadow.cache.used.get(key) != Some(visit.clock.end - position as i64 * CHUNK) {
                touched_later = true;
                continue;
            }
            let age = visit.ages.get(position);
            match age.and_then(|age| shadow.made_by_others(position, visit.clock.start - age)) {
                Some(used) => {
                    shadow.cache.used.insert(key, used);
                }
                None => shadow.cache.used.remove(key),
            }
        }
        if touched_later && shadow.under_way > 0 {
            if shadow.abandoned.len() == MAX_ABANDONED {
                shadow.abandoned.pop_front();
            }
            shadow.abandoned.push_back(visit);
        }
    }

    /// An engine tells that so many chunks came into its cache, that so many are there, and for how
    /// many it has room.
    pub fn told(&mut self, backend: usize, came: usize, live: usize, room: Option<usize>) {
        self.shadows[backend].cache.told(came, live, room);
    }

    /// An engine tells nothing of its cache for now.
    pub fn untold(&mut self, backend: usize) {
        self.shadows[backend].cache.untold();
    }

    /// Forgets an engine's cache, and what was learned about its size: its process is gone.
    pub fn forget(&mut self, backend: usize) {
        self.shadows[backend].cache.forget();
    }

    /// Chunks remembered of an engine.
    pub fn len(&self, backend: usize) -> usize {
        self.shadows[backend].cache.len()
    }
}

impl Visit {
    /// Chunks of the prompt that were believed resident when it was sent.
    pub fn predicted_chunks(&self) -> usize {
        self.predicted
    }
}

impl Shadow {
    fn close(&mut self, visit: &Visit) {
        self.open.retain(|open| open.visit != visit.number);
        self.under_way -= 1;
    }

    /// The time of last use of the chunk at `position` without the abandoned visits; `None` if only
    /// they used it.
    fn made_by_others(&self, position: usize, mut used: i64) -> Option<i64> {
        let made = |visit: &&Visit, used: i64| visit.clock.end - position as i64 * CHUNK == used;
        while let Some(visit) = self.abandoned.iter().find(|visit| made(visit, used)) {
            used = visit.clock.start - visit.ages.get(position)?;
        }
        Some(used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A prompt of `chunks` chunks that belongs to `session`.
    fn prompt(session: u8, chunks: usize) -> Chain {
        let bytes: Vec<u8> =
            (0..chunks).flat_map(|chunk| [session, chunk as u8, (chunk >> 8) as u8].repeat(171)).collect();
        let mut bytes = bytes;
        bytes.resize(chunks * CHUNK_BYTES, session);
        Chain::new(7, &bytes)
    }

    fn index_of(engines: usize, chunks_per_backend: usize) -> PrefixIndex {
        let mut index = PrefixIndex::new(Bounds { chunks_each: chunks_per_backend, chunks: usize::MAX });
        (0..engines).for_each(|_| index.add_slot());
        index
    }

    /// An engine's cache: LRU over chunks, the end of a prompt goes first.
    struct Engine {
        capacity: usize,
        latest_first: VecDeque<u64>,
    }

    impl Engine {
        fn new(capacity: usize) -> Engine {
            Engine { capacity, latest_first: VecDeque::new() }
        }

        /// Runs a prompt and returns how many of its bytes were cached.
        fn run(&mut self, chain: &Chain) -> usize {
            let found = chain.keys().iter().take_while(|key| self.latest_first.contains(key)).count();
            for key in chain.keys().iter().rev() {
                self.latest_first.retain(|other| other != key);
                self.latest_first.push_front(*key);
            }
            self.latest_first.truncate(self.capacity);
            found * CHUNK_BYTES
        }
    }

    /// The prediction errors, as shares of the prompt, of sessions that grow by 2 chunks a turn and
    /// take turns as `order` says.
    fn errors(engine: &mut Engine, order: impl Iterator<Item = u8>, corrected: bool) -> Vec<f64> {
        let mut index = index_of(1, 100_000);
        let mut turns = [0; 256];
        order
            .map(|session| {
                let chain = prompt(session, 40 + 2 * turns[usize::from(session)]);
                turns[usize::from(session)] += 1;
                let visit = index.visit(0, &chain);
                let predicted = visit.predicted_chunks();
                let cached_bytes = engine.run(&chain);
                index.settle(visit, corrected.then_some(cached_bytes));
                predicted.abs_diff(cached_bytes / CHUNK_BYTES) as f64 / chain.chunks() as f64
            })
            .collect()
    }

    fn in_turn(sessions: u8, turns: usize) -> impl Iterator<Item = u8> {
        (0..turns).flat_map(move |_| 0..sessions)
    }

    /// Sessions in an order without pattern (a linear congruential generator).
    fn at_random(sessions: u32, requests: usize) -> impl Iterator<Item = u8> {
        let mut state = 1_u32;
        (0..requests).map(move |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 16) % sessions) as u8
        })
    }

    fn mean(values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / values.len() as f64
    }

    #[test]
    fn what_was_sent_is_believed_held_by_that_engine_only() {
        let mut index = index_of(2, 1_000);
        let first = prompt(1, 10);
        let visit = index.visit(1, &first);
        index.settle(visit, None);
        assert_eq!((index.hit_chunks(0, &first), index.hit_chunks(1, &first)), (0, 10));
        assert_eq!(index.hit_chunks(1, &prompt(1, 30)), 10, "a longer prompt of the session");
        assert_eq!(index.hit_chunks(1, &prompt(2, 10)), 0, "another session");
    }

    #[test]
    fn the_error_falls_once_answers_show_how_much_the_engine_keeps() {
        // 8 sessions of 40 chunks and more cycle through a cache of 100 chunks: nearly everything
        // is evicted.
        let errors = errors(&mut Engine::new(100), in_turn(8, 20), true);
        assert!(mean(&errors[8..16]) > 0.5, "before: {:?}", &errors[8..16]);
        assert!(mean(&errors[32..]) < 0.05, "after: {}", mean(&errors[32..]));
    }

    #[test]
    fn correction_at_least_halves_the_error_when_sessions_come_at_random() {
        // 12 sessions of 40 to 140 chunks share a cache that holds about a third of them.
        let uncorrected = mean(&errors(&mut Engine::new(400), at_random(12, 600), false));
        let corrected = mean(&errors(&mut Engine::new(400), at_random(12, 600), true));
        assert!(corrected < uncorrected / 2.0, "corrected {corrected}, uncorrected {uncorrected}");
    }

    #[test]
    fn an_engine_that_caches_nothing_is_found_out() {
        let errors = errors(&mut Engine::new(0), in_turn(3, 20), true);
        assert!(mean(&errors[12..]) < 0.05, "{}", mean(&errors[12..]));
    }

    #[test]
    fn a_cache_that_holds_everything_is_predicted_from_the_first_turn() {
        let errors = errors(&mut Engine::new(100_000), in_turn(5, 10), true);
        assert!(mean(&errors) < 0.01, "{}", mean(&errors));
    }

    #[test]
    fn a_chunk_found_though_believed_lost_raises_the_reach_again() {
        let mut index = index_of(1, 10_000);
        let chain = prompt(1, 40);
        let visit = index.visit(0, &chain);
        index.settle(visit, None);
        let visit = index.visit(0, &chain);
        index.settle(visit, Some(0));
        let other = index.visit(0, &prompt(2, 100));
        index.settle(other, Some(0));
        assert!(index.hit_chunks(0, &chain) < 40, "the loss must have shortened the reach");
        let visit = index.visit(0, &chain);
        index.settle(visit, Some(40 * CHUNK_BYTES));
        let other = index.visit(0, &prompt(3, 50));
        index.settle(other, None);
        assert_eq!(index.hit_chunks(0, &chain), 40);
    }

    #[test]
    fn a_miss_on_what_another_request_is_still_computing_proves_nothing() {
        let mut index = index_of(1, 10_000);
        let (old, new, unrelated) = (prompt(1, 40), prompt(1, 80), prompt(2, 40));
        for chain in [&unrelated, &old] {
            let visit = index.visit(0, chain);
            index.settle(visit, Some(0));
        }
        let first = index.visit(0, &new);
        let sibling = index.visit(0, &new);
        assert_eq!((first.predicted_chunks(), sibling.predicted_chunks()), (40, 80));
        index.settle(sibling, Some(40 * CHUNK_BYTES));
        index.settle(first, Some(40 * CHUNK_BYTES));
        assert_eq!(index.hit_chunks(0, &new), 80);
        assert_eq!(index.hit_chunks(0, &unrelated), 40);
    }

    #[test]
    fn an_abandoned_visit_leaves_nothing_new_behind() {
        let mut index = index_of(1, 10_000);
        let visit = index.visit(0, &prompt(1, 10));
        index.settle(visit, None);
        let longer = prompt(1, 30);
        let visit = index.visit(0, &longer);
        assert_eq!(index.hit_chunks(0, &longer), 30);
        index.abandon(visit, &longer);
        assert_eq!(index.hit_chunks(0, &longer), 10);
    }

    #[test]
    fn an_abandoned_visit_changes_no_age_and_no_clock() {
        let mut index = index_of(1, 10_000);
        let (old, other) = (prompt(1, 10), prompt(2, 20));
        for chain in [&old, &other] {
            let visit = index.visit(0, chain);
            index.settle(visit, None);
        }
        let ages = |index: &PrefixIndex| {
            let cache = &index.shadows[0].cache;
            let keys = old.keys().iter().chain(other.keys());
            (cache.clock / CHUNK, keys.map(|&key| cache.age(key)).collect::<Vec<_>>())
        };
        let before = ages(&index);
        for _ in 0..50 {
            let visit = index.visit(0, &prompt(1, 30));
            index.abandon(visit, &prompt(1, 30));
            let visit = index.visit(0, &prompt(3, 300));
            index.abandon(visit, &prompt(3, 300));
        }
        assert_eq!(ages(&index), before);
    }

    #[test]
    fn an_abandoned_visit_takes_nothing_from_one_that_was_answered_meanwhile() {
        let mut index = index_of(1, 10_000);
        let chain = prompt(1, 30);
        let abandoned = index.visit(0, &chain);
        let answered = index.visit(0, &chain);
        index.settle(answered, None);
        index.abandon(abandoned, &chain);
        assert_eq!(index.hit_chunks(0, &chain), 30);
    }

    #[test]
    fn visits_that_are_abandoned_in_any_order_leave_nothing_behind() {
        for first_is_first in [true, false] {
            let mut index = index_of(1, 10_000);
            let visit = index.visit(0, &prompt(1, 10));
            index.settle(visit, None);
            let chain = prompt(1, 30);
            let (first, second) = (index.visit(0, &chain), index.visit(0, &chain));
            let order = if first_is_first { [first, second] } else { [second, first] };
            order.into_iter().for_each(|visit| index.abandon(visit, &chain));
            assert_eq!(index.hit_chunks(0, &chain), 10);
        }
    }

    #[test]
    fn a_restarted_engine_holds_nothing_and_keeps_no_learned_reach() {
        let mut index = index_of(1, 10_000);
        let chain = prompt(1, 40);
        for _ in 0..2 {
            let visit = index.visit(0, &chain);
            index.settle(visit, Some(0));
        }
        index.forget(0);
        assert_eq!((index.hit_chunks(0, &chain), index.len(0)), (0, 0));
        let visit = index.visit(0, &chain);
        index.settle(visit, Some(0));
        assert_eq!(index.hit_chunks(0, &chain), 40);
    }

    #[test]
    fn the_more_engines_the_fewer_chunks_are_remembered_of_each() {
        let mut index = PrefixIndex::new(Bounds { chunks_each: 100, chunks: 300 });
        for engines in 1..10 {
            index.add_slot();
            for engine in 0..engines {
                for session in 0..20 {
                    let visit = index.visit(engine, &prompt(session, 10));
                    index.settle(visit, None);
                }
            }
            let all: usize = (0..engines).map(|engine| index.len(engine)).sum();
            assert!(all <= 300 && index.len(0) >= 100.min(300 / engines) / 2, "{engines}: {all}");
        }
    }

    proptest! {
        #[test]
        fn memory_is_bounded_and_a_prediction_is_never_longer_than_the_prompt(
            visits in prop::collection::vec((0..2_usize, 0..20_u8, 0..30_usize, prop::option::of(0..20_000_usize)), 0..200),
        ) {
            let mut index = index_of(2, 100);
            let mut open = Vec::new();
            for (backend, session, chunks, cached_bytes) in visits {
                let chain = prompt(session, chunks);
                let visit = index.visit(backend, &chain);
                prop_assert!(visit.predicted_chunks() <= chunks);
                prop_assert!(index.hit_chunks(backend, &chain) <= chunks);
                prop_assert!(index.len(backend) <= 100);
                match cached_bytes {
                    Some(bytes) => index.settle(visit, Some(bytes)),
                    None => open.push((visit, chain)),
                }
            }
            for (number, (visit, chain)) in open.into_iter().enumerate() {
                match number % 2 {
                    0 => index.settle(visit, None),
                    _ => index.abandon(visit, &chain),
                }
            }
            prop_assert!(index.shadows.iter().all(|shadow| shadow.open.is_empty()));
        }

        #[test]
        fn the_fast_lookup_finds_what_a_walk_finds(
            visits in prop::collection::vec((0..6_u8, 1..40_usize), 1..60),
            asked in (0..6_u8, 1..40_usize),
        ) {
            let mut index = index_of(1, 100_000);
            for (session, chunks) in visits {
                let visit = index.visit(0, &prompt(session, chunks));
                index.settle(visit, Some(0));
            }
            let chain = prompt(asked.0, asked.1);
            let cache = &index.shadows[0].cache;
            let walk = chain.keys().iter().take_while(|&&key| cache.holds(key)).count();
            prop_assert_eq!(index.hit_chunks(0, &chain), walk);
        }
    }
}
