//! The kernel of Forebay's disk link with faults in front of it, call by call. This file plays
//! faults.

use crate::faults::{Ending, Faults};
use crate::power::Announced;
use forebay_store::disk::{Action, Completed, Kernel, Request};
use forebay_transfer::Waker;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// A kernel in front of a real one.
pub struct FaultyKernel {
    inner: Box<dyn Kernel>,
    /// The same file for the power supply, which reads and writes it as it likes.
    file: Arc<File>,
    faults: Arc<Faults>,
    under_way: HashMap<u64, UnderWay>,
    /// Ended without having been started.
    ended: Vec<Completed>,
}

/// What is kept until a request completed.
enum UnderWay {
    Read(Vec<libc::iovec>),
    Write(Vec<libc::iovec>, Announced),
}

// SAFETY: the slices are used on the thread that owns the kernel.
unsafe impl Send for FaultyKernel {}

impl FaultyKernel {
    /// A kernel whose requests end as `faults` says.
    pub fn new(inner: Box<dyn Kernel>, file: Arc<File>, faults: Arc<Faults>) -> FaultyKernel {
        FaultyKernel { inner, file, faults, under_way: HashMap::new(), ended: Vec::new() }
    }

    /// Tells the power supply of a request, which may be the last.
    ///
    /// # Safety
    ///
    /// The slices and the memory behind them must be valid.
    unsafe fn announce(&self, action: Action, offset: u64, slices: Vec<libc::iovec>) -> io::Result<UnderWay> {
        Ok(match action {
            Action::Read => UnderWay::Read(slices),
            Action::Write => {
                let part = |slice: &libc::iovec| {
                    // SAFETY: as the caller promises.
                    unsafe { std::slice::from_raw_parts(slice.iov_base.cast_const().cast(), slice.iov_len) }
                };
                let parts: Vec<&[u8]> = slices.iter().map(part).collect();
                let announced = self.faults.power().write(&self.file, offset, &parts)?;
                UnderWay::Write(slices, announced)
            }
        })
    }

    fn has_ended(&mut self, completed: Completed) {
        if let Some(UnderWay::Write(_, announced)) = self.under_way.remove(&completed.key) {
            self.faults.power().written(announced);
        }
    }
}

// SAFETY: every request is completed once: by the inner kernel with its true result, or here
// without having been started.
unsafe impl Kernel for FaultyKernel {
    unsafe fn start(&mut self, key: u64, request: Request) {
        // SAFETY: the caller keeps the slices valid.
        let all = unsafe { first_bytes(&request, usize::MAX) };
        let bytes = all.iter().map(|slice| slice.iov_len).sum();
        let ending = match request.action {
            Action::Read => self.faults.read(bytes),
            Action::Write => self.faults.write(bytes),
        };
        let slices = match ending {
            Ending::Honest => all,
            // Direct I/O cannot move less than a page's worth of sectors at once.
            // SAFETY: the caller keeps the slices valid.
            Ending::Short(fewer) => unsafe { first_bytes(&request, fewer.next_multiple_of(4096).min(bytes)) },
            Ending::Zero => return self.ended.push(Completed { key, result: 0 }),
            Ending::Error(errno) => return self.ended.push(Completed { key, result: -errno }),
        };
        // SAFETY: the caller keeps the memory valid, and the slices are `all` of it or its first
        // bytes.
        match unsafe { self.announce(request.action, request.offset, slices) } {
            Ok(under_way) => {
                let (UnderWay::Read(slices) | UnderWay::Write(slices, _)) = &under_way;
                let request =
                    Request { slices: slices.as_ptr(), slice_count: slices.len() as u32, ..request };
                // The slices' own memory does not move with the map's.
                self.under_way.insert(key, under_way);
                // SAFETY: as the caller promises; the slices stay in the map until the request
                // completed.
                unsafe { self.inner.start(key, request) };
            }
            Err(_) => self.ended.push(Completed { key, result: -libc::EIO }),
        }
    }

    fn wait(&mut self, completed: &mut Vec<Completed>) -> io::Result<()> {
        if !self.ended.is_empty() {
            (self.inner.waker())();
        }
        let first = completed.len();
        self.inner.wait(completed)?;
        for done in &completed[first..] {
            self.has_ended(*done);
        }
        completed.append(&mut self.ended);
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
