//! Segments that go over the node's relays too. A mover shares them out among the GPU's own link
//! and the relays while they are copied, and what a relay that is lost had not done goes over the
//! own link; so the host sees them end, and no stream waits for the node. Then they come back to
//! the queue, for what is summed up behind them and for the event that an engine's stream waits
//! for: see [`Gpu::post`].

use super::links::way;
use super::{Gpu, failed};
use crate::copies::{Direction, NotCopied};
use crate::gpu::job::{Route, Segment};
use forebay_cuda::CopyError;
use forebay_cuda::remote::OwnCopy;
use forebay_transfer::{Class, Span};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

type Return = Box<dyn FnOnce() + Send>;

/// A thread on which segments come back: who tells of their ends has the mover's lock, and calls of
/// the driver take time.
#[derive(Debug)]
pub struct Returns {
    row: Option<Sender<Return>>,
    thread: Option<JoinHandle<()>>,
}

impl Returns {
    pub fn spawn() -> std::io::Result<Returns> {
        let (row, given) = channel::<Return>();
        let thread = std::thread::Builder::new().name("forebay-relayed".into());
        let thread = thread.spawn(move || given.into_iter().for_each(|back| back()))?;
        Ok(Returns { row: Some(row), thread: Some(thread) })
    }
}

impl Drop for Returns {
    fn drop(&mut self) {
        drop(self.row.take());
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() != std::thread::current().id() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// A segment on its way. It comes back once, whatever becomes of the mover.
struct OnItsWay {
    /// Taken when it comes back. It is let go of there: what the GPU has waits for the mover's
    /// threads when it is dropped.
    segment: Option<(Arc<Gpu>, Segment)>,
    bytes: u64,
    ticket: u64,
    returns: Option<Sender<Return>>,
    _own: Option<OwnCopy>,
}

impl Gpu {
    /// Puts a segment, which was taken from its queue, on its way: as soon as the engine's stream
    /// has come to where its job began.
    pub(super) fn relay(self: &Arc<Gpu>, segment: Segment, bytes: u64, hosts: Vec<Span>) {
        let (direction, begun) = (segment.job.direction(), segment.job.begun());
        let ticket = self.sender(direction).queue.lock().aside();
        let own = self.links.own_copy(self.device.index(), direction, bytes);
        let returns = self.returns.as_ref().and_then(|returns| returns.row.clone());
        let segment = Some((Arc::clone(self), segment));
        let way = OnItsWay { segment, bytes, ticket, returns, _own: own };
        match begun {
            None => way.start(hosts),
            Some(begun) => self.when_begun(begun, move |begun| match begun {
                Ok(()) => way.start(hosts),
                Err(why) => way.back(Err(why)),
            }),
        }
    }
}

impl OnItsWay {
    fn start(mut self, hosts: Vec<Span>) {
        let Some((gpu, segment)) = self.segment.as_mut() else { return };
        let gpu = Arc::clone(gpu);
        let Some(copier) = gpu.links.with_node() else { return };
        let (direction, pieces) = (segment.job.direction(), std::mem::take(&mut segment.pieces));
        let class = match direction {
            Direction::Load => Class::Demand,
            Direction::Store => Class::WriteBack,
        };
        let ways = (gpu.device.index(), way(direction));
        let on_quiet = move |moved: Result<(), CopyError>| self.back(moved.map_err(failed));
        // SAFETY: pages are valid and the connector's by the contract of `CudaCopies::new`, the
        // engine's stream has come to where they are, and the segment keeps the arena mapped and
        // pinned. A mover that takes nothing in any more drops the segment, which then comes back.
        let _ = unsafe { copier.copy_relayed(ways, &pieces, hosts, class, on_quiet) };
    }

    fn back(mut self, outcome: Result<(), NotCopied>) {
        self.give_back(outcome);
    }

    fn give_back(&mut self, outcome: Result<(), NotCopied>) {
        let Some((gpu, mut segment)) = self.segment.take() else { return };
        let (ticket, bytes) = (self.ticket, self.bytes);
        segment.route = Route::Back(outcome);
        let back = move || {
            let _relaxed = gpu.relaxed();
            let direction = segment.job.direction();
            gpu.sender(direction).queue.lock().back(ticket, segment, bytes);
            gpu.pump(direction);
        };
        // The thread takes what is sent as long as there is a GPU.
        drop(self.returns.take().map(|returns| returns.send(Box::new(back))));
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        self.give_back(Err(failed("the mover has ended")));
    }
}
