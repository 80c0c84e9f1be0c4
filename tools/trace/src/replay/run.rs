//! One run of a replay: the loop that joins the schedule, the transcripts, the client and the
//! records. It decides nothing itself: when a request is due, what its prompt is and how it ended
//! come from those parts.

use super::Progress;
use super::client::{Call, Client, Reply};
use super::error::ReplayError;
use super::options::Options;
use super::progress::RunningMedian;
use super::schedule::{Due, Pacing, Schedule};
use super::transcript::{Prompt, Transcripts};
use crate::record::{Outcome, RequestRecord};
use crate::request::{OutOfOrder, TraceRequest, sort_by_arrival};
use forebay_emulator::truth::Oracle;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

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

/// What a replay came to. The records hold the rest.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ReplayOutcome {
    /// Requests answered in full.
    pub done: u64,
    /// Requests that failed; their records say why.
    pub failed: u64,
    /// Requests that a cancellation cut off; they have no records.
    pub cut_off: u64,
    /// Tokens that were not what the engine must answer.
    pub wrong_tokens: u64,
    /// Requests of a closed loop that stood in the trace behind one that arrives later; they were
    /// sorted.
    pub out_of_order: usize,
    /// Whether the replay was cancelled.
    pub cancelled: bool,
    /// Model time from the start to the end.
    pub span_s: f64,
}

/// How far an open loop reads ahead in its trace.
const READ_AHEAD_REQUESTS: usize = 256;
/// A closed loop must hold its whole trace: a fast session needs its next turn long before the
/// trace's time. So must an open loop whose trace has to be sorted.
pub const CLOSED_LOOP_REQUESTS_MAX: usize = 1 << 20;

pub(super) struct Run<'a, S> {
    options: &'a Options,
    client: Client,
    check: Option<Arc<dyn Check>>,
    sink: S,
    schedule: Schedule,
    order: OutOfOrder,
    transcripts: Transcripts,
    clock: Clock,
    under_way: JoinSet<Ended>,
    progress: &'a watch::Sender<Progress>,
    ttft: RunningMedian,
    outcome: ReplayOutcome,
}

/// Model time since the start of the replay.
#[derive(Debug, Clone, Copy)]
struct Clock {
    start: Instant,
    ratio: f64,
}

struct Ended {
    due: Due,
    prompt: Prompt,
    reply: Reply,
    ended_us: u64,
    wrong_tokens: Option<u32>,
}

impl<'a, S: FnMut(&RequestRecord) -> io::Result<()>> Run<'a, S> {
    pub(super) fn new(
        options: &'a Options,
        client: Client,
        progress: &'a watch::Sender<Progress>,
        check: Option<Arc<dyn Check>>,
        sink: S,
    ) -> Run<'a, S> {
        Run {
            options,
            client,
            check,
            sink,
            schedule: Schedule::new(options.pacing, options.sessions_max),
            order: OutOfOrder::default(),
            transcripts: Transcripts::new(options.vocab, options.transcript_tokens_max),
            clock: Clock { start: Instant::now(), ratio: options.clock_ratio },
            under_way: JoinSet::new(),
            progress,
            ttft: RunningMedian::default(),
            outcome: ReplayOutcome::default(),
        }
    }

    pub(super) async fn finish(
        mut self,
        requests: impl Iterator<Item = TraceRequest> + Send + 'static,
        cancel: &CancellationToken,
    ) -> Result<ReplayOutcome, ReplayError> {
        let mut trace = read_ahead(requests);
        let work = async {
            if self.options.pacing == Pacing::Closed {
                self.read_all(&mut trace).await?;
            }
            self.clock.start = Instant::now();
            self.work(trace).await
        };
        let worked = cancel.run_until_cancelled(work).await;
        self.outcome.cancelled = worked.is_none();
        worked.unwrap_or_else(|| self.keep_ended().map_err(ReplayError::Record))?;
        self.outcome.span_s = self.clock.seconds(self.clock.now_us());
        Ok(self.outcome)
    }

    /// Records what had ended when the replay was cancelled; dropping the run cuts off the rest.
    fn keep_ended(&mut self) -> io::Result<()> {
        while let Some(Ok(ended)) = self.under_way.try_join_next() {
            self.end(ended)?;
        }
        self.outcome.cut_off = self.under_way.len() as u64;
        Ok(())
    }

    async fn read_all(&mut self, trace: &mut mpsc::Receiver<TraceRequest>) -> Result<(), ReplayError> {
        let mut requests = Vec::new();
        while let Some(request) = trace.recv().await {
            if requests.len() == CLOSED_LOOP_REQUESTS_MAX {
                return Err(ReplayError::TooManyRequests { limit: CLOSED_LOOP_REQUESTS_MAX });
            }
            requests.push(request);
        }
        self.outcome.out_of_order = sort_by_arrival(&mut requests);
        requests.into_iter().for_each(|request| self.schedule.add(request));
        Ok(())
    }

    /// Adds the next request of an open loop, which cannot be sent before one that went already.
    fn add_in_order(&mut self, request: TraceRequest) -> Result<(), ReplayError> {
        self.order.add(&request);
        if self.order.count() > 0 {
            let TraceRequest { session, turn, .. } = request;
            return Err(ReplayError::OutOfOrder { session, turn });
        }
        self.schedule.add(request);
        Ok(())
    }

    async fn work(&mut self, mut trace: mpsc::Receiver<TraceRequest>) -> Result<(), ReplayError> {
        let mut reading = true;
        loop {
            self.start_due();
            let wake = self.next_start();
            tokio::select! {
                Some(ended) = self.under_way.join_next() => match ended {
                    Ok(ended) => self.end(ended).map_err(ReplayError::Record)?,
                    Err(error) => resume_panic(error),
                },
                request = trace.recv(), if reading && self.schedule.len() < READ_AHEAD_REQUESTS => match request {
                    Some(request) => self.add_in_order(request)?,
                    None => reading = false,
                },
                () = sleep_until(wake), if wake.is_some() => {}
                // Nothing is under way, due or left to be read.
                else => return Ok(()),
            }
        }
    }

    fn start_due(&mut self) {
        while self.under_way.len() < self.options.max_in_flight
            && let Some(due) = self.schedule.take(self.clock.now_us())
        {
            self.start(due);
            self.report_progress();
        }
    }

    /// When to look again for a request that is due; `None` while only the end of another one can
    /// change anything.
    fn next_start(&self) -> Option<Instant> {
        let room = self.under_way.len() < self.options.max_in_flight;
        self.schedule.next_due_us().filter(|_| room).map(|due_us| self.clock.instant(due_us))
    }

    fn start(&mut self, due: Due) {
        let prompt = self.transcripts.prompt(&due.request);
        let (client, check, clock) = (self.client.clone(), self.check.clone(), self.clock);
        let model = self.options.model.clone();
        self.under_way.spawn(async move {
            let call = Call {
                model: &model,
                session: &due.request.session,
                prompt: &prompt.tokens,
                output_tokens: asked_tokens(&due),
            };
            let reply = client.call(call).await;
            let ended_us = clock.now_us();
            let wrong_tokens = check.and_then(|check| wrong_tokens(&*check, &due, &prompt, &reply));
            Ended { due, prompt, reply, ended_us, wrong_tokens }
        });
    }

    fn end(&mut self, ended: Ended) -> io::Result<()> {
        let record = self.record(&ended);
        let request = &ended.due.request;
        self.schedule.ended(&request.session, ended.ended_us);
        self.transcripts.answered(&request.session, request.turn, ended.reply.answer.tokens);
        match record.outcome {
            Outcome::Ok => self.outcome.done += 1,
            Outcome::Failed(_) => self.outcome.failed += 1,
        }
        self.outcome.wrong_tokens += u64::from(record.wrong_tokens.unwrap_or(0));
        if let Some(ttft_s) = record.ttft_s.filter(|_| record.is_ok()) {
            self.ttft.add((ttft_s * 1e6) as u64);
        }
        (self.sink)(&record)?;
        self.report_progress();
        Ok(())
    }

    fn record(&self, ended: &Ended) -> RequestRecord {
        let Ended { due: Due { due_us, request }, prompt, reply, .. } = ended;
        let answer = &reply.answer;
        let start_s = self.clock.seconds(self.clock.at(reply.started));
        let delay_s = start_s - self.clock.seconds(*due_us);
        let after_start_s = |real_us: u64| self.clock.seconds(self.clock.model_us(real_us));
        let from_due_s = |real_us: u64| rounded(delay_s + after_start_s(real_us));
        let details = answer.usage.and_then(|usage| usage.prompt_tokens_details);
        let output_tokens = answer.output_tokens();
        let tpot_s = answer.first_token_us.zip(answer.last_token_us).filter(|_| output_tokens > 1);
        RequestRecord {
            arm: self.options.arm.clone(),
            session: request.session.clone(),
            turn: request.turn,
            backend: reply.backend.clone(),
            arrival_s: self.clock.seconds(*due_us),
            start_s: rounded(start_s),
            ttft_s: answer.first_token_us.map(from_due_s),
            tpot_s: tpot_s
                .map(|(first, last)| rounded(after_start_s(last - first) / f64::from(output_tokens - 1))),
            e2e_s: from_due_s(reply.ended_us),
            input_tokens: request.input_tokens,
            carried_tokens: prompt.carried_tokens,
            early: prompt.early,
            asked_tokens: Some(asked_tokens(&ended.due)),
            output_tokens,
            estimated: answer.is_estimated(),
            cached_tokens: details.and_then(|details| details.cached_tokens),
            external_cached_tokens: details.and_then(|details| details.external_cached_tokens),
            ssd_cached_tokens: details.and_then(|details| details.ssd_cached_tokens),
            peer_cached_tokens: details.and_then(|details| details.peer_cached_tokens),
            wrong_tokens: ended.wrong_tokens,
            outcome: reply.failure.clone().map_or(Outcome::Ok, Outcome::Failed),
        }
    }

    fn report_progress(&self) {
        self.progress.send_replace(Progress {
            at_s: self.clock.seconds(self.clock.now_us()),
            in_flight: self.under_way.len(),
            done: self.outcome.done,
            failed: self.outcome.failed,
            wrong_tokens: self.check.as_ref().map(|_| self.outcome.wrong_tokens),
            ttft_p50_s: self.ttft.get().map(|us| us as f64 / 1e6),
        });
    }
}

impl Clock {
    fn now_us(&self) -> u64 {
        self.at(Instant::now())
    }

    fn at(&self, instant: Instant) -> u64 {
        self.model_us(instant.saturating_duration_since(self.start).as_micros() as u64)
    }

    fn model_us(&self, real_us: u64) -> u64 {
        (real_us as f64 * self.ratio) as u64
    }

    fn instant(&self, model_us: u64) -> Instant {
        self.start + Duration::from_secs_f64(model_us as f64 / self.ratio / 1e6)
    }

    fn seconds(&self, model_us: u64) -> f64 {
        model_us as f64 / 1e6
    }
}

/// The API has no answers of zero tokens; some traces do.
fn asked_tokens(due: &Due) -> u32 {
    due.request.output_tokens.max(1)
}

/// Tokens that are wrong or, in an answer that is whole, missing. An answer cut short by a failure
/// is checked as far as it came. `None` when tokens came without their ids.
fn wrong_tokens(check: &dyn Check, due: &Due, prompt: &Prompt, reply: &Reply) -> Option<u32> {
    let tokens = &reply.answer.tokens;
    if tokens.is_empty() && reply.answer.output_tokens() > 0 {
        return None;
    }
    let missing = asked_tokens(due).saturating_sub(tokens.len() as u32);
    let missing = if reply.failure.is_none() { missing } else { 0 };
    Some(check.wrong(&prompt.tokens, tokens).saturating_add(missing))
}

/// Reads the trace on a thread of its own: it may come from a disk.
fn read_ahead(requests: impl Iterator<Item = TraceRequest> + Send + 'static) -> mpsc::Receiver<TraceRequest> {
    let (sender, receiver) = mpsc::channel(READ_AHEAD_REQUESTS);
    tokio::task::spawn_blocking(move || {
        for request in requests {
            if sender.blocking_send(request).is_err() {
                break;
            }
        }
    });
    receiver
}

async fn sleep_until(wake: Option<Instant>) {
    if let Some(wake) = wake {
        tokio::time::sleep_until(wake).await;
    }
}

/// A request's task is only ever cancelled together with this loop, so an error is a panic: a bug,
/// which must be seen.
fn resume_panic(error: tokio::task::JoinError) {
    if let Ok(panic) = error.try_into_panic() {
        std::panic::resume_unwind(panic);
    }
}

/// Microseconds are enough; more digits only make the log longer.
fn rounded(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}
