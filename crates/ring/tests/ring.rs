//! Both ends of a ring: every request ends once, with the results that belong to it, in any order
//! of what happens; and a producer that writes anything reaches nothing else.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use forebay_ring::sleep::{fall_asleep, is_to_be_woken};
use forebay_ring::{
    Armed, Completion, Consumer, Context, ContextResult, ContextStatus, Header, Layout, NotPosted, Op,
    Producer, Request, Status, Taken, Ticket, Violation, Work,
};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

struct Site {
    ring: Vec<AtomicU64>,
    producer: Producer,
    consumer: Consumer,
}

impl Site {
    fn new(posted: u16, armed: u16, contexts: u16) -> Site {
        let layout = Layout::new(posted, armed, contexts).unwrap();
        let ring: Vec<AtomicU64> = (0..layout.words()).map(|_| AtomicU64::new(0)).collect();
        let header = Header::make(&ring, layout, 7).unwrap();
        let (producer, consumer) = (Producer::new(layout, &header), Consumer::new(layout, &header));
        Site { ring, producer, consumer }
    }

    fn post(&mut self, user: u64, contexts: u16) -> Result<u16, NotPosted> {
        let (request, contexts) = read(user, contexts);
        self.producer.post(&self.ring, &request, &contexts)
    }

    fn arm(&mut self, user: u64, contexts: u16) -> Result<Armed, NotPosted> {
        let (request, contexts) = read(user, contexts);
        self.producer.arm(&self.ring, &request, &contexts)
    }

    fn publish(&self, armed: Armed) {
        self.ring[armed.word].store(armed.value, Ordering::Release);
    }

    fn take(&mut self) -> Option<Work> {
        match self.consumer.take(&self.ring).unwrap() {
            Some(Taken::Work(work)) => Some(work),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    fn end(&mut self, work: Work) {
        let results: Vec<_> = work.contexts.iter().map(result).collect();
        self.consumer.end(&self.ring, work.ticket, &results, work.request.user);
    }

    fn reap(&mut self) -> Option<(Completion, Vec<ContextResult>)> {
        let reaped = self.producer.reap(&self.ring).unwrap()?;
        Some((reaped.completion, reaped.results))
    }
}

/// A request whose contexts follow from its user.
fn read(user: u64, contexts: u16) -> (Request, Vec<Context>) {
    let request = Request { user, lease: !user, op: Op::Read, class: 1, contexts, within_us: 5 };
    let context = |n: u16| Context { extent: user as u32 ^ u32::from(n), layer: n, checksum: 0 };
    (request, (0..contexts).map(context).collect())
}

/// What comes of a context: some fail.
fn result(context: &Context) -> ContextResult {
    if context.extent % 5 == 3 {
        return ContextResult::failed(ContextStatus::NotRead);
    }
    let offset_bytes = u64::from(context.extent) << 12;
    ContextResult { status: ContextStatus::Done, offset_bytes, checksum: context.layer.into() }
}

/// What a completion of a request must say.
fn expected(user: u64, contexts: u16) -> (Status, u32, Vec<ContextResult>) {
    let results: Vec<_> = read(user, contexts).1.iter().map(result).collect();
    let done = results.iter().filter(|result| result.status == ContextStatus::Done).count() as u32;
    let status = if done == contexts.into() { Status::Done } else { Status::Partial };
    (status, done, results)
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Post(u16),
    Arm(u16),
    /// Of those that are armed, one of this place.
    Publish(usize),
    Take,
    /// Of those that were taken.
    End(usize),
    Reap,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u16..=4).prop_map(Step::Post),
        (1u16..=4).prop_map(Step::Arm),
        any::<usize>().prop_map(Step::Publish),
        Just(Step::Take),
        any::<usize>().prop_map(Step::End),
        Just(Step::Reap),
    ]
}

fn any_of<T>(of: &mut Vec<T>, at: usize) -> Option<T> {
    if of.is_empty() { None } else { Some(of.swap_remove(at % of.len())) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_request_ends_once_with_its_own_results_in_any_order(
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut site = Site::new(4, 3, 4);
        let (mut users, mut ended) = (HashMap::new(), 0);
        let (mut armed, mut taken) = (Vec::new(), Vec::new());
        let drain = [Step::Publish(0), Step::Take, Step::End(0), Step::Reap].repeat(20);
        for (number, step) in (0u64..).zip(steps.into_iter().chain(drain)) {
            match step {
                Step::Post(contexts) if site.post(number, contexts).is_ok() => {
                    users.insert(number, contexts);
                }
                Step::Arm(contexts) => if let Ok(slot) = site.arm(number, contexts) {
                    users.insert(number, contexts);
                    armed.push(slot);
                },
                Step::Publish(at) => if let Some(slot) = any_of(&mut armed, at) {
                    site.publish(slot);
                },
                Step::Take => if let Some(work) = site.take() {
                    let user = work.request.user;
                    prop_assert_eq!(&(work.request, work.contexts.clone()), &read(user, users[&user]));
                    taken.push(work);
                },
                Step::End(at) => if let Some(work) = any_of(&mut taken, at) {
                    site.end(work);
                },
                Step::Reap => if let Some((completion, results)) = site.reap() {
                    let contexts = users.remove(&completion.user).expect("it ends once");
                    let said = (completion.status, completion.contexts_done, results);
                    prop_assert_eq!(said, expected(completion.user, contexts));
                    prop_assert_eq!(completion.bytes, completion.user);
                    ended += 1;
                },
                Step::Post(_) => prop_assert!(!users.is_empty(), "the slot in turn is free"),
            }
            prop_assert_eq!(site.producer.under_way(), users.len());
        }
        prop_assert!(users.is_empty(), "{:?} did not end; {} did", users, ended);
        prop_assert_eq!((site.consumer.under_way(), Header::of(&site.ring).armed()), (0, 0));
    }

    #[test]
    fn a_producer_that_writes_anything_ends_each_request_once_or_loses_its_ring(
        deeds in prop::collection::vec((hostile_write(), any::<bool>()), 1..300),
    ) {
        let mut site = Site::new(2, 2, 2);
        let mut tickets = Vec::<Ticket>::new();
        for (number, (write, ends)) in (0u64..).zip(deeds) {
            match write {
                Some((at, word)) => site.ring[at % site.ring.len()].store(word, Ordering::Relaxed),
                // All slots may be under way.
                None => drop(site.post(number, 1 + number as u16 % 2)),
            }
            match site.consumer.take(&site.ring) {
                Ok(Some(Taken::Work(work))) => {
                    prop_assert!(work.contexts.len() <= 2 && work.request.class < 4);
                    tickets.push(work.ticket);
                }
                Ok(_) => {}
                Err(Violation::Sequence { .. } | Violation::Overrun { .. }) => break,
            }
            prop_assert_eq!(site.consumer.under_way(), tickets.len());
            if ends && let Some(ticket) = tickets.pop() {
                site.consumer.end(&site.ring, ticket, &[ContextResult::default()], 1);
            }
            // The other end of a consumer that cannot be believed stays whole as well.
            let _ = site.producer.reap(&site.ring);
        }
        for ticket in tickets {
            site.consumer.end(&site.ring, ticket, &[ContextResult::default()], 1);
        }
        prop_assert_eq!(site.consumer.under_way(), 0);
    }
}

/// A request as it should be, or a word anywhere, most of all where requests lie.
fn hostile_write() -> impl Strategy<Value = Option<(usize, u64)>> {
    let at = prop_oneof![1 => any::<usize>(), 3 => 512usize..544];
    // Words that come near to a request, and others.
    let word =
        prop_oneof![0u64..9, Just(7), any::<u64>(), (0u64..5, 0u64..5).prop_map(|(op, n)| op | n << 16)];
    prop::option::of((at, word))
}

#[test]
fn slots_are_used_again_only_when_their_requests_have_come_back() {
    let mut site = Site::new(2, 1, 1);
    assert_eq!((site.post(1, 1), site.post(2, 1)), (Ok(0), Ok(1)));
    assert_eq!(site.post(3, 1), Err(NotPosted::Full { slots: 2 }));
    let (first, second) = (site.take().unwrap(), site.take().unwrap());
    site.end(second);
    // In turn: a slot behind the one that is slow is free, and waits for it.
    assert_eq!(site.reap().unwrap().0.user, 2);
    assert_eq!(site.post(3, 1), Err(NotPosted::Full { slots: 2 }));
    let armed = site.arm(4, 1).unwrap();
    assert_eq!(site.arm(5, 1), Err(NotPosted::Full { slots: 1 }));
    assert_eq!(site.take(), None, "nobody has published it");
    site.publish(armed);
    let work = site.take().unwrap();
    site.end(work);
    site.end(first);
    assert_eq!((site.reap().unwrap().0.user, site.reap().unwrap().0.user), (4, 1));
    assert_eq!(site.post(3, 1), Ok(0));
}

#[test]
fn an_armed_request_that_is_never_published_holds_up_no_other() {
    let mut site = Site::new(1, 2, 1);
    let _never = site.arm(1, 1).unwrap();
    for user in 2..100 {
        let later = site.arm(user, 1).unwrap();
        site.publish(later);
        let work = site.take().unwrap();
        site.end(work);
        assert_eq!(site.reap().unwrap().0.user, user);
    }
    assert_eq!(Header::of(&site.ring).armed(), 1);
}

#[test]
fn a_request_of_another_life_of_the_ring_ends_as_stale() {
    let mut site = Site::new(1, 0, 1);
    site.post(1, 1).unwrap();
    // The third word of the first request.
    site.ring[512 + 2].store(6, Ordering::Relaxed);
    assert_eq!(site.consumer.take(&site.ring), Ok(Some(Taken::Ended(None))));
    assert_eq!(site.reap().unwrap().0.status, Status::Stale);
}

#[test]
fn a_request_that_is_none_ends_with_what_is_wrong() {
    let mut site = Site::new(1, 0, 1);
    site.post(1, 1).unwrap();
    site.ring[512 + 6].store(1, Ordering::Relaxed);
    let Ok(Some(Taken::Ended(Some(bad)))) = site.consumer.take(&site.ring) else { panic!("it was taken") };
    assert_eq!(bad.to_string(), "a reserved word is 0x1, and has to be 0");
    assert_eq!(site.reap().unwrap().0.status, Status::Malformed);
}

#[test]
fn who_cancels_a_request_hears_of_both_and_of_no_later_one_in_that_slot() {
    let mut site = Site::new(2, 0, 1);
    let cancel =
        |user: u64, of: u64| Request { user, lease: of, op: Op::Cancel, class: 0, contexts: 1, within_us: 0 };
    let slot = Context { extent: 0, layer: 0, checksum: 0 };
    site.post(1, 1).unwrap();
    let work = site.take().unwrap();
    site.producer.post(&site.ring, &cancel(2, 9), &[slot]).unwrap();
    assert_eq!(site.consumer.take(&site.ring), Ok(Some(Taken::Ended(None))));
    assert!(!site.consumer.is_cancelled(&work.ticket), "another request was meant");
    let (completion, results) = site.reap().unwrap();
    assert_eq!((completion.status, results[0].status), (Status::Partial, ContextStatus::Gone));
    site.end(work);
    site.reap().unwrap();
    site.post(3, 1).unwrap();
    let work = site.take().unwrap();
    site.producer.post(&site.ring, &cancel(4, 3), &[slot]).unwrap();
    assert_eq!(site.consumer.take(&site.ring), Ok(Some(Taken::Cancelled { slot: 0 })));
    assert!(site.consumer.is_cancelled(&work.ticket));
    assert_eq!(site.reap().unwrap().0.status, Status::Done);
    site.end(work);
    assert_eq!(site.reap().unwrap().0.user, 3);
}

/// Words of the first slot's request and its first context, and of its first result, in a ring of
/// `Site::new(1, 0, 1)`.
const LEASE: usize = 512 + 1;
const CONTEXT: usize = 512 + 8;
const RESULT: usize = CONTEXT + 2;

#[test]
fn a_request_that_was_read_with_words_of_an_older_one_brings_nothing() {
    for torn in [LEASE, CONTEXT] {
        let mut site = Site::new(1, 0, 1);
        site.post(10, 1).unwrap();
        let older = site.ring[torn].load(Ordering::Relaxed);
        let work = site.take().unwrap();
        site.end(work);
        assert_eq!(site.reap().unwrap().1[0].status, ContextStatus::Done);
        site.post(20, 1).unwrap();
        site.ring[torn].store(older, Ordering::Relaxed);
        let work = site.take().unwrap();
        site.end(work);
        let (completion, results) = site.reap().unwrap();
        assert_eq!((completion.user, completion.status), (20, Status::Done), "it ends once");
        assert_eq!(results, [ContextResult::failed(ContextStatus::Torn)]);
    }
}

#[test]
fn a_result_of_an_older_request_in_the_slot_is_not_taken_for_the_next_one() {
    let mut site = Site::new(1, 0, 1);
    site.post(10, 1).unwrap();
    let work = site.take().unwrap();
    site.end(work);
    site.reap().unwrap();
    let older = [0, 1].map(|word| site.ring[RESULT + word].load(Ordering::Relaxed));
    site.post(20, 1).unwrap();
    let work = site.take().unwrap();
    site.end(work);
    for (word, value) in older.into_iter().enumerate() {
        site.ring[RESULT + word].store(value, Ordering::Relaxed);
    }
    assert_eq!(site.reap().unwrap().1, [ContextResult::failed(ContextStatus::Torn)]);
}

#[test]
fn a_request_that_was_refused_brings_no_result_of_the_one_before() {
    let mut site = Site::new(1, 0, 1);
    site.post(10, 1).unwrap();
    let work = site.take().unwrap();
    site.end(work);
    site.reap().unwrap();
    // The same again, so that the echo is the same, and the epoch is not.
    site.post(10, 1).unwrap();
    site.ring[512 + 2].store(6, Ordering::Relaxed);
    assert_eq!(site.consumer.take(&site.ring), Ok(Some(Taken::Ended(None))));
    let (completion, results) = site.reap().unwrap();
    assert_eq!(completion.status, Status::Stale);
    assert_eq!(results, [ContextResult::failed(ContextStatus::NotRead)]);
}

#[test]
fn a_closed_ring_takes_nothing() {
    let mut site = Site::new(1, 1, 1);
    Header::of(&site.ring).close();
    assert_eq!(site.post(1, 1), Err(NotPosted::Closed));
    assert_eq!(site.arm(1, 1), Err(NotPosted::Closed));
    let (request, contexts) = read(1, 2);
    let refused = site.producer.post(&site.ring, &request, &contexts).unwrap_err().to_string();
    assert_eq!(refused, "the request says 2 contexts, and 2 are given; a slot has 1");
}

#[test]
fn requests_cross_threads_whole_and_nobody_sleeps_for_ever() {
    const COUNT: u64 = 20_000;
    let Site { ring, mut producer, mut consumer } = Site::new(8, 4, 4);
    let (asleep, waits) = (Header::of(&ring).consumer_asleep(), Header::of(&ring).producer_asleep());
    std::thread::scope(|scope| {
        let consuming = scope.spawn(|| {
            let mut left = COUNT;
            while left > 0 {
                match consumer.take(&ring).unwrap() {
                    Some(Taken::Work(work)) => {
                        assert_eq!(work.contexts, read(work.request.user, work.request.contexts).1);
                        let results: Vec<_> = work.contexts.iter().map(result).collect();
                        consumer.end(&ring, work.ticket, &results, 1);
                        left -= 1;
                        let _ = is_to_be_woken(waits);
                    }
                    Some(other) => panic!("{other:?}"),
                    None => {
                        if fall_asleep(asleep, || consumer.has_work(&ring)) {
                            while asleep.load(Ordering::SeqCst) != 0 {
                                std::thread::yield_now();
                            }
                        }
                    }
                }
            }
        });
        let (mut next, mut ended) = (0, 0);
        while ended < COUNT {
            let contexts = (next % 4 + 1) as u16;
            let (request, list) = read(next, contexts);
            if next < COUNT {
                if next % 3 == 0 {
                    if let Ok(armed) = producer.arm(&ring, &request, &list) {
                        ring[armed.word].store(armed.value, Ordering::Release);
                        next += 1;
                    }
                } else if producer.post(&ring, &request, &list).is_ok() {
                    next += 1;
                }
                let _ = is_to_be_woken(asleep);
            }
            while let Some(reaped) = producer.reap(&ring).unwrap() {
                let (user, contexts) = (reaped.completion.user, reaped.results.len() as u16);
                assert_eq!(reaped.results, expected(user, contexts).2);
                ended += 1;
            }
        }
        consuming.join().unwrap();
    });
}

#[test]
fn a_producer_that_uses_a_slot_before_it_came_back_loses_its_ring() {
    let mut site = Site::new(1, 1, 1);
    site.post(1, 1).unwrap();
    let armed = site.arm(2, 1).unwrap();
    site.publish(armed);
    let (posted, published) = (site.take().unwrap(), site.take().unwrap());
    // The sequence words of both slots.
    site.ring[512 + 7].store(2, Ordering::Relaxed);
    assert_eq!(site.consumer.take(&site.ring), Err(Violation::Overrun { slot: 0 }));
    site.ring[512 + 7].store(1, Ordering::Relaxed);
    site.ring[armed.word].store(2, Ordering::Relaxed);
    assert_eq!(site.consumer.take(&site.ring), Err(Violation::Overrun { slot: 1 }));
    site.ring[armed.word].store(9, Ordering::Relaxed);
    let wrong = site.consumer.take(&site.ring).unwrap_err().to_string();
    assert_eq!(wrong, "slot 1: the sequence word is 9; allowed are 1 and 2");
    assert!(site.consumer.has_work(&site.ring), "who looks finds it, and does not sleep");
    site.end(posted);
    site.end(published);
}
