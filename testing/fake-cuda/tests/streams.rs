//! Guarantees of streams, events and values in memory.
#![allow(clippy::unwrap_used)]

mod common;
use common::{Cuda, alone, at, cu};
use testkit::eventually;

const BYTES: usize = 1 << 20;

/// A stream that copies from the host is held up, and what comes after it must not have happened.
fn frozen_chain(cuda: &Cuda, first: usize, then: usize, between: impl FnOnce()) {
    let (device, source, back) = (cuda.alloc(BYTES), cuda.pinned(BYTES), cuda.pinned(BYTES));
    source.fill(7);
    cuda.control("freeze h2d.0");
    assert_eq!(cuda.copy(device, at(source), BYTES, first), 0);
    between();
    assert_eq!(cuda.copy(at(back), device, BYTES, then), 0);
    assert_eq!(cuda.query(then), 600);
    assert!(back.iter().all(|&byte| byte == 0));
    cuda.control("release h2d.0");
    assert_eq!(cuda.sync(then), 0);
    assert!(back.iter().all(|&byte| byte == 7));
    assert_eq!(cuda.report(), "");
}

#[test]
fn a_stream_is_in_order() {
    alone("a_stream_is_in_order", &[], |cuda| {
        cuda.start(1);
        let stream = cuda.stream();
        frozen_chain(cuda, stream, stream, || ());
    });
}

#[test]
fn an_event_orders_two_streams() {
    alone("an_event_orders_two_streams", &[], |cuda| {
        cuda.start(1);
        let (first, then, event) = (cuda.stream(), cuda.stream(), cuda.event());
        frozen_chain(cuda, first, then, || {
            assert_eq!(cuda.record(event, first), 0);
            assert_eq!(cuda.wait_event(then, event), 0);
        });
    });
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it() {
    alone("the_legacy_stream_waits_for_blocking_streams_and_they_for_it", &[], |cuda| {
        cuda.start(1);
        let blocking = cuda.stream_with(0);
        frozen_chain(cuda, blocking, 0, || ());
        frozen_chain(cuda, 0, blocking, || ());
    });
}

#[test]
fn a_copy_moves_its_bytes_when_it_runs_and_not_before() {
    alone("a_copy_moves_its_bytes_when_it_runs_and_not_before", &[], |cuda| {
        cuda.start(1);
        let (stream, device, source, back) =
            (cuda.stream(), cuda.alloc(BYTES), cuda.pinned(BYTES), cuda.pinned(BYTES));
        cuda.control("freeze h2d.0");
        assert_eq!(cuda.copy(device, at(source), BYTES, stream), 0);
        source.fill(9);
        cuda.control("release h2d.0");
        assert_eq!(cuda.copy(at(back), device, BYTES, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert!(back.iter().all(|&byte| byte == 9), "written after the copy was posted, before it ran");
    });
}

#[test]
fn a_value_in_memory_orders_streams_of_two_gpus() {
    alone("a_value_in_memory_orders_streams_of_two_gpus", &[], |cuda| {
        let contexts = cuda.start(2);
        let first = cuda.stream();
        let flag = cuda.alloc(8);
        let word = cuda.pinned(8);
        cuda.enter(contexts[1]);
        cuda.peer(contexts[0]);
        let then = cuda.stream();
        cuda.enter(contexts[0]);
        frozen_chain(cuda, first, then, || {
            assert_eq!(
                cu!(cuda, cuStreamWriteValue64_v2(first => usize, flag => u64, 5 => u64, 0 => u32)),
                0
            );
            cuda.enter(contexts[1]);
            assert_eq!(cu!(cuda, cuStreamWaitValue64_v2(then => usize, flag => u64, 5 => u64, 0 => u32)), 0);
            assert_eq!(
                cu!(cuda, cuStreamWriteValue32_v2(then => usize, at(word) => u64, 1 => u32, 0 => u32)),
                0
            );
        });
        assert_eq!(word[0], 1);
    });
}

#[test]
fn the_host_can_let_a_waiting_stream_go() {
    alone("the_host_can_let_a_waiting_stream_go", &[], |cuda| {
        cuda.start(1);
        let (stream, word) = (cuda.stream(), cuda.pinned(8));
        assert_eq!(
            cu!(cuda, cuStreamWaitValue32_v2(stream => usize, at(word) => u64, 3 => u32, 1 => u32)),
            0
        );
        assert_eq!(cuda.query(stream), 600);
        word[0] = 3;
        eventually("the stream is idle", || cuda.query(stream) == 0);
        assert_eq!(cuda.stat("live.operations"), 0);
    });
}

#[test]
fn pageable_copies_are_over_when_the_call_returns() {
    alone("pageable_copies_are_over_when_the_call_returns", &[], |cuda| {
        cuda.start(1);
        let (stream, device) = (cuda.stream(), cuda.alloc(BYTES));
        for bytes in [1000, BYTES] {
            let (mut source, mut back) = (vec![5u8; bytes], vec![0u8; bytes]);
            assert_eq!(cuda.copy(device, at(&source), bytes, stream), 0);
            source.fill(6);
            assert_eq!(cuda.copy(back.as_mut_ptr() as u64, device, bytes, stream), 0);
            assert!(back.iter().all(|&byte| byte == 5));
        }
        assert_eq!(cuda.report(), "");
    });
}

#[test]
fn stream_0_of_a_twin_is_the_threads_own() {
    alone("stream_0_of_a_twin_is_the_threads_own", &[], |cuda| {
        let contexts = cuda.start(1);
        let (device, source, word) = (cuda.alloc(BYTES), cuda.pinned(BYTES), cuda.pinned(8));
        // This thread's stream waits for a value.
        let wait = |value: u32| cu!(cuda, cuStreamWaitValue32_v2_ptsz(0 => usize, at(word) => u64, value => u32, 1 => u32));
        assert_eq!(wait(1), 0);
        let query = || cu!(cuda, cuStreamQuery_ptsz(0 => usize));
        assert_eq!(query(), 600);
        let (address, context) = (at(source), contexts[0]);
        std::thread::scope(|scope| {
            let other = || {
                cuda.enter(context);
                let copied =
                    cu!(cuda, cuMemcpyAsync_ptsz(device => u64, address => u64, BYTES => usize, 0 => usize));
                [copied, cu!(cuda, cuStreamSynchronize_ptsz(0 => usize))]
            };
            assert_eq!(scope.spawn(other).join().unwrap(), [0, 0], "another thread's stream does not wait");
        });
        // The legacy stream waits for both, and is what 0 means without a twin.
        assert_eq!(cuda.copy(device, at(source), BYTES, 0), 0);
        assert_eq!([cuda.query(0), query()], [600, 600]);
        word[0] = 1;
        assert_eq!(cuda.sync(1), 0, "1 is the legacy stream by its other name");
        assert_eq!([cuda.query(0), query()], [0, 0]);
        assert_eq!(cuda.report(), "");
    });
}

#[test]
fn a_destroyed_stream_still_does_what_it_was_given() {
    alone("a_destroyed_stream_still_does_what_it_was_given", &[], |cuda| {
        cuda.start(1);
        let stream = cuda.stream_with(0);
        // The legacy stream waits for it all the same.
        frozen_chain(cuda, stream, 0, || {
            assert_eq!(cu!(cuda, cuStreamDestroy_v2(stream => usize)), 0);
            assert_eq!(cuda.stat("live.streams"), 0);
        });
        assert_eq!(cuda.sync(stream), 400);
    });
}
