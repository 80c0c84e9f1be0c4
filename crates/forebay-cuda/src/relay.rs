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
    /// All of them, the default first.
    pub const ALL: [Relay; 4] =
        [Relay::Staged(By::Own), Relay::Staged(By::Peer), Relay::Staged(By::Kernel), Relay::Fused];
}

impl Default for Relay {
    fn default() -> Relay {
        Relay::ALL[0]
    }
}
