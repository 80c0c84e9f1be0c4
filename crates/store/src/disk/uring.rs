//! The io_uring driver: one ring, used by one thread. Requests are collected and submitted together
//! with the wait for completions, in one system call. An eventfd whose read is always in the ring
//! wakes the waiting thread, so that it sleeps while nothing happens; there is no polling thread.
//! This file does system calls.

use super::kernel::{Action, Completed, Kernel, Request};
use super::pinned::{PINNED_PARTS_MAX, Pinned};
use forebay_transfer::Waker;
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode, squeue};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// The key of the eventfd's read. Keys of requests are below: their upper half is an index into a
/// table.
const WAKE: u64 = u64::MAX;
/// Requests of the ring's own: the eventfd's read.
const OWN_REQUESTS: u32 = 1;
/// Pause before another attempt to wait for what is under way when the ring is dropped.
const PAUSE_AFTER_FAILED_WAIT: Duration = Duration::from_millis(10);
/// Waits for the request that tries a new ring out.
const TRIES_MAX: usize = 100;
/// The only registered file.
const FILE: Fixed = Fixed(0);

/// I/O on one file by io_uring.
pub struct Uring {
    ring: IoUring,
    eventfd: Arc<OwnedFd>,
    /// Target of the eventfd's read; boxed, so that it stays where the system writes.
    wakes: Box<u64>,
    wake_is_armed: bool,
    with_kernel: usize,
    pinned: Pinned,
    has_buffer_table: bool,
}

impl Uring {
    /// A ring for `file` with up to `depth` requests under way. Fails where io_uring is missing or
    /// forbidden, also where a ring can be made and only its use is forbidden: one request that
    /// does nothing is waited for here.
    pub fn open(file: impl AsFd, depth: u32) -> io::Result<Uring> {
        let ring = IoUring::new(depth.saturating_add(OWN_REQUESTS))?;
        ring.submitter().register_files(&[file.as_fd().as_raw_fd()])?;
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let (eventfd, wakes) = (Arc::new(eventfd), Box::new(0));
        let mut uring = Uring {
            ring,
            eventfd,
            wakes,
            wake_is_armed: false,
            with_kernel: 0,
            pinned: Pinned::default(),
            has_buffer_table: false,
        };
        uring.try_out()?;
        Ok(uring)
    }

    /// Carries out a request that does nothing.
    fn try_out(&mut self) -> io::Result<()> {
        // SAFETY: the entry points to nothing.
        unsafe { self.push(opcode::Nop::new().build()) };
        // The system may be short of memory, or interrupt a wait.
        for _ in 0..TRIES_MAX {
            self.submit_and_wait()?;
            if self.ring.completion().next().is_some() {
                return Ok(());
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn arm_wake(&mut self) {
        if !self.wake_is_armed {
            let target: *mut u64 = &mut *self.wakes;
            let fd = io_uring::types::Fd(self.eventfd.as_raw_fd());
            let read = opcode::Read::new(fd, target.cast(), size_of::<u64>() as u32).build();
            // SAFETY: the target is boxed and the eventfd open until this ring is dropped, which
            // waits for the read.
            unsafe { self.push(read.user_data(WAKE)) };
            self.wake_is_armed = true;
        }
    }

    /// # Safety
    ///
    /// What the entry points to must stay valid until it completed.
    unsafe fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: as the caller promises. The queue has an entry for each request that may be under
        // way, so it is never full; were it, submitting would empty it.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // An error here comes back from the next wait.
            let _ = self.ring.submit();
        }
    }

    fn submit_and_wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            // A signal, or a system short of memory or behind with completions: what completed is
            // collected, and the caller waits again.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn collect(&mut self, completed: &mut Vec<Completed>) {
        for entry in self.ring.completion() {
            if entry.user_data() == WAKE {
                self.wake_is_armed = false;
            } else {
                self.with_kernel -= 1;
                completed.push(Completed { key: entry.user_data(), result: entry.result() });
            }
        }
    }
}

// SAFETY: the ring completes each request once, with its true result, after it has let go of the
// memory; dropping waits for all of them.
unsafe impl Kernel for Uring {
    unsafe fn start(&mut self, key: u64, request: Request) {
        let Request { action, offset, slices, slice_count } = request;
        // SAFETY: the caller keeps the slices valid.
        let only = (slice_count == 1).then(|| unsafe { *slices });
        let pinned =
            only.and_then(|slice| Some((slice, self.pinned.find(slice.iov_base.addr(), slice.iov_len)?)));
        let entry = match (action, pinned) {
            (Action::Read, None) => opcode::Readv::new(FILE, slices, slice_count).offset(offset).build(),
            (Action::Write, None) => opcode::Writev::new(FILE, slices, slice_count).offset(offset).build(),
            (Action::Read, Some((slice, buffer))) => {
                let (start, len) = (slice.iov_base.cast(), slice.iov_len as u32);
                opcode::ReadFixed::new(FILE, start, len, buffer).offset(offset).build()
            }
            (Action::Write, Some((slice, buffer))) => {
                let (start, len) = (slice.iov_base.cast_const().cast(), slice.iov_len as u32);
                opcode::WriteFixed::new(FILE, start, len, buffer).offset(offset).build()
            }
        };
        // SAFETY: as the caller promises.
        unsafe { self.push(entry.user_data(key)) };
        self.with_kernel += 1;
    }

    fn wait(&mut self, completed: &mut Vec<Completed>) -> io::Result<()> {
        self.arm_wake();
        self.submit_and_wait()?;
        self.collect(completed);
        Ok(())
    }

    unsafe fn pin(&mut self, start: NonNull<u8>, len: usize) -> io::Result<()> {
        if !self.has_buffer_table {
            self.ring.submitter().register_buffers_sparse(PINNED_PARTS_MAX as u32)?;
            self.has_buffer_table = true;
        }
        for part in self.pinned.cut(start.addr().get(), len)? {
            let part_start = start.with_addr(start.addr().saturating_add(part.start - start.addr().get()));
            let buffer = libc::iovec { iov_base: part_start.as_ptr().cast(), iov_len: part.len };
            // SAFETY: as the caller promises; the part lies inside of what it promised.
            unsafe { self.ring.submitter().register_buffers_update(part.index.into(), &[buffer], None) }?;
            self.pinned.insert(part);
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        let eventfd = Arc::clone(&self.eventfd);
        Arc::new(move || {
            // The only error is a counter at its limit, and then the reader is about to wake up.
            let _ = rustix::io::write(&*eventfd, &1u64.to_ne_bytes());
        })
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        (self.waker())();
        let mut completed = Vec::new();
        while self.with_kernel > 0 || self.wake_is_armed {
            if self.submit_and_wait().is_err() {
                // While nothing can be known about what is under way, its memory must not be given
                // back.
                std::thread::sleep(PAUSE_AFTER_FAILED_WAIT);
            }
            self.collect(&mut completed);
        }
        // The ring itself is torn down later; the file must not stay open until then.
        let _ = self.ring.submitter().unregister_files();
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("with_kernel", &self.with_kernel).finish_non_exhaustive()
    }
}
