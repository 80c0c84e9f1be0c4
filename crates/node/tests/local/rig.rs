//! Nodes and clients, in this process and in children of it. A child is this test program again,
//! told by its environment what to be. Each program of tests uses a part of it.
#![allow(dead_code)]

use forebay_client::{Client, ClientOptions, ConnectError, Lease, NotLoaded};
use forebay_kv::ChunkId;
use forebay_node::{Node, NodeConfig};
use forebay_store::{NotVerified, StoreEnd, TenantId};
use forebay_transfer::HostLink;
use forebay_transfer::{
    Backing, Class, Completion, End, HostBuffer, Limits, Link, LinkOp, LinkSpec, Memory, MoverHandle,
    MoverThread, PathSpec, Place, RegionId, Span,
};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use testkit::ended;

pub const LAYERS: usize = 3;
/// Not a multiple of anything.
pub const LAYER_BYTES: u64 = 20_011;
pub const CHUNK_BYTES: u64 = LAYERS as u64 * LAYER_BYTES;
pub const CHUNKS: usize = 8;
pub const MINUTE_US: u64 = 60_000_000;
/// Says to a child what to be.
const ROLE: &str = "FOREBAY_TEST_ROLE";
const SOCKET: &str = "FOREBAY_TEST_SOCKET";

/// A client with a mover of its own, and room for chunks to store from and as many to load to.
pub struct Peer {
    pub client: Client,
    pub device: Arc<HostBuffer>,
    region: RegionId,

    _mover: MoverThread,
}

/// Patience for whatever needs processors.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// With more patience than tests have: what a client finds, it does not find by a node's silence.
pub fn options(socket: &Path) -> ClientOptions {
    ClientOptions { answer_limit_us: 10 * MINUTE_US, ..ClientOptions::new(socket) }
}

pub fn connect(options: ClientOptions) -> Result<Peer, ConnectError> {
    connect_by(options, Client::connect)
}

/// Connects as `connect` does.
pub fn connect_by(
    options: ClientOptions,
    connect: impl FnOnce(&MoverHandle, Place, ClientOptions) -> Result<Client, ConnectError>,
) -> Result<Peer, ConnectError> {
    connect_over(Box::new(HostLink::new(1).unwrap()), options, connect)
}

/// Connects so, and copies over `link`.
fn connect_over(
    link: Box<dyn Link>,
    options: ClientOptions,
    connect: impl FnOnce(&MoverHandle, Place, ClientOptions) -> Result<Client, ConnectError>,
) -> Result<Peer, ConnectError> {
    let (host, gpu) = (Place::Host(0), Place::Device(0));
    let mover = MoverThread::spawn(Limits::default()).unwrap();
    let handle = mover.handle();
    let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), link).unwrap();
    handle.add_path(PathSpec::direct(host, gpu, link)).unwrap().unwrap();
    handle.add_path(PathSpec::direct(gpu, host, link)).unwrap().unwrap();
    let device = Arc::new(HostBuffer::new(2 * CHUNKS * CHUNK_BYTES as usize));
    let region = handle.register(gpu, device.clone()).unwrap();
    let client = connect(&handle, host, options)?;
    Ok(Peer { client, device, region, _mover: mover })
}

/// A link that begins copies and ends none. What it has begun comes out at the other end.
struct Stuck(Sender<Completion>);

impl Link for Stuck {
    fn start(&mut self, _: LinkOp, _: &Arc<Memory>, done: Completion) {
        self.0.send(done).unwrap();
    }
}

/// A client whose copies begin and never end.
pub fn connect_stuck(options: ClientOptions) -> (Peer, Receiver<Completion>) {
    let (sender, begun) = channel();
    (connect_over(Box::new(Stuck(sender)), options, Client::connect).unwrap(), begun)
}

impl Peer {
    /// The layers of chunk `number`, each as two spans in another order than they lie.
    fn spans(&self, number: usize) -> Vec<Vec<Span>> {
        let span = |layer: u64, from: u64, to: u64| {
            Span::new(self.region, number as u64 * CHUNK_BYTES + layer * LAYER_BYTES + from, to - from)
        };
        let layer = |layer| vec![span(layer, 9000, LAYER_BYTES), span(layer, 0, 9000)];
        (0..LAYERS as u64).map(layer).collect()
    }

    pub fn begin_store(&self, number: usize) -> Receiver<StoreEnd> {
        assert!(self.device.write(number * CHUNK_BYTES as usize, &truth(number)));
        let (sender, receiver) = channel();
        let parent = number.checked_sub(1).map(id);
        let on_end = move |end| drop(sender.send(end));
        self.client.store_chunk(id(number), parent, &self.spans(number), Class::WriteBack, on_end).unwrap();
        receiver
    }

    pub fn store(&self, number: usize) -> StoreEnd {
        ended(&self.begin_store(number))
    }

    pub fn lease(&self) -> Lease {
        self.client.lease(&ids(), MINUTE_US)
    }

    pub fn begin_load(&self, lease: &Lease, number: usize) -> Result<Receiver<End>, NotLoaded> {
        let (sender, receiver) = channel();
        let targets = self.spans(CHUNKS + number);
        let on_end = move |end| drop(sender.send(end));
        self.client.load_chunk(lease, number, &targets, Class::Demand, None, on_end)?;
        Ok(receiver)
    }

    /// Loads a chunk and verifies it. Says whether it is a hit, and sees that no hit is wrong.
    pub fn hit(&self, lease: &Lease, number: usize) -> bool {
        let Ok(receiver) = self.begin_load(lease, number) else { return false };
        let done = matches!(ended(&receiver), End::Done { bytes: CHUNK_BYTES });
        let hit = done && self.verify(lease, number).is_ok();
        assert!(!hit || self.loaded(number) == truth(number), "a hit with wrong bytes");
        hit
    }

    pub fn verify(&self, lease: &Lease, number: usize) -> Result<(), NotVerified> {
        let bytes = self.loaded(number);
        for (layer, bytes) in bytes.chunks(LAYER_BYTES as usize).enumerate() {
            self.client.verify(lease, number, layer, &[&bytes[9000..], &bytes[..9000]])?;
        }
        Ok(())
    }

    fn loaded(&self, number: usize) -> Vec<u8> {
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        assert!(self.device.read((CHUNKS + number) * CHUNK_BYTES as usize, &mut bytes));
        bytes
    }
}

/// A client whose mover ends before it, and memory to store from.
pub struct Writer {
    pub client: Client,
    pub mover: MoverThread,
    pub source: Arc<HostBuffer>,
    pub region: RegionId,
}

impl Writer {
    pub fn new(site: &Site, bytes: usize) -> Writer {
        let host = Place::Host(0);
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let handle = mover.handle();
        let link =
            handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(1).unwrap())).unwrap();
        handle.add_path(PathSpec::direct(host, host, link)).unwrap().unwrap();
        let source = Arc::new(HostBuffer::new(bytes));
        let region = handle.register(host, source.clone()).unwrap();
        let client = Client::connect(&handle, host, options(&site.socket())).unwrap();
        Writer { client, mover, source, region }
    }
}

pub fn id(number: usize) -> ChunkId {
    ChunkId::from_bytes([number as u8 + 1; 32])
}

pub fn ids() -> Vec<ChunkId> {
    (0..CHUNKS).map(id).collect()
}

pub fn truth(number: usize) -> Vec<u8> {
    let word = |at: usize| (at as u32 + 1).wrapping_mul(2_654_435_761 + number as u32).to_le_bytes()[2];
    (0..CHUNK_BYTES as usize).map(word).collect()
}

/// Turns a bit of a chunk as it lies in the arena of a node in this process.
pub fn corrupt(node: &Node, number: usize, at: usize) {
    let loan = node.store().read_guard_by_id(TenantId(0), &id(number)).unwrap();
    let arena = node.store().arena_memory();
    // SAFETY: inside of the arena, which lives as long as the node; nobody else writes the chunk
    // now.
    unsafe { *arena.as_ptr().add(loan.offset_bytes() as usize + at) ^= 1 };
}

/// A small node behind this socket. Where there is a configuration beside the socket, that one.
pub fn config(socket: &Path) -> NodeConfig {
    let file = socket.with_file_name("node.toml");
    if file.exists() {
        return NodeConfig::read(&file).unwrap();
    }
    let mut config = NodeConfig::new(socket, 16 << 20);
    config.copy_threads = 1;
    config
}

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

    pub fn config(&self) -> NodeConfig {
        config(&self.socket())
    }

    pub fn node(&self) -> Node {
        Node::start(&self.config()).unwrap()
    }

    pub fn peer(&self) -> Peer {
        connect(options(&self.socket())).unwrap()
    }

    /// A child with a role, which has said that it is ready.
    pub fn child(&self, role: &str) -> Process {
        self.child_by(Command::new(std::env::current_exe().unwrap()), role)
    }

    /// The same in a process namespace of its own, where it sees no other process. Nothing, loudly,
    /// where none can be made.
    pub fn child_apart(&self, role: &str) -> Option<Process> {
        let apart = |program: &Path| {
            let mut command = Command::new("unshare");
            command.args(["-Urpf", "--kill-child"]).arg(program);
            command
        };
        if !apart(Path::new("true")).output().is_ok_and(|output| output.status.success()) {
            testkit::skipped("no process namespace can be made here; this test needs `unshare -Urpf`");
            return None;
        }
        Some(self.child_by(apart(&std::env::current_exe().unwrap()), role))
    }

    fn child_by(&self, mut command: Command, role: &str) -> Process {
        let mut child = command
            .args(["--exact", "a_child_is_what_it_is_told_to_be", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(SOCKET, self.socket())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.map_while(Result::ok).any(|line| line.contains("ready"));
        assert!(ready, "the child {role} ended early");
        Process(child)
    }
}

/// What a child was told to be, and where the node is.
pub fn role() -> Option<(String, PathBuf)> {
    Some((std::env::var(ROLE).ok()?, std::env::var_os(SOCKET)?.into()))
}

/// A child that is killed with its owner.
pub struct Process(Child);

impl Process {
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
        if signal == rustix::process::Signal::STOP {
            // Not before all of its threads have stopped.
            let stopped = rustix::process::WaitIdOptions::STOPPED;
            rustix::process::waitid(rustix::process::WaitId::Pid(pid), stopped).unwrap();
        }
    }

    /// For how long its threads were at work, in hundredths of a second.
    pub fn worked(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum()
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
