//! Each misuse is found, and what is allowed is not reported.
#![allow(clippy::unwrap_used)]

mod common;
use common::{Cuda, alone, at, cu};

const BYTES: usize = 1 << 20;
const LARGE: usize = 32 << 20;
const INVALID_VALUE: i32 = 1;

fn found(cuda: &Cuda, words: &str) {
    assert!(cuda.report().contains(words), "want {words:?} in {:?}", cuda.report());
}

#[test]
fn unordered_copies_of_the_same_bytes_are_found_whatever_their_timing() {
    alone("unordered_copies_of_the_same_bytes_are_found_whatever_their_timing", &[], |cuda| {
        cuda.start(1);
        let (first, then, device, host) =
            (cuda.stream(), cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
        assert_eq!(cuda.copy(device, at(host), BYTES, first), 0);
        // Long over by now, most likely. Nobody has asked.
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(cuda.copy(at(host), device, BYTES, then), 0);
        assert_eq!((cuda.sync(then), cuda.sync(first)), (0, 0));
        found(cuda, "in no order");
    });
}

#[test]
fn what_the_host_has_waited_for_is_ordered() {
    alone("what_the_host_has_waited_for_is_ordered", &[], |cuda| {
        cuda.start(1);
        let (first, then, device, host) =
            (cuda.stream(), cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
        let event = cuda.event();
        for _ in 0..3 {
            assert_eq!(cuda.copy(device, at(host), BYTES, first), 0);
            assert_eq!(cuda.record(event, first), 0);
            assert_eq!(cu!(cuda, cuEventSynchronize(event => usize)), 0);
            assert_eq!(cuda.copy(at(host), device, BYTES, then), 0);
            assert_eq!(cuda.sync(then), 0);
        }
        assert_eq!(cuda.report(), "");
    });
}

#[test]
fn copies_beside_each_other_are_no_misuse() {
    alone("copies_beside_each_other_are_no_misuse", &[], |cuda| {
        cuda.start(1);
        let (device, host) = (cuda.alloc(BYTES), cuda.pinned(BYTES));
        for part in 0..4 {
            let (stream, offset) = (cuda.stream(), part * (BYTES / 4));
            assert_eq!(cuda.copy(device + offset as u64, at(&host[offset..]), BYTES / 4, stream), 0);
        }
        assert_eq!(cu!(cuda, cuCtxSynchronize()), 0);
        assert_eq!(cuda.report(), "");
    });
}

#[test]
fn memory_that_is_freed_under_a_copy_is_found_and_the_free_waits() {
    alone(
        "memory_that_is_freed_under_a_copy_is_found_and_the_free_waits",
        &[("FAKE_CUDA_RATES", "h2d=0.002")],
        |cuda| {
            cuda.start(1);
            let (stream, device, host) = (cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
            assert_eq!(cuda.copy(device, at(host), BYTES, stream), 0);
            assert_eq!(cuda.free(device), 0);
            assert_eq!(cuda.query(stream), 0, "the copy is over");
            found(cuda, "cuMemFree_v2: memory that cuMemcpyAsync uses");
            assert_eq!(cuda.copy(device, at(host), BYTES, stream), INVALID_VALUE);
            found(cuda, "freed memory");
            assert_eq!(cuda.free(device), INVALID_VALUE);
            found(cuda, "no such memory");
        },
    );
}

#[test]
fn freed_addresses_are_not_the_hosts_next_ones() {
    alone("freed_addresses_are_not_the_hosts_next_ones", &[], |cuda| {
        cuda.start(1);
        let (device, freed) = (cuda.alloc(LARGE), cuda.pinned(LARGE));
        assert_eq!(cu!(cuda, cuMemFreeHost(at(freed) as usize => usize)), 0);
        assert_eq!(cuda.free(cuda.alloc(LARGE)), 0);
        // They fit into what was freed: the kernel would put them there.
        for _ in 0..4 {
            let hosts = vec![1_u8; LARGE / 2].leak();
            assert_eq!(cuda.copy(device, at(hosts), LARGE / 2, 0), 0);
        }
        assert_eq!((cu!(cuda, cuCtxSynchronize()), cuda.report()), (0, String::new()));
        assert_eq!(cuda.copy(device, at(freed), LARGE, 0), INVALID_VALUE);
        found(cuda, "freed memory");
    });
}

#[test]
fn bytes_beyond_the_end_and_across_registrations_are_found() {
    alone("bytes_beyond_the_end_and_across_registrations_are_found", &[], |cuda| {
        cuda.start(1);
        let (stream, device) = (cuda.stream(), cuda.alloc(BYTES));
        let host = vec![0u8; BYTES];
        for half in host.chunks(BYTES / 2) {
            let code =
                cu!(cuda, cuMemHostRegister_v2(half.as_ptr() => *const u8, half.len() => usize, 0 => u32));
            assert_eq!(code, 0);
        }
        assert_eq!(cuda.copy(device + 1, at(&host), BYTES / 2, stream), 0);
        assert_eq!(cuda.report(), "");
        assert_eq!(cuda.copy(device + 1, at(&host), BYTES, stream), INVALID_VALUE);
        assert_eq!(cuda.copy(device, at(&host), BYTES, stream), INVALID_VALUE, "across two registrations");
        found(cuda, "2 x cuMemcpyAsync: bytes beyond the end");
        assert_eq!(cuda.sync(stream), 0);
        for half in host.chunks(BYTES / 2) {
            assert_eq!(cu!(cuda, cuMemHostUnregister(half.as_ptr() => *const u8)), 0);
        }
        assert_eq!(cuda.stat("live.host"), 0);
    });
}

#[test]
fn a_peer_must_be_given_access() {
    alone("a_peer_must_be_given_access", &[], |cuda| {
        let contexts = cuda.start(2);
        let (own, stream, host) = (cuda.alloc(BYTES), cuda.stream(), cuda.pinned(BYTES));
        cuda.enter(contexts[1]);
        let theirs = cuda.alloc(BYTES);
        cuda.enter(contexts[0]);
        // Over the other GPU's own link: needs nobody's leave.
        assert_eq!(cuda.copy(theirs, at(host), BYTES, stream), 0);
        assert_eq!(cuda.report(), "");
        assert_eq!(cuda.copy(own, theirs, BYTES, stream), 0);
        found(cuda, "GPU 0 has no peer access to GPU 1");
        let before = cuda.report();
        cuda.peer(contexts[1]);
        assert_eq!(cuda.copy(own, theirs, BYTES, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert_eq!(cuda.report(), before);
        assert_eq!(cuda.stat("bytes.h2d.1"), BYTES as u64);
        assert_eq!(cuda.stat("bytes.p2p.1.0"), 2 * BYTES as u64);
    });
}

#[test]
fn a_kernel_that_reaches_for_what_it_may_not_poisons_its_context() {
    alone("a_kernel_that_reaches_for_what_it_may_not_poisons_its_context", &[], |cuda| {
        let contexts = cuda.start(2);
        let (stream, own) = (cuda.stream(), cuda.alloc(BYTES));
        let pageable = vec![0u8; BYTES];
        assert_eq!(cuda.copy_pieces(stream, &[[at(&pageable), own, BYTES as u64]]), 0);
        assert_eq!(cuda.sync(stream), 700);
        assert_eq!(cuda.copy(own, at(&pageable), BYTES, stream), 700, "the error sticks");
        found(cuda, "kernel forebay_pieces");
        cuda.enter(contexts[1]);
        assert_eq!(cu!(cuda, cuCtxSynchronize()), 0, "the other context is well");
    });
}

#[test]
fn objects_of_another_gpu_are_refused() {
    alone("objects_of_another_gpu_are_refused", &[], |cuda| {
        let contexts = cuda.start(2);
        let (stream, event) = (cuda.stream(), cuda.event());
        cuda.enter(contexts[1]);
        let other = cuda.stream();
        assert_eq!(cuda.copy_pieces(stream, &[]), 400);
        found(cuda, "in a stream of GPU 0 with a context of GPU 1");
        assert_eq!(cuda.record(event, other), 400);
        found(cuda, "an event of GPU 0 in a stream of GPU 1");
        assert_eq!(cuda.wait_event(other, event), 0, "waiting for it is fine");
    });
}

#[test]
fn a_destroyed_event_is_not_waited_for() {
    alone("a_destroyed_event_is_not_waited_for", &[], |cuda| {
        cuda.start(1);
        let (stream, event) = (cuda.stream(), cuda.event());
        assert_eq!(cu!(cuda, cuEventDestroy_v2(event => usize)), 0);
        assert_eq!(cuda.wait_event(stream, event), 400);
        assert_eq!(cu!(cuda, cuStreamDestroy_v2(stream => usize)), 0);
        assert_eq!(cuda.sync(stream), 400);
        found(cuda, "an event that does not exist");
        found(cuda, "a stream that does not exist");
        assert_eq!((cuda.stat("live.events"), cuda.stat("live.streams")), (0, 0));
    });
}

#[test]
fn a_device_address_cannot_be_followed_by_the_host() {
    if std::env::var("FAKE_CUDA_FOLLOW").is_ok() {
        let cuda = Cuda::load();
        cuda.start(1);
        // SAFETY: not at all: the process is expected to die of it.
        println!("{}", unsafe { (cuda.alloc(BYTES) as *const u8).read_volatile() });
        return;
    }
    let libcuda = &fake_cuda_install::installed().libcuda;
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["a_device_address_cannot_be_followed_by_the_host", "--exact"]);
    let output = child.env("FAKE_CUDA_FOLLOW", "1").env("FAKE_CUDA_TEST_LIBCUDA", libcuda).output().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(libc::SIGSEGV));
}
