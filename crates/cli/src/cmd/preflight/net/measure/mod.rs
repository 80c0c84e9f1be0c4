//! Measuring: one pair of hosts, all pairs in rounds, and what was measured before.

pub mod baseline;
pub mod pair;
pub mod tournament;
