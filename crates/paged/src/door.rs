//! Who touches the cache: everything that reads or writes pages is inside, and whoever closes waits until nobody is. This file
//! counts; it must never know what those inside do.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// Open until it is closed.
#[derive(Debug, Default)]
pub struct Door {
    state: Mutex<State>,
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct State {
    inside: usize,
    closed: bool,
}

/// Somebody is inside, until this is dropped.
#[derive(Debug)]
pub struct Inside(Arc<Door>);

impl Door {
    /// Lets somebody in, unless it is closed.
    pub fn enter(self: &Arc<Self>) -> Option<Inside> {
        let mut state = self.state.lock();
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Inside(Arc::clone(self)))
    }

    /// Lets nobody in any more.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Waits until nobody is inside. To be called when it is closed.
    pub fn wait_until_empty(&self) {
        let mut state = self.state.lock();
        while state.inside > 0 {
            self.emptied.wait(&mut state);
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.inside -= 1;
        if state.inside == 0 {
            self.0.emptied.notify_all();
        }
    }
}
