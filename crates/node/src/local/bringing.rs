//! A Bring under way: chunks come into memory one by one, and are told to the client in few answers.
//! An answer goes when the last chunk has ended, or when enough has gathered that waiting for more
//! would hold the client up. So small chunks cost few messages, and large ones are told at once.

use super::desk::Desk;
use forebay_client::protocol::answer::{Answer, Brought, Lent, Refusal};
use forebay_client::protocol::frame::Asked;
use parking_lot::Mutex;
use std::sync::Arc;

/// Bytes of chunks that wait to be told at most: what a disk reads in a few milliseconds.
const CHUNK_BYTES: u64 = 16 << 20;
/// Bytes of places and checksums that wait at most: far below a frame's.
const TOLD_BYTES: usize = 1 << 20;

/// What became of a chunk.
pub type BroughtEnd = Result<Lent, (Refusal, String)>;

pub struct Bringing {
    desk: Arc<Desk>,
    asked: Asked,
    state: Mutex<State>,
}

struct State {
    /// Chunks that have not ended.
    left: usize,
    waiting: Vec<Brought>,
    chunk_bytes: u64,
    told_bytes: usize,
}

impl Bringing {
    /// Of so many chunks.
    pub fn new(desk: Arc<Desk>, asked: Asked, chunks: usize) -> Arc<Bringing> {
        let state = State { left: chunks, waiting: Vec::new(), chunk_bytes: 0, told_bytes: 0 };
        Arc::new(Bringing { desk, asked, state: Mutex::new(state) })
    }

    pub fn desk(&self) -> &Arc<Desk> {
        &self.desk
    }

    /// A chunk has come, or will not. Called once for each, on any thread.
    pub fn end(&self, chunk: usize, end: BroughtEnd) {
        let mut state = self.state.lock();
        state.left -= 1;
        match &end {
            Ok(lent) => {
                state.chunk_bytes += lent.shape.bytes();
                // A shape may have a run for each layer.
                state.told_bytes += 32 + 16 * lent.sums.len();
            }
            Err((_, why)) => state.told_bytes += why.len(),
        }
        // It came as a number of 32 bits.
        state.waiting.push(Brought { chunk: chunk as u32, end });
        let is_last = state.left == 0;
        if !is_last && state.chunk_bytes < CHUNK_BYTES && state.told_bytes < TOLD_BYTES {
            return;
        }
        let brought = std::mem::take(&mut state.waiting);
        (state.chunk_bytes, state.told_bytes) = (0, 0);
        // Under the lock: the last answer goes behind the others.
        self.desk.answer_in_part(self.asked, &Answer::Brought(brought), is_last);
    }
}
