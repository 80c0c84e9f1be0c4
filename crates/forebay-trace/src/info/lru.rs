//! A prefix cache of a given size that drops the least recently used block: what share of a trace would it have served?
//! It knows keys and sizes; it must never know what a block holds.

use crate::prefix::KeyMap;

/// No neighbour in the list.
const NONE: u32 = u32::MAX;

/// One cache, shared by all requests. Blocks of one prompt are used from the last to the first, so that a prefix is
/// always more recent than what follows it and never dropped before it.
pub(super) struct Lru {
    capacity_tokens: u64,
    held_tokens: u64,
    slot_of: KeyMap<u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

struct Slot {
    key: u64,
    tokens: u32,
    newer: u32,
    older: u32,
}

impl Lru {
    pub(super) fn new(capacity_tokens: u64) -> Lru {
        let (slot_of, slots, free) = (KeyMap::default(), Vec::new(), Vec::new());
        Lru { capacity_tokens, held_tokens: 0, slot_of, slots, free, newest: NONE, oldest: NONE }
    }

    pub(super) fn capacity_tokens(&self) -> u64 {
        self.capacity_tokens
    }

    /// Serves one prompt, given the keys of its blocks: how many blocks at its start were held. All of them are held
    /// afterwards, as far as the capacity allows.
    pub(super) fn serve(&mut self, keys: &[u64], block_tokens: u32) -> usize {
        let mut held_in_a_row = 0;
        for &key in keys.iter().rev() {
            held_in_a_row = if self.use_block(key, block_tokens) { held_in_a_row + 1 } else { 0 };
        }
        while self.held_tokens > self.capacity_tokens {
            self.drop_oldest();
        }
        held_in_a_row
    }

    /// Makes a block the newest; whether it was held before.
    fn use_block(&mut self, key: u64, tokens: u32) -> bool {
        if let Some(&slot) = self.slot_of.get(&key) {
            self.unlink(slot);
            self.link_newest(slot);
            return true;
        }
        let new = Slot { key, tokens, newer: NONE, older: NONE };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = new;
                slot
            }
            None => {
                self.slots.push(new);
                (self.slots.len() - 1) as u32
            }
        };
        self.slot_of.insert(key, slot);
        self.held_tokens += u64::from(tokens);
        self.link_newest(slot);
        false
    }

    fn drop_oldest(&mut self) {
        let slot = self.oldest;
        let Slot { key, tokens, .. } = self.slots[slot as usize];
        self.unlink(slot);
        self.slot_of.remove(&key);
        self.free.push(slot);
        self.held_tokens -= u64::from(tokens);
    }

    fn link_newest(&mut self, slot: u32) {
        let second = self.newest;
        self.slots[slot as usize].older = second;
        self.slots[slot as usize].newer = NONE;
        match second {
            NONE => self.oldest = slot,
            _ => self.slots[second as usize].newer = slot,
        }
        self.newest = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { newer, older, .. } = self.slots[slot as usize];
        match newer {
            NONE => self.newest = older,
            _ => self.slots[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.slots[older as usize].newer = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Lru;
    use proptest::prelude::*;

    /// The same cache as a list, newest first.
    fn naive(prompts: &[Vec<u64>], capacity_blocks: usize) -> Vec<usize> {
        let mut held: Vec<u64> = Vec::new();
        let serve = |keys: &Vec<u64>| {
            let hits = keys.iter().take_while(|key| held.contains(key)).count();
            for key in keys.iter().rev() {
                held.retain(|other| other != key);
                held.insert(0, *key);
            }
            held.truncate(capacity_blocks);
            hits
        };
        prompts.iter().map(serve).collect()
    }

    proptest! {
        #[test]
        fn it_serves_what_a_naive_list_would(
            prompts in prop::collection::vec(prop::collection::btree_set(0u64..40, 0..12), 0..60),
            capacity_blocks in 0usize..30,
            tokens_to_spare in 0u64..16,
            shuffle in any::<bool>(),
        ) {
            let prompts: Vec<Vec<u64>> = prompts
                .into_iter()
                .map(|keys| if shuffle { keys.into_iter().rev().collect() } else { keys.into_iter().collect() })
                .collect();
            let mut lru = Lru::new(capacity_blocks as u64 * 16 + tokens_to_spare);
            let served: Vec<usize> = prompts.iter().map(|keys| lru.serve(keys, 16)).collect();
            prop_assert_eq!(served, naive(&prompts, capacity_blocks));
            prop_assert!(lru.slots.len() <= capacity_blocks + 12);
        }
    }
}
