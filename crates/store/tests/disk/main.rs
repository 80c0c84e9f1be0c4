//! The disk link over a real file: the same guarantees for every driver, with and without faults
//! below the link's logic.

#![allow(clippy::unwrap_used)]

mod conformance;
mod faults;
mod files;
mod kernels;
mod world;
