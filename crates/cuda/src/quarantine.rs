//! Memory that operations which were given up may still touch, and who waits until they cannot.

use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{Closed, End, MoverHandle, PostError, Span, SubmitError, Transfer};
use std::sync::{Arc, mpsc};

/// The spans, each as often as operations hold it.
#[derive(Debug, Default)]
pub struct Quarantine {
    held: Mutex<Vec<Span>>,
    released: Condvar,
}

impl Quarantine {
    /// The quarantine of a mover, which says when spans leave it.
    pub fn of(mover: &MoverHandle) -> Result<Arc<Quarantine>, Closed> {
        let quarantine = Arc::<Quarantine>::default();
        let own = Arc::clone(&quarantine);
        mover.on_quiet(move |spans| own.release(spans))?;
        Ok(quarantine)
    }

    /// Waits until a transfer has ended and nothing of it is under way any more, whatever was given
    /// up of it: whoever names memory by its address alone has nowhere to keep what must not be
    /// touched yet. However long that takes: whoever went on sooner might find bytes written over
    /// what is no target any more.
    pub fn run(self: &Arc<Quarantine>, mover: &MoverHandle, transfer: Transfer) -> Result<End, SubmitError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let quarantine = Arc::clone(self);
        let on_end = move |end| {
            // Here and not by who waits: the mover may say right after this that they are quiet.
            quarantine.held.lock().extend_from_slice(quarantined(&end));
            drop(sender.send(end));
        };
        mover.submit(transfer, on_end)?;
        let end = receiver.recv().map_err(|_| SubmitError::from(PostError::Closed))?;
        let spans = quarantined(&end);
        let waits = |held: &mut Vec<Span>| spans.iter().any(|span| held.contains(span));
        self.released.wait_while(&mut self.held.lock(), waits);
        Ok(end)
    }

    fn release(&self, spans: &[Span]) {
        let mut held = self.held.lock();
        for span in spans {
            // What is not here is of a transfer whose owner has the list of what to keep.
            if let Some(index) = held.iter().position(|other| other == span) {
                held.swap_remove(index);
            }
        }
        drop(held);
        self.released.notify_all();
    }
}

/// What a lost operation may still touch of a transfer that has ended.
fn quarantined(end: &End) -> &[Span] {
    match end {
        End::Done { .. } => &[],
        End::Failed(failure) => &failure.quarantined,
        End::Cancelled { quarantined, .. } => quarantined,
    }
}
