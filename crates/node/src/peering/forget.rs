//! Forgetting chunks on this node and on every peer that it knows. A peer forgets what it has
//! itself and asks nobody. Who does not answer in time is named in the log: it may still have them.

use super::arrivals::Arrivals;
use super::bar::{FORGET_LIMIT_US, TooMany};
use super::messages::{Answer, Question, TenantKey};
use super::{Peering, Puller};
use forebay_kv::ChunkId;
use forebay_store::{Store, TenantId};
use forebay_transfer::lock::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What became of chunks that were to be forgotten.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Forgotten {
    /// Of each, whether this node or a peer had it.
    pub had: Vec<bool>,
    /// Whether all peers have answered.
    pub by_all: bool,
}

/// Is told what became of them, or that nothing did.
type OnForgotten = Box<dyn FnOnce(Result<Forgotten, TooMany>) + Send>;

/// Answers of peers that are waited for.
struct PendingForget {
    puller: Arc<Puller>,
    tenant: TenantId,
    ids: Vec<ChunkId>,
    had: Vec<bool>,
    /// Peers that have not answered.
    silent: usize,
    on_forgotten: Option<OnForgotten>,
}

/// Forgets chunks on this node, also those that are on their way to it.
pub fn forget_here(
    (store, arrivals): (&Store, &Mutex<Arrivals>),
    now_us: u64,
    tenant: TenantId,
    ids: &[ChunkId],
) -> Result<Vec<bool>, TooMany> {
    // This comes first: a chunk that gets its slot after the store has forgotten it meets the bar.
    arrivals.lock().forget(now_us, tenant, ids)?;
    Ok(store.forget(tenant, ids))
}

impl Peering {
    /// Forgets chunks here at once, and has all peers forget them. `on_forgotten` is called exactly
    /// once, soon, on any thread.
    pub fn forget(&self, tenant: TenantId, ids: &[ChunkId], on_forgotten: OnForgotten) {
        self.sync_peers();
        let puller = Arc::clone(&self.puller);
        let here = (&puller.store, &*puller.arrivals);
        let had = match forget_here(here, puller.mover.now_us(), tenant, ids) {
            Ok(had) => had,
            Err(too_many) => return on_forgotten(Err(too_many)),
        };
        let (ids, peers) = (ids.to_vec(), self.known_peers());
        let ask = Question::Forget(TenantKey::of(&puller.token, tenant), ids.clone()).encode();
        let (silent, on_forgotten) = (peers.len(), Some(on_forgotten));
        let pending = PendingForget { puller, tenant, ids, had, silent, on_forgotten };
        let pending = Arc::new(Mutex::new(pending));
        for peer in peers {
            let (answered, name) = (Arc::clone(&pending), peer.clone());
            let called = self.agent.call(&peer, ask.clone(), FORGET_LIMIT_US, move |reply| {
                answered.lock().heard(&name, reply.map_err(|why| why.to_string()));
            });
            if let Err(error) = called {
                self.puller.not_forgotten(&peer, &error.to_string());
            }
        }
        // With the last answer the last share of `pending` goes, and tells what became of them.
    }

    /// Peers of the directory, and those that have just left it.
    fn known_peers(&self) -> BTreeSet<String> {
        let listed = self.directory.nodes().into_iter().map(|node| node.name);
        listed.chain(self.agent.stats().into_iter().map(|peer| peer.name)).collect()
    }
}

impl Puller {
    /// A peer may still have chunks that it was to forget.
    fn not_forgotten(&self, peer: &str, why: &str) {
        let mut unforgotten = self.counts.unforgotten.lock();
        let (count, gate) = unforgotten.entry(peer.to_owned()).or_default();
        *count += 1;
        if let Some(repeated) = gate.pass() {
            tracing::warn!(peer, reason = why, repeated, "peer did not forget chunks");
        }
    }

    /// Questions to forget chunks that a peer did not answer, by peer.
    pub fn unforgotten(&self) -> Vec<(String, u64)> {
        let unforgotten = self.counts.unforgotten.lock();
        unforgotten.iter().map(|(peer, (count, _))| (peer.clone(), *count)).collect()
    }
}

impl PendingForget {
    fn heard(&mut self, peer: &str, reply: Result<Vec<u8>, String>) {
        match reply.and_then(|bytes| forgotten(&bytes, self.ids.len())) {
            Ok(had) => {
                self.silent -= 1;
                self.had.iter_mut().zip(had).for_each(|(any, had)| *any |= had);
                self.puller.has_none(self.tenant, &self.ids, peer);
            }
            Err(why) => self.puller.not_forgotten(peer, &why),
        }
    }
}

/// Which of so many chunks a peer had, by its answer.
fn forgotten(answer: &[u8], chunks: usize) -> Result<Vec<bool>, String> {
    match Answer::decode(answer).map_err(|bad| bad.to_string())? {
        Answer::Forgotten(had) if had.len() == chunks => Ok(had),
        _ => Err("it answered another question".to_owned()),
    }
}

impl Drop for PendingForget {
    fn drop(&mut self) {
        let Some(on_forgotten) = self.on_forgotten.take() else { return };
        let forgotten = Forgotten { had: std::mem::take(&mut self.had), by_all: self.silent == 0 };
        // Looking at thousands of chunks takes too long for a connection's thread.
        self.puller.later(move || on_forgotten(Ok(forgotten)));
    }
}
