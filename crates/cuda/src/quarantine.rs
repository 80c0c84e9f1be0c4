//! Memory that operations which were given up may still touch, and who waits until they cannot.

use forebay_transfer::lock::Mutex;
use forebay_transfer::{Closed, End, MoverHandle, PostError, Span, SubmitError, Transfer};
use std::sync::{Arc, mpsc};

/// Transfers that have ended, of which something may still be touched.
#[derive(Debug, Default)]
pub struct Quarantine(Mutex<Vec<Held>>);

struct Held {
    /// Each as often as operations hold it.
    spans: Vec<Span>,
    end: End,
    on_quiet: Box<dyn FnOnce(End) + Send>,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("spans", &self.spans).finish_non_exhaustive()
    }
}

impl Quarantine {
    /// The quarantine of a mover, which says when spans leave it.
    pub fn of(mover: &MoverHandle) -> Result<Arc<Quarantine>, Closed> {
        let quarantine = Arc::<Quarantine>::default();
        let own = Arc::clone(&quarantine);
        mover.on_quiet(move |spans| own.release(spans))?;
        Ok(quarantine)
    }

    /// Has `on_quiet` called when a transfer has ended and nothing of it is under way any more,
    /// whatever was given up of it: whoever names memory by its address alone has nowhere to keep
    /// what must not be touched yet. However long that takes: whoever went on sooner might find
    /// bytes written over what is no target any more. It is called as the mover calls others: it is
    /// short, and does not wait for the mover.
    pub fn submit(
        self: &Arc<Quarantine>,
        mover: &MoverHandle,
        transfer: Transfer,
        on_quiet: impl FnOnce(End) + Send + 'static,
    ) -> Result<(), SubmitError> {
        let quarantine = Arc::clone(self);
        let on_end = move |end| {
            let spans = quarantined(&end).to_vec();
            if spans.is_empty() {
                return on_quiet(end);
            }
            // At once: the mover may say right after this that they are quiet.
            quarantine.0.lock().push(Held { spans, end, on_quiet: Box::new(on_quiet) });
        };
        mover.submit(transfer, on_end).map(drop)
    }

    /// The same for who waits for it.
    pub fn run(self: &Arc<Quarantine>, mover: &MoverHandle, transfer: Transfer) -> Result<End, SubmitError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.submit(mover, transfer, move |end| drop(sender.send(end)))?;
        receiver.recv().map_err(|_| SubmitError::from(PostError::Closed))
    }

    fn release(&self, spans: &[Span]) {
        let mut held = self.0.lock();
        for span in spans {
            // What is not here is of a transfer whose owner has the list of what to keep.
            for held in held.iter_mut() {
                if let Some(at) = held.spans.iter().position(|other| other == span) {
                    held.spans.swap_remove(at);
                    break;
                }
            }
        }
        let quiet: Vec<Held> = held.extract_if(.., |held| held.spans.is_empty()).collect();
        drop(held);
        quiet.into_iter().for_each(|Held { end, on_quiet, .. }| on_quiet(end));
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
