//! A thread that sleeps until events pass, one after another, and tells their owners. What
//! takes long is waited for so: the poller sees an end sooner, but is awake as long as anything is
//! under way.

use crate::device::Event;
use crate::driver::{Driver, Relaxed};
use crate::poller::OnPassed;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// A row of events that pass in the order in which they are given. Dropping it waits for all of
/// them.
#[derive(Debug)]
pub struct EventWaiter {
    row: Option<Sender<(Arc<Event>, OnPassed)>>,
    thread: Option<JoinHandle<()>>,
}

impl EventWaiter {
    pub fn spawn(driver: &'static Driver, name: &str) -> std::io::Result<EventWaiter> {
        let (row, given) = channel::<(Arc<Event>, OnPassed)>();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            let _relaxed = Relaxed::enter(driver);
            for (event, on_passed) in given {
                let passed = event.synchronize();
                drop(event);
                on_passed(passed);
            }
        })?;
        Ok(EventWaiter { row: Some(row), thread: Some(thread) })
    }

    /// Has `on_passed` called, on the thread, when the event has passed and those before it have.
    pub fn when_passed(&self, event: Arc<Event>, on_passed: OnPassed) {
        if let Some(row) = &self.row {
            // The thread takes what is sent until the row is dropped.
            let _ = row.send((event, on_passed));
        }
    }
}

impl Drop for EventWaiter {
    fn drop(&mut self) {
        drop(self.row.take());
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() != std::thread::current().id() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}
