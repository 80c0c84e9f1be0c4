//! A loom model of how a node falls asleep while an engine asks. Runs with
//! `RUSTFLAGS="--cfg loom"`. The ring is the real one, on loom's words; around it are the steps of
//! the control thread's `sleep` and of a session's `ask`, in their order.
#![cfg(loom)]
#![allow(clippy::unwrap_used, dead_code)]

/// What the ring finds beside it.
mod atomics {
    pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
}

#[path = "../src/remote/ring.rs"]
mod ring;

use atomics::AtomicU64;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use ring::{Answerer, Asker, Header, QUEUE_WORDS, Run, SLOTS};

/// As much of the header as is used, and one slot of a queue: what is not there need not be
/// modelled.
const HEADER_WORDS: usize = 48;
const SLOT_WORDS: usize = QUEUE_WORDS / SLOTS as usize;

struct Shared {
    header: Vec<AtomicU64>,
    queue: Vec<AtomicU64>,
    /// A pair of sockets: rung before somebody waits, it wakes whoever waits next.
    rung: Mutex<bool>,
    ringing: Condvar,
}

impl Shared {
    fn new() -> Arc<Shared> {
        let words = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        let (header, queue) = (words(HEADER_WORDS), words(SLOT_WORDS));
        Arc::new(Shared { header, queue, rung: Mutex::new(false), ringing: Condvar::new() })
    }

    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.ringing.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.ringing.wait(rung).unwrap();
        }
        *rung = false;
    }
}

const RUN: Run = Run { memory: 1, offset: 2, staging: 3, bytes: 4 };

/// Loom finds a thread that waits for ever: then a wake-up was lost.
#[test]
fn a_node_that_falls_asleep_while_it_is_asked_is_woken_up() {
    loom::model(|| {
        let shared = Shared::new();
        let node = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (header, mut answerer, mut runs) =
                    (Header::of(&shared.header), Answerer::default(), Vec::new());
                while !answerer.take(&shared.queue, &mut runs).unwrap() {
                    header.set_asleep(true);
                    if !answerer.is_asked(&shared.queue) {
                        shared.wait();
                    }
                    header.set_asleep(false);
                }
                runs
            })
        };
        Asker::default().ask(&shared.queue, &[RUN]).unwrap();
        if Header::of(&shared.header).is_asleep() {
            shared.ring();
        }
        assert_eq!(node.join().unwrap(), [RUN], "what is taken is whole");
    });
}
