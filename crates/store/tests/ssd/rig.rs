//! Logs in a directory of their own, a mover, and memory to write chunks from.

use forebay_kv::ChunkId;
use forebay_store::TenantId;
use forebay_store::disk::{DiskError, DiskFile, DiskLink, DiskOptions, Kernel};
use forebay_store::log::DiskTierConfig;
use forebay_store::ssd::{
    Check, DiskLease, Existing, FileMedium, LayerRead, NotRead, NotWritten, ReadResults, Source, Ssd,
    SsdError, SsdOptions, SsdWriteEnd, Staged, Volume, init,
};
use forebay_transfer::{Class, HostBuffer, Limits, MoverHandle, MoverThread, Place, RegionId, Span};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

pub const HOST: Place = Place::Host(0);
pub const TENANT: TenantId = TenantId(3);
pub const MIB: u64 = 1 << 20;
pub const MINUTE_US: u64 = 60_000_000;
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Files, and what is made of them anew with each [`open`](Rig::open).
pub struct Rig {
    pub paths: Vec<PathBuf>,
    mover: Mutex<Option<MoverThread>>,
    _directory: TempDir,
}

/// A store that is open, and memory to write from.
pub struct Opened {
    pub ssd: Ssd,
    pub handle: MoverHandle,
    pub memory: Arc<HostBuffer>,
    pub region: RegionId,
}

/// How chunks look: the lengths of their layers, and where the first one starts in memory.
#[derive(Clone)]
pub struct Shape {
    pub layers: Vec<u64>,
    pub memory_at: u64,
}

impl Rig {
    /// So many logs of `bytes` bytes in segments of `segment_bytes`, or nothing, loudly, where
    /// there is no direct I/O.
    pub fn new(volumes: usize, bytes: u64, segment_bytes: u64) -> Option<Rig> {
        let directory = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> =
            (0..volumes).map(|number| directory.path().join(format!("log{number}"))).collect();
        for path in &paths {
            match init(path, bytes, segment_bytes, Existing::Keep) {
                Ok(_) => {}
                Err(SsdError::Disk(DiskError::NoDirectIo { path })) => {
                    testkit::skipped(format_args!("no direct I/O at {}", path.display()));
                    return None;
                }
                Err(error) => panic!("{error}"),
            }
        }
        Some(Rig { paths, mover: Mutex::default(), _directory: directory })
    }

    pub fn open(&self, config: SsdOptions) -> Opened {
        let volumes =
            self.paths.iter().map(|path| Volume::open(path, DiskOptions::default()).unwrap()).collect();
        self.try_open(volumes, config).unwrap()
    }

    /// Opens these volumes with a mover of their own. Ends the mover of before, and with it its
    /// links.
    pub fn try_open(&self, volumes: Vec<Volume>, config: SsdOptions) -> Result<Opened, SsdError> {
        let limits = Limits { attempts: 1, ..Limits::default() };
        let mover = MoverThread::spawn(limits).unwrap();
        let handle = mover.handle();
        self.mover.lock().unwrap().replace(mover);
        let ssd = Ssd::open(&handle, HOST, volumes, config)?;
        let memory = Arc::new(HostBuffer::new(8 << 20));
        let region = handle.register(HOST, memory.clone())?;
        Ok(Opened { ssd, handle, memory, region })
    }

    /// A volume whose I/Os go through `wrap`.
    pub fn volume_over(
        &self,
        number: usize,
        wrap: impl FnOnce(Box<dyn Kernel>) -> Box<dyn Kernel>,
    ) -> Volume {
        let medium = Arc::new(FileMedium::open(&self.paths[number]).unwrap());
        let file = DiskFile::open_with_holes(&self.paths[number]).unwrap();
        let options = DiskOptions::default();
        let inner = Box::new(forebay_store::disk::Threads::open(&file, options.depth).unwrap());
        let link = DiskLink::over(wrap(inner), file, options).unwrap();
        Volume { link, medium }
    }
}

/// 8 MiB of staging, and room for all chunks of a test.
pub fn config() -> SsdOptions {
    let tier = DiskTierConfig { max_chunks: 65_536, ..DiskTierConfig::default() };
    SsdOptions { tier, staging_bytes: 8 * MIB, commit_interval_us: 5_000, ..SsdOptions::default() }
}

pub fn id(number: u64) -> ChunkId {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    ChunkId::from_bytes(bytes)
}

pub fn ids(numbers: std::ops::Range<u64>) -> Vec<ChunkId> {
    numbers.map(id).collect()
}

/// The bytes of a layer: a function of the chunk and the layer.
pub fn truth(number: u64, layer: usize, bytes: u64) -> Vec<u8> {
    let mut state = (number * 1009 + layer as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut word).flatten().take(bytes as usize).collect()
}

impl Shape {
    pub fn new(layers: &[u64]) -> Shape {
        Shape { layers: layers.to_vec(), memory_at: 0 }
    }

    pub fn bytes(&self) -> u64 {
        self.layers.iter().sum()
    }
}

impl Opened {
    /// Puts a chunk's bytes into memory and returns its layers, each as two spans if it has more
    /// than a page.
    pub fn source(&self, number: u64, shape: &Shape) -> Vec<Vec<Span>> {
        let mut at = shape.memory_at;
        let layer = |(layer, bytes): (usize, &u64)| {
            assert!(self.memory.write(at as usize, &truth(number, layer, *bytes)));
            let cut = if *bytes > 4096 { 4096 } else { *bytes };
            let spans = [(at, cut), (at + cut, bytes - cut)];
            at += bytes;
            spans
                .into_iter()
                .filter(|(_, len)| *len > 0)
                .map(|(at, len)| Span::new(self.region, at, len))
                .collect()
        };
        shape.layers.iter().enumerate().map(layer).collect()
    }

    pub fn begin_write(
        &self,
        number: u64,
        parent: Option<u64>,
        shape: &Shape,
    ) -> Result<Receiver<SsdWriteEnd>, NotWritten> {
        let (sender, receiver) = channel();
        let layers = self.source(number, shape);
        let source = Source { id: id(number), parent: parent.map(id), layers, crcs: None };
        let on_end = move |end| drop(sender.send(end));
        self.ssd.write(TENANT, source, Class::WriteBack, on_end)?;
        Ok(receiver)
    }

    pub fn write(&self, number: u64, parent: Option<u64>, shape: &Shape) -> SsdWriteEnd {
        self.begin_write(number, parent, shape).unwrap().recv_timeout(PATIENCE).unwrap()
    }

    /// Writes chunk after chunk, each the parent of the next. All must succeed.
    pub fn write_chain(&self, numbers: std::ops::Range<u64>, shape: &Shape) {
        for number in numbers.clone() {
            let parent = (number > numbers.start).then(|| number - 1);
            let end = self.write(number, parent, shape);
            assert_eq!(end, SsdWriteEnd::Stored { bytes: shape.bytes() }, "chunk {number}");
        }
    }

    pub fn lease(&self, numbers: std::ops::Range<u64>) -> DiskLease {
        self.ssd.lease(TENANT, &ids(numbers), MINUTE_US)
    }

    pub fn begin_read(
        &self,
        lease: &DiskLease,
        wants: &[LayerRead],
        deadline_us: Option<u64>,
    ) -> Result<Receiver<Result<Vec<Staged>, NotRead>>, NotRead> {
        let (sender, receiver) = channel();
        let on_end = move |ends: ReadResults| drop(sender.send(ends.into_iter().collect()));
        self.ssd.read(lease, wants, Class::Demand, deadline_us, on_end)?;
        Ok(receiver)
    }

    pub fn read(&self, lease: &DiskLease, wants: &[LayerRead]) -> Result<Vec<Staged>, NotRead> {
        self.begin_read(lease, wants, None)?.recv_timeout(PATIENCE).unwrap()
    }

    /// Reads all layers of all chunks of a sequence and compares them. The chunks must be there.
    pub fn expect_chain(&self, numbers: std::ops::Range<u64>, shape: &Shape) {
        let lease = self.lease(numbers.clone());
        assert_eq!(lease.len() as u64, numbers.end - numbers.start, "chunks {numbers:?}");
        for (chunk, number) in numbers.enumerate() {
            let staged = self.read(&lease, &[want(chunk, 0..shape.layers.len())]).unwrap();
            expect_truth(&staged[0], number, shape);
        }
    }
}

pub fn want(chunk: usize, layers: std::ops::Range<usize>) -> LayerRead {
    LayerRead { chunk, layers, into: None, check: Check::AtRead }
}

/// Compares every layer that is staged, with its checksum.
pub fn expect_truth(staged: &Staged, number: u64, shape: &Shape) {
    for layer in staged.layers() {
        let expected = truth(number, layer, shape.layers[layer]);
        assert!(staged.bytes(layer).unwrap() == expected, "chunk {number}, layer {layer}");
        assert_eq!(staged.crc(layer), Some(crc32c::crc32c(&expected)));
        assert_eq!(staged.span(layer).unwrap().len, shape.layers[layer]);
    }
    assert_eq!(staged.bytes(staged.layers().end), None);
}
