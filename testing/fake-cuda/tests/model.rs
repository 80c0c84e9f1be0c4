//! Programs whose copies are ordered as they must be give what a machine without any streams gives,
//! and are not reported; whoever leaves an order out is.
#![allow(clippy::unwrap_used)]

mod common;
use common::{Cuda, alone, at, cu};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const BYTES: usize = 40_000;
const STREAMS: usize = 6;
const BUFFERS: usize = 6;

/// A copy between buffers in a stream, and whether another engine is held up first.
type Step = (usize, usize, usize, u8);

/// Two GPUs with streams of every sort, and buffers on both and on the host.
struct Machine<'a> {
    cuda: &'a Cuda,
    contexts: Vec<usize>,
    /// Stream and GPU.
    streams: Vec<(usize, usize)>,
    buffers: Vec<u64>,
    host: Vec<&'static mut [u8]>,
}

impl Machine<'_> {
    fn new(cuda: &Cuda) -> Machine<'_> {
        let contexts = cuda.start(2);
        let (mut streams, mut buffers) = (Vec::new(), Vec::new());
        for gpu in 0..2 {
            cuda.enter(contexts[gpu]);
            cuda.peer(contexts[1 - gpu]);
            streams.extend([(cuda.stream(), gpu), (cuda.stream_with(0), gpu), (0, gpu)]);
            buffers.extend([cuda.alloc(BYTES), cuda.alloc(BYTES)]);
        }
        let host = vec![cuda.pinned(BYTES), cuda.pinned(BYTES)];
        buffers.extend(host.iter().map(|host| at(host)));
        Machine { cuda, contexts, streams, buffers, host }
    }

    fn enter(&self, stream: usize) -> usize {
        let (stream, gpu) = self.streams[stream];
        self.cuda.enter(self.contexts[gpu]);
        stream
    }

    /// Runs a program; each copy waits for the events that `waits` leaves of those it has to wait
    /// for.
    fn run(&mut self, steps: &[Step], mut waits: impl FnMut(usize) -> bool) {
        for (fill, host) in self.host.iter_mut().enumerate() {
            host.fill(fill as u8 + 100);
        }
        // Of each buffer: the event of its last writer, and those of who has read it since.
        let mut users: Vec<(Option<usize>, Vec<usize>)> = vec![(None, Vec::new()); BUFFERS];
        let mut events = Vec::new();
        for (index, &(from, to, stream, held_up)) in steps.iter().enumerate() {
            if held_up < 4 {
                self.cuda.control(&format!(
                    "delay {} {}",
                    ["h2d.0", "d2h.1", "p2p.0", "p2p.1"][held_up as usize],
                    300 * (index % 3)
                ));
            }
            let stream = self.enter(stream);
            let before: Vec<usize> =
                users[from].0.into_iter().chain(users[to].0).chain(users[to].1.clone()).collect();
            if waits(index) {
                before.iter().for_each(|&event| assert_eq!(self.cuda.wait_event(stream, event), 0));
            }
            assert_eq!(self.cuda.copy(self.buffers[to], self.buffers[from], BYTES, stream), 0);
            let event = self.cuda.event();
            assert_eq!(self.cuda.record(event, stream), 0);
            users[from].1.push(event);
            users[to] = (Some(event), Vec::new());
            events.push(event);
        }
        for gpu in [1, 0] {
            self.cuda.enter(self.contexts[gpu]);
            assert_eq!(cu!(self.cuda, cuCtxSynchronize()), 0);
        }
        events.iter().for_each(|&event| assert_eq!(cu!(self.cuda, cuEventDestroy_v2(event => usize)), 0));
    }

    /// The byte that fills each buffer.
    fn contents(&self) -> Vec<u8> {
        let mut back = vec![0u8; BYTES];
        let mut contents = Vec::new();
        for &buffer in &self.buffers {
            assert_eq!(
                cu!(self.cuda, cuMemcpy(back.as_mut_ptr() => *mut u8, buffer => u64, BYTES => usize)),
                0
            );
            assert!(back.iter().all(|&byte| byte == back[0]), "bytes of several copies in one buffer");
            contents.push(back[0]);
        }
        contents
    }
}

fn program() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((0..BUFFERS, 0..BUFFERS, 0..STREAMS, 0u8..12), 1..30)
        .prop_map(|steps| steps.into_iter().filter(|&(from, to, ..)| from != to).collect())
}

#[test]
fn ordered_programs_give_what_they_would_give_one_copy_after_another() {
    alone("ordered_programs_give_what_they_would_give_one_copy_after_another", &[], |cuda| {
        let mut machine = Machine::new(cuda);
        for buffer in &machine.buffers[..4] {
            assert_eq!(cu!(cuda, cuMemsetD8_v2(*buffer => u64, 1 => u8, BYTES => usize)), 0);
        }
        let machine = std::cell::RefCell::new(&mut machine);
        let run = |steps: Vec<Step>| {
            let mut machine = machine.borrow_mut();
            let mut model = machine.contents();
            (model[4], model[5]) = (100, 101);
            steps.iter().for_each(|&(from, to, ..)| model[to] = model[from]);
            machine.run(&steps, |_| true);
            assert_eq!(machine.contents(), model);
            assert_eq!(cuda.report(), "");
            Ok(())
        };
        TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() })
            .run(&program(), run)
            .unwrap();
        assert_eq!((cuda.stat("live.operations"), cuda.stat("live.events")), (0, 0));
    });
}

#[test]
fn a_wait_that_is_left_out_is_found() {
    alone("a_wait_that_is_left_out_is_found", &[], |cuda| {
        let mut machine = Machine::new(cuda);
        // Host to GPU 0, on to GPU 1, back to the host: the second copy does not wait.
        let steps = [(4, 0, 0, 9), (0, 2, 3, 9), (2, 5, 4, 9)];
        machine.run(&steps, |_| true);
        assert_eq!(cuda.report(), "");
        machine.run(&steps, |index| index != 1);
        assert!(cuda.report().contains("in no order"));
    });
}
