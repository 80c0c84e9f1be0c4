//! One node is killed in the middle of a replay, and what follows from that is counted.

use super::cluster::Cluster;
use super::rows::{self, Count};
use forebay_results::output::Error;
use forebay_trace::record::RequestRecord;
use forebay_trace::replay::Progress;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

/// A kill that is planned or has been carried out. Without a cluster to harm nothing happens.
pub struct Kill<'a> {
    cluster: Option<&'a Cluster>,
    /// It comes when so many requests have ended.
    after_requests: u64,
    killed: OnceLock<Killed>,
    /// Tokens that its engines computed although their sessions had had them before.
    again_tokens: AtomicU64,
}

/// What was killed when.
struct Killed {
    node: String,
    engines: Vec<String>,
    at_s: f64,
}

impl<'a> Kill<'a> {
    /// A kill when half of `requests` have ended.
    pub fn halfway(cluster: Option<&'a Cluster>, requests: usize) -> Kill<'a> {
        Kill {
            cluster,
            after_requests: (requests / 2) as u64,
            killed: OnceLock::new(),
            again_tokens: AtomicU64::new(0),
        }
    }

    /// Waits for the moment and kills. Comes back only if that failed.
    pub async fn carry_out(&self, mut progress: watch::Receiver<Progress>) -> Error {
        let due = |progress: &Progress| progress.done + progress.failed >= self.after_requests;
        let at_s = progress.wait_for(due).await.map(|progress| progress.at_s);
        if let (Some(cluster), Ok(at_s)) = (self.cluster, at_s) {
            match cluster.kill_one().await {
                Ok((node, engines)) => drop(self.killed.set(Killed { node, engines, at_s })),
                Err(error) => return error,
            }
        }
        std::future::pending().await
    }

    /// A request has ended. One that an engine of the killed node answered, and that was sent after
    /// it, had no other KV than what is on the GPU: what its session had had beyond that was
    /// computed again.
    pub fn note(&self, record: &RequestRecord) {
        let Some(killed) = self.killed.get().filter(|killed| record.start_s >= killed.at_s) else { return };
        if let (Some(engine), Some(cached)) = (&record.backend, record.cached_tokens)
            && killed.engines.contains(engine)
        {
            let again = record.carried_tokens.saturating_sub(cached);
            self.again_tokens.fetch_add(again.into(), Ordering::Relaxed);
        }
    }

    /// What was counted; nothing where no kill was planned.
    pub fn counts(&self) -> Vec<Count> {
        let killed = u64::from(self.killed.get().is_some());
        let counts = [(rows::NODES_KILLED, killed), (rows::TOKENS_AGAIN, self.again_tokens())];
        counts.into_iter().filter(|_| self.cluster.is_some()).collect()
    }

    /// The same for people, with what the engines of `arm` counted.
    pub fn words(&self, arm: &str, counts: &[Count]) -> Option<String> {
        let cluster = self.cluster?;
        let Some(Killed { node, engines, .. }) = self.killed.get() else {
            return Some(format!(
                "{arm}: no node was killed: the replay ended before half of its requests had"
            ));
        };
        let missed = counts.iter().filter(|(name, chunks)| rows::MISSES.contains(name) && *chunks > 0);
        let missed: Vec<String> = missed.map(|(name, chunks)| format!("{chunks} {name}")).collect();
        Some(format!(
            "{arm}: {node} was killed after {} requests. Without it {} computed {} tokens again that their sessions had had \
             before. On all {} engines: {}.",
            self.after_requests,
            engines.join(", "),
            self.again_tokens(),
            cluster.engines(),
            missed.join(", "),
        ))
    }

    fn again_tokens(&self) -> u64 {
        self.again_tokens.load(Ordering::Relaxed)
    }
}
