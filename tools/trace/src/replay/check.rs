//! Whether an answer is right. This file knows the interface and the emulated engine's oracle behind it; it must never
//! know how the answer was obtained.

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
