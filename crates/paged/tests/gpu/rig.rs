//! A node in this process, and caches on fake GPUs, each with a stream of its engine's.

use cuda_testkit::Fake;
use forebay_client::ClientOptions;
use forebay_cuda::device::{Device, DeviceMemory, HostMemory, Stream};
use forebay_kv::{ChunkId, NamespaceKey, chunk_ids};
use forebay_node::{Node, NodeConfig};
use forebay_paged::cache::{ALL_PAGES, CacheShape, Group, Layer};
use forebay_paged::direct::DirectOptions;
use forebay_paged::page_tables::PageTables;
use forebay_paged::pages::Source;
use forebay_paged::{LoadEnd, LoadRequest, NewChunk, PagedCache, PagedOptions, Verify};
use std::sync::Arc;
use std::time::Duration;

pub const LAYERS: usize = 3;
pub const PAGES: usize = 320;
pub const PAGE_BYTES: usize = 64 << 10;
pub const LAYER_BYTES: usize = PAGES * PAGE_BYTES;
pub const PAGE_TOKENS: usize = 16;
pub const CHUNK_TOKENS: usize = 64;
/// Most of the pages: a layer is so large that relays have a part in it.
pub const TOKENS: usize = 12 * CHUNK_TOKENS + 21;
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A folder, and a node's socket in it.
pub struct Site(tempfile::TempDir);

impl Site {
    pub fn new() -> Site {
        Site(tempfile::tempdir().unwrap())
    }

    pub fn socket(&self) -> std::path::PathBuf {
        self.0.path().join("node.sock")
    }

    pub fn node(&self) -> Node {
        let mut config = NodeConfig::new(self.socket(), 64 << 20);
        config.copy_threads = 1;
        Node::start(&config).unwrap()
    }

    pub fn engine(&self, fake: &Fake) -> Engine {
        self.rank(fake, &[])
    }

    /// An engine that hands over directly, under this name.
    pub fn direct(&self, fake: &Fake, name: &str) -> Engine {
        let direct = DirectOptions { name: name.into(), token: Vec::new() };
        let options = PagedOptions::new(ClientOptions::new(self.socket()));
        Engine::new(fake, PagedOptions { direct: Some(direct), ..options })
    }

    /// An engine that is one of several, on these GPUs.
    pub fn rank(&self, fake: &Fake, sibling_devices: &[u16]) -> Engine {
        let sibling_devices = sibling_devices.to_vec();
        Engine::new(fake, PagedOptions { sibling_devices, ..self.options() })
    }

    /// An engine that checks its bytes so.
    pub fn verifying(&self, fake: &Fake, verify: Verify) -> Engine {
        Engine::new(fake, PagedOptions { verify: Some(verify), ..self.options() })
    }

    fn options(&self) -> PagedOptions {
        // Every death of a node here is the end of a connection: no answer is merely late.
        let client = ClientOptions { answer_limit_us: 30_000_000, ..ClientOptions::new(self.socket()) };
        PagedOptions::new(client)
    }
}

/// An engine with a cache on GPU 0.
pub struct Engine {
    /// Closed before the memory goes.
    pub paged: PagedCache,
    pub stream: Stream,
    layers: Vec<DeviceMemory>,
    /// What kernels of the engine read and write beside: as long as a layer.
    pub scratch: Vec<DeviceMemory>,
    host: HostMemory,
    pub device: Arc<Device>,
}

impl Engine {
    fn new(fake: &Fake, options: PagedOptions) -> Engine {
        let device = Device::open(fake.driver, 0).unwrap();
        let memory =
            || (0..LAYERS).map(|_| DeviceMemory::new(&device, LAYER_BYTES as u64).unwrap()).collect();
        let (layers, scratch): (Vec<_>, Vec<_>) = (memory(), memory());
        let layer = |memory: &DeviceMemory| Layer {
            address: memory.address(),
            pages: PAGES as u64,
            stride_bytes: PAGE_BYTES as u64,
            page_bytes: PAGE_BYTES as u64,
            group: 0,
        };
        let group = Group { page_tokens: PAGE_TOKENS as u32, heads: 1, kept_pages: ALL_PAGES };
        let shape =
            CacheShape::new(layers.iter().map(layer).collect(), vec![group], CHUNK_TOKENS as u32).unwrap();
        // SAFETY: the memory is dropped after the cache, which closes it.
        let paged = unsafe { PagedCache::on_device(shape, 0, options) }.unwrap();
        let (stream, host) = (Stream::new(&device).unwrap(), HostMemory::new(&device, LAYER_BYTES).unwrap());
        Engine { paged, stream, layers, scratch, host, device }
    }

    pub fn handle(&self) -> u64 {
        self.stream.handle() as u64
    }

    /// A kernel of the engine's: copies a layer into another one.
    pub fn kernel(&self, from: &DeviceMemory, to: &DeviceMemory) {
        let _current = self.device.enter().unwrap();
        // SAFETY: both are as long as a layer, and outlive the stream's work.
        unsafe { self.stream.copy(from.address(), to.address(), LAYER_BYTES as u64).unwrap() };
    }

    pub fn layer(&self, layer: usize) -> &DeviceMemory {
        &self.layers[layer]
    }

    /// Writes what is true after `seed`, and waits.
    pub fn write(&self, memory: &DeviceMemory, layer: usize, seed: u64) {
        let bytes: Vec<u8> = (0..PAGES).flat_map(|page| truth(layer, page, seed)).collect();
        self.write_all(memory, &bytes);
    }

    pub fn write_all(&self, memory: &DeviceMemory, bytes: &[u8]) {
        let _current = self.device.enter().unwrap();
        self.stream.synchronize().unwrap();
        // SAFETY: as long as a layer; nobody else uses this memory of the host's.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host.start(), LAYER_BYTES);
            self.stream.copy(self.host.start() as u64, memory.address(), LAYER_BYTES as u64).unwrap();
        }
        self.stream.synchronize().unwrap();
    }

    pub fn read(&self, memory: &DeviceMemory) -> Vec<u8> {
        let _current = self.device.enter().unwrap();
        // SAFETY: as above.
        unsafe {
            self.stream.copy(memory.address(), self.host.start() as u64, LAYER_BYTES as u64).unwrap();
            self.stream.synchronize().unwrap();
            std::slice::from_raw_parts(self.host.start(), LAYER_BYTES).to_vec()
        }
    }

    pub fn tables(&self, blocks: &[i64]) -> PageTables {
        PageTables::new(self.paged.cache(), vec![blocks.to_vec()], TOKENS as u64, true).unwrap()
    }

    pub fn begin_store(&self, job: u64, blocks: &[i64], salt: u8) {
        assert!(self.try_store(job, blocks, salt));
    }

    /// Begins a store, unless the driver refuses even that.
    pub fn try_store(&self, job: u64, blocks: &[i64], salt: u8) -> bool {
        self.paged.store(job, vec![new_chunks(salt)], self.tables(blocks), self.handle()).is_ok()
    }

    /// Stores pages of `seed`.
    pub fn store(&self, job: u64, blocks: &[i64], salt: u8, seed: u64) {
        (0..LAYERS).for_each(|layer| self.write(&self.layers[layer], layer, seed));
        self.begin_store(job, blocks, salt);
        assert!(self.paged.wait_stored(&[job], Some(TIMEOUT)), "every store ends");
    }

    pub fn begin_load(&self, job: u64, blocks: &[i64], salt: u8, layerwise: bool) {
        assert!(self.try_load(job, blocks, salt, layerwise));
    }

    /// Begins a load, unless the driver refuses even that.
    pub fn try_load(&self, job: u64, blocks: &[i64], salt: u8, layerwise: bool) -> bool {
        self.try_load_from(Source::same(self.paged.cache()), job, blocks, salt, layerwise)
    }

    /// The same of a storer that may have other pages.
    pub fn try_load_from(&self, source: Source, job: u64, blocks: &[i64], salt: u8, layerwise: bool) -> bool {
        let (sources, tables, tokens) = (vec![(ids(salt), source)], self.tables(blocks), TOKENS as u64);
        let request = LoadRequest {
            job,
            sources,
            tables,
            tokens,
            layerwise,
            limit_us: 60_000_000,
            within: None,
            tenant: None,
        };
        self.paged.load(request, self.handle()).is_ok()
    }

    /// Begins to load the first chunk alone, in the background.
    pub fn begin_chunk(&self, job: u64, pages: &[i64], salt: u8) {
        let (cache, tokens) = (self.paged.cache(), CHUNK_TOKENS as u64);
        let sources = vec![(ids(salt)[..1].to_vec(), Source::same(cache))];
        let tables = PageTables::new(cache, vec![pages.to_vec()], tokens, true).unwrap();
        let request = LoadRequest {
            job,
            sources,
            tables,
            tokens,
            layerwise: false,
            limit_us: 60_000_000,
            within: None,
            tenant: None,
        };
        self.paged.load(request, self.handle()).unwrap();
    }

    /// The end of the only load under way: ends of others would be lost.
    pub fn end_of(&self, job: u64) -> LoadEnd {
        assert!(self.paged.wait_loaded(&[job], Some(TIMEOUT)), "every load ends");
        let (mut loads, _) = self.paged.take_ended();
        assert!(loads.len() == 1 && loads[0].job == job, "loads {loads:?} ended, not {job} alone");
        loads.swap_remove(0)
    }

    /// Whether `found`, a layer's bytes, has in `blocks` what was stored from `from`, for so many
    /// tokens.
    pub fn is_true(
        &self,
        layer: usize,
        found: &[u8],
        blocks: &[i64],
        from: &[i64],
        seed: u64,
        tokens: usize,
    ) -> bool {
        blocks.iter().zip(from).take(tokens.div_ceil(PAGE_TOKENS)).all(|(block, from)| {
            let at = *block as usize * PAGE_BYTES;
            found[at..at + PAGE_BYTES] == truth(layer, *from as usize, seed)
        })
    }

    /// Whether all layers have it.
    pub fn has(&self, blocks: &[i64], from: &[i64], seed: u64, tokens: usize) -> bool {
        (0..LAYERS)
            .all(|layer| self.is_true(layer, &self.read(&self.layers[layer]), blocks, from, seed, tokens))
    }
}

/// Pages for all tokens, in an order that is nobody's.
pub fn blocks(seed: usize) -> Vec<i64> {
    (0..TOKENS.div_ceil(PAGE_TOKENS)).map(|block| ((block * 11 + seed) % PAGES) as i64).collect()
}

/// What a page has, of a layer, after `seed`.
pub fn truth(layer: usize, page: usize, seed: u64) -> Vec<u8> {
    let first = (layer * PAGES + page) as u64 ^ seed << 32;
    let word = |at: u64| (first << 20 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).to_le_bytes();
    (0..PAGE_BYTES as u64 / 8).flat_map(word).collect()
}

pub fn ids(salt: u8) -> Vec<ChunkId> {
    let namespace = NamespaceKey::from_bytes([salt; 32]);
    let all: Vec<u32> = (0..TOKENS as u32).collect();
    let mut ids = chunk_ids(&namespace, &all, CHUNK_TOKENS);
    ids.push(ChunkId::derive(&namespace, ids.last(), &all[ids.len() * CHUNK_TOKENS..]));
    ids
}

fn new_chunks(salt: u8) -> Vec<NewChunk> {
    let ids = ids(salt);
    let chunk = |(nth, id): (usize, &ChunkId)| NewChunk {
        id: *id,
        parent: nth.checked_sub(1).map(|before| ids[before]),
        tokens: CHUNK_TOKENS.min(TOKENS - nth * CHUNK_TOKENS) as u32,
    };
    ids.iter().enumerate().map(chunk).collect()
}
