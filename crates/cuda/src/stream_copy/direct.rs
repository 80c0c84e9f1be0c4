//! The direct path: what a stream copy copies over its target's own PCIe link by copy engine, in
//! the stream copy's stream.

use super::meter::Part;
use super::pages::Pages;
use super::queued::{StreamCopy, Waits, is_small};
use crate::device::Event;
use crate::driver::abi::StreamHandle;
use crate::driver::{BatchCopy, CopyList, CudaError};
use crate::kernels::Kernels;
use crate::links::are_worth_a_batch;
use std::sync::Arc;

/// Copies of one call. Before the first of them begins, a call takes half a microsecond for each
/// (one call of 4,096 moved 39 GB/s); those of the call before keep the link busy meanwhile.
const BATCH_COPIES: usize = 1024;
/// Beside relays, for which the same thread may have to queue, as for a stream copy in a caller's
/// stream. A call for more than some 256 to 512 does not return before the link has done a part of
/// them, and relays have nothing to do meanwhile: over two H100s' links, 32k tokens of 64 KiB pages
/// came after 111 ms with calls for 1,024 copies and after 66 with 128. With a thread for each
/// relay both were as fast.
const BATCH_COPIES_BESIDE: usize = 128;
/// As many long pieces go by such calls too. One by one, there is a gap behind each: pieces of 1
/// MiB came to an H200 at 45 GB/s so, and at 51 to 53 by batches; the first token of a prompt of
/// 128k tokens after 496 and 404 ms. A few pieces are there before a batch begins.
const BATCH_COPIES_MIN: usize = 32;
/// What is awaited goes by kernels if it is less in all, which are there before a batch has begun.
/// They wait for room on the GPU while layers before compute: the first token of prompts of 1k, 4k,
/// 8k and 16k tokens (4 to 64 MiB a layer) came after 13, 22, 42 and 82 ms on an H200 by kernels,
/// and after 14, 16, 27 and 50 by batches.
pub const AWAITED_BATCH_BYTES_MIN: u64 = 8 << 20;

/// What copies in a stream copy's own stream need.
#[derive(Debug)]
pub struct Direct {
    target: Arc<Kernels>,
    /// Where the driver copies many pieces by one call.
    batch: Option<(BatchCopy, CopyList)>,
    /// Passed when the copies are over, where they are in a stream of their own.
    over: Event,
}

/// What goes over the direct path.
#[derive(Debug)]
pub struct Row<'a> {
    pub pages: Pages<'a>,
    /// As [`goes_by_batch`](Direct::goes_by_batch) has said.
    pub by_batch: bool,
    /// Whether relays have a part in the stream copy.
    pub is_beside: bool,
    /// What times it.
    pub part: Option<&'a mut Part>,
}

impl Direct {
    /// The direct path to `target`, or from it.
    pub fn new(target: &Arc<Kernels>) -> Result<Direct, CudaError> {
        let device = target.device();
        let batch = device.driver().batch_copy().map(|batch| (batch, CopyList::with_room(BATCH_COPIES)));
        Ok(Direct { target: Arc::clone(target), batch, over: Event::new(device)? })
    }

    /// Whether a row is long enough for a batch, in a stream that takes one.
    pub fn goes_by_batch(&self, stream_copy: &StreamCopy, pages: Pages) -> bool {
        let least_copies = if is_small(pages.pieces(), pages.bytes()) { 2 } else { BATCH_COPIES_MIN };
        let may_wait = stream_copy.awaited_bytes.is_none_or(|bytes| bytes >= AWAITED_BATCH_BYTES_MIN);
        let is_possible = self.batch.is_some() && BatchCopy::fits(stream_copy.stream);
        pages.pieces() >= least_copies
            && are_worth_a_batch(pages.pieces(), pages.bytes())
            && may_wait
            && is_possible
    }

    /// Queues a row's copies in the stream copy's stream.
    ///
    /// # Safety
    ///
    /// As for [`PathSet::queue`](super::path_set::PathSet::queue).
    pub unsafe fn queue(&mut self, stream_copy: &StreamCopy, row: Row) -> Result<(), CudaError> {
        let Row { pages, by_batch, is_beside, mut part } = row;
        if let Waits::For(event) = stream_copy.waits {
            event.hold(stream_copy.stream)?;
        }
        part.iter_mut().for_each(|part| part.begins(stream_copy.stream));
        let queued = match &mut self.batch {
            Some((batch, list)) if by_batch => {
                let most = if is_beside { BATCH_COPIES_BESIDE } else { BATCH_COPIES };
                // SAFETY: by this function's contract.
                unsafe { queue_batch(&self.target, *batch, list, most, stream_copy.stream, pages) }
            }
            // SAFETY: as above.
            _ => unsafe { queue_one_by_one(&self.target, stream_copy.stream, pages) },
        };
        part.iter_mut().filter(|_| queued.is_ok()).for_each(|part| part.ends(stream_copy.stream));
        if stream_copy.joined == stream_copy.stream {
            return queued;
        }
        let joined =
            self.over.record_in(stream_copy.stream).and_then(|()| self.over.hold(stream_copy.joined));
        queued.and(joined)
    }
}

/// Queues a row's copies, as many as that by one call.
///
/// # Safety
///
/// As for [`Direct::queue`], by batch.
unsafe fn queue_batch(
    target: &Kernels,
    batch: BatchCopy,
    list: &mut CopyList,
    most: usize,
    stream: StreamHandle,
    mut pages: Pages,
) -> Result<(), CudaError> {
    let driver = target.device().driver();
    while let Some(piece) = pages.next(u64::MAX) {
        list.add(piece.from, piece.to, piece.bytes);
        if list.len() == most || pages.bytes() == 0 {
            // SAFETY: by this function's contract.
            unsafe { batch.queue(driver, list, stream)? };
        }
    }
    Ok(())
}

/// Queues a row's copies.
///
/// # Safety
///
/// As for [`Direct::queue`].
unsafe fn queue_one_by_one(
    target: &Kernels,
    stream: StreamHandle,
    mut pages: Pages,
) -> Result<(), CudaError> {
    while let Some(piece) = pages.next(u64::MAX) {
        // SAFETY: by this function's contract.
        unsafe { target.device().copy_in(stream, piece.from, piece.to, piece.bytes)? };
    }
    Ok(())
}
