//! What this node wants others to know of its chunks, beside what etcd has been told. The
//! difference is what is still to be said, so an overflowing queue, a lost answer and an expired
//! lease need no care of their own.

use forebay_kv::ChunkId;
use std::collections::{HashMap, HashSet, VecDeque};

/// What is to be said of a chunk: that it is here, or that it is not.
pub(super) type Saying = (ChunkId, bool);

/// The chunks that are here, or said to be.
#[derive(Debug)]
pub(super) struct Ledger {
    rows: HashMap<ChunkId, Row>,
    /// Chunks that may need saying, each once. Every one has a row.
    due: VecDeque<ChunkId>,
    rows_max: usize,
    announced: usize,
    /// Chunks that were not taken in because there were too many.
    pub over_limit: u64,
}

#[derive(Debug, Clone, Copy)]
struct Row {
    here: bool,
    /// What etcd has; `None` while an answer is awaited, or was lost.
    said: Option<bool>,
    is_due: bool,
}

impl Ledger {
    pub fn new(rows_max: usize) -> Ledger {
        Ledger { rows: HashMap::new(), due: VecDeque::new(), rows_max, announced: 0, over_limit: 0 }
    }

    pub fn announce(&mut self, added: &[ChunkId], removed: &[ChunkId]) {
        added.iter().for_each(|&id| self.set(id, true));
        removed.iter().for_each(|&id| self.set(id, false));
    }

    /// These chunks are here, and no others.
    pub fn replace(&mut self, here: &[ChunkId]) {
        let stays: HashSet<&ChunkId> = here.iter().collect();
        let removed: Vec<ChunkId> = self.rows.keys().filter(|id| !stays.contains(id)).copied().collect();
        self.announce(here, &removed);
    }

    fn set(&mut self, id: ChunkId, here: bool) {
        if let Some(row) = self.rows.get_mut(&id) {
            row.here = here;
            self.make_due(id);
        } else if here && self.rows.len() < self.rows_max {
            self.rows.insert(id, Row { here, said: Some(false), is_due: false });
            self.make_due(id);
        } else if here {
            self.over_limit += 1;
        }
    }

    fn make_due(&mut self, id: ChunkId) {
        if let Some(row) = self.rows.get_mut(&id)
            && row.said != Some(row.here)
            && !row.is_due
        {
            row.is_due = true;
            self.due.push_back(id);
        }
    }

    /// What is to be said next. Until [`Ledger::said`] or [`Ledger::lost`], nobody knows whether it
    /// was.
    pub fn take(&mut self, sayings_max: usize) -> Vec<Saying> {
        let mut sayings = Vec::new();
        while sayings.len() < sayings_max
            && let Some(id) = self.due.pop_front()
        {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            row.is_due = false;
            if row.said != Some(row.here) {
                self.announced -= usize::from(row.said == Some(true));
                row.said = None;
                sayings.push((id, row.here));
            } else if !row.here {
                self.rows.remove(&id);
            }
        }
        sayings
    }

    /// Etcd has taken in what was to be said.
    pub fn said(&mut self, sayings: &[Saying]) {
        for &(id, here) in sayings {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            row.said = Some(here);
            self.announced += usize::from(here);
            if row.here != here {
                self.make_due(id);
            } else if !here && !row.is_due {
                self.rows.remove(&id);
            }
        }
    }

    /// Etcd may or may not have taken it in.
    pub fn lost(&mut self, sayings: &[Saying]) {
        sayings.iter().for_each(|&(id, _)| self.make_due(id));
    }

    /// All that was said is gone.
    pub fn begin_anew(&mut self) {
        self.announced = 0;
        self.due.clear();
        self.rows.retain(|_, row| row.here);
        for (&id, row) in &mut self.rows {
            *row = Row { here: true, said: Some(false), is_due: true };
            self.due.push_back(id);
        }
    }

    /// Whether anything may be left to say.
    pub fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Chunks that may need saying.
    pub fn waiting(&self) -> usize {
        self.due.len()
    }

    /// Chunks that are known to be said to be here.
    pub fn announced(&self) -> usize {
        self.announced
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
        Announce(Vec<u8>, Vec<u8>),
        Replace(Vec<u8>),
        Say(usize),
        SayAndLoseTheAnswer(usize),
        FailToSay(usize),
        AnnounceMeanwhile(u8, bool),
        Expire,
    }

    fn act() -> impl Strategy<Value = Act> {
        let ids = || prop::collection::vec(0u8..12, 0..4);
        prop_oneof![
            (ids(), ids()).prop_map(|(added, removed)| Act::Announce(added, removed)),
            ids().prop_map(Act::Replace),
            (1usize..5).prop_map(Act::Say),
            (1usize..5).prop_map(Act::SayAndLoseTheAnswer),
            (1usize..5).prop_map(Act::FailToSay),
            (0u8..12, any::<bool>()).prop_map(|(id, here)| Act::AnnounceMeanwhile(id, here)),
            Just(Act::Expire),
        ]
    }

    fn apply(etcd: &mut HashSet<ChunkId>, sayings: &[Saying]) {
        for &(id, here) in sayings {
            if here {
                etcd.insert(id)
            } else {
                etcd.remove(&id)
            };
        }
    }

    fn set(here: &mut HashSet<ChunkId>, ledger: &mut Ledger, number: u8, is: bool) {
        let one = [id(number)];
        if is {
            here.insert(one[0])
        } else {
            here.remove(&one[0])
        };
        if is {
            ledger.announce(&one, &[])
        } else {
            ledger.announce(&[], &one)
        };
    }

    proptest! {
        #[test]
        fn whatever_happens_etcd_ends_with_exactly_what_is_here(acts in prop::collection::vec(act(), 0..60)) {
            let (mut ledger, mut here, mut etcd) = (Ledger::new(12), HashSet::new(), HashSet::new());
            for act in acts {
                match act {
                    Act::Announce(added, removed) => {
                        added.iter().for_each(|&number| set(&mut here, &mut ledger, number, true));
                        removed.iter().for_each(|&number| set(&mut here, &mut ledger, number, false));
                    }
                    Act::Replace(all) => {
                        here = all.into_iter().map(id).collect();
                        ledger.replace(&here.iter().copied().collect::<Vec<_>>());
                    }
                    Act::Say(most) => {
                        let sayings = ledger.take(most);
                        apply(&mut etcd, &sayings);
                        ledger.said(&sayings);
                    }
                    Act::SayAndLoseTheAnswer(most) => {
                        let sayings = ledger.take(most);
                        apply(&mut etcd, &sayings);
                        ledger.lost(&sayings);
                    }
                    Act::FailToSay(most) => {
                        let sayings = ledger.take(most);
                        ledger.lost(&sayings);
                    }
                    Act::AnnounceMeanwhile(number, is) => {
                        let sayings = ledger.take(2);
                        apply(&mut etcd, &sayings);
                        set(&mut here, &mut ledger, number, is);
                        ledger.said(&sayings);
                    }
                    Act::Expire => {
                        etcd.clear();
                        ledger.begin_anew();
                    }
                }
                prop_assert!(ledger.due.len() <= ledger.rows.len() && ledger.rows.len() <= 12);
                prop_assert!(ledger.announced() <= etcd.len());
            }
            while ledger.is_due() {
                let sayings = ledger.take(3);
                apply(&mut etcd, &sayings);
                ledger.said(&sayings);
            }
            prop_assert_eq!(&etcd, &here);
            prop_assert_eq!((ledger.announced(), ledger.rows.len()), (here.len(), here.len()));
        }
    }

    #[test]
    fn chunks_over_the_limit_are_counted_and_not_remembered() {
        let mut ledger = Ledger::new(2);
        ledger.announce(&[id(1), id(2), id(3)], &[id(4)]);
        assert_eq!((ledger.take(9).len(), ledger.over_limit), (2, 1));
    }
}
