//! The fallback driver, for systems where io_uring is missing or forbidden: a few threads that
//! block in `preadv` and `pwritev`. This file does system calls.

use super::kernel::{Action, Completed, Kernel, Request};
use forebay_transfer::Waker;
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Threads of a link at most; deeper queues gain little from blocking calls.
pub const DISK_THREADS_MAX: u32 = 16;

/// I/O on one file by blocking calls on threads of its own.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Something to do, or the end.
    requested: Condvar,
    /// Something completed, or a wake-up.
    completed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    requests: VecDeque<(u64, Request)>,
    completed: Vec<Completed>,
    woken: bool,
    closed: bool,
}

impl Threads {
    /// As many threads as requests may be under way, up to [`DISK_THREADS_MAX`]. Fails if the
    /// system starts no more.
    pub fn open(file: impl AsFd, depth: u32) -> io::Result<Threads> {
        // The threads own the file: wakers, which share the rest, may outlive the kernel.
        let file = Arc::new(file.as_fd().try_clone_to_owned()?);
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            requested: Condvar::new(),
            completed: Condvar::new(),
        });
        let mut kernel = Threads { shared, threads: Vec::new() };
        for number in 0..depth.clamp(1, DISK_THREADS_MAX) {
            let (shared, file) = (Arc::clone(&kernel.shared), Arc::clone(&file));
            let name = format!("forebay-disk-{number}");
            kernel.threads.push(std::thread::Builder::new().name(name).spawn(move || shared.work(&file))?);
        }
        Ok(kernel)
    }
}

// SAFETY: a request completes once, after its system call returned and with that result; dropping
// joins the threads, which first work off what is queued.
unsafe impl Kernel for Threads {
    unsafe fn start(&mut self, key: u64, request: Request) {
        self.shared.state.lock().requests.push_back((key, request));
        self.shared.requested.notify_one();
    }

    fn wait(&mut self, completed: &mut Vec<Completed>) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        while state.completed.is_empty() && !state.woken {
            self.shared.completed.wait(&mut state);
        }
        state.woken = false;
        completed.append(&mut state.completed);
        Ok(())
    }

    fn waker(&self) -> Waker {
        let shared = Arc::clone(&self.shared);
        Arc::new(move || {
            shared.state.lock().woken = true;
            shared.completed.notify_one();
        })
    }

    fn name(&self) -> &'static str {
        "threads"
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.requested.notify_all();
        for thread in self.threads.drain(..) {
            // The threads run nothing that can panic.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self, file: &OwnedFd) {
        while let Some((key, request)) = self.next_request() {
            let result = perform(file, &request);
            let mut state = self.state.lock();
            state.completed.push(Completed { key, result });
            if state.completed.len() == 1 {
                self.completed.notify_one();
            }
        }
    }

    /// Waits for a request. `None` once the kernel is closed and nothing is queued.
    fn next_request(&self) -> Option<(u64, Request)> {
        let mut state = self.state.lock();
        loop {
            if let Some(request) = state.requests.pop_front() {
                return Some(request);
            }
            if state.closed {
                return None;
            }
            self.requested.wait(&mut state);
        }
    }
}

/// Bytes, or a negated `errno`.
fn perform(file: &OwnedFd, request: &Request) -> i32 {
    let file = file.as_raw_fd();
    let Request { action, offset, slices, slice_count } = *request;
    let (offset, count) = (offset as libc::off_t, slice_count as libc::c_int);
    let result = match action {
        // SAFETY: whoever started the request keeps slices and memory valid until it completed.
        Action::Read => unsafe { libc::preadv(file, slices, count, offset) },
        // SAFETY: as above.
        Action::Write => unsafe { libc::pwritev(file, slices, count, offset) },
    };
    match i32::try_from(result) {
        Ok(-1) => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        Ok(bytes) => bytes,
        // I/Os are far below 2 GiB, and the system moves no more than that at once.
        Err(_) => i32::MAX,
    }
}
