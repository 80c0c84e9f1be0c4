//! `roofline`: an estimate of what a trace takes of a GPU, by the step model of a profile, and
//! which half bounds it. It knows lengths, prefixes and constants. It is no bound: queues, the API
//! and evictions come on top, and steps that answers share with prompts take off.

use crate::format::TraceError;
use crate::info::{InfoError, MAX_DISTINCT_BLOCKS};
use crate::prefix::{KeySet, prefix_keys};
use crate::request::TraceRequest;
use crate::units::count;
use forebay_steps::{Launch, Profile, StepModel};
use serde::Serialize;
use std::fmt::{self, Display, Formatter};

/// What a trace takes. Times are seconds of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Roofline {
    pub profile: String,
    pub requests: u64,
    /// From the first arrival to the last.
    pub span_s: f64,
    /// Prompts, if nothing is ever cached.
    pub prefill_cold_s: f64,
    /// Prompts, if a cache without limit holds whatever came before.
    pub prefill_s: f64,
    /// Answers, if each is computed alone.
    pub decode_alone_s: f64,
    /// Answers, in batches as large as the KV pool or the engine's limit allows.
    pub decode_s: f64,
    /// That many at once.
    pub batch: u64,
}

/// Adds up requests.
pub struct Survey {
    profile: String,
    model: StepModel,
    pool_tokens: u64,
    max_seqs: u64,
    known: KeySet,
    requests: u64,
    first_us: u64,
    last_us: u64,
    cold_us: f64,
    warm_us: f64,
    /// Answers without what a step costs whatever its batch.
    decodes_us: f64,
    output_tokens: f64,
    /// Context behind each token of answers, summed.
    context_tokens: f64,
}

impl Survey {
    /// An empty survey for engines of a profile with CUDA graphs.
    pub fn new(profile: &Profile) -> Survey {
        Survey {
            profile: profile.name.clone(),
            model: StepModel::new(profile, Launch::Graph),
            pool_tokens: profile.memory.pool_tokens as u64,
            max_seqs: profile.scheduler.max_seqs as u64,
            known: KeySet::default(),
            requests: 0,
            first_us: u64::MAX,
            last_us: 0,
            cold_us: 0.0,
            warm_us: 0.0,
            decodes_us: 0.0,
            output_tokens: 0.0,
            context_tokens: 0.0,
        }
    }

    /// Adds the next request of the trace.
    pub fn add(&mut self, request: &TraceRequest) -> Result<(), InfoError> {
        if self.known.len() > MAX_DISTINCT_BLOCKS {
            return Err(InfoError::TooLarge { what: "distinct blocks", limit: MAX_DISTINCT_BLOCKS });
        }
        self.requests += 1;
        self.first_us = self.first_us.min(request.arrival_us);
        self.last_us = self.last_us.max(request.arrival_us);
        let input = u64::from(request.input_tokens);
        let held = prefix_keys(request).take_while(|key| self.known.contains(key)).count() as u64;
        self.known.extend(prefix_keys(request));
        // An engine computes at least the last prompt token, however much it holds.
        let new = input.saturating_sub(held * u64::from(request.block_tokens)).max(1);
        self.cold_us += self.model.prefill_us(input.max(1), 0);
        self.warm_us += self.model.prefill_us(new, input.saturating_sub(new));
        // The first token of an answer comes from the prompt's last step.
        let steps = u64::from(request.output_tokens).saturating_sub(1);
        let context = input + steps / 2;
        self.decodes_us += steps as f64 * self.model.decodes_us(1, context);
        self.output_tokens += steps as f64;
        self.context_tokens += steps as f64 * context as f64;
        Ok(())
    }

    /// What all requests take.
    pub fn finish(self) -> Result<Roofline, InfoError> {
        if self.requests == 0 {
            return Err(InfoError::Empty { skipped_lines: 0 });
        }
        let context = (self.context_tokens / self.output_tokens.max(1.0)).max(1.0);
        let batch = ((self.pool_tokens as f64 / context) as u64).clamp(1, self.max_seqs.max(1));
        // What a step takes besides its requests: reading the weights, or their arithmetic.
        let step_us = |batch: u64| self.model.decode_step_us(batch, 0) - self.model.decodes_us(batch, 0);
        let decode_s =
            |batch: u64| (self.decodes_us + self.output_tokens * step_us(batch) / batch as f64) / 1e6;
        Ok(Roofline {
            profile: self.profile,
            requests: self.requests,
            span_s: self.last_us.saturating_sub(self.first_us) as f64 / 1e6,
            prefill_cold_s: self.cold_us / 1e6,
            prefill_s: self.warm_us / 1e6,
            decode_alone_s: decode_s(1),
            decode_s: decode_s(batch),
            batch,
        })
    }
}

impl Roofline {
    /// Reads a trace to its end.
    pub fn of(
        requests: impl IntoIterator<Item = Result<TraceRequest, TraceError>>,
        profile: &Profile,
    ) -> Result<Roofline, InfoError> {
        let mut survey = Survey::new(profile);
        for request in requests {
            survey.add(&request?)?;
        }
        survey.finish()
    }

    /// What one GPU needs for all of it.
    pub fn total_s(&self) -> f64 {
        self.prefill_s + self.decode_s
    }
}

impl Display for Roofline {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "{} requests in {:.1} s, on engines of {}",
            count(self.requests),
            self.span_s,
            self.profile
        )?;
        writeln!(out, "\n{:<52}{:>10}{:>14}", "", "GPU s", "of the span")?;
        let decode = format!("decode, {} at once", count(self.batch));
        for (name, seconds) in [
            ("prefill, nothing cached", self.prefill_cold_s),
            ("prefill, everything that came before cached", self.prefill_s),
            ("decode, one at a time", self.decode_alone_s),
            (&decode[..], self.decode_s),
            ("both", self.total_s()),
        ] {
            let share = if self.span_s > 0.0 {
                format!("{:.1} %", 100.0 * seconds / self.span_s)
            } else {
                "-".into()
            };
            writeln!(out, "{name:<52}{seconds:>10.1}{share:>14}")?;
        }
        let (half, share) = if self.prefill_s >= self.decode_s {
            ("prefill", self.prefill_s / self.total_s())
        } else {
            ("decode", self.decode_s / self.total_s())
        };
        writeln!(out, "\nbound by {half}, {:.0} % of both", 100.0 * share)?;
        if self.span_s > 0.0 {
            let engines = (self.total_s() / self.span_s).ceil().max(1.0);
            writeln!(out, "engines for the trace's own rate: about {engines}")?;
        }
        writeln!(out, "one engine serves about {:.2} requests/s of it", self.requests as f64 / self.total_s())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(arrival_us: u64, input: u32, output: u32, blocks: &[u64]) -> TraceRequest {
        TraceRequest {
            session: "a".into(),
            arrival_us,
            input_tokens: input,
            output_tokens: output,
            block_tokens: 1_000,
            blocks: blocks.to_vec(),
            ..TraceRequest::default()
        }
    }

    fn roofline(requests: &[TraceRequest]) -> Roofline {
        let profile = Profile::shipped("h100-llama-3.1-8b").unwrap();
        Roofline::of(requests.iter().cloned().map(Ok), &profile).unwrap()
    }

    fn assert_close(found: f64, wanted: f64) {
        assert!((found / wanted - 1.0).abs() < 1e-3, "{found} for {wanted}");
    }

    #[test]
    fn a_prompt_and_its_answer_take_what_the_step_model_says() {
        let found = roofline(&[request(0, 8_000, 101, &[1, 2, 3, 4, 5, 6, 7, 8])]);
        // By hand: 8,000 tokens at 21.6 us and 32 million pairs at 0.934 ns.
        assert_close(found.prefill_cold_s, 0.2027);
        assert_eq!(found.prefill_s, found.prefill_cold_s);
        // 100 steps of 6.82 ms, 8,050 tokens at 50.1 ns, 8,050.5 pairs, and 16 us.
        assert_close(found.decode_alone_s, 0.7247);
        // 32 of them fit 262,144 tokens: the floor is shared.
        assert_eq!(found.batch, 32);
        assert_close(found.decode_s, 0.7247 - 0.682 + 0.682 / 32.0);
    }

    #[test]
    fn what_came_before_is_cached_and_a_known_prompt_still_computes_a_token() {
        let one = request(0, 8_000, 1, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let alone = roofline(std::slice::from_ref(&one));
        let again = roofline(&[one.clone(), TraceRequest { arrival_us: 2_000_000, ..one }]);
        assert_eq!((again.requests, again.span_s), (2, 2.0));
        assert_close(again.prefill_cold_s, 2.0 * alone.prefill_cold_s);
        assert!(again.prefill_s > alone.prefill_s && again.prefill_s < 1.001 * alone.prefill_s);
        assert_eq!(again.decode_s, 0.0, "an answer of one token needs no further step");
    }

    #[test]
    fn the_text_names_the_half_that_bounds_and_the_engines_that_are_needed() {
        let long = |arrival_us| request(arrival_us, 8_000, 1, &[]);
        let text = roofline(&[long(0), long(100_000)]).to_string();
        // 0.405 s of prefill in 0.1 s.
        assert!(text.contains("bound by prefill, 100 % of both"), "{text}");
        assert!(text.contains("own rate: about 5"), "{text}");
        let text = roofline(&[request(0, 10, 1_000, &[])]).to_string();
        assert!(text.contains("bound by decode") && !text.contains("own rate"), "{text}");
    }

    #[test]
    fn a_trace_without_requests_has_no_roofline() {
        let profile = Profile::shipped(Profile::DEFAULT).unwrap();
        assert!(Roofline::of([], &profile).is_err());
    }
}
