//! What only tests call: faults, counters, and the report of misuse. None of it counts as a call of
//! the driver.

use crate::caller::{put_text, text};
use crate::driver::{State, lock};
use crate::entry::calls_of_thread;
use crate::memory::Kind;
use std::ffi::c_char;

/// Carries out commands as of [`crate::commands`]. 0: done; -1: one of them makes no sense (told on
/// stderr).
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_control(commands: *const c_char) -> i32 {
    let done =
        text(commands).map_err(|_| "no text".to_string()).and_then(|commands| lock().command(commands));
    match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("fake-cuda: {error}");
            -1
        }
    }
}

/// A counter by its name: calls of a symbol (`cuMemcpyAsync`), `bytes.h2d.0`, `bytes.d2h.0`,
/// `bytes.p2p.1.0` (from, to), `bytes.d2d.0`, `bytes.host`, and what there is now:
/// `live.allocations`, `live.host`, `live.foreign`, `live.mappings`, `live.streams`, `live.events`,
/// `live.operations`, `live.modules`, `live.failing` (calls that are still to); and all calls of
/// the calling thread: `calls`. Physical GPU numbers. A name that means nothing gives 2^64 - 1.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_stat(name: *const c_char) -> u64 {
    text(name).ok().and_then(|name| stat(&lock(), name)).unwrap_or(u64::MAX)
}

/// How often a program did what it must not do.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_misuse() -> u64 {
    lock().misuse.count
}

/// Stores what was misused as text, one line for each kind. Gives the length of the whole text.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_report(buffer: *mut c_char, bytes: u64) -> u64 {
    let report = lock().misuse.text();
    let _ = put_text(buffer, bytes as usize, &report);
    report.len() as u64
}

fn stat(state: &State, name: &str) -> Option<u64> {
    let areas = |wanted: &[Kind]| state.memory.count(|area| wanted.contains(&area.kind)).0;
    if name == "calls" {
        return Some(calls_of_thread());
    }
    match name.split_once('.') {
        Some(("bytes", way)) => state.stats.bytes(way),
        Some(("live", what)) => Some(match what {
            "allocations" => areas(&[Kind::Device]),
            "host" => areas(&[Kind::Pinned, Kind::Registered]),
            "foreign" => areas(&[Kind::Foreign]),
            "mappings" => areas(&[Kind::Virtual]),
            "streams" => state.streams.values().filter(|stream| stream.explicit).count() as u64,
            "events" => state.events.len() as u64,
            "operations" => state.ops.len() as u64,
            "modules" => state.modules.len() as u64,
            "failing" => state.faults.awaited(),
            _ => return None,
        }),
        _ => Some(state.stats.calls(name)),
    }
}
