//! The engine's thread, "the GPU": it takes jobs in, runs step after step, and hands output over.
//! This file is glue: the scheduler decides what is computed, the step model how long it takes,
//! `external` what comes from the store.

use crate::arrivals::Arrivals;
use crate::clock::ModelClock;
use crate::compute::Compute;
use crate::events::EventSender;
use crate::external::{External, Fetched};
pub use crate::handing::Handing;
use crate::job::{Delivery, End, Handed, Job, JobId, Message, Update};
use crate::scheduler::{Completed, RequestId, Scheduler, Share, Step};
use crate::stats::Stats;
use forebay_steps::{StepModel, StepShare};
use forebay_transfer::lock::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Longest sleep of an idle engine. Every message wakes it up before.
const IDLE: Duration = Duration::from_secs(3600);

/// How long a stopping engine waits for transfers to end. Its memory outlives them either way.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// What the thread is made of.
pub struct Worker {
    pub inbox: Receiver<Message>,
    /// Messages that came during a step.
    pub deferred: VecDeque<Message>,
    /// Jobs that are still in the API.
    pub arrivals: Arrivals,
    pub scheduler: Scheduler,
    pub compute: Compute,
    pub step_model: StepModel,
    pub clock: ModelClock,
    /// `None` without a store.
    pub external: Option<External>,
    /// `None` where nobody is told of KV events.
    pub events: Option<EventSender>,
    /// What others see of `stats`.
    pub shared: Arc<Mutex<Stats>>,
    pub stats: Stats,
    pub jobs: Jobs,
    /// Prompts that come from other engines and go there.
    pub handed: Handing,
    /// When to end at the latest, once it was told to stop.
    pub stop_by: Option<Instant>,
}

/// Jobs under way, by both of their names.
#[derive(Default)]
pub struct Jobs {
    by_request: HashMap<RequestId, ActiveJob>,
    by_id: HashMap<JobId, RequestId>,
}

/// Output, and who waits for it.
type Delivered = (UnboundedSender<Update>, Update);

/// A job that the scheduler knows.
struct ActiveJob {
    job: Job,
    /// Output that has not been handed over.
    pending: Vec<u32>,
    first_token: Option<Instant>,
}

impl Jobs {
    fn insert(&mut self, request: RequestId, job: Job) {
        self.by_id.insert(job.id, request);
        self.by_request.insert(request, ActiveJob { job, pending: Vec::new(), first_token: None });
    }

    fn remove(&mut self, request: RequestId) -> Option<ActiveJob> {
        let active = self.by_request.remove(&request)?;
        self.by_id.remove(&active.job.id);
        Some(active)
    }
}

impl Worker {
    /// Runs until it is told to stop and everything is quiet.
    pub fn run(mut self) {
        loop {
            while let Some(message) = self.deferred.pop_front().or_else(|| self.inbox.try_recv().ok()) {
                self.take(message);
            }
            for job in self.arrivals.take_due(Instant::now()) {
                self.submit(job);
            }
            self.take_fetched();
            for offer in self.handed.offers.take_expired(Instant::now()) {
                self.scheduler.let_go(&offer.blocks);
            }
            if self.may_stop() {
                break;
            }
            let step = self.schedule();
            self.publish();
            if step.shares.is_empty() {
                self.wait();
            } else {
                self.compute(&step);
            }
        }
        self.external.into_iter().for_each(External::disconnect);
    }

    /// Whether it was told to stop and nothing reads or writes the device any more, or a mover that
    /// has ended never lets that happen.
    fn may_stop(&self) -> bool {
        let quiet = self.external.as_ref().is_none_or(External::is_quiet);
        self.stop_by.is_some_and(|stop_by| quiet || Instant::now() >= stop_by)
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) {
        self.clock.idle();
        let due = self.external.as_ref().and_then(External::next_due);
        let due = due.into_iter().chain(self.arrivals.next_due()).chain(self.handed.offers.next_expiry());
        let until = due.chain(self.stop_by).min();
        let timeout = until.map_or(IDLE, |until| until.saturating_duration_since(Instant::now()));
        match self.inbox.recv_timeout(timeout) {
            Ok(message) => self.take(message),
            Err(RecvTimeoutError::Timeout) => {}
            // Nobody can ask for anything any more.
            Err(RecvTimeoutError::Disconnected) => self.stop(),
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Submit(job) => self.arrive(job),
            Message::Abort(id) => self.abort(id),
            Message::Loaded(loaded) => {
                if let Some(external) = &mut self.external {
                    external.loaded(loaded);
                }
            }
            Message::Stored(stored) => {
                self.scheduler.store_ended(&stored.blocks, stored.quiet);
                if let Some(external) = &mut self.external {
                    external.stored(&stored);
                }
            }
            Message::Read(read) => self.handed.ended(&mut self.scheduler, read),
            Message::LetGo(blocks) => self.scheduler.let_go(&blocks),
            Message::Stop => self.stop(),
        }
    }

    /// The API has a job, and the scheduler gets it when the API is done with its prompt.
    fn arrive(&mut self, job: Job) {
        if self.stop_by.is_some() {
            return end(&job, End::Failed("the engine is shutting down".into()));
        }
        let due = job.arrived + self.clock.real(self.step_model.api_us(job.prompt.len()));
        self.arrivals.push(due, job);
    }

    fn submit(&mut self, mut job: Job) {
        match self.scheduler.submit(std::mem::take(&mut job.prompt), job.max_tokens) {
            Ok(request) => {
                if let (Some(external), Some(request)) = (&self.external, self.scheduler.request(request)) {
                    external.used(&request.chunk_ids);
                }
                if let Some(Handed::Here(_)) = job.handed {
                    self.scheduler.hand_over(request);
                }
                self.jobs.insert(request, job);
            }
            Err(refused) => {
                self.stats.failed += 1;
                end(&job, End::Failed(refused.to_string()));
            }
        }
    }

    fn abort(&mut self, id: JobId) {
        if self.arrivals.remove(id).is_some() {
            self.stats.aborted += 1;
        } else if let Some(&request) = self.jobs.by_id.get(&id) {
            self.stats.aborted += 1;
            self.forget(request);
        }
    }

    /// Drops a job; says nothing to whoever waits for it.
    fn forget(&mut self, request: RequestId) -> Option<ActiveJob> {
        self.scheduler.abort(request);
        self.handed.forget(request);
        self.compute.forget(request);
        self.jobs.remove(request)
    }

    fn stop(&mut self) {
        self.stop_by.get_or_insert(Instant::now() + STOP_TIMEOUT);
        for job in self.arrivals.take_all() {
            self.stats.aborted += 1;
            end(&job, End::Failed("the engine is shutting down".into()));
        }
        let requests: Vec<RequestId> = self.jobs.by_request.keys().copied().collect();
        for request in requests {
            if let Some(active) = self.forget(request) {
                self.stats.aborted += 1;
                end(&active.job, End::Failed("the engine is shutting down".into()));
            }
        }
    }

    /// Hands chunks that have arrived, and whose time has passed, to the scheduler.
    fn take_fetched(&mut self) {
        let Some(external) = &mut self.external else { return };
        for Fetched { request, good, withdrawn } in external.take_due(Instant::now()) {
            self.scheduler.load_ended(request, good, &withdrawn);
        }
    }

    fn schedule(&mut self) -> Step {
        let external = self.external.as_ref();
        let mut step =
            self.scheduler.schedule(&mut |ids| external.map_or(0, |external| external.longest_stored(ids)));
        for request in std::mem::take(&mut step.failed) {
            self.stats.failed += 1;
            self.compute.forget(request);
            if let Some(active) = self.jobs.remove(request) {
                end(&active.job, End::Failed("too few KV blocks are left for this request".into()));
            }
        }
        for read in std::mem::take(&mut step.reads) {
            if let Some(active) = self.jobs.by_request.get(&read.request)
                && let Some(Handed::Here(source)) = &active.job.handed
            {
                self.handed.start(read, source.clone(), &self.scheduler, &self.clock);
            }
        }
        for load in std::mem::take(&mut step.loads) {
            if let Some(external) = &mut self.external {
                let trace = self.jobs.by_request.get(&load.request).and_then(|active| active.job.trace);
                external.load(load, trace, &self.clock, self.scheduler.running());
            }
        }
        step
    }

    fn compute(&mut self, step: &Step) {
        let started = Instant::now();
        let sampled = self.compute.run(&self.scheduler, step);
        let shares = step.shares.iter();
        let share = |share: &Share| StepShare { context_tokens: share.start, new_tokens: share.tokens };
        let step_us = self.step_model.step_us(shares.map(share));
        let until = self.clock.end_of_step(started, step_us);
        self.sit_out(until);
        self.stats.steps += 1;
        self.stats.busy_s += step_us / 1e6;

        let completed = self.scheduler.complete(step, &sampled);
        for (request, state) in &completed.finished {
            if let Some(active) = self.jobs.by_request.get(request)
                && let Some(Handed::Away { keys }) = &active.job.handed
            {
                self.handed.keep(&mut self.scheduler, keys.clone(), state);
            }
        }
        let sampling = step.shares.iter().filter(|share| share.samples);
        let mut updates = Vec::new();
        for (share, token) in sampling.zip(sampled) {
            updates.extend(self.emit(share.request, token, &completed));
        }
        // Whoever sees an answer finds it counted.
        self.publish();
        for (sender, update) in updates {
            // Whoever does not listen any more has dropped the ticket, which aborts the job.
            let _ = sender.send(update);
        }
        for (request, _) in &completed.finished {
            self.compute.forget(*request);
        }
        for chunk in completed.stores {
            if let Some(external) = &mut self.external
                && let Some(blocks) = external.store(chunk)
            {
                self.scheduler.store_ended(&blocks, true);
            }
        }
    }

    /// Lets a step's time pass. Messages wait for its end, as they do while a GPU is busy; only a
    /// stop does not.
    fn sit_out(&mut self, until: Instant) {
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            match self.inbox.recv_timeout(left) {
                Ok(Message::Stop) => return self.deferred.push_back(Message::Stop),
                Ok(message) => self.deferred.push_back(message),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Takes an output token of a request. Gives what is to be handed over, and to whom, if
    /// anything is due.
    fn emit(&mut self, request: RequestId, token: u32, completed: &Completed) -> Option<Delivered> {
        let finished = completed.finished.iter().find(|(finished, _)| *finished == request);
        let state = finished.map(|(_, state)| state).or(self.scheduler.request(request))?;
        let active = self.jobs.by_request.get_mut(&request)?;
        self.stats.output_tokens += 1;
        active.pending.push(token);
        let first = active.first_token.is_none();
        if first {
            active.first_token = Some(Instant::now());
            self.stats.prompt_tokens += state.prompt_tokens as u64;
            if let Some(external) = &mut self.external {
                external.computed(state.prompt_tokens - state.hit.tokens());
            }
            self.stats.times.ttft.observe(self.clock.model_s_since(active.job.arrived));
        }
        let due = match active.job.delivery {
            _ if finished.is_some() => true,
            Delivery::AtEnd => false,
            Delivery::Every(tokens) => first || active.pending.len() >= tokens,
        };
        let update = |active: &mut ActiveJob| Update {
            index: active.job.index,
            tokens: std::mem::take(&mut active.pending),
            hit: state.hit,
            end: finished.is_some().then_some(End::Length),
        };
        let delivered = due.then(|| (active.job.updates.clone(), update(active)));
        if finished.is_some() {
            self.note_finished(request);
        }
        delivered
    }

    fn note_finished(&mut self, request: RequestId) {
        let Some(active) = self.jobs.remove(request) else { return };
        self.stats.finished += 1;
        self.stats.times.e2e.observe(self.clock.model_s_since(active.job.arrived));
        if let (Some(first), tokens @ 2..) = (active.first_token, active.job.max_tokens) {
            let per_token_s = self.clock.model_s_since(first) / (tokens - 1) as f64;
            self.stats.times.tpot.observe(per_token_s);
        }
    }

    /// Shows others where the engine stands.
    fn publish(&mut self) {
        let events = self.scheduler.take_events();
        if let Some(sender) = &self.events {
            sender.send(events);
            self.stats.dropped_event_batches = sender.dropped();
        }
        let pool = self.scheduler.pool();
        let stats = &mut self.stats;
        stats.running = self.scheduler.running();
        stats.waiting = self.scheduler.waiting();
        stats.blocks_used = pool.held();
        stats.blocks_total = pool.blocks();
        stats.blocks_lost = pool.lost();
        stats.scheduler = self.scheduler.counters();
        stats.lag_s = self.clock.lag_s();
        stats.store = self.external.as_ref().map(External::stats).unwrap_or_default();
        *self.shared.lock() = self.stats.clone();
    }
}

/// Ends a job without output.
fn end(job: &Job, end: End) {
    let update = Update { index: job.index, tokens: Vec::new(), hit: Default::default(), end: Some(end) };
    // Nobody may be listening any more.
    let _ = job.updates.send(update);
}
