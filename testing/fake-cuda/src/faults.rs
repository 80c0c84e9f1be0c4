//! Faults that wait to happen. `commands` says what they are asked for by.

use crate::abi::Code;
use std::collections::{HashMap, HashSet};

/// Faults that wait to happen.
#[derive(Default)]
pub struct Faults {
    /// Symbol, calls until it happens, and what the call gives.
    pub failing: Vec<(String, u64, Code)>,
    pub missing: HashSet<String>,
    pub stalled: HashSet<String>,
    /// Symbols of which each call fails.
    pub refused: HashMap<String, Code>,
    pub p2p_off: bool,
    /// What copies do with a peer's memory, and what kernels do.
    pub peer_copies: Peers,
    pub peer_kernels: Peers,
    /// What becomes of the next bytes that an engine copies, by its place among all.
    pub flaws: HashMap<usize, Flaw>,
    /// GPUs whose memory is said to be of another context than the primary one.
    pub foreign: HashSet<usize>,
}

/// How a copy goes wrong that gives success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// A bit of it is another one.
    Flipped,
    /// Two ranges of one length change places.
    Exchanged,
}

/// What becomes of bytes that go from GPU to GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Peers {
    #[default]
    Right,
    /// Nothing is written.
    Lost,
    /// Zeroes are written.
    Zero,
}

impl Faults {
    /// Calls that are still to fail.
    pub fn awaited(&self) -> u64 {
        self.failing.len() as u64
    }

    /// What a call of `symbol` gives instead of doing anything.
    pub fn strike(&mut self, symbol: &str) -> Option<Code> {
        let mut struck = self.refused.get(symbol).copied();
        self.failing.retain_mut(|(name, calls, code)| {
            if name != symbol {
                return true;
            }
            *calls -= 1;
            if *calls == 0 {
                struck = Some(*code);
            }
            *calls > 0
        });
        struck
    }

    /// Whether calls of `symbol` do not come back.
    pub fn is_stalled(&self, symbol: &str) -> bool {
        self.stalled.contains(symbol)
    }

    pub fn is_missing(&self, symbol: &str) -> bool {
        self.missing.contains(symbol)
    }
}
