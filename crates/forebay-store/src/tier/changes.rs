//! Which chunks came or went since somebody last looked, for those who tell others. This file keeps names for a while and
//! rings a bell once; it must never know whether a chunk is here now: who looks, looks for themselves.

use forebay_kv::ChunkId;
use std::sync::mpsc::Sender;

/// Names that are kept at most. What comes on top is forgotten: to those who were told of it, it is a lie of the past.
const NAMES_MAX: usize = 1 << 20;

/// Names since the last look. Nobody looks before [`watch`](Changes::watch).
#[derive(Debug, Default)]
pub(crate) struct Changes {
    bell: Option<Sender<()>>,
    names: Vec<ChunkId>,
}

impl Changes {
    /// From now on names are kept. `bell` is rung with the first one after each look.
    pub fn watch(&mut self, bell: Sender<()>) {
        self.bell = Some(bell);
    }

    /// A chunk came or went.
    pub fn note(&mut self, id: &ChunkId) {
        let Some(bell) = &self.bell else { return };
        if self.names.is_empty() {
            // Whoever looked may be gone.
            let _ = bell.send(());
        }
        if self.names.len() < NAMES_MAX {
            self.names.push(*id);
        }
    }

    /// The names since the last look.
    pub fn take(&mut self) -> Vec<ChunkId> {
        std::mem::take(&mut self.names)
    }
}
