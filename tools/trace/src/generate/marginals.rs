//! What generated sessions are like: every distribution and constant in one place, with where it
//! comes from.

use crate::format::MAX_TOKENS;
use rand::Rng;
use rand_distr::{Distribution, StandardNormal};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// The most sessions of one trace, so that block ids stay below 2^53.
pub const MAX_SESSIONS: u32 = 1 << 20;
/// The most system prompts.
pub const MAX_SYSTEM_PROMPTS: usize = 1 << 11;
/// The largest block size, in tokens.
pub const MAX_BLOCK_TOKENS: u32 = 1 << 16;

/// The 90th percentile of the standard normal distribution.
const NORMAL_P90: f64 = 1.281_551_565_544_600_4;

/// A log-normal distribution through its median and its 90th percentile; values beyond the bounds
/// are put on them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogNormal {
    pub p50: f64,
    /// The value that 90 % do not exceed.
    pub p90: f64,
    pub min: f64,
    pub max: f64,
}

/// The turns of one conversation. Token counts are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversation {
    /// Requests.
    pub turns: LogNormal,
    /// The first prompt beyond the system prompt, in tokens.
    pub first_own_tokens: LogNormal,
    /// How much longer a prompt is than the one before it, in tokens.
    pub growth_tokens: LogNormal,
    pub output_tokens: LogNormal,
    /// Pause between an answer and the next request, in seconds.
    pub think_s: LogNormal,
}

/// A system prompt with tool definitions that sessions share.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SystemPrompt {
    pub tokens: u32,
    /// How many sessions have it, in proportion to the other weights.
    pub weight: f64,
}

/// Sub-agents: sessions that a turn starts and waits for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubAgents {
    /// The share of turns that start one.
    pub per_turn: f64,
    /// Length of the system prompt that all sub-agents share, in tokens.
    pub system_tokens: u32,
    /// Their turns; the pause is the tools'.
    pub conversation: Conversation,
}

/// How long an answer is assumed to take when arrival times are laid out. A replay in a closed loop
/// does not use it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// In any case, in milliseconds.
    pub fixed_ms: f64,
    /// For each prompt token beyond the previous prompt, in microseconds.
    pub per_new_token_us: f64,
    /// For each answer token, in milliseconds.
    pub per_output_token_ms: f64,
}

/// Everything that a generated trace is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Marginals {
    /// Top-level sessions.
    pub sessions: u32,
    /// Sessions start independently of each other, evenly over this time, in seconds.
    pub starts_over_s: f64,
    /// Tokens per prefix block.
    pub block_tokens: u32,
    /// A prompt that would be longer, in tokens, is compacted: it begins anew with its system
    /// prompt and a summary.
    pub context_tokens: u32,
    /// A compacted prompt beyond its system prompt, in tokens.
    pub summary_tokens: LogNormal,
    /// Assumed times of answers.
    pub service: Service,
    /// System prompts of top-level sessions.
    pub system_prompts: Vec<SystemPrompt>,
    /// Top-level sessions.
    pub main: Conversation,
    pub sub_agents: SubAgents,
}

impl FromStr for Marginals {
    type Err = toml::de::Error;

    /// Reads TOML.
    fn from_str(text: &str) -> Result<Marginals, toml::de::Error> {
        toml::from_str(text)
    }
}

/// A marginal that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field}: {found}, allowed {allowed}")]
pub struct MarginalsError {
    pub field: String,
    pub found: String,
    pub allowed: String,
}

impl Marginals {
    /// Coding agents as Weka recorded them with Claude Code, as TOML.
    pub const CLAUDE_CODE: &str = include_str!("../../presets/claude-code.toml");
    /// A small trace for four emulated engines, as TOML.
    pub const DEMO: &str = include_str!("../../presets/demo.toml");
    /// A small trace for a real engine on a CPU, as TOML.
    pub const DEMO_SMALL: &str = include_str!("../../presets/demo-small.toml");
    /// Agents with long contexts, as TOML.
    pub const LONG_CONTEXT: &str = include_str!("../../presets/long-context.toml");
    /// Agents half of whose requests have 20,000 new tokens and more, as TOML.
    pub const HEAVY_PREFILL: &str = include_str!("../../presets/heavy-prefill.toml");

    /// Refuses marginals from which no trace can be made, naming the field.
    pub fn check(&self) -> Result<(), MarginalsError> {
        within("sessions", self.sessions.into(), 1.0, MAX_SESSIONS.into())?;
        within("starts_over_s", self.starts_over_s, 0.0, 1e8)?;
        within("block_tokens", self.block_tokens.into(), 1.0, MAX_BLOCK_TOKENS.into())?;
        within("context_tokens", self.context_tokens.into(), 1.0, MAX_TOKENS.into())?;
        self.summary_tokens.check("summary_tokens", self.context_tokens.into())?;
        within("service.fixed_ms", self.service.fixed_ms, 0.0, 1e7)?;
        within("service.per_new_token_us", self.service.per_new_token_us, 0.0, 1e6)?;
        within("service.per_output_token_ms", self.service.per_output_token_ms, 0.0, 1e5)?;
        within("number of system_prompts", self.system_prompts.len() as f64, 1.0, MAX_SYSTEM_PROMPTS as f64)?;
        for (index, prompt) in self.system_prompts.iter().enumerate() {
            self.fits(&format!("system_prompts[{index}].tokens"), prompt.tokens)?;
            within(&format!("system_prompts[{index}].weight"), prompt.weight, f64::MIN_POSITIVE, 1e9)?;
        }
        self.main.check("main", self.context_tokens)?;
        within("sub_agents.per_turn", self.sub_agents.per_turn, 0.0, 1.0)?;
        self.fits("sub_agents.system_tokens", self.sub_agents.system_tokens)?;
        self.sub_agents.conversation.check("sub_agents.conversation", self.context_tokens)
    }

    /// A system prompt leaves room for a token of one's own.
    fn fits(&self, field: &str, system_tokens: u32) -> Result<(), MarginalsError> {
        within(field, system_tokens.into(), 0.0, f64::from(self.context_tokens) - 1.0)
    }
}

impl Conversation {
    fn check(&self, name: &str, context_tokens: u32) -> Result<(), MarginalsError> {
        let context_tokens = f64::from(context_tokens);
        self.turns.check(&format!("{name}.turns"), 1e6)?;
        self.first_own_tokens.check(&format!("{name}.first_own_tokens"), context_tokens)?;
        self.growth_tokens.check(&format!("{name}.growth_tokens"), context_tokens)?;
        self.output_tokens.check(&format!("{name}.output_tokens"), MAX_TOKENS.into())?;
        self.think_s.check(&format!("{name}.think_s"), 1e7)
    }
}

impl LogNormal {
    fn check(&self, field: &str, largest: f64) -> Result<(), MarginalsError> {
        within(&format!("{field}.max"), self.max, 0.0, largest)?;
        within(&format!("{field}.min"), self.min, 0.0, self.max)?;
        within(&format!("{field}.p90"), self.p90, self.min.max(f64::MIN_POSITIVE), self.max)?;
        within(&format!("{field}.p50"), self.p50, self.min.max(f64::MIN_POSITIVE), self.p90)
    }

    /// A value of this distribution.
    pub(super) fn draw(&self, random: &mut impl Rng) -> f64 {
        let sigma = (self.p90 / self.p50).ln() / NORMAL_P90;
        let normal: f64 = StandardNormal.sample(random);
        (self.p50 * (sigma * normal).exp()).clamp(self.min, self.max)
    }

    /// A value of this distribution as a whole number, at least 1.
    pub(super) fn draw_count(&self, random: &mut impl Rng) -> u32 {
        self.draw(random).round().max(1.0) as u32
    }
}

fn within(field: &str, value: f64, least: f64, most: f64) -> Result<(), MarginalsError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let allowed = format!("{least} to {most}");
    Err(MarginalsError { field: field.into(), found: value.to_string(), allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_presets_make_sense() {
        let presets = [
            Marginals::CLAUDE_CODE,
            Marginals::DEMO,
            Marginals::DEMO_SMALL,
            Marginals::LONG_CONTEXT,
            Marginals::HEAVY_PREFILL,
        ];
        for preset in presets {
            assert_eq!(preset.parse::<Marginals>().unwrap().check(), Ok(()));
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_field() {
        let refused = |change: fn(&mut Marginals)| {
            let mut marginals: Marginals = Marginals::DEMO.parse().unwrap();
            change(&mut marginals);
            marginals.check().unwrap_err().to_string()
        };
        assert_eq!(refused(|m| m.sessions = 0), "sessions: 0, allowed 1 to 1048576");
        assert_eq!(refused(|m| m.main.think_s.p50 = f64::NAN), "main.think_s.p50: NaN, allowed 2 to 12");
        assert_eq!(refused(|m| m.main.turns.p90 = 30.0), "main.turns.p90: 30, allowed 4 to 16");
        assert_eq!(refused(|m| m.system_prompts.clear()), "number of system_prompts: 0, allowed 1 to 2048");
        assert_eq!(
            refused(|m| m.system_prompts[1].tokens = 60_000),
            "system_prompts[1].tokens: 60000, allowed 0 to 59999"
        );
        assert_eq!(refused(|m| m.sub_agents.per_turn = 2.0), "sub_agents.per_turn: 2, allowed 0 to 1");
    }
}
