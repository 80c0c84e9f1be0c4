//! The words that rings are made of. Only names: the loom model of the ring (`tests/loom_ring.rs`)
//! has others behind them.

pub use std::sync::atomic::{AtomicU64, Ordering, fence};
