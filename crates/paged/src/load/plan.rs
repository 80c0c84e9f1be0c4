//! The plan of one load: which of its chunks are in the arena, which layers of them have been
//! copied and verified, and how many chunks may be used. Sans-IO: it says what to copy next and
//! when the load is over.
//!
//! A load has *parts*: a chunk of each of its sources. Parts that are in the arena at the same time
//! go together, as a *wave*, one batch for each layer. Parts that come layer by layer are a wave
//! from the start, of which a layer is copied when all parts have it. Whatever is wrong with a part
//! makes its chunk and all behind it unusable, for later tokens mean nothing without earlier ones;
//! the load goes on with what is before.

use std::collections::{BTreeMap, BTreeSet};

/// Waves that are copied at a time. Parts that come meanwhile gather for the next one.
const WAVES: usize = 2;

/// A chunk of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// Which chunk of the sequence.
    pub chunk: usize,
    pub source: usize,
}

/// What to copy next; [`LoadPlan::handed`] is to be told when whoever copies has it,
/// [`LoadPlan::settled`] when it has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextBatch {
    pub wave: usize,
    pub layer: u32,
    pub parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Chunks that may be used, from the first one on.
    pub good_chunks: usize,
    pub why: Option<String>,
}

/// What of a load is where. A chunk counts only if every layer of all its parts was copied and
/// verified, and so were those of all chunks before it.
#[derive(Debug)]
pub struct LoadPlan {
    layers: u32,
    /// Batches on their way at most.
    batches_max: usize,
    awaited: BTreeSet<Part>,
    /// In the arena, and in no wave yet.
    ready: BTreeSet<Part>,
    /// Those that something of is to be done still: a long load has thousands, and each step looks
    /// at all of these.
    waves: BTreeMap<usize, Wave>,
    begun: usize,
    good_chunks: usize,
    why: Option<String>,
}

#[derive(Debug)]
struct Wave {
    parts: Vec<Part>,
    next_layer: u32,
    /// Layers that were taken from here and that nobody copies yet.
    taken: BTreeSet<u32>,
    /// Layers that were taken and have not ended.
    moving: BTreeSet<u32>,
    /// Of each layer the parts that do not have it yet; none where parts came whole.
    missing: Vec<BTreeSet<Part>>,
}

impl LoadPlan {
    /// A load of `chunks` chunks from each of `sources` sources, none of which is in the arena as
    /// far as is known.
    pub fn new(chunks: usize, sources: usize, layers: u32, batches_max: usize) -> LoadPlan {
        let part = |source| move |chunk| Part { chunk, source };
        let awaited = (0..sources).flat_map(|source| (0..chunks).map(part(source))).collect();
        let (ready, waves, batches_max) = (BTreeSet::new(), BTreeMap::new(), batches_max.max(1));
        LoadPlan { layers, batches_max, awaited, ready, waves, begun: 0, good_chunks: chunks, why: None }
    }

    /// Whether a part is not in the arena yet and would be of use there.
    pub fn awaits(&self, part: Part) -> bool {
        self.awaited.contains(&part)
    }

    pub fn here(&mut self, part: Part) {
        if self.awaited.remove(&part) && part.chunk < self.good_chunks {
            self.ready.insert(part);
        }
    }

    /// These come layer by layer from now on. Gives the number of their wave, and those that are
    /// of use.
    pub fn come_by_layers(&mut self, parts: impl IntoIterator<Item = Part>) -> (usize, Vec<Part>) {
        let parts: BTreeSet<Part> = parts.into_iter().filter(|part| self.awaited.remove(part)).collect();
        let missing = vec![parts.clone(); self.layers as usize];
        let parts: Vec<Part> = parts.into_iter().collect();
        let wave = self.begin_wave(parts.clone(), missing);
        (wave, parts)
    }

    /// A layer of a part of such a wave is in the arena.
    pub fn layer_here(&mut self, wave: usize, layer: u32, part: Part) {
        let missing = self.waves.get_mut(&wave).and_then(|wave| wave.missing.get_mut(layer as usize));
        if let Some(missing) = missing {
            missing.remove(&part);
        }
    }

    fn begin_wave(&mut self, parts: Vec<Part>, missing: Vec<BTreeSet<Part>>) -> usize {
        let wave = Wave { parts, next_layer: 0, taken: BTreeSet::new(), moving: BTreeSet::new(), missing };
        self.waves.insert(self.begun, wave);
        self.begun += 1;
        self.begun - 1
    }

    /// A chunk cannot be used, nor any behind it.
    pub fn fail(&mut self, chunk: usize, why: impl FnOnce() -> String) {
        if chunk < self.good_chunks {
            self.good_chunks = chunk;
            self.why = Some(why());
            self.awaited.retain(|part| part.chunk < chunk);
            self.ready.retain(|part| part.chunk < chunk);
        }
    }

    /// The time is over: what is not done cannot be used.
    pub fn expire(&mut self, why: impl FnOnce() -> String) {
        let unfinished = self.waves.values().filter(|wave| !wave.is_done(self.layers));
        let moving = unfinished.flat_map(|wave| &wave.parts);
        if let Some(first) = self.awaited.iter().chain(&self.ready).chain(moving).map(|part| part.chunk).min()
        {
            self.fail(first, why);
        }
    }

    /// Whether anything of it is in the arena and not yet copied.
    pub fn is_copying(&self) -> bool {
        let goes_on = |wave: &Wave| !wave.moving.is_empty() || wave.can_copy(self.layers, self.good_chunks);
        !self.ready.is_empty() || self.waves.values().any(goes_on)
    }

    /// Whether there is something to copy now, or it has ended.
    pub fn goes_on(&self) -> bool {
        let moving: usize = self.waves.values().map(|wave| wave.moving.len()).sum();
        let can_copy = |wave: &Wave| wave.can_copy(self.layers, self.good_chunks);
        let has_more = !self.ready.is_empty() || self.waves.values().any(can_copy);
        (has_more && moving < self.batches_max) || self.outcome().is_some()
    }

    /// What to copy now, the lowest layer first; to be asked until there is nothing.
    pub fn next_batch(&mut self) -> Option<NextBatch> {
        if self.waves.values().map(|wave| wave.moving.len()).sum::<usize>() >= self.batches_max {
            return None;
        }
        let (layers, good) = (self.layers, self.good_chunks);
        let came_whole = self.waves.values().filter(|wave| wave.missing.is_empty());
        let busy = came_whole.filter(|wave| wave.wants_more(layers, good)).count();
        if !self.ready.is_empty() && busy < WAVES {
            let parts = std::mem::take(&mut self.ready).into_iter().collect();
            self.begin_wave(parts, Vec::new());
        }
        let able = self.waves.iter_mut().filter(|(_, wave)| wave.can_copy(layers, good));
        let (&number, wave) = able.min_by_key(|(number, wave)| (wave.next_layer, **number))?;
        let layer = wave.next_layer;
        wave.next_layer += 1;
        wave.taken.insert(layer);
        wave.moving.insert(layer);
        let parts = wave.parts.iter().copied().filter(|part| part.chunk < good).collect();
        Some(NextBatch { wave: number, layer, parts })
    }

    /// Whoever copies has a batch: who waits for its layer can wait for that.
    pub fn handed(&mut self, wave: usize, layer: u32) {
        self.note(wave, |wave| wave.taken.remove(&layer));
    }

    /// Nothing touches a batch any more: it was copied, and verified but for the chunks that
    /// [`fail`](LoadPlan::fail) was told of.
    pub fn settled(&mut self, wave: usize, layer: u32) {
        self.note(wave, |wave| wave.moving.remove(&layer));
    }

    /// Something has happened to a wave, which may have been the last.
    fn note(&mut self, number: usize, what: impl FnOnce(&mut Wave) -> bool) {
        let Some(wave) = self.waves.get_mut(&number) else { return };
        what(wave);
        if wave.moving.is_empty() && wave.taken.is_empty() && !wave.wants_more(self.layers, self.good_chunks)
        {
            self.waves.remove(&number);
        }
    }

    /// Whether all of a layer that can be used is in its pages.
    pub fn has_layer(&self, layer: u32) -> bool {
        self.has_all_started(layer) && self.waves.values().all(|wave| !wave.moving.contains(&layer))
    }

    /// Whether all of a layer that can be used is there or on its way: not only taken, but handed
    /// to whoever copies.
    pub fn has_all_started(&self, layer: u32) -> bool {
        let taken = |wave: &Wave| layer < wave.next_layer || !wave.wants_more(self.layers, self.good_chunks);
        let gone = |wave: &Wave| taken(wave) && !wave.taken.contains(&layer);
        self.awaited.is_empty() && self.ready.is_empty() && self.waves.values().all(gone)
    }

    /// How it ended, as soon as it has: nothing of it touches a page any more.
    pub fn outcome(&self) -> Option<Outcome> {
        let over =
            self.has_all_started(self.layers - 1) && self.waves.values().all(|wave| wave.moving.is_empty());
        over.then(|| Outcome { good_chunks: self.good_chunks, why: self.why.clone() })
    }
}

impl Wave {
    /// Whether any of it that may still be used was not copied yet.
    fn wants_more(&self, layers: u32, good_chunks: usize) -> bool {
        self.next_layer < layers && self.parts.iter().any(|part| part.chunk < good_chunks)
    }

    /// The same, if it is there.
    fn can_copy(&self, layers: u32, good_chunks: usize) -> bool {
        let missing = self.missing.get(self.next_layer as usize).and_then(BTreeSet::first);
        self.wants_more(layers, good_chunks) && missing.is_none_or(|first| first.chunk >= good_chunks)
    }

    fn is_done(&self, layers: u32) -> bool {
        self.next_layer == layers && self.moving.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn part(chunk: usize) -> Part {
        Part { chunk, source: 0 }
    }

    #[test]
    fn what_is_in_memory_goes_layer_by_layer_in_one_batch_each_and_a_few_at_a_time() {
        let mut plan = LoadPlan::new(3, 1, 5, 2);
        (0..3).for_each(|chunk| plan.here(part(chunk)));
        let first = plan.next_batch().unwrap();
        assert_eq!(first, NextBatch { wave: 0, layer: 0, parts: vec![part(0), part(1), part(2)] });
        assert_eq!(plan.next_batch().unwrap().layer, 1);
        assert_eq!(plan.next_batch(), None, "two at a time");
        assert!(!plan.has_all_started(0), "it was taken, but nobody copies it yet");
        plan.handed(0, 0);
        plan.handed(0, 1);
        plan.settled(0, 1);
        assert!(plan.has_layer(1) && !plan.has_layer(0) && plan.has_all_started(0));
        for layer in 2..5 {
            assert_eq!(plan.next_batch().unwrap().layer, layer);
            plan.settled(0, layer);
            assert_eq!(
                (plan.has_all_started(layer), plan.outcome()),
                (false, None),
                "it can end before that is known"
            );
            plan.handed(0, layer);
        }
        assert_eq!((plan.next_batch(), plan.outcome()), (None, None));
        plan.settled(0, 0);
        assert_eq!(plan.outcome(), Some(Outcome { good_chunks: 3, why: None }));
    }

    #[test]
    fn a_bad_layer_costs_its_chunk_and_all_behind_it_and_nothing_before() {
        let mut plan = LoadPlan::new(3, 1, 2, 4);
        (0..3).for_each(|chunk| plan.here(part(chunk)));
        let _ = (plan.next_batch(), plan.next_batch());
        (0..2).for_each(|layer| plan.handed(0, layer));
        plan.fail(1, || "corrupt".into());
        plan.settled(0, 0);
        assert_eq!(plan.outcome(), None, "a layer is on its way to pages of all of them");
        plan.fail(2, || "worse".into());
        plan.settled(0, 1);
        assert_eq!(plan.outcome(), Some(Outcome { good_chunks: 1, why: Some("corrupt".into()) }));
    }

    #[test]
    fn a_late_chunk_holds_back_layers_until_it_comes_or_the_time_is_over() {
        let mut plan = LoadPlan::new(2, 1, 1, 4);
        assert!(!plan.is_copying());
        plan.here(part(0));
        assert!(plan.is_copying());
        let next = plan.next_batch().unwrap();
        plan.handed(next.wave, next.layer);
        assert!(plan.is_copying());
        plan.settled(next.wave, next.layer);
        assert!(!plan.is_copying(), "all that came is copied");
        assert!(!plan.has_layer(0));
        plan.expire(|| "late".into());
        assert!(plan.has_layer(0));
        assert_eq!(plan.outcome(), Some(Outcome { good_chunks: 1, why: Some("late".into()) }));
        plan.here(part(1));
        assert_eq!(plan.next_batch(), None, "too late");
    }

    #[test]
    fn a_chunk_needs_all_of_its_sources() {
        let mut plan = LoadPlan::new(2, 2, 1, 4);
        for source in 0..2 {
            (0..2).for_each(|chunk| plan.here(Part { chunk, source }));
        }
        let next = plan.next_batch().unwrap();
        assert_eq!(next.parts.len(), 4);
        plan.handed(next.wave, next.layer);
        plan.fail(1, || "source 1".into());
        plan.settled(next.wave, next.layer);
        assert_eq!(plan.outcome().map(|outcome| outcome.good_chunks), Some(1));
    }

    #[test]
    fn a_long_load_whose_chunks_come_one_by_one_remembers_no_more_than_what_is_on_its_way() {
        let chunks = 4096;
        let mut plan = LoadPlan::new(chunks, 1, 3, 4);
        for chunk in 0..chunks {
            plan.here(part(chunk));
            while let Some(next) = plan.next_batch() {
                // A copy may have ended before it is known that somebody has it.
                plan.settled(next.wave, next.layer);
                plan.handed(next.wave, next.layer);
            }
            assert!(plan.waves.len() <= WAVES, "each step looks at all of them");
        }
        assert_eq!(plan.outcome(), Some(Outcome { good_chunks: chunks, why: None }));
    }

    #[test]
    fn a_layer_of_parts_that_come_layer_by_layer_is_copied_when_all_of_them_have_it() {
        let mut plan = LoadPlan::new(3, 1, 2, 4);
        plan.here(part(0));
        let (wave, parts) = plan.come_by_layers([part(2), part(1), part(0)]);
        assert_eq!(parts, [part(1), part(2)], "the first one came whole");
        let first = plan.next_batch().unwrap();
        assert_eq!((first.layer, &first.parts[..]), (0, &[part(0)][..]));
        plan.layer_here(wave, 1, part(1));
        plan.layer_here(wave, 0, part(1));
        assert_eq!(plan.next_batch().map(|next| (next.layer, next.parts)), Some((1, vec![part(0)])));
        assert!(plan.next_batch().is_none() && !plan.goes_on(), "chunk 2 has no layer 0 yet");
        plan.layer_here(wave, 0, part(2));
        assert!(plan.goes_on());
        let second = plan.next_batch().unwrap();
        assert_eq!((second.wave, second.layer, second.parts), (wave, 0, parts));
        assert!(plan.next_batch().is_none() && !plan.has_all_started(1));
        plan.fail(2, || "layer 1 of chunk 2 did not come".into());
        assert_eq!(plan.next_batch().map(|next| next.parts), Some(vec![part(1)]), "the others go on");
    }

    #[test]
    fn layers_that_do_not_come_in_time_cost_the_chunks_that_lack_them() {
        let mut plan = LoadPlan::new(2, 1, 2, 4);
        let (wave, _) = plan.come_by_layers([part(0), part(1)]);
        for layer in 0..2 {
            plan.layer_here(wave, layer, part(0));
        }
        assert!(!plan.is_copying() && plan.outcome().is_none());
        plan.expire(|| "late".into());
        assert_eq!(plan.outcome(), Some(Outcome { good_chunks: 0, why: Some("late".into()) }));
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// Parts of these chunks come layer by layer.
        ComeByLayers(usize),
        /// The next layer of one of those.
        LayerHere(usize),
        Here(usize),
        Fail(usize),
        Next,
        /// One of those on their way.
        Settle(usize),
        Expire,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0usize..12).prop_map(Step::Here),
            1 => (0usize..12).prop_map(Step::ComeByLayers),
            8 => any::<usize>().prop_map(Step::LayerHere),
            1 => (0usize..6).prop_map(Step::Fail),
            8 => Just(Step::Next),
            8 => any::<usize>().prop_map(Step::Settle),
        ];
        (prop::collection::vec(step, 0..120), any::<bool>()).prop_map(|(mut steps, expires)| {
            if expires {
                steps.insert(steps.len() / 2, Step::Expire);
            }
            steps
        })
    }

    proptest! {
        #[test]
        fn a_load_ends_only_when_every_part_that_counts_has_every_layer_and_nothing_is_on_its_way(
            steps in steps(),
            layers in 1u32..5,
            batches_max in 1usize..4,
        ) {
            let mut plan = LoadPlan::new(6, 2, layers, batches_max);
            let (mut moving, mut copied, mut bad) = (Vec::<NextBatch>::new(), HashSet::new(), 6);
            let mut coming = Vec::new();
            for step in steps {
                match step {
                    Step::ComeByLayers(number) => {
                        let from = (number..12).step_by(2).map(|number| Part { chunk: number % 6, source: number / 6 });
                        let (wave, parts) = plan.come_by_layers(from);
                        coming.extend((0..layers).flat_map(|layer| parts.iter().map(move |part| (wave, layer, *part))));
                    }
                    Step::LayerHere(which) => if !coming.is_empty() {
                        let (wave, layer, part) = coming.swap_remove(which % coming.len());
                        plan.layer_here(wave, layer, part);
                    },
                    Step::Here(number) => plan.here(Part { chunk: number % 6, source: number / 6 }),
                    Step::Fail(chunk) => {
                        plan.fail(chunk, String::new);
                        bad = bad.min(chunk);
                    }
                    Step::Next => {
                        let goes_on = plan.goes_on();
                        let Some(next) = plan.next_batch() else {
                            prop_assert_eq!(goes_on, plan.outcome().is_some());
                            continue;
                        };
                        prop_assert!(goes_on);
                        prop_assert!(!next.parts.is_empty() && next.layer < layers);
                        let is_missing = |part: &Part| coming.iter().any(|(_, layer, one)| one == part && *layer == next.layer);
                        prop_assert!(!next.parts.iter().any(is_missing));
                        moving.push(next);
                        prop_assert!(moving.len() <= batches_max);
                    },
                    Step::Settle(which) => if !moving.is_empty() {
                        let next = moving.swap_remove(which % moving.len());
                        plan.handed(next.wave, next.layer);
                        plan.settled(next.wave, next.layer);
                        for part in next.parts {
                            prop_assert!(copied.insert((part, next.layer)), "copied once");
                        }
                    },
                    Step::Expire => plan.expire(String::new),
                }
                if let Some(outcome) = plan.outcome() {
                    prop_assert!(moving.is_empty());
                    prop_assert!(outcome.good_chunks <= bad);
                    for chunk in 0..outcome.good_chunks {
                        for layer in 0..layers {
                            for source in 0..2 {
                                let part = Part { chunk, source };
                                prop_assert!(copied.contains(&(part, layer)));
                            }
                        }
                    }
                }
                for layer in 0..layers {
                    prop_assert!(!plan.has_layer(layer) || moving.iter().all(|next| next.layer != layer));
                }
            }
        }

        #[test]
        fn every_load_whose_parts_come_ends_with_all_of_them(order in Just((0..12usize).collect::<Vec<_>>()).prop_shuffle(), batches_max in 1usize..4) {
            let mut plan = LoadPlan::new(6, 2, 3, batches_max);
            for number in order {
                plan.here(Part { chunk: number % 6, source: number / 6 });
                while let Some(next) = plan.next_batch() {
                    plan.handed(next.wave, next.layer);
                    plan.settled(next.wave, next.layer);
                }
            }
            prop_assert_eq!(plan.outcome(), Some(Outcome { good_chunks: 6, why: None }));
        }
    }
}
