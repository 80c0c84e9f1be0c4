//! A store with an SSD against a model: whatever is stored, loaded, deleted, flushed and restarted
//! in whatever order, what verifies is right, and what was flushed is there.

use super::rig::{Disk, Rig, TENANT, ids};
use proptest::prelude::*;
use std::collections::HashSet;

/// Chains that share their first chunk.
const CHAINS: [[usize; 5]; 3] = [[0, 1, 2, 3, 4], [0, 1, 12, 13, 14], [0, 21, 22, 23, 24]];

#[derive(Debug, Clone)]
enum Act {
    Store(usize, usize),
    Load(usize),
    Delete(usize, usize),
    Flush,
    Restart { close: bool },
}

fn act() -> impl Strategy<Value = Act> {
    let chain = 0..CHAINS.len();
    prop_oneof![
        4 => (chain.clone(), 1usize..=5).prop_map(|(chain, chunks)| Act::Store(chain, chunks)),
        4 => chain.clone().prop_map(Act::Load),
        1 => (chain, 0usize..5).prop_map(|(chain, chunk)| Act::Delete(chain, chunk)),
        2 => Just(Act::Flush),
        2 => any::<bool>().prop_map(|close| Act::Restart { close }),
    ]
}

/// What must be there: chunks that were visible when the store was last flushed or closed and not
/// deleted since.
#[derive(Debug, Default)]
struct Durable(HashSet<usize>);

impl Durable {
    fn flushed(&mut self, rig: &Rig) {
        for chain in CHAINS {
            self.0.extend(&chain[..rig.store.lookup(TENANT, &ids(&chain))]);
        }
    }

    fn prefix(&self, chain: &[usize]) -> usize {
        chain.iter().take_while(|number| self.0.contains(number)).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, ..ProptestConfig::default() })]

    #[test]
    fn what_verifies_is_right_and_what_was_flushed_is_there(acts in proptest::collection::vec(act(), 1..25)) {
        let disk = Disk::new();
        // Room for one chain and a half, so that memory evicts.
        let mut rig = Rig::new(&disk, 8);
        let mut durable = Durable::default();
        for act in acts {
            match act {
                Act::Store(chain, chunks) => {
                    rig.store_chain(&CHAINS[chain][..chunks]);
                }
                Act::Load(chain) => {
                    let expected = durable.prefix(&CHAINS[chain]);
                    prop_assert!(rig.load_all(&CHAINS[chain]) >= expected);
                }
                Act::Delete(chain, chunk) => {
                    let number = CHAINS[chain][chunk];
                    rig.store.delete(TENANT, &ids(&[number]));
                    durable.0.remove(&number);
                }
                Act::Flush => {
                    rig.store.flush().unwrap();
                    durable.flushed(&rig);
                }
                Act::Restart { close } => {
                    if close {
                        rig.store.close().unwrap();
                    }
                    drop(rig);
                    rig = Rig::new(&disk, 8);
                    if close {
                        durable.flushed(&rig);
                    }
                }
            }
            for chain in CHAINS {
                prop_assert!(rig.store.lookup(TENANT, &ids(&chain)) >= durable.prefix(&chain), "{durable:?}");
            }
        }
    }
}
