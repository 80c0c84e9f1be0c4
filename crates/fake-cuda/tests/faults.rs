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
        common::until(|| cuda.stat("live.operations") == 0);
        assert!(cuda.stat("bytes.h2d.0") <= BYTES as u64, "the second copy never ran");
        assert_eq!(cuda.copy(device, at(host), BYTES, stream), 700);
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

/// GB/s of copies from the host to some GPUs at once, each in two streams; another figure each time that it is asked for.
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
