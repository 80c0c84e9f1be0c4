//! What happens in a copying entry point: the copy is offered to the copying library, and if that
//! declines, the real function runs. Only the outermost entry point of a call decides: calls that
//! an interposer behind us or the copying library make meanwhile go straight on. Knows arguments of
//! copies.

use crate::counts::count;
use crate::library::{CopyApi, Pair, opened, wanted};
use crate::mode::{Mode, mode};
use crate::names::{DIRECTION_UNKNOWN, Function, NAMES, PER_THREAD, Way};
use crate::reason::Reason;
use std::cell::Cell;
use std::ffi::c_void;

/// The handle that means the legacy default stream, in every entry point.
const STREAM_LEGACY: usize = 1;

thread_local! {
    /// Whether this thread is in one of our functions. It has no destructor, so it may be used at
    /// any time.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in one of our functions.
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// Which entry point was called, and how the program had found it.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub way: Way,
    pub function: Function,
}

impl Entry {
    fn direction(self) -> u32 {
        NAMES.get(self.function).map_or(DIRECTION_UNKNOWN, |name| name.direction)
    }

    fn flags(self) -> u32 {
        NAMES.get(self.function).map_or(0, |name| name.flags)
    }
}

/// Offers one copy, or does it by `real`.
#[inline]
pub(crate) fn one(entry: Entry, pair: Pair, stream: *mut c_void, real: impl FnOnce() -> i32) -> i32 {
    decide(entry, pair.bytes, real, || {
        wanted(pair.bytes, stream, entry.flags())?.copy(&[pair], entry.direction(), stream, entry.flags())
    })
}

/// The arguments of a batch that both of its signatures have.
#[derive(Clone, Copy)]
pub(crate) struct Batch {
    pub to: *const u64,
    pub from: *const u64,
    pub bytes: *const usize,
    pub count: usize,
    pub attributes: *const Attributes,
    pub attributes_from: *const usize,
    pub attributes_count: usize,
    pub stream: *mut c_void,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
pub(crate) struct Attributes {
    source_order: u32,
    source_hint: [u32; 2],
    target_hint: [u32; 2],
    flags: u32,
}

const SOURCE_IN_STREAM_ORDER: u32 = 1;
const SOURCE_IN_ANY_ORDER: u32 = 3;
const OVERLAP_WITH_COMPUTE: u32 = 1;

/// Larger batches are the driver's.
const BATCH_COPIES_MAX: usize = 1 << 24;

/// Offers a batch, or does it by `real`.
///
/// # Safety
/// The pointers and counts are those that the program gave to the driver's function.
pub(crate) unsafe fn batch(entry: Entry, batch: Batch, real: impl FnOnce() -> i32) -> i32 {
    let looked_at = mode() != Mode::Off && !is_inside();
    // SAFETY: by this function's condition.
    let total = if looked_at { unsafe { batch.total_bytes() } } else { None };
    decide(entry, total.unwrap_or(0), real, || {
        let bytes = total.ok_or(Reason::DRIVER_JUDGES)?;
        let api = wanted(bytes, batch.stream, entry.flags())?;
        // SAFETY: by this function's condition.
        let pairs = unsafe { batch.pairs(entry) }.ok_or(Reason::DRIVER_JUDGES)?;
        api.copy(&pairs, entry.direction(), batch.stream, entry.flags())
    })
}

impl Batch {
    /// The bytes of all copies together, unless there is something wrong with them.
    unsafe fn total_bytes(&self) -> Option<u64> {
        let missing = self.bytes.is_null() || self.to.is_null() || self.from.is_null();
        if missing || !(1..=BATCH_COPIES_MAX).contains(&self.count) {
            return None;
        }
        // SAFETY: the driver would read as many.
        let sizes = unsafe { std::slice::from_raw_parts(self.bytes, self.count) };
        sizes.iter().try_fold(0u64, |sum, &bytes| sum.checked_add(bytes as u64))
    }

    /// The copies, unless the driver may find something wrong with the call, or sources must be
    /// read before it returns.
    unsafe fn pairs(&self, entry: Entry) -> Option<Vec<Pair>> {
        let legacy = self.stream.is_null() && entry.flags() & PER_THREAD == 0;
        // SAFETY: as above.
        if legacy || self.stream.addr() == STREAM_LEGACY || !unsafe { self.attributes_are_known() } {
            return None;
        }
        let mut pairs: Vec<Pair> = Vec::new();
        pairs.try_reserve_exact(self.count).ok()?;
        let room = pairs.spare_capacity_mut().iter_mut().take(self.count);
        for (index, pair) in room.enumerate() {
            // SAFETY: the driver would read `count` elements of each.
            let (from, to, bytes) =
                unsafe { (*self.from.add(index), *self.to.add(index), *self.bytes.add(index)) };
            pair.write(Pair { from, to, bytes: bytes as u64 });
        }
        // SAFETY: `count` elements were reserved, and are written.
        unsafe { pairs.set_len(self.count) };
        Some(pairs)
    }

    unsafe fn attributes_are_known(&self) -> bool {
        let there = !self.attributes.is_null() && !self.attributes_from.is_null();
        if !there || self.attributes_count == 0 || self.attributes_count > self.count {
            return false;
        }
        // SAFETY: the driver would read as many of each.
        let (attributes, starts) = unsafe {
            (
                std::slice::from_raw_parts(self.attributes, self.attributes_count),
                std::slice::from_raw_parts(self.attributes_from, self.attributes_count),
            )
        };
        let rising = starts.is_sorted_by(|one, next| one < next);
        let covering = starts.first() == Some(&0) && starts.last().is_some_and(|&last| last < self.count);
        // Stream order keeps every promise of the looser one.
        let ordered = attributes
            .iter()
            .all(|one| matches!(one.source_order, SOURCE_IN_STREAM_ORDER | SOURCE_IN_ANY_ORDER));
        rising && covering && ordered && attributes.iter().all(|one| one.flags <= OVERLAP_WITH_COMPUTE)
    }
}

/// Runs `told` with the copying library, if that was opened, or `real`.
pub(crate) fn answered(told: impl FnOnce(&CopyApi) -> i32, real: impl FnOnce() -> i32) -> i32 {
    if mode() == Mode::Off || is_inside() {
        return real();
    }
    let Some(api) = opened() else { return real() };
    INSIDE.set(true);
    let result = told(api);
    INSIDE.set(false);
    result
}

/// Runs `offer` and, if it gives a reason instead of a result, `real`.
#[inline]
fn decide(
    entry: Entry,
    bytes: u64,
    real: impl FnOnce() -> i32,
    offer: impl FnOnce() -> Result<i32, Reason>,
) -> i32 {
    if mode() == Mode::Off || is_inside() {
        return real();
    }
    INSIDE.set(true);
    let (reason, result) = match offer() {
        Ok(result) => (Reason::TAKEN, result),
        Err(reason) => (reason, real()),
    };
    INSIDE.set(false);
    count(entry.way, entry.function, reason, bytes);
    result
}
