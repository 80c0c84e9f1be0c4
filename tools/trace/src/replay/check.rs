//! Whether an answer is right: what an oracle says to a replay.

use forebay_emulator::truth::Oracle;

/// Knows what an engine must answer.
pub trait Check: Send + Sync {
    /// How many tokens of `output` are not what an engine must answer to `prompt`.
    fn wrong(&self, prompt: &[u32], output: &[u32]) -> u32;
}

impl Check for Oracle {
    fn wrong(&self, prompt: &[u32], output: &[u32]) -> u32 {
        u32::try_from(self.wrong_tokens(prompt, output)).unwrap_or(u32::MAX)
    }
}
