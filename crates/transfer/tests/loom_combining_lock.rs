//! A loom model of work that whoever comes carries out. Runs with `RUSTFLAGS="--cfg loom"`.
#![cfg(loom)]

use forebay_transfer::{CombiningLock, Left, PostError};
use loom::sync::Arc;
use loom::thread;

type Sum = CombiningLock<u32, Vec<u32>>;

fn work(done: &mut Vec<u32>, messages: &mut Vec<u32>) {
    done.append(messages);
}

fn post_and_combine(lock: &Sum, message: u32) {
    lock.post(message).unwrap();
    assert_eq!(lock.combine(work), Left::Nothing);
}

#[test]
fn every_message_is_carried_out_once_by_the_time_all_posters_have_gone() {
    loom::model(|| {
        let lock = Arc::new(Sum::new(8, Vec::new()));
        let posters: Vec<_> = [1, 2]
            .into_iter()
            .map(|message| {
                let lock = Arc::clone(&lock);
                thread::spawn(move || post_and_combine(&lock, message))
            })
            .collect();
        posters.into_iter().for_each(|poster| poster.join().unwrap());
        // Nobody is left who could find a message that waits.
        let mut done = lock.close(|_, messages| assert!(messages.is_empty())).unwrap();
        done.sort_unstable();
        assert_eq!(done, [1, 2]);
    });
}

#[test]
fn closing_carries_out_what_was_posted_before_and_refuses_the_rest() {
    loom::model(|| {
        let lock = Arc::new(Sum::new(8, Vec::new()));
        let poster = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                let posted = lock.post(7).is_ok();
                lock.combine(work);
                posted
            })
        };
        let done = lock.close(work).unwrap();
        assert_eq!(lock.post(8), Err(PostError::Closed));
        assert_eq!(poster.join().unwrap(), done == [7]);
    });
}

#[test]
fn a_call_inside_of_the_work_is_left_to_the_outer_one() {
    loom::model(|| {
        let lock = Sum::new(1, Vec::new());
        lock.post(1).unwrap();
        assert_eq!(lock.post(2), Err(PostError::Full { limit: 1 }));
        let mut again = true;
        lock.combine(|done, messages| {
            done.append(messages);
            if std::mem::take(&mut again) {
                lock.post_unbounded(3).unwrap();
                assert_eq!(lock.combine(work), Left::Nothing);
            }
        });
        assert_eq!(lock.close(work).unwrap(), [1, 3]);
    });
}
