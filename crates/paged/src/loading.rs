//! One load at work: what the node answers and what was copied and verified goes into its state, and what that says next is
//! started. Glue: this file carries between `load.rs`, the client of the node and the copies; it must never decide what is
//! copied when.

use crate::bubble::Waits;
use crate::copies::{Batch, Job, NotCopied, Piece};
use crate::cost_model::Tier;
use crate::jobs::{Came, LoadEnd, TierBytes};
use crate::load::{Load, Next, Part};
use crate::paged::Shared;
use crate::pages::{ChunkAt, PageTables, Source, pieces};
use crate::patience::Patience;
use crate::stats::{add, take};
use crate::window::Place;
use crate::workers::Urgency;
use forebay_client::{Lease, LentChunk};
use forebay_kv::ChunkId;
use forebay_store::{NotVerified, Unreadable};
use forebay_transfer::{Class, Span};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the node keeps a lease of which it hears nothing. It is renewed as long as the load takes.
const LEASE_US: u64 = 10_000_000;

/// What is to be loaded.
#[derive(Debug)]
pub struct Wish {
    /// The engine's number for it.
    pub job: u64,
    /// Chunk ids, in order, and how they fit, of each storer's rank.
    pub sources: Vec<(Vec<ChunkId>, Source)>,
    /// Where the pages are.
    pub tables: PageTables,
    /// Tokens that the chunks have.
    pub tokens: u64,
    /// Whether the engine waits for it layer by layer.
    pub layerwise: bool,
    /// It ends with what is there so long after its begin, if the engine waits for it layer by layer. Any other load does when
    /// nothing of it has come for so long; or, while it has nothing on its way, nothing of those before it.
    pub limit_us: u64,
}

/// A load under way.
pub struct Loading {
    shared: Arc<Shared>,
    wish: Wish,
    chunks: usize,
    copying: Arc<dyn Job>,
    begun: Instant,
    /// In the clock of the client's mover.
    begun_us: u64,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    load: Load,
    /// Sources of which the node has not said yet what it has.
    unasked: usize,
    /// What has come.
    bytes: TierBytes,
    leases: Vec<Arc<Lease>>,
    lent: HashMap<Part, Here>,
    waits: Waits,
    patience: Patience,
    /// Chunks that the node was asked for.
    bringing: usize,
    ending: bool,
    /// It has ended, and whoever asks what ended is told.
    over: bool,
}

/// A chunk in the arena, and where it was when the load began.
#[derive(Clone)]
struct Here {
    lent: Arc<LentChunk>,
    tier: Tier,
}

/// A batch, and what it has to be compared with.
struct Step {
    load: Arc<Loading>,
    wave: usize,
    layer: u32,
    checks: Vec<(usize, Arc<LentChunk>, Vec<Span>)>,
    first_chunk: usize,
    bytes: TierBytes,
    /// What is to be done still: the copy, the comparison.
    left: AtomicUsize,
    bad: Mutex<Vec<(usize, String)>>,
    /// Pages and arena are touched.
    _inside: crate::door::Inside,
}

impl Loading {
    /// Begins a load, whose copies `copying` does.
    pub fn begin(shared: &Arc<Shared>, wish: Wish, copying: Arc<dyn Job>) -> Arc<Loading> {
        let chunks = wish.sources.first().map_or(0, |(ids, _)| ids.len());
        let layers = shared.cache.layers().len() as u32;
        let load = Load::new(chunks, wish.sources.len(), layers, shared.copies.window());
        let unasked = wish.sources.len();
        let (bytes, leases, lent, waits) =
            (TierBytes::default(), Vec::new(), HashMap::new(), Waits::default());
        let (begun, begun_us) = (Instant::now(), shared.now_us());
        let patience = Patience::new(Duration::from_micros(wish.limit_us), wish.layerwise, begun);
        let state = State {
            load,
            unasked,
            bytes,
            leases,
            lent,
            waits,
            patience,
            bringing: 0,
            ending: false,
            over: false,
        };
        let (state, shared) = (Mutex::new(state), Arc::clone(shared));
        Arc::new(Loading { shared, wish, chunks, copying, begun, begun_us, state, changed: Condvar::new() })
    }

    /// Asks the node, and sees to it that the load ends in time.
    pub fn start(self: &Arc<Self>) {
        add(&self.shared.counters.loads, 1);
        add(&self.shared.counters.loads_under_way, 1);
        self.look_again(self.ends());
        let Some(client) = self.shared.client() else { return self.stop("the cache is closed") };
        for (source, (ids, _)) in self.wish.sources.iter().enumerate() {
            let load = Arc::clone(self);
            client.lease_then(ids, LEASE_US, move |lease| {
                let tasks = Arc::clone(&load.shared.tasks);
                tasks.post(Urgency::Load, move || load.leased(source, lease));
            });
        }
    }

    /// Whether the engine waits for its layers.
    pub fn is_layerwise(&self) -> bool {
        self.wish.layerwise
    }

    /// Ends it as soon as nothing of it is on its way, with nothing that may be used.
    pub fn stop(self: &Arc<Self>, why: &str) {
        self.state.lock().load.fail(0, || why.to_owned());
        self.go_on();
    }

    /// When its time is over, as things are.
    fn ends(&self) -> Option<Instant> {
        let state = self.state.lock();
        let waits_for_turn = state.unasked == 0 && !state.is_under_way();
        state.patience.ends(waits_for_turn.then(|| self.shared.brings.last_left()))
    }

    /// Looks at the time when it may be over.
    fn look_again(self: &Arc<Self>, at: Option<Instant>) {
        let (Some(at), late) = (at, Arc::downgrade(self)) else { return };
        self.shared.tasks.post_at(at, move || {
            if let Some(load) = late.upgrade() {
                load.look();
            }
        });
    }

    /// Ends it if its time is over. What came since this was planned has put that off.
    fn look(self: &Arc<Self>) {
        let ends = self.ends();
        match ends {
            None => {}
            Some(at) if at <= Instant::now() => self.expire(),
            Some(_) if self.state.lock().ending => {}
            Some(_) => self.look_again(ends),
        }
    }

    fn expire(self: &Arc<Self>) {
        let (limit_us, layerwise) = (self.wish.limit_us, self.wish.layerwise);
        let why = || match layerwise {
            true => format!("not there within {limit_us} us"),
            false => format!("nothing has come for {limit_us} us"),
        };
        self.state.lock().load.expire(why);
        self.go_on();
    }

    /// By when the node is to have brought a chunk that it is asked for now.
    fn deadline_us(&self) -> u64 {
        let since_us = if self.wish.layerwise { self.begun_us } else { self.shared.now_us() };
        since_us.saturating_add(self.wish.limit_us)
    }

    /// What the node has of a source.
    fn leased(self: &Arc<Self>, source: usize, lease: Result<Lease, String>) {
        let Some(client) = self.shared.client() else { return self.stop("the cache is closed") };
        let lease = match lease {
            Ok(lease) => lease,
            Err(why) => {
                self.state.lock().unasked -= 1;
                return self.stop(&why);
            }
        };
        let (counters, chunks) = (&self.shared.counters, self.chunks);
        add(&counters.chunks_memory, lease.in_memory() as u64);
        add(&counters.chunks_disk, lease.on_disk() as u64);
        add(&counters.chunks_peer, lease.on_peers() as u64);
        let here: Vec<_> = (0..lease.len()).map(|chunk| client.lent(&lease, chunk)).collect();
        let mut state = self.state.lock();
        state.unasked -= 1;
        state.patience.came(Instant::now());
        if lease.len() < chunks {
            state.load.fail(lease.len(), || format!("the node has {} of {chunks} chunks", lease.len()));
        }
        let mut missing = Vec::new();
        for (chunk, lent) in here.into_iter().enumerate() {
            match lent {
                Some(lent) => state.here(Part { chunk, source }, lent, tier_of(&lease, chunk)),
                None => missing.push(chunk),
            }
        }
        // The lease lives as long as the load.
        let lease = Arc::new(lease);
        if !state.ending {
            state.leases.push(Arc::clone(&lease));
        }
        drop(state);
        let brings = &self.shared.brings;
        for together in missing.chunks(brings.together()) {
            let parts: Vec<Part> = together.iter().map(|chunk| Part { chunk: *chunk, source }).collect();
            let (load, lease) = (Arc::clone(self), Arc::downgrade(&lease));
            brings.enter_together(parts.len(), move |places| load.bring(parts, &lease, places));
        }
        self.go_on();
    }

    /// Asks for chunks of a source, but for those that the load has no use for any more.
    fn bring(self: &Arc<Self>, parts: Vec<Part>, lease: &Weak<Lease>, places: Vec<Place>) {
        let Some(lease) = lease.upgrade() else { return };
        let state = self.state.lock();
        let is_awaited = |(part, _): &(Part, Place)| state.load.awaits(*part);
        let (parts, unneeded): (Vec<_>, Vec<_>) = parts.into_iter().zip(places).partition(is_awaited);
        drop(state);
        drop(unneeded);
        let Some(client) = self.shared.client() else { return self.stop("the cache is closed") };
        let (mut chunks, mut waiting) = (Vec::with_capacity(parts.len()), HashMap::new());
        for (part, place) in parts {
            let tier = tier_of(&lease, part.chunk);
            self.shared.jobs.begin_bring(tier);
            self.state.lock().begin_bring(Instant::now());
            chunks.push(part.chunk);
            waiting.insert(part.chunk, (part, tier, place));
        }
        let (load, waiting) = (Arc::clone(self), Mutex::new(waiting));
        client.bring(&lease, &chunks, Class::Demand, Some(self.deadline_us()), move |chunk, brought| {
            let Some((part, tier, place)) = waiting.lock().remove(&chunk) else { return };
            let (tasks, load) = (Arc::clone(&load.shared.tasks), Arc::clone(&load));
            tasks.post(Urgency::Load, move || {
                // On this thread: who is next sends, which may wait for the node, and the client's own takes its answers.
                drop(place);
                load.brought(part, tier, brought);
            });
        });
    }

    fn brought(self: &Arc<Self>, part: Part, tier: Tier, brought: Result<LentChunk, String>) {
        self.shared.jobs.end_bring(tier);
        let mut state = self.state.lock();
        state.bringing -= 1;
        state.patience.came(Instant::now());
        match brought {
            Ok(lent) => state.here(part, lent, tier),
            Err(why) => state.load.fail(part.chunk, || why),
        }
        drop(state);
        self.go_on();
    }

    /// Starts what can start, and ends the load if it is over.
    fn go_on(self: &Arc<Self>) {
        while let Some((next, here)) = self.next() {
            let (wave, layer) = (next.wave, next.layer);
            self.copy(next, here);
            self.state.lock().load.handed(wave, layer);
            self.changed.notify_all();
        }
        self.changed.notify_all();
        self.end_if_over();
    }

    /// What to copy next, once all sources were asked for: so what is in memory goes together.
    fn next(&self) -> Option<(Next, Vec<Here>)> {
        let mut state = self.state.lock();
        if state.unasked > 0 {
            return None;
        }
        let next = state.load.next_batch()?;
        let here = next.parts.iter().filter_map(|part| state.lent.get(part).cloned()).collect();
        Some((next, here))
    }

    fn copy(self: &Arc<Self>, next: Next, here: Vec<Here>) {
        let (mut batch, mut checks, mut bytes) = (Vec::new(), Vec::new(), TierBytes::default());
        let arena = here.first().map(|here| Arc::clone(here.lent.arena()));
        for (part, Here { lent, tier }) in next.parts.iter().zip(&here) {
            let from = batch.len();
            let is_same_arena = arena.as_ref().is_some_and(|arena| Arc::ptr_eq(arena, lent.arena()));
            let gathered = match is_same_arena {
                true => self.gather(*part, lent, next.layer, &mut batch),
                false => Err("the node was started again".into()),
            };
            bytes.add(*tier, batch[from..].iter().map(|piece: &Piece| piece.bytes).sum());
            match gathered {
                Ok(spans) if spans.is_empty() => {}
                Ok(spans) => checks.push((part.chunk, Arc::clone(lent), spans)),
                Err(why) => {
                    self.state.lock().load.fail(part.chunk, || why);
                    break;
                }
            }
        }
        let (Some(arena), Some(inside)) = (arena, self.shared.door.enter()) else {
            let mut state = self.state.lock();
            state.load.fail(0, || "the cache is closed".into());
            return state.load.settled(next.wave, next.layer);
        };
        if batch.is_empty() {
            return self.state.lock().load.settled(next.wave, next.layer);
        }
        let is_read_here = self.shared.copies.region(next.layer).is_some();
        let step = Arc::new(Step {
            load: Arc::clone(self),
            wave: next.wave,
            layer: next.layer,
            first_chunk: next.parts.first().map_or(0, |part| part.chunk),
            checks,
            bytes,
            // What the host cannot read was compared or summed where it came into the arena, and stays so as long as the lease
            // lives; a GPU's links are several times as fast as the processors that it would take to do that once more.
            left: AtomicUsize::new(1 + usize::from(is_read_here)),
            bad: Mutex::default(),
            _inside: inside,
        });
        let copied = Arc::clone(&step);
        let on_copied = move |outcome: Result<(), NotCopied>| {
            if let Err(error) = outcome {
                copied.note(copied.first_chunk, error.to_string());
            }
            match is_read_here {
                true => copied.verify_soon(),
                false => copied.check_leases(),
            }
            copied.done();
        };
        self.copying.copy(next.layer, Batch { arena, pieces: batch }, Box::new(on_copied));
    }

    /// Adds the pieces of a part's layer to a batch. Gives the spans to compare with its checksum; none if nothing is wanted.
    fn gather(
        &self,
        part: Part,
        lent: &LentChunk,
        layer: u32,
        batch: &mut Vec<Piece>,
    ) -> Result<Vec<Span>, String> {
        let (cache, source) = (&self.shared.cache, &self.wish.sources[part.source].1);
        if lent.shape().layers() != cache.layers().len() {
            let (theirs, ours) = (lent.shape().layers(), cache.layers().len());
            return Err(format!("the chunk has {theirs} layers, the cache {ours}"));
        }
        let chunk_tokens = u64::from(cache.chunk_tokens());
        let first_token = part.chunk as u64 * chunk_tokens;
        let tokens = (self.wish.tokens - first_token).min(chunk_tokens) as u32;
        let at = ChunkAt { first_token, tokens };
        let whole = lent.layer(layer as usize).ok_or("the chunk lacks a layer")?;
        let (from, extent) = (batch.len(), (whole.offset, whole.len));
        pieces(cache, &self.wish.tables, layer, at, source, extent, batch)
            .map_err(|misfit| misfit.to_string())?;
        let of_part = &batch[from..];
        let is_same = cache
            .layers()
            .get(layer as usize)
            .is_some_and(|layer| source.is_same(cache, layer, tokens, whole.len));
        Ok(match self.shared.copies.region(layer).filter(|_| is_same) {
            _ if of_part.is_empty() => Vec::new(),
            Some(pages) => arrived(whole, of_part, pages),
            None => vec![whole],
        })
    }

    fn end_if_over(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let Some(verdict) = state.load.verdict().filter(|_| !state.ending) else { return };
        state.ending = true;
        let is_due = state.waits.over();
        let (leases, lent) = (std::mem::take(&mut state.leases), std::mem::take(&mut state.lent));
        let bytes = std::mem::take(&mut state.bytes);
        drop(state);
        drop((leases, lent));
        if is_due {
            self.tell_bubble();
        }
        let counters = &self.shared.counters;
        let tokens =
            self.wish.tokens.min(verdict.good_chunks as u64 * u64::from(self.shared.cache.chunk_tokens()));
        add(&counters.loads_short, (tokens < self.wish.tokens).into());
        add(&counters.load_us, self.begun.elapsed().as_micros() as u64);
        take(&counters.loads_under_way, 1);
        let came = Came { bytes, all: tokens == self.wish.tokens };
        self.shared.jobs.end_load(LoadEnd { job: self.wish.job, tokens, why: verdict.why }, came);
        self.state.lock().over = true;
        self.changed.notify_all();
    }

    /// Tells what was waited for it, by the host or by a GPU's stream.
    fn tell_bubble(&self) {
        let (stalls, counters) = (self.copying.stalls(), &self.shared.counters);
        let mut state = self.state.lock();
        stalls.into_iter().for_each(|(layer, time)| state.waits.waited(layer, time));
        let bubble = state.waits.bubble(self.wish.job);
        drop(state);
        add(&counters.layers_late, bubble.layers_late);
        add(&counters.bubble_us, bubble.time.as_micros() as u64);
        if self.wish.layerwise {
            self.shared.jobs.waited(bubble);
        }
    }

    /// Waits until all of a layer that can be used is in its pages, or, on a GPU, has `stream` wait. The last layer is there
    /// when the load has ended and [`Jobs::take_ended`](crate::jobs::Jobs::take_ended) tells of it.
    pub fn wait_layer(&self, layer: u32, stream: u64) -> Result<(), NotCopied> {
        {
            let mut state = self.state.lock();
            if state.goes_on(|state| !self.is_last(layer) && state.load.has_layer(layer)) {
                return Ok(());
            }
            state.waits.come();
        }
        let waited = self.follow(layer, stream);
        if self.state.lock().waits.leave() {
            self.tell_bubble();
        }
        waited
    }

    fn follow(&self, layer: u32, stream: u64) -> Result<(), NotCopied> {
        let is_timed = self.copying.come(layer, stream)?;
        self.wait(layer, is_timed, |state| state.load.has_all_started(layer));
        if !self.copying.follow(layer, stream)? {
            self.wait(layer, false, |state| !self.is_last(layer) && state.load.has_layer(layer));
        }
        Ok(())
    }

    fn is_last(&self, layer: u32) -> bool {
        layer as usize + 1 >= self.shared.cache.layers().len()
    }

    /// Waits until something is so of a layer or the load is over. Somebody else knows how long that takes, if it `is_timed`.
    fn wait(&self, layer: u32, is_timed: bool, is_so: impl Fn(&State) -> bool) {
        let mut state = self.state.lock();
        if state.goes_on(&is_so) {
            return;
        }
        if !is_timed {
            state.waits.begin(layer, Instant::now());
        }
        while !state.goes_on(&is_so) {
            self.changed.wait(&mut state);
        }
        if !is_timed {
            state.waits.end(Instant::now());
        }
    }
}

impl State {
    /// Whether who waits until something is so goes on.
    fn goes_on(&self, is_so: impl Fn(&State) -> bool) -> bool {
        self.over || (self.unasked == 0 && is_so(self))
    }

    /// Whether anything of it is being brought or copied.
    fn is_under_way(&self) -> bool {
        self.bringing > 0 || self.load.is_copying()
    }

    /// A chunk is asked for. The time in which the load only waited for that is not its own.
    fn begin_bring(&mut self, now: Instant) {
        if !self.is_under_way() {
            self.patience.came(now);
        }
        self.bringing += 1;
    }

    fn here(&mut self, part: Part, lent: LentChunk, tier: Tier) {
        if !self.ending {
            self.lent.insert(part, Here { lent: Arc::new(lent), tier });
            self.load.here(part);
        }
    }
}

impl Step {
    fn note(&self, chunk: usize, why: String) {
        self.bad.lock().push((chunk, why));
    }

    fn verify_soon(self: &Arc<Self>) {
        let (tasks, step) = (Arc::clone(&self.load.shared.tasks), Arc::clone(self));
        tasks.post(Urgency::Load, move || {
            step.verify();
            step.done();
        });
    }

    /// The node may have written anything where chunks lay that it does not keep for us any more.
    fn check_leases(&self) {
        if let Some((chunk, ..)) = self.checks.iter().find(|(_, lent, _)| !lent.is_alive()) {
            self.note(*chunk, Unreadable::DeadLease.to_string());
        }
    }

    fn verify(&self) {
        for (chunk, lent, spans) in &self.checks {
            if let Err(error) = lent.verify(self.layer as usize, spans) {
                let is_corrupt = matches!(error, NotVerified::Corrupt { .. });
                add(&self.load.shared.counters.chunks_corrupt, is_corrupt.into());
                return self.note(*chunk, error.to_string());
            }
        }
    }

    /// One of two things is done. With the second the batch is settled; what follows is for a worker.
    fn done(self: &Arc<Self>) {
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let load = Arc::clone(&self.load);
        let bad = std::mem::take(&mut *self.bad.lock());
        let mut state = load.state.lock();
        if bad.is_empty() {
            load.shared.counters.add_loaded(&self.bytes);
            state.bytes.add_all(&self.bytes);
        }
        bad.into_iter().for_each(|(chunk, why)| state.load.fail(chunk, || why));
        state.patience.came(Instant::now());
        state.load.settled(self.wave, self.layer);
        drop(state);
        let tasks = Arc::clone(&load.shared.tasks);
        tasks.post(Urgency::Load, move || load.go_on());
    }
}

/// Where a chunk of a lease was when that was granted.
fn tier_of(lease: &Lease, chunk: usize) -> Tier {
    match chunk {
        chunk if chunk < lease.in_memory() => Tier::Memory,
        chunk if chunk - lease.in_memory() < lease.on_disk() => Tier::Disk,
        _ => Tier::Peer,
    }
}

/// A layer of a chunk where it arrived: its pages, and what was not wanted in the arena.
fn arrived(whole: Span, pieces: &[Piece], pages: forebay_transfer::RegionId) -> Vec<Span> {
    let (mut spans, mut at) = (Vec::with_capacity(2 * pieces.len() + 1), whole.offset);
    for piece in pieces {
        if piece.arena_offset > at {
            spans.push(Span::new(whole.region, at, piece.arena_offset - at));
        }
        spans.push(Span::new(pages, piece.page_offset, piece.bytes));
        at = piece.arena_offset + piece.bytes;
    }
    let end = whole.offset + whole.len;
    if end > at {
        spans.push(Span::new(whole.region, at, end - at));
    }
    spans
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loading")
            .field("job", &self.wish.job)
            .field("chunks", &self.chunks)
            .finish_non_exhaustive()
    }
}
