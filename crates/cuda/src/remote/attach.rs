//! The engine's side: a copier's GPU attached to the relays of the node's process.

use super::relay_paths::Ground;
use super::relays_at::RelaysAt;
use super::session::OwnCopy;
use super::supervisor::{Status, Supervised, Supervisor};
use crate::kernels::{Kernels, Piece};
use crate::links::Direction;
use crate::pinned::{self, OnChange};
use forebay_transfer::Span;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

/// A copier's GPU and the relays of the node's process. Dropping it takes them out of service.
pub struct Attachment {
    shared: Arc<Supervised>,
    device: u16,
    thread: Option<JoinHandle<()>>,
    /// Called when there is more memory to give to the node, or less.
    _on_change: Arc<OnChange>,
}

impl Attachment {
    /// Attaches in the background, now and whenever a node returns. The node is given all memory
    /// that is published in this process, now and later.
    pub(crate) fn start(ground: Ground, kernels: &Arc<Kernels>, at: RelaysAt) -> io::Result<Attachment> {
        let device = kernels.device().index();
        let (supervisor, shared) = Supervisor::new(ground, kernels, at)?;
        let ringer = Arc::clone(&shared.ringer);
        let on_change: Arc<OnChange> = Arc::new(move || ringer.ring());
        pinned::on_change(&on_change);
        let thread = std::thread::Builder::new().name("forebay-attach".into());
        let thread = thread.spawn(move || supervisor.run())?;
        Ok(Attachment { shared, device, thread: Some(thread), _on_change: on_change })
    }

    pub fn device(&self) -> u16 {
        self.device
    }

    pub fn status(&self) -> Status {
        self.shared.state.lock().status.clone()
    }

    /// Waits until the status is one that `wanted` wants; gives the last one, wanted or not.
    pub fn wait(&self, limit: Duration, wanted: impl Fn(&Status) -> bool) -> Status {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while_for(&mut state, |state| !wanted(&state.status), limit);
        state.status.clone()
    }

    /// How often relays that were in service were lost, for whatever reason: the log has them.
    pub fn losses(&self) -> u64 {
        self.shared.losses.load(Ordering::Relaxed)
    }

    /// Bytes of host memory that relays reach now. It takes the node a moment to pin what is new.
    pub fn shared_bytes(&self) -> u64 {
        self.shared.reach.bytes()
    }

    /// Where the host sides of pieces lie, if relays reach them all now: regions whose place is
    /// [`SHARED`](crate::SHARED).
    pub(crate) fn spans(&self, direction: Direction, pieces: &[Piece]) -> Option<Vec<Span>> {
        self.shared.reach.spans(direction, pieces)
    }

    /// Tells the node, until the value is dropped, that this GPU's PCIe link is in use by its own
    /// engine.
    pub(crate) fn own_copy(&self, direction: Direction) -> Option<OwnCopy> {
        let session = self.shared.state.lock().session.clone();
        session.map(|session| OwnCopy::new(session, direction))
    }
}

impl std::fmt::Debug for Attachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attachment").field("device", &self.device).field("status", &self.status()).finish()
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.ringer.ring();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}
