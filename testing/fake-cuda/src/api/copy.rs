//! Copies and fills.

use crate::abi::{Code, Outcome};
use crate::caller::{get_all, put_if_wanted};
use crate::driver::State;
use crate::entry::{Call, entries};
use crate::memory::Move;
use crate::op::What;
use std::ffi::c_void;
use std::sync::Arc;

/// Pageable bytes up to this length are taken when the copy to the GPU is posted; the caller need
/// not wait.
const TAKEN_BYTES: u64 = 64 << 10;
/// Copies of a batch at most.
const BATCH_MAX: usize = 1 << 20;

/// What the entry point says about one side of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Host,
    Device,
    Any,
}

/// The copies of a batch, as the caller lists them.
struct Lists {
    to: *const u64,
    from: *const u64,
    bytes: *const usize,
    count: usize,
}

impl State {
    /// Whether an address is what the entry point takes.
    fn is(&mut self, side: Side, at: u64) -> Outcome {
        let known = self.memory.find(at).map(|area| area.kind);
        let fits = match side {
            Side::Any => true,
            Side::Host => known.is_none_or(|kind| !kind.on_device()),
            // Mapped host memory is a device address, too.
            Side::Device => known.is_some(),
        };
        if fits {
            return Ok(());
        }
        // Freed memory and addresses that were never any look alike to the caller, not to the
        // report.
        let _ = self.check(0, self.calling, at, 1);
        Err(Code::INVALID_VALUE)
    }

    fn pageable(&self, at: u64) -> bool {
        self.memory.find(at).is_none()
    }
}

impl Call {
    /// One copy. `sync`: the caller waits for its end.
    fn copy(
        &mut self,
        sides: (Side, Side),
        from: u64,
        to: u64,
        bytes: usize,
        stream: usize,
        sync: bool,
    ) -> Outcome {
        let stream = self.stream(stream)?;
        if sync {
            self.unsafe_in_capture()?;
        }
        if bytes == 0 {
            return Ok(());
        }
        self.is(sides.0, from)?;
        self.is(sides.1, to)?;
        self.copies(vec![Move { from, to, bytes: bytes as u64 }], stream, sync)
    }

    /// Copies as one operation. With pageable memory the caller waits, as with the real driver.
    fn copies(&mut self, mut moves: Vec<Move>, stream: usize, sync: bool) -> Outcome {
        let pageable = moves.iter().any(|one| self.pageable(one.from) || self.pageable(one.to));
        if pageable && self.capture_status(stream) != 0 {
            return self.unsafe_in_capture();
        }
        let mut kept = None;
        if let [one] = &mut moves[..]
            && self.pageable(one.from)
            && !self.pageable(one.to)
            && one.bytes <= TAKEN_BYTES
        {
            let bytes: Arc<[u8]> = get_all(one.from as *const u8, one.bytes as usize)?.into();
            one.from = bytes.as_ptr() as u64;
            kept = Some(bytes);
        }
        let waits = sync || (pageable && kept.is_none());
        let id = self.enqueue_named(stream, What::Moves { moves: moves.into(), kept })?;
        if waits { self.wait_for_ops(id) } else { Ok(()) }
    }

    fn fill(&mut self, at: u64, byte: u8, bytes: usize, stream: usize, sync: bool) -> Outcome {
        let stream = self.stream(stream)?;
        if sync {
            self.unsafe_in_capture()?;
        }
        self.is(Side::Device, at)?;
        let id = self.enqueue_named(stream, What::Fill { at, bytes: bytes as u64, byte })?;
        if sync { self.wait_for_ops(id) } else { Ok(()) }
    }

    fn batch(
        &mut self,
        lists: Lists,
        attrs: (*const c_void, *const usize, usize),
        fail: *mut usize,
        stream: usize,
    ) -> Outcome {
        put_if_wanted(fail, usize::MAX);
        let count = lists.count;
        // The legacy stream takes no batches, in the real driver.
        let legacy = stream == crate::abi::STREAM_LEGACY || (stream == 0 && !self.per_thread);
        if legacy || count == 0 || count > BATCH_MAX || attrs.0.is_null() || attrs.2 == 0 || attrs.2 > count {
            return Err(Code::INVALID_VALUE);
        }
        let starts = get_all(attrs.1, attrs.2)?;
        if starts[0] != 0
            || !starts.is_sorted_by(|one, next| one < next)
            || starts.iter().any(|&start| start >= count)
        {
            return Err(Code::INVALID_VALUE);
        }
        let stream = self.stream(stream)?;
        let gpu = self.current()?;
        // Nobody says what the real driver does with another context's stream, so nobody may rely
        // on it.
        if self.streams.get(&stream).is_none_or(|stream| stream.gpu != gpu) {
            return Err(Code::INVALID_CONTEXT);
        }
        let (to, from, bytes) =
            (get_all(lists.to, count)?, get_all(lists.from, count)?, get_all(lists.bytes, count)?);
        let mut moves = Vec::with_capacity(count);
        for (index, ((to, from), bytes)) in to.into_iter().zip(from).zip(bytes).enumerate() {
            let symbol = self.symbol;
            let bytes = bytes as u64;
            let one = Move { from, to, bytes };
            let sound = bytes > 0 && self.check_move(gpu, symbol, &one).is_ok();
            if !sound {
                put_if_wanted(fail, index);
                return Err(Code::INVALID_VALUE);
            }
            moves.push(one);
        }
        self.copies(moves, stream, false)
    }
}

const H2D: (Side, Side) = (Side::Host, Side::Device);
const D2H: (Side, Side) = (Side::Device, Side::Host);
const D2D: (Side, Side) = (Side::Device, Side::Device);
const ANY: (Side, Side) = (Side::Any, Side::Any);

entries! {
    cuMemcpy | cuMemcpy_ptds @ 7000 = "cuMemcpy" @ 4000 (to: u64, from: u64, bytes: usize) |call| {
        call.copy(ANY, from, to, bytes, 0, true)
    }
    cuMemcpyAsync | cuMemcpyAsync_ptsz @ 7000 = "cuMemcpyAsync" @ 4000
    (to: u64, from: u64, bytes: usize, stream: usize) |call| {
        call.copy(ANY, from, to, bytes, stream, false)
    }
    cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds @ 7000 = "cuMemcpyHtoD" @ 3020
    (to: u64, from: *const c_void, bytes: usize) |call| {
        call.copy(H2D, from as u64, to, bytes, 0, true)
    }
    cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds @ 7000 = "cuMemcpyDtoH" @ 3020
    (to: *mut c_void, from: u64, bytes: usize) |call| {
        call.copy(D2H, from, to as u64, bytes, 0, true)
    }
    cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds @ 7000 = "cuMemcpyDtoD" @ 3020 (to: u64, from: u64, bytes: usize) |call| {
        call.copy(D2D, from, to, bytes, 0, true)
    }
    cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz @ 7000 = "cuMemcpyHtoDAsync" @ 3020
    (to: u64, from: *const c_void, bytes: usize, stream: usize) |call| {
        call.copy(H2D, from as u64, to, bytes, stream, false)
    }
    cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz @ 7000 = "cuMemcpyDtoHAsync" @ 3020
    (to: *mut c_void, from: u64, bytes: usize, stream: usize) |call| {
        call.copy(D2H, from, to as u64, bytes, stream, false)
    }
    cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz @ 7000 = "cuMemcpyDtoDAsync" @ 3020
    (to: u64, from: u64, bytes: usize, stream: usize) |call| {
        call.copy(D2D, from, to, bytes, stream, false)
    }
    cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz @ 12080 = "cuMemcpyBatchAsync" @ 12080
    (to: *const u64, from: *const u64, bytes: *const usize, count: usize, attrs: *const c_void, starts: *const usize,
     attr_count: usize, fail: *mut usize, stream: usize) |call| {
        call.batch(Lists { to, from, bytes, count }, (attrs, starts, attr_count), fail, stream)
    }
    cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz @ 13000 = "cuMemcpyBatchAsync" @ 13000
    (to: *const u64, from: *const u64, bytes: *const usize, count: usize, attrs: *const c_void, starts: *const usize,
     attr_count: usize, stream: usize) |call| {
        call.batch(Lists { to, from, bytes, count }, (attrs, starts, attr_count), std::ptr::null_mut(), stream)
    }
    cuMemsetD8_v2 | cuMemsetD8_v2_ptds @ 7000 = "cuMemsetD8" @ 3020 (at: u64, value: u8, count: usize) |call| {
        call.fill(at, value, count, 0, true)
    }
    cuMemsetD8Async | cuMemsetD8Async_ptsz @ 7000 = "cuMemsetD8Async" @ 3020
    (at: u64, value: u8, count: usize, stream: usize) |call| {
        call.fill(at, value, count, stream, false)
    }
}
