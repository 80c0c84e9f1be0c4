//! What the drivers promise by themselves, below the link.

use crate::world::{DEPTH, PAGE, directory};
use forebay_links::disk::{Action, Completed, DiskFile, Kernel, Request, Threads, Uring};
use forebay_mover::{Backing, HostBuffer};

/// Each driver that this system allows, on a file of `DEPTH` pages of sevens.
fn for_each_kernel(test: impl Fn(Box<dyn Kernel>)) {
    let directory = directory();
    let path = directory.path().join("kv");
    std::fs::write(&path, vec![7; (u64::from(DEPTH) * PAGE) as usize]).unwrap();
    let file = DiskFile::open(&path).unwrap();
    test(Box::new(Threads::open(&file, DEPTH).unwrap()));
    match Uring::open(&file, DEPTH) {
        Ok(kernel) => test(Box::new(kernel)),
        Err(error) => testkit::skipped(format_args!("io_uring: {error}")),
    }
}

/// Starts a read of each page of the file into the buffer.
///
/// # Safety
///
/// Buffer and slices must outlive the kernel.
unsafe fn start_reads(kernel: &mut dyn Kernel, buffer: &HostBuffer, slices: &mut Vec<libc::iovec>) {
    slices.extend((0..DEPTH as usize).map(|page| libc::iovec {
        iov_base: buffer.as_ptr().wrapping_add(page * PAGE as usize).cast(),
        iov_len: PAGE as usize,
    }));
    for (page, slice) in slices.iter().enumerate() {
        let offset = page as u64 * PAGE;
        let request = Request { action: Action::Read, offset, slices: slice, slice_count: 1 };
        // SAFETY: as the caller promises; there are as many requests as the kernel was made for.
        unsafe { kernel.start(page as u64, request) };
    }
}

#[test]
fn dropping_a_driver_waits_until_its_requests_are_quiet() {
    for_each_kernel(|mut kernel| {
        let (buffer, mut slices) = (HostBuffer::new((u64::from(DEPTH) * PAGE) as usize), Vec::new());
        let name = kernel.name();
        // SAFETY: the kernel is dropped before the buffer and the slices.
        unsafe { start_reads(&mut *kernel, &buffer, &mut slices) };
        drop(kernel);
        let mut bytes = vec![0; buffer.len()];
        buffer.read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 7), "{name} left requests behind");
    });
}

#[test]
fn every_request_completes_once_with_its_key_and_bytes() {
    for_each_kernel(|mut kernel| {
        let (buffer, mut slices) = (HostBuffer::new((u64::from(DEPTH) * PAGE) as usize), Vec::new());
        // SAFETY: the kernel is dropped before the buffer and the slices.
        unsafe { start_reads(&mut *kernel, &buffer, &mut slices) };
        let mut completed = Vec::new();
        while completed.len() < DEPTH as usize {
            kernel.wait(&mut completed).unwrap();
        }
        completed.sort_by_key(|completed| completed.key);
        let all = (0..u64::from(DEPTH)).map(|key| Completed { key, result: PAGE as i32 });
        assert_eq!(completed, all.collect::<Vec<_>>());
        drop(kernel);
    });
}

#[test]
fn a_wake_up_is_kept_for_the_next_wait() {
    for_each_kernel(|mut kernel| {
        let waker = kernel.waker();
        let mut completed = Vec::new();
        for _ in 0..3 {
            waker();
            waker();
            kernel.wait(&mut completed).unwrap();
        }
        assert!(completed.is_empty());
    });
}
