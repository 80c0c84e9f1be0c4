//! A class that may be raised while its transfers wait: others joined who cannot wait as long as
//! who asked first.

use crate::lock::Mutex;
use crate::thread::{MoverHandle, SubmitError, Submitted};
use crate::transfer::{Class, End, Transfer};
use std::sync::Arc;

/// The class of transfers that belong together, before they are submitted and until they ended.
#[derive(Debug, Clone)]
pub struct RaisableClass(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    mover: MoverHandle,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    class: Class,
    submitted: Vec<Submitted>,
}

impl RaisableClass {
    /// Of transfers that are submitted to this mover.
    pub fn new(mover: &MoverHandle, class: Class) -> RaisableClass {
        let state = Mutex::new(State { class, submitted: Vec::new() });
        RaisableClass(Arc::new(Shared { mover: mover.clone(), state }))
    }

    pub fn get(&self) -> Class {
        self.0.state.lock().class
    }

    /// Makes all of them more urgent. A class that is not more urgent changes nothing.
    pub fn raise(&self, class: Class) {
        let mut state = self.0.state.lock();
        if class >= state.class {
            return;
        }
        state.class = class;
        let submitted = state.submitted.clone();
        drop(state);
        submitted.into_iter().for_each(|transfer| self.0.mover.raise(transfer, class));
    }

    /// Submits one of them, in the class that they have by now.
    pub fn submit(
        &self,
        transfer: Transfer,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<(), SubmitError> {
        let class = self.get();
        let submitted = self.0.mover.submit(Transfer { class, ..transfer }, on_end)?;
        let mut state = self.0.state.lock();
        state.submitted.push(submitted);
        let by_now = state.class;
        drop(state);
        // It may have been raised while the transfer was on its way to the mover.
        if by_now < class {
            self.0.mover.raise(submitted, by_now);
        }
        Ok(())
    }
}
