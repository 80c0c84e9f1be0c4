//! A node in a process of its own, which sees all GPUs, and an engine that sees one.

use cuda_testkit::Fake;
use forebay_client::ClientOptions;
use forebay_cuda::device::{Device, DeviceMemory, HostMemory, Stream};
use forebay_cuda::remote::{NodeRelays, RelaysAt};
use forebay_kv::{ChunkId, NamespaceKey, chunk_ids};
use forebay_node::{Node, NodeConfig, RelaysConfig};
use forebay_paged::cache::{ALL_PAGES, CacheShape, Group, Layer};
use forebay_paged::page_tables::PageTables;
use forebay_paged::pages::Source;
use forebay_paged::{LoadEnd, LoadRequest, NewChunk, PagedCache, PagedOptions};
use forebay_transfer::Backing;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use testkit::eventually;

pub const TIMEOUT: Duration = Duration::from_secs(60);
pub const PAGE_BYTES: usize = 64 << 10;
const PAGE_TOKENS: usize = 16;
const CHUNK_TOKENS: usize = 64;
const ROLE: &str = "FOREBAY_TEST_ROLE";
const FOLDER: &str = "FOREBAY_TEST_FOLDER";

/// The folder of a process that was started to play a role.
pub fn folder_of(role: &str) -> Option<PathBuf> {
    let is_asked = std::env::var(ROLE).is_ok_and(|asked| asked == role);
    is_asked.then(|| PathBuf::from(std::env::var(FOLDER).unwrap()))
}

/// This binary again, as the test of this name, which ends with this process.
pub fn play(role: &str, folder: &Path, gpus: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([role, "--exact", "--nocapture"]).env(ROLE, role).env(FOLDER, folder);
    command.env("CUDA_VISIBLE_DEVICES", gpus).stdin(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: the call is one that may be made between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

/// Sockets of a node in a folder.
fn sockets(folder: &Path) -> (PathBuf, PathBuf) {
    (folder.join("node.sock"), folder.join("relays.sock"))
}

/// Plays the node: does what each line of its input asks for, and answers with a line.
pub fn play_node(folder: &Path) {
    let (socket, relays) = sockets(folder);
    let config = NodeConfig::new(socket, 256 << 20);
    let config = NodeConfig { relays: Some(RelaysConfig::new(relays)), copy_threads: 1, ..config };
    let node = Node::start(&config).unwrap();
    println!("\nREADY");
    for line in std::io::stdin().lines() {
        match line.unwrap().split(' ').collect::<Vec<_>>()[..] {
            ["relays"] => {
                let stat = node.relays_stat().unwrap();
                println!("{} {} {}", stat.engines, stat.staging_bytes, stat.requests);
            }
            ["carried", gpu] => println!("{}", stat(&format!("bytes.h2d.{gpu}"))),
            ["registrations"] => println!("{}", stat("cuMemHostRegister_v2")),
            ["flip", offset] => {
                let arena = node.store().arena_memory();
                // SAFETY: inside of the arena, which the node has as long as it lives.
                unsafe { *arena.as_ptr().add(offset.parse().unwrap()) ^= 1 };
                println!("done");
            }
            ref other => panic!("{other:?}"),
        }
    }
}

fn stat(name: &str) -> u64 {
    Fake { driver: forebay_cuda::driver::Driver::load().unwrap() }.stat(name)
}

pub struct NodeProcess {
    child: Child,
    asks: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl NodeProcess {
    /// It sees the GPUs in another order than they have.
    pub fn start(folder: &Path) -> NodeProcess {
        let mut child = play("node", folder, "3,2,1,0").spawn().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(answers.any(|line| line.unwrap() == "READY"), "the node did not start");
        NodeProcess { asks: child.stdin.take().unwrap(), answers, child }
    }

    pub fn ask(&mut self, what: &str) -> Vec<u64> {
        writeln!(self.asks, "{what}").unwrap();
        let answer = self.answers.next().unwrap().unwrap();
        answer.split(' ').filter_map(|word| word.parse().ok()).collect()
    }

    /// Engines that are attached, their staging, and what they have asked for.
    pub fn relays(&mut self) -> [u64; 3] {
        self.ask("relays").try_into().unwrap()
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the process is a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id().try_into().unwrap(), signal) }, 0);
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An engine with a cache of two layers on the one GPU that it sees.
pub struct Engine {
    /// Closed before the memory goes.
    pub paged: PagedCache,
    pub stream: Stream,
    layers: Vec<DeviceMemory>,
    /// What kernels of the engine write: as long as a layer.
    pub scratch: DeviceMemory,
    host: HostMemory,
    device: Arc<Device>,
    pages: usize,
}

pub const LAYERS: usize = 2;

impl Engine {
    /// With so many pages in each layer, which one sequence fills.
    pub fn open(fake: &Fake, folder: &Path, pages: usize) -> Engine {
        Engine::beside(fake, folder, pages, &[])
    }

    /// The same beside other ranks of an engine, on these GPUs.
    pub fn beside(fake: &Fake, folder: &Path, pages: usize, siblings: &[u16]) -> Engine {
        let (device, bytes) = (Device::open(fake.driver, 0).unwrap(), pages * PAGE_BYTES);
        let memory = || DeviceMemory::new(&device, bytes as u64).unwrap();
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
        let (socket, relays) = sockets(folder);
        let client = ClientOptions { answer_limit_us: 30_000_000, ..ClientOptions::new(socket) };
        let relays = NodeRelays::At(RelaysAt { socket: relays, token: String::new() });
        let sibling_devices = siblings.to_vec();
        let options = PagedOptions { relays, sibling_devices, ..PagedOptions::new(client) };
        // SAFETY: the memory is dropped after the cache, which closes it.
        let paged = unsafe { PagedCache::on_device(shape, 0, options) }.unwrap();
        let (stream, host) = (Stream::new(&device).unwrap(), HostMemory::new(&device, bytes).unwrap());
        Engine { paged, stream, scratch: memory(), layers, host, device, pages }
    }

    pub fn tokens(&self) -> u64 {
        (self.pages * PAGE_TOKENS) as u64
    }

    pub fn layer_bytes(&self) -> u64 {
        (self.pages * PAGE_BYTES) as u64
    }

    pub fn handle(&self) -> u64 {
        self.stream.handle() as u64
    }

    /// Waits until the node's relays reach the arena.
    pub fn wait_attached(&self) {
        eventually("the node relays", || self.paged.stats().relays == 3);
    }

    /// Pages in an order that is nobody's.
    fn blocks(&self, seed: usize) -> Vec<i64> {
        (0..self.pages).map(|block| ((block * 11 + seed) % self.pages) as i64).collect()
    }

    fn tables(&self, seed: usize) -> PageTables {
        PageTables::new(self.paged.cache(), vec![self.blocks(seed)], self.tokens(), true).unwrap()
    }

    fn copy(&self, from: u64, to: u64) {
        let _current = self.device.enter().unwrap();
        // SAFETY: both are as long as a layer, and this waits.
        unsafe { self.stream.copy(from, to, self.layer_bytes()).unwrap() };
        self.stream.synchronize().unwrap();
    }

    /// A kernel of the engine's: copies a layer elsewhere, in the engine's stream.
    pub fn use_layer(&self, layer: usize) {
        let _current = self.device.enter().unwrap();
        // SAFETY: both are as long as a layer, and outlive the stream's work.
        unsafe { self.stream.copy(self.layers[layer].address(), self.scratch.address(), self.layer_bytes()) }
            .unwrap();
    }

    /// Has the node keep a sequence, which nothing here holds any more when this returns.
    pub fn store(&self, salt: u8) {
        for layer in 0..LAYERS {
            for (block, page) in self.blocks(0).into_iter().enumerate() {
                self.host_page(page as usize).copy_from_slice(&truth(layer, block, salt));
            }
            self.copy(self.host.start() as u64, self.layers[layer].address());
        }
        let ids = self.ids(salt);
        let chunk = |(nth, id): (usize, &ChunkId)| NewChunk {
            id: *id,
            parent: nth.checked_sub(1).map(|before| ids[before]),
            tokens: CHUNK_TOKENS as u32,
        };
        let chunks = ids.iter().enumerate().map(chunk).collect();
        self.paged.store(1, vec![chunks], self.tables(0), self.handle()).unwrap();
        assert!(self.paged.wait_stored(&[1], Some(TIMEOUT)), "every store ends");
        let (_, stored) = self.paged.take_ended();
        assert!(stored[0].missing.is_empty(), "{stored:?}");
        self.clear();
    }

    pub fn clear(&self) {
        // SAFETY: the memory is this engine's, and nothing uses it now.
        unsafe { self.host.start().write_bytes(0, self.layer_bytes() as usize) };
        self.layers.iter().for_each(|layer| self.copy(self.host.start() as u64, layer.address()));
    }

    fn ids(&self, salt: u8) -> Vec<ChunkId> {
        let all: Vec<u32> = (0..self.tokens() as u32).collect();
        chunk_ids(&NamespaceKey::from_bytes([salt; 32]), &all, CHUNK_TOKENS)
    }

    #[expect(clippy::mut_from_ref, reason = "memory of the host's that one thread uses")]
    fn host_page(&self, page: usize) -> &mut [u8] {
        // SAFETY: as long as a layer, and nothing copies it while this is held.
        unsafe { std::slice::from_raw_parts_mut(self.host.start().add(page * PAGE_BYTES), PAGE_BYTES) }
    }

    pub fn begin_load(&self, job: u64, salt: u8, layerwise: bool) {
        let (sources, tables) = (vec![(self.ids(salt), Source::same(self.paged.cache()))], self.tables(5));
        let request = LoadRequest {
            job,
            sources,
            tables,
            tokens: self.tokens(),
            layerwise,
            limit_us: 60_000_000,
            within: None,
            tenant: None,
        };
        self.paged.load(request, self.handle()).unwrap();
    }

    pub fn end_of(&self, job: u64) -> LoadEnd {
        assert!(self.paged.wait_loaded(&[job], Some(TIMEOUT)), "every load ends");
        let (mut loads, _) = self.paged.take_ended();
        assert!(loads.len() == 1 && loads[0].job == job, "loads {loads:?} ended, not {job} alone");
        loads.swap_remove(0)
    }

    /// Panics if a token that may be used has a wrong byte.
    pub fn check(&self, salt: u8, tokens: u64) {
        (0..LAYERS).for_each(|layer| self.check_in(self.layers[layer].address(), layer, salt, tokens));
    }

    /// The same of a layer that was copied elsewhere.
    pub fn check_in(&self, address: u64, layer: usize, salt: u8, tokens: u64) {
        self.copy(address, self.host.start() as u64);
        for (block, page) in self.blocks(5).into_iter().enumerate().take(tokens as usize / PAGE_TOKENS) {
            assert!(
                *self.host_page(page as usize) == truth(layer, block, salt),
                "layer {layer}, block {block}: a wrong byte"
            );
        }
    }

    /// What all pages hold now.
    pub fn bytes(&self) -> Vec<Vec<u8>> {
        let read = |layer: &DeviceMemory| {
            self.copy(layer.address(), self.host.start() as u64);
            (0..self.pages).flat_map(|page| self.host_page(page).to_vec()).collect()
        };
        self.layers.iter().map(read).collect()
    }

    pub fn relayed(&self) -> u64 {
        self.paged.stats().bytes_relayed
    }
}

/// What a page of a block has.
fn truth(layer: usize, block: usize, salt: u8) -> Vec<u8> {
    let first = ((layer as u64) << 32 | block as u64) << 8 | u64::from(salt);
    let word = |at: u64| (first << 16 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..PAGE_BYTES as u64 / 8).flat_map(word).collect()
}
