//! Links of a GPU: its PCIe link in each direction and the NVLink pairs with its peers. A link
//! turns lots into work on streams, and the poller tells when that is over.

mod direction;
mod pcie;
mod peer;
mod segment;
mod table;

pub use direction::{Direction, HOST, SHARED};
pub use pcie::PcieLink;
pub(crate) use peer::PEER_BLOCKS;
pub use peer::PeerLink;
pub(crate) use table::{Table, Tables};

use crate::driver::{CudaError, Relaxed};
use crate::poller::Track;
use forebay_transfer::{Completion, LinkSpec, Outcome};

/// Pieces below this go by kernel: a copy engine needs a few microseconds for each.
pub(crate) const ENGINE_PIECE_BYTES: u64 = 128 << 10;
/// Pages as long as this on average go by copy engine too, many by one call: pages of 64 KiB came
/// to an H200 at 54 of 55 GB/s so, with nothing to wait for while the engine computes, where a
/// kernel waits for room on the GPU with each segment (16 GB/s beside a prefill). Pages of 16 KiB
/// came at 5 GB/s.
const BATCH_PIECE_BYTES: u64 = 48 << 10;
/// Lots in flight on a PCIe link or an NVLink pair: one moves, one waits behind it, one covers for
/// the control thread.
const WINDOW_LOTS: u32 = 3;
const WINDOW_BYTES: u64 = 64 << 20;
/// Putting thousands of small pages on a link takes time, in which other links would wait for their
/// first lot.
const LOT_BYTES_MAX: u64 = 4 << 20;
/// How long a lot may take before it counts as lost. A lot is 16 MiB at most; a PCIe link that
/// needs seconds for that is stuck.
const OP_TIMEOUT_US: u64 = 10_000_000;

/// A link with these limits.
pub(crate) fn link_spec(name: String) -> LinkSpec {
    let (lot_bytes_max, op_timeout_us) = (LOT_BYTES_MAX, OP_TIMEOUT_US);
    LinkSpec { lot_bytes_max, op_timeout_us, ..LinkSpec::new(name, WINDOW_LOTS, WINDOW_BYTES) }
}

/// Whether pieces are long enough on average for copy engines that take many by one call.
pub(crate) fn are_worth_a_batch(pieces: usize, bytes: u64) -> bool {
    bytes >= BATCH_PIECE_BYTES * pieces as u64
}

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
pub(crate) fn come_to_an_end(track: &Track) {
    let _relaxed = Relaxed::enter(track.stream().device().driver());
    let _ = track.stream().synchronize();
}
