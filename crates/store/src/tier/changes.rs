//! Which chunks came or went since somebody last looked, for those who tell others. This file keeps
//! names for a while and rings bells once.

use forebay_kv::ChunkId;
use std::sync::mpsc::Sender;

/// Names that are kept at most for each who looks. What comes on top is not named.
const NAMES_MAX: usize = 1 << 20;

/// Names since the last look, for each who looks. Nobody looks before [`watch`](Changes::watch).
#[derive(Debug, Default)]
pub(crate) struct Changes(Vec<Watcher>);

#[derive(Debug)]
struct Watcher {
    key: u64,
    bell: Sender<()>,
    names: Names,
}

/// Chunks that came or went.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub ids: Vec<ChunkId>,
    pub more: bool,
}

impl Changes {
    /// From now on names are kept for `key`. `bell` is rung with the first one after each look.
    pub fn watch(&mut self, key: u64, bell: Sender<()>) {
        self.0.push(Watcher { key, bell, names: Names::default() });
    }

    /// Nobody looks for `key` any more.
    pub fn unwatch(&mut self, key: u64) {
        self.0.retain(|watcher| watcher.key != key);
    }

    /// A chunk came or went.
    pub fn note(&mut self, id: &ChunkId) {
        for Watcher { bell, names, .. } in &mut self.0 {
            if names.ids.is_empty() {
                // Whoever looked may be gone.
                let _ = bell.send(());
            }
            match names.ids.len() < NAMES_MAX {
                true => names.ids.push(*id),
                false => names.more = true,
            }
        }
    }

    /// The names since `key` last looked.
    pub fn take(&mut self, key: u64) -> Names {
        let mine = self.0.iter_mut().find(|watcher| watcher.key == key);
        mine.map(|watcher| std::mem::take(&mut watcher.names)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn id(number: usize) -> ChunkId {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        ChunkId::from_bytes(bytes)
    }

    #[test]
    fn each_who_looks_gets_every_name_and_one_ring_for_a_look() {
        let mut changes = Changes::default();
        changes.note(&id(0));
        let (bell, rings) = channel();
        changes.watch(1, bell);
        let (other_bell, other_rings) = channel();
        changes.watch(2, other_bell);
        (1..4).for_each(|number| changes.note(&id(number)));
        assert_eq!((rings.try_iter().count(), other_rings.try_iter().count()), (1, 1));
        assert_eq!(changes.take(1).ids, [id(1), id(2), id(3)]);
        changes.note(&id(4));
        assert_eq!((rings.try_iter().count(), other_rings.try_iter().count()), (1, 0));
        assert_eq!(changes.take(1).ids, [id(4)]);
        changes.unwatch(1);
        changes.note(&id(5));
        assert_eq!((changes.take(1).ids.len(), changes.take(2).ids.len()), (0, 5));
    }

    #[test]
    fn who_does_not_look_for_long_is_told_that_there_were_more() {
        let mut changes = Changes::default();
        changes.watch(1, channel().0);
        (0..NAMES_MAX).for_each(|number| changes.note(&id(number)));
        assert!(!changes.0[0].names.more);
        changes.note(&id(NAMES_MAX));
        let names = changes.take(1);
        assert_eq!((names.ids.len(), names.more), (NAMES_MAX, true));
        changes.note(&id(0));
        let names = changes.take(1);
        assert_eq!((names.ids, names.more), (vec![id(0)], false));
    }
}
