//! A kernel and a medium that fail when they are told to, in front of real ones.

use forebay_store::disk::{Action, Kernel, Request};
use forebay_store::log::{Medium, VolumeSpace};
use forebay_torture::faults::Ending;
use forebay_torture::faulty_kernel::{FaultyKernel, Gate};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// What fails from now on.
#[derive(Clone, Default)]
pub struct Faults {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Results that reads and writes of chunks have instead of being carried out, if not 0.
    reads: AtomicI32,
    writes: AtomicI32,
    /// The error of syncs of the medium, if not 0.
    syncs: AtomicI32,
    /// Where pages of the medium begin that cannot be read, if not 0.
    unreadable_from: AtomicU64,
    unreadable_page: AtomicU64,
    /// What the disk says that it has left, if not 0.
    free_bytes: AtomicU64,
}

impl Faults {
    pub fn fail_reads(&self, errno: i32) {
        self.shared.reads.store(-errno, Ordering::SeqCst);
    }

    /// Reads of the page at this offset fail.
    pub fn fail_reads_at(&self, offset: u64) {
        self.shared.unreadable_page.store(offset, Ordering::SeqCst);
    }

    pub fn fail_writes(&self, errno: i32) {
        self.shared.writes.store(-errno, Ordering::SeqCst);
    }

    pub fn fail_syncs(&self, errno: i32) {
        self.shared.syncs.store(errno, Ordering::SeqCst);
    }

    pub fn fail_pages_from(&self, offset: u64) {
        self.shared.unreadable_from.store(offset, Ordering::SeqCst);
    }

    pub fn say_free(&self, bytes: u64) {
        self.shared.free_bytes.store(bytes, Ordering::SeqCst);
    }

    pub fn kernel(&self, inner: Box<dyn Kernel>) -> Box<dyn Kernel> {
        let shared = Arc::clone(&self.shared);
        let choose = move |request: &Request, bytes: usize| {
            let unreadable = shared.unreadable_page.load(Ordering::SeqCst);
            let range = request.offset..request.offset + bytes as u64;
            let result = match request.action {
                Action::Read if unreadable > 0 && range.contains(&unreadable) => -5,
                Action::Read => shared.reads.load(Ordering::SeqCst),
                Action::Write => shared.writes.load(Ordering::SeqCst),
            };
            (if result == 0 { Ending::Honest } else { Ending::Instead(result) }, 0)
        };
        Box::new(FaultyKernel::new(inner, Box::new(choose), Gate::default()))
    }

    pub fn medium(&self, inner: Arc<dyn Medium>) -> Arc<dyn Medium> {
        Arc::new(FaultyMedium { inner, faults: self.clone() })
    }
}

struct FaultyMedium {
    inner: Arc<dyn Medium>,
    faults: Faults,
}

impl Medium for FaultyMedium {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self.faults.shared.unreadable_from.load(Ordering::SeqCst) {
            from if from > 0 && offset >= from => Err(io::Error::from_raw_os_error(5)),
            _ => self.inner.read_at(offset, buffer),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        match self.faults.shared.syncs.load(Ordering::SeqCst) {
            0 => self.inner.sync(),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.inner.withdraw(offset, bytes)
    }

    fn restore(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.inner.restore(offset, bytes)
    }

    fn space(&self) -> io::Result<VolumeSpace> {
        let space = self.inner.space()?;
        match self.faults.shared.free_bytes.load(Ordering::SeqCst) {
            0 => Ok(space),
            bytes => Ok(VolumeSpace { free_bytes: Some(bytes), ..space }),
        }
    }
}
