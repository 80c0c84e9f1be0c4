//! A load under way: what the node answers and what was copied goes into its plan, and what the
//! plan says next is started. Answers come on the client's threads, copies end on the mover's or a
//! GPU's; both go on in the thread pool.

use super::copy::{Bad, InArena, LayerCopy};
use super::stall::StallClock;
use super::timeout::Timeout;
use super::{LoadEnd, LoadPlan, LoadRequest, Loaded, NextBatch, Part, TierBytes};
use crate::copies::{Job, NotCopied};
use crate::cost_model::Tier;
use crate::limiter::Permit;
use crate::pages::Source;
use crate::shared::Shared;
use crate::stats::{add, take};
use crate::thread_pool::Urgency;
use forebay_client::{Client, LayerCame, Lease, LeasedChunk};
use forebay_store::ChunkShape;
use forebay_transfer::Class;
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the node keeps a lease of which it hears nothing. It is renewed as long as the load
/// takes.
const LEASE_US: u64 = 10_000_000;
/// Chunks of so many bytes come from the disk layer by layer, if the engine waits for them so: a
/// shorter one comes by one read or two.
const BY_LAYERS_BYTES: u64 = 1 << 20;
/// Layers that fill pages of the disk are read by themselves.
const PAGE_BYTES: u64 = 4096;
const CLOSED: &str = "the cache is closed";

/// A load under way. It ends once, and only when no copy of it touches a page any more.
pub struct InFlight {
    shared: Arc<Shared>,
    request: LoadRequest,
    chunks: usize,
    copying: Arc<dyn Job>,
    begun: Instant,
    /// In the clock of the client's mover.
    begun_us: u64,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    plan: LoadPlan,
    /// Sources of which the node has not said yet what it has.
    unasked: usize,
    bytes: TierBytes,
    leases: Vec<Arc<Lease>>,
    lent: HashMap<Part, InArena>,
    stalls: StallClock,
    timeout: Timeout,
    fetching: usize,
    ending: bool,
    /// It has ended, and whoever asks what ended is told.
    over: bool,
}

impl InFlight {
    /// Begins a load, whose copies `copying` does.
    pub fn begin(shared: &Arc<Shared>, request: LoadRequest, copying: Arc<dyn Job>) -> Arc<InFlight> {
        let chunks = request.sources.first().map_or(0, |(ids, _)| ids.len());
        let layers = shared.cache.layers().len() as u32;
        let tokens = u32::try_from(request.tokens).unwrap_or(u32::MAX);
        let batches_max = shared.copies.batches_max(shared.cache.layer_bytes(tokens).max().unwrap_or(0));
        let begun = Instant::now();
        let state = State {
            plan: LoadPlan::new(chunks, request.sources.len(), layers, batches_max),
            unasked: request.sources.len(),
            bytes: TierBytes::default(),
            leases: Vec::new(),
            lent: HashMap::new(),
            stalls: StallClock::default(),
            timeout: Timeout::new(Duration::from_micros(request.limit_us), request.layerwise, begun),
            fetching: 0,
            ending: false,
            over: false,
        };
        let (shared, begun_us) = (Arc::clone(shared), shared.now_us());
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Arc::new(InFlight { shared, request, chunks, copying, begun, begun_us, state, changed })
    }

    /// Asks the node, and sees to it that the load ends in time.
    pub fn start(self: &Arc<Self>) {
        add(&self.shared.counters.loads, 1);
        add(&self.shared.counters.loads_under_way, 1);
        self.look_again(self.ends());
        let Some(client) = self.shared.client() else { return self.stop(CLOSED) };
        let client = client.within(self.request.within).for_tenant(self.request.tenant);
        for (source, (ids, _)) in self.request.sources.iter().enumerate() {
            let load = Arc::clone(self);
            client.lease_then(ids, LEASE_US, move |lease| {
                let tasks = Arc::clone(&load.shared.tasks);
                tasks.post(Urgency::Load, move || load.leased(source, lease));
            });
        }
    }

    /// Whether the engine waits for its layers.
    pub fn is_layerwise(&self) -> bool {
        self.request.layerwise
    }

    /// Whether it has ended, and whoever asks what ended is told.
    pub fn is_over(&self) -> bool {
        self.state.lock().over
    }

    /// Ends it as soon as nothing of it is on its way, with nothing that may be used.
    pub fn stop(self: &Arc<Self>, why: &str) {
        self.state.lock().plan.fail(0, || why.to_owned());
        self.go_on();
    }

    /// When its time is over, as things are.
    fn ends(&self) -> Option<Instant> {
        let state = self.state.lock();
        let waits_for_turn = state.unasked == 0 && !state.is_under_way();
        state.timeout.ends(waits_for_turn.then(|| self.shared.fetches.last_released()))
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
        if self.state.lock().ending {
            return;
        }
        match self.ends() {
            Some(at) if at <= Instant::now() => self.expire(),
            ends => self.look_again(ends),
        }
    }

    fn expire(self: &Arc<Self>) {
        let LoadRequest { job, limit_us, layerwise, .. } = self.request;
        self.shared.log.late(job, limit_us, layerwise);
        let why = || match layerwise {
            true => format!("not there within {limit_us} us"),
            false => format!("nothing has come for {limit_us} us"),
        };
        self.state.lock().plan.expire(why);
        self.go_on();
    }

    /// By when the node is to have brought a chunk that it is asked for now.
    fn deadline_us(&self) -> u64 {
        let since_us = if self.request.layerwise { self.begun_us } else { self.shared.now_us() };
        since_us.saturating_add(self.request.limit_us)
    }

    /// What the node has of a source.
    fn leased(self: &Arc<Self>, source: usize, lease: Result<Lease, String>) {
        let Some(client) = self.shared.client() else { return self.stop(CLOSED) };
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
        let here: Vec<_> = (0..lease.len()).map(|chunk| client.leased_chunk(&lease, chunk)).collect();
        let mut state = self.state.lock();
        state.unasked -= 1;
        state.timeout.progressed(Instant::now());
        if lease.len() < chunks {
            state.plan.fail(lease.len(), || format!("the node has {} of {chunks} chunks", lease.len()));
        }
        let mut missing = Vec::new();
        let mut by_layers = Vec::new();
        let comes_by_layers =
            |chunk| tier_of(&lease, chunk) == Tier::Disk && self.comes_by_layers(source, chunk);
        for (chunk, lent) in here.into_iter().enumerate() {
            match lent {
                Some(lent) => state.here(Part { chunk, source }, lent, tier_of(&lease, chunk)),
                None if comes_by_layers(chunk) => by_layers.push(chunk),
                None => missing.push(chunk),
            }
        }
        // The lease lives as long as the load.
        let lease = Arc::new(lease);
        if !state.ending {
            state.leases.push(Arc::clone(&lease));
        }
        drop(state);
        if !by_layers.is_empty() && !self.fetch_layers(&client, &lease, &by_layers) {
            missing.extend(by_layers);
            missing.sort_unstable();
        }
        let fetches = &self.shared.fetches;
        for together in missing.chunks(fetches.together()) {
            let parts: Vec<Part> = together.iter().map(|chunk| Part { chunk: *chunk, source }).collect();
            let (load, lease) = (Arc::clone(self), Arc::downgrade(&lease));
            fetches.acquire_many(parts.len(), move |permits| load.fetch(parts, &lease, permits));
        }
        self.go_on();
    }

    /// Whether the engine can begin with a chunk's first layers while its last ones are read.
    fn comes_by_layers(&self, source: usize, chunk: usize) -> bool {
        let (cache, LoadRequest { sources, tokens, layerwise, .. }) = (&self.shared.cache, &self.request);
        let is_same = sources.get(source).is_some_and(|(_, source)| *source == Source::same(cache));
        let is_whole = (chunk as u64 + 1) * u64::from(cache.chunk_tokens()) <= *tokens;
        let layers = || cache.layer_bytes(cache.chunk_tokens());
        let is_long = layers().sum::<u64>() >= BY_LAYERS_BYTES;
        let are_pages = layers().all(|bytes| bytes.is_multiple_of(PAGE_BYTES));
        *layerwise && sources.len() == 1 && is_same && is_whole && is_long && are_pages
    }

    /// Asks for chunks of the only source layer by layer. `false`: the node gives no ring.
    fn fetch_layers(self: &Arc<Self>, client: &Client, lease: &Arc<Lease>, chunks: &[usize]) -> bool {
        let cache = &self.shared.cache;
        let shape = ChunkShape::new(cache.layer_bytes(cache.chunk_tokens()));
        let (Ok(shape), Ok(ring)) = (shape, client.ring()) else { return false };
        let mut state = self.state.lock();
        let parts = chunks.iter().map(|chunk| Part { chunk: *chunk, source: 0 });
        let (wave, parts) = state.plan.come_by_layers(parts);
        let groups = parts.len().div_ceil(ring.chunks_max().into());
        (0..groups * cache.layers().len()).for_each(|_| state.begin_fetch(Instant::now()));
        drop(state);
        let chunks: Vec<usize> = parts.iter().map(|part| part.chunk).collect();
        let (load, fetching) = (Arc::clone(self), DiskFetch::begin(&self.shared));
        let urgency = (Class::Demand, Some(self.deadline_us()));
        let on_layer = move |came: LayerCame| {
            // Until the last layer has come.
            let _ = &fetching;
            let (tasks, load) = (Arc::clone(&load.shared.tasks), Arc::clone(&load));
            tasks.post(Urgency::Load, move || load.layer_came(wave, came));
        };
        if !client.bring_layers(lease, &chunks, &Arc::new(shape), urgency, on_layer) {
            let mut state = self.state.lock();
            state.fetching -= groups * cache.layers().len();
            state.plan.fail(chunks.first().copied().unwrap_or(0), || "the node is gone".to_owned());
        }
        true
    }

    /// A layer of chunks is in the arena, or will not be.
    fn layer_came(self: &Arc<Self>, wave: usize, came: LayerCame) {
        let layer = came.layer as u32;
        let mut state = self.state.lock();
        state.fetching -= 1;
        state.timeout.progressed(Instant::now());
        for (chunk, lent) in came.chunks {
            match lent {
                Ok(lent) => state.layer_here(wave, layer, Part { chunk, source: 0 }, lent),
                Err(why) => state.plan.fail(chunk, || why),
            }
        }
        drop(state);
        self.go_on();
    }

    /// Asks for chunks of a source, but for those that the load has no use for any more.
    fn fetch(self: &Arc<Self>, parts: Vec<Part>, lease: &Weak<Lease>, permits: Vec<Permit>) {
        let Some(lease) = lease.upgrade() else { return };
        let state = self.state.lock();
        let is_awaited = |(part, _): &(Part, Permit)| state.plan.awaits(*part);
        let (parts, unneeded): (Vec<_>, Vec<_>) = parts.into_iter().zip(permits).partition(is_awaited);
        drop(state);
        drop(unneeded);
        let Some(client) = self.shared.client() else { return self.stop(CLOSED) };
        let (mut chunks, mut waiting) = (Vec::with_capacity(parts.len()), HashMap::new());
        for (part, permit) in parts {
            let tier = tier_of(&lease, part.chunk);
            self.shared.jobs.begin_fetch(tier);
            self.state.lock().begin_fetch(Instant::now());
            chunks.push(part.chunk);
            waiting.insert(part.chunk, (part, tier, permit));
        }
        let (load, waiting) = (Arc::clone(self), Mutex::new(waiting));
        client.bring(&lease, &chunks, Class::Demand, Some(self.deadline_us()), move |chunk, brought| {
            let Some((part, tier, permit)) = waiting.lock().remove(&chunk) else { return };
            let (tasks, load) = (Arc::clone(&load.shared.tasks), Arc::clone(&load));
            tasks.post(Urgency::Load, move || {
                // On this thread: who is next sends, which may wait for the node, and the client's
                // own takes its answers.
                drop(permit);
                load.fetched(part, tier, brought);
            });
        });
    }

    fn fetched(self: &Arc<Self>, part: Part, tier: Tier, brought: Result<LeasedChunk, String>) {
        self.shared.jobs.end_fetch(tier);
        let mut state = self.state.lock();
        state.fetching -= 1;
        state.timeout.progressed(Instant::now());
        match brought {
            Ok(lent) => state.here(part, lent, tier),
            Err(why) => state.plan.fail(part.chunk, || why),
        }
        drop(state);
        self.go_on();
    }

    /// Starts what can start, and ends the load if it is over.
    fn go_on(self: &Arc<Self>) {
        while let Some((next, there)) = self.next() {
            let (wave, layer) = (next.wave, next.layer);
            self.copy(&next, &there);
            self.state.lock().plan.handed(wave, layer);
            self.changed.notify_all();
        }
        self.changed.notify_all();
        self.end_if_over();
    }

    /// What to copy next, once all sources were asked for: so what is in memory goes together.
    fn next(&self) -> Option<(NextBatch, Vec<InArena>)> {
        let mut state = self.state.lock();
        if state.unasked > 0 {
            return None;
        }
        let next = state.plan.next_batch()?;
        let there = next.parts.iter().filter_map(|part| state.lent.get(part).cloned()).collect();
        Some((next, there))
    }

    fn copy(self: &Arc<Self>, next: &NextBatch, there: &[InArena]) {
        let arena = there.first().map(|first| Arc::clone(first.lent.arena()));
        let (Some(arena), Some(access)) = (arena, self.shared.access.enter()) else {
            let mut state = self.state.lock();
            state.plan.fail(0, || CLOSED.into());
            return state.plan.settled(next.wave, next.layer);
        };
        let (copy, bad) = LayerCopy::gather(&self.shared, &self.request, &arena, next, there);
        if let Some((chunk, why)) = bad {
            self.state.lock().plan.fail(chunk, || why);
        }
        if copy.is_empty() {
            return self.state.lock().plan.settled(next.wave, next.layer);
        }
        let (load, wave, layer) = (Arc::clone(self), next.wave, next.layer);
        let on_copied = move |bad: Bad, bytes: TierBytes| load.copied(wave, layer, bad, &bytes);
        copy.start(&self.shared, self.copying.as_ref(), arena, access, Box::new(on_copied));
    }

    /// Nothing of a batch touches pages any more. What follows is for the thread pool.
    fn copied(self: Arc<Self>, wave: usize, layer: u32, bad: Bad, bytes: &TierBytes) {
        let mut state = self.state.lock();
        if bad.is_empty() {
            self.shared.counters.add_loaded(bytes);
            state.bytes.add_all(bytes);
        }
        bad.into_iter().for_each(|(chunk, why)| state.plan.fail(chunk, || why));
        state.timeout.progressed(Instant::now());
        state.plan.settled(wave, layer);
        let goes_on = state.plan.goes_on();
        drop(state);
        self.changed.notify_all();
        if !goes_on {
            return;
        }
        let tasks = Arc::clone(&self.shared.tasks);
        tasks.post(Urgency::Load, move || self.go_on());
    }

    fn end_if_over(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let Some(outcome) = state.plan.outcome().filter(|_| !state.ending) else { return };
        state.ending = true;
        let is_due = state.stalls.over();
        let (leases, lent) = (std::mem::take(&mut state.leases), std::mem::take(&mut state.lent));
        let bytes = std::mem::take(&mut state.bytes);
        drop(state);
        drop((leases, lent));
        if is_due {
            self.tell_stall();
        }
        let counters = &self.shared.counters;
        let tokens =
            self.request.tokens.min(outcome.good_chunks as u64 * u64::from(self.shared.cache.chunk_tokens()));
        add(&counters.loads_short, (tokens < self.request.tokens).into());
        add(&counters.load_us, self.begun.elapsed().as_micros() as u64);
        take(&counters.loads_under_way, 1);
        if let Some(why) = &outcome.why {
            self.shared.log.short(self.request.job, tokens, self.request.tokens, why);
        }
        let loaded = Loaded { bytes, all: tokens == self.request.tokens };
        self.shared.jobs.end_load(LoadEnd { job: self.request.job, tokens, why: outcome.why }, loaded);
        self.state.lock().over = true;
        self.changed.notify_all();
    }

    /// Tells what was waited for it, by the host or by a GPU's stream.
    fn tell_stall(&self) {
        let (waited, counters) = (self.copying.stalls(), &self.shared.counters);
        let mut state = self.state.lock();
        waited.into_iter().for_each(|(layer, time)| state.stalls.waited(layer, time));
        let stall = state.stalls.stall(self.request.job, Instant::now());
        drop(state);
        add(&counters.layers_late, stall.layers_late);
        add(&counters.bubble_us, stall.time.as_micros() as u64);
        if self.request.layerwise {
            self.shared.jobs.waited(stall);
        }
    }

    /// Waits until all of a layer that can be used is in its pages, or, on a GPU, has `stream`
    /// wait. The last layer is there when the load has ended and
    /// [`Jobs::take_ended`](crate::jobs::Jobs::take_ended) tells of it.
    pub fn wait_layer(&self, layer: u32, stream: u64) -> Result<(), NotCopied> {
        let is_started = {
            let mut state = self.state.lock();
            if state.goes_on(|state| !self.is_last(layer) && state.plan.has_layer(layer)) {
                return Ok(());
            }
            state.stalls.enter_wait();
            state.goes_on(|state| state.plan.has_all_started(layer))
        };
        let passed = if is_started { self.copying.pass(layer, stream) } else { Ok(false) };
        let waited = passed.and_then(|has_passed| match has_passed {
            true => Ok(()),
            false => self.follow(layer, stream),
        });
        if self.state.lock().stalls.leave() {
            self.tell_stall();
        }
        waited
    }

    fn follow(&self, layer: u32, stream: u64) -> Result<(), NotCopied> {
        let is_timed = self.copying.come(layer, stream)?;
        self.wait(layer, is_timed, |state| state.plan.has_all_started(layer));
        let follows = self.copying.follow(layer, stream)?;
        if let Some(rest) = self.copying.rest() {
            self.shared.tasks.post(Urgency::Load, rest);
        }
        if !follows {
            self.wait(layer, false, |state| !self.is_last(layer) && state.plan.has_layer(layer));
        }
        Ok(())
    }

    fn is_last(&self, layer: u32) -> bool {
        layer as usize + 1 >= self.shared.cache.layers().len()
    }

    /// Waits until something is so of a layer or the load is over. Somebody else knows how long
    /// that takes, if it `is_timed`.
    fn wait(&self, layer: u32, is_timed: bool, is_so: impl Fn(&State) -> bool) {
        let mut state = self.state.lock();
        if state.goes_on(&is_so) {
            return;
        }
        if !is_timed {
            state.stalls.begin(layer, Instant::now());
        }
        self.changed.wait_while(&mut state, |state| !state.goes_on(&is_so));
        if !is_timed {
            state.stalls.end(Instant::now());
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
        self.fetching > 0 || self.plan.is_copying()
    }

    /// A chunk is asked for. The time in which the load only waited for that is not its own.
    fn begin_fetch(&mut self, now: Instant) {
        if !self.is_under_way() {
            self.timeout.progressed(now);
        }
        self.fetching += 1;
    }

    fn layer_here(&mut self, wave: usize, layer: u32, part: Part, lent: LeasedChunk) {
        if !self.ending {
            self.lent.entry(part).or_insert_with(|| InArena { lent: Arc::new(lent), tier: Tier::Disk });
            self.plan.layer_here(wave, layer, part);
        }
    }

    fn here(&mut self, part: Part, lent: LeasedChunk, tier: Tier) {
        if !self.ending {
            self.lent.insert(part, InArena { lent: Arc::new(lent), tier });
            self.plan.here(part);
        }
    }
}

/// Layers are being read from the node's disk, until this is dropped.
struct DiskFetch(Arc<Shared>);

impl DiskFetch {
    fn begin(shared: &Arc<Shared>) -> DiskFetch {
        shared.jobs.begin_fetch(Tier::Disk);
        DiskFetch(Arc::clone(shared))
    }
}

impl Drop for DiskFetch {
    fn drop(&mut self) {
        self.0.jobs.end_fetch(Tier::Disk);
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

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight").field("job", &self.request.job).finish_non_exhaustive()
    }
}
