//! A loom model of the queue between submitters, links and the mover thread. Runs with `RUSTFLAGS="--cfg loom"`.
#![cfg(loom)]

use forebay_mover::{Mailbox, PostError};
use loom::sync::Arc;
use loom::thread;

/// Takes until the mailbox is closed and empty.
fn drain(mailbox: &Mailbox<u32>) -> Vec<u32> {
    let mut all = Vec::new();
    let mut batch = Vec::new();
    while mailbox.take(&mut batch, None) {
        all.append(&mut batch);
    }
    all
}

#[test]
fn every_message_arrives_once_and_no_wake_up_is_lost() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::new(8));
        let posters: Vec<_> = [1, 2]
            .into_iter()
            .map(|message| {
                let mailbox = Arc::clone(&mailbox);
                thread::spawn(move || mailbox.post(message).unwrap())
            })
            .collect();
        // The receiver sleeps without a time limit: a lost wake-up would be a deadlock, which loom reports.
        let mut received = Vec::new();
        while received.len() < 2 {
            assert!(mailbox.take(&mut received, None));
        }
        posters.into_iter().for_each(|poster| poster.join().unwrap());
        received.sort_unstable();
        assert_eq!(received, [1, 2]);
    });
}

#[test]
fn closing_delivers_what_was_posted_before_and_wakes_the_receiver() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::new(8));
        let receiver = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || drain(&mailbox))
        };
        mailbox.post(7).unwrap();
        mailbox.close();
        assert_eq!(mailbox.post(8), Err(PostError::Closed));
        assert_eq!(receiver.join().unwrap(), [7]);
    });
}

#[test]
fn a_full_mailbox_refuses_submissions_but_never_completions() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::new(1));
        let link = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.post_unbounded(100).unwrap())
        };
        let submitted = u32::from(mailbox.post(1).is_ok()) + u32::from(mailbox.post(2).is_ok());
        link.join().unwrap();
        mailbox.close();
        let received = drain(&mailbox);
        assert!(received.contains(&100));
        assert_eq!(received.len() as u32, submitted + 1);
        assert!(submitted <= 1);
    });
}
