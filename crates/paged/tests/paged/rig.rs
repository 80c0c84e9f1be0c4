//! A node in this process, and caches in host memory whose every byte says what it is: of which
//! token, head and layer.

use forebay_client::ClientOptions;
use forebay_kv::{ChunkId, NamespaceKey, chunk_ids};
use forebay_node::{Node, NodeConfig, SsdConfig, WriteBackPolicy};
use forebay_paged::cache::{ALL_PAGES, CacheShape, Group, Layer};
use forebay_paged::copies::{Batch, Copies, Direction, Job, NotCopied, OnCopied};
use forebay_paged::page_tables::{NO_PAGE, PageTables};
use forebay_paged::pages::{HeadRange, Source};
use forebay_paged::{HostCopies, LoadEnd, LoadRequest, NewChunk, NotOpened, PagedCache, PagedOptions};
use forebay_transfer::{Backing, HostBuffer, RegionId};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of a head of a token: not a power of two.
pub const CELL: usize = 24;
pub const LAYERS: usize = 3;
pub const PAGES: usize = 64;
pub const CHUNK_TOKENS: u32 = 64;
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A folder, and a node's socket in it.
pub struct Site {
    pub folder: tempfile::TempDir,
}

impl Site {
    pub fn new() -> Site {
        Site { folder: tempfile::tempdir().unwrap() }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("node.sock")
    }

    pub fn node(&self) -> Node {
        self.node_of(16 << 20)
    }

    pub fn node_of(&self, bytes: u64) -> Node {
        let mut config = NodeConfig::new(self.socket(), bytes);
        config.copy_threads = 1;
        Node::start(&config).unwrap()
    }

    /// Of a node that keeps all on disk.
    pub fn config_with_disk(&self) -> NodeConfig {
        let mut config = NodeConfig::new(self.socket(), 16 << 20);
        let path = self.folder.path().join("log");
        config.ssd = vec![SsdConfig { path, size: 16 << 20, segment_size: 1 << 20, create: true }];
        config.write_back = WriteBackPolicy::All;
        config
    }

    pub fn options(&self) -> PagedOptions {
        // Every death of a node here is the end of a connection: no answer is merely late.
        let client = ClientOptions { answer_limit_us: 30_000_000, ..ClientOptions::new(self.socket()) };
        PagedOptions::new(client)
    }

    /// An engine of this shape, whose pages are filled with nothing.
    pub fn engine(&self, heads: usize, first_head: usize, page_tokens: usize) -> Engine {
        Engine::new(heads, first_head, page_tokens, self.options())
    }

    /// An engine whose chunks keep so many pages at their end.
    pub fn engine_that_keeps(&self, kept_pages: u32, heads: usize, first_head: usize) -> Engine {
        Engine::open(heads, first_head, 16, kept_pages, |shape| {
            // SAFETY: the memory is dropped after the cache, which closes it.
            unsafe { PagedCache::on_host(shape, self.options()) }
        })
    }

    /// One whose copies begin when a gate is opened. It has to be before the engine goes.
    pub fn gated_engine(&self, heads: usize, options: PagedOptions) -> (Engine, Arc<Gate>) {
        let gate = Gate::new();
        let own = Arc::clone(&gate);
        let copies = |host| Arc::new(Gated { host, gate: own }) as Arc<dyn Copies>;
        (Engine::with_copies(heads, 0, 16, options, copies), gate)
    }

    /// One whose pages only its copies reach, as a GPU's are.
    pub fn blind_engine(&self, heads: usize, first_head: usize, page_tokens: usize) -> Engine {
        let followed = Arc::default();
        let noted = Arc::clone(&followed);
        let copies = |host| Arc::new(Blind { host, followed: noted }) as Arc<dyn Copies>;
        let made = Engine::with_copies(heads, first_head, page_tokens, self.options(), copies);
        Engine { followed, ..made }
    }
}

/// Copies that begin when the gate is opened.
#[derive(Debug)]
pub struct Gate(Mutex<Option<Vec<Held>>>);

/// A copy at a closed gate.
struct Held {
    host: Arc<dyn Job>,
    layer: u32,
    batch: Batch,
    on_copied: OnCopied,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl Gate {
    /// One that is closed.
    fn new() -> Arc<Gate> {
        Arc::new(Gate(Mutex::new(Some(Vec::new()))))
    }

    /// Lets through what came and what comes.
    pub fn open(&self) {
        let held = self.0.lock().unwrap().take();
        held.into_iter().flatten().for_each(|held| held.host.copy(held.layer, held.batch, held.on_copied));
    }

    /// Lets through one that stands there.
    pub fn let_one(&self) {
        let first = self.0.lock().unwrap().as_mut().map(|held| held.remove(0));
        first.into_iter().for_each(|held| held.host.copy(held.layer, held.batch, held.on_copied));
    }

    /// How many copies stand there.
    pub fn held(&self) -> usize {
        self.0.lock().unwrap().as_ref().map_or(0, Vec::len)
    }
}

/// Copies on the host, behind a gate.
#[derive(Debug)]
struct Gated {
    host: HostCopies,
    gate: Arc<Gate>,
}

#[derive(Debug)]
struct GatedJob {
    host: Arc<dyn Job>,
    gate: Arc<Gate>,
}

impl Copies for Gated {
    fn begin(&self, direction: Direction, is_awaited: bool, stream: u64) -> Result<Arc<dyn Job>, NotCopied> {
        let host = self.host.begin(direction, is_awaited, stream)?;
        Ok(Arc::new(GatedJob { host, gate: Arc::clone(&self.gate) }))
    }

    fn region(&self, layer: u32) -> Option<RegionId> {
        self.host.region(layer)
    }

    fn batches_max(&self, bytes: u64) -> usize {
        self.host.batches_max(bytes)
    }
}

impl Job for GatedJob {
    fn copy(&self, layer: u32, batch: Batch, on_copied: OnCopied) {
        let mut gate = self.gate.0.lock().unwrap();
        let host = Arc::clone(&self.host);
        match gate.as_mut() {
            Some(held) => held.push(Held { host, layer, batch, on_copied }),
            None => {
                drop(gate);
                host.copy(layer, batch, on_copied);
            }
        }
    }

    fn follow(&self, layer: u32, stream: u64) -> Result<bool, NotCopied> {
        self.host.follow(layer, stream)
    }
}

/// Layers and the streams that were to wait for them.
type Followed = Arc<Mutex<Vec<(u32, u64)>>>;

/// Copies as a GPU has them: the host cannot read the pages, and streams wait.
#[derive(Debug)]
struct Blind {
    host: HostCopies,
    followed: Followed,
}

#[derive(Debug)]
struct BlindJob {
    host: Arc<dyn Job>,
    followed: Followed,
}

impl Copies for Blind {
    fn begin(&self, direction: Direction, is_awaited: bool, stream: u64) -> Result<Arc<dyn Job>, NotCopied> {
        let host = self.host.begin(direction, is_awaited, stream)?;
        Ok(Arc::new(BlindJob { host, followed: Arc::clone(&self.followed) }))
    }

    fn region(&self, _layer: u32) -> Option<RegionId> {
        None
    }

    fn batches_max(&self, _bytes: u64) -> usize {
        2
    }
}

impl Job for BlindJob {
    fn copy(&self, layer: u32, batch: Batch, on_copied: OnCopied) {
        self.host.copy(layer, batch, on_copied);
    }

    fn follow(&self, layer: u32, stream: u64) -> Result<bool, NotCopied> {
        self.followed.lock().unwrap().push((layer, stream));
        Ok(true)
    }
}

/// Part of an engine: some heads of a model, in pages.
pub struct Engine {
    /// Closed before the memory goes.
    pub paged: PagedCache,
    pub memory: Vec<HostBuffer>,
    followed: Followed,
    heads: usize,
    first_head: usize,
    page_tokens: usize,
}

impl Engine {
    pub fn new(heads: usize, first_head: usize, page_tokens: usize, options: PagedOptions) -> Engine {
        Engine::open(heads, first_head, page_tokens, ALL_PAGES, |shape| {
            // SAFETY: the memory is dropped after the cache, which closes it.
            unsafe { PagedCache::on_host(shape, options) }
        })
    }

    fn with_copies(
        heads: usize,
        first_head: usize,
        page_tokens: usize,
        options: PagedOptions,
        copies: impl FnOnce(HostCopies) -> Arc<dyn Copies>,
    ) -> Engine {
        Engine::open(heads, first_head, page_tokens, ALL_PAGES, |shape| {
            PagedCache::open(shape, options, |mover, cache| {
                // SAFETY: the memory is dropped after the cache, which closes it.
                Ok(copies(unsafe { HostCopies::new(mover, cache, 1) }?))
            })
        })
    }

    fn open(
        heads: usize,
        first_head: usize,
        page_tokens: usize,
        kept_pages: u32,
        open: impl FnOnce(CacheShape) -> Result<PagedCache, NotOpened>,
    ) -> Engine {
        let page_bytes = heads * page_tokens * CELL;
        // Pages lie apart, so that what is written between them is seen.
        let stride = page_bytes + 8;
        let memory: Vec<HostBuffer> = (0..LAYERS).map(|_| HostBuffer::new(PAGES * stride)).collect();
        let layer = |memory: &HostBuffer| Layer {
            address: memory.as_ptr() as u64,
            pages: PAGES as u64,
            stride_bytes: stride as u64,
            page_bytes: page_bytes as u64,
            group: 0,
        };
        let group = Group { page_tokens: page_tokens as u32, heads: heads as u32, kept_pages };
        let shape = CacheShape::new(memory.iter().map(layer).collect(), vec![group], CHUNK_TOKENS).unwrap();
        let (paged, followed) = (open(shape).unwrap(), Arc::default());
        Engine { paged, memory, followed, heads, first_head, page_tokens }
    }

    /// Layers and the streams that were to wait for them.
    pub fn followed(&self) -> Vec<(u32, u64)> {
        self.followed.lock().unwrap().clone()
    }

    fn stride(&self) -> usize {
        self.heads * self.page_tokens * CELL + 8
    }

    /// Pages for so many tokens, in an order that is nobody's.
    pub fn blocks(&self, tokens: usize, seed: usize) -> Vec<i64> {
        (0..tokens.div_ceil(self.page_tokens)).map(|block| ((block * 11 + seed) % PAGES) as i64).collect()
    }

    pub fn tables(&self, blocks: &[i64], tokens: usize) -> PageTables {
        PageTables::new(self.paged.cache(), vec![blocks.to_vec()], tokens as u64, true).unwrap()
    }

    /// Where a cell is: layer, offset.
    fn cell(&self, blocks: &[i64], token: usize, head: usize) -> Option<usize> {
        let page = usize::try_from(blocks[token / self.page_tokens]).ok()?;
        Some(page * self.stride() + (head * self.page_tokens + token % self.page_tokens) * CELL)
    }

    /// Computes tokens: writes what is true, where they have a page.
    pub fn compute(&self, blocks: &[i64], tokens: usize) {
        for layer in 0..LAYERS {
            for token in 0..tokens {
                for head in 0..self.heads {
                    let Some(at) = self.cell(blocks, token, head) else { continue };
                    assert!(self.memory[layer].write(at, &truth(layer, token, self.first_head + head)));
                }
            }
        }
    }

    /// Whether tokens are what is true, where they have a page.
    pub fn is_true(&self, blocks: &[i64], tokens: std::ops::Range<usize>) -> bool {
        (0..LAYERS).all(|layer| self.is_layer_true(layer, blocks, tokens.clone()))
    }

    pub fn is_layer_true(&self, layer: usize, blocks: &[i64], mut tokens: std::ops::Range<usize>) -> bool {
        tokens.all(|token| {
            (0..self.heads).all(|head| {
                let Some(at) = self.cell(blocks, token, head) else { return true };
                let mut found = [0; CELL];
                assert!(self.memory[layer].read(at, &mut found));
                found == truth(layer, token, self.first_head + head)
            })
        })
    }

    /// Whether no page but these was ever written.
    pub fn is_clean_beside(&self, blocks: &[i64]) -> bool {
        let untouched = (0..PAGES).filter(|page| !blocks.contains(&(*page as i64)));
        let is_clean = |layer: &HostBuffer, page: usize| {
            let mut bytes = vec![0; self.stride()];
            layer.read(page * self.stride(), &mut bytes) && bytes.iter().all(|byte| *byte == 0)
        };
        untouched.into_iter().all(|page| self.memory.iter().all(|layer| is_clean(layer, page)))
    }

    pub fn begin_store(&self, job: u64, blocks: &[i64], tokens: usize, salt: u8) {
        let parts = vec![new_chunks(tokens, salt)];
        self.paged.store(job, parts, self.tables(blocks, tokens), 0).unwrap();
    }

    /// Computes and stores tokens.
    pub fn store(&self, job: u64, blocks: &[i64], tokens: usize, salt: u8) {
        self.compute(blocks, tokens);
        self.begin_store(job, blocks, tokens, salt);
        assert!(self.paged.wait_stored(&[job], Some(TIMEOUT)));
    }

    pub fn request(&self, job: u64, blocks: &[i64], tokens: usize, salt: u8, layerwise: bool) -> LoadRequest {
        let sources = vec![(ids(tokens, salt), Source::same(self.paged.cache()))];
        let tables = self.tables(blocks, tokens);
        LoadRequest {
            job,
            sources,
            tables,
            tokens: tokens as u64,
            layerwise,
            limit_us: 60_000_000,
            within: None,
            tenant: None,
        }
    }

    pub fn load(&self, request: LoadRequest) -> LoadEnd {
        let job = request.job;
        self.paged.load(request, 0).unwrap();
        self.end_of(job)
    }

    /// Loads all tokens of a request into these blocks, with every byte right.
    pub fn load_all(&self, request: LoadRequest, blocks: &[i64]) {
        let tokens = request.tokens;
        let end = self.load(request);
        assert_eq!((end.tokens, end.why), (tokens, None), "{:?}", self.paged.stats());
        assert!(self.is_true(blocks, 0..tokens as usize));
    }

    /// The end of the only load under way: ends of others would be lost.
    pub fn end_of(&self, job: u64) -> LoadEnd {
        assert!(self.paged.wait_loaded(&[job], Some(TIMEOUT)), "every load ends");
        let (mut loads, _) = self.paged.take_ended();
        assert!(loads.len() == 1 && loads[0].job == job, "loads {loads:?} ended, not {job} alone");
        loads.swap_remove(0)
    }
}

pub fn whole(first_there: u32, first_here: u32, heads: u32) -> HeadRange {
    HeadRange { first_there, first_here, heads }
}

/// What a cell must be. Never zeros.
pub fn truth(layer: usize, token: usize, head: usize) -> [u8; CELL] {
    let mut state = (layer * 7919 + token * 104_729 + head * 1_299_709 + 1) as u64;
    std::array::from_fn(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8 | 1
    })
}

/// The ids of the chunks of so many tokens, the last of which may be short.
pub fn ids(tokens: usize, salt: u8) -> Vec<ChunkId> {
    let namespace = NamespaceKey::from_bytes([salt; 32]);
    let all: Vec<u32> = (0..tokens as u32).collect();
    let mut ids = chunk_ids(&namespace, &all, CHUNK_TOKENS as usize);
    let tail = &all[ids.len() * CHUNK_TOKENS as usize..];
    if !tail.is_empty() {
        ids.push(ChunkId::derive(&namespace, ids.last(), tail));
    }
    ids
}

pub fn new_chunks(tokens: usize, salt: u8) -> Vec<NewChunk> {
    let ids = ids(tokens, salt);
    let chunk = |number: usize| NewChunk {
        id: ids[number],
        parent: number.checked_sub(1).map(|before| ids[before]),
        tokens: (tokens as u32 - number as u32 * CHUNK_TOKENS).min(CHUNK_TOKENS),
    };
    (0..ids.len()).map(chunk).collect()
}

/// Holes in a table.
pub fn without(blocks: &[i64], holes: &[usize]) -> Vec<i64> {
    let with_holes = |(number, block): (usize, &i64)| if holes.contains(&number) { NO_PAGE } else { *block };
    blocks.iter().enumerate().map(with_holes).collect()
}
