//! Faults happen when they are asked for, and links take as long as they should.
#![allow(clippy::unwrap_used)]

mod common;
use common::{Cuda, alone, at, cu};
use std::time::{Duration, Instant};

const BYTES: usize = 1 << 20;

#[test]
fn the_call_that_is_to_fail_fails_once() {
    alone(
        "the_call_that_is_to_fail_fails_once",
        &[("FAKE_CUDA_FAULTS", "fail cuMemcpyAsync 2 719")],
        |cuda| {
            cuda.start(1);
            let (stream, device, host) = (cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
            let codes = [(); 4].map(|()| cuda.copy(device, at(host), BYTES, stream));
            assert_eq!(codes, [0, 719, 0, 0]);
            assert_eq!(cuda.sync(stream), 0);
            assert_eq!((cuda.stat("cuMemcpyAsync"), cuda.stat("bytes.h2d.0")), (4, 3 * BYTES as u64));
        },
    );
}

#[test]
fn a_poisoned_context_fails_everything_and_runs_nothing() {
    alone("a_poisoned_context_fails_everything_and_runs_nothing", &[], |cuda| {
        cuda.start(1);
        let (stream, device, host) = (cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
        cuda.control("freeze h2d.0");
        assert_eq!(cuda.copy(device, at(host), BYTES, stream), 0);
        assert_eq!(cuda.copy(device, at(host), BYTES, stream), 0);
        cuda.control("poison 0 700; release h2d.0");
        assert_eq!(cuda.sync(stream), 700);
        testkit::eventually("nothing is under way", || cuda.stat("live.operations") == 0);
        assert!(cuda.stat("bytes.h2d.0") <= BYTES as u64, "the second copy never ran");
        assert_eq!(cuda.copy(device, at(host), BYTES, stream), 700);
    });
}

/// GPUs 0 and 1 that reach each other, with a stream and memory of each, and pinned memory. GPU 0
/// is current.
fn two(cuda: &Cuda) -> (Vec<usize>, [usize; 2], [u64; 2], &'static mut [u8]) {
    let contexts = cuda.start(2);
    let made = [0, 1].map(|gpu| {
        cuda.enter(contexts[gpu]);
        cuda.peer(contexts[1 - gpu]);
        (cuda.stream(), cuda.alloc(BYTES))
    });
    cuda.enter(contexts[0]);
    let host = cuda.pinned(BYTES);
    (contexts, made.map(|(stream, _)| stream), made.map(|(_, memory)| memory), host)
}

#[test]
fn a_lost_gpu_takes_nothing_whichever_context_is_current() {
    alone("a_lost_gpu_takes_nothing_whichever_context_is_current", &[], |cuda| {
        let (contexts, streams, memory, host) = two(cuda);
        cuda.enter(contexts[1]);
        let theirs = cuda.event();
        assert_eq!(cuda.record(theirs, streams[1]), 0);
        cuda.enter(contexts[0]);
        cuda.control("poison 1 700");
        assert_eq!(cuda.copy(memory[1], at(host), 4096, streams[1]), 700, "a copy in its stream");
        assert_eq!(cuda.copy(memory[0], memory[1], 4096, streams[0]), 700, "a peer's copy of its memory");
        assert_eq!(cuda.record(theirs, streams[1]), 700);
        assert_eq!(cuda.wait_event(streams[0], theirs), 700, "a peer that would wait for its event");
        assert_eq!(cu!(cuda, cuEventQuery(theirs => usize)), 700);
        assert_eq!(cuda.query(streams[1]), 700);
        assert_eq!(cuda.sync(streams[1]), 700);
        // The other GPU is well.
        assert_eq!(cuda.copy(memory[0], at(host), BYTES, streams[0]), 0);
        assert_eq!(cuda.sync(streams[0]), 0);
    });
}

#[test]
fn what_waits_for_a_gpu_that_is_lost_does_not_end_as_success() {
    alone("what_waits_for_a_gpu_that_is_lost_does_not_end_as_success", &[], |cuda| {
        let (contexts, streams, memory, host) = two(cuda);
        cuda.enter(contexts[1]);
        let theirs = cuda.event();
        cuda.control("freeze h2d.1");
        assert_eq!(cuda.copy(memory[1], at(host), BYTES, streams[1]), 0);
        assert_eq!(cuda.record(theirs, streams[1]), 0);
        cuda.enter(contexts[0]);
        assert_eq!(cuda.wait_event(streams[0], theirs), 0);
        assert_eq!(cuda.copy(memory[0], at(host), BYTES, streams[0]), 0);
        cuda.control("poison 1 700; release h2d.1");
        assert_eq!(cuda.sync(streams[0]), 700);
        assert_eq!(cuda.stat("bytes.h2d.0"), 0, "what comes behind it never runs");
    });
}

#[test]
fn others_go_on_without_a_gpu_that_is_abandoned() {
    alone("others_go_on_without_a_gpu_that_is_abandoned", &[], |cuda| {
        let (contexts, streams, memory, host) = two(cuda);
        cuda.enter(contexts[1]);
        let theirs = cuda.event();
        cuda.control("freeze h2d.1");
        assert_eq!(cuda.copy(memory[1], at(host), BYTES, streams[1]), 0);
        assert_eq!(cuda.record(theirs, streams[1]), 0);
        cuda.enter(contexts[0]);
        assert_eq!(cuda.wait_event(streams[0], theirs), 0);
        cuda.control("abandon 1 700; release h2d.1");
        assert_eq!((cuda.sync(streams[0]), cuda.sync(streams[1])), (0, 700));
    });
}

#[test]
fn broken_peers_give_success_and_wrong_bytes() {
    alone("broken_peers_give_success_and_wrong_bytes", &[], |cuda| {
        let (_, streams, memory, host) = two(cuda);
        for (how, found) in [("right", 7), ("lost", 1), ("zero", 0)] {
            cuda.control(&format!("p2p copies {how}; p2p kernels {how}"));
            for by_kernel in [false, true] {
                for (at, byte) in [(memory[1], 7), (memory[0], 1)] {
                    host.fill(byte);
                    assert_eq!(cuda.copy(at, host.as_ptr() as u64, BYTES, streams[0]), 0);
                    assert_eq!(cuda.sync(streams[0]), 0);
                }
                let posted = match by_kernel {
                    true => cuda.copy_pieces(streams[0], &[[memory[1], memory[0], BYTES as u64]]),
                    false => cuda.copy(memory[0], memory[1], BYTES, streams[0]),
                };
                assert_eq!((posted, cuda.sync(streams[0])), (0, 0));
                assert_eq!(cuda.copy(at(host), memory[0], BYTES, streams[0]), 0);
                assert_eq!(cuda.sync(streams[0]), 0);
                assert!(host.iter().all(|&byte| byte == found), "{how}, by kernel: {by_kernel}");
            }
        }
    });
}

#[test]
fn a_refused_symbol_fails_each_time_until_it_is_mended() {
    alone("a_refused_symbol_fails_each_time_until_it_is_mended", &[], |cuda| {
        cuda.start(1);
        let (stream, device, host) = (cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
        cuda.control("refuse cuMemcpyAsync 801");
        let mut codes = [(); 2].map(|()| cuda.copy(device, at(host), BYTES, stream)).to_vec();
        cuda.control("mend");
        codes.push(cuda.copy(device, at(host), BYTES, stream));
        assert_eq!(codes, [801, 801, 0]);
        assert_eq!(cuda.sync(stream), 0);
    });
}

#[test]
fn what_a_context_had_is_misuse_after_its_reset() {
    alone("what_a_context_had_is_misuse_after_its_reset", &[], |cuda| {
        let (_, streams, memory, host) = two(cuda);
        let (event, kernel) = (cuda.event(), cuda.kernel("forebay_pieces"));
        cuda.control("freeze h2d.0");
        assert_eq!(cuda.copy(memory[0], at(host), BYTES, streams[0]), 0);
        assert_eq!(cuda.copy(memory[0], at(host), BYTES, streams[0]), 0);
        cuda.control("release h2d.0");
        assert_eq!(cu!(cuda, cuDevicePrimaryCtxReset_v2(0 => i32)), 0);
        assert_eq!(cuda.stat("live.operations"), 0);
        let before = cu!(cuda, fake_cuda_misuse());
        let stale = [
            cuda.sync(streams[0]),
            cuda.record(event, streams[1]),
            cuda.launch(kernel, 0, &[0, 0]),
            cuda.free(memory[0]),
        ];
        assert!(stale.iter().all(|&code| code != 0), "{stale:?}");
        assert_eq!(cu!(cuda, fake_cuda_misuse()) - before, 4, "{}", cuda.report());
        // The context is there, and empty.
        let (stream, device) = (cuda.stream(), cuda.alloc(BYTES));
        assert_eq!(cu!(cuda, cuMemsetD8Async(device => u64, 1 => u8, BYTES => usize, stream => usize)), 0);
        assert_eq!(cuda.sync(stream), 0);
    });
}

#[test]
fn a_compute_mode_is_told_and_a_prohibited_gpu_has_no_context() {
    let faults = ("FAKE_CUDA_FAULTS", "mode 1 3; mode 2 2");
    alone("a_compute_mode_is_told_and_a_prohibited_gpu_has_no_context", &[faults], |cuda| {
        cuda.start(2);
        let modes = [0, 1, 2].map(|gpu| {
            let mut mode = 9i32;
            let code = cu!(cuda, cuDeviceGetAttribute(&mut mode => *mut i32, 20 => i32, gpu => i32));
            assert_eq!(code, 0);
            mode
        });
        assert_eq!(modes, [0, 3, 2]);
        let mut context = 0usize;
        assert_eq!(cu!(cuda, cuDevicePrimaryCtxRetain(&mut context => *mut usize, 2 => i32)), 46);
    });
}

#[test]
fn a_delayed_engine_takes_its_time() {
    alone("a_delayed_engine_takes_its_time", &[], |cuda| {
        cuda.start(1);
        let (stream, device, host) = (cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES));
        cuda.control("delay d2h.0 30000");
        let start = Instant::now();
        assert_eq!(cuda.copy(at(host), device, 8, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert!(start.elapsed() >= Duration::from_millis(30));
    });
}

#[test]
fn commands_and_settings_that_make_no_sense_are_refused() {
    alone("commands_and_settings_that_make_no_sense_are_refused", &[("FAKE_CUDA_RATES", "pcie=1")], |cuda| {
        assert_eq!(cu!(cuda, cuInit(0 => u32)), 100);
        for command in ["fail cuInit", "freeze h2d.9", "poison 77 1", "dance"] {
            let text = std::ffi::CString::new(command).unwrap();
            assert_eq!(cu!(cuda, fake_cuda_control(text.as_ptr() => *const std::ffi::c_char)), -1);
        }
    });
}

#[test]
fn peers_that_are_switched_off_cannot_be_reached() {
    alone("peers_that_are_switched_off_cannot_be_reached", &[("FAKE_CUDA_FAULTS", "p2p off")], |cuda| {
        let contexts = cuda.start(2);
        let mut can = 9i32;
        assert_eq!(cu!(cuda, cuDeviceCanAccessPeer(&mut can => *mut i32, 0 => i32, 1 => i32)), 0);
        assert_eq!(can, 0);
        assert_eq!(cu!(cuda, cuCtxEnablePeerAccess(contexts[1] => usize, 0 => u32)), 217);
    });
}

/// GB/s of copies from the host to some GPUs at once, each in two streams; another figure each time
/// that it is asked for.
fn h2d_rates<'a>(cuda: &'a Cuda, contexts: &[usize], mib: usize) -> impl FnMut() -> f64 + use<'a> {
    let bytes = mib << 20;
    let host = cuda.pinned(bytes);
    let gpus = contexts.len();
    let mut streams = Vec::new();
    for &context in contexts {
        cuda.enter(context);
        let device = cuda.alloc(bytes);
        streams.extend(
            [0, bytes / 2]
                .map(|offset| (context, cuda.stream(), device + offset as u64, at(&host[offset..]))),
        );
    }
    move || {
        let start = Instant::now();
        for &(context, stream, device, host) in &streams {
            cuda.enter(context);
            assert_eq!(cuda.copy(device, host, bytes / 2, stream), 0);
        }
        streams.iter().for_each(|&(_, stream, ..)| assert_eq!(cuda.sync(stream), 0));
        (bytes * gpus) as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

#[test]
fn links_give_the_rates_they_are_set_to_and_the_host_caps_their_sum() {
    let rates = ("FAKE_CUDA_RATES", "h2d=0.2,h2d.2=0.1,host_h2d=0.3");
    alone("links_give_the_rates_they_are_set_to_and_the_host_caps_their_sum", &[rates], |cuda| {
        let contexts = cuda.start(3);
        // Never faster; slower only while this machine is busy with other things.
        for (contexts, rate) in [(&contexts[..1], 0.2), (&contexts[2..], 0.1), (&contexts[..2], 0.3)] {
            let (mut rates, begun) = (h2d_rates(cuda, contexts, 16), Instant::now());
            loop {
                let found = rates();
                assert!(found < 1.03 * rate, "{found} GB/s where {rate} is set");
                if found >= 0.9 * rate {
                    break;
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "{found} GB/s where {rate} is set");
            }
        }
    });
}
