//! What the user wants, `FOREBAY_PRELOAD`: unset or `on`, `off`, or `stats`. Read once, by the
//! first thread that asks for or calls something of CUDA's: programs without CUDA read nothing.
//! Knows nothing else.

use crate::system::{Line, environment, keep_stderr};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// What is done with copies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Large ones are offered.
    On,
    /// None is looked at.
    Off,
    /// As `On`, and all are counted.
    Stats,
}

const NOT_READ: u8 = 0;
const ON: u8 = 1;
const OFF: u8 = 2;
const STATS: u8 = 3;

static MODE: AtomicU8 = AtomicU8::new(NOT_READ);

/// The mode of this process.
#[inline]
pub(crate) fn mode() -> Mode {
    match MODE.load(Relaxed) {
        ON => Mode::On,
        OFF => Mode::Off,
        STATS => Mode::Stats,
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
    let (code, mode, known) = match value {
        b"on" => (ON, Mode::On, true),
        b"off" => (OFF, Mode::Off, true),
        b"stats" => (STATS, Mode::Stats, true),
        _ => (ON, Mode::On, false),
    };
    // Two threads may read at once; one of them says so.
    if MODE.swap(code, Relaxed) == NOT_READ && !known {
        let mut line = Line::new();
        line.push(b"forebay: FOREBAY_PRELOAD is \"");
        line.push(value.get(..100).unwrap_or(value));
        line.push(b"\", allowed are on, off and stats: on is taken\n");
        line.print();
    }
    mode
}
