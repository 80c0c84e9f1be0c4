//! How a peer hands on what it moves for another GPU: names for the ways that there are. This file knows no more than the
//! names, by which figures are kept and copiers are made; it must never know which way is the better one.

use serde::{Deserialize, Serialize};

/// How a peer hands on what it moves for another GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Relay {
    /// By way of staging slots on the peer.
    Staged(By),
    /// A kernel of the peer, without staging.
    Fused,
}

/// Who moves bytes between a GPU's memory and a peer's staging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// The GPU's own copy engine.
    Own,
    /// The peer's copy engine.
    Peer,
    /// A kernel of the GPU.
    Kernel,
}

impl Relay {
    /// Those that leave the peer's multiprocessors alone, the default first: what a host may be measured for. A fused relay can be
    /// as fast, but while its kernels run, the peer's own take longer (a matrix-vector product by half and more).
    pub const QUIET: [Relay; 3] =
        [Relay::Staged(By::Own), Relay::Staged(By::Peer), Relay::Staged(By::Kernel)];
}

impl Default for Relay {
    fn default() -> Relay {
        Relay::QUIET[0]
    }
}
