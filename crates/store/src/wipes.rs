//! Slots whose bytes are to be overwritten before anybody gets them, and which of them nobody uses
//! any more. This file keeps them; others overwrite.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::mpsc::Sender;

/// Slots to be overwritten.
#[derive(Debug)]
pub(crate) struct Wipes<Slot> {
    wanted: HashSet<Slot>,
    /// Those of them that nobody uses, until they are taken to be overwritten.
    quiet: Vec<Slot>,
    /// Rung with each slot that nobody uses any more.
    bell: Option<Sender<()>>,
}

impl<Slot: Copy + Eq + Hash> Wipes<Slot> {
    pub fn new() -> Wipes<Slot> {
        Wipes { wanted: HashSet::new(), quiet: Vec::new(), bell: None }
    }

    pub fn set_bell(&mut self, bell: Sender<()>) {
        self.bell = Some(bell);
    }

    /// The slot is to be overwritten when nobody uses it any more.
    pub fn want(&mut self, slot: Slot) {
        self.wanted.insert(slot);
    }

    /// Nobody uses the slot any more. Says whether it is to be overwritten before it is free.
    pub fn keep(&mut self, slot: Slot) -> bool {
        let is_wanted = self.wanted.contains(&slot);
        if is_wanted {
            self.quiet.push(slot);
            // Without anybody who overwrites, the slot is kept.
            let _ = self.bell.as_ref().map(|bell| bell.send(()));
        }
        is_wanted
    }

    /// A slot to be overwritten now.
    pub fn next(&mut self) -> Option<Slot> {
        self.quiet.pop()
    }

    /// It was overwritten.
    pub fn done(&mut self, slot: Slot) {
        self.wanted.remove(&slot);
    }

    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.wanted.iter().copied()
    }
}
