//! Guarantees of memory that processes share, and of virtual memory.
#![allow(clippy::unwrap_used)]

mod common;
use common::{Cuda, alone, at, cu};
use std::os::unix::process::CommandExt;
use std::process::Command;

const BYTES: usize = 1 << 20;

#[repr(C)]
#[derive(Clone, Copy)]
struct Handle([u8; 64]);

fn open(cuda: &Cuda, handle: Handle) -> (i32, u64) {
    let mut address = 0u64;
    (cu!(cuda, cuIpcOpenMemHandle_v2(&mut address => *mut u64, handle => Handle, 1 => u32)), address)
}

/// What the other process does: adds 1 to each byte, over its own GPU 1 alone.
fn importer(cuda: &Cuda, handle: Handle) {
    cuda.start(1);
    let (code, theirs) = open(cuda, handle);
    assert_eq!(code, 0);
    assert_eq!(open(cuda, handle), (0, theirs), "one mapping, however often it is opened");
    let (stream, host) = (cuda.stream(), cuda.pinned(BYTES));
    let staging = cuda.alloc(BYTES);
    assert_eq!(cuda.copy(staging, theirs, BYTES, stream), 0);
    assert_eq!(cuda.copy(at(host), staging, BYTES, stream), 0);
    assert_eq!(cuda.sync(stream), 0);
    host.iter_mut().for_each(|byte| *byte += 1);
    assert_eq!(cuda.copy(theirs, at(host), BYTES, stream), 0);
    assert_eq!(cuda.sync(stream), 0);
    assert_eq!(cuda.stat("bytes.p2p.0.1"), BYTES as u64);
    let close = || cu!(cuda, cuIpcCloseMemHandle(theirs => u64));
    assert_eq!([close(), cuda.stat("live.foreign") as i32], [0, 1]);
    assert_eq!([close(), cuda.stat("live.foreign") as i32, close()], [0, 0, 1]);
    assert_eq!(cuda.report(), "");
}

#[test]
fn another_process_reads_and_writes_the_same_bytes_until_they_are_freed() {
    let test = "another_process_reads_and_writes_the_same_bytes_until_they_are_freed";
    alone(test, &[], |cuda| {
        if let Ok(given) = std::env::var("FAKE_CUDA_HANDLE") {
            let bytes: Vec<u8> = given.split('.').map(|byte| byte.parse().unwrap()).collect();
            let handle = Handle(bytes.try_into().unwrap());
            if std::env::var("FAKE_CUDA_STALE").is_ok() {
                cuda.start(1);
                assert_eq!(open(cuda, handle).0, 205);
                return;
            }
            return importer(cuda, handle);
        }
        cuda.start(1);
        let (stream, device, host) = (cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
        host.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index % 200) as u8);
        assert_eq!(cuda.copy(device, at(host), BYTES, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        let mut handle = Handle([0; 64]);
        assert_eq!(cu!(cuda, cuIpcGetMemHandle(&mut handle => *mut Handle, device + 5 => u64)), 0);
        assert_eq!(open(cuda, handle).0, 201, "not in the same process");
        let given = handle.0.map(|byte| byte.to_string()).join(".");
        let child = || {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args([test, "--exact"]).env("FAKE_CUDA_HANDLE", &given).env("CUDA_VISIBLE_DEVICES", "1");
            child
        };
        let output = child().output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let back = cuda.pinned(BYTES);
        assert_eq!(cuda.copy(at(back), device, BYTES, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert!(back.iter().enumerate().all(|(index, &byte)| byte == (index % 200 + 1) as u8));
        // Its descriptor's number may mean another allocation by now.
        assert_eq!(cuda.free(device), 0);
        cuda.alloc(BYTES);
        let output = child().env("FAKE_CUDA_STALE", "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
    });
}

/// Virtual memory of GPU 0 that only it may touch, as an engine's allocator makes it.
fn virtual_memory(cuda: &Cuda, bytes: usize) -> (u64, u64) {
    let prop: [u32; 8] = [1, 0, 1, 0, 0, 0, 0, 0];
    let access = [1u32, 0, 3];
    let (mut handle, mut address) = (0u64, 0u64);
    assert_eq!(
        cu!(cuda, cuMemCreate(&mut handle => *mut u64, bytes => usize, prop.as_ptr() => *const u32, 0 => u64)),
        0
    );
    let code = cu!(cuda, cuMemAddressReserve(&mut address => *mut u64, bytes => usize, 0 => usize, 0 => u64, 0 => u64));
    assert_eq!(code, 0);
    assert_eq!(cu!(cuda, cuMemMap(address => u64, bytes => usize, 0 => usize, handle => u64, 0 => u64)), 0);
    let code =
        cu!(cuda, cuMemSetAccess(address => u64, bytes => usize, access.as_ptr() => *const u32, 1 => usize));
    assert_eq!(code, 0);
    (address, handle)
}

#[test]
fn no_peer_touches_virtual_memory_that_it_was_not_given() {
    alone("no_peer_touches_virtual_memory_that_it_was_not_given", &[], |cuda| {
        let contexts = cuda.start(2);
        let bytes = 2 << 20;
        let (address, handle) = virtual_memory(cuda, bytes);
        let (stream, host, back) = (cuda.stream(), cuda.pinned(bytes), cuda.pinned(bytes));
        host.fill(8);
        assert_eq!(cuda.copy(address, at(host), bytes, stream), 0);
        assert_eq!(cuda.copy(at(back), address, bytes, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert_eq!(host, back);
        let mut ipc = Handle([0; 64]);
        assert_eq!(cu!(cuda, cuIpcGetMemHandle(&mut ipc => *mut Handle, address => u64)), 1);
        cuda.enter(contexts[1]);
        cuda.peer(contexts[0]);
        let (theirs, other) = (cuda.alloc(bytes), cuda.stream());
        assert_eq!(cuda.report(), "");
        assert_eq!(cuda.copy(theirs, address, bytes, other), 1);
        assert!(cuda.report().contains("GPU 1 has no access to Virtual memory of GPU 0"));
        assert_eq!(cu!(cuda, cuMemUnmap(address => u64, bytes => usize)), 0);
        assert_eq!(cu!(cuda, cuMemRelease(handle => u64)), 0);
        assert_eq!((cuda.stat("live.mappings"), cuda.copy(theirs, address, bytes, other)), (0, 1));
    });
}

#[test]
fn pointers_tell_what_they_are() {
    alone("pointers_tell_what_they_are", &[("CUDA_VISIBLE_DEVICES", "2,0")], |cuda| {
        cuda.start(2);
        let (device, pinned, pageable) = (cuda.alloc(BYTES), cuda.pinned(BYTES), vec![0u8; 10]);
        let mut managed = 0u64;
        assert_eq!(cu!(cuda, cuMemAllocManaged(&mut managed => *mut u64, BYTES => usize, 1 => u32)), 0);
        let ask = |address: u64| {
            let (mut kind, mut start, mut bytes, mut is_managed, mut ordinal) = (9u32, 9u64, 9u64, 9u8, 9i32);
            let values: [*mut u8; 5] = [
                (&raw mut kind).cast(),
                (&raw mut start).cast(),
                (&raw mut bytes).cast(),
                &raw mut is_managed,
                (&raw mut ordinal).cast(),
            ];
            let names = [2i32, 11, 12, 8, 9];
            let code = cu!(cuda, cuPointerGetAttributes(5 => u32, names.as_ptr() => *const i32, values.as_ptr() => *const *mut u8,
                address => u64));
            assert_eq!(code, 0);
            (kind, start, bytes, is_managed, ordinal)
        };
        let bytes = BYTES as u64;
        assert_eq!(ask(device + 9), (2, device, bytes, 0, 0));
        assert_eq!(ask(at(pinned)), (1, at(pinned), bytes, 0, 0));
        assert_eq!(ask(managed), (2, managed, bytes, 1, 0));
        assert_eq!(ask(at(&pageable)), (0, 0, 0, 0, -2));
    });
}

#[test]
fn memory_that_is_mapped_outlives_the_process_that_exported_it() {
    let test = "memory_that_is_mapped_outlives_the_process_that_exported_it";
    alone(test, &[], |cuda| {
        cuda.start(1);
        let (stream, host) = (cuda.stream(), cuda.pinned(BYTES));
        if std::env::var("FAKE_CUDA_EXPORTS").is_ok() {
            let device = cuda.alloc(BYTES);
            host.fill(6);
            assert_eq!(cuda.copy(device, at(host), BYTES, stream), 0);
            assert_eq!(cuda.sync(stream), 0);
            let mut handle = Handle([0; 64]);
            assert_eq!(cu!(cuda, cuIpcGetMemHandle(&mut handle => *mut Handle, device => u64)), 0);
            std::fs::write(std::env::var("FAKE_CUDA_EXPORTS").unwrap(), handle.0).unwrap();
            loop {
                std::thread::park();
            }
        }
        let path = std::env::temp_dir().join(format!("fake-cuda-handle-{}", std::process::id()));
        let mut exporter = Command::new(std::env::current_exe().unwrap());
        exporter.args([test, "--exact"]).env("FAKE_CUDA_EXPORTS", &path);
        // One that outlived this process would hold its output open.
        // SAFETY: the call is one that may be made between fork and exec.
        unsafe {
            exporter.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut exporter = exporter.spawn().unwrap();
        testkit::eventually("the handle is written", || {
            std::fs::read(&path).is_ok_and(|bytes| bytes.len() == 64)
        });
        let handle = Handle(std::fs::read(&path).unwrap().try_into().unwrap());
        std::fs::remove_file(&path).unwrap();
        let (code, theirs) = open(cuda, handle);
        assert_eq!(code, 0);
        exporter.kill().unwrap();
        exporter.wait().unwrap();
        assert_eq!(cuda.copy(at(host), theirs, BYTES, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert!(host.iter().all(|&byte| byte == 6));
        assert_eq!(cu!(cuda, cuIpcCloseMemHandle(theirs => u64)), 0);
        assert_eq!(open(cuda, handle).0, 205, "the handle has gone stale");
    });
}
