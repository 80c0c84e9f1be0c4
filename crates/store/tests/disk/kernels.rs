//! What the drivers promise by themselves, below the link.

use crate::world::{DEPTH, PAGE, directory};
use forebay_store::disk::{
    Action, Completed, DiskFile, DiskLink, DiskOptions, Kernel, Request, Threads, Uring,
};
use forebay_transfer::{Backing, HostBuffer};

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

/// Has the system refuse `io_uring_enter` to this thread and those that it starts, and nothing
/// else.
fn deny_io_uring_enter() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut steps = [
        // The call's number, compared, and the answer.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_enter as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program is valid during the call, which copies it.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_ring_that_may_be_made_but_not_used_is_left_for_threads() {
    let directory = directory();
    let path = directory.path().join("kv");
    DiskFile::create(&path, PAGE).unwrap();
    let open = move || {
        deny_io_uring_enter();
        assert!(Uring::open(DiskFile::open(&path).unwrap(), DEPTH).is_err());
        let link = DiskLink::open(DiskFile::open(&path).unwrap(), DiskOptions::default()).unwrap();
        assert_eq!(link.driver(), "threads");
    };
    // The filter goes with the thread.
    std::thread::spawn(open).join().unwrap();
}
