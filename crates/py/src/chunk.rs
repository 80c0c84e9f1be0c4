//! Chunks on their way between a node and this process, as Python waits for them. A chunk that was
//! loaded is good only after its bytes were compared with their checksums: that is part of waiting
//! for it. This file knows ends.

use crate::places::Piece;
use crate::process::Own;
use forebay_client::{Client, Lease};
use forebay_store::StoreEnd;
use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{End, mapped};
use pyo3::prelude::*;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Something that ends once, on any thread.
pub struct Ending<T> {
    end: Mutex<Option<T>>,
    ended: Condvar,
}

impl<T> Default for Ending<T> {
    fn default() -> Ending<T> {
        Ending { end: Mutex::new(None), ended: Condvar::new() }
    }
}

impl<T: Clone> Ending<T> {
    pub fn set(&self, end: T) {
        *self.end.lock() = Some(end);
        self.ended.notify_all();
    }

    fn has_come(&self) -> bool {
        self.end.lock().is_some()
    }

    fn wait(&self) -> T {
        loop {
            if let Some(end) = self.wait_for(Duration::MAX) {
                return end;
            }
        }
    }

    /// `None`: it has not come in time.
    pub fn wait_for(&self, limit: Duration) -> Option<T> {
        let until = Instant::now().checked_add(limit);
        let mut end = self.end.lock();
        while end.is_none() {
            match until {
                // What is too long for a clock is as good as for ever.
                None => self.ended.wait(&mut end),
                Some(until) if self.ended.wait_until(&mut end, until).timed_out() => break,
                Some(_) => {}
            }
        }
        end.clone()
    }
}

/// A chunk that is being loaded into this process. The memory belongs to it until `wait` has
/// returned.
#[pyclass(frozen, module = "forebay")]
pub struct Loading(Own<Load>);

struct Load {
    /// Whom to ask for its checksums, and as long as which lease lives. `None` only in `drop`.
    under: Option<(Client, Arc<Lease>)>,
    chunk: usize,
    layers: Vec<Vec<Piece>>,
    ending: Arc<Ending<End>>,
    /// `Ok` after the bytes were compared.
    verdict: OnceLock<Result<(), String>>,
}

impl Loading {
    pub fn new(
        client: Client,
        lease: Arc<Lease>,
        chunk: usize,
        layers: Vec<Vec<Piece>>,
        ending: Arc<Ending<End>>,
    ) -> Loading {
        let under = Some((client, lease));
        Loading(Own::new(Load { under, chunk, layers, ending, verdict: OnceLock::new() }))
    }
}

impl Load {
    fn verdict(&self) -> &Result<(), String> {
        let end = self.ending.wait();
        self.verdict.get_or_init(|| match end {
            End::Done { .. } => self.verify(),
            other => Err(why(&other)),
        })
    }

    fn verify(&self) -> Result<(), String> {
        let (client, lease) = self.under.as_ref().ok_or("it was dropped")?;
        for (number, layer) in self.layers.iter().enumerate() {
            if !layer.chunk_by(|one, next| Arc::ptr_eq(&one.place, &next.place)).all(are_there) {
                return Err(format!("the memory of layer {number} is not mapped any more"));
            }
            let pieces: Vec<&[u8]> = layer
                .iter()
                // SAFETY: the piece lies in memory that its place keeps there; the transfer has
                // ended, and Python may not write it before `wait` has returned.
                .map(|piece| unsafe { std::slice::from_raw_parts(piece.start(), piece.len as usize) })
                .collect();
            let verified = client.verify(lease, self.chunk, number, &pieces);
            verified.map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

/// Whether pieces of one place can be read: one look for all of them.
fn are_there(pieces: &[Piece]) -> bool {
    let first = pieces.iter().map(|piece| piece.start() as u64).min().unwrap_or_default();
    let end = pieces.iter().map(|piece| piece.start() as u64 + piece.len).max().unwrap_or_default();
    mapped::is_there(first, end - first, false)
}

impl Drop for Load {
    fn drop(&mut self) {
        // With the last of a lease the node is told, and one that takes nothing in is waited for:
        // never with the interpreter's lock.
        let under = self.under.take();
        Python::attach(|py| py.detach(|| drop(under)));
    }
}

#[pymethods]
impl Loading {
    /// Whether `wait` has no transfer to wait for any more.
    #[getter]
    fn has_ended(&self) -> PyResult<bool> {
        Ok(self.0.get()?.ending.has_come())
    }

    /// Waits for the end and compares the bytes with their checksums. False is a miss: nothing
    /// there may be used.
    fn wait(&self, py: Python<'_>) -> PyResult<bool> {
        let load = self.0.get()?;
        Ok(py.detach(|| load.verdict().is_ok()))
    }

    /// Why it was a miss.
    #[getter]
    fn why(&self) -> PyResult<Option<String>> {
        Ok(self.0.get()?.verdict.get().and_then(|verdict| verdict.as_ref().err().cloned()))
    }
}

/// A chunk that is being stored. Its memory must not change until `wait` has returned.
#[pyclass(frozen, module = "forebay")]
pub struct Storing(Own<Store>);

struct Store {
    /// Keeps the memory in its place.
    _layers: Vec<Vec<Piece>>,
    ending: Arc<Ending<StoreEnd>>,
}

impl Storing {
    pub fn new(layers: Vec<Vec<Piece>>, ending: Arc<Ending<StoreEnd>>) -> Storing {
        Storing(Own::new(Store { _layers: layers, ending }))
    }
}

#[pymethods]
impl Storing {
    /// Whether `wait` would return at once.
    #[getter]
    fn has_ended(&self) -> PyResult<bool> {
        Ok(self.0.get()?.ending.has_come())
    }

    /// Waits until the node has the chunk. False: it does not; that is a miss later, and nothing
    /// else.
    fn wait(&self, py: Python<'_>) -> PyResult<bool> {
        let store = self.0.get()?;
        let end = py.detach(|| store.ending.wait());
        Ok(matches!(end, StoreEnd::Stored { .. } | StoreEnd::AlreadyHere))
    }

    /// Why the node does not have it.
    #[getter]
    fn why(&self) -> PyResult<Option<String>> {
        Ok(match self.0.get()?.ending.end.lock().as_ref() {
            None | Some(StoreEnd::Stored { .. } | StoreEnd::AlreadyHere) => None,
            Some(StoreEnd::Deleted) => Some("it was deleted while it was copied".into()),
            Some(StoreEnd::Failed(end)) => Some(why(end)),
        })
    }
}

/// Why a copy is not whole.
fn why(end: &End) -> String {
    match end {
        End::Done { bytes } => format!("all {bytes} bytes were copied"),
        End::Failed(failure) => failure.reason.to_string(),
        End::Cancelled { .. } => "it was cancelled".into(),
    }
}
