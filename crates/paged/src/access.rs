//! Who touches the cache's pages: everything that reads or writes them holds an [`Accessing`], and
//! closing the cache waits until there is none.

use forebay_transfer::lock::{Condvar, Mutex};
use std::sync::Arc;

/// Gives access until it is closed.
#[derive(Debug, Default)]
pub struct Access {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    users: usize,
    closed: bool,
}

/// Access to the pages, until this is dropped.
#[derive(Debug)]
pub struct Accessing(Arc<Access>);

impl Access {
    /// `None` when it is closed.
    pub fn enter(self: &Arc<Self>) -> Option<Accessing> {
        let mut state = self.state.lock();
        if state.closed {
            return None;
        }
        state.users += 1;
        Some(Accessing(Arc::clone(self)))
    }

    /// Gives no access any more.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Waits until nobody has access. To be called when it is closed.
    pub fn wait_until_unused(&self) {
        self.released.wait_while(&mut self.state.lock(), |state| state.users > 0);
    }
}

impl Drop for Accessing {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.users -= 1;
        if state.users == 0 {
            self.0.released.notify_all();
        }
    }
}
