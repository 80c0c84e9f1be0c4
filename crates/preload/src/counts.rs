//! How many copies, of how many bytes, came by which entry point and what became of them. Counted
//! only when asked for: a count that threads share costs more than all else here. Knows numbers,
//! and prints them at exit.

use crate::mode::{Mode, mode};
use crate::names::{COPIES, Function, NAMES, WAY_NAMES, WAYS, Way};
use crate::reason::{REASONS, Reason};
use crate::system::{Line, getpid};
use std::ffi::CStr;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

struct Count {
    copies: AtomicU64,
    bytes: AtomicU64,
}

type ByReason = [Count; REASONS.len()];

static COUNTS: [[ByReason; COPIES]; WAYS] =
    [const { [const { [const { Count { copies: AtomicU64::new(0), bytes: AtomicU64::new(0) } }; _] }; _] };
        _];

/// Counts a call of a copying entry point, if copies are counted.
#[inline]
pub(crate) fn count(way: Way, function: Function, reason: Reason, bytes: u64) {
    if mode() != Mode::Stats {
        return;
    }
    let found = COUNTS.get(way).and_then(|by| by.get(function)).and_then(|by| by.get(reason.index()));
    if let Some(count) = found {
        count.copies.fetch_add(1, Relaxed);
        count.bytes.fetch_add(bytes, Relaxed);
    }
}

/// Forgets all: what a parent counted, its child has not done.
pub(crate) fn forget() {
    for count in COUNTS.iter().flatten().flatten() {
        count.copies.store(0, Relaxed);
        count.bytes.store(0, Relaxed);
    }
}

/// Prints a line for each count that is not zero; none if nothing was counted.
pub(crate) fn report() {
    for (by_function, way) in COUNTS.iter().zip(WAY_NAMES) {
        for (by_reason, name) in by_function.iter().zip(&NAMES) {
            for (count, reason) in by_reason.iter().zip(REASONS) {
                print(count, way, name.symbol, reason);
            }
        }
    }
}

fn print(count: &Count, way: &str, symbol: &CStr, reason: &str) {
    let (copies, bytes) = (count.copies.load(Relaxed), count.bytes.load(Relaxed));
    if copies == 0 {
        return;
    }
    let (mut line, process) = (Line::new(), getpid());
    let symbol = symbol.to_str().unwrap_or_default();
    // A line that is full is cut.
    let _ = writeln!(line, "forebay[{process}]: {symbol} by {way}: {reason}: {copies} calls, {bytes} bytes");
    line.print();
}
