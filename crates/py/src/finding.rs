//! What a node is asked without anybody waiting: what it has of a sequence, and that it keeps it.
//! For a thread that has other things to do than to wait for a node, an engine's scheduler for one.
//! This file knows answers that come later.

use crate::process::Own;
use forebay_client::{Client, Found, Lease, fetch};
use forebay_kv::ChunkId;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a node has of a sequence, which it may still have to say.
#[pyclass(frozen, module = "forebay")]
pub struct Finding(Own<Arc<Answers>>);

struct Answers {
    state: Mutex<State>,
    complete: Condvar,
}

struct State {
    unanswered: usize,
    found: Option<Found>,
}

impl Answers {
    fn note(&self, found: Found) {
        let mut state = self.state.lock();
        state.unanswered -= 1;
        state.found = Some(state.found.map_or(found, |before| before.and(found)));
        if state.unanswered == 0 {
            self.complete.notify_all();
        }
    }

    fn wait(&self, limit: Duration) -> Option<Found> {
        let until = Instant::now().checked_add(limit);
        let mut state = self.state.lock();
        while state.unanswered > 0 {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return None;
            }
            let left = left.unwrap_or(Duration::MAX);
            self.complete.wait_for(&mut state, left);
        }
        Some(state.found.unwrap_or_default())
    }
}

impl Finding {
    /// Asks for the ids of each part of a sequence; all parts of a chunk are needed.
    pub fn ask(client: &Client, parts: Vec<Vec<ChunkId>>) -> Finding {
        let state = State { unanswered: parts.len(), found: None };
        let answers = Arc::new(Answers { state: Mutex::new(state), complete: Condvar::new() });
        for ids in parts {
            let told = Arc::clone(&answers);
            if ids.is_empty() {
                told.note(Found::default());
                continue;
            }
            client.find_then(&ids, move |found| told.note(found));
        }
        Finding(Own::new(answers))
    }
}

#[pymethods]
impl Finding {
    /// How many chunks, from the first on, are in the node's memory, how many behind those on its
    /// disk, and how many behind those on peers. None if the node has not said it within `limit_s`.
    #[pyo3(signature = (limit_s = 0.0))]
    fn wait(&self, py: Python<'_>, limit_s: f64) -> PyResult<Option<(u32, u32, u32)>> {
        let limit = Duration::try_from_secs_f64(limit_s.max(0.0)).unwrap_or(Duration::MAX);
        let answers = self.0.get()?;
        let found = py.detach(|| answers.wait(limit));
        Ok(found.map(|found| (found.in_memory, found.on_disk, found.on_peers)))
    }
}

/// Keeps chunks in the node, from when it hears of it until this is released.
#[pyclass(frozen, module = "forebay")]
pub struct Hold(Own<Arc<Mutex<Held>>>);

enum Held {
    Asked,
    Granted(#[expect(dead_code, reason = "it is kept, and that is all")] Arc<Lease>),
    Released,
}

impl Hold {
    /// Asks for the longest prefix that is there, and with `bring` has it come into the node's
    /// memory.
    pub fn ask(client: &Client, ids: &[ChunkId], ttl_us: u64, bring: bool) -> Hold {
        let held = Arc::new(Mutex::new(Held::Asked));
        let granted = Arc::clone(&held);
        client.hold_then(ids, ttl_us, move |lease| {
            // Without a node, or refused: there is nothing to hold.
            let Ok(lease) = lease else { return };
            let mut held = granted.lock();
            if matches!(*held, Held::Asked) {
                let lease = Arc::new(lease);
                *held = Held::Granted(Arc::clone(&lease));
                drop(held);
                if bring {
                    fetch(&lease);
                }
            }
        });
        Hold(Own::new(held))
    }
}

impl Hold {
    /// Tells the node, and so waits for one that takes nothing in: never with the interpreter's
    /// lock.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.0.get()?;
        py.detach(|| {
            let mut held = held.lock();
            let before = std::mem::replace(&mut *held, Held::Released);
            drop(held);
            drop(before);
        });
        Ok(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Another process only forgets it.
        let _ = Python::attach(|py| self.end(py));
    }
}

#[pymethods]
impl Hold {
    /// Ends it.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }
}
