//! Block ids that are unique over the whole trace, made from ids that mean something only within
//! one session file.

use crate::format::error::Problem;
use std::collections::HashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Ids within a file must stay below 2 to this power, so that the file's number fits above them.
/// All ids stay below 2^53: JSON readers that keep numbers as doubles would lose higher ones.
const LOCAL_BITS: u32 = 32;
/// Set in the ids of blocks that sessions share.
const SHARED: u64 = 1 << 52;
/// A shared id is a digest of the model above these bits, which hold the position of the block.
const POSITION_BITS: u32 = 20;

/// The ids of one session file.
pub(super) struct Ids {
    file_number: u64,
    /// The local ids of the first system prompt of each model, when sessions share it.
    heads: Option<HashMap<u64, Vec<u64>>>,
}

/// Which system prompt a request begins with, and how many whole blocks of it.
pub(super) struct SystemPrompt<'a> {
    pub model: &'a str,
    pub of_sub_agent: bool,
    pub blocks: usize,
}

impl Ids {
    /// `file_number` is the file's position in the trace, below 2^20.
    pub(super) fn new(file_number: u64, share_system_prompt: bool) -> Ids {
        Ids { file_number, heads: share_system_prompt.then(HashMap::new) }
    }

    /// Makes the ids of one request unique, in place.
    pub(super) fn globalise(&mut self, ids: &mut [u64], system: &SystemPrompt<'_>) -> Result<(), Problem> {
        if let Some(index) = ids.iter().position(|&id| id >> LOCAL_BITS != 0) {
            let limit = (1u64 << LOCAL_BITS) - 1;
            return Err(Problem::field(
                &format!("hash_ids[{index}]"),
                format!("{}, allowed 0 to {limit}", ids[index].cast_signed()),
            ));
        }
        let shared = self.shared_blocks(ids, system);
        let digest = system.digest();
        for (position, id) in ids.iter_mut().enumerate() {
            *id = match position {
                0.. if position < shared => SHARED | digest << POSITION_BITS | position as u64,
                _ => self.file_number << LOCAL_BITS | *id,
            };
        }
        Ok(())
    }

    /// How many blocks at the start are the system prompt that the session began with: a session
    /// that changes its prompt must go on missing where it missed.
    fn shared_blocks(&mut self, ids: &[u64], system: &SystemPrompt<'_>) -> usize {
        let Some(heads) = &mut self.heads else { return 0 };
        let length = system.blocks.min(ids.len()).min((1 << POSITION_BITS) - 1);
        let head = heads.entry(system.digest()).or_insert_with(|| ids[..length].to_vec());
        head.iter().zip(&ids[..length]).take_while(|(first, now)| first == now).count()
    }
}

impl SystemPrompt<'_> {
    /// 32 bits that stand for the model, and apart for its sub-agents, which have other tools.
    fn digest(&self) -> u64 {
        xxh3_64_with_seed(self.model.as_bytes(), self.of_sub_agent.into()) >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::{Ids, SystemPrompt};

    const SYSTEM: SystemPrompt<'_> = SystemPrompt { model: "a", of_sub_agent: false, blocks: 2 };

    fn global(ids: &mut Ids, local: &[u64]) -> Vec<u64> {
        let mut blocks = local.to_vec();
        ids.globalise(&mut blocks, &SYSTEM).unwrap();
        blocks
    }

    #[test]
    fn the_same_local_id_in_two_files_is_two_ids() {
        let (mut first, mut second) = (Ids::new(0, false), Ids::new(1, false));
        assert_eq!(global(&mut first, &[7, 8]), [7, 8]);
        assert_eq!(global(&mut second, &[7, 8]), [(1 << 32) + 7, (1 << 32) + 8]);
    }

    #[test]
    fn a_shared_system_prompt_is_the_same_in_two_files_and_nothing_else_is() {
        let (mut first, mut second) = (Ids::new(0, true), Ids::new(1, true));
        let (one, two) = (global(&mut first, &[7, 8, 9]), global(&mut second, &[1, 2, 9]));
        assert_eq!(one[..2], two[..2]);
        assert_ne!(one[2], two[2]);
        assert!(one.iter().chain(&two).all(|&id| id < 1 << 53));
    }

    #[test]
    fn a_changed_system_prompt_goes_on_missing() {
        let mut ids = Ids::new(0, true);
        let (before, after) = (global(&mut ids, &[7, 8, 9]), global(&mut ids, &[7, 10, 11]));
        assert_eq!(before[0], after[0]);
        assert_eq!(after[1..], [10, 11]);
    }

    #[test]
    fn ids_that_do_not_fit_are_refused() {
        let problem = Ids::new(0, false).globalise(&mut [1, 1 << 32], &SYSTEM).unwrap_err();
        assert_eq!(problem.to_string(), "hash_ids[1]: 4294967296, allowed 0 to 4294967295");
    }
}
