//! Syncs: durability without blocking the caller.

use crate::faulty::{Fault, Mischief};
use crate::world::{PAGE, faulty_world, for_each_driver, world};
use forebay_links::disk::{Action, SyncRefused};
use std::sync::mpsc;

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
        let mischief = Mischief::new(|_, _| Fault::None);
        let gate = mischief.gate.clone();
        let world = faulty_world(driver, 16 * PAGE, mischief);
        gate.close();
        let (sender, receiver) = mpsc::channel();
        for _ in 0..100 {
            let sender = sender.clone();
            world.disk.sync(move |end| sender.send(end).unwrap()).unwrap();
        }
        drop(sender);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(receiver.try_recv().is_err(), "the caller was told before the sync completed");
        gate.open();
        assert_eq!(receiver.iter().filter(Result::is_ok).count(), 100);
        let syncs = world.disk.stats().syncs;
        assert!((1..100).contains(&syncs), "{syncs} syncs for 100 callers");
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
