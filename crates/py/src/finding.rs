//! Requests to a node whose answers are read later: [`Finding`], how much of a sequence the node
//! has, and [`Hold`], which keeps that in the node. They are for a thread that must not be held up
//! by a node, such as an engine's scheduler: asking returns at once, and `Finding.wait` waits for
//! the answer as long as it is told to, by default not at all.

use crate::chunk::Ending;
use crate::process::Own;
use forebay_client::{Client, Found, Lease, fetch};
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// What a node has of a sequence, which it may still have to say.
#[pyclass(frozen, module = "forebay")]
pub struct Finding(Own<Arc<Answers>>);

#[derive(Default)]
struct Answers {
    /// What was found of each part that has been answered.
    parts: Mutex<Vec<Found>>,
    whole: Ending<Found>,
}

impl Finding {
    /// Asks for the ids of each part of a sequence; all parts of a chunk are needed.
    pub fn ask(client: &Client, parts: Vec<Vec<ChunkId>>) -> Finding {
        let (answers, all) = (Arc::new(Answers::default()), parts.len());
        let note = move |answers: &Answers, found: Found| {
            let mut parts = answers.parts.lock();
            parts.push(found);
            if parts.len() >= all {
                answers.whole.set(parts.iter().copied().reduce(Found::and).unwrap_or_default());
            }
        };
        for ids in parts {
            let told = Arc::clone(&answers);
            if ids.is_empty() {
                note(&told, Found::default());
            } else {
                client.find_then(&ids, move |found| note(&told, found));
            }
        }
        if all == 0 {
            answers.whole.set(Found::default());
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
        let found = py.detach(|| answers.whole.wait_for(limit));
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
