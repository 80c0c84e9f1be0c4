//! Which chunks a client wants to know gone. Pure: this file knows names.
//!
//! A chunk that was said to be gone is not watched any more, until the client asks again. So what
//! there is to say is bounded by what the client has asked.

use forebay_kv::ChunkId;
use forebay_store::Left;
use std::collections::HashSet;

pub const WATCHED_MAX: usize = 1 << 20;

/// The chunks that a client watches.
#[derive(Debug, Default)]
pub struct WatchList(HashSet<ChunkId>);

impl WatchList {
    /// Watches these chunks, those that are watched already too. Says which of them are not there,
    /// or are too many; they are not watched.
    pub fn watch(&mut self, ids: &[ChunkId], is_here: impl Fn(&ChunkId) -> bool) -> Vec<ChunkId> {
        let mut absent = Vec::new();
        for id in ids {
            let may_be = self.0.len() < WATCHED_MAX || self.0.contains(id);
            if may_be && is_here(id) {
                self.0.insert(*id);
            } else {
                self.0.remove(id);
                absent.push(*id);
            }
        }
        absent
    }

    /// Chunks may have gone: says which watched ones are not there, and watches them no more.
    pub fn take_gone(&mut self, left: Left<'_>, is_here: impl Fn(&ChunkId) -> bool) -> Vec<ChunkId> {
        let gone = |id: &&ChunkId| !is_here(id);
        let gone: Vec<ChunkId> = match left {
            Left::These(ids) => ids.iter().filter(|id| self.0.contains(*id)).filter(gone).copied().collect(),
            Left::Any => self.0.iter().filter(gone).copied().collect(),
        };
        gone.into_iter().filter(|id| self.0.remove(id)).collect()
    }

    pub fn clear(&mut self) {
        self.0 = HashSet::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(number: u8) -> ChunkId {
        ChunkId::from_bytes([number; 32])
    }

    #[derive(Debug, Clone)]
    enum Act {
        Come(u8),
        Go(u8),
        Watch(Vec<u8>),
        /// The store says what has left since it last did; or only that something has.
        Tell(bool),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            (0u8..6).prop_map(Act::Come),
            (0u8..6).prop_map(Act::Go),
            prop::collection::vec(0u8..6, 0..4).prop_map(Act::Watch),
            any::<bool>().prop_map(Act::Tell),
        ];
        prop::collection::vec(act, 0..60)
    }

    proptest! {
        /// A client that takes what it is told in order knows, when the store has told all, which
        /// of the chunks that it asked for are there, and is told of each going once.
        #[test]
        fn who_follows_what_is_told_knows_what_is_there(acts in acts()) {
            let (mut watched, mut here, mut left) = (WatchList::default(), HashSet::new(), Vec::new());
            let mut known: HashSet<ChunkId> = HashSet::new();
            for act in acts.into_iter().chain([Act::Tell(true)]) {
                match act {
                    Act::Come(number) => {
                        here.insert(id(number));
                    }
                    Act::Go(number) => {
                        if here.remove(&id(number)) {
                            left.push(id(number));
                        }
                    }
                    Act::Watch(numbers) => {
                        let ids: Vec<ChunkId> = numbers.into_iter().map(id).collect();
                        let absent = watched.watch(&ids, |id| here.contains(id));
                        known.extend(&ids);
                        known.retain(|id| !absent.contains(id));
                    }
                    Act::Tell(named) => {
                        let told = std::mem::take(&mut left);
                        let told = if named { Left::These(&told) } else { Left::Any };
                        for gone in watched.take_gone(told, |id| here.contains(id)) {
                            prop_assert!(known.remove(&gone), "{gone:?} is told again");
                            prop_assert!(!here.contains(&gone), "{gone:?} is here");
                        }
                    }
                }
            }
            prop_assert!(known.is_subset(&here), "{known:?} of {here:?}");
            prop_assert_eq!(known, watched.0, "what is watched is what the client knows");
        }
    }

    #[test]
    fn no_more_than_the_limit_is_watched_and_what_is_beyond_is_said() {
        let many: Vec<ChunkId> = (0..WATCHED_MAX as u64)
            .map(|number| {
                let mut bytes = [0; 32];
                bytes[..8].copy_from_slice(&number.to_le_bytes());
                ChunkId::from_bytes(bytes)
            })
            .collect();
        let mut watched = WatchList::default();
        assert_eq!(watched.watch(&many, |_| true), []);
        let more = [many[1], id(9), many[2]];
        assert_eq!(watched.watch(&more, |_| true), [id(9)], "the others are watched already");
        assert_eq!(watched.take_gone(Left::These(&[id(9), many[0]]), |_| false), [many[0]]);
        assert_eq!(watched.watch(&more, |_| true), []);
    }
}
