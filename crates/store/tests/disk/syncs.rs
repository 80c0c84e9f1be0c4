//! Syncs: durability without blocking the caller.

use crate::faulty::{Fault, Mischief};
use crate::world::{PAGE, faulty_world, for_each_driver, world};
use forebay_store::disk::{Action, SyncRefused};
use std::sync::mpsc;
use std::time::Duration;

#[test]
fn a_sync_ends_once_and_is_counted() {
    for_each_driver(|driver| {
        let world = world(driver, 16 * PAGE);
        world.run_fully(world.writing(&[(0, 0, 4)]));
        let (sender, receiver) = mpsc::channel();
        world.disk.sync(move |end| sender.send(end).unwrap()).unwrap();
        assert_eq!(receiver.recv().unwrap(), Ok(()));
        assert!(receiver.recv().is_err(), "called twice");
        assert_eq!(world.disk.stats().syncs, 1);
    });
}

#[test]
fn callers_that_come_during_a_sync_share_the_next_one() {
    for_each_driver(|driver| {
        let (started, has_started) = mpsc::channel();
        let mischief = Mischief::new(move |_, _| {
            started.send(()).unwrap();
            Fault::None
        });
        let gate = mischief.gate.clone();
        let world = faulty_world(driver, 16 * PAGE, mischief);
        gate.close();
        let (sender, receiver) = mpsc::channel();
        for caller in 0..100 {
            let sender = sender.clone();
            world.disk.sync(move |end| sender.send(end).unwrap()).unwrap();
            if caller == 0 {
                has_started.recv().unwrap();
            }
        }
        drop(sender);
        std::thread::sleep(Duration::from_millis(20));
        assert!(receiver.try_recv().is_err(), "the caller was told before the sync completed");
        gate.open();
        let in_time = || receiver.recv_timeout(Duration::from_secs(60)).ok();
        assert_eq!(std::iter::from_fn(in_time).take(100).filter(Result::is_ok).count(), 100);
        assert_eq!(world.disk.stats().syncs, 2);
    });
}

#[test]
fn a_sync_that_fails_says_so() {
    for_each_driver(|driver| {
        let mischief = Mischief::new(|_, request| match request.action {
            Action::Sync => Fault::Instead(-libc::EIO),
            _ => Fault::None,
        });
        let world = faulty_world(driver, 16 * PAGE, mischief);
        world.run_fully(world.writing(&[(0, 0, 4)]));
        let (sender, receiver) = mpsc::channel();
        world.disk.sync(move |end| sender.send(end).unwrap()).unwrap();
        let fault = receiver.recv().unwrap().unwrap_err();
        assert!(fault.to_string().contains("making durable"), "{fault}");
        assert!(fault.to_string().contains("the device failed"), "{fault}");
        assert_eq!(world.disk.stats().syncs, 0);
    });
}

#[test]
fn a_link_that_ended_refuses_syncs() {
    for_each_driver(|driver| {
        let mut world = world(driver, 16 * PAGE);
        world.end();
        assert_eq!(world.disk.sync(|_| ()), Err(SyncRefused::Closed));
    });
}
