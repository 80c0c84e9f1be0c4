//! The preload under programs, drivers, copying libraries and interposers of our own, `tests/c`,
//! and under the fake driver that moves real bytes.

#![allow(clippy::unwrap_used)]

mod found;
mod moved;
mod passed_on;
mod stacked;
mod stage;
mod together;
