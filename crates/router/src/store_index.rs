//! The index of stores: which prompt prefixes each store of KV is believed to hold. Engines that
//! share a store write to it what they compute, and can load from it what another one computed. It
//! knows who shares what, which prompts were computed, and what the answers said was found.

use crate::chain::{CHUNK_BYTES, Chain};
use crate::prefix::Bounds;
use crate::shadow_cache::{ShadowCache, is_less, is_more};

/// What is believed of all stores. Memory is bounded, as in `prefix`.
#[derive(Debug)]
pub struct StoreIndex {
    bounds: Bounds,
    stores: Vec<Store>,
    /// The store of each engine, by slot.
    of_engine: Vec<Option<usize>>,
}

#[derive(Debug)]
struct Store {
    name: String,
    cache: ShadowCache,
}

/// What a store was believed to hold of a prompt when that was sent to one of its engines.
#[derive(Debug)]
pub struct Sought {
    store: usize,
    chunks: usize,
    predicted: usize,
    /// Ages of the prompt's known chunks, by the store's clock.
    ages: Vec<i64>,
    /// The engine was taken to load what the store holds.
    to_load: bool,
}

/// What an answer says of where its prompt was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Bytes of the prompt that were found, in the engine or in its store.
    pub bytes: usize,
    /// Some of them came from the store.
    pub in_store: bool,
}

impl StoreIndex {
    /// An index without engines.
    pub fn new(bounds: Bounds) -> StoreIndex {
        StoreIndex { bounds, stores: Vec::new(), of_engine: Vec::new() }
    }

    /// The engine in a slot has the store of this name from now on, or none. A store without
    /// engines is forgotten when another one needs its place.
    pub fn set_engine(&mut self, slot: usize, store: Option<&str>) {
        if self.of_engine.len() <= slot {
            self.of_engine.resize(slot + 1, None);
        }
        self.of_engine[slot] = None;
        self.of_engine[slot] = store.map(|name| self.place_of(name));
    }

    fn place_of(&mut self, name: &str) -> usize {
        let used = |place: usize| self.of_engine.contains(&Some(place));
        let store = |chunks| Store { name: name.to_owned(), cache: ShadowCache::new(chunks) };
        if let Some(place) = self.stores.iter().position(|store| store.name == name) {
            return place;
        }
        match (0..self.stores.len()).find(|&place| !used(place)) {
            Some(place) => {
                self.stores[place] = store(self.bounds.share(self.stores.len()));
                place
            }
            None => {
                let each = self.bounds.share(self.stores.len() + 1);
                self.stores.push(store(each));
                self.stores.iter_mut().for_each(|store| store.cache.limit(each));
                self.stores.len() - 1
            }
        }
    }

    /// How many of the first chunks of `chain` each store is believed to hold.
    pub fn hits(&self, chain: &Chain) -> StoreHits<'_> {
        let hits = self.stores.iter().map(|store| store.cache.hit_chunks(chain));
        StoreHits { of_engine: &self.of_engine, hits: hits.collect() }
    }

    /// What the store of an engine is believed to hold of a prompt that goes there; `None` where
    /// the engine has none.
    pub fn seek(&self, engine: usize, chain: &Chain, to_load: bool) -> Option<Sought> {
        let store = self.of_engine[engine]?;
        let cache = &self.stores[store].cache;
        let (predicted, ages) = (cache.hit_chunks(chain), cache.ages(chain));
        Some(Sought { store, chunks: chain.chunks(), predicted, ages, to_load })
    }

    /// The prompt is computed and its answer said, so that the engine had time to store it: from
    /// now on the store is believed to hold it. Unlike an engine, for which whoever comes later
    /// waits, a store has nothing of a prompt before that.
    pub fn computed(&mut self, sought: &Sought, chain: &Chain) {
        let cache = &mut self.stores[sought.store].cache;
        let held = cache.hit_chunks(chain);
        cache.touch(chain, held);
    }

    /// Learns from what was found of a prompt.
    pub fn settle(&mut self, sought: &Sought, found: Found) {
        let cache = &mut self.stores[sought.store].cache;
        let chunks = (found.bytes / CHUNK_BYTES).min(sought.chunks);
        if is_less(chunks, sought.predicted) {
            // An engine that computes what it could load says nothing of the store.
            if sought.to_load {
                cache.lost(chunks, &sought.ages);
            }
        } else if found.in_store && is_more(chunks, sought.predicted) {
            cache.held(chunks, &sought.ages);
        }
    }

    /// The name of each store, and how many chunks are remembered of it.
    pub fn lens(&self) -> impl Iterator<Item = (&str, usize)> {
        self.stores.iter().map(|store| (&store.name[..], store.cache.len()))
    }
}

/// How much of one prompt the stores hold.
#[derive(Debug)]
pub struct StoreHits<'a> {
    of_engine: &'a [Option<usize>],
    /// By store.
    hits: Vec<usize>,
}

impl StoreHits<'_> {
    /// Chunks that an engine's store holds; 0 where it has none.
    pub fn chunks(&self, engine: usize) -> usize {
        self.of_engine[engine].map_or(0, |store| self.hits[store])
    }
}

impl Sought {
    /// Chunks of the prompt that the store was believed to hold.
    pub fn predicted_chunks(&self) -> usize {
        self.predicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(session: u8, chunks: usize) -> Chain {
        let mut bytes = vec![session; chunks * CHUNK_BYTES];
        bytes.iter_mut().step_by(CHUNK_BYTES).enumerate().for_each(|(chunk, byte)| *byte = chunk as u8);
        Chain::new(7, &bytes)
    }

    /// Engines 0 and 1 share a store, 2 has one of its own, 3 none.
    fn index() -> StoreIndex {
        let mut index = StoreIndex::new(Bounds { chunks_each: 1_000, chunks: 2_000 });
        let stores = [Some("a"), Some("a"), Some("b"), None];
        stores.into_iter().enumerate().for_each(|(slot, store)| index.set_engine(slot, store));
        index
    }

    fn hits(index: &StoreIndex, chain: &Chain) -> [usize; 4] {
        let hits = index.hits(chain);
        [0, 1, 2, 3].map(|engine| hits.chunks(engine))
    }

    /// An engine computes a prompt, of which so many chunks are found.
    fn serve(index: &mut StoreIndex, engine: usize, chain: &Chain, found: usize, in_store: bool) {
        let sought = index.seek(engine, chain, true).unwrap();
        index.computed(&sought, chain);
        index.settle(&sought, Found { bytes: found * CHUNK_BYTES, in_store });
    }

    #[test]
    fn what_one_engine_has_computed_is_held_for_all_that_share_its_store() {
        let mut index = index();
        let chain = prompt(1, 20);
        let sought = index.seek(0, &chain, true).unwrap();
        assert_eq!(hits(&index, &chain), [0; 4], "sent is not computed");
        index.computed(&sought, &chain);
        assert_eq!(hits(&index, &chain), [20, 20, 0, 0]);
        assert_eq!(hits(&index, &prompt(2, 20)), [0; 4], "another prompt");
        assert!(index.seek(3, &chain, true).is_none());
    }

    #[test]
    fn an_engine_that_computes_what_it_could_load_says_nothing_of_the_store() {
        let mut index = index();
        let chain = prompt(1, 20);
        serve(&mut index, 0, &chain, 0, false);
        let nothing = Found { bytes: 0, in_store: false };
        let sought = index.seek(1, &chain, false).unwrap();
        index.settle(&sought, nothing);
        assert_eq!(hits(&index, &chain)[..2], [20, 20]);
        let sought = index.seek(1, &chain, true).unwrap();
        index.settle(&sought, nothing);
        assert_eq!(hits(&index, &chain)[..2], [0, 0], "it looked there, and found nothing");
    }

    #[test]
    fn a_store_without_engines_is_forgotten_when_its_place_is_needed() {
        let mut index = index();
        let chain = prompt(1, 20);
        serve(&mut index, 2, &chain, 0, false);
        index.set_engine(2, None);
        assert_eq!(hits(&index, &chain), [0; 4]);
        index.set_engine(3, Some("b"));
        assert_eq!(hits(&index, &chain), [0, 0, 0, 20], "the store is still what it was");
        index.set_engine(3, Some("c"));
        assert_eq!(hits(&index, &chain), [0; 4]);
        assert_eq!(index.lens().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "c"]);
    }

    #[test]
    fn however_many_stores_there_are_all_together_are_bounded() {
        let mut index = StoreIndex::new(Bounds { chunks_each: 100, chunks: 300 });
        for engine in 0..30 {
            index.set_engine(engine, Some(&format!("s{engine}")));
            serve(&mut index, engine, &prompt(engine as u8, 120), 0, false);
        }
        (0..30).for_each(|engine| serve(&mut index, engine, &prompt(engine as u8, 120), 0, false));
        let remembered: Vec<usize> = index.lens().map(|(_, chunks)| chunks).collect();
        assert!(remembered.iter().sum::<usize>() <= 300, "{remembered:?}");
        assert!(remembered.iter().all(|&chunks| chunks > 0), "{remembered:?}");
    }

    #[test]
    fn a_store_that_evicts_is_not_believed_for_ever() {
        let mut index = index();
        for session in 1..9 {
            serve(&mut index, 0, &prompt(session, 40), 0, false);
        }
        assert_eq!(hits(&index, &prompt(1, 40))[1], 40);
        serve(&mut index, 1, &prompt(1, 40), 0, false);
        // It was lost 7 prompts after it was used. So whatever comes to that age is gone.
        serve(&mut index, 0, &prompt(9, 40), 0, false);
        assert_eq!(hits(&index, &prompt(2, 40))[0], 0);
        assert_eq!(hits(&index, &prompt(3, 40))[0], 40);
        assert_eq!(hits(&index, &prompt(1, 40))[0], 40, "it has been stored again");
    }

    #[test]
    fn what_the_engine_itself_held_proves_nothing_of_its_store() {
        let mut index = index();
        for session in 1..9 {
            serve(&mut index, 0, &prompt(session, 40), 0, false);
        }
        serve(&mut index, 1, &prompt(1, 40), 0, false);
        serve(&mut index, 0, &prompt(9, 80), 0, false);
        assert_eq!([2, 3].map(|session| hits(&index, &prompt(session, 40))[0]), [0, 0]);
        serve(&mut index, 0, &prompt(2, 40), 40, false);
        assert_eq!(hits(&index, &prompt(3, 40))[0], 0, "the older one was found in the GPU");
        serve(&mut index, 0, &prompt(3, 40), 40, true);
        assert_eq!(hits(&index, &prompt(4, 40))[0], 40, "the older one was found in the store");
    }
}
