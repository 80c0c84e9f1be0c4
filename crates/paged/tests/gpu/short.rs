//! What a layer of a short prompt costs the engine's thread, over one link and over two: calls of
//! the driver, and time in which it waits for other threads.

use crate::rig::{CHUNK_TOKENS, PAGE_BYTES, PAGE_TOKENS, Site, TIMEOUT};
use cuda_testkit::{Fake, alone};
use forebay_client::ClientOptions;
use forebay_cuda::device::{Device, DeviceMemory, Stream};
use forebay_kv::{ChunkId, NamespaceKey, chunk_ids};
use forebay_node::{Node, NodeConfig};
use forebay_paged::cache::{ALL_PAGES, CacheShape, Group, Layer};
use forebay_paged::page_tables::PageTables;
use forebay_paged::pages::Source;
use forebay_paged::{LoadRequest, NewChunk, PagedCache, PagedOptions};
use std::sync::Arc;
use std::time::Duration;

const TWO: [(&str, &str); 2] = [("FAKE_CUDA_GPUS", "2"), ("XDG_CACHE_HOME", "/nonexistent")];
const LAYERS: u32 = 4;
/// 4 KiB of each layer a token, as Llama-3.1-8B has it.
const TOKENS_MAX: usize = 8192;
/// Of the driver, for a layer that is queued when the engine comes to it.
const CALLS_MAX: u64 = 8;
/// For one that its own thread has to queue.
const FIRST_CALLS_MAX: u64 = 40;

/// An engine with a cache that holds 8k tokens.
struct Engine {
    /// Closed before the memory goes.
    paged: PagedCache,
    stream: Stream,
    _layers: Vec<DeviceMemory>,
    device: Arc<Device>,
    _node: Node,
    _site: Site,
}

impl Engine {
    /// Over one link: the other GPU is said to be a sibling's.
    fn new(fake: &Fake, links: u16) -> Engine {
        let (site, device) = (Site::new(), Device::open(fake.driver, 0).unwrap());
        let node = Node::start(&NodeConfig::new(site.socket(), 192 << 20)).unwrap();
        let pages = TOKENS_MAX / PAGE_TOKENS;
        let memory = || DeviceMemory::new(&device, (pages * PAGE_BYTES) as u64).unwrap();
        let layers: Vec<_> = (0..LAYERS).map(|_| memory()).collect();
        let layer = |memory: &DeviceMemory| Layer {
            address: memory.address(),
            pages: pages as u64,
            stride_bytes: PAGE_BYTES as u64,
            page_bytes: PAGE_BYTES as u64,
            group: 0,
        };
        let group = Group { page_tokens: PAGE_TOKENS as u32, heads: 1, kept_pages: ALL_PAGES };
        let layers_at = layers.iter().map(layer).collect();
        let shape = CacheShape::new(layers_at, vec![group], CHUNK_TOKENS as u32).unwrap();
        let client = ClientOptions { answer_limit_us: 30_000_000, ..ClientOptions::new(site.socket()) };
        let sibling_devices = if links == 1 { vec![0, 1] } else { vec![] };
        let options = PagedOptions { sibling_devices, ..PagedOptions::new(client) };
        // SAFETY: the memory is dropped after the cache, which closes it.
        let paged = unsafe { PagedCache::on_device(shape, 0, options) }.unwrap();
        let stream = Stream::new(&device).unwrap();
        let engine = Engine { paged, stream, _layers: layers, device, _node: node, _site: site };
        engine.store();
        engine
    }

    fn handle(&self) -> u64 {
        self.stream.handle() as u64
    }

    fn tables(&self, tokens: usize) -> PageTables {
        let blocks = (0..tokens / PAGE_TOKENS).map(|block| block as i64).collect();
        PageTables::new(self.paged.cache(), vec![blocks], tokens as u64, true).unwrap()
    }

    fn store(&self) {
        let ids = ids(TOKENS_MAX);
        let chunk = |(nth, id): (usize, &ChunkId)| NewChunk {
            id: *id,
            parent: nth.checked_sub(1).map(|before| ids[before]),
            tokens: CHUNK_TOKENS as u32,
        };
        let chunks = ids.iter().enumerate().map(chunk).collect();
        self.paged.store(1, vec![chunks], self.tables(TOKENS_MAX), self.handle()).unwrap();
        assert!(self.paged.wait_stored(&[1], Some(TIMEOUT)), "every store ends");
        self.paged.take_ended();
    }

    fn load(&self, tokens: usize) {
        let sources = vec![(ids(tokens), Source::same(self.paged.cache()))];
        let (tables, limit_us) = (self.tables(tokens), 60_000_000);
        let request = LoadRequest {
            job: 2,
            sources,
            tables,
            tokens: tokens as u64,
            layerwise: true,
            limit_us,
            within: None,
            tenant: None,
        };
        self.paged.load(request, self.handle()).unwrap();
    }

    /// Comes to each layer; the calls of the driver that this thread makes for it.
    fn calls(&self, fake: &Fake) -> Vec<u64> {
        let calls = |layer| {
            let before = fake.stat("calls");
            self.paged.wait_layer(layer, self.handle()).unwrap();
            fake.stat("calls") - before
        };
        (0..LAYERS).map(calls).collect()
    }

    fn end(&self, tokens: usize) {
        assert!(self.paged.wait_loaded(&[2], Some(TIMEOUT)), "every load ends");
        assert_eq!(self.paged.take_ended().0[0].tokens, tokens as u64);
    }
}

fn ids(tokens: usize) -> Vec<ChunkId> {
    let all: Vec<u32> = (0..tokens as u32).collect();
    chunk_ids(&NamespaceKey::from_bytes([1; 32]), &all, CHUNK_TOKENS)
}

#[test]
fn a_short_load_queues_no_more_calls_with_two_links_than_with_one() {
    let test = "short::a_short_load_queues_no_more_calls_with_two_links_than_with_one";
    alone(test, &TWO, |fake| {
        for tokens in [1024, 4096, 8192] {
            let [one, two] = [1, 2].map(|links| {
                let engine = Engine::new(fake, links);
                fake.control("freeze h2d.0; freeze h2d.1; freeze compute.0; freeze compute.1");
                engine.load(tokens);
                // By then all of it is queued, and none of it is over.
                std::thread::sleep(Duration::from_millis(500));
                let calls = engine.calls(fake);
                fake.control("release h2d.0; release h2d.1; release compute.0; release compute.1");
                engine.end(tokens);
                calls
            });
            assert_eq!(one, two, "{tokens} tokens");
            assert!(one.iter().all(|calls| *calls <= CALLS_MAX), "{one:?} calls for {tokens} tokens");
        }
    });
}

#[test]
fn the_engines_thread_queues_no_layer_but_the_one_that_it_needs() {
    let test = "short::the_engines_thread_queues_no_layer_but_the_one_that_it_needs";
    alone(test, &TWO, |fake| {
        let engines = [1, 2].map(|links| Engine::new(fake, links));
        let calls = engines.each_ref().map(|engine| {
            // The engine's stream has not come to where the load begins.
            let held = DeviceMemory::new(&engine.device, 4096).unwrap();
            fake.control("freeze p2p.0");
            let current = engine.device.enter().unwrap();
            // SAFETY: the memory outlives the stream's work.
            unsafe { engine.stream.copy(held.address(), held.address() + 2048, 2048).unwrap() };
            drop(current);
            engine.load(1024);
            std::thread::sleep(Duration::from_millis(300));
            let before = fake.stat("calls");
            engine.paged.wait_layer(0, engine.handle()).unwrap();
            let first = fake.stat("calls") - before;
            std::thread::sleep(Duration::from_millis(300));
            let rest = engine.calls(fake).split_off(1);
            fake.control("release p2p.0");
            engine.end(1024);
            engine.stream.synchronize().unwrap();
            (first, rest)
        });
        assert_eq!(calls[0], calls[1], "with one link and with two");
        assert!(calls[0].0 <= FIRST_CALLS_MAX, "{calls:?}");
        assert!(calls[0].1.iter().all(|calls| *calls <= CALLS_MAX), "{calls:?}");
    });
}
