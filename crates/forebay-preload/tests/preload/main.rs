//! The preload under programs, drivers, copying libraries and interposers of our own: `tests/c`.

#![allow(clippy::unwrap_used)]

mod found;
mod passed_on;
mod stacked;
mod stage;
