//! One thing that was measured, in the words of the step model: the steps that it took. It knows
//! tokens and times, and no engine.

use forebay_steps::{StepModel, StepShare};

/// A time that was measured, and what was computed in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// For people.
    pub name: String,
    /// The prompt that went through the API in that time, if one did.
    pub prompt_tokens: Option<usize>,
    /// The steps, one after the other.
    pub steps: Vec<Vec<StepShare>>,
    pub measured_us: f64,
}

impl Point {
    /// The time to the first token of a lone prompt of which `cached_tokens` need no computing, cut
    /// into steps of at most `step_tokens`.
    pub fn first_token(prompt_tokens: usize, cached_tokens: usize, step_tokens: usize, us: f64) -> Point {
        let starts = (cached_tokens..prompt_tokens).step_by(step_tokens);
        let share = |start: usize| StepShare {
            context_tokens: start,
            new_tokens: step_tokens.min(prompt_tokens - start),
        };
        let kind = if cached_tokens == 0 { "cold prompt" } else { "cached prompt" };
        Point {
            name: format!("{kind} of {prompt_tokens} tokens"),
            prompt_tokens: Some(prompt_tokens),
            steps: starts.map(|start| vec![share(start)]).collect(),
            measured_us: us,
        }
    }

    /// One step of requests that decode behind these contexts.
    pub fn decodes(context_tokens: &[usize], us: f64) -> Point {
        let share = |&context_tokens: &usize| StepShare { context_tokens, new_tokens: 1 };
        let longest = context_tokens.iter().max().copied().unwrap_or(0);
        Point {
            name: format!("step of {} decodes behind {longest} tokens", context_tokens.len()),
            prompt_tokens: None,
            steps: vec![context_tokens.iter().map(share).collect()],
            measured_us: us,
        }
    }

    /// What a model says that it takes.
    pub fn predicted_us(&self, model: &StepModel) -> f64 {
        let api_us = self.prompt_tokens.map_or(0.0, |tokens| model.api_us(tokens));
        api_us + self.steps.iter().map(|step| model.step_us(step.iter().copied())).sum::<f64>()
    }

    /// The tokens computed in each step.
    pub fn tokens_of_steps(&self) -> impl Iterator<Item = usize> {
        self.steps.iter().map(|step| tokens(step))
    }

    /// By what each constant is multiplied: floor, linear, attention, KV read, request, API, API
    /// per token. Steps of up to `floored_tokens` take the floor, larger ones the linear part.
    pub fn row(&self, floored_tokens: usize) -> [f64; 7] {
        let shares = || self.steps.iter().flatten();
        let is_floored = |tokens: &usize| *tokens <= floored_tokens;
        let floors = self.tokens_of_steps().filter(is_floored).count();
        let linear: usize = self.tokens_of_steps().filter(|tokens| !is_floored(tokens)).sum();
        let pairs = |share: &StepShare| {
            share.new_tokens as f64 * (share.context_tokens as f64 + share.new_tokens as f64 / 2.0)
        };
        let context: usize = shares().map(|share| share.context_tokens).sum();
        [
            floors as f64,
            linear as f64,
            shares().map(pairs).sum(),
            context as f64,
            shares().count() as f64,
            self.prompt_tokens.map_or(0.0, |_| 1.0),
            self.prompt_tokens.unwrap_or(0) as f64,
        ]
    }
}

fn tokens(step: &[StepShare]) -> usize {
    step.iter().map(|share| share.new_tokens).sum()
}
