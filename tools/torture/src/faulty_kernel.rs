//! A kernel of the disk link that misbehaves on purpose, in front of a real one: requests end as
//! its user chooses, or move bytes of another place, writes are told to a power supply, and
//! completions can be held back. The suite's own store runs on it, and so do the tests of the disk
//! link.

use crate::faults::{Ending, Faults};
use crate::misdirected;
use crate::power::{Announced, read_up_to};
use forebay_store::disk::{Action, Completed, Kernel, Request};
use forebay_transfer::Waker;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Says of each request, given its length, how it ends and after how many further completions that
/// is told.
pub type Choose = Box<dyn FnMut(&Request, usize) -> (Ending, usize) + Send>;

/// While closed, nothing is told to be complete.
#[derive(Clone, Default)]
pub struct Gate {
    closed: Arc<AtomicBool>,
    waker: Arc<OnceLock<Waker>>,
}

impl Gate {
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
        if let Some(waker) = self.waker.get() {
            waker();
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

/// A kernel in front of a real one.
pub struct FaultyKernel {
    inner: Box<dyn Kernel>,
    choose: Choose,
    gate: Gate,
    /// Whose power supply is told of writes, and the same file for it, which it reads and writes as
    /// it likes.
    power: Option<(Arc<Faults>, Arc<File>)>,
    /// Where the last requests began: what is misdirected goes there, too.
    recent: VecDeque<u64>,
    under_way: HashMap<u64, UnderWay>,
    /// Completed, but not told yet: after how many further completions, and what.
    held: Vec<(usize, Completed)>,
}

/// What is kept until a request completed.
struct UnderWay {
    slices: Vec<libc::iovec>,
    announced: Option<Announced>,
    late: usize,
    /// Where in the file it reads, and the choice of the page that comes from elsewhere.
    astray: Option<(u64, u64)>,
}

/// Requests whose places are remembered.
const RECENT: usize = 32;

// SAFETY: the slices are used on the thread that owns the kernel.
unsafe impl Send for FaultyKernel {}

impl FaultyKernel {
    /// A kernel whose requests end as `choose` says, held back while `gate`, which serves no other
    /// kernel, is closed.
    pub fn new(inner: Box<dyn Kernel>, choose: Choose, gate: Gate) -> FaultyKernel {
        let _ = gate.waker.set(inner.waker());
        let (recent, under_way) = (VecDeque::new(), HashMap::new());
        FaultyKernel { inner, choose, gate, power: None, recent, under_way, held: Vec::new() }
    }

    /// A kernel whose requests end as `faults` says, and whose writes its power supply sees.
    pub fn over(inner: Box<dyn Kernel>, file: Arc<File>, faults: Arc<Faults>) -> FaultyKernel {
        let own = Arc::clone(&faults);
        let choose = move |request: &Request, bytes: usize| {
            let ending = match request.action {
                Action::Read => own.read(bytes),
                Action::Write => own.write(bytes),
            };
            match ending {
                // Direct I/O cannot move less than a page's worth of sectors at once.
                Ending::Short(fewer) => (Ending::Short(fewer.next_multiple_of(4096)), 0),
                ending => (ending, 0),
            }
        };
        let kernel = FaultyKernel::new(inner, Box::new(choose), Gate::default());
        FaultyKernel { power: Some((faults, file)), ..kernel }
    }

    /// Tells the power supply of a write, which may be the last.
    ///
    /// # Safety
    ///
    /// The slices and the memory behind them must be valid.
    unsafe fn announce(&self, request: &Request, slices: &[libc::iovec]) -> io::Result<Option<Announced>> {
        let Some((faults, file)) = self.power.as_ref().filter(|_| request.action == Action::Write) else {
            return Ok(None);
        };
        let part = |slice: &libc::iovec| {
            // SAFETY: as the caller promises.
            unsafe { std::slice::from_raw_parts(slice.iov_base.cast_const().cast(), slice.iov_len) }
        };
        let parts: Vec<&[u8]> = slices.iter().map(part).collect();
        faults.power().write(file, request.offset, &parts).map(Some)
    }

    /// Another place than `own` for `bytes`, inside of the file.
    fn elsewhere(&self, file: &File, own: u64, bytes: usize, choice: u64) -> Option<u64> {
        let file_bytes = file.metadata().ok()?.len();
        let beside = misdirected::neighbour(own);
        let place = match self.recent.len() as u64 {
            count if count > 0 && choice % 2 == 1 => self.recent[(choice / 2 % count) as usize],
            _ => beside,
        };
        let is_other = |place: &u64| *place != own && *place + bytes as u64 <= file_bytes;
        [place, beside].into_iter().find(is_other)
    }

    /// Puts a page of another place into what a request has read.
    fn mislead(&self, slices: &[libc::iovec], read: usize, (offset, choice): (u64, u64)) -> Option<()> {
        let (_, file) = self.power.as_ref()?;
        let page = misdirected::page(read, choice);
        let own = offset + page.start as u64;
        let place = self.elsewhere(file, own, page.len(), choice)?;
        let mut wrong = read_up_to(file, place, page.len()).ok()?;
        let (mut bytes, mut before) = (&*wrong.bytes(), page.start);
        for slice in slices {
            let skipped = before.min(slice.iov_len);
            let count = bytes.len().min(slice.iov_len - skipped);
            // SAFETY: the request has ended, and nobody was told: its memory is still the kernel's;
            // `skipped + count` is at most the slice's length.
            unsafe {
                slice.iov_base.cast::<u8>().add(skipped).copy_from_nonoverlapping(bytes.as_ptr(), count);
            }
            (bytes, before) = (&bytes[count..], before - skipped);
        }
        Some(())
    }

    fn has_ended(&mut self, done: Completed) {
        let Some(UnderWay { slices, announced, late, astray }) = self.under_way.remove(&done.key) else {
            return;
        };
        if let (Some(astray), Ok(read @ 1..)) = (astray, usize::try_from(done.result)) {
            // Where there is no other place, it stays as it is.
            let _ = self.mislead(&slices, read, astray);
        }
        if let (Some((faults, _)), Some(announced)) = (&self.power, announced) {
            faults.power().written(announced);
        }
        self.held.push((late, done));
    }

    /// Tells what has waited long enough; the last ones are told when nothing else can come.
    fn release(&mut self, completed: &mut Vec<Completed>) {
        if self.gate.is_closed() {
            return;
        }
        let due = |(wait, _): &(usize, Completed)| *wait == 0;
        if !self.held.iter().any(due)
            && let Some(first) = self.held.first_mut()
        {
            first.0 = 0;
        }
        let (due, rest): (Vec<_>, Vec<_>) = self.held.drain(..).partition(due);
        self.held = rest.into_iter().map(|(wait, held)| (wait.saturating_sub(due.len()), held)).collect();
        completed.extend(due.into_iter().map(|(_, held)| held));
    }
}

// SAFETY: every request is completed once: by the inner kernel with its true result, or here
// without having been started.
unsafe impl Kernel for FaultyKernel {
    unsafe fn start(&mut self, key: u64, mut request: Request) {
        // SAFETY: the caller keeps the slices valid.
        let mut slices = unsafe { first_bytes(&request, usize::MAX) };
        let bytes = slices.iter().map(|slice| slice.iov_len).sum();
        let (ending, late) = (self.choose)(&request, bytes);
        let (own, mut astray) = (request.offset, None);
        match ending {
            Ending::Honest => {}
            Ending::Instead(result) => return self.held.push((0, Completed { key, result })),
            // SAFETY: the caller keeps the slices valid.
            Ending::Short(fewer) => slices = unsafe { first_bytes(&request, fewer) },
            Ending::Misdirected(choice) if request.action == Action::Read => astray = Some((own, choice)),
            Ending::Misdirected(choice) => {
                let file = self.power.as_ref().map(|(_, file)| file);
                let place = file.and_then(|file| self.elsewhere(file, own, bytes, choice));
                request.offset = place.unwrap_or(own);
            }
        }
        self.recent.truncate(RECENT - 1);
        self.recent.push_front(own);
        // SAFETY: the caller keeps the memory valid, and the slices are all of it or its first
        // bytes.
        match unsafe { self.announce(&request, &slices) } {
            Ok(announced) => {
                let request =
                    Request { slices: slices.as_ptr(), slice_count: slices.len() as u32, ..request };
                // The slices' own memory does not move with the map's.
                self.under_way.insert(key, UnderWay { slices, announced, late, astray });
                // SAFETY: as the caller promises; the slices stay in the map until the request
                // completed.
                unsafe { self.inner.start(key, request) };
            }
            Err(_) => self.held.push((0, Completed { key, result: -libc::EIO })),
        }
    }

    fn wait(&mut self, completed: &mut Vec<Completed>) -> io::Result<()> {
        if !self.held.is_empty() && !self.gate.is_closed() {
            (self.inner.waker())();
        }
        let mut from_inner = Vec::new();
        self.inner.wait(&mut from_inner)?;
        from_inner.into_iter().for_each(|done| self.has_ended(done));
        self.release(completed);
        Ok(())
    }

    unsafe fn pin(&mut self, start: NonNull<u8>, len: usize) -> io::Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.inner.pin(start, len) }
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }

    fn name(&self) -> &'static str {
        "faulty"
    }
}

/// # Safety
///
/// The request's slices must be valid.
unsafe fn first_bytes(request: &Request, mut bytes: usize) -> Vec<libc::iovec> {
    // SAFETY: as the caller promises.
    let slices = unsafe { std::slice::from_raw_parts(request.slices, request.slice_count as usize) };
    let mut first = Vec::new();
    for slice in slices {
        let iov_len = slice.iov_len.min(bytes);
        bytes -= iov_len;
        if iov_len > 0 {
            first.push(libc::iovec { iov_len, ..*slice });
        }
    }
    first
}
