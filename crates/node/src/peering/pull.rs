//! Pulling chunks from a peer into this node's memory: to lease them, to read them under that
//! lease into slots of the arena, to compare every byte's checksum, to make them visible, and to
//! give the lease back. This file knows these steps.

use super::lease_queue::NotNow;
use super::messages::{Answer, LEASE_IDS_MAX, Question, RemoteLease, TenantKey};
use super::{Puller, TELL_LIMIT_US};
use forebay_kv::ChunkId;
use forebay_net::{Agent, PeerError, PeerRegion};
use forebay_otlp::ActiveSpan;
use forebay_store::{NotCommitted, NotStored, Refused, Reservation, TenantId};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{End, RaisableClass, RegionId, Span, SpanPair, Transfer};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

const LEASE_US: u64 = 20_000_000;
/// How long a peer may take to lease them. One that is frozen is found by its silence; one whose
/// disk is busy is not. What it leases later is given back at once.
const LEASE_LIMIT_US: u64 = 30_000_000;
/// Why a chunk does not arrive that was forgotten on its way.
const FORGOTTEN: &str = "it was forgotten while it was on its way";

/// Chunks to be pulled from a peer, one behind the other in their sequence.
pub struct Pull {
    pub puller: Arc<Puller>,
    pub tenant: TenantId,
    pub ids: Vec<ChunkId>,
    /// The chunk before the first one.
    pub parent: Option<ChunkId>,
    pub class: RaisableClass,
    pub deadline_us: Option<u64>,
    /// Peers that may have them, the best one first.
    pub peers: Vec<String>,
    /// It was asked of the same peer before, since its slot went with that of the chunk before it.
    pub is_repeated: bool,
    /// Of the first chunk, if it is traced. Its stages: `lent`, when a peer has leased it;
    /// `queued`, when the mover has it; `posted`, when all its bytes are in place and acknowledged;
    /// `verified`, when it is visible.
    pub trace: Option<ActiveSpan>,
}

/// What a peer has leased. When the last part of it has ended, it is given back.
struct ReadLease {
    puller: Arc<Puller>,
    peer: String,
    lease: u64,
    region: Option<RegionId>,
    /// When the first chunk to come after has it renewed.
    renew_at_us: AtomicU64,
}

/// A chunk on its way. Dropped before it is there, it has failed: where the peer is at fault the
/// next one that may have it is asked.
struct Read {
    lease: Arc<ReadLease>,
    tenant: TenantId,
    id: ChunkId,
    slot: Option<Reservation>,
    sums: Vec<u32>,
    trace: Option<ActiveSpan>,
    why: String,
    on_failure: Retry,
    /// What asks for it again, once.
    retry: Option<Pull>,
}

/// What becomes of a chunk that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// Nothing.
    No,
    /// Another peer is asked.
    OtherPeer,
    /// The same one is, once: what was wrong was not this chunk.
    SamePeer,
}

impl Pull {
    /// Asks the best peer for a lease as soon as the chunk before has a slot; on any thread. Who
    /// waits for that slot must hold no lease: the peer may lease the chunk before only when that
    /// is given back.
    pub fn start(self) {
        let (puller, tenant) = (Arc::clone(&self.puller), self.tenant);
        match self.parent {
            Some(parent) => puller.when_placed(tenant, &parent, move || self.ask()),
            None => self.ask(),
        }
    }

    fn ask(mut self) {
        if self.peers.is_empty() {
            return self.fail("no peer that is said to have the chunk gives it");
        }
        let peer = self.peers.remove(0);
        self.ids.truncate(LEASE_IDS_MAX);
        let key = TenantKey::of(&self.puller.token, self.tenant);
        let within = self.trace.as_ref().map(ActiveSpan::context);
        let ask = Question::Lease(key, LEASE_US, self.class.get(), self.ids.clone(), within).encode();
        let Some(agent) = self.puller.agent() else { return self.fail("the node is shutting down") };
        let closed = self.puller.lease_queue.lock().open(&peer);
        let (puller, owner) = (Arc::clone(&self.puller), peer.clone());
        let on_late = move |bytes: Vec<u8>| leased_too_late(&puller, owner, &bytes);
        let waiting = Arc::new(Mutex::new(Some((self, peer.clone()))));
        let answered = Arc::clone(&waiting);
        let take = |waiting: &Mutex<Option<(Pull, String)>>| waiting.lock().take();
        let on_reply = move |reply: Result<Vec<u8>, PeerError>| {
            let Some((pull, peer)) = take(&answered) else { return };
            let told = reply.map_err(|why| why.to_string());
            let told = told.and_then(|bytes| Answer::decode(&bytes).map_err(|bad| bad.to_string()));
            let puller = Arc::clone(&pull.puller);
            // Regions are made by a thread that may wait for the mover.
            puller.later(move || match told {
                Ok(Answer::Leased(leased)) if !leased.chunks.is_empty() => pull.leased(peer, leased),
                Ok(Answer::NotNow) => pull.not_now(peer, closed),
                _ => pull.denied(&peer),
            });
        };
        let called = agent.call_and_hear(&peer, ask, LEASE_LIMIT_US, on_reply, on_late);
        if called.is_err()
            && let Some((pull, peer)) = take(&waiting)
        {
            pull.denied(&peer);
        }
    }

    /// The peer leases nothing: it, or the directory, was wrong. The next one is asked.
    fn denied(self, peer: &str) {
        self.puller.denied(self.tenant, &self.ids, peer);
        self.puller.close(peer);
        self.start();
    }

    /// The peer has leased as much as it may, which is no reason to think that it has not got them.
    fn not_now(mut self, peer: String, closed: u64) {
        self.peers.insert(0, peer.clone());
        let puller = Arc::clone(&self.puller);
        let then = puller.lease_queue.lock().not_now(&peer, closed, self);
        match then {
            NotNow::Wait => {}
            NotNow::Again(pulls) => pulls.into_iter().for_each(Pull::start),
            NotNow::OtherPeer(pulls) => pulls.into_iter().for_each(|mut pull| {
                pull.peers.remove(0);
                pull.start();
            }),
        }
    }

    /// Those chunks that were not leased along with the others are asked for when these are given
    /// back.
    fn put_off(&mut self, peer: &str, leased: usize) {
        let ids = self.ids.split_off(leased.min(self.ids.len()));
        if ids.is_empty() {
            return;
        }
        let mut rest = self.of(ids, self.ids.last().copied());
        rest.peers.insert(0, peer.to_owned());
        self.puller.lease_queue.lock().wait(peer, rest);
    }

    /// The same of other chunks, without its trace.
    fn of(&self, ids: Vec<ChunkId>, parent: Option<ChunkId>) -> Pull {
        let (puller, peers, class) = (Arc::clone(&self.puller), self.peers.clone(), self.class.clone());
        let Pull { tenant, deadline_us, is_repeated, .. } = *self;
        Pull { puller, tenant, ids, parent, class, deadline_us, peers, is_repeated, trace: None }
    }

    fn fail(mut self, why: &str) {
        fail(&mut self.trace, why);
        for id in &self.ids {
            self.puller.ended(self.tenant, id, Err(why.to_owned()));
        }
    }

    /// The peer leases chunks: each goes into a slot of its own.
    fn leased(mut self, peer: String, leased: RemoteLease) {
        let puller = Arc::clone(&self.puller);
        let mut trace = self.trace.take();
        if let Some(trace) = &mut trace {
            trace.note("peer", &peer);
            trace.passed("lent");
        }
        self.put_off(&peer, leased.chunks.len());
        let (key, generation, len) = leased.region;
        let of_peer = PeerRegion { key, generation, len };
        let region = puller.agent().map(|agent| agent.region(&peer, of_peer, leased.lease));
        let (region, why) = match region {
            Some(Ok(region)) => (Some(region), String::new()),
            Some(Err(error)) => (None, error.to_string()),
            None => (None, "the node is shutting down".to_owned()),
        };
        let lease = leased.lease;
        let renew_at_us = AtomicU64::new(puller.store_mover().now_us() + LEASE_US / 2);
        let lease = ReadLease { puller: Arc::clone(&puller), peer, lease, region, renew_at_us };
        let lease = Arc::new(lease);
        let mut parent = self.parent;
        let mut chunks = leased.chunks.into_iter();
        for id in &self.ids {
            let (before, mut trace) = (parent.replace(*id), trace.take());
            let Some((chunk, region)) = chunks.next().zip(region) else {
                let why = format!("not lent by {}: {why}", lease.peer);
                fail(&mut trace, &why);
                puller.ended(self.tenant, id, Err(why));
                continue;
            };
            match puller.store.reserve_over(self.tenant, *id, before, &chunk.shape) {
                // Nothing has been written to the slot.
                Ok(Some(_)) if puller.is_forgotten(self.tenant, id) => {
                    fail(&mut trace, FORGOTTEN);
                    puller.ended(self.tenant, id, Err(FORGOTTEN.into()));
                }
                Ok(Some(slot)) => {
                    let why = "the mover takes nothing in".to_owned();
                    let (lease, tenant, sums) = (Arc::clone(&lease), self.tenant, chunk.sums);
                    let (on_failure, retry) = (Retry::No, Some(self.of(vec![*id], before)));
                    let read =
                        Read { lease, tenant, id: *id, slot: None, sums, trace, why, on_failure, retry };
                    self.read(read, slot, region, chunk.offset_bytes);
                    puller.placed(self.tenant, id);
                }
                Ok(None) => puller.is_here(self.tenant, id),
                Err(error) => {
                    if matches!(error, NotStored::Refused(Refused::TooLarge { .. })) {
                        puller.does_not_fit(self.tenant, id);
                    }
                    fail(&mut trace, &error.to_string());
                    puller.ended(self.tenant, id, Err(error.to_string()));
                }
            }
        }
    }

    /// Reads a chunk that starts at `from` in the peer's region.
    fn read(&self, mut read: Read, slot: Reservation, region: RegionId, mut from: u64) {
        let pair = |to: Span| {
            let pair = SpanPair::new(Span::new(region, from, to.len), to);
            from += to.len;
            pair
        };
        let pairs = slot.layers().into_iter().map(pair).collect();
        let transfer = Transfer { pairs, class: self.class.get(), deadline_us: self.deadline_us };
        read.slot = Some(slot);
        read.passed("queued");
        // What the mover does not take in drops the read.
        let _ = self.class.submit(transfer, move |end| read.moved(end));
    }
}

impl Read {
    fn passed(&mut self, stage: &'static str) {
        if let Some(trace) = &mut self.trace {
            trace.passed(stage);
        }
    }

    /// The bytes are there, or not; where the mover tells of ends.
    fn moved(mut self, end: End) {
        let puller = Arc::clone(&self.lease.puller);
        match end {
            // Checksums take too long for this thread.
            End::Done { .. } => {
                self.passed("posted");
                self.lease.renew_if_due();
                puller.later(move || self.check());
            }
            failed => {
                self.why = match &failed {
                    End::Failed(failure) => {
                        self.on_failure = Retry::OtherPeer;
                        failure.reason.to_string()
                    }
                    _ => "cancelled".to_owned(),
                };
                if let Some(slot) = self.slot.take() {
                    slot.abandon(&failed);
                }
                // Giving a lease back may wait for the mover.
                puller.later(move || drop(self));
            }
        }
    }

    /// Compares what arrived with what its owner said.
    fn check(mut self) {
        let Some(slot) = self.slot.take() else { return };
        let ReadLease { puller, peer, .. } = &*self.lease;
        if slot.checksums() != self.sums {
            puller.is_wrong(self.tenant, &self.id, peer);
            "other bytes came than were lent".clone_into(&mut self.why);
            self.on_failure = Retry::OtherPeer;
            return;
        }
        match slot.commit(&self.sums) {
            Ok(()) => {
                self.why.clear();
                self.passed("verified");
            }
            Err(error) => {
                // The chunk before it has failed, and took this one along.
                let is_taken_along =
                    error == NotCommitted::Deleted && !puller.is_forgotten(self.tenant, &self.id);
                self.on_failure = if is_taken_along { Retry::SamePeer } else { Retry::No };
                self.why = error.to_string();
            }
        }
    }

    /// The pull of this chunk from another peer, if it may be asked of one.
    fn again(&mut self) -> Option<Pull> {
        let mut pull = self.retry.take()?;
        match self.on_failure {
            Retry::SamePeer if !pull.is_repeated => pull.peers.insert(0, self.lease.peer.clone()),
            Retry::OtherPeer if !pull.peers.is_empty() => {}
            _ => return None,
        }
        pull.is_repeated = self.on_failure == Retry::SamePeer;
        pull.trace = self.trace.take();
        Some(pull)
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        // The slot goes before anybody is told that it has failed.
        self.slot = None;
        let why = std::mem::take(&mut self.why);
        if let Some(pull) = self.again() {
            self.lease.puller.displaced(self.tenant, &self.id, &self.lease.peer, &why);
            return pull.start();
        }
        if !why.is_empty() {
            fail(&mut self.trace, &why);
        }
        let outcome = if why.is_empty() { Ok(()) } else { Err(why) };
        self.lease.puller.ended(self.tenant, &self.id, outcome);
    }
}

impl ReadLease {
    /// A chunk has come: has the lease live on if half of its time is over and others are still on
    /// their way. A pull of which no chunk comes for so long is of no use.
    fn renew_if_due(self: &Arc<Self>) {
        let now_us = self.puller.store_mover().now_us();
        let due_us = self.renew_at_us.load(Ordering::Relaxed);
        if !is_due(now_us, due_us, Arc::strong_count(self) - 1) {
            return;
        }
        self.renew_at_us.store(now_us + LEASE_US / 2, Ordering::Relaxed);
        let (agent, peer, lease) = (Weak::clone(&self.puller.agent), self.peer.clone(), self.lease);
        self.puller.later(move || {
            if let Some(agent) = agent.upgrade() {
                // Where it is not renewed the reads that are left fail.
                let _ = agent.call(&peer, Question::Renew(lease, LEASE_US).encode(), TELL_LIMIT_US, |_| {});
            }
        });
    }
}

/// Whether a lease is to be renewed: its time has come, and `others` still read under it.
fn is_due(now_us: u64, due_us: u64, others: usize) -> bool {
    now_us >= due_us && others > 0
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        let ReadLease { puller, peer, lease, region, .. } = self;
        let (agent, region, peer, lease) = (Weak::clone(&puller.agent), *region, peer.clone(), *lease);
        let puller = Arc::clone(puller);
        self.puller.later(move || match agent.upgrade() {
            Some(agent) => give_back(&puller, &agent, &peer, lease, region),
            None => puller.close(&peer),
        });
    }
}

fn fail(trace: &mut Option<ActiveSpan>, why: &str) {
    if let Some(trace) = trace {
        trace.fail(why);
    }
}

/// The peer has answered when nobody waited any more: what it has leased goes back.
fn leased_too_late(puller: &Puller, peer: String, answer: &[u8]) {
    let Ok(Answer::Leased(RemoteLease { lease, .. })) = Answer::decode(answer) else { return };
    let agent = Weak::clone(&puller.agent);
    puller.later(move || {
        if let Some(agent) = agent.upgrade() {
            // One that does not hear it ends the lease in its time.
            let _ = agent.call(&peer, Question::Return(lease).encode(), TELL_LIMIT_US, |_| {});
        }
    });
}

fn give_back(puller: &Arc<Puller>, agent: &Agent, peer: &str, lease: u64, region: Option<RegionId>) {
    if let Some(region) = region {
        // One that a lost operation still uses stays until the mover ends.
        let _ = agent.forget_region(region);
    }
    let (closer, of_peer) = (Arc::clone(puller), peer.to_owned());
    // A lease of which the peer does not hear that it is over ends by itself.
    let told =
        agent.call(peer, Question::Return(lease).encode(), TELL_LIMIT_US, move |_| closer.close(&of_peer));
    if told.is_err() {
        puller.close(peer);
    }
}

#[cfg(test)]
mod tests {
    use super::is_due;

    #[test]
    fn a_lease_is_renewed_when_its_time_has_come_and_something_still_reads_under_it() {
        for (now_us, due_us, others, due) in [(9, 10, 3, false), (10, 10, 3, true), (10, 10, 0, false)] {
            assert_eq!(is_due(now_us, due_us, others), due, "{now_us} {due_us} {others}");
        }
    }
}
