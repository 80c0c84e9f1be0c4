//! Guarantees of stream capture: nothing runs, and what would wait is illegal.
#![allow(clippy::unwrap_used)]

mod common;
use common::{Cuda, alone, at, cu};

const BYTES: usize = 1 << 16;
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

fn begin(cuda: &Cuda, stream: usize, mode: u32) {
    assert_eq!(cu!(cuda, cuStreamBeginCapture_v2(stream => usize, mode => u32)), 0);
}

fn end(cuda: &Cuda, stream: usize) -> (i32, usize) {
    let mut graph = 0usize;
    (cu!(cuda, cuStreamEndCapture(stream => usize, &mut graph => *mut usize)), graph)
}

fn status(cuda: &Cuda, stream: usize) -> u32 {
    let mut status = 9u32;
    assert_eq!(cu!(cuda, cuStreamIsCapturing(stream => usize, &mut status => *mut u32)), 0);
    status
}

#[test]
fn a_capture_runs_nothing_and_its_graph_runs_it_as_often_as_it_is_launched() {
    alone("a_capture_runs_nothing_and_its_graph_runs_it_as_often_as_it_is_launched", &[], |cuda| {
        cuda.start(1);
        let (stream, other, event) = (cuda.stream(), cuda.stream(), cuda.event());
        let (device, host, back) = (cuda.alloc(BYTES), cuda.pinned(BYTES), cuda.pinned(BYTES));
        begin(cuda, stream, GLOBAL);
        assert_eq!(status(cuda, stream), 1);
        assert_eq!(cuda.copy(device, at(host), BYTES, stream), 0);
        assert_eq!(cuda.record(event, stream), 0);
        assert_eq!(cuda.wait_event(other, event), 0);
        assert_eq!(status(cuda, other), 1, "whoever waits for a captured event takes part");
        assert_eq!(cuda.copy(at(back), device, BYTES, other), 0);
        assert_eq!(cuda.stat("bytes.h2d.0"), 0);
        let (code, graph) = end(cuda, stream);
        assert_eq!((code, status(cuda, stream), status(cuda, other)), (0, 0, 0));
        let mut made = 0usize;
        let code = cu!(cuda, cuGraphInstantiateWithFlags(&mut made => *mut usize, graph => usize, 0 => u64));
        assert_eq!(code, 0);
        for round in 1..3 {
            host.fill(round);
            assert_eq!(cu!(cuda, cuGraphLaunch(made => usize, stream => usize)), 0);
            assert_eq!(cuda.sync(stream), 0);
            assert!(back.iter().all(|&byte| byte == round));
        }
        assert_eq!(cuda.report(), "");
    });
}

#[test]
fn waiting_for_a_capturing_stream_breaks_the_capture() {
    alone("waiting_for_a_capturing_stream_breaks_the_capture", &[], |cuda| {
        cuda.start(1);
        let stream = cuda.stream();
        for call in [Cuda::sync, Cuda::query] {
            begin(cuda, stream, RELAXED);
            assert_eq!(call(cuda, stream), 900);
            assert_eq!(status(cuda, stream), 2);
            assert_eq!(end(cuda, stream).0, 901);
        }
        assert!(cuda.report().contains("of a stream that captures"));
    });
}

#[test]
fn an_event_of_a_capture_cannot_be_asked() {
    alone("an_event_of_a_capture_cannot_be_asked", &[], |cuda| {
        cuda.start(1);
        let (stream, event) = (cuda.stream(), cuda.event());
        begin(cuda, stream, RELAXED);
        assert_eq!(cuda.record(event, stream), 0);
        assert_eq!(cu!(cuda, cuEventQuery(event => usize)), 907);
        assert_eq!(end(cuda, stream).0, 901);
    });
}

#[test]
fn the_legacy_stream_breaks_the_capture_of_a_blocking_stream_only() {
    alone("the_legacy_stream_breaks_the_capture_of_a_blocking_stream_only", &[], |cuda| {
        cuda.start(1);
        let (device, host) = (cuda.alloc(BYTES), cuda.pinned(BYTES));
        let (apart, blocking) = (cuda.stream(), cuda.stream_with(0));
        begin(cuda, apart, GLOBAL);
        assert_eq!(cuda.copy(device, at(host), BYTES, 0), 0);
        assert_eq!(end(cuda, apart).0, 0);
        begin(cuda, blocking, RELAXED);
        assert_eq!(cuda.copy(device, at(host), BYTES, 0), 906);
        assert_eq!(end(cuda, blocking).0, 901);
    });
}

#[test]
fn allocating_breaks_a_global_capture_unless_the_thread_is_relaxed() {
    alone("allocating_breaks_a_global_capture_unless_the_thread_is_relaxed", &[], |cuda| {
        let contexts = cuda.start(1);
        let stream = cuda.stream();
        let allocate = || {
            let mut address = 0u64;
            cu!(cuda, cuMemAlloc_v2(&mut address => *mut u64, BYTES => usize))
        };
        begin(cuda, stream, GLOBAL);
        let mut mode = RELAXED;
        assert_eq!(cu!(cuda, cuThreadExchangeStreamCaptureMode(&mut mode => *mut u32)), 0);
        assert_eq!((allocate(), mode), (0, GLOBAL));
        assert_eq!(cu!(cuda, cuThreadExchangeStreamCaptureMode(&mut mode => *mut u32)), 0);
        assert_eq!(allocate(), 900);
        assert_eq!(end(cuda, stream).0, 901);
        begin(cuda, stream, RELAXED);
        assert_eq!(allocate(), 0);
        assert_eq!(end(cuda, stream).0, 0);
        cuda.enter(contexts[0]);
    });
}
