//! How a flow ended, and who wants to know.

use super::broken::Broken;
use parking_lot::Mutex;

type Watcher = Box<dyn FnOnce(Broken) + Send>;

/// The end of one flow, past or to come.
pub(super) struct Ending(Mutex<State>);

enum State {
    Open(Vec<Watcher>),
    Over(Broken),
}

impl Default for Ending {
    fn default() -> Ending {
        Ending(Mutex::new(State::Open(Vec::new())))
    }
}

impl Ending {
    /// Calls `watcher` when the flow has ended: later on the flow's thread, or at once on this one.
    pub fn watch(&self, watcher: Watcher) {
        let mut state = self.0.lock();
        let broken = match &mut *state {
            State::Open(watchers) => return watchers.push(watcher),
            State::Over(broken) => broken.clone(),
        };
        drop(state);
        watcher(broken);
    }

    /// The flow has ended. Only the first reason counts.
    pub fn over(&self, broken: &Broken) {
        let mut state = self.0.lock();
        if let State::Over(_) = *state {
            return;
        }
        let before = std::mem::replace(&mut *state, State::Over(broken.clone()));
        drop(state);
        if let State::Open(watchers) = before {
            watchers.into_iter().for_each(|watcher| watcher(broken.clone()));
        }
    }

    /// Why the flow ended, if it has.
    pub fn broken(&self) -> Option<Broken> {
        match &*self.0.lock() {
            State::Open(_) => None,
            State::Over(broken) => Some(broken.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn each_watcher_is_called_once_also_one_that_comes_late() {
        let (ending, seen) = (Ending::default(), Arc::new(Mutex::new(Vec::new())));
        let watch = |name| {
            let seen = Arc::clone(&seen);
            ending.watch(Box::new(move |broken| seen.lock().push((name, broken))));
        };
        watch("early");
        assert_eq!((ending.broken(), seen.lock().len()), (None, 0));
        ending.over(&Broken::Closed);
        ending.over(&Broken::Ended);
        watch("late");
        assert_eq!(*seen.lock(), [("early", Broken::Closed), ("late", Broken::Closed)]);
    }
}
