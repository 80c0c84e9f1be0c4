//! Requests from a ring: a read has the layers of a lease's chunks lie in the arena, a commit makes
//! a slot visible that the client's GPU has filled. This file turns contexts into calls of the
//! session, and what comes of them into results.

use super::ring::{Found, Ring, SharedRing};
use super::session::{LayerEnd, LayerPlace, Session};
use forebay_client::protocol::answer::{Answer, Commitment, Refusal};
use forebay_client::protocol::frame::Asked;
use forebay_client::protocol::request::Filled;
use forebay_ring::{Context, ContextResult, ContextStatus, Op, Status, Ticket, Work};
use forebay_transfer::Class;
use forebay_transfer::lock::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A read under way: layers of chunks come on any thread and in any order, and each of them is what
/// some of the contexts wait for.
struct Read {
    ring: Arc<SharedRing>,
    session: Arc<Session>,
    contexts: Vec<Context>,
    state: Mutex<State>,
}

struct State {
    /// Taken when it ends.
    ticket: Option<Ticket>,
    results: Vec<ContextResult>,
    bytes: u64,
    /// Layers of chunks that have not ended.
    left: usize,
}

/// Makes a ring for a client, and tells it.
pub fn open(session: &Arc<Session>, asked: Asked) {
    if session.client.has_ring() {
        return session.refuse(asked, Refusal::BadRequest, "the client has a ring already");
    }
    let own = Arc::clone(session);
    let ring = match Ring::open(move |ring, found| take(ring, &own, found)) {
        Ok(ring) => ring,
        Err(error) => return session.refuse(asked, Refusal::Limit, error),
    };
    if session.client.answers.put_with(&Answer::Ring.encode(asked), ring.file()) {
        return session.client.keep_ring(ring);
    }
    session.refuse(asked, Refusal::Limit, "answers wait to be taken; take them and ask again");
    ring.stop();
}

fn take(ring: &Arc<SharedRing>, session: &Arc<Session>, found: Found) {
    let (rings, client) = (&session.clients.rings, &session.client.name);
    match found {
        Found::Work(work) if work.request.op == Op::Commit => commit(ring, session, work),
        Found::Work(work) => read(ring, session, work),
        Found::Bad(bad) => rings.note_bad(client, &bad),
        Found::Violation(violation) => rings.note_violation(client, &violation),
    }
}

/// Has the layers of a lease's chunks lie in the arena.
fn read(ring: &Arc<SharedRing>, session: &Arc<Session>, work: Work) {
    let Work { ticket, request, contexts } = work;
    // Mostly all contexts name the same layer.
    let mut layers: BTreeMap<u16, BTreeSet<u32>> = BTreeMap::new();
    for context in &contexts {
        layers.entry(context.layer).or_default().insert(context.extent);
    }
    let left = layers.values().map(BTreeSet::len).sum();
    let class = Class::ALL.get(usize::from(request.class)).copied().unwrap_or(Class::Demand);
    let within_us = Some(u64::from(request.within_us)).filter(|within_us| *within_us > 0);
    let deadline_us = within_us.map(|within_us| session.clients.now_us().saturating_add(within_us));
    let failed = ContextResult::failed(ContextStatus::NotRead);
    let state = State { ticket: Some(ticket), results: vec![failed; contexts.len()], bytes: 0, left };
    let (ring, own) = (Arc::clone(ring), Arc::clone(session));
    let read = Arc::new(Read { ring, session: own, contexts, state: Mutex::new(state) });
    for (layer, chunks) in layers {
        let read = Arc::clone(&read);
        session.bring_layer(
            (request.lease, layer.into()),
            chunks,
            (class, deadline_us),
            move |chunk, end| {
                read.end(chunk, layer, &end);
            },
        );
    }
}

impl Read {
    /// A layer of a chunk has come, or will not.
    fn end(&self, chunk: usize, layer: u16, end: &LayerEnd) {
        let mut state = self.state.lock();
        for (context, number) in self.contexts.iter().zip(0..) {
            if context.extent as usize == chunk && context.layer == layer {
                state.results[number] = self.result(end, &state);
                state.bytes += end.as_ref().map_or(0, |place| place.bytes);
            }
        }
        state.left -= 1;
        if state.left == 0
            && let Some(ticket) = state.ticket.take()
        {
            self.session.clients.rings.count(&state.results);
            self.ring.end(ticket, &state.results, state.bytes);
        }
    }

    fn result(&self, end: &LayerEnd, state: &State) -> ContextResult {
        let refusal = match end {
            Ok(LayerPlace { offset_bytes, checksum, .. }) => {
                let (offset_bytes, checksum) = (*offset_bytes, *checksum);
                return ContextResult { status: ContextStatus::Done, offset_bytes, checksum };
            }
            Err((refusal, _)) => refusal,
        };
        let is_cancelled = state.ticket.as_ref().is_some_and(|one| self.ring.is_cancelled(one));
        ContextResult::failed(match refusal {
            _ if is_cancelled => ContextStatus::Cancelled,
            Refusal::BadRequest => ContextStatus::Outside,
            Refusal::Gone => ContextStatus::Gone,
            Refusal::Limit => ContextStatus::Limit,
            _ => ContextStatus::NotRead,
        })
    }
}

/// Makes a slot visible whose layers the contexts name, in order, with the checksum of each.
fn commit(ring: &Arc<SharedRing>, session: &Arc<Session>, work: Work) {
    let Work { ticket, request, contexts } = work;
    let is_in_order = |(context, layer): (&Context, u16)| (context.extent, context.layer) == (0, layer);
    if !contexts.iter().zip(0..).all(is_in_order) {
        session.clients.rings.count_refused();
        return ring.refuse(ticket, Status::Malformed);
    }
    let sums = contexts.iter().map(|context| context.checksum).collect();
    let status = match session.commit(&Filled { slot: request.lease, sums }) {
        Commitment::Visible | Commitment::Deleted => ContextStatus::Done,
        Commitment::Refused(Refusal::Gone, _) => {
            session.clients.rings.count_refused();
            return ring.refuse(ticket, Status::NoLease);
        }
        Commitment::Refused(..) => ContextStatus::NotRead,
    };
    let results = vec![ContextResult { status, ..ContextResult::default() }; contexts.len()];
    session.clients.rings.count(&results);
    ring.end(ticket, &results, 0);
}
