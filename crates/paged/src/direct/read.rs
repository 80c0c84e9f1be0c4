//! The decoder's side: one read of an offer. It opens the offer, copies what is wanted, and closes
//! it. It ends once, as loads do, when nothing of it touches a page any more: with all tokens, or
//! with none and the reason.

use super::memory::{Begun, Offered};
use super::message::{Answer, Digest, Key, Opened, Question};
use super::plan::Wanted;
use super::{Direct, peer_of, plan};
use crate::access::Accessing;
use crate::cache::BadValue;
use crate::errors::{NotBegun, NotCopied};
use crate::load::LoadEnd;
use crate::page_tables::PageTables;
use crate::stats::add;
use crate::thread_pool::Urgency;
use forebay_net::PeerError;
use forebay_transfer::lock::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the other engine may take for an answer. It moves no byte for that.
pub const ANSWER_LIMIT_US: u64 = 3_000_000;
/// How long after the last read the memory of peers is let go of.
const REST: Duration = Duration::from_secs(3);

/// What is to be read.
#[derive(Debug)]
pub struct ReadRequest {
    /// A number of which no load is under way.
    pub job: u64,
    /// What the other engine said of itself.
    pub metadata: Vec<u8>,
    pub key: Key,
    pub digest: Digest,
    /// Where the pages go, from `first_token` of the sequence on; -1 where one is not wanted.
    pub tables: PageTables,
    pub first_token: u64,
    pub tokens: u64,
}

struct Reading {
    direct: Arc<Direct>,
    request: ReadRequest,
    /// Its own pages that are filled.
    pages: Vec<Vec<u64>>,
    peer: String,
    begun_at: Instant,
    state: Mutex<State>,
}

/// What a read has copied, with a checksum of each layer.
struct Arrived {
    bytes: u64,
    sums: Vec<u64>,
}

struct State {
    begun: Begun,
    /// Given back last.
    accessing: Option<Accessing>,
    /// 0: none.
    lease: u64,
}

/// Begins a read.
pub fn begin(direct: &Arc<Direct>, request: ReadRequest, stream: u64) -> Result<(), NotBegun> {
    let shared = &direct.shared;
    let job = request.job;
    request.tables.check(&shared.cache, request.tokens, true)?;
    let accessing = shared.access.enter().ok_or(NotBegun::Closed)?;
    let begun = direct.memory.begin(stream)?;
    if !shared.jobs.begin_direct(job) {
        return Err(BadValue::new("job", job, "a number of which no load is under way").into());
    }
    add(&shared.counters.reads, 1);
    let state = Mutex::new(State { begun, accessing: Some(accessing), lease: 0 });
    let agent = direct.agent();
    let peer = agent.as_ref().map(|agent| peer_of(agent, &request.metadata));
    let (peer, why) = match peer {
        Some(Ok(peer)) => (peer, None),
        Some(Err(why)) => (String::new(), Some(why)),
        None => (String::new(), Some("the cache is closed".into())),
    };
    let wanted = Wanted::of(&shared.cache, &request.tables, request.first_token, request.tokens);
    let Wanted { blocks, pages } = wanted;
    let open = Question::Open { key: request.key, digest: request.digest, wanted: blocks };
    let (direct, begun_at) = (Arc::clone(direct), Instant::now());
    let reading = Arc::new(Reading { direct, request, pages, peer, begun_at, state });
    match why {
        Some(why) => reading.end(Some(why)),
        None => reading.ask(&open, |reading, answer| reading.opened(answer)),
    }
    Ok(())
}

/// How long after it was granted or renewed a lease is renewed: well before its end. The peer's
/// number is not trusted.
fn renewed_after(ttl_us: u64) -> Duration {
    Duration::from_micros(ttl_us / 3).clamp(Duration::from_millis(100), Duration::from_secs(2))
}

impl Reading {
    /// Asks the other engine. `then` gets the answer on a thread that may take its time.
    fn ask(
        self: &Arc<Self>,
        question: &Question,
        then: impl FnOnce(Arc<Reading>, Result<Answer, String>) + Send + 'static,
    ) {
        let waiting = Arc::new(Mutex::new(Some((Arc::clone(self), then))));
        let answered = Arc::clone(&waiting);
        let on_reply = move |reply: Result<Vec<u8>, PeerError>| {
            let Some((reading, then)) = answered.lock().take() else { return };
            let said = reply.map_err(|why| why.to_string());
            let said = said.and_then(|bytes| Answer::decode(&bytes).map_err(|bad| bad.to_string()));
            let tasks = Arc::clone(&reading.direct.shared.tasks);
            tasks.post(Urgency::Load, move || then(reading, said));
        };
        let called = match self.direct.agent() {
            Some(agent) => agent
                .call(&self.peer, question.encode(), ANSWER_LIMIT_US, on_reply)
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
            Ok(other) => return self.end(Some(format!("the peer answered {other:?}"))),
            Err(why) => return self.end(Some(why)),
        };
        self.state.lock().lease = opened.lease;
        Reading::renew_later(&Arc::downgrade(&self), renewed_after(opened.ttl_us));
        if let Err(why) = self.copy(opened) {
            self.close(Err(why));
        }
    }

    fn copy(self: &Arc<Self>, opened: Opened) -> Result<(), String> {
        let ReadRequest { tables, first_token, tokens, .. } = &self.request;
        let cache = &self.direct.shared.cache;
        let moves = plan::moves(cache, tables, *first_token, *tokens, &opened);
        let moves = moves.map_err(|misfit| misfit.to_string())?;
        let bytes = moves.iter().map(|each| each.bytes).sum();
        let offered = Offered { peer: self.peer.clone(), opened };
        let (begun, reading) = (self.state.lock().begun.take(), Arc::clone(self));
        let on_copied = Box::new(move |copied: Result<(), NotCopied>| match copied {
            Ok(()) => reading.sum(bytes),
            Err(why) => reading.close(Err(why.to_string())),
        });
        self.direct.memory.copy(&offered, moves, begun, on_copied);
        Ok(())
    }

    /// Sums up what has arrived.
    fn sum(self: Arc<Self>, bytes: u64) {
        let tasks = Arc::clone(&self.direct.shared.tasks);
        tasks.post(Urgency::Load, move || {
            let reading = Arc::clone(&self);
            let on_summed = move |summed: Result<Vec<u64>, NotCopied>| {
                reading.close(summed.map(|sums| Arrived { bytes, sums }).map_err(|why| why.to_string()));
            };
            self.direct.memory.sum(&self.pages, Box::new(on_summed));
        });
    }

    /// While it goes on, the lease does.
    fn renew_later(reading: &Weak<Reading>, after: Duration) {
        let (weak, Some(reading)) = (Weak::clone(reading), reading.upgrade()) else { return };
        reading.direct.shared.tasks.post_at(Instant::now() + after, move || {
            let Some(reading) = weak.upgrade() else { return };
            let lease = reading.state.lock().lease;
            if lease != 0 {
                // Whether it lives is asked at the end.
                reading.ask(&Question::Renew { lease }, |_, _| {});
                Reading::renew_later(&weak, after);
            }
        });
    }

    /// Nothing is copied any more: were these the bytes that were offered?
    fn close(self: Arc<Self>, arrived: Result<Arrived, String>) {
        let lease = std::mem::take(&mut self.state.lock().lease);
        let key = self.request.key;
        self.ask(&Question::Close { key, lease }, |reading, answer| {
            let why = match (arrived, answer) {
                (Ok(arrived), Ok(Answer::Closed { lived: true, sums })) => reading.compare(&arrived, &sums),
                (Ok(_), Ok(_)) => Some("the lease ended before the copy had".into()),
                (Err(why), _) | (Ok(_), Err(why)) => Some(why),
            };
            reading.end(why);
        });
    }

    /// Why what has arrived is not what was offered, if it is not.
    fn compare(&self, arrived: &Arrived, sums: &[u64]) -> Option<String> {
        let counters = &self.direct.shared.counters;
        if arrived.sums == sums {
            add(&counters.bytes_read, arrived.bytes);
            return None;
        }
        add(&counters.reads_corrupt, 1);
        let differs = arrived.sums.iter().zip(sums).position(|(here, there)| here != there);
        Some(format!("the bytes of layer {} are not those of the peer", differs.unwrap_or(sums.len())))
    }

    fn end(&self, why: Option<String>) {
        let (shared, job) = (&self.direct.shared, self.request.job);
        let tokens = if why.is_none() { self.request.tokens } else { 0 };
        add(&shared.counters.read_us, self.begun_at.elapsed().as_micros() as u64);
        if let Some(why) = &why {
            add(&shared.counters.reads_failed, 1);
            shared.log.short(job, 0, self.request.tokens, why);
        }
        drop(self.state.lock().accessing.take());
        let (direct, reads) = (Arc::downgrade(&self.direct), shared.counters.read().reads);
        shared.tasks.post_at(Instant::now() + REST, move || {
            if let Some(direct) = direct.upgrade()
                && direct.shared.counters.read().reads == reads
            {
                direct.memory.rest();
            }
        });
        shared.jobs.end_direct(LoadEnd { job, tokens, why });
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
