//! Measures an engine: cold prompts of several lengths, the same prompts again, and decodes. It
//! sends what the plan says and turns what comes back into points for the fit.

use crate::decodes::{SharedStep, Tokens, median, shared_step};
use crate::engine::Engine;
use crate::error::CalibrateError;
use crate::facts::Facts;
use crate::page::Metrics;
use crate::plan::{self, Batch, Room};
use crate::point::Point;
use std::time::Duration;
use tokio::time::Instant;

/// Tokens of a decode that are timed: as many as come in this time, within limits.
const TIMED_TOKENS: std::ops::RangeInclusive<usize> = 24..=192;
const TIMED_SECONDS: f64 = 2.0;

/// The share of the time in which prompts are measured.
const PROMPTS_SHARE: f64 = 0.5;

/// Who is told of each point while it is measured.
pub type Tell<'a> = &'a mut dyn FnMut(&str);

/// Measures one engine until a deadline.
pub struct Measurement<'a> {
    pub engine: &'a mut Engine,
    pub facts: &'a Facts,
    pub begun: Instant,
    pub time: Duration,
    pub tell: Tell<'a>,
    /// What was measured.
    pub points: Vec<Point>,
    /// What could not be.
    pub notes: Vec<String>,
}

impl Measurement<'_> {
    /// Measures all points.
    pub async fn run(&mut self) -> Result<(), CalibrateError> {
        let step_s = self.warm_up().await?;
        let lengths = self.prompts().await?;
        let timed = (TIMED_SECONDS / step_s) as usize;
        let timed = timed.clamp(*TIMED_TOKENS.start(), *TIMED_TOKENS.end());
        let room = Room {
            request_tokens: self.facts.request_tokens(),
            pool_tokens: self.facts.pool_tokens.value,
            step_tokens: self.facts.max_batched_tokens.value,
            max_seqs: self.facts.max_seqs.value,
        };
        let batches = plan::batches(&lengths, room, timed, self.left(1.0));
        self.decodes(&batches, timed).await?;
        self.longest_again(&lengths).await
    }

    /// Time until a share of all of it is over.
    fn left(&self, share: f64) -> Duration {
        self.time.mul_f64(share).saturating_sub(self.begun.elapsed())
    }

    /// The first requests of an engine pay for what later ones find. Gives the seconds of a step.
    async fn warm_up(&mut self) -> Result<f64, CalibrateError> {
        let tokens = self.facts.request_tokens();
        if tokens < plan::CONTEXT_NEEDED {
            return Err(CalibrateError::ContextTooShort { tokens, needed: plan::CONTEXT_NEEDED });
        }
        let prompts = [self.engine.prompt(plan::first_length(tokens))];
        let mut step_s = 0.0;
        for _ in 0..2 {
            let times = self.engine.tokens_of(&prompts, *TIMED_TOKENS.start()).await?;
            let (first, last) = (times[0].first(), times[0].last());
            let span_us = last.zip(first).map_or(0, |(last, first)| last - first);
            step_s = (span_us as f64 / 1e6 / (TIMED_TOKENS.start() - 1) as f64).max(1e-6);
        }
        Ok(step_s)
    }

    /// Measures prompts of growing lengths; gives the lengths, each with the seconds it took.
    async fn prompts(&mut self) -> Result<Vec<(usize, f64)>, CalibrateError> {
        let request_tokens = self.facts.request_tokens();
        let mut lengths = Vec::new();
        let mut next = Some(plan::first_length(request_tokens));
        while let Some(tokens) = next {
            let prompt_s = self.prompts_of(tokens).await?;
            lengths.push((tokens, prompt_s));
            next = plan::next_length(&lengths, request_tokens, self.left(PROMPTS_SHARE));
        }
        if lengths.len() < plan::LENGTHS_NEEDED {
            return Err(CalibrateError::TooSlow {
                seconds: self.time.as_secs_f64(),
                lengths: lengths.len(),
                needed: plan::LENGTHS_NEEDED,
            });
        }
        Ok(lengths)
    }

    /// Prompts of one length: new ones, then the last of them again. Gives the seconds of a new
    /// one.
    async fn prompts_of(&mut self, tokens: usize) -> Result<f64, CalibrateError> {
        let before = self.engine.metrics().await;
        let (mut times_us, mut prompt, mut repeats) = (Vec::new(), Vec::new(), 1);
        while times_us.len() < repeats {
            prompt = self.engine.prompt(tokens);
            let first = self.engine.first_token(&prompt).await?;
            if let Some(cached) = first.cached_tokens.filter(|cached| *cached > 0) {
                return Err(CalibrateError::Cached { tokens, cached });
            }
            times_us.push(first.us);
            repeats = plan::repeats(first.us / 1e6);
        }
        let between = self.engine.metrics().await;
        if let Some(cached) = hits(before.as_ref(), between.as_ref()).filter(|cached| *cached > 0) {
            return Err(CalibrateError::Cached { tokens, cached });
        }
        let us = median(times_us);
        self.add(Point::first_token(tokens, 0, self.facts.max_batched_tokens.value, us));
        self.prompt_again(&prompt, repeats, between.as_ref()).await?;
        Ok(us / 1e6)
    }

    /// A prompt that the engine has just computed, where it can be told that it is cached.
    async fn prompt_again(
        &mut self,
        prompt: &[u32],
        repeats: usize,
        before: Option<&Metrics>,
    ) -> Result<(), CalibrateError> {
        let (mut times_us, mut said) = (Vec::new(), None);
        for _ in 0..repeats {
            let first = self.engine.first_token(prompt).await?;
            times_us.push(first.us);
            said = first.cached_tokens;
        }
        let counted = hits(before, self.engine.metrics().await.as_ref());
        let cached = said.or(counted.map(|tokens| tokens / repeats));
        let tokens = prompt.len();
        match cached {
            // Less than half: it is no cached prompt, nor a cold one.
            Some(cached) if cached >= tokens / 2 && cached < tokens => {
                let step_tokens = self.facts.max_batched_tokens.value;
                self.add(Point::first_token(tokens, cached, step_tokens, median(times_us)));
            }
            Some(cached) => self.note(format!(
                "Of a prompt of {tokens} tokens that was sent again, {cached} were cached: not used."
            )),
            None => self.note(format!(
                "The engine does not say how much of a prompt of {tokens} tokens was cached: not used."
            )),
        }
        Ok(())
    }

    /// Batches that decode, in rounds while there is time: what disturbs the machine for a while is
    /// in one round of each.
    async fn decodes(&mut self, batches: &[Batch], timed: usize) -> Result<(), CalibrateError> {
        let mut measured = vec![Vec::new(); batches.len()];
        for _ in 0..plan::ROUNDS {
            let round = Instant::now();
            for (batch, steps) in batches.iter().zip(&mut measured) {
                steps.push(self.step_of(*batch, timed).await?);
            }
            if self.left(1.0) < round.elapsed() * 2 {
                break;
            }
        }
        for mut steps in measured {
            steps.sort_by(|a, b| a.step_us.total_cmp(&b.step_us));
            let step = steps.swap_remove((steps.len() - 1) / 2);
            self.add(Point::decodes(&step.context_tokens, step.step_us));
        }
        Ok(())
    }

    /// The longest prompt once more. A host that was busy for the whole time looks like a slow
    /// engine; one that was busy for a part of it does not.
    async fn longest_again(&mut self, lengths: &[(usize, f64)]) -> Result<(), CalibrateError> {
        let Some(&(tokens, first_s)) = lengths.last() else { return Ok(()) };
        let prompt = self.engine.prompt(tokens);
        let (first_us, last_us) = (first_s * 1e6, self.engine.first_token(&prompt).await?.us);
        match plan::is_steady(first_us, last_us) {
            true => Ok(()),
            false => Err(CalibrateError::Unsteady { tokens, first_us, last_us }),
        }
    }

    /// The step of requests that decode at once, each behind a prompt of its own.
    async fn step_of(&mut self, batch: Batch, timed: usize) -> Result<SharedStep, CalibrateError> {
        let Batch { requests, context_tokens } = batch;
        let step_tokens = self.facts.max_batched_tokens.value;
        let output_tokens = timed + plan::steps_to_start(requests, context_tokens, step_tokens);
        let prompts: Vec<Vec<u32>> = (0..requests).map(|_| self.engine.prompt(context_tokens)).collect();
        let times = self.engine.tokens_of(&prompts, output_tokens).await?;
        let tokens: Vec<Tokens> =
            times.into_iter().map(|times_us| Tokens { prompt_tokens: context_tokens, times_us }).collect();
        shared_step(&tokens).ok_or(CalibrateError::NotTogether { requests })
    }

    fn add(&mut self, point: Point) {
        (self.tell)(&format!("{}: {:.2} ms", point.name, point.measured_us / 1e3));
        self.points.push(point);
    }

    pub fn note(&mut self, note: String) {
        (self.tell)(&note);
        self.notes.push(note);
    }
}

/// Prompt tokens that were found in the cache between two readings of the metrics.
fn hits(before: Option<&Metrics>, after: Option<&Metrics>) -> Option<usize> {
    let hits = after?.hit_tokens? - before?.hit_tokens?;
    Some(hits.max(0.0) as usize)
}
