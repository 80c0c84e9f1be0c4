//! Links of a GPU: its PCIe link in each direction and the NVLink pairs with its peers. A link
//! turns lots into work on streams, and the poller tells when that is over.

mod pcie;
mod peer;
mod segment;
mod table;

pub use pcie::{Direction, PcieLink};
pub use peer::PeerLink;

use crate::driver::{CudaError, Relaxed};
use crate::poller::Track;
use forebay_transfer::{Completion, Outcome};

/// Pieces below this go by kernel: a copy engine needs a few microseconds for each.
pub(crate) const ENGINE_PIECE_BYTES: u64 = 128 << 10;

/// Ends an operation once everything is over that was put into the track so far. `posted` is how
/// that went: after an error the operation fails, but not before what did get in is over.
fn finish_when_passed(
    track: &Track,
    bytes: u64,
    posted: Result<(), CudaError>,
    done: Completion,
    keep: impl Send + 'static,
) {
    let on_passed = Box::new(move |passed: Result<(), CudaError>| {
        drop(keep);
        match posted.and(passed) {
            Ok(()) => done.finish(Outcome::Moved { bytes }),
            Err(error) => done.finish(Outcome::Failed { error: error.to_string() }),
        }
    });
    if let Err((error, on_passed)) = track.when_passed(on_passed) {
        come_to_an_end(track);
        on_passed(Err(error));
    }
}

/// Waits until nothing of a track is under way, where no event can be had that would tell: the
/// memory is in use until then. An error is that of a context that has ended, and with it all that
/// it had under way.
fn come_to_an_end(track: &Track) {
    let _relaxed = Relaxed::enter(track.stream().device().driver());
    let _ = track.stream().synchronize();
}
