//! Peers that lease to this node, and what waits until one of them may lease more. Pure: this file
//! counts questions and leases.
//!
//! A question is open until it is answered without a lease, or its lease is given back. While a
//! peer has any open, one that was told "not now" waits for one of them to be closed; with none
//! open nothing would ever wake it, so it does not wait.

use std::collections::{HashMap, VecDeque};

/// All peers of which something is wanted.
pub struct LeaseQueue<T> {
    peers: HashMap<String, Peer<T>>,
}

struct Peer<T> {
    open: usize,
    closed: u64,
    waiting: VecDeque<T>,
}

/// What becomes of those that were told "not now".
#[derive(Debug, PartialEq, Eq)]
pub enum NotNow<T> {
    Wait,
    /// Something was closed since they asked: they ask again.
    Again(Vec<T>),
    /// Nothing that the peer leases to this node would end: another peer is to be asked.
    OtherPeer(Vec<T>),
}

impl<T> Default for LeaseQueue<T> {
    fn default() -> LeaseQueue<T> {
        LeaseQueue { peers: HashMap::new() }
    }
}

impl<T> LeaseQueue<T> {
    /// A peer is asked. Gives how many questions were closed before.
    pub fn open(&mut self, peer: &str) -> u64 {
        let new = || Peer { open: 0, closed: 0, waiting: VecDeque::new() };
        let of_peer = self.peers.entry(peer.to_owned()).or_insert_with(new);
        of_peer.open += 1;
        of_peer.closed
    }

    /// A question is closed. Gives who may ask now: one, since as much is free as that one had;
    /// all, if nothing would wake them.
    pub fn close(&mut self, peer: &str) -> Vec<T> {
        let Some(of_peer) = self.peers.get_mut(peer) else { return Vec::new() };
        of_peer.open = of_peer.open.saturating_sub(1);
        of_peer.closed += 1;
        match of_peer.open {
            0 => self.forget(peer),
            _ => of_peer.waiting.pop_front().into_iter().collect(),
        }
    }

    /// The peer leases no more now to one that asked when `closed` questions were closed.
    pub fn not_now(&mut self, peer: &str, closed: u64, asker: T) -> NotNow<T> {
        let Some(of_peer) = self.peers.get_mut(peer) else { return NotNow::OtherPeer(vec![asker]) };
        of_peer.open = of_peer.open.saturating_sub(1);
        of_peer.waiting.push_back(asker);
        match of_peer.open {
            0 if of_peer.closed != closed => NotNow::Again(self.forget(peer)),
            0 => NotNow::OtherPeer(self.forget(peer)),
            _ => NotNow::Wait,
        }
    }

    /// Has something ask when an open question is closed; there has to be one.
    pub fn wait(&mut self, peer: &str, asker: T) {
        if let Some(of_peer) = self.peers.get_mut(peer) {
            of_peer.waiting.push_back(asker);
        }
    }

    fn forget(&mut self, peer: &str) -> Vec<T> {
        self.peers.remove(peer).map(|peer| peer.waiting.into()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_asks_for_each_lease_that_ends_and_all_when_the_last_one_does() {
        let mut queue = LeaseQueue::default();
        for asker in 0..5 {
            let closed = queue.open("left");
            if asker > 1 {
                assert_eq!(queue.not_now("left", closed, asker), NotNow::Wait);
            }
        }
        assert_eq!(queue.close("left"), [2]);
        assert_eq!(queue.close("left"), [3, 4]);
        assert!(queue.peers.is_empty());
    }

    #[test]
    fn nobody_waits_for_what_will_never_end() {
        let mut queue = LeaseQueue::default();
        let (first, second) = (queue.open("left"), queue.open("left"));
        assert_eq!(queue.not_now("left", first, 1), NotNow::Wait, "the second question is open");
        assert_eq!(queue.not_now("left", second, 2), NotNow::OtherPeer(vec![1, 2]));
        let (lease, asker) = (queue.open("left"), queue.open("left"));
        assert_eq!(lease, asker);
        assert!(queue.close("left").is_empty());
        assert_eq!(queue.not_now("left", asker, 3), NotNow::Again(vec![3]), "the lease ended meanwhile");
        assert!(queue.peers.is_empty());
    }
}
