//! A loom model of both ends of a ring: what is posted or published is taken whole, what has ended
//! comes back whole, and neither end sleeps for ever. Runs with `RUSTFLAGS="--cfg loom"`.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

use forebay_ring::sleep::{fall_asleep, is_to_be_woken};
use forebay_ring::{
    Consumer, Context, ContextResult, ContextStatus, Header, Layout, Op, Producer, Request, Taken,
};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// A ring, and what the kernel has for each end: a wake-up is for whoever waits, and for nobody
/// else.
struct Shared {
    ring: Vec<AtomicU64>,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Shared {
    fn new(layout: Layout) -> Arc<Shared> {
        let ring: Vec<AtomicU64> = (0..layout.words()).map(|_| AtomicU64::new(0)).collect();
        Header::make(&ring, layout, 1).unwrap();
        Arc::new(Shared { ring, lock: Mutex::new(()), woken: Condvar::new() })
    }

    fn header(&self) -> Header<'_> {
        Header::of(&self.ring)
    }

    /// As a futex: it looks at the word under the lock that who wakes takes.
    fn wait(&self, word: &AtomicU64) {
        let mut held = self.lock.lock().unwrap();
        while word.load(Ordering::SeqCst) != 0 {
            held = self.woken.wait(held).unwrap();
        }
    }

    fn wake_if_asleep(&self, word: &AtomicU64) {
        if is_to_be_woken(word) {
            drop(self.lock.lock().unwrap());
            self.woken.notify_all();
        }
    }

    /// Takes one request and ends it.
    fn serve_one(&self, consumer: &mut Consumer) {
        let header = self.header();
        let work = loop {
            match consumer.take(&self.ring).unwrap() {
                Some(Taken::Work(work)) => break work,
                Some(other) => panic!("{other:?}"),
                // Nobody wakes it for what a GPU publishes.
                None if header.armed() > 0 => thread::yield_now(),
                None => {
                    if fall_asleep(header.consumer_asleep(), || consumer.has_work(&self.ring)) {
                        self.wait(header.consumer_asleep());
                    }
                }
            }
        };
        assert_eq!((work.request, &work.contexts[..]), (request(work.request.user), &[CONTEXT][..]));
        let result = ContextResult { status: ContextStatus::Done, offset_bytes: 4096, checksum: 5 };
        consumer.end(&self.ring, work.ticket, &[result], 9);
        self.wake_if_asleep(header.producer_asleep());
    }

    /// Waits for the end of one request.
    fn reap_one(&self, producer: &mut Producer) -> u64 {
        let header = self.header();
        loop {
            if let Some(reaped) = producer.reap(&self.ring).unwrap() {
                assert_eq!((reaped.results[0].offset_bytes, reaped.completion.bytes), (4096, 9));
                return reaped.completion.user;
            }
            if fall_asleep(header.producer_asleep(), || producer.has_ended(&self.ring)) {
                self.wait(header.producer_asleep());
            }
        }
    }
}

const CONTEXT: Context = Context { extent: 3, layer: 2, checksum: 1 };

fn request(user: u64) -> Request {
    Request { user, lease: 8, op: Op::Read, class: 0, contexts: 1, within_us: 0 }
}

fn ring(posted: u16, armed: u16) -> (Arc<Shared>, Producer, Consumer) {
    let layout = Layout::new(posted, armed, 1).unwrap();
    let shared = Shared::new(layout);
    let (producer, consumer) =
        (Producer::new(layout, &shared.header()), Consumer::new(layout, &shared.header()));
    (shared, producer, consumer)
}

#[test]
fn what_is_posted_is_taken_whole_and_comes_back_whole_although_both_ends_sleep() {
    loom::model(|| {
        let (shared, mut producer, mut consumer) = ring(1, 0);
        let serving = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.serve_one(&mut consumer))
        };
        producer.post(&shared.ring, &request(1), &[CONTEXT]).unwrap();
        shared.wake_if_asleep(shared.header().consumer_asleep());
        assert_eq!(shared.reap_one(&mut producer), 1);
        serving.join().unwrap();
    });
}

#[test]
fn what_a_third_publishes_is_taken_whole_beside_what_is_posted() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (shared, mut producer, mut consumer) = ring(1, 1);
        let armed = producer.arm(&shared.ring, &request(1), &[CONTEXT]).unwrap();
        // A stream write, or a kernel: it wakes nobody.
        let publishing = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.ring[armed.word].store(armed.value, Ordering::Release))
        };
        let posting = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                producer.post(&shared.ring, &request(2), &[CONTEXT]).unwrap();
                shared.wake_if_asleep(shared.header().consumer_asleep());
                producer
            })
        };
        shared.serve_one(&mut consumer);
        publishing.join().unwrap();
        let mut producer = posting.join().unwrap();
        shared.serve_one(&mut consumer);
        let mut users = [shared.reap_one(&mut producer), shared.reap_one(&mut producer)];
        users.sort_unstable();
        assert_eq!(users, [1, 2]);
    });
}
