//! The disk link as its users see it: opened on a file, given to a mover, and told which regions
//! lie where. This file joins the parts.

use super::file::{DiskError, DiskFile, FileFacts};
use super::kernel::Kernel;
use super::plan::DISK_ALIGN_BYTES;
use super::regions::Extent;
use super::stats::DiskStats;
use super::threads::{DISK_THREADS_MAX, Threads};
use super::uring::Uring;
use super::worker::{Message, Shared, Worker};
use forebay_transfer::Inbox;
use forebay_transfer::lock::{Mutex, RwLock};
use forebay_transfer::{
    Backing, Completion, Link, LinkOp, Memory, MoverHandle, Outcome, Place, Process, RegionId,
};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// I/Os that a link may have under way at most.
pub const DISK_DEPTH_MAX: u32 = 4_096;
/// Bytes that one I/O may have at most, below what the system moves at once.
pub const IO_BYTES_MAX: u64 = 1 << 30;

/// How a link uses its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskOptions {
    /// I/Os under way at a time, 1 to [`DISK_DEPTH_MAX`].
    pub depth: u32,
    /// Bytes of one I/O at most: [`DISK_ALIGN_BYTES`] to [`IO_BYTES_MAX`], rounded down to a
    /// multiple of the former.
    pub io_bytes_max: u64,
    /// Who carries out the I/Os.
    pub driver: Driver,
}

/// Who carries out I/Os.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// io_uring where the system allows it, else threads.
    Auto,
    /// io_uring or nothing.
    Uring,
    /// Threads with blocking calls.
    Threads,
}

impl Default for DiskOptions {
    fn default() -> DiskOptions {
        // A chunk of one or two MiB with its footer is still one I/O.
        DiskOptions { depth: 32, io_bytes_max: 4 << 20, driver: Driver::Auto }
    }
}

/// A file or raw partition as a link of a mover.
///
/// Operations are pairs of a span on disk and a span of host memory. Spans that follow each other
/// on disk become one vectored I/O, wherever their memory lies. File offsets, lengths and addresses
/// must be multiples of
/// [`DISK_ALIGN_BYTES`]; an operation with any other fails before a byte of it is moved. An
/// operation succeeds only when every byte was moved; short results are continued, and what cannot
/// be continued is a failure that names offset and reason.
///
/// Dropping the link finishes what was started, then closes the file.
///
/// ```
/// use forebay_store::disk::{DiskFile, DiskLink, DiskOptions};
/// use forebay_transfer::*;
/// use std::sync::Arc;
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("kv");
/// let mover = MoverThread::spawn(Limits::default())?;
/// let handle = mover.handle();
/// let (host, disk) = (Place::Host(0), Place::Disk(0));
/// let link = DiskLink::open(DiskFile::create(path, 1 << 20)?, DiskOptions::default())?;
/// let disk_handle = link.handle();
/// let id = handle.add_link(LinkSpec::new("disk0", 8, 64 << 20), Box::new(link))?;
/// handle.add_path(PathSpec::direct(host, disk, id))??;
///
/// let kept = disk_handle.register(&handle, disk, 0, 1 << 20)?;
/// let source = Arc::new(HostBuffer::new(8192));
/// source.write(0, &[7; 8192]);
/// let source = handle.register(host, source)?;
/// let pair = SpanPair::new(Span::new(source, 0, 8192), Span::new(kept, 4096, 8192));
/// let end = handle.run(Transfer::new(vec![pair], Class::WriteBack))?;
///
/// assert_eq!(end, End::Done { bytes: 8192 });
/// assert_eq!(disk_handle.stats().written_bytes, 8192);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DiskLink {
    handle: DiskHandle,
    driver: &'static str,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

/// Speaks to a disk link while a mover owns it. Cheap to clone, usable from any thread. It does not
/// keep the file open.
#[derive(Clone)]
pub struct DiskHandle {
    shared: Arc<Shared>,
    file: Arc<FileFacts>,
}

impl DiskLink {
    /// A link on `file`.
    pub fn open(file: DiskFile, options: DiskOptions) -> Result<DiskLink, DiskError> {
        let depth = options.depth.clamp(1, DISK_DEPTH_MAX);
        let uring = || Uring::open(&file, depth).map(|kernel| Box::new(kernel) as Box<dyn Kernel>);
        let threads = || Threads::open(&file, depth).map(|kernel| Box::new(kernel) as Box<dyn Kernel>);
        let failed = |driver| {
            let path = file.path().to_owned();
            move |source| DiskError::Driver { path, driver, source }
        };
        let kernel = match options.driver {
            Driver::Uring => uring().map_err(failed("io_uring"))?,
            Driver::Threads => threads().map_err(failed("threads"))?,
            Driver::Auto => uring()
                .or_else(|error| {
                    let (volume, threads_max) = (file.path().display(), DISK_THREADS_MAX);
                    tracing::warn!(%volume, %error, threads_max, "io_uring cannot be used");
                    threads()
                })
                .map_err(failed("threads"))?,
        };
        DiskLink::over(kernel, file, options)
    }

    /// A link on `file` over a kernel that was made for it and for the depth of `options`.
    pub fn over(
        kernel: Box<dyn Kernel>,
        file: DiskFile,
        options: DiskOptions,
    ) -> Result<DiskLink, DiskError> {
        let driver = kernel.name();
        let shared = Arc::new(Shared {
            inbox: Inbox::new(kernel.waker()),
            regions: RwLock::default(),
            stats: Mutex::default(),
        });
        let handle = DiskHandle { shared: Arc::clone(&shared), file: Arc::clone(file.facts()) };
        let depth = options.depth.clamp(1, DISK_DEPTH_MAX);
        let io_bytes_max =
            (options.io_bytes_max & !(DISK_ALIGN_BYTES - 1)).clamp(DISK_ALIGN_BYTES, IO_BYTES_MAX);
        let worker = Worker::new(kernel, depth, io_bytes_max, shared, file);
        let thread = std::thread::Builder::new()
            .name("forebay-disk".into())
            .spawn(move || worker.run())
            .map_err(|source| DiskError::Driver { path: handle.file.path().to_owned(), driver, source })?;
        Ok(DiskLink { handle, driver, thread: Some(thread), process: Process::current() })
    }

    /// Speaks to the link after it was given to a mover.
    pub fn handle(&self) -> DiskHandle {
        self.handle.clone()
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        self.handle.file.path()
    }

    /// Name of the driver at work.
    pub fn driver(&self) -> &'static str {
        self.driver
    }
}

impl Link for DiskLink {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let message = Message::Op(op, Arc::clone(memory), done);
        if let Err(Message::Op(_, _, done)) = self.handle.shared.inbox.post(message) {
            done.finish(Outcome::Failed { error: "the disk link's thread has ended".into() });
        }
    }
}

impl Drop for DiskLink {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The thread, and whoever holds a lock, are the parent's.
            return std::mem::forget(self.thread.take());
        }
        self.handle.shared.inbox.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed, and its operations reported failures.
            let _ = thread.join();
        }
    }
}

impl DiskHandle {
    /// Registers bytes `base .. base + len` of the file as a region at `place`.
    pub fn register(
        &self,
        mover: &MoverHandle,
        place: Place,
        base: u64,
        len: u64,
    ) -> Result<RegionId, DiskError> {
        self.file.check_extent(base, len)?;
        let region = mover.register_opaque(place, len)?;
        let mut regions = self.shared.regions.write();
        regions.map(region, Extent { base, len });
        Ok(region)
    }

    /// Has the system pin memory once, for as long as the link lives, so that I/Os on one piece of
    /// it need not pin it each time: about a quarter less CPU for an I/O of 80 KiB. Meant for
    /// arenas and staging. An error leaves everything working without; commonly it is the limit of
    /// locked memory (`RLIMIT_MEMLOCK`), or the driver by threads, which cannot pin.
    pub fn pin(&self, backing: Arc<dyn Backing>) -> Result<(), DiskError> {
        let failed =
            |source| DiskError::System { path: self.file.path().to_owned(), doing: "pinning memory", source };
        let ended = || failed(std::io::Error::new(std::io::ErrorKind::BrokenPipe, "the disk link has ended"));
        let (sender, receiver) = mpsc::sync_channel(1);
        self.shared.inbox.post(Message::Pin(backing, sender)).map_err(|_| ended())?;
        receiver.recv().map_err(|_| ended())?.map_err(failed)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// What the link has done so far.
    pub fn stats(&self) -> DiskStats {
        *self.shared.stats.lock()
    }
}

impl std::fmt::Debug for DiskHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskHandle").field("path", &self.file.path()).finish_non_exhaustive()
    }
}
