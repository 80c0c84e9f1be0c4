//! A limiter of operations in flight: each has a permit, there are at most so many, and whoever
//! closes the store waits until the last permit is gone.

use forebay_transfer::lock::{Condvar, Mutex};
use std::sync::Arc;

/// Gives permits until it is closed.
#[derive(Debug)]
pub(super) struct InFlight {
    state: Mutex<State>,
    idle: Condvar,
    limit: usize,
}

#[derive(Debug, Default)]
struct State {
    in_flight: usize,
    closed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoPermit {
    Full,
    Closed,
}

/// An operation in flight. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Permit(Arc<InFlight>);

impl InFlight {
    pub fn new(limit: usize) -> Arc<InFlight> {
        Arc::new(InFlight { state: Mutex::default(), idle: Condvar::new(), limit })
    }

    pub fn acquire(self: &Arc<InFlight>) -> Result<Permit, NoPermit> {
        let mut state = self.state.lock();
        match (state.closed, state.in_flight < self.limit) {
            (true, _) => Err(NoPermit::Closed),
            (false, false) => Err(NoPermit::Full),
            (false, true) => {
                state.in_flight += 1;
                Ok(Permit(Arc::clone(self)))
            }
        }
    }

    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    pub fn wait_until_idle(&self) {
        let mut state = self.state.lock();
        while state.in_flight > 0 {
            self.idle.wait(&mut state);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_flight -= 1;
        if state.closed && state.in_flight == 0 {
            self.0.idle.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_its_limit_and_closing_waits_for_the_last() {
        let limiter = InFlight::new(2);
        let permits = [limiter.acquire().unwrap(), limiter.acquire().unwrap()];
        assert_eq!(limiter.acquire().unwrap_err(), NoPermit::Full);
        limiter.close();
        assert_eq!(limiter.acquire().unwrap_err(), NoPermit::Closed);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                drop(permits);
            });
            limiter.wait_until_idle();
        });
        assert_eq!(limiter.state.lock().in_flight, 0);
    }
}
