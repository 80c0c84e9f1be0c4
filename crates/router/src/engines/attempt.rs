//! A request on its way to an engine, in the dispatcher's books: it is told what comes of it, and
//! ends once.

use super::Engines;
use crate::dispatcher::{Assignment, End, Ended, RoutingFacts};
use crate::engine::Engine;
use crate::health::Failure;
use crate::reader::Reader;
use crate::request_trace;
use forebay_otlp::ActiveSpan;
use http::{HeaderValue, StatusCode};
use std::sync::Arc;

/// A request on its way to an engine. Ends once: as it is told to, or as cancelled when it is
/// dropped.
#[derive(Debug)]
pub struct Attempt {
    engines: Arc<Engines>,
    routing: Arc<RoutingFacts>,
    pub engine: Arc<Engine>,
    open: Option<Assignment>,
    /// Ends with it, if the request is traced.
    span: Option<Box<ActiveSpan>>,
}

impl Attempt {
    pub(super) fn new(
        engines: Arc<Engines>,
        routing: Arc<RoutingFacts>,
        engine: Arc<Engine>,
        assignment: Assignment,
    ) -> Attempt {
        Attempt { engines, routing, engine, open: Some(assignment), span: None }
    }

    /// It is traced as this.
    pub fn trace(&mut self, mut span: ActiveSpan) {
        span.note("engine", self.engine.name());
        self.span = Some(Box::new(span));
    }

    /// What the engine is told of its trace.
    pub fn traceparent(&self) -> Option<HeaderValue> {
        request_trace::traceparent(self.span.as_deref()?)
    }

    /// Why it goes where it goes.
    pub fn explain(&self, choice: &mut ActiveSpan) {
        let Some(open) = &self.open else { return };
        request_trace::explain(choice, open.decision.record());
    }

    /// The first byte of the answer has come, after this status.
    pub fn first_byte(&mut self, status: u16) {
        if let Some(span) = &mut self.span {
            span.event("first-byte");
        }
        if let Some(assignment) = &mut self.open {
            let now_us = self.engines.now_us();
            let mut inner = self.engines.inner.lock();
            inner.dispatcher.first_byte(now_us, assignment, status);
        }
    }

    /// The engine that would have it if the chosen one were not there.
    pub fn runner_up(&self) -> Option<Arc<Engine>> {
        let slot = self.open.as_ref()?.decision.runner_up()?;
        self.engines.inner.lock().slots.get(slot)?.clone()
    }

    /// The same request at the engine that has answered it after all. `None` if it may not go
    /// there.
    pub fn moved_to(mut self, engine: &Engine) -> Option<Attempt> {
        self.end(End::Failed(Failure::PassedOver));
        self.engines.tell_sent_elsewhere(&self.engine, engine, Failure::PassedOver);
        let others = self.engines.all().into_iter().map(|other| other.id).filter(|id| *id != engine.id);
        let others: Vec<u64> = others.collect();
        self.engines.assign(&self.routing, &others, 2, false).ok().map(|(attempt, _)| attempt)
    }

    /// An engine has answered that is not known here.
    pub fn passed_over(mut self, served: &str) {
        self.end(End::Failed(Failure::PassedOver));
        self.engines.lines.answered_by_unknown(served);
    }

    /// The answer has begun and will not come to its end. To be told before the end.
    pub fn is_broken(&self, failure: Failure) {
        self.engine.lines.broken(self.engine.name(), failure);
    }

    /// The answer is a stream. To be told before the end.
    pub fn is_streamed(&mut self) {
        if let Some(assignment) = &mut self.open {
            assignment.is_streamed();
        }
    }

    /// No other engine computes the prompt for this one after all.
    pub fn computes_itself(&mut self) {
        if let Some(assignment) = &mut self.open {
            self.engines.inner.lock().dispatcher.computes_itself(assignment);
        }
    }

    /// A whole answer has passed through its reader. Says whether it told that the engine failed.
    pub fn end_whole(&mut self, status: StatusCode, reader: &Reader) -> bool {
        let (usage, failed) = reader.outcome();
        let failed = failed && status.is_success();
        if failed {
            self.is_broken(Failure::ErrorEvent);
            self.end(End::Failed(Failure::ErrorEvent));
        } else {
            self.end(End::Answered { status: status.as_u16(), usage });
        }
        failed
    }

    pub fn end(&mut self, end: End) {
        if let Some(span) = self.span.take() {
            end_span(*span, &end);
        }
        if let Some(assignment) = self.open.take() {
            let (decision, says_answer) = (assignment.decision.clone(), assignment.says_answer());
            let now_us = self.engines.now_us();
            let mut inner = self.engines.inner.lock();
            let Ended { change, is_gone } = inner.dispatcher.end(now_us, &self.routing, assignment, end);
            self.engines.announce(&inner, &self.engine, change);
            if is_gone {
                self.engines.free(&mut inner, &self.engine);
            }
            drop(inner);
            if let Some(log) = self.engines.decision_log.as_ref().filter(|_| says_answer) {
                log.push(&decision, now_us.saturating_sub(decision.at_us));
            }
        }
    }
}

fn end_span(mut span: ActiveSpan, end: &End) {
    match end {
        End::Answered { status, usage } => {
            span.note("http.response.status_code", status);
            if let Some(usage) = usage {
                span.note("prompt_tokens", usage.prompt_tokens);
                span.note("completion_tokens", usage.completion_tokens);
            }
            if let Some(cached) = usage.and_then(|usage| usage.cached_tokens) {
                span.note("cached_tokens", cached);
            }
        }
        End::Failed(failure) => span.fail(failure.name()),
        End::Cancelled => span.fail("cancelled"),
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.end(End::Cancelled);
    }
}
