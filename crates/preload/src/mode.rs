//! What the user wants, `FOREBAY_PRELOAD`: unset or `on`, `off`, or `stats`. Read once, by the
//! first thread that asks for or calls something of CUDA's: programs without CUDA read nothing.
//! Knows nothing else.

use crate::system::{Line, environment, keep_stderr};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// What is done with copies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Large ones are offered.
    On = 1,
    /// None is looked at.
    Off = 2,
    /// As `On`, and all are counted.
    Stats = 3,
}

const NOT_READ: u8 = 0;

static MODE: AtomicU8 = AtomicU8::new(NOT_READ);

#[inline]
pub(crate) fn mode() -> Mode {
    match MODE.load(Relaxed) {
        1 => Mode::On,
        2 => Mode::Off,
        3 => Mode::Stats,
        _ => read(),
    }
}

#[cold]
fn read() -> Mode {
    let value = environment(c"FOREBAY_PRELOAD").map_or(&b"on"[..], |value| value.to_bytes());
    // From here on there may be something to say.
    if value != b"off" {
        keep_stderr();
    }
    let mode = match value {
        b"off" => Mode::Off,
        b"stats" => Mode::Stats,
        _ => Mode::On,
    };
    // Two threads may read at once; one of them says so.
    if MODE.swap(mode as u8, Relaxed) == NOT_READ && mode == Mode::On && value != b"on" {
        let mut line = Line::new();
        line.push(b"forebay: FOREBAY_PRELOAD is \"");
        line.push(value.get(..100).unwrap_or(value));
        line.push(b"\", allowed are on, off and stats: on is taken\n");
        line.print();
    }
    mode
}
