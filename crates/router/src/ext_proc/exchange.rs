//! The messages of one HTTP request, back and forth: what Envoy says goes to the [`Stream`], and
//! what that wants done is done here. It holds the request's booking, which ends when it is
//! dropped.

use super::api::{ProcessingRequest, ProcessingResponse};
use super::booking::Booking;
use super::picker;
use super::stream::{AnswerHead, Part, Step, Stream, Violation};
use crate::refusal::Refusal;
use crate::state::{Permit, RouterState};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::time::{Instant, timeout_at};
use tonic::{Status, Streaming};

pub struct Exchange {
    router: Arc<RouterState>,
    said: Streaming<ProcessingRequest>,
    stream: Stream,
    /// The request's right to be under way, until its booking has it; `None` where too many are.
    permit: Option<Permit>,
    booking: Option<Booking>,
    /// What Envoy is told next.
    answers: VecDeque<ProcessingResponse>,
    /// When all of the request must have come.
    receive_by: Instant,
}

impl Exchange {
    pub fn new(router: Arc<RouterState>, said: Streaming<ProcessingRequest>) -> Exchange {
        let limits = &router.limits;
        Exchange {
            said,
            stream: Stream::new(limits.max_body_bytes),
            permit: router.admit(),
            booking: None,
            answers: VecDeque::new(),
            receive_by: Instant::now() + limits.client_stall,
            router,
        }
    }

    /// What Envoy is told next; `None` when there is nothing more to tell.
    pub async fn next(mut self) -> Result<Option<(ProcessingResponse, Exchange)>, Status> {
        loop {
            if let Some(answer) = self.answers.pop_front() {
                return Ok(Some((answer, self)));
            }
            if self.stream.is_over() {
                return Ok(None);
            }
            let message = match self.message().await? {
                Some(Ok(message)) => message,
                Some(Err(refusal)) => {
                    self.refuse(&refusal);
                    continue;
                }
                None => return Ok(None),
            };
            if self.permit.is_none() && self.booking.is_none() {
                self.refuse(&Refusal::overloaded(&self.router.limits));
                continue;
            }
            let step = self.stream.on(message).map_err(|violation| self.violated(&violation))?;
            self.take(step).await;
        }
    }

    /// The next message; a refusal where the request does not come in time.
    async fn message(&mut self) -> Result<Option<Result<ProcessingRequest, Refusal>>, Status> {
        if !self.stream.is_receiving() {
            return Ok(self.said.message().await?.map(Ok));
        }
        match timeout_at(self.receive_by, self.said.message()).await {
            Ok(message) => Ok(message?.map(Ok)),
            Err(_) => Ok(Some(Err(Refusal::too_slow(self.router.limits.client_stall)))),
        }
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Say(said) => self.answers.extend(said),
            Step::Refuse(refusal) => self.refuse(&refusal),
            Step::Decide(asked) => {
                let Some(permit) = self.permit.take() else { return };
                let (decision, booking) = picker::decide(&self.router, asked, permit).await;
                self.booking = booking;
                self.answers.extend(self.stream.decided(decision));
            }
            Step::Begin(head) => self.begin(&head),
            Step::Pass(bytes, part) => self.pass(bytes, part),
        }
    }

    fn begin(&mut self, head: &AnswerHead) {
        let set = self.booking.as_mut().map(|booking| booking.begin(head)).unwrap_or_default();
        self.answers.extend(self.stream.begun(set));
    }

    fn pass(&mut self, bytes: Bytes, part: Part) {
        let bytes = match &mut self.booking {
            Some(booking) => booking.pass(bytes, part != Part::Middle),
            None => bytes,
        };
        self.answers.extend(self.stream.passed(bytes, part));
    }

    fn refuse(&mut self, refusal: &Refusal) {
        self.booking = None;
        let answer = picker::refused(&self.router, refusal);
        self.answers.extend(self.stream.answered(answer));
    }

    fn violated(&self, violation: &Violation) -> Status {
        self.router.counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
        self.router.engines.lines.ext_proc_ended(&violation.to_string());
        Status::failed_precondition(violation.to_string())
    }
}
