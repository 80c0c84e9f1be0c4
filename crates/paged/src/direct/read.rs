//! The decoder's side: one read of a prompt, from one offer or from several, of which each has some
//! of the heads. An offer is opened, what is wanted is copied, and the offer is closed. The read
//! ends once, as loads do, when nothing of it touches a page any more: with all tokens, or with
//! none and the reason.

use super::memory::{Arriving, Begun, Offered};
use super::message::{Answer, Digest, Key, Opened, Question};
use super::plan::Wanted;
use super::{Direct, peer_of, plan};
use crate::access::Accessing;
use crate::cache::BadValue;
use crate::errors::{NotBegun, NotCopied};
use crate::load::LoadEnd;
use crate::page_tables::PageTables;
use crate::pages::HeadRange;
use crate::stats::add;
use crate::thread_pool::Urgency;
use forebay_net::PeerError;
use forebay_transfer::lock::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the other engine may take for an answer. It moves no byte for that.
pub const ANSWER_LIMIT_US: u64 = 3_000_000;

/// What is to be read.
#[derive(Debug)]
pub struct ReadRequest {
    /// A number of which no load is under way.
    pub job: u64,
    /// Offers that have all heads together.
    pub sources: Vec<ReadSource>,
    pub digest: Digest,
    /// Where the pages go, from `first_token` of the sequence on; -1 where one is not wanted.
    pub tables: PageTables,
    pub first_token: u64,
    pub tokens: u64,
    /// How long the offers may take to come: a decoder may be asked while the prefiller computes.
    pub wait: Duration,
}

/// An offer of another engine's worker, and what is read of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadSource {
    /// What the worker said of itself.
    pub metadata: Vec<u8>,
    pub key: Key,
    /// Which of a page; none for whole pages.
    pub heads: Option<HeadRange>,
    /// How many workers read that offer, this one among them.
    pub readers: u32,
}

/// A read, until its last source has ended.
struct Job {
    direct: Arc<Direct>,
    number: u64,
    tables: PageTables,
    first_token: u64,
    tokens: u64,
    /// Its own pages that are filled.
    pages: Arc<Vec<Vec<u64>>>,
    begun_at: Instant,
    left: Mutex<Left>,
}

/// What of a read is under way.
struct Left {
    sources: usize,
    /// Why it brings nothing.
    why: Option<String>,
    /// Given back last.
    accessing: Option<Accessing>,
}

/// A read's part from one source.
struct Reading {
    job: Arc<Job>,
    key: Key,
    heads: Option<HeadRange>,
    peer: String,
    state: Mutex<State>,
}

/// What a source has brought, with a checksum of each layer.
struct Arrived {
    bytes: u64,
    sums: Vec<u64>,
}

struct State {
    begun: Begun,
    /// 0: none.
    lease: u64,
}

/// Begins a read.
pub fn begin(direct: &Arc<Direct>, request: ReadRequest, stream: u64) -> Result<(), NotBegun> {
    let shared = &direct.shared;
    let ReadRequest { job: number, sources, digest, tables, first_token, tokens, wait } = request;
    if sources.is_empty() {
        return Err(BadValue::new("the number of sources", 0_u64, "1 or more").into());
    }
    tables.check(&shared.cache, tokens, true)?;
    let accessing = Some(shared.access.enter().ok_or(NotBegun::Closed)?);
    let begun = direct.memory.begin(stream)?;
    if !shared.jobs.begin_direct(number) {
        return Err(BadValue::new("job", number, "a number of which no load is under way").into());
    }
    add(&shared.counters.reads, 1);
    let Wanted { blocks, pages } = Wanted::of(&shared.cache, &tables, first_token, tokens);
    let pages = Arc::new(pages);
    let left = Mutex::new(Left { sources: sources.len(), why: None, accessing });
    let (direct, begun_at) = (Arc::clone(direct), Instant::now());
    let job = Arc::new(Job { direct, number, tables, first_token, tokens, pages, begun_at, left });
    for ReadSource { metadata, key, heads, readers } in sources {
        let wanted = blocks.clone();
        let heads_there = heads.map(HeadRange::there);
        let wait_us = wait.as_micros() as u64;
        let open = Question::Open { key, digest, wanted, heads: heads_there, readers, wait_us };
        match job.peer(&metadata) {
            Ok(peer) => {
                let state = Mutex::new(State { begun: begun.clone(), lease: 0 });
                let reading = Arc::new(Reading { job: Arc::clone(&job), key, heads, peer, state });
                reading.ask(&open, wait_us, |reading, answer| reading.opened(answer));
            }
            Err(why) => job.ended(Some(why)),
        }
    }
    Ok(())
}

/// How long after it was granted or renewed a lease is renewed: well before its end. The peer's
/// number is not trusted.
fn renewed_after(ttl_us: u64) -> Duration {
    Duration::from_micros(ttl_us / 3).clamp(Duration::from_millis(100), Duration::from_secs(2))
}

impl Job {
    fn peer(&self, metadata: &[u8]) -> Result<String, String> {
        let agent = self.direct.agent().ok_or("the cache is closed")?;
        peer_of(&agent, metadata)
    }

    /// A source has ended. With the last one the read has.
    fn ended(&self, why: Option<String>) {
        let mut left = self.left.lock();
        left.sources -= 1;
        left.why = left.why.take().or(why);
        if left.sources > 0 {
            return;
        }
        let (why, accessing) = (left.why.take(), left.accessing.take());
        drop(left);
        let shared = &self.direct.shared;
        add(&shared.counters.read_us, self.begun_at.elapsed().as_micros() as u64);
        if let Some(why) = &why {
            add(&shared.counters.reads_failed, 1);
            shared.log.short(self.number, 0, self.tokens, why);
        }
        drop(accessing);
        self.direct.watch_peers();
        let tokens = if why.is_none() { self.tokens } else { 0 };
        shared.jobs.end_direct(LoadEnd { job: self.number, tokens, why });
    }
}

impl Reading {
    /// Asks the other engine, which may let some time pass before it answers. `then` gets the
    /// answer on a thread that may take its time.
    fn ask(
        self: &Arc<Self>,
        question: &Question,
        wait_us: u64,
        then: impl FnOnce(Arc<Reading>, Result<Answer, String>) + Send + 'static,
    ) {
        let waiting = Arc::new(Mutex::new(Some((Arc::clone(self), then))));
        let answered = Arc::clone(&waiting);
        let on_reply = move |reply: Result<Vec<u8>, PeerError>| {
            let Some((reading, then)) = answered.lock().take() else { return };
            let said = reply.map_err(|why| why.to_string());
            let said = said.and_then(|bytes| Answer::decode(&bytes).map_err(|bad| bad.to_string()));
            let tasks = Arc::clone(&reading.job.direct.shared.tasks);
            tasks.post(Urgency::Load, move || then(reading, said));
        };
        let called = match self.job.direct.agent() {
            Some(agent) => agent
                .call(&self.peer, question.encode(), ANSWER_LIMIT_US.saturating_add(wait_us), on_reply)
                .map_err(|error| error.to_string()),
            None => Err("the cache is closed".into()),
        };
        if let Err(why) = called {
            let waiting = waiting.lock().take();
            if let Some((reading, then)) = waiting {
                then(reading, Err(why));
            }
        }
    }

    fn opened(self: Arc<Self>, answer: Result<Answer, String>) {
        let opened = match answer {
            Ok(Answer::Opened(opened)) => opened,
            Ok(other) => return self.job.ended(Some(format!("the peer answered {other:?}"))),
            Err(why) => return self.job.ended(Some(why)),
        };
        self.state.lock().lease = opened.lease;
        Reading::renew_later(&Arc::downgrade(&self), renewed_after(opened.ttl_us));
        if let Err(why) = self.copy(opened) {
            self.close(Err(why));
        }
    }

    fn copy(self: &Arc<Self>, opened: Opened) -> Result<(), String> {
        let Job { direct, tables, first_token, tokens, .. } = &*self.job;
        let from_to = (*first_token, *tokens);
        let moves = plan::moves(&direct.shared.cache, tables, from_to, self.heads, &opened);
        let moves = moves.map_err(|misfit| misfit.to_string())?;
        let bytes = moves.iter().map(|each| each.bytes).sum();
        let offered = Offered { peer: self.peer.clone(), opened };
        let (begun, reading) = (self.state.lock().begun.take(), Arc::clone(self));
        let arriving =
            Arriving { pages: Arc::clone(&self.job.pages), heads: self.heads.map(HeadRange::here) };
        let on_summed = move |summed: Result<Vec<u64>, NotCopied>| {
            reading.close(summed.map(|sums| Arrived { bytes, sums }).map_err(|why| why.to_string()));
        };
        let memory = Arc::clone(&self.job.direct.memory);
        memory.copy(&offered, moves, begun, arriving, Box::new(on_summed));
        Ok(())
    }

    /// While it goes on, the lease does.
    fn renew_later(reading: &Weak<Reading>, after: Duration) {
        let (weak, Some(reading)) = (Weak::clone(reading), reading.upgrade()) else { return };
        reading.job.direct.shared.tasks.post_at(Instant::now() + after, move || {
            let Some(reading) = weak.upgrade() else { return };
            let lease = reading.state.lock().lease;
            if lease != 0 {
                // Whether it lives is asked at the end.
                reading.ask(&Question::Renew { lease }, 0, |_, _| {});
                Reading::renew_later(&weak, after);
            }
        });
    }

    /// Nothing is copied any more: were these the bytes that were offered?
    fn close(self: Arc<Self>, arrived: Result<Arrived, String>) {
        let lease = std::mem::take(&mut self.state.lock().lease);
        let key = self.key;
        self.ask(&Question::Close { key, lease }, 0, |reading, answer| {
            let why = match (arrived, answer) {
                (Ok(arrived), Ok(Answer::Closed { lived: true, sums })) => reading.compare(&arrived, &sums),
                (Ok(_), Ok(_)) => Some("the lease ended before the copy had".into()),
                (Err(why), _) | (Ok(_), Err(why)) => Some(why),
            };
            reading.job.ended(why);
        });
    }

    /// Why what has arrived is not what was offered, if it is not.
    fn compare(&self, arrived: &Arrived, sums: &[u64]) -> Option<String> {
        let counters = &self.job.direct.shared.counters;
        if arrived.sums == sums {
            add(&counters.bytes_read, arrived.bytes);
            return None;
        }
        add(&counters.reads_corrupt, 1);
        let differs = arrived.sums.iter().zip(sums).position(|(here, there)| here != there);
        Some(format!("the bytes of layer {} are not those of the peer", differs.unwrap_or(sums.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_makes_nobody_renew_all_the_time_or_never() {
        let millis = |ttl_us| renewed_after(ttl_us).as_millis();
        assert_eq!([millis(0), millis(1_500_000), millis(u64::MAX)], [100, 500, 2000]);
    }
}
