//! Who is inside: operations under way, how many there may be, and the wait until the last one has left. This file counts;
//! it must never know what an operation does.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// Lets operations in until it is closed.
#[derive(Debug)]
pub(super) struct Gate {
    state: Mutex<State>,
    left: Condvar,
    limit: usize,
}

#[derive(Debug, Default)]
struct State {
    inside: usize,
    closed: bool,
}

/// Why an operation is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotIn {
    Full,
    Closed,
}

/// An operation that is inside. It leaves when dropped.
#[derive(Debug)]
pub(super) struct Pass(Arc<Gate>);

impl Gate {
    /// A gate for so many operations at a time.
    pub fn new(limit: usize) -> Arc<Gate> {
        Arc::new(Gate { state: Mutex::default(), left: Condvar::new(), limit })
    }

    pub fn enter(self: &Arc<Gate>) -> Result<Pass, NotIn> {
        let mut state = self.state.lock();
        match (state.closed, state.inside < self.limit) {
            (true, _) => Err(NotIn::Closed),
            (false, false) => Err(NotIn::Full),
            (false, true) => {
                state.inside += 1;
                Ok(Pass(Arc::clone(self)))
            }
        }
    }

    /// Lets nobody in from now on.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Sleeps until nobody is inside.
    pub fn wait_until_empty(&self) {
        let mut state = self.state.lock();
        while state.inside > 0 {
            self.left.wait(&mut state);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.inside -= 1;
        if state.closed && state.inside == 0 {
            self.0.left.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_its_limit_and_closing_waits_for_the_last() {
        let gate = Gate::new(2);
        let passes = [gate.enter().unwrap(), gate.enter().unwrap()];
        assert_eq!(gate.enter().unwrap_err(), NotIn::Full);
        gate.close();
        assert_eq!(gate.enter().unwrap_err(), NotIn::Closed);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                drop(passes);
            });
            gate.wait_until_empty();
        });
        assert_eq!(gate.state.lock().inside, 0);
    }
}
