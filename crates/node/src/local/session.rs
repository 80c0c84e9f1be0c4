//! The session of a client: every request becomes a call of the store or of other nodes, and what
//! comes of it an answer. It never waits for a disk or a peer.

use super::bring::{BringRequest, BroughtEnd};
use super::client::Client;
use super::clients::Clients;
use super::control::control;
use super::described::Described;
use super::explain::{explain, name_chunks};
use super::leases::ClientLeases;
use super::traces::Traces;
use crate::peering::PullRequest;
use forebay_client::protocol::answer::{Answer, ChunkPlace, Commitment, Found, Leased, Refusal, Reservation};
use forebay_client::protocol::explain::{Description, Prompt};
use forebay_client::protocol::frame::Asked;
use forebay_client::protocol::request::{Filled, NewChunk, Request};
use forebay_kv::ChunkId;
use forebay_store::{
    ChunkShape, LayerGuard, Lease, NotCommitted, NotFetched, NotStored, ReadGuard, TenantId,
};
use forebay_transfer::lock::{Mutex, MutexGuard};
use forebay_transfer::{Class, TraceContext};
use std::sync::Arc;

/// Bytes of checksums and places in the answer to a lease at most. Chunks beyond are told one by
/// one.
const PLACES_BYTES_MAX: usize = 4 << 20;

/// Chunks behind one that is pulled that are named along with it.
const PULLED_MAX: usize = 64;

/// Bytes of a chunk in an answer beside its checksums.
const PLACE_BYTES: usize = 16;

#[derive(Debug)]
pub struct Session {
    pub clients: Arc<Clients>,
    pub client: Arc<Client>,
    /// Root or the node's own user.
    is_operator: bool,
    traces: Traces,
    /// The tenant for which the request with this number is, which comes next.
    announced: Mutex<Option<(u64, TenantId)>>,
}

/// A chunk that a client wants to lie in the arena.
enum Bringing {
    /// It does.
    There(ChunkPlace),
    /// It has to come there; chunks beyond the lease's, which are named behind it, from a peer.
    Fetch(TenantId, Arc<Lease>, Arc<[ChunkId]>),
}

/// Where a layer lies in the arena, and what its bytes sum up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPlace {
    pub offset_bytes: u64,
    pub bytes: u64,
    pub checksum: u32,
}

pub type LayerEnd = Result<LayerPlace, (Refusal, String)>;

/// What the client's thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Take the next request.
    Go,
    /// Make a ring for the client, and tell it.
    OpenRing,
    /// The client goes, and nothing of it writes the arena.
    Bye,
    /// The client does not speak the protocol.
    HangUp(&'static str),
}

impl Session {
    pub fn new(clients: Arc<Clients>, client: Arc<Client>, is_operator: bool) -> Session {
        let traces = Traces::new(Arc::clone(&clients.spans), &client.name);
        Session { clients, client, is_operator, traces, announced: Mutex::default() }
    }

    fn leases(&self) -> MutexGuard<'_, ClientLeases> {
        self.client.leases()
    }

    /// Answers from any thread.
    fn answer(&self, asked: Asked, answer: &Answer) {
        let refused = match answer {
            Answer::Refused(_, why) => Some(why.as_str()),
            _ => None,
        };
        self.traces.end(asked.number, refused);
        self.client.answers.put(&answer.encode(asked));
    }

    /// Answers a request that has several answers. With the last one it ends.
    fn answer_in_part(&self, asked: Asked, answer: &Answer, is_last: bool) {
        if is_last {
            self.traces.end(asked.number, None);
        }
        self.client.answers.put(&answer.encode(asked));
    }

    pub fn refuse(&self, asked: Asked, refusal: Refusal, why: impl ToString) {
        self.answer(asked, &Answer::Refused(refusal, why.to_string()));
    }

    /// Whose chunks the request with this number is about. `None` if another one was announced.
    fn tenant_of(&self, number: u64) -> Option<TenantId> {
        match self.announced.lock().take() {
            None => Some(self.client.tenant),
            Some((announced, tenant)) => (announced == number).then_some(tenant),
        }
    }

    pub fn take(self: &Arc<Self>, asked: Asked, request: Request) -> Next {
        match request {
            Request::Traced(context) => self.traces.announce(asked.number, context),
            Request::For(tenant) => *self.announced.lock() = Some((asked.number, tenant)),
            request => match self.tenant_of(asked.number) {
                Some(tenant) => return self.take_for(tenant, asked, request),
                None => return Next::HangUp("a tenant that was said for another request"),
            },
        }
        Next::Go
    }

    /// Takes a request that is about this tenant's chunks.
    fn take_for(self: &Arc<Self>, tenant: TenantId, asked: Asked, request: Request) -> Next {
        if let Some(name) = request.traced_as() {
            self.traces.begin(asked.number, name);
        }
        match request {
            Request::Hello(_) => return Next::HangUp("a second hello"),
            Request::Traced(_) | Request::For(_) => {}
            Request::Lookup(ids) => self.lookup(tenant, asked, &ids),
            Request::Lease { ttl_us, to_load, ids } => self.lease(tenant, asked, &ids, (ttl_us, to_load)),
            Request::Bring { lease, chunks, class, within_us } => {
                let deadline_us = within_us.map(|within_us| self.clients.now_us().saturating_add(within_us));
                self.bring(asked, (lease, chunks), (class, deadline_us));
            }
            Request::Renew { ttl_us, leases } => self.renew(asked, leases, ttl_us),
            Request::Release(leases) => {
                leases.iter().for_each(|lease| self.leases().release(*lease));
                self.clients.let_go();
            }
            Request::Reserve { shape, chunks } => {
                let all = chunks.iter().map(|chunk| self.reserve(tenant, chunk, &shape)).collect();
                self.answer(asked, &Answer::Reserved(all));
            }
            Request::Commit(filled) => {
                let all = filled.iter().map(|filled| self.commit(filled)).collect();
                self.answer(asked, &Answer::Committed(all));
                self.clients.let_go();
            }
            Request::Abort { slot } => {
                // One that is not reserved is not.
                let slot = self.leases().take_slot(slot);
                drop(slot);
                self.clients.let_go();
            }
            Request::Corrupt { lease, chunk } => self.check(lease, chunk as usize),
            Request::Used { chunk_bytes, ids } => self.clients.store.used(tenant, &ids, chunk_bytes),
            Request::Watch(ids) => self.watch(asked, &ids),
            Request::Describe(description) => self.describe(tenant, description),
            Request::Outcome(outcome) => self.clients.described.lock().note(tenant, outcome),
            Request::Explain(prompt) => self.explain(tenant, asked, &prompt),
            Request::NameChunks { tokens, namespace } => self.name_chunks(tenant, asked, &tokens, namespace),
            Request::Control(wanted) => {
                // Weak, so that the node does not end on a thread of its own.
                let session = Arc::downgrade(self);
                let on_end = move |reports| {
                    if let Some(session) = session.upgrade() {
                        session.answer(asked, &Answer::Controlled(reports));
                    }
                };
                control(&self.clients, tenant, wanted, on_end);
            }
            Request::OpenRing => return Next::OpenRing,
            Request::Stat => self.answer(asked, &Answer::Stat(self.clients.stat())),
            Request::Ping => self.answer(asked, &Answer::Pong),
            Request::Bye => return Next::Bye,
        }
        Next::Go
    }

    fn lookup(self: &Arc<Self>, tenant: TenantId, asked: Asked, ids: &[ChunkId]) {
        let (in_memory, on_disk) = self.clients.store.locate(tenant, ids);
        let here = in_memory + on_disk;
        let (in_memory, on_disk) = (in_memory as u32, on_disk as u32);
        let found =
            move |on_peers: usize| Answer::Found(Found { in_memory, on_disk, on_peers: on_peers as u32 });
        match self.clients.remote() {
            Some(remote) if here < ids.len() => {
                let session = Arc::clone(self);
                let on_found = move |on_peers| session.answer(asked, &found(on_peers));
                remote.lookup(tenant, &ids[here..], Box::new(on_found));
            }
            _ => self.answer(asked, &found(0)),
        }
    }

    fn lease(&self, tenant: TenantId, asked: Asked, ids: &[ChunkId], (ttl_us, to_load): (u64, bool)) {
        if self.clients.is_draining() {
            return self.refuse(asked, Refusal::Draining, "the node is shutting down");
        }
        if let Err(limit) = self.leases().room_for_lease() {
            return self.refuse(asked, Refusal::Limit, limit);
        }
        let store = &self.clients.store;
        let ttl_us = ttl_us.min(self.clients.limits.lease_us());
        let lease = if to_load {
            store.lease(tenant, ids, ttl_us)
        } else {
            store.lease_uncounted(tenant, ids, ttl_us)
        };
        let (here, in_memory) = (lease.len(), lease.in_memory());
        let on_peers = self.known_remote(tenant, &ids[here..]);
        if to_load {
            self.clients.count_hits(in_memory, here - in_memory, on_peers);
        }
        if here + on_peers == 0 {
            return self.answer(asked, &Answer::Leased(Leased::default()));
        }
        let (mut guards, mut bytes) = (Vec::new(), 0);
        let told_now = if to_load { in_memory } else { 0 };
        for chunk in 0..told_now {
            let Ok(guard) = store.read_guard(&lease, chunk) else { break };
            bytes += PLACE_BYTES + 4 * guard.checksums().len();
            if bytes > PLACES_BYTES_MAX {
                break;
            }
            guards.push(guard);
        }
        let places = places_of(&guards);
        let expires_us = self.clients.now_us().saturating_add(ttl_us);
        let name = self.leases().grant(tenant, (lease, &ids[..here + on_peers]), guards, expires_us);
        let leased = Leased {
            lease: name,
            ttl_us,
            in_memory: in_memory as u32,
            on_disk: (here - in_memory) as u32,
            on_peers: on_peers as u32,
            places,
        };
        self.answer(asked, &Answer::Leased(leased));
    }

    /// Has chunks of a lease lie in the arena: those of this host by few reads, each of the others
    /// from a peer.
    fn bring(
        self: &Arc<Self>,
        asked: Asked,
        (name, chunks): (u64, Vec<u32>),
        (class, deadline_us): (Class, Option<u64>),
    ) {
        let session = Arc::clone(self);
        let tell = move |answer, is_last| session.answer_in_part(asked, &answer, is_last);
        let request = BringRequest::new(chunks.len(), tell);
        let urgency = (class, deadline_us);
        self.bring_each((asked.number, name), chunks, urgency, move |chunk, end| request.end(chunk, end));
    }

    /// The same for the request of this number, 0 for one that is not traced. `on_end` is called
    /// once for each chunk, on any thread.
    pub fn bring_each(
        self: &Arc<Self>,
        (number, name): (u64, u64),
        chunks: impl IntoIterator<Item = u32>,
        (class, deadline_us): (Class, Option<u64>),
        on_end: impl Fn(usize, BroughtEnd) + Send + Sync + 'static,
    ) {
        let on_end = Arc::new(on_end);
        let (mut coming, mut held) = (Vec::new(), None);
        for chunk in chunks.into_iter().map(|chunk| chunk as usize) {
            match self.begin_bring(name, chunk) {
                Ok(Bringing::There(place)) => on_end(chunk, Ok(place)),
                Ok(Bringing::Fetch(tenant, lease, ids)) => {
                    coming.push(chunk);
                    held = Some((tenant, lease, ids));
                }
                Err(refused) => on_end(chunk, Err(refused)),
            }
        }
        let Some((tenant, lease, ids)) = held else { return };
        let (here, on_peers): (Vec<usize>, Vec<usize>) =
            coming.into_iter().partition(|chunk| *chunk < lease.len());
        let under = self.traces.context(number);
        for chunk in on_peers {
            let (session, on_end) = (Arc::clone(self), Arc::clone(&on_end));
            let on_pulled = move |outcome| on_end(chunk, session.brought(name, chunk, outcome));
            self.pull((tenant, &ids), chunk, (class, deadline_us, under), on_pulled);
        }
        if here.is_empty() {
            return;
        }
        let read = self.traces.part(number, "ssd");
        let (session, kept) = (Arc::clone(self), (Arc::clone(&lease), read));
        self.clients.store.fetch_many(&lease, here, class, deadline_us, move |chunk, outcome| {
            // Until the last chunk has come.
            let _ = &kept;
            let outcome = outcome.map_err(|error| error.to_string());
            on_end(chunk, session.brought(name, chunk, outcome));
        });
    }

    /// Has a layer of chunks of a lease lie in the arena: from the disk without the rest of its
    /// chunk, if that can be, from a peer with it. `on_end` is called once for each chunk, on any
    /// thread.
    pub fn bring_layer(
        self: &Arc<Self>,
        (name, layer): (u64, usize),
        chunks: impl IntoIterator<Item = u32>,
        urgency: (Class, Option<u64>),
        on_end: impl Fn(usize, LayerEnd) + Send + Sync + 'static,
    ) {
        let leases = self.leases();
        let lease = leases.lease(name, 0).ok().map(|held| Arc::clone(&held.lease));
        let is_read_here = |chunk: &u32| {
            let held = leases.lease(name, *chunk as usize).ok();
            held.is_some_and(|held| {
                held.lease.len() > *chunk as usize && held.guard(*chunk as usize).is_none()
            })
        };
        let (here, others): (Vec<u32>, Vec<u32>) = chunks.into_iter().partition(is_read_here);
        drop(leases);
        let on_end = Arc::new(on_end);
        if let Some(lease) = lease.filter(|_| !here.is_empty()) {
            let (session, on_end, kept) = (Arc::clone(self), Arc::clone(&on_end), Arc::clone(&lease));
            let here = here.into_iter().map(|chunk| chunk as usize);
            self.clients.store.fetch_layer(&lease, layer, here, urgency, move |chunk, outcome| {
                // Until the last layer has come.
                let _ = &kept;
                on_end(chunk, session.layer_came(name, chunk, layer, outcome));
            });
        }
        self.bring_each((0, name), others, urgency, move |chunk, end| {
            on_end(chunk, end.and_then(|place| layer_of(&place, layer)));
        });
    }

    /// A layer has come into memory, or not; on any thread.
    fn layer_came(
        &self,
        name: u64,
        chunk: usize,
        layer: usize,
        outcome: Result<LayerGuard, NotFetched>,
    ) -> LayerEnd {
        let guard = outcome.map_err(|error| (Refusal::NotRead, error.to_string()))?;
        let (place, checksum) =
            guard.place(layer).zip(guard.checksum(layer)).ok_or_else(|| no_layer(layer))?;
        let kept = self.leases().keep_layer(name, chunk, guard);
        kept.map_err(|error| (Refusal::Gone, error.to_string()))?;
        Ok(LayerPlace { offset_bytes: place.start, bytes: place.end - place.start, checksum })
    }

    /// What is to be done for a chunk of a lease to lie in the arena.
    fn begin_bring(&self, name: u64, chunk: usize) -> Result<Bringing, (Refusal, String)> {
        let mut leases = self.leases();
        let held = leases.lease(name, chunk).map_err(|error| (Refusal::Gone, error.to_string()))?;
        if let Some(guard) = held.guard(chunk) {
            return Ok(Bringing::There(guard.into()));
        }
        let fetch = Bringing::Fetch(held.tenant, Arc::clone(&held.lease), Arc::clone(&held.ids));
        leases.begin_load().map_err(|limit| (Refusal::Limit, limit.to_string()))?;
        Ok(fetch)
    }

    /// Has a chunk come from a peer, and names those behind it along with it.
    fn pull(
        &self,
        (tenant, ids): (TenantId, &[ChunkId]),
        chunk: usize,
        (class, deadline_us, under): (Class, Option<u64>, Option<TraceContext>),
        on_end: impl FnOnce(Result<ReadGuard, String>) + Send + 'static,
    ) {
        let Some(remote) = self.clients.remote() else { return on_end(Err("there are no peers".into())) };
        let parent = chunk.checked_sub(1).map(|before| ids[before]);
        let ids = ids[chunk..ids.len().min(chunk + PULLED_MAX)].to_vec();
        remote.pull(PullRequest { tenant, ids, parent, class, deadline_us, under }, Box::new(on_end));
    }

    fn known_remote(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        if ids.is_empty() {
            return 0;
        }
        self.clients.remote().map_or(0, |remote| remote.lookup_known(tenant, ids))
    }

    /// A chunk has come into memory, or not; on any thread.
    fn brought(&self, name: u64, chunk: usize, outcome: Result<ReadGuard, String>) -> BroughtEnd {
        let mut leases = self.leases();
        leases.end_load();
        let guard = outcome.map_err(|why| (Refusal::NotRead, why))?;
        let guard = leases.keep(name, chunk, guard);
        guard.map(ChunkPlace::from).map_err(|error| (Refusal::Gone, error.to_string()))
    }

    fn renew(&self, asked: Asked, mut names: Vec<u64>, ttl_us: u64) {
        let ttl_us = ttl_us.min(self.clients.limits.lease_us());
        let expires_us = self.clients.now_us().saturating_add(ttl_us);
        let mut leases = self.leases();
        names.retain(|name| !leases.renew(*name, expires_us, |lease| lease.renew(ttl_us).is_ok()));
        drop(leases);
        self.answer(asked, &Answer::Renewed(names));
    }

    fn reserve(&self, tenant: TenantId, chunk: &NewChunk, shape: &ChunkShape) -> Reservation {
        if self.clients.is_draining() {
            return Reservation::Refused(Refusal::Draining, "the node is shutting down".into());
        }
        if let Err(limit) = self.leases().room_for_slot() {
            return Reservation::Refused(Refusal::Limit, limit.to_string());
        }
        let slot = match self.clients.store.reserve(tenant, chunk.id, chunk.parent, shape) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Reservation::Here,
            Err(NotStored::Refused(refused)) => {
                return Reservation::Refused(Refusal::NotTaken, refused.to_string());
            }
            Err(error) => return Reservation::Refused(Refusal::NotTaken, error.to_string()),
        };
        let offset_bytes = slot.offset_bytes();
        let mut leases = self.leases();
        // Whoever drains counts the slots under this lock, and misses none.
        if self.clients.is_draining() {
            return Reservation::Refused(Refusal::Draining, "the node is shutting down".into());
        }
        match leases.reserve(slot) {
            Ok(slot) => Reservation::Slot { slot, offset_bytes },
            Err(error) => Reservation::Refused(Refusal::Gone, error.to_string()),
        }
    }

    pub fn commit(&self, filled: &Filled) -> Commitment {
        let taken = self.leases().take_slot(filled.slot);
        let slot = match taken {
            Ok(slot) => slot,
            Err(error) => return Commitment::Refused(Refusal::Gone, error.to_string()),
        };
        match slot.commit(&filled.sums) {
            Ok(()) => Commitment::Visible,
            Err(NotCommitted::Deleted) => Commitment::Deleted,
            Err(error) => Commitment::Refused(Refusal::NotTaken, error.to_string()),
        }
    }

    /// A client found wrong bytes. Only what is wrong here too is dropped: a client's own memory
    /// may be at fault.
    fn check(&self, name: u64, chunk: usize) {
        let leases = self.leases();
        if leases.lease(name, chunk).is_ok_and(|held| !held.check(chunk)) {
            self.clients.count_corrupt(&self.client.name);
        }
    }

    fn watch(&self, asked: Asked, ids: &[ChunkId]) {
        self.client.begin_to_watch();
        if let Err(error) = self.clients.tell_who_watches() {
            return self.refuse(asked, Refusal::Limit, error);
        }
        let answer = |absent| self.answer(asked, &Answer::Watched(absent));
        self.client.watch(ids, |id| self.clients.has(id), answer);
    }

    fn describe(&self, tenant: TenantId, description: Description) {
        let client = self.client.name.clone();
        self.clients.described.lock().describe(Described { description, tenant, client });
    }

    /// It tells of all tenants, so not everybody may ask.
    fn name_chunks(&self, tenant: TenantId, asked: Asked, tokens: &[u32], namespace: u32) {
        if !self.is_operator {
            let why = "only root and the node's own user may ask what chunks of a prompt are called";
            return self.refuse(asked, Refusal::NotAllowed, why);
        }
        let (ids, namespaces) = name_chunks(&self.clients, tenant, tokens, namespace);
        self.answer(asked, &Answer::Named { ids, namespaces });
    }

    fn explain(&self, tenant: TenantId, asked: Asked, prompt: &Prompt) {
        if !self.is_operator {
            let why = "only root and the node's own user may ask why a prompt was no hit";
            return self.refuse(asked, Refusal::NotAllowed, why);
        }
        let explained = explain(&self.clients, tenant, prompt);
        self.answer(asked, &Answer::Explained(Box::new(explained)));
    }

    /// Ends the leases whose time has come, and says in how many microseconds the next one ends.
    pub fn expire(&self) -> Option<u64> {
        let now_us = self.clients.now_us();
        let mut leases = self.leases();
        let before = leases.count();
        leases.expire(now_us);
        let (after, next) = (leases.count(), leases.next_expiry_us());
        drop(leases);
        if after < before {
            self.clients.note_expired(&self.client.name, before - after);
            self.clients.let_go();
        }
        next.map(|expires_us| expires_us.saturating_sub(now_us) + 1)
    }
}

/// A layer of a chunk that lies in the arena.
fn layer_of(place: &ChunkPlace, layer: usize) -> LayerEnd {
    let extent = place.shape.layer(layer).zip(place.sums.get(layer));
    let (extent, checksum) = extent.ok_or_else(|| no_layer(layer))?;
    let (offset_bytes, bytes) = (place.offset_bytes + extent.start, extent.end - extent.start);
    Ok(LayerPlace { offset_bytes, bytes, checksum: *checksum })
}

fn no_layer(layer: usize) -> (Refusal, String) {
    (Refusal::BadRequest, format!("the chunk has no layer {layer}"))
}

/// Chunks of the same shape share it.
fn places_of(guards: &[ReadGuard]) -> Vec<ChunkPlace> {
    let mut shape: Option<Arc<ChunkShape>> = None;
    let mut places = Vec::with_capacity(guards.len());
    for guard in guards {
        let same = shape.take().filter(|shape| **shape == *guard.shape());
        let shared = same.unwrap_or_else(|| Arc::new(guard.shape().clone()));
        let (offset_bytes, sums) = (guard.offset_bytes(), guard.checksums().to_vec());
        places.push(ChunkPlace { offset_bytes, shape: Arc::clone(&shared), sums });
        shape = Some(shared);
    }
    places
}
