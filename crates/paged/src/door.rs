//! Who touches the cache: everything that reads or writes pages is inside, and whoever closes waits until nobody is. This file
//! counts; it must never know what those inside do.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

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
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets somebody in, unless it is closed.
    pub fn enter(self: &Arc<Self>) -> Option<Inside> {
        let mut state = self.state();
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Inside(Arc::clone(self)))
    }

    /// Lets nobody in any more.
    pub fn close(&self) {
        self.state().closed = true;
    }

    /// Waits until nobody is inside. To be called when it is closed.
    pub fn wait_until_empty(&self) {
        let mut state = self.state();
        while state.inside > 0 {
            state = self.emptied.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.inside -= 1;
        if state.inside == 0 {
            self.0.emptied.notify_all();
        }
    }
}
