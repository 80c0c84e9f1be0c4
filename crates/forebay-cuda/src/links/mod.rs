//! Links of a GPU: its PCIe lane in each direction, the NVLink pairs with its peers, and the lane of a peer that its own
//! kernel reads or writes for another GPU. A link turns lots into work on streams and has the control thread tell when it
//! is over. These files know streams, copy engines and kernels; they must never know which lot goes where next.

mod lane;
mod parcel;
mod peer;
mod table;

pub use lane::{Direction, LaneLink};
pub(crate) use parcel::{Parcel, parcels};
pub use peer::{PeerLink, RelayLink};

use crate::driver::CudaError;
use crate::poller::Track;
use forebay_mover::{Completion, Outcome};

/// Pieces below this go by kernel: a copy engine needs a few microseconds for each.
pub(crate) const ENGINE_PIECE_BYTES: u64 = 128 << 10;

/// Ends an operation once everything is over that was put into the track so far. `posted` is how that went: after an error
/// the operation fails, but not before what did get in is over.
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
    if let Err((_, on_passed)) = track.when_passed(on_passed) {
        // As in `abandon`: what was put in may go on.
        std::mem::forget(on_passed);
    }
}

/// Leaves an operation without an end, since nobody can tell when what was put in is over. The mover counts it as lost when
/// its time is up and keeps its spans from being used again.
fn abandon(done: Completion, keep: impl Send + 'static) {
    std::mem::forget((done, keep));
}
