//! The prompt of one conversation as it grows: its length and its block ids. It knows that a whole
//! block keeps its id for as long as the prompt only grows.

/// Prompts of one conversation, one after the other. A block has an id once it is whole; up to a
/// block at the end has none.
pub(super) struct Context {
    block_tokens: u32,
    pub(super) system_tokens: u32,
    system_blocks: usize,
    pub(super) tokens: u32,
    pub(super) blocks: Vec<u64>,
}

/// Hands out block ids: those of system prompts are the same in all sessions, all others are handed
/// out once. All are below 2^53, because JSON readers that keep numbers as doubles would lose
/// higher ones.
pub(super) struct BlockIds {
    next: u64,
}

const POSITION_BITS: u32 = 21;
const SESSION_BITS: u32 = 32;

impl BlockIds {
    /// The ids of a session, whose number is below 2^20.
    pub(super) fn of_session(number: u32) -> BlockIds {
        BlockIds { next: (u64::from(number) + 1) << SESSION_BITS }
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// A block of a system prompt, whose number is below 2^11; the position is that of the block,
    /// below 2^21.
    fn of_system_prompt(number: usize, position: u32) -> u64 {
        (number as u64) << POSITION_BITS | u64::from(position)
    }
}

impl Context {
    /// A context that begins with a system prompt and has nothing else.
    pub(super) fn new(block_tokens: u32, system_prompt: usize, system_tokens: u32) -> Context {
        let whole = system_tokens / block_tokens;
        let blocks = (0..whole).map(|position| BlockIds::of_system_prompt(system_prompt, position)).collect();
        Context { block_tokens, system_tokens, system_blocks: whole as usize, tokens: system_tokens, blocks }
    }

    /// Adds tokens at the end.
    pub(super) fn grow(&mut self, tokens: u32, ids: &mut BlockIds) {
        self.tokens += tokens;
        let whole = (self.tokens / self.block_tokens) as usize;
        self.blocks.extend((self.blocks.len()..whole).map(|_| ids.next()));
    }

    /// Drops all but the system prompt.
    pub(super) fn reset(&mut self) {
        self.blocks.truncate(self.system_blocks);
        self.tokens = self.system_tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockIds, Context};

    #[test]
    fn blocks_stay_the_same_while_the_prompt_grows() {
        let mut ids = BlockIds::of_session(3);
        let mut context = Context::new(16, 1, 40);
        assert_eq!(context.blocks.len(), 2);
        context.grow(30, &mut ids);
        let before = context.blocks.to_vec();
        assert_eq!((context.tokens, before.len()), (70, 4));
        context.grow(10, &mut ids);
        assert_eq!((context.blocks.len(), &context.blocks[..4]), (5, &before[..]));
        context.reset();
        assert_eq!((context.tokens, &context.blocks[..]), (40, &before[..2]));
        context.grow(40, &mut ids);
        assert!(context.blocks[2..].iter().all(|block| !before.contains(block)));
    }

    #[test]
    fn ids_of_sessions_and_system_prompts_never_meet() {
        let last_of_system_prompts = BlockIds::of_system_prompt((1 << 11) - 1, (1 << 21) - 1);
        assert!(last_of_system_prompts < BlockIds::of_session(0).next());
        assert!(BlockIds::of_session((1 << 20) - 1).next() + (1 << 32) - 1 < 1 << 53);
    }
}
