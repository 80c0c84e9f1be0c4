//! A hand-over under way, in the dispatcher's books: it ends once, as it is told to, or as
//! cancelled when it is dropped.

use super::HandOverEnd;
use crate::dispatcher::Plan;
use crate::engine::Engine;
use crate::engines::{Attempt, Engines};
use forebay_otlp::ActiveSpan;
use std::sync::Arc;

#[derive(Debug)]
pub struct OpenHandOver {
    engines: Arc<Engines>,
    plan: Plan,
    pub prefiller: Arc<Engine>,
    pub decoder: Arc<Engine>,
    /// The prefiller's part; taken by who asks it.
    prefill: Option<Attempt>,
    is_open: bool,
    /// Ends with it, if the request is traced.
    span: Option<ActiveSpan>,
}

impl OpenHandOver {
    /// `span` is its own, if the request is traced.
    pub fn new(
        engines: Arc<Engines>,
        plan: Plan,
        prefill: Attempt,
        decoder: Arc<Engine>,
        span: Option<ActiveSpan>,
    ) -> OpenHandOver {
        let prefiller = prefill.engine.clone();
        OpenHandOver { engines, plan, prefiller, decoder, prefill: Some(prefill), is_open: true, span }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The prefiller's part, once.
    pub fn take_prefill(&mut self) -> Option<Attempt> {
        self.prefill.take()
    }

    /// It has ended. `is_first_token`: the first byte of the decoder's answer has come now, and is
    /// its first token.
    pub fn end(&mut self, end: HandOverEnd, is_first_token: bool) {
        if std::mem::take(&mut self.is_open) {
            if let Some(mut span) = self.span.take() {
                span.note("end", end.name());
                if end.fault().is_some() {
                    span.fail(end.name());
                }
            }
            self.engines.hand_over_ended(&self.plan, [&self.prefiller, &self.decoder], end, is_first_token);
        }
    }
}

impl Drop for OpenHandOver {
    fn drop(&mut self) {
        self.end(HandOverEnd::Cancelled, false);
    }
}
