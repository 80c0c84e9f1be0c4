//! The contract between the schedule and the links that carry it out.

use crate::memory::Memory;
use crate::mover::OpId;
use crate::region::SpanPair;
use std::sync::Arc;

/// A physical resource that copies bytes.
///
/// [`start`](Link::start) must not block, nor wait for the mover: it hands the operation to the
/// hardware, the kernel or threads of the link's own. The operation owns its spans until `done` is
/// finished, so a link finishes an operation only when nothing of it can read or write them any
/// more, also after an error.
pub trait Link: Send {
    /// Starts copying each pair's source to its target. The order of pairs is free, but
    /// `Outcome::Moved` with fewer bytes than asked for means a prefix of the pairs in their order.
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion);

    /// Asks for an early end of an operation whose transfer was cancelled: as soon as it is quiet
    /// it may fail. Links whose operations are short need not listen.
    fn cancel(&mut self, _op: OpId) {}
}

/// One hop of a lot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkOp {
    pub pairs: Vec<SpanPair>,
    pub bytes: u64,
}

/// How an operation ended. Nothing touches its spans any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The first `bytes` bytes arrived. Fewer than asked for is a short copy: the mover continues
    /// it.
    Moved { bytes: u64 },
    /// Some or all bytes did not arrive; the targets hold anything. The mover tries again on any
    /// path.
    Failed { error: String },
    /// Whoever owns the other memory will not have it. That says nothing against the link, and
    /// another attempt would end the same way. Not tried again.
    Denied { error: String },
    /// The bytes arrived but are not those that were stored or sent. Not tried again.
    Corrupt,
}

/// The obligation to end one operation. Dropping it without [`finish`](Completion::finish) reports
/// a failure, so that no operation is ever forgotten.
pub struct Completion {
    op: OpId,
    mover: Option<Arc<dyn Completed>>,
    inspector: Option<Inspector>,
}

/// Who is told of ends: the mover.
pub(crate) trait Completed: Send + Sync {
    /// An operation has ended.
    fn completed(self: Arc<Self>, op: OpId, outcome: Outcome);
}

type Inspector = Box<dyn FnOnce(&Outcome) + Send>;

impl Completion {
    pub(crate) fn new(op: OpId, mover: Arc<dyn Completed>) -> Completion {
        Completion { op, mover: Some(mover), inspector: None }
    }

    /// Has `inspector` called with the outcome, on the finishing thread, while the operation still
    /// owns its spans. For links that wrap others.
    pub fn inspect(mut self, inspector: impl FnOnce(&Outcome) + Send + 'static) -> Completion {
        self.inspector = Some(Box::new(inspector));
        self
    }

    /// The operation that is to be ended, as [`Link::cancel`] names it.
    pub fn op(&self) -> OpId {
        self.op
    }

    /// Ends the operation. Callable from any thread. This thread may then do what the mover has to
    /// do next: start operations, also of the same link, and tell callers of the ends of their
    /// transfers. So no lock may be held that
    /// [`Link::start`] takes too.
    pub fn finish(mut self, outcome: Outcome) {
        self.post(outcome);
    }

    fn post(&mut self, outcome: Outcome) {
        if let Some(mover) = self.mover.take() {
            if let Some(inspector) = self.inspector.take() {
                inspector(&outcome);
            }
            mover.completed(self.op, outcome);
        }
    }
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.post(Outcome::Failed { error: "the link dropped the operation".into() });
    }
}
