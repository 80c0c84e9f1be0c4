//! A mover with one disk link and one buffer of host memory, for each driver.

use forebay_store::disk::{DiskFile, DiskHandle, DiskLink, DiskOptions, Driver, Kernel, Threads, Uring};
use forebay_torture::faults::Ending;
use forebay_torture::faulty_kernel::{FaultyKernel, Gate};
use forebay_transfer::{
    Class, End, Failure, HostBuffer, Limits, LinkId, LinkSpec, MoverHandle, MoverThread, PathSpec, Place,
    Reason, RegionId, Span, SpanPair, Transfer,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

pub const PAGE: u64 = 4096;
pub const HOST: Place = Place::Host(0);
pub const DISK: Place = Place::Disk(0);
/// I/Os under way at a time in these tests.
pub const DEPTH: u32 = 8;

/// Fields are dropped in this order: the mover, with it the link, first.
pub struct World {
    thread: Option<MoverThread>,
    pub mover: MoverHandle,
    pub disk: DiskHandle,
    pub link: LinkId,
    pub kept: RegionId,
    pub buffer: Arc<HostBuffer>,
    pub memory: RegionId,
    pub path: PathBuf,
    _directory: TempDir,
}

/// Runs a test for each driver that this system allows.
pub fn for_each_driver(test: impl Fn(Driver)) {
    for driver in [Driver::Uring, Driver::Threads] {
        let directory = directory();
        let file = DiskFile::create(directory.path().join("probe"), PAGE).unwrap();
        match DiskLink::open(file, DiskOptions { driver, ..DiskOptions::default() }) {
            Ok(_) => test(driver),
            Err(error) => testkit::skipped(format_args!("{driver:?}: {error}")),
        }
    }
}

/// A new directory on a disk that can do direct I/O.
pub fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A world with `bytes` bytes of disk and as many of memory.
pub fn world(driver: Driver, bytes: u64) -> World {
    let options = DiskOptions { driver, depth: DEPTH, io_bytes_max: 64 * PAGE };
    build(bytes, |path| DiskLink::open(DiskFile::create(path, bytes).unwrap(), options).unwrap())
}

/// The same, with a kernel between the link and its driver that holds completions back while `gate`
/// is closed. `choose` says how request number n, from 0, ends, and after how many further
/// completions that is told.
pub fn faulty_world(
    driver: Driver,
    bytes: u64,
    gate: Gate,
    mut choose: impl FnMut(u64) -> (Ending, usize) + Send + 'static,
) -> World {
    build(bytes, |path| {
        let file = DiskFile::create(path, bytes).unwrap();
        let inner: Box<dyn Kernel> = match driver {
            Driver::Threads => Box::new(Threads::open(&file, DEPTH).unwrap()),
            _ => Box::new(Uring::open(&file, DEPTH).unwrap()),
        };
        let options = DiskOptions { driver, depth: DEPTH, io_bytes_max: 64 * PAGE };
        let mut requests = 0;
        let choose = move |_: &_, _| {
            requests += 1;
            choose(requests - 1)
        };
        let kernel = FaultyKernel::new(inner, Box::new(choose), gate);
        DiskLink::over(Box::new(kernel), file, options).unwrap()
    })
}

fn build(bytes: u64, link: impl FnOnce(&Path) -> DiskLink) -> World {
    let directory = directory();
    let path = directory.path().join("kv");
    let link = link(&path);
    let disk = link.handle();
    let thread = MoverThread::spawn(Limits { attempts: 2, ..Limits::default() }).unwrap();
    let mover = thread.handle();
    let id = mover.add_link(LinkSpec::new("disk0", 8, 64 << 20), Box::new(link)).unwrap();
    mover.add_path(PathSpec::direct(HOST, DISK, id)).unwrap().unwrap();
    mover.add_path(PathSpec::direct(DISK, HOST, id)).unwrap().unwrap();
    let kept = disk.register(&mover, DISK, 0, bytes).unwrap();
    let buffer = Arc::new(HostBuffer::new(bytes as usize));
    let memory = mover.register(HOST, Arc::clone(&buffer) as _).unwrap();
    World { thread: Some(thread), mover, disk, link: id, kept, buffer, memory, path, _directory: directory }
}

impl World {
    /// Pairs that write from memory to disk, each (memory offset, disk offset, length), in pages.
    pub fn writing(&self, pages: &[(u64, u64, u64)]) -> Transfer {
        Transfer::new(self.pairs(pages), Class::WriteBack)
    }

    /// Pairs that read from disk to memory, each (memory offset, disk offset, length), in pages.
    pub fn reading(&self, pages: &[(u64, u64, u64)]) -> Transfer {
        let turned = |pair: SpanPair| SpanPair::new(pair.to, pair.from);
        Transfer::new(self.pairs(pages).into_iter().map(turned).collect(), Class::Demand)
    }

    fn pairs(&self, pages: &[(u64, u64, u64)]) -> Vec<SpanPair> {
        let pair = |(memory, disk, len): &(u64, u64, u64)| {
            let memory = Span::new(self.memory, memory * PAGE, len * PAGE);
            SpanPair::new(memory, Span::new(self.kept, disk * PAGE, len * PAGE))
        };
        pages.iter().map(pair).collect()
    }

    pub fn run(&self, transfer: Transfer) -> End {
        self.mover.run(transfer).unwrap()
    }

    pub fn run_fully(&self, transfer: Transfer) {
        let bytes = transfer.pairs.iter().map(|pair| pair.from.len).sum();
        assert_eq!(self.run(transfer), End::Done { bytes });
    }

    /// Runs a transfer that has to fail on the link, and returns what the link said. Then lets a
    /// read of the first page succeed, since the mover rests a link that fails often in a row.
    pub fn error_of(&self, transfer: Transfer) -> String {
        let end = self.run(transfer);
        self.run(self.reading(&[(0, 0, 1)]));
        match end {
            End::Failed(Failure { reason: Reason::Link { error, .. }, .. }) => error,
            end => panic!("{end:?}"),
        }
    }

    /// Bytes of the buffer, in pages.
    pub fn bytes(&self, page: u64, pages: u64) -> Vec<u8> {
        let mut bytes = vec![0; (pages * PAGE) as usize];
        assert!(self.buffer.read((page * PAGE) as usize, &mut bytes));
        bytes
    }

    /// Puts bytes into the buffer that differ from page to page and from seed to seed.
    pub fn fill(&self, page: u64, pages: u64, seed: u64) -> Vec<u8> {
        let bytes = pattern(pages, seed);
        assert!(self.buffer.write((page * PAGE) as usize, &bytes));
        bytes
    }

    /// The file's bytes as another program sees them.
    pub fn file_bytes(&self, page: u64, pages: u64) -> Vec<u8> {
        let all = std::fs::read(&self.path).unwrap();
        all[(page * PAGE) as usize..((page + pages) * PAGE) as usize].to_vec()
    }

    /// Ends the mover and with it the link.
    pub fn end(&mut self) {
        self.thread.take();
    }
}

fn pattern(pages: u64, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let word = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..pages * PAGE / 8).flat_map(word).collect()
}
