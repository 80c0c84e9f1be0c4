//! Ending a node in order, within a limit. The thread that does it is made when the node starts, so
//! that a system that gives no more threads does not keep a node from ending.

use super::{Node, STOP_PATIENCE};
use forebay_store::ssd::SsdError;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How a node went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// Leases and slots that clients still held, and leases that peers did, when the time was over.
    pub cut_off: usize,
}

/// Why a node did not end in order.
#[derive(Debug, Error)]
pub enum DrainError {
    #[error(transparent)]
    Ssd(#[from] SsdError),
    #[error(
        "the node has not ended within {} s: what was not yet on SSD is lost, and the next start recovers \
         the logs; a disk does not answer, or is slower than limits.close_s allows for", limit.as_secs()
    )]
    Late { limit: Duration },
    #[error("the thread that ends the node has gone")]
    Gone,
}

/// What ends a node.
type Job = Box<dyn FnOnce() + Send>;

/// A thread that waits for the end.
#[derive(Debug, Clone)]
pub(super) struct Ender(Sender<Job>);

impl Ender {
    /// Starts the thread. It ends after its job, or when the node is dropped without one.
    pub fn start() -> std::io::Result<Ender> {
        let (sender, jobs) = channel::<Job>();
        let work = move || jobs.recv().map_or((), |job| job());
        std::thread::Builder::new().name("forebay-end".into()).spawn(work)?;
        Ok(Ender(sender))
    }
}

impl Node {
    /// Ends the node in order: nobody gets anything new, what clients and peers hold may end until
    /// `limit` is over, what waits for the disk is written, and the logs are closed. Waits no
    /// longer than [`end_limit`](Node::end_limit); a node that is late goes on ending.
    pub fn drain(self, limit: Duration) -> Result<Drained, DrainError> {
        let whole = self.end_limit(limit);
        let (sender, ended) = channel();
        self.end(limit, move |result| drop(sender.send(result)));
        match ended.recv_timeout(whole) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(DrainError::Late { limit: whole }),
            Err(RecvTimeoutError::Disconnected) => Err(DrainError::Gone),
        }
    }

    /// The longest that an end in order may take when what is held may be held for `limit` more.
    pub fn end_limit(&self, limit: Duration) -> Duration {
        limit.saturating_add(self.close_limit).saturating_add(STOP_PATIENCE)
    }

    /// The same without waiting: `on_end` is called on the node's own thread when nothing of the
    /// node is left. A disk that does not answer may keep that from ever happening.
    pub fn end(self, limit: Duration, on_end: impl FnOnce(Result<Drained, DrainError>) + Send + 'static) {
        let ender = self.ender.clone();
        // Should the thread have gone, the job is dropped, and the node and `on_end` with it.
        let _ = ender.0.send(Box::new(move || on_end(self.end_in_order(limit))));
    }

    fn end_in_order(self, limit: Duration) -> Result<Drained, DrainError> {
        let clients = &self.clients;
        tracing::info!(limit_s = limit.as_secs(), "node drains");
        clients.start_draining();
        if let Some(remote) = clients.remote() {
            remote.stop();
        }
        let until = Instant::now() + limit;
        let by_clients = clients.wait_until_light(until);
        let by_peers = clients.remote().map_or(0, |remote| remote.wait_until_back(until));
        self.stop();
        if let Err(error) = clients.store.close() {
            tracing::error!(reason = %error, "log not closed");
            return Err(error.into());
        }
        tracing::info!(cut_off_by_clients = by_clients, cut_off_by_peers = by_peers, "node ended");
        Ok(Drained { cut_off: by_clients + by_peers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NodeConfig, PeersConfig};
    use std::net::TcpListener;
    use std::sync::Arc;

    #[test]
    fn a_node_that_does_not_come_to_its_end_is_given_up_within_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = NodeConfig::new(folder.path().join("node.sock"), 1 << 20);
        config.limits.close_s = 1;
        let node = Node::start(&config).unwrap();
        // What ends it is held up, as by a disk that does not answer.
        let (release, held) = channel::<()>();
        node.ender.0.send(Box::new(move || held.recv().unwrap_or(()))).unwrap();
        let start = Instant::now();
        let late = node.drain(Duration::ZERO).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(60));
        assert!(late.to_string().contains("has not ended within 6 s"), "{late}");
        drop(release);
    }

    #[test]
    fn the_peers_port_is_free_when_a_node_has_ended_whoever_has_a_share_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = NodeConfig::new(folder.path().join("node.sock"), 1 << 20);
        config.peers = Some(PeersConfig::new("127.0.0.1:0".parse().unwrap()));
        let node = Node::start(&config).unwrap();
        let address = node.peer_address().unwrap();
        assert!(TcpListener::bind(address).is_err(), "the node listens there");
        // As the thread of a connection has one that ends last.
        let share = Arc::clone(&node.clients);
        node.drain(Duration::ZERO).unwrap();
        assert!(TcpListener::bind(address).is_ok(), "another one can listen there");
        drop(share);
    }

    #[test]
    fn a_node_that_is_dropped_lets_the_thread_go_that_would_end_it() {
        let ender = Ender::start().unwrap();
        let (sender, ended) = channel::<()>();
        ender.0.send(Box::new(move || drop(sender))).unwrap();
        drop(ender);
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
    }
}
