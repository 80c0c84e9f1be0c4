//! Requests: a transfer to or from a peer that can be posted, watched, cancelled and posted again.
//! Each post ends exactly once, and only when nothing of it touches memory at either end any more.
//! This file joins the way to the peer, the mover and the notification.

use crate::connect;
use crate::error::{AgentError, PeerError};
use crate::ipc::asker;
use crate::ipc::opened::IpcRegions;
use crate::notify;
use crate::peer::Peer;
use crate::prepared::Pairs;
use crate::shared::Shared;
use crate::timer::Due;
use forebay_transfer::lock::{Condvar, Mutex, MutexGuard};
use forebay_transfer::{
    Class, End as Moved, Forked, Process, Reason, RegionId, SpanPair, Submitted, Transfer,
};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Every byte is in place, and the notification, if there was one, was taken in.
    Done { bytes: u64 },
    Failed {
        why: PeerError,
        /// Bytes that are in place all the same.
        moved_bytes: u64,
    },
    Cancelled {
        /// Bytes that are in place all the same.
        moved_bytes: u64,
    },
}

/// Where a request is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    Ready,
    Queued,
    Posted,
    /// Its bytes are in place; the peer is being notified.
    Notifying,
    Ended(End),
}

/// How long a request spent where, as far as it has come.
#[derive(Clone, Copy, Default)]
struct StageTimes {
    /// Until the mover had it.
    queued_us: u64,
    /// Until all its bytes were in place and acknowledged.
    posted_us: u64,
    /// Until the peer had taken the notification in.
    notified_us: u64,
}

/// A transfer that is ready to be posted. Dropping it does not stop what was posted.
pub struct Request {
    inner: Arc<Inner>,
}

/// What a request is, and where its latest post has got to.
struct Inner {
    shared: Weak<Shared>,
    requests: Arc<Requests>,
    process: Process,
    peer: Arc<Peer>,
    pairs: Vec<SpanPair>,
    bytes: u64,
    regions: HashSet<RegionId>,
    notification: Option<Vec<u8>>,
    limit_us: Option<u64>,
    progress: Mutex<Progress>,
    ended: Condvar,
}

#[derive(Default)]
struct Progress {
    phase: Phase,
    /// Counts posts, so that what was meant for one never reaches the next.
    post: u64,
    number: u64,
    on_end: Option<Box<dyn FnOnce(End) + Send>>,
    /// What this post says in the place of the request's own notification.
    instead: Option<Vec<u8>>,
    due: Option<Due>,
    /// Why the mover was asked to give up, if it was.
    stop: Option<Stop>,
    since_us: u64,
    times: StageTimes,
}

#[derive(Default)]
enum Phase {
    #[default]
    Ready,
    Queued,
    Posted(Submitted),
    Notifying,
    Ended(End),
}

#[derive(Clone, Copy)]
enum Stop {
    Cancelled,
    Late { limit_us: u64 },
}

impl Stop {
    fn end(self, moved_bytes: u64) -> End {
        match self {
            Stop::Cancelled => End::Cancelled { moved_bytes },
            Stop::Late { limit_us } => End::Failed { why: PeerError::Late { limit_us }, moved_bytes },
        }
    }
}

impl Request {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        requests: &Arc<Requests>,
        peer: Arc<Peer>,
        pairs: Pairs,
        notification: Option<Vec<u8>>,
        limit_us: Option<u64>,
    ) -> Request {
        let inner = Inner {
            shared: Arc::downgrade(shared),
            requests: Arc::clone(requests),
            process: shared.process,
            peer,
            regions: regions(&pairs.pairs),
            bytes: pairs.bytes,
            pairs: pairs.pairs,
            notification,
            limit_us,
            progress: Mutex::default(),
            ended: Condvar::new(),
        };
        Request { inner: Arc::new(inner) }
    }

    /// Begins. `on_end` is called exactly once, on any thread, also on this one; it must be short,
    /// and must not wait for this agent. An error means that nothing was begun.
    pub fn post(&self, on_end: impl FnOnce(End) + Send + 'static) -> Result<(), AgentError> {
        let shared = self.inner.shared.upgrade().ok_or(PeerError::Ended)?;
        shared.process.check()?;
        self.inner.post(&shared, None, Box::new(on_end))
    }

    /// As [`post`](Request::post), with this notification in the place of the request's own, for
    /// this time.
    pub fn post_with(
        &self,
        notification: Vec<u8>,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<(), AgentError> {
        notify::check(Some(&notification))?;
        let shared = self.inner.shared.upgrade().ok_or(PeerError::Ended)?;
        shared.process.check()?;
        self.inner.post(&shared, Some(notification), Box::new(on_end))
    }

    /// Refuses in any other process than its agent's, in which it does not move.
    pub fn here(&self) -> Result<(), Forked> {
        self.inner.process.check()
    }

    /// Where the latest post has got to. In another process than the agent's: nowhere.
    pub fn state(&self) -> State {
        if self.here().is_err() {
            return State::Ready;
        }
        match &self.inner.progress.lock().phase {
            Phase::Ready => State::Ready,
            Phase::Queued => State::Queued,
            Phase::Posted(_) => State::Posted,
            Phase::Notifying => State::Notifying,
            Phase::Ended(end) => State::Ended(end.clone()),
        }
    }

    /// Asks for an early end and waits for it: then nothing touches the memory at either end any
    /// more. What had already happened stays so. A peer that does not answer is waited for until it
    /// counts as frozen. Not to be called where `on_end` is.
    pub fn cancel(&self) {
        if self.here().is_err() {
            return;
        }
        self.inner.stop(Stop::Cancelled, None);
        self.inner.wait();
    }

    pub fn bytes(&self) -> u64 {
        self.inner.bytes
    }

    pub fn peer(&self) -> &str {
        &self.inner.peer.name
    }
}

/// Every region that the pairs name. Neighbours mostly name the same ones, which are looked at
/// once.
fn regions(pairs: &[SpanPair]) -> HashSet<RegionId> {
    let named = |pair: &SpanPair| [pair.from.region, pair.to.region];
    pairs.chunk_by(|one, next| named(one) == named(next)).flat_map(|run| named(&run[0])).collect()
}

impl Inner {
    /// Whether it reads or writes this region.
    fn uses(&self, region: RegionId) -> bool {
        self.regions.contains(&region)
    }

    fn post(
        self: &Arc<Inner>,
        shared: &Arc<Shared>,
        instead: Option<Vec<u8>>,
        on_end: Box<dyn FnOnce(End) + Send>,
    ) -> Result<(), AgentError> {
        let mut progress = self.progress.lock();
        if matches!(progress.phase, Phase::Queued | Phase::Posted(_) | Phase::Notifying) {
            return Err(AgentError::UnderWay);
        }
        let now_us = shared.timer.now_us();
        progress.number = self.requests.register(self)?;
        progress.phase = Phase::Queued;
        progress.post += 1;
        progress.on_end = Some(on_end);
        progress.instead = instead;
        progress.stop = None;
        progress.since_us = now_us;
        progress.times = StageTimes::default();
        let post = progress.post;
        progress.due = self.limit_us.map(|limit_us| {
            let late = Arc::clone(self);
            let stop = move || late.stop(Stop::Late { limit_us }, Some(post));
            shared.timer.at(now_us.saturating_add(limit_us), stop)
        });
        drop(progress);
        let until_us = shared.connect_until_us().min(until(now_us, self.limit_us));
        let (inner, weak) = (Arc::clone(self), Arc::downgrade(shared));
        connect::when_up(shared, &self.peer, until_us, move |up| inner.begin(&weak, post, up));
        Ok(())
    }

    /// The peer can be spoken to, or not.
    fn begin(self: &Arc<Inner>, weak: &Weak<Shared>, post: u64, up: Result<(), PeerError>) {
        let Some(shared) = weak.upgrade() else { return self.end(None, failed(PeerError::Ended), post) };
        if let Err(why) = up {
            return self.end(Some(&shared), failed(why), post);
        }
        let Some(gpus) = asker::between(&shared, self.regions.iter().copied()) else {
            return self.submit(&shared, post, None);
        };
        let (inner, weak) = (Arc::clone(self), Weak::clone(weak));
        asker::when_open(&shared, &self.peer, gpus, move |open| match weak.upgrade() {
            Some(shared) => inner.submit(&shared, post, open),
            None => inner.end(None, failed(PeerError::Ended), post),
        });
    }

    /// Gives it to the mover: by IPC if the peer's memory is open, otherwise over flows.
    fn submit(self: &Arc<Inner>, shared: &Arc<Shared>, post: u64, open: Option<IpcRegions>) {
        let mut progress = self.progress.lock();
        if progress.post != post || !matches!(progress.phase, Phase::Queued) {
            return;
        }
        let pairs = open.as_ref().map_or_else(|| self.pairs.clone(), |open| open.pairs(&self.pairs));
        let transfer = Transfer::new(pairs, Class::Demand);
        let (inner, weak) = (Arc::clone(self), Arc::downgrade(shared));
        let submitted = shared.mover.submit(transfer, move |end| match open {
            Some(open) => inner.copied(&weak, post, end, &open),
            None => inner.moved(&weak, post, end),
        });
        progress.times.queued_us = shared.timer.now_us().saturating_sub(progress.since_us);
        match submitted {
            Ok(submitted) => progress.phase = Phase::Posted(submitted),
            Err(error) => {
                drop(progress);
                self.end(Some(shared), failed(PeerError::Full(error.to_string())), post);
            }
        }
    }

    /// GPUs are through with it. What they did not copy goes over flows, unless something may still
    /// write it.
    fn copied(self: &Arc<Inner>, weak: &Weak<Shared>, post: u64, end: Moved, open: &IpcRegions) {
        let Some(shared) = weak.upgrade() else { return self.moved(weak, post, end) };
        let failure = match &end {
            Moved::Failed(failure) => Some((failure.reason.to_string(), failure.quarantined.is_empty())),
            _ => None,
        };
        asker::ended(&shared, &self.peer, open, failure.as_ref().map(|(why, _)| why.as_str()));
        let mut progress = self.progress.lock();
        let again = matches!(failure, Some((_, true))) && progress.stop.is_none() && progress.post == post;
        if again {
            progress.phase = Phase::Queued;
        }
        drop(progress);
        if again { self.submit(&shared, post, None) } else { self.moved(weak, post, end) }
    }

    /// The mover is through with it.
    fn moved(self: &Arc<Inner>, weak: &Weak<Shared>, post: u64, end: Moved) {
        let shared = weak.upgrade();
        let mut progress = self.progress.lock();
        if let Some(shared) = &shared {
            let since_us = progress.since_us + progress.times.queued_us;
            progress.times.posted_us = shared.timer.now_us().saturating_sub(since_us);
        }
        let stop = progress.stop;
        let text = progress.instead.take().or_else(|| self.notification.clone());
        let end = match (end, text, shared.as_ref()) {
            (Moved::Done { bytes }, Some(text), Some(shared)) => {
                progress.phase = Phase::Notifying;
                drop(progress);
                return self.notify(shared, post, bytes, text);
            }
            (Moved::Done { bytes }, ..) => End::Done { bytes },
            (Moved::Cancelled { moved_bytes, .. }, ..) => stop.unwrap_or(Stop::Cancelled).end(moved_bytes),
            (Moved::Failed(failure), ..) => {
                End::Failed { why: self.why(failure.reason), moved_bytes: failure.moved_bytes }
            }
        };
        drop(progress);
        self.end(shared.as_ref(), end, post);
    }

    /// Why the mover failed: because of the peer, if that is why.
    fn why(&self, reason: Reason) -> PeerError {
        match reason {
            Reason::Corrupt { .. } => PeerError::Unmoved(reason),
            reason => self.peer.error().unwrap_or(PeerError::Unmoved(reason)),
        }
    }

    fn notify(self: &Arc<Inner>, shared: &Arc<Shared>, post: u64, bytes: u64, text: Vec<u8>) {
        let (inner, weak, began_us) = (Arc::clone(self), Arc::downgrade(shared), shared.timer.now_us());
        let until_us = until(self.progress.lock().since_us, self.limit_us).min(shared.connect_until_us());
        let told = Arc::clone(&inner);
        let on_end = move |taken: Result<(), PeerError>| {
            let shared = weak.upgrade();
            if let Some(shared) = &shared {
                inner.progress.lock().times.notified_us = shared.timer.now_us().saturating_sub(began_us);
            }
            inner.notified(shared.as_ref(), post, bytes, taken);
        };
        if let Err(full) = notify::send(shared, &self.peer, text, until_us, None, on_end) {
            told.notified(Some(shared), post, bytes, Err(full));
        }
    }

    /// The peer has the notification, or not.
    fn notified(
        self: &Arc<Inner>,
        shared: Option<&Arc<Shared>>,
        post: u64,
        bytes: u64,
        taken: Result<(), PeerError>,
    ) {
        let end = taken.map(|()| End::Done { bytes }).unwrap_or_else(|why| {
            let (peer, why) = (self.peer.name.clone(), Box::new(why));
            End::Failed { why: PeerError::NotNotified { peer, why }, moved_bytes: bytes }
        });
        self.end(shared, end, post);
    }

    /// Asks for an early end, of this post or of whichever is under way.
    fn stop(self: &Arc<Inner>, stop: Stop, post: Option<u64>) {
        let shared = self.shared.upgrade();
        let mut progress = self.progress.lock();
        if post.is_some_and(|post| post != progress.post) {
            return;
        }
        match (&progress.phase, &shared) {
            // Under the same lock: the connection may come at this moment.
            (Phase::Queued, _) => self.end_now(progress, shared.as_ref(), stop.end(0)),
            (Phase::Posted(submitted), Some(shared)) => {
                shared.mover.cancel(*submitted);
                progress.stop.get_or_insert(stop);
            }
            // What is in place cannot be taken back; the notification has a limit of its own.
            _ => {}
        }
    }

    /// Ends the latest post, once.
    fn end(&self, shared: Option<&Arc<Shared>>, end: End, post: u64) {
        let progress = self.progress.lock();
        let over = matches!(progress.phase, Phase::Ready | Phase::Ended(_));
        if !over && progress.post == post {
            self.end_now(progress, shared, end);
        }
    }

    /// Ends what is under way.
    fn end_now(&self, mut progress: MutexGuard<'_, Progress>, shared: Option<&Arc<Shared>>, end: End) {
        progress.phase = Phase::Ended(end.clone());
        let (on_end, due, number) = (progress.on_end.take(), progress.due.take(), progress.number);
        let times = progress.times;
        drop(progress);
        self.count(&end, times);
        self.requests.0.lock().by_number.remove(&number);
        if let (Some(shared), Some(due)) = (shared, due) {
            shared.timer.forget(due);
        }
        self.ended.notify_all();
        if let Some(on_end) = on_end {
            on_end(end);
        }
        if let Some(shared) = shared {
            shared.calls.event.set();
        }
    }

    fn count(&self, end: &End, times: StageTimes) {
        let notifies = self.notification.is_some() || times.notified_us > 0;
        self.peer.metrics.count(|counts| {
            counts.stages.queued.add(times.queued_us);
            counts.stages.posted.add(times.posted_us);
            match end {
                End::Done { .. } => {
                    counts.done += 1;
                    if notifies {
                        counts.stages.notified.add(times.notified_us);
                    }
                }
                End::Failed { why, .. } => *counts.faults.entry(why.kind()).or_default() += 1,
                End::Cancelled { .. } => counts.cancelled += 1,
            }
        });
    }

    fn wait(&self) {
        let mut progress = self.progress.lock();
        while matches!(progress.phase, Phase::Queued | Phase::Posted(_) | Phase::Notifying) {
            self.ended.wait(&mut progress);
        }
    }
}

fn failed(why: PeerError) -> End {
    End::Failed { why, moved_bytes: 0 }
}

fn until(now_us: u64, limit_us: Option<u64>) -> u64 {
    limit_us.map_or(u64::MAX, |limit_us| now_us.saturating_add(limit_us))
}

/// The requests of one agent that are under way.
#[derive(Default)]
pub(crate) struct Requests(Mutex<UnderWay>);

#[derive(Default)]
struct UnderWay {
    by_number: HashMap<u64, Arc<Inner>>,
    next: u64,
    closed: bool,
}

impl Requests {
    /// Notes that a request is under way, and says its number.
    fn register(&self, request: &Arc<Inner>) -> Result<u64, AgentError> {
        let mut under_way = self.0.lock();
        if under_way.closed {
            return Err(PeerError::Ended.into());
        }
        let number = under_way.next;
        under_way.next += 1;
        under_way.by_number.insert(number, Arc::clone(request));
        Ok(number)
    }

    fn those(&self, which: impl Fn(&Inner) -> bool) -> Vec<Arc<Inner>> {
        self.0.lock().by_number.values().filter(|request| which(request)).cloned().collect()
    }

    /// Whether one is under way that uses a region.
    pub fn use_region(&self, region: RegionId) -> bool {
        self.0.lock().by_number.values().any(|request| request.uses(region))
    }

    /// Cancels those that use a region, and waits for their ends.
    pub fn cancel_with_region(&self, region: RegionId) {
        self.cancel(|request| request.uses(region));
    }

    /// Cancels those to a peer, and waits for their ends.
    pub fn cancel_to(&self, peer: &Arc<Peer>) {
        self.cancel(|request| Arc::ptr_eq(&request.peer, peer));
    }

    /// Cancels all, waits for their ends, and begins nothing new.
    pub fn close(&self) {
        self.0.lock().closed = true;
        self.cancel(|_| true);
    }

    /// All at once, then waits.
    fn cancel(&self, which: impl Fn(&Inner) -> bool) {
        let requests = self.those(which);
        requests.iter().for_each(|request| request.stop(Stop::Cancelled, None));
        requests.iter().for_each(|request| request.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::REGIONS_MAX;
    use crate::{Access, Agent, AgentConfig, Descriptors, Op, Run as Blocks, Select};
    use forebay_transfer::{HostBuffer, Limits, Mover, Place, Span};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    const BYTES: u64 = 4096;

    #[test]
    fn what_was_cancelled_before_its_connection_came_touches_no_memory_afterwards() {
        let agent = |name| Agent::start(AgentConfig::named(name)).unwrap();
        let (one, two) = (agent("one"), agent("two"));
        let [ours, theirs] = [(); 2].map(|()| Arc::new(HostBuffer::new(BYTES as usize)));
        let here = one.register(ours.clone(), Access::OPEN).unwrap();
        let there = two.register(theirs.clone(), Access::OPEN).unwrap();
        one.add_peer(&two.metadata()).unwrap();
        one.connect("two").unwrap();
        let block = |base| Descriptors::from_runs([Blocks::block(base, BYTES)]).unwrap();
        let local = one.prepare_local(&block(here.base())).unwrap();
        let remote = one.prepare_remote("two", &block(there.base())).unwrap();
        let request =
            one.request(Op::Write, (&local, Select::All), (&remote, Select::All), None, None).unwrap();
        for round in 0..5_000u32 {
            let (post, over) = (request.inner.progress.lock().post + 1, AtomicBool::new(false));
            let (started, weak) = (Barrier::new(2), Arc::downgrade(&one.shared));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    started.wait();
                    while !over.load(Ordering::Relaxed) {
                        request.inner.begin(&weak, post, Ok(()));
                    }
                });
                started.wait();
                // As a post does that waits for a connection.
                let number = one.requests.register(&request.inner).unwrap();
                let mut progress = request.inner.progress.lock();
                (progress.number, progress.post) = (number, post);
                (progress.phase, progress.stop) = (Phase::Queued, None);
                progress.times = StageTimes::default();
                drop(progress);
                request.cancel();
                theirs.write(0, &[0xEE; BYTES as usize]);
                over.store(true, Ordering::Relaxed);
            });
            if request.inner.progress.lock().times.queued_us > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut found = [0; BYTES as usize];
            theirs.read(0, &mut found);
            assert!(found == [0xEE; BYTES as usize], "round {round}: written after its end");
        }
    }

    #[test]
    fn what_a_request_uses_is_found_as_fast_among_many_regions_as_among_few() {
        let mut mover = Mover::new(Limits::default());
        let mut region = || mover.add_region(Place::Host(0), BYTES);
        let (here, many) = (region(), (0..REGIONS_MAX).map(|_| region()).collect::<Vec<_>>());
        let pair = |region: &RegionId| SpanPair::new(Span::new(here, 0, 8), Span::new(*region, 0, 8));
        let pairs: Vec<SpanPair> = many.iter().cycle().take(2_000_000).map(pair).collect();
        let since = Instant::now();
        assert_eq!(regions(&pairs).len(), many.len() + 1);
        assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
    }
}
