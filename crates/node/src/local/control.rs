//! What clients say of single chunks, by name: each becomes a call of the store, and each chunk has
//! a report. It runs on the client's thread and never waits for a disk or a peer: what is fetched
//! ahead comes after the answer, and the answer to what peers forget too comes when they have
//! answered.

use super::clients::Clients;
use crate::peering::{Forgotten, PullRequest};
use forebay_client::protocol::control::{Control, Reason, Report, Verb, Verdict};
use forebay_client::protocol::explain::Place;
use forebay_kv::ChunkId;
use forebay_store::{PIN_US_MAX, TenantId, Unchanged};
use forebay_transfer::Class;
use std::sync::Arc;

/// How long chunks are leased that are fetched ahead, and how long that may take.
const AHEAD_US: u64 = 30_000_000;

/// Carries out what a client of this tenant wants of chunks. `on_end` is told once what became of
/// each, on any thread.
pub fn control(
    clients: &Arc<Clients>,
    tenant: TenantId,
    wanted: Control,
    on_end: impl FnOnce(Vec<Report>) + Send + 'static,
) {
    let look = Look { clients, tenant };
    let Control { verb, ids } = wanted;
    let each = |act: &dyn Fn(&ChunkId) -> Report| ids.iter().map(act).collect();
    let reports: Vec<Report> = match verb {
        Verb::List => each(&|_| Report::new(Verdict::Accepted, Reason::None)),
        Verb::Pin { ttl_ms } => each(&|id| look.pin(id, ttl_ms)),
        Verb::Unpin => look.last_first(&ids, |id| clients.store.unpin(tenant, id)),
        Verb::Demote => look.last_first(&ids, |id| clients.store.demote(tenant, id)),
        Verb::Prefetch => look.prefetch(&ids),
        Verb::Forget => return look.forget(ids, on_end),
    };
    on_end(look.told(verb, &ids, reports));
}

/// A client's view of the node.
struct Look<'a> {
    clients: &'a Arc<Clients>,
    tenant: TenantId,
}

impl Look<'_> {
    /// The reports as the client is told them, counted.
    fn told(&self, verb: Verb, ids: &[ChunkId], mut reports: Vec<Report>) -> Vec<Report> {
        for (report, id) in reports.iter_mut().zip(ids) {
            (report.place, report.pinned_ms) = self.whereabouts(id);
        }
        self.clients.controls.count(verb, &reports);
        reports
    }

    fn pin(&self, id: &ChunkId, ttl_ms: u64) -> Report {
        let ttl_us = ttl_ms.saturating_mul(1000);
        match self.clients.store.pin(self.tenant, id, ttl_us) {
            Ok(_) if ttl_us > PIN_US_MAX => Report::new(Verdict::Clipped, Reason::TtlCut),
            pinned => report(pinned.map(drop)),
        }
    }

    /// What continues a chunk goes before it.
    fn last_first(&self, ids: &[ChunkId], act: impl Fn(&ChunkId) -> Result<(), Unchanged>) -> Vec<Report> {
        let mut reports: Vec<Report> = ids.iter().rev().map(|id| report(act(id))).collect();
        reports.reverse();
        reports
    }

    fn forget(&self, ids: Vec<ChunkId>, on_end: impl FnOnce(Vec<Report>) + Send + 'static) {
        let (clients, tenant) = (self.clients, self.tenant);
        let Some(remote) = clients.remote() else {
            let had = clients.store.forget(tenant, &ids);
            let reports = forgotten(&Forgotten { had, by_all: true });
            return on_end(self.told(Verb::Forget, &ids, reports));
        };
        // Weak, so that the node does not end on a thread of its own.
        let (clients, named) = (Arc::downgrade(clients), ids.clone());
        let on_forgotten = move |told: Result<Forgotten, _>| {
            let Some(clients) = clients.upgrade() else { return };
            let busy = |_| vec![Report::new(Verdict::Clipped, Reason::Busy); named.len()];
            let reports = told.map_or_else(busy, |told| forgotten(&told));
            on_end(Look { clients: &clients, tenant }.told(Verb::Forget, &named, reports));
        };
        remote.forget(tenant, &ids, Box::new(on_forgotten));
    }

    /// Has the longest prefix that is somewhere come into memory.
    fn prefetch(&self, ids: &[ChunkId]) -> Vec<Report> {
        let rejected = |reason| Report::new(Verdict::Rejected, reason);
        if self.clients.is_draining() {
            return ids.iter().map(|_| rejected(Reason::Draining)).collect();
        }
        let lease = Arc::new(self.clients.store.lease_uncounted(self.tenant, ids, AHEAD_US));
        let (here, in_memory) = (lease.len(), lease.in_memory());
        let at_peers = self.at_peers(&ids[here..]);
        let room = self.clients.controls.begin_ahead(here - in_memory + at_peers);
        let end = in_memory + room;
        let deadline_us = Some(self.clients.now_us().saturating_add(AHEAD_US));
        let (clients, kept) = (Arc::clone(self.clients), Arc::clone(&lease));
        self.clients.store.fetch_many(
            &lease,
            in_memory..here.min(end),
            Class::Prefetch,
            deadline_us,
            move |_, guard| {
                // Until the last chunk has come.
                let _ = &kept;
                clients.controls.end_ahead(guard.is_ok());
            },
        );
        (here..end).for_each(|at| self.pull(ids, at, deadline_us));
        let verdict = |at: usize| match at {
            _ if at < end => Report::new(Verdict::Accepted, Reason::None),
            _ if at < here + at_peers => Report::new(Verdict::Clipped, Reason::Busy),
            _ => rejected(Reason::NotStored),
        };
        (0..ids.len()).map(verdict).collect()
    }

    fn pull(&self, ids: &[ChunkId], at: usize, deadline_us: Option<u64>) {
        let Some(remote) = self.clients.remote() else { return self.clients.controls.end_ahead(false) };
        let parent = at.checked_sub(1).map(|before| ids[before]);
        let (tenant, ids, class) = (self.tenant, vec![ids[at]], Class::Prefetch);
        let request = PullRequest { tenant, ids, parent, class, deadline_us, under: None };
        let clients = Arc::clone(self.clients);
        remote.pull(request, Box::new(move |guard| clients.controls.end_ahead(guard.is_ok())));
    }

    /// How many of these, from the first on, other nodes are said to have.
    fn at_peers(&self, ids: &[ChunkId]) -> usize {
        match self.clients.remote() {
            Some(remote) if !ids.is_empty() => remote.lookup_known(self.tenant, ids).min(ids.len()),
            _ => 0,
        }
    }

    fn whereabouts(&self, id: &ChunkId) -> (Place, u64) {
        let status = self.clients.store.status(self.tenant, id);
        let place = match status {
            _ if status.in_memory => Place::Memory,
            _ if status.on_disk => Place::Disk,
            _ if self.at_peers(std::slice::from_ref(id)) > 0 => Place::Peer,
            _ => Place::Nowhere,
        };
        let left_us = status.pinned_until_us.map(|until| until.saturating_sub(self.clients.now_us()));
        (place, left_us.map_or(0, |left_us| left_us.div_ceil(1000)))
    }
}

/// What is said of chunks that were to be forgotten.
fn forgotten(told: &Forgotten) -> Vec<Report> {
    let each = |had: &bool| match had {
        _ if !told.by_all => Report::new(Verdict::Clipped, Reason::PeersUnreached),
        true => Report::new(Verdict::Accepted, Reason::None),
        false => Report::new(Verdict::Rejected, Reason::NotStored),
    };
    told.had.iter().map(each).collect()
}

fn report(done: Result<(), Unchanged>) -> Report {
    let rejected = |reason| Report::new(Verdict::Rejected, reason);
    match done {
        Ok(()) => Report::new(Verdict::Accepted, Reason::None),
        Err(Unchanged::NotHere) => rejected(Reason::NotStored),
        Err(Unchanged::NoRoom { .. }) => Report::new(Verdict::Clipped, Reason::OverBudget),
        Err(Unchanged::NotPinned) => rejected(Reason::NotPinned),
        Err(Unchanged::Continued) => rejected(Reason::Continued),
        Err(Unchanged::InUse) => rejected(Reason::InUse),
        Err(Unchanged::Pinned) => rejected(Reason::Pinned),
        Err(Unchanged::NoDisk) => rejected(Reason::NoDisk),
        Err(Unchanged::NotOnDisk) => Report::new(Verdict::Clipped, Reason::NotOnDisk),
    }
}
