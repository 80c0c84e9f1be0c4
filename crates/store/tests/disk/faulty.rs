//! A kernel that misbehaves on purpose, in front of a real one: the only place that knows of
//! injected faults.

use forebay_store::disk::{Completed, Kernel, Request};
use forebay_transfer::Waker;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What happens to one request.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Nothing unusual.
    None,
    /// Only the first bytes are requested, so the result is honestly short.
    Short(usize),
    /// It is not carried out and has this result.
    Instead(i32),
    /// It is carried out; that it completed is told only after so many further completions.
    Late(usize),
}

/// Told the number of a request, from 0, and the request.
pub type Choose = Box<dyn FnMut(u64, &Request) -> Fault + Send>;

/// Chooses faults, and can hold completions back.
pub struct Mischief {
    pub choose: Choose,
    pub gate: Gate,
}

/// While closed, nothing is told to be complete.
#[derive(Clone, Default)]
pub struct Gate {
    closed: Arc<AtomicBool>,
    waker: Arc<std::sync::OnceLock<Waker>>,
}

impl Mischief {
    pub fn new(choose: impl FnMut(u64, &Request) -> Fault + Send + 'static) -> Mischief {
        Mischief { choose: Box::new(choose), gate: Gate::default() }
    }

    /// Every request has this result, and none is carried out.
    pub fn always(result: i32) -> Mischief {
        Mischief::new(move |_, _| Fault::Instead(result))
    }
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
}

pub struct Faulty {
    inner: Box<dyn Kernel>,
    mischief: Mischief,
    requests: u64,
    /// Slices of shortened requests.
    shortened: HashMap<u64, Vec<libc::iovec>>,
    late: HashMap<u64, usize>,
    /// Completed, but not told yet: after how many further completions, and what.
    held: Vec<(usize, Completed)>,
}

// SAFETY: the slices are used on the thread that owns the kernel.
unsafe impl Send for Faulty {}

impl Faulty {
    pub fn new(inner: Box<dyn Kernel>, mischief: Mischief) -> Faulty {
        assert!(mischief.gate.waker.set(inner.waker()).is_ok(), "a gate serves one kernel");
        let (shortened, late) = (HashMap::new(), HashMap::new());
        Faulty { inner, mischief, requests: 0, shortened, late, held: Vec::new() }
    }

    /// Tells what has waited long enough; the last ones are told when nothing else can come.
    fn release(&mut self, completed: &mut Vec<Completed>) {
        if self.mischief.gate.closed.load(Ordering::SeqCst) {
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

// SAFETY: every request is completed once: by the inner kernel, or here without having been
// started.
unsafe impl Kernel for Faulty {
    unsafe fn start(&mut self, key: u64, request: Request) {
        let nth = self.requests;
        self.requests += 1;
        match (self.mischief.choose)(nth, &request) {
            Fault::None => {}
            Fault::Late(completions) => drop(self.late.insert(key, completions)),
            Fault::Instead(result) => return self.held.push((0, Completed { key, result })),
            Fault::Short(bytes) => {
                // SAFETY: the caller keeps the slices valid.
                let slices = unsafe { first_bytes(&request, bytes) };
                let request =
                    Request { slices: slices.as_ptr(), slice_count: slices.len() as u32, ..request };
                self.shortened.insert(key, slices);
                // SAFETY: as the caller promises; the slices stay in the map until the request
                // completed.
                return unsafe { self.inner.start(key, request) };
            }
        }
        // SAFETY: as the caller promises.
        unsafe { self.inner.start(key, request) }
    }

    fn wait(&mut self, completed: &mut Vec<Completed>) -> std::io::Result<()> {
        if !self.held.is_empty() && !self.mischief.gate.closed.load(Ordering::SeqCst) {
            (self.inner.waker())();
        }
        let mut from_inner = Vec::new();
        self.inner.wait(&mut from_inner)?;
        for done in from_inner {
            self.shortened.remove(&done.key);
            self.held.push((self.late.remove(&done.key).unwrap_or(0), done));
        }
        self.release(completed);
        Ok(())
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
