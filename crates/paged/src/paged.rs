//! [`PagedCache`], what a connector holds: it checks what is asked for, begins loads and stores,
//! and says what has ended.

use crate::cache::{BadValue, CacheShape};
use crate::copies::{Copies, Direction, Relayed};
use crate::direct::{
    Digest, Direct, DirectMemory, DirectOptions, GpuMemory, HostMemory, Key, OfferEnded, ReadRequest,
};
use crate::errors::{NotBegun, NotCopied, NotOpened};
use crate::gpu::CudaCopies;
use crate::host::{HOST, HostCopies};
use crate::jobs::{JobStored, Jobs, Measured};
use crate::limiter::Limiter;
use crate::load::{InFlight, LoadEnd, LoadRequest, LoadStall};
use crate::page_tables::PageTables;
use crate::shared::{Log, Shared};
use crate::stats::{Counters, Stats};
use crate::store::{NewChunk, Storing};
use crate::thread_pool::ThreadPool;
use crate::verify::Verify;
use forebay_client::{Client, ClientOptions};
use forebay_cuda::remote::NodeRelays;
use forebay_net::Agent;
use forebay_store::TenantId;
use forebay_transfer::MAX_COPY_THREADS;
use forebay_transfer::lock::{Mutex, RwLock};
use forebay_transfer::{Forked, Limits, MoverHandle, MoverThread, Process};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub const LOADS_MAX: usize = 1024;
/// Chunks of one load, of all of its sources, at most.
pub const CHUNKS_MAX: usize = 65_536;
/// Bytes of stores on their way at most, unless said otherwise. What is beyond is not stored.
pub const STORING_BYTES_MAX: u64 = 4 << 30;
/// Chunks that the node is asked to bring, and as many that it has slots for, at a time, unless
/// said otherwise: half of what a node allows a client unless it is told otherwise.
pub const CHUNKS_AT_A_TIME: usize = 512;

/// How a cache reaches its node, and with how much.
#[derive(Debug, Clone)]
pub struct PagedOptions {
    /// Where the node is, and as whom.
    pub client: ClientOptions,
    pub threads: usize,
    /// Bytes of stores on their way at most.
    pub storing_bytes_max: u64,
    /// Chunks that the node is asked to bring, and as many that it has slots for, at a time. Others
    /// wait; a node would refuse what is beyond its `loads_per_client` and `slots_per_client`.
    pub chunks_at_a_time: usize,
    /// GPUs on which the same engine has other caches. Each copies for itself when the others do,
    /// so their links carry nothing for this one; a process cannot see that of another.
    pub sibling_devices: Vec<u16>,
    /// The node whose relays carry a part, if this process sees one GPU and there are no siblings.
    pub relays: NodeRelays,
    /// `None`: nothing is handed over directly.
    pub direct: Option<DirectOptions>,
    /// Who checks loaded bytes, and sums up stored ones: the GPU if the cache is on one, unless
    /// said otherwise.
    pub verify: Option<Verify>,
}

impl PagedOptions {
    pub fn new(client: ClientOptions) -> PagedOptions {
        let (storing_bytes_max, chunks_at_a_time) = (STORING_BYTES_MAX, CHUNKS_AT_A_TIME);
        PagedOptions {
            client,
            threads: 2,
            storing_bytes_max,
            chunks_at_a_time,
            sibling_devices: Vec::new(),
            relays: NodeRelays::default(),
            direct: None,
            verify: None,
        }
    }
}

/// A cache. For any number of threads. Dropping it closes it.
#[derive(Debug)]
pub struct PagedCache {
    pub(crate) shared: Arc<Shared>,
    /// By their numbers; those that have ended go when the engine hears of ends or begins others.
    loads: Mutex<HashMap<u64, Arc<InFlight>>>,
    direct: Option<Arc<Direct>>,
    /// Taken when it is closed. The pool ends before the mover.
    threads: Mutex<Option<(ThreadPool, MoverThread)>>,
    process: Process,
}

impl PagedCache {
    /// A cache in host memory.
    ///
    /// # Safety
    /// The pages must be mapped, readable and writable until [`close`](PagedCache::close) has
    /// returned. A page that is being loaded or stored belongs to this until the job has ended.
    pub unsafe fn on_host(cache: CacheShape, options: PagedOptions) -> Result<PagedCache, NotOpened> {
        let threads = options.threads;
        let copies = |mover: &MoverHandle, cache: &CacheShape| {
            // SAFETY: the caller's promise holds until `close` has returned, which ends the mover.
            let copies = unsafe { HostCopies::new(mover, cache, threads)? };
            Ok(Arc::new(copies) as Arc<dyn Copies>)
        };
        PagedCache::open_with(cache, options, copies, |shared, agent| {
            // SAFETY: as above, and the agent ends before the mover.
            let memory = unsafe { HostMemory::new(agent, &shared.mover, &shared.cache, &shared.tasks)? };
            Ok(Arc::new(memory))
        })
    }

    /// A cache in memory of the GPU of an ordinal. The links of all GPUs that the process sees
    /// carry it, but for its siblings', and those of the node's relays as the options say.
    ///
    /// # Safety
    /// The pages must be memory of that GPU until [`close`](PagedCache::close) has returned. A page
    /// that is being loaded or stored belongs to this until the job has ended.
    pub unsafe fn on_device(
        cache: CacheShape,
        device: u16,
        options: PagedOptions,
    ) -> Result<PagedCache, NotOpened> {
        let (siblings, relays) = (options.sibling_devices.clone(), options.relays.clone());
        let gpu = OnceLock::new();
        let copies = |_: &MoverHandle, cache: &CacheShape| {
            // SAFETY: by the caller's promise.
            let copies = unsafe { CudaCopies::new(cache, device, &siblings, &relays)? };
            gpu.get_or_init(|| Arc::clone(copies.gpu()));
            Ok(Arc::new(copies) as Arc<dyn Copies>)
        };
        PagedCache::open_with(cache, options, copies, |shared, _| {
            let gpu = gpu.get().ok_or_else(|| NotCopied("the GPU is not open".into()))?;
            Ok(Arc::new(GpuMemory::new(gpu, &shared.cache)?))
        })
    }

    /// A cache to which `copies` has the way. It hands nothing over directly.
    pub fn open(
        cache: CacheShape,
        options: PagedOptions,
        copies: impl FnOnce(&MoverHandle, &CacheShape) -> Result<Arc<dyn Copies>, NotCopied>,
    ) -> Result<PagedCache, NotOpened> {
        let not_directly = || Err(NotCopied("memory of this kind is not handed over directly".into()));
        PagedCache::open_with(cache, options, copies, |_, _| not_directly())
    }

    /// The same, with its memory for direct hand-overs, for which an agent listens.
    fn open_with(
        cache: CacheShape,
        options: PagedOptions,
        copies: impl FnOnce(&MoverHandle, &CacheShape) -> Result<Arc<dyn Copies>, NotCopied>,
        memory: impl FnOnce(&Shared, &Arc<Agent>) -> Result<Arc<dyn DirectMemory>, NotCopied>,
    ) -> Result<PagedCache, NotOpened> {
        let threads = options.threads;
        if !(1..=MAX_COPY_THREADS).contains(&threads) {
            return Err(NotOpened::Threads { threads });
        }
        let mover = MoverThread::spawn(Limits::default())?;
        let handle = mover.handle();
        let copies = copies(&handle, &cache)?;
        let verify = Verify::choose(options.verify, copies.has_sums())?;
        let client = Client::connect_or_wait(&handle, HOST, options.client)?;
        let pool = ThreadPool::new(threads)?;
        let shared = Arc::new(Shared {
            cache,
            copies,
            verify,
            counters: Counters::default(),
            jobs: Jobs::default(),
            tasks: pool.tasks(),
            access: Arc::default(),
            fetches: Limiter::new(options.chunks_at_a_time),
            slots: Limiter::new(options.chunks_at_a_time),
            log: Log::default(),
            client: RwLock::new(Some(client)),
            mover: handle,
            storing_bytes_max: options.storing_bytes_max,
        });
        if let Some(client) = shared.client() {
            let shared = Arc::downgrade(&shared);
            client.on_arena(Box::new(move |arena| {
                if let Some(shared) = shared.upgrade() {
                    shared.meet(arena);
                }
            }));
        }
        let direct = options.direct.as_ref().and_then(|options| {
            let started = Direct::start(&shared, options, HOST, memory);
            started.inspect_err(|why| tracing::warn!(reason = %why, "no direct hand-overs")).ok()
        });
        let (loads, threads) = (Mutex::default(), Mutex::new(Some((pool, mover))));
        Ok(PagedCache { shared, loads, direct, threads, process: Process::current() })
    }

    /// Refuses in any other process than the one that opened it: a child of `fork()` has none of
    /// its threads. What has no error to give is not to be asked there.
    pub fn here(&self) -> Result<(), Forked> {
        self.process.check()
    }

    /// Whether the node is there, as far as is known. It is looked for in the background while it
    /// is not.
    pub fn is_connected(&self) -> bool {
        self.shared.client().is_some_and(|client| client.is_connected())
    }

    pub fn cache(&self) -> &CacheShape {
        &self.shared.cache
    }

    /// Begins a load. `tables` say where the pages of its blocks are, from the first chunk's first
    /// token on; -1 for a block that is not wanted. It ends with what may be used, see
    /// [`take_ended`](PagedCache::take_ended); with fewer tokens if the node is gone or late, if
    /// bytes are not those that were stored, or if too many loads are under way.
    pub fn load(&self, request: LoadRequest, stream: u64) -> Result<(), NotBegun> {
        self.here()?;
        let shared = &self.shared;
        self.check(&request)?;
        if shared.client().is_none() {
            return Err(NotBegun::Closed);
        }
        let job = request.job;
        let known = || Err(BadValue::new("job", job, "a number of which no load is under way").into());
        let (under_way, is_known) = shared.jobs.loads(job);
        if is_known {
            return known();
        }
        if under_way >= LOADS_MAX {
            let why = format!("{under_way} loads are under way, no more may be");
            shared.log.short(job, 0, request.tokens, &why);
            shared.jobs.refuse_load(LoadEnd { job, tokens: 0, why: Some(why) });
            return Ok(());
        }
        let copying = shared.copies.begin(Direction::Load, request.layerwise, stream)?;
        let load = InFlight::begin(shared, request, copying);
        if !shared.jobs.begin_load(job) {
            return known();
        }
        let mut loads = self.loads.lock();
        loads.retain(|_, load| !load.is_over());
        loads.insert(job, Arc::clone(&load));
        drop(loads);
        load.start();
        Ok(())
    }

    fn check(&self, request: &LoadRequest) -> Result<(), NotBegun> {
        let refuse = |what, value: u64, allowed| Err(BadValue::new(what, value, allowed).into());
        let chunks = request.tokens.div_ceil(self.shared.cache.chunk_tokens().into());
        if request.tokens == 0 || chunks > CHUNKS_MAX as u64 {
            return refuse("tokens", request.tokens, format!("1 to those of {CHUNKS_MAX} chunks"));
        }
        let sources = request.sources.len();
        if sources == 0 || sources.saturating_mul(chunks as usize) > CHUNKS_MAX {
            return refuse(
                "the number of sources",
                sources as u64,
                format!("1 to those of {CHUNKS_MAX} chunks in all"),
            );
        }
        for (ids, source) in &request.sources {
            if ids.len() as u64 != chunks {
                return refuse("the number of chunks of a source", ids.len() as u64, chunks.to_string());
            }
            source.check(&self.shared.cache)?;
        }
        request.tables.check(&self.shared.cache, request.tokens, true)?;
        Ok(())
    }

    /// Waits until a layer of all layerwise loads is in its pages; on a GPU `stream` waits, and the
    /// host only until the copies are in their stream.
    pub fn wait_layer(&self, layer: u32, stream: u64) -> Result<(), NotBegun> {
        self.here()?;
        let layers = self.shared.cache.layers().len();
        if layer as usize >= layers {
            return Err(BadValue::new("layer", layer, format!("below {layers}")).into());
        }
        for load in self.under_way().iter().filter(|load| load.is_layerwise()) {
            load.wait_layer(layer, stream)?;
        }
        Ok(())
    }

    /// Waits for all layers of all layerwise loads.
    pub fn wait_loads(&self, stream: u64) -> Result<(), NotBegun> {
        self.here()?;
        for load in self.under_way().iter().filter(|load| load.is_layerwise()) {
            for layer in 0..self.shared.cache.layers().len() as u32 {
                load.wait_layer(layer, stream)?;
            }
        }
        Ok(())
    }

    /// Begins to store chunks, one after another in their sequence, with the pages of `tables` for
    /// all of them together: every token has one, and only the last chunk may be short. Each of
    /// `parts` names the same chunks of an equal part of the heads, in their order; one part is
    /// whole pages.
    pub fn store(
        &self,
        job: u64,
        parts: Vec<Vec<NewChunk>>,
        tables: PageTables,
        stream: u64,
    ) -> Result<(), NotBegun> {
        self.store_for(None, job, parts, tables, stream)
    }

    /// The same for this tenant; `None` is the client's own.
    pub fn store_for(
        &self,
        tenant: Option<TenantId>,
        job: u64,
        parts: Vec<Vec<NewChunk>>,
        tables: PageTables,
        stream: u64,
    ) -> Result<(), NotBegun> {
        self.here()?;
        let shared = &self.shared;
        tables.check(&shared.cache, self.tokens_of(&parts)?, false)?;
        if shared.client().is_none() {
            return Err(NotBegun::Closed);
        }
        let copying = shared.copies.begin(Direction::Store, false, stream)?;
        if !shared.jobs.begin_store(job) {
            return Err(BadValue::new("job", job, "a number of which no store is under way").into());
        }
        Storing::begin(shared, (job, tenant), parts, tables, copying);
        Ok(())
    }

    /// Tokens of chunks that are to be stored together, if they may be: only the last one may be
    /// short, and all parts have the same.
    pub fn tokens_of(&self, parts: &[Vec<NewChunk>]) -> Result<u64, NotBegun> {
        let cache = &self.shared.cache;
        let Some((first, others)) = parts.split_first() else {
            return Err(BadValue::new("the number of parts", 0_u64, "1 or more").into());
        };
        for (number, group) in cache.groups().iter().enumerate() {
            if !(group.heads as usize).is_multiple_of(parts.len()) {
                let allowed = format!("a divisor of {}, the heads of group {number}", group.heads);
                return Err(BadValue::new("the number of parts", parts.len() as u64, allowed).into());
            }
        }
        let whole = cache.chunk_tokens();
        for (number, chunk) in first.iter().enumerate() {
            let is_last = number + 1 == first.len();
            if chunk.tokens == 0 || chunk.tokens > whole || (chunk.tokens < whole && !is_last) {
                let allowed = format!("{whole}, or fewer for the last chunk");
                return Err(BadValue::new("the tokens of a chunk", chunk.tokens, allowed).into());
            }
        }
        for (number, part) in (1..).zip(others) {
            let alike = part.iter().zip(first).all(|(one, other)| one.tokens == other.tokens);
            if part.len() != first.len() || !alike {
                let allowed = format!("{}, of as many tokens as those of part 0", first.len());
                let what = format!("the chunks of part {number}");
                return Err(BadValue::new(what, part.len() as u64, allowed).into());
            }
        }
        Ok(first.iter().map(|chunk| u64::from(chunk.tokens)).sum())
    }

    fn direct(&self) -> Result<&Arc<Direct>, NotBegun> {
        self.here()?;
        self.direct.as_ref().ok_or(NotBegun::NoDirect)
    }

    /// What other engines need to hand over directly from this one. `None`: it does not.
    pub fn metadata(&self) -> Option<Vec<u8>> {
        self.direct().ok().map(|direct| direct.metadata())
    }

    /// Offers the pages of the first `tokens` tokens of a sequence to whoever has the key and the
    /// same digest of the sequence. They must stay as they are until
    /// [`take_offers_ended`](PagedCache::take_offers_ended) names it.
    pub fn offer(
        &self,
        key: Key,
        digest: Digest,
        tables: &PageTables,
        tokens: u64,
        ttl: Duration,
    ) -> Result<(), NotBegun> {
        let direct = self.direct()?;
        tables.check(&self.shared.cache, tokens, true)?;
        direct.offer(key, digest, tables, ttl);
        Ok(())
    }

    /// Offers that have ended since this was asked last.
    pub fn take_offers_ended(&self) -> Vec<OfferEnded> {
        self.direct().map(|direct| direct.take_ended()).unwrap_or_default()
    }

    /// Ends all offers. When this returns nobody reads their pages any more.
    pub fn withdraw_offers(&self) {
        if let Ok(direct) = self.direct() {
            direct.withdraw();
        }
    }

    /// Begins a load straight from another engine's pages. It ends as other loads do, with all
    /// tokens or with none.
    pub fn read(&self, request: ReadRequest, stream: u64) -> Result<(), NotBegun> {
        self.direct()?.read(request, stream)
    }

    /// Tells another engine that nobody will read what it offers under a key.
    pub fn decline(&self, metadata: &[u8], key: Key) -> Result<(), NotBegun> {
        self.direct()?.decline(metadata, key);
        Ok(())
    }

    /// Loads and stores that have ended since this was asked last. Nothing of them touches a page
    /// any more.
    pub fn take_ended(&self) -> (Vec<LoadEnd>, Vec<JobStored>) {
        self.loads.lock().retain(|_, load| !load.is_over());
        self.shared.jobs.take_ended()
    }

    /// What loads have taken that ended since this was asked last.
    pub fn take_measured(&self) -> Vec<Measured> {
        self.shared.jobs.take_measured()
    }

    /// How long steps waited for layerwise loads that ended since this was asked last: the host,
    /// and on a GPU the engine's stream.
    pub fn take_stalls(&self) -> Vec<LoadStall> {
        self.shared.jobs.take_stalls()
    }

    /// Waits until none of these loads is under way. `false`: not in time.
    pub fn wait_loaded(&self, jobs: &[u64], limit: Option<Duration>) -> bool {
        self.shared.jobs.wait_loaded(jobs, limit)
    }

    /// Waits until none of these stores is under way. `false`: not in time.
    pub fn wait_stored(&self, jobs: &[u64], limit: Option<Duration>) -> bool {
        self.shared.jobs.wait_stored(jobs, limit)
    }

    fn under_way(&self) -> Vec<Arc<InFlight>> {
        self.loads.lock().values().filter(|load| !load.is_over()).cloned().collect()
    }

    pub fn stats(&self) -> Stats {
        let Relayed { relays, lost, bytes } = self.shared.copies.relayed();
        Stats { relays, relays_lost: lost, bytes_relayed: bytes, ..self.shared.counters.read() }
    }

    /// Ends everything. When this returns nothing touches the cache any more, and the node's memory
    /// is let go of.
    pub fn close(&self) {
        if self.here().is_err() {
            return;
        }
        let shared = &self.shared;
        shared.access.close();
        self.under_way().iter().for_each(|load| load.stop("the cache is closed"));
        shared.access.wait_until_unused();
        if let Some(direct) = &self.direct {
            direct.close();
        }
        let client = shared.client.write().take();
        if let Some(client) = client {
            // Before the mover ends, which holds the arena.
            client.close();
        }
        shared.copies.close();
        let threads = self.threads.lock().take();
        drop(threads);
    }
}

impl Drop for PagedCache {
    fn drop(&mut self) {
        if self.here().is_err() {
            // All of it is the parent's, and is left as it is.
            std::mem::forget(Arc::clone(&self.shared));
            std::mem::forget(std::mem::take(&mut self.loads));
            std::mem::forget(self.direct.take());
            return std::mem::forget(std::mem::take(&mut self.threads));
        }
        self.close();
    }
}

#[cfg(test)]
mod tests;
