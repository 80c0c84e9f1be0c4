//! What a node knows of why a prompt was no hit: where its chunks are in each namespace that
//! clients have described, and why not. It gathers and judges nothing; `forebay explain` does. It
//! runs on the thread of whoever asks, and holds no lock for longer than a copy takes.

use super::clients::Clients;
use super::described::Described;
use crate::peering::Peering;
use forebay_client::protocol::control::LISTED_MAX;
use forebay_client::protocol::explain::{
    Event, Explained, Outcome, PeerFacts, Place, Prompt, Run, Sequence, Step, TierFacts,
};
use forebay_kv::ChunkId;
use forebay_store::{Absences, TenantId, WhyAbsent};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Runs of a sequence that are told. What lies behind them is not.
const RUNS_MAX: usize = 256;
/// How long peers may take to say what they have.
const PEERS_LIMIT: Duration = Duration::from_millis(500);

/// A look at everything at one time.
struct Look<'a> {
    clients: &'a Clients,
    why: WhyAbsent,
    now_s: u32,
}

/// Answers `forebay explain` for a client of this tenant.
pub fn explain(clients: &Clients, tenant: TenantId, prompt: &Prompt) -> Explained {
    let now_s = u32::try_from(clients.now_us() / 1_000_000).unwrap_or(u32::MAX);
    let look = Look { clients, why: clients.store.why_absent(), now_s };
    let (namespaces, requests, forgotten) = {
        let described = clients.described.lock();
        let requests = match prompt {
            Prompt::Request(name) => described.outcomes_of(name),
            Prompt::Tokens(_) | Prompt::Ids(_) => Vec::new(),
        };
        (described.namespaces(), requests, described.forgotten())
    };
    let sequences = match prompt {
        Prompt::Tokens(tokens) => namespaces.iter().map(|one| look.in_namespace(one, tokens)).collect(),
        Prompt::Ids(ids) => vec![look.unnamed(tenant, ids)],
        Prompt::Request(_) => requests.first().map_or_else(Vec::new, |one| look.behind(one)),
    };
    let requests = requests.into_iter().map(|(_, outcome)| outcome).collect();
    let (memory, ssd) = look.tiers();
    let peers = clients.remote().map_or_else(Vec::new, peers);
    Explained { up_s: now_s, memory, ssd, peers, sequences, requests, forgotten }
}

/// What a prompt's chunks are called in one of the tenant's namespaces, and how many there are.
pub fn name_chunks(
    clients: &Clients,
    tenant: TenantId,
    tokens: &[u32],
    namespace: u32,
) -> (Vec<ChunkId>, u32) {
    let described = clients.described.lock().of_tenant(tenant);
    let ids = described.get(namespace as usize).map_or_else(Vec::new, |one| {
        let chunk_tokens = one.chunk_tokens as usize;
        let most = tokens.len().min(chunk_tokens.saturating_mul(LISTED_MAX));
        forebay_kv::chunk_ids(&one.key, &tokens[..most], chunk_tokens)
    });
    (ids, described.len() as u32)
}

fn peers(peering: &Arc<Peering>) -> Vec<PeerFacts> {
    let facts = |peer: forebay_net::PeerStat| PeerFacts {
        name: peer.name,
        state: peer.state.into(),
        unreached: peer.unreached.map(|unreached| format!("{}: {}", unreached.reason.label(), unreached.why)),
    };
    peering.stat().peers.into_iter().map(facts).collect()
}

impl Look<'_> {
    fn in_namespace(&self, one: &Described, tokens: &[u32]) -> Sequence {
        let chunk_tokens = one.description.chunk_tokens;
        let ids = forebay_kv::chunk_ids(&one.description.key, tokens, chunk_tokens as usize);
        Sequence {
            facts: one.description.facts.clone(),
            tenant: Some(one.tenant.0),
            client: one.client.clone(),
            chunk_tokens,
            ..self.unnamed(one.tenant, &ids)
        }
    }

    fn unnamed(&self, tenant: TenantId, ids: &[ChunkId]) -> Sequence {
        let mut runs = self.runs(tenant, ids);
        let here =
            runs.iter().take_while(|run| run.place != Place::Nowhere).map(|run| run.chunks).sum::<u32>();
        let at_peers = self.at_peers(tenant, &ids[here as usize..]);
        mark_peers(&mut runs, here, at_peers);
        Sequence { chunks: ids.len() as u32, runs, ..Sequence::default() }
    }

    /// The chunk that a request of this tenant did not find, one for each rank.
    fn behind(&self, (tenant, outcome): &(TenantId, Outcome)) -> Vec<Sequence> {
        let first = outcome.found.iter().fold(0u32, |sum, chunks| sum.saturating_add(*chunks));
        let of_rank = |id: &ChunkId| {
            let mut sequence = self.unnamed(*tenant, std::slice::from_ref(id));
            sequence.tenant = Some(tenant.0);
            sequence.chunks = sequence.chunks.saturating_add(first);
            sequence.runs.iter_mut().for_each(|run| run.first = run.first.saturating_add(first));
            sequence
        };
        outcome.missing.iter().map(of_rank).collect()
    }

    fn runs(&self, tenant: TenantId, ids: &[ChunkId]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (at, id) in ids.iter().enumerate() {
            let run = self.look_at(tenant, at as u32, id);
            let is_full = runs.len() >= RUNS_MAX;
            match runs.last_mut() {
                Some(last) if is_alike(last, &run) => {
                    let (first, chunks) = (last.first, last.chunks + 1);
                    *last = Run { first, chunks, ..run };
                }
                _ if is_full => break,
                _ => runs.push(run),
            }
        }
        runs
    }

    fn look_at(&self, tenant: TenantId, first: u32, id: &ChunkId) -> Run {
        let found = self.clients.store.whereabouts(id);
        let place = match found {
            _ if found.in_memory => Place::Memory,
            _ if found.on_disk => Place::Disk,
            _ => Place::Nowhere,
        };
        let owner = found.owner.filter(|owner| *owner != tenant).map(|owner| owner.0);
        let logs = [
            (Step::Memory, &self.why.from_memory, found.in_memory),
            (Step::WriteBack, &self.why.not_written, found.on_disk),
            (Step::Disk, &self.why.from_disk, found.on_disk),
        ];
        let event = |(at, log, is_there): (Step, &Absences, bool)| {
            let noted = log.of(id).filter(|_| !is_there)?;
            Some(Event { at, why: noted.why, ago_s: self.now_s.saturating_sub(noted.at_s) })
        };
        let events = logs.into_iter().filter_map(event).collect();
        Run { first, chunks: 1, place, owner, is_continued: found.is_continued, events }
    }

    /// How many of these, from the first on, other nodes say that they have.
    fn at_peers(&self, tenant: TenantId, ids: &[ChunkId]) -> u32 {
        let (Some(remote), false) = (self.clients.remote(), ids.is_empty()) else { return 0 };
        let (sender, found) = channel();
        // Nobody may wait any more.
        remote.lookup(tenant, ids, Box::new(move |chunks| sender.send(chunks).unwrap_or_default()));
        found.recv_timeout(PEERS_LIMIT).map_or(0, |chunks| chunks.min(ids.len()) as u32)
    }

    fn tiers(&self) -> (TierFacts, Option<TierFacts>) {
        let remembers = |log: &Absences| log.since_s.map(|since_s| self.now_s.saturating_sub(since_s));
        let stat = self.clients.store.stat();
        let memory = TierFacts {
            used_bytes: stat.arena.used_bytes,
            capacity_bytes: stat.capacity_bytes,
            remembers_s: remembers(&self.why.from_memory),
        };
        let ssd = self.clients.store.disk_stat().map(|stat| TierFacts {
            used_bytes: stat.ssd.tier.space.live_bytes,
            capacity_bytes: stat.ssd.tier.space.capacity_bytes,
            remembers_s: remembers(&self.why.from_disk),
        });
        (memory, ssd)
    }
}

/// Whether a chunk can be told together with those before it.
fn is_alike(last: &Run, next: &Run) -> bool {
    let reasons = |run: &Run| run.events.iter().map(|event| (event.at, event.why)).collect::<Vec<_>>();
    last.place == next.place && last.owner == next.owner && reasons(last) == reasons(next)
}

/// So many chunks behind the first `here` are at peers.
fn mark_peers(runs: &mut Vec<Run>, here: u32, at_peers: u32) {
    let end = here + at_peers;
    let Some(at) = runs.iter().position(|run| run.first == here).filter(|_| at_peers > 0) else { return };
    let mut rest = Vec::new();
    for run in runs.drain(at..) {
        let run_end = run.first + run.chunks;
        let split = end.clamp(run.first, run_end);
        if split > run.first {
            let place = if run.place == Place::Nowhere { Place::Peer } else { run.place };
            rest.push(Run { place, chunks: split - run.first, ..run.clone() });
        }
        if split < run_end {
            rest.push(Run { first: split, chunks: run_end - split, ..run });
        }
    }
    runs.extend(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u32, chunks: u32, place: Place) -> Run {
        Run { first, chunks, place, owner: None, is_continued: false, events: Vec::new() }
    }

    #[test]
    fn what_peers_have_is_marked_and_what_is_here_stays_so() {
        use Place::{Memory, Nowhere, Peer};
        let before = vec![run(0, 2, Memory), run(2, 3, Nowhere), run(5, 1, Memory), run(6, 4, Nowhere)];
        let mark = |at_peers| {
            let mut runs = before.clone();
            mark_peers(&mut runs, 2, at_peers);
            runs
        };
        assert_eq!(mark(0), before);
        let part = [run(0, 2, Memory), run(2, 1, Peer), run(3, 2, Nowhere), run(5, 1, Memory)];
        assert_eq!(mark(1)[..4], part);
        let most =
            [run(0, 2, Memory), run(2, 3, Peer), run(5, 1, Memory), run(6, 1, Peer), run(7, 3, Nowhere)];
        assert_eq!(mark(5), most);
    }
}
