//! One client of the node, answered: every request becomes a call of the store or of the peers, and what comes of it an
//! answer. This file is glue between words, what the client holds, and the store; it must never wait for a disk or a peer.

use super::outbox::Outbox;
use super::session::Session;
use super::traces::Traces;
use super::watched::Watched;
use crate::elsewhere::Wanted;
use crate::node::Shared;
use forebay_client::protocol::answer::{Answer, Found, Leased, Lent, Refusal};
use forebay_client::protocol::frame::{Asked, UNASKED};
use forebay_client::protocol::request::{IDS_MAX, Request};
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, Left, Loan, NotCommitted, NotStored, TenantId};
use forebay_transfer::Class;
use parking_lot::{Mutex, MutexGuard};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of checksums and places in the answer to a lease at most. Chunks beyond are told one by one.
const LENT_BYTES_MAX: usize = 4 << 20;

/// Bytes of a chunk in an answer beside its checksums.
const LENT_BYTES: usize = 16;

/// A client at work.
#[derive(Debug)]
pub struct Desk {
    node: Arc<Shared>,
    session: Mutex<Session>,
    traces: Traces,
    watches: AtomicBool,
    watched: Mutex<Watched>,
    pub outbox: Outbox,
    pub tenant: TenantId,
    pub name: String,
}

/// What the client's thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Take the next request.
    Go,
    /// The client goes, and nothing of it writes the arena.
    Bye,
    /// The client does not speak the protocol.
    HangUp,
}

impl Desk {
    /// A client that holds nothing.
    pub fn new(node: Arc<Shared>, socket: OwnedFd, tenant: TenantId, name: String) -> io::Result<Desk> {
        let session = Mutex::new(Session::new(node.limits.session));
        let traces = Traces::new(Arc::clone(&node.spans), &name);
        let (watches, watched, outbox) = (AtomicBool::new(false), Mutex::default(), Outbox::new(socket)?);
        Ok(Desk { node, session, traces, watches, watched, outbox, tenant, name })
    }

    /// A panic under the lock leaves what the client holds; it is freed with the rest.
    pub fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock()
    }

    /// Answers from any thread.
    fn answer(&self, asked: Asked, answer: &Answer) {
        let refused = match answer {
            Answer::Refused(_, why) => Some(why.as_str()),
            _ => None,
        };
        self.traces.end(asked.number, refused);
        self.outbox.put(&answer.encode(asked));
    }

    fn refuse(&self, asked: Asked, refusal: Refusal, why: impl ToString) {
        self.answer(asked, &Answer::Refused(refusal, why.to_string()));
    }

    /// Takes a request.
    pub fn take(self: &Arc<Self>, asked: Asked, request: Request) -> Next {
        if let Some(name) = request.traced_as() {
            self.traces.begin(asked.number, name);
        }
        match request {
            Request::Hello(_) => {
                self.refuse(asked, Refusal::BadWords, "a second hello");
                return Next::HangUp;
            }
            Request::Lookup(ids) => self.lookup(asked, &ids),
            Request::Lease { ttl_us, to_load, ids } => self.lease(asked, &ids, ttl_us, to_load),
            Request::Bring { lease, chunk, class, within_us } => {
                self.bring(asked, lease, chunk as usize, class, within_us);
            }
            Request::Renew { ttl_us, leases } => self.renew(asked, leases, ttl_us),
            Request::Release(leases) => {
                leases.iter().for_each(|lease| self.session().release(*lease));
                self.node.let_go();
            }
            Request::Reserve { id, parent, shape } => self.reserve(asked, id, parent, &shape),
            Request::Commit { slot, sums } => self.commit(asked, slot, &sums),
            Request::Abort { slot } => {
                // One that is not reserved is not.
                let slot = self.session().take_slot(slot);
                drop(slot);
                self.node.let_go();
            }
            Request::Corrupt { lease, chunk } => self.check(lease, chunk as usize),
            Request::Used { chunk_bytes, ids } => self.node.store.used(self.tenant, &ids, chunk_bytes),
            Request::Watch(ids) => self.watch(asked, &ids),
            Request::Stat => self.answer(asked, &Answer::Stat(self.node.stat())),
            Request::Ping => self.answer(asked, &Answer::Pong),
            Request::Bye => return Next::Bye,
        }
        Next::Go
    }

    fn lookup(self: &Arc<Self>, asked: Asked, ids: &[ChunkId]) {
        let (in_memory, on_disk) = self.node.store.locate(ids);
        let here = in_memory + on_disk;
        let (in_memory, on_disk) = (in_memory as u32, on_disk as u32);
        let found =
            move |on_peers: usize| Answer::Found(Found { in_memory, on_disk, on_peers: on_peers as u32 });
        match self.node.elsewhere() {
            Some(elsewhere) if here < ids.len() => {
                let desk = Arc::clone(self);
                let on_found = move |on_peers| desk.answer(asked, &found(on_peers));
                elsewhere.look(self.tenant, &ids[here..], Box::new(on_found));
            }
            _ => self.answer(asked, &found(0)),
        }
    }

    fn lease(&self, asked: Asked, ids: &[ChunkId], ttl_us: u64, to_load: bool) {
        if self.node.is_draining() {
            return self.refuse(asked, Refusal::Draining, "the node is shutting down");
        }
        if let Err(limit) = self.session().room_for_lease() {
            return self.refuse(asked, Refusal::Limit, limit);
        }
        let store = &self.node.store;
        let ttl_us = ttl_us.min(self.node.limits.lease_us);
        let lease = if to_load {
            store.lease(self.tenant, ids, ttl_us)
        } else {
            store.hold(self.tenant, ids, ttl_us)
        };
        let (here, in_memory) = (lease.len(), lease.in_memory());
        let on_peers = self.said_elsewhere(&ids[here..]);
        if to_load {
            self.node.count_hits(in_memory, here - in_memory, on_peers);
        }
        if here + on_peers == 0 {
            return self.answer(asked, &Answer::Leased(Leased::default()));
        }
        let (mut loans, mut bytes) = (Vec::new(), 0);
        let lent_now = if to_load { in_memory } else { 0 };
        for chunk in 0..lent_now {
            let Ok(loan) = store.lend(&lease, chunk) else { break };
            bytes += LENT_BYTES + 4 * loan.sums().len();
            if bytes > LENT_BYTES_MAX {
                break;
            }
            loans.push(loan);
        }
        let lent = lent_of(&loans);
        let expires_us = self.node.now_us().saturating_add(ttl_us);
        let name = self.session().grant(lease, &ids[..here + on_peers], loans, expires_us);
        let leased = Leased {
            lease: name,
            ttl_us,
            in_memory: in_memory as u32,
            on_disk: (here - in_memory) as u32,
            on_peers: on_peers as u32,
            lent,
        };
        self.answer(asked, &Answer::Leased(leased));
    }

    fn bring(self: &Arc<Self>, asked: Asked, name: u64, chunk: usize, class: Class, within_us: Option<u64>) {
        let mut session = self.session();
        let held = match session.lease(name, chunk) {
            Ok(held) => held,
            Err(error) => return self.refuse(asked, Refusal::Gone, error),
        };
        if let Some(loan) = held.loan(chunk) {
            return self.answer(asked, &Answer::Brought(lent(loan)));
        }
        let (lease, ids) = (Arc::clone(&held.lease), Arc::clone(&held.ids));
        if let Err(limit) = session.begin_load() {
            return self.refuse(asked, Refusal::Limit, limit);
        }
        drop(session);
        let deadline_us = within_us.map(|within_us| self.node.now_us().saturating_add(within_us));
        let desk = Arc::clone(self);
        if chunk < lease.len() {
            let kept = Arc::clone(&lease);
            self.node.store.bring(&lease, chunk, class, deadline_us, move |outcome| {
                drop(kept);
                desk.brought(asked, name, chunk, outcome.map_err(|error| error.to_string()));
            });
            return;
        }
        let on_end = move |outcome| desk.brought(asked, name, chunk, outcome);
        let Some(elsewhere) = self.node.elsewhere() else { return on_end(Err("there are no peers".into())) };
        let parent = chunk.checked_sub(1).map(|before| ids[before]);
        let wanted = Wanted { tenant: self.tenant, ids: ids[chunk..].to_vec(), parent, class, deadline_us };
        elsewhere.pull(wanted, Box::new(on_end));
    }

    fn said_elsewhere(&self, ids: &[ChunkId]) -> usize {
        if ids.is_empty() {
            return 0;
        }
        self.node.elsewhere().map_or(0, |elsewhere| elsewhere.said(self.tenant, ids))
    }

    /// A chunk has come into memory, or not; on any thread.
    fn brought(&self, asked: Asked, name: u64, chunk: usize, outcome: Result<Loan, String>) {
        let mut session = self.session();
        session.end_load();
        let answer = match outcome.map(|loan| session.lend(name, chunk, loan).map(lent)) {
            Ok(Ok(lent)) => Answer::Brought(lent),
            Ok(Err(error)) => Answer::Refused(Refusal::Gone, error.to_string()),
            Err(why) => Answer::Refused(Refusal::NotRead, why),
        };
        drop(session);
        self.answer(asked, &answer);
    }

    fn renew(&self, asked: Asked, mut leases: Vec<u64>, ttl_us: u64) {
        let ttl_us = ttl_us.min(self.node.limits.lease_us);
        let expires_us = self.node.now_us().saturating_add(ttl_us);
        let mut session = self.session();
        leases.retain(|name| !session.renew(*name, expires_us, |lease| lease.renew(ttl_us).is_ok()));
        drop(session);
        self.answer(asked, &Answer::Renewed(leases));
    }

    fn reserve(&self, asked: Asked, id: ChunkId, parent: Option<ChunkId>, shape: &ChunkShape) {
        if self.node.is_draining() {
            return self.refuse(asked, Refusal::Draining, "the node is shutting down");
        }
        if let Err(limit) = self.session().room_for_slot() {
            return self.refuse(asked, Refusal::Limit, limit);
        }
        let slot = match self.node.store.reserve(self.tenant, id, parent, shape) {
            Ok(Some(slot)) => slot,
            Ok(None) => return self.answer(asked, &Answer::Here),
            Err(NotStored::Refused(refused)) => return self.refuse(asked, Refusal::NotTaken, refused),
            Err(error) => return self.refuse(asked, Refusal::NotTaken, error),
        };
        let offset_bytes = slot.offset_bytes();
        let reserved = self.session().reserve(slot);
        match reserved {
            Ok(slot) => self.answer(asked, &Answer::Reserved { slot, offset_bytes }),
            Err(error) => self.refuse(asked, Refusal::Gone, error),
        }
    }

    fn commit(&self, asked: Asked, slot: u64, sums: &[u32]) {
        let taken = self.session().take_slot(slot);
        match taken.map(|slot| slot.commit(sums)) {
            Ok(Ok(())) => self.answer(asked, &Answer::Committed(true)),
            Ok(Err(NotCommitted::Deleted)) => self.answer(asked, &Answer::Committed(false)),
            Ok(Err(error @ NotCommitted::Sums { .. })) => self.refuse(asked, Refusal::NotTaken, error),
            Err(error) => self.refuse(asked, Refusal::Gone, error),
        }
        self.node.let_go();
    }

    /// A client found wrong bytes. Only what is wrong here too is dropped: a client's own memory may be at fault.
    fn check(&self, name: u64, chunk: usize) {
        let session = self.session();
        let lent = session.lease(name, chunk).ok().and_then(|held| held.loan(chunk));
        if lent.is_some_and(|loan| !loan.check()) {
            self.node.count_corrupt();
        }
    }

    /// Whether the client watches anything.
    pub fn watches(&self) -> bool {
        self.watches.load(Ordering::Acquire)
    }

    /// It is answered before the next chunk is said to be gone: the client takes both in order.
    fn watch(&self, asked: Asked, ids: &[ChunkId]) {
        self.watches.store(true, Ordering::Release);
        if let Err(error) = self.node.tell_who_watches() {
            return self.refuse(asked, Refusal::Limit, error);
        }
        let mut watched = self.watched.lock();
        let absent = watched.watch(ids, |id| self.has(id));
        self.answer(asked, &Answer::Watched(absent));
    }

    /// Chunks may have gone; on the store's thread.
    pub fn tell_left(&self, left: Left<'_>) {
        let mut watched = self.watched.lock();
        let gone = watched.take_gone(left, |id| self.has(id));
        for part in gone.chunks(IDS_MAX) {
            self.outbox.put(&Answer::Gone(part.to_vec()).encode(UNASKED));
        }
    }

    /// The client watches nothing any more.
    pub fn unwatch(&self) {
        self.watches.store(false, Ordering::Release);
        self.watched.lock().clear();
    }

    fn has(&self, id: &ChunkId) -> bool {
        self.node.store.lookup(std::slice::from_ref(id)) > 0
    }

    /// Ends the leases whose time has come, and says in how many microseconds the next one ends.
    pub fn expire(&self) -> Option<u64> {
        let now_us = self.node.now_us();
        let mut session = self.session();
        let before = session.holds();
        session.expire(now_us);
        let (after, next) = (session.holds(), session.next_expiry_us());
        drop(session);
        if after < before {
            self.node.let_go();
        }
        next.map(|expires_us| expires_us.saturating_sub(now_us) + 1)
    }
}

fn lent(loan: &Loan) -> Lent {
    Lent {
        offset_bytes: loan.offset_bytes(),
        shape: Arc::new(loan.shape().clone()),
        sums: loan.sums().to_vec(),
    }
}

/// Chunks of the same shape share it.
fn lent_of(loans: &[Loan]) -> Vec<Lent> {
    let mut shape: Option<Arc<ChunkShape>> = None;
    let mut lent = Vec::with_capacity(loans.len());
    for loan in loans {
        let same = shape.take().filter(|shape| **shape == *loan.shape());
        let shared = same.unwrap_or_else(|| Arc::new(loan.shape().clone()));
        let (offset_bytes, sums) = (loan.offset_bytes(), loan.sums().to_vec());
        lent.push(Lent { offset_bytes, shape: Arc::clone(&shared), sums });
        shape = Some(shared);
    }
    lent
}
