//! The SSD tier over real files, a real mover and, where a test needs them, kernels and media that
//! fail.
#![allow(clippy::unwrap_used)]

mod faults;
mod faulty;
mod log_lines;
mod pressure;
mod rig;
mod round_trip;
