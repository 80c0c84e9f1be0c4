//! A Bring under way: chunks come into memory one by one, and are told to the client in few
//! answers. An answer goes when the last chunk has ended, or when enough has gathered that waiting
//! for more would hold the client up. So small chunks cost few messages, and large ones are told at
//! once.

use forebay_client::protocol::answer::{Answer, Brought, ChunkPlace, Refusal};
use forebay_transfer::lock::Mutex;
use std::sync::Arc;

/// Bytes of chunks that wait to be told at most: what a disk reads in a few milliseconds.
const CHUNK_BYTES: u64 = 16 << 20;
/// Bytes of places and checksums that wait at most: far below a frame's.
const TOLD_BYTES: usize = 1 << 20;

pub type BroughtEnd = Result<ChunkPlace, (Refusal, String)>;

pub struct BringRequest {
    /// Sends an answer, and is told whether it is the last one.
    tell: Box<dyn Fn(Answer, bool) + Send + Sync>,
    state: Mutex<State>,
}

struct State {
    /// Chunks that have not ended.
    left: usize,
    waiting: Vec<Brought>,
    chunk_bytes: u64,
    told_bytes: usize,
}

impl BringRequest {
    /// Of so many chunks, whose answers `tell` sends.
    pub fn new(chunks: usize, tell: impl Fn(Answer, bool) + Send + Sync + 'static) -> Arc<BringRequest> {
        let state = State { left: chunks, waiting: Vec::new(), chunk_bytes: 0, told_bytes: 0 };
        Arc::new(BringRequest { tell: Box::new(tell), state: Mutex::new(state) })
    }

    /// A chunk has come, or will not. Called once for each, on any thread.
    pub fn end(&self, chunk: usize, end: BroughtEnd) {
        let mut state = self.state.lock();
        state.left -= 1;
        match &end {
            Ok(place) => {
                state.chunk_bytes += place.shape.bytes();
                // A shape may have a run for each layer.
                state.told_bytes += 32 + 16 * place.sums.len();
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
        (self.tell)(Answer::Brought(brought), is_last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_store::ChunkShape;

    /// How many chunks each answer tells of, and whether it is the last one, where each chunk has
    /// so many bytes.
    fn answers(chunks: usize, bytes: u64) -> Vec<(usize, bool)> {
        let told = Arc::new(Mutex::new(Vec::new()));
        let sent = Arc::clone(&told);
        let request = BringRequest::new(chunks, move |answer, is_last| {
            let Answer::Brought(brought) = answer else { panic!("{answer:?}") };
            sent.lock().push((brought.len(), is_last));
        });
        let shape = Arc::new(ChunkShape::new([bytes]).unwrap());
        for chunk in 0..chunks {
            let place = ChunkPlace { offset_bytes: 0, shape: Arc::clone(&shape), sums: vec![0] };
            request.end(chunk, if chunk == 1 { Err((Refusal::Gone, "gone".into())) } else { Ok(place) });
        }
        let told = told.lock();
        told.clone()
    }

    #[test]
    fn large_chunks_are_told_at_once_and_small_ones_together() {
        assert_eq!(answers(4, CHUNK_BYTES), [(1, false), (2, false), (1, true)]);
        assert_eq!(answers(200, 1000), [(200, true)]);
        assert_eq!(answers(1, 1), [(1, true)]);
    }
}
