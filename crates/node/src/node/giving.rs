//! Handing the memory over to another node of this host. Up to the point at which that one has it,
//! this one goes on with it if anything fails.

use super::taking::layout;
use super::{Node, NodeError};
use crate::config::NodeConfig;
use crate::hand_over::{Giving, GivingStep, Heard, Left, NotGiven, Successor};
use crate::local::listener::Listener;
use forebay_store::Store;
use rustix::fd::AsFd;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long what clients and peers hold may be held on.
const HELD_LIMIT: Duration = Duration::from_secs(2);
/// How long reads and writes of the memory may take to end that no thread waits for any more.
const QUIET_LIMIT: Duration = Duration::from_secs(5);
const QUIET_PAUSE: Duration = Duration::from_millis(1);
/// How long the new node may take to be ready, and then to say that it has taken the memory.
const READY_LIMIT: Duration = Duration::from_secs(30);
const TAKEN_LIMIT: Duration = Duration::from_secs(5);
/// A new node that is late may have the logs and ports for so long that this one wants back.
const BACK_LIMIT: Duration = Duration::from_secs(30);
const BACK_PAUSE: Duration = Duration::from_millis(100);

/// What became of a hand-over.
#[derive(Debug)]
pub enum HandedOver {
    /// Another node has the memory.
    Gone { chunks: usize, took: Duration },
    /// This node goes on.
    Back(Box<Node>),
}

/// Why a node ended without another one having its memory.
#[derive(Debug, Error)]
pub enum HandOverError {
    #[error("the memory is still read or written {} s after all threads ended; it is lost", QUIET_LIMIT.as_secs())]
    NotQuiet,
    #[error("the thread of the socket has gone")]
    NoListener,
    #[error("the memory is lost: {0}")]
    System(#[from] std::io::Error),
    #[error("the memory is lost: {why}, and this node does not start again: {error}")]
    NotBack { why: String, error: NodeError },
}

/// A node that has ended, but for its memory and the socket on which clients wait.
struct Ended {
    left: Left,
    listener: Listener,
}

impl Node {
    /// From now on `on_successor` is told of processes that may and can go on with this node's
    /// memory. They wait for [`hand_over`](Node::hand_over).
    pub fn on_successor(&self, config: &NodeConfig, on_successor: impl Fn(Successor) + Send + 'static) {
        self.clients.set_on_successor(layout(config), on_successor);
    }

    /// Ends the node in order, but for what is in memory, with which the other one goes on: nobody
    /// gets anything new, and what clients hold may end for two seconds. As long as clients write
    /// slots nothing is handed over.
    ///
    /// Clients that connect meanwhile wait for whichever node has the memory then.
    pub fn hand_over(self, config: &NodeConfig, successor: Successor) -> Result<HandedOver, HandOverError> {
        let begun = Instant::now();
        tracing::info!(process = successor.process(), "hands over");
        let clients = &self.clients;
        clients.start_draining();
        let until = begun + HELD_LIMIT.min(Duration::from_secs(config.limits.drain_s));
        let held = clients.wait_until_light(until);
        let slots = clients.slots();
        if slots > 0 {
            clients.end_draining();
            clients.refuse_successor(successor, &NotGiven::Written { slots });
            return Ok(HandedOver::Back(Box::new(self)));
        }
        let by_peers = clients.remote().map_or(0, |remote| {
            remote.stop();
            remote.wait_until_back(until)
        });
        let ended = self.end_but_memory()?;
        let chunks = ended.left.kept.chunks.len();
        match give(&ended, successor) {
            Ok(()) => {
                ended.listener.leave();
                let took = begun.elapsed();
                let (cut_off, took_ms) = (held + by_peers, took.as_millis() as u64);
                tracing::info!(chunks, cut_off, took_ms, "memory handed over");
                Ok(HandedOver::Gone { chunks, took })
            }
            Err(why) => {
                tracing::warn!(reason = why, "memory taken back");
                Ok(HandedOver::Back(Box::new(Node::go_on(config, ended, begun, why)?)))
            }
        }
    }

    /// Ends everything but the memory and the socket.
    fn end_but_memory(mut self) -> Result<Ended, HandOverError> {
        self.stop();
        let listener = self.listener.take().and_then(|thread| thread.join().ok());
        let listener = listener.ok_or(HandOverError::NoListener)?;
        let store = self.clients.store.clone();
        if let Err(error) = store.close_at_once() {
            // The other one recovers it.
            tracing::error!(reason = %error, "log not closed");
        }
        drop(self);
        Ok(Ended { left: leave(&store)?, listener })
    }

    /// Starts again in this process, with the memory that no other one took.
    fn go_on(config: &NodeConfig, ended: Ended, begun: Instant, why: String) -> Result<Node, HandOverError> {
        let until = Instant::now() + BACK_LIMIT;
        let Ended { left: Left { arena, pages, kept }, listener } = ended;
        let effective = config.effective();
        // Clients that connect see this process at the other end again.
        let listening = listener.as_fd().try_clone_to_owned()?;
        loop {
            let left = Left { arena: arena.try_clone()?, pages, kept: kept.clone() };
            match Node::open(config, Some(left)) {
                Ok(node) => {
                    node.note_inherited(kept.chunks.len(), begun.elapsed());
                    listener.leave();
                    let failed = |error| NodeError::Socket { path: config.socket.clone(), error };
                    let served = Listener::inherit(&config.socket, listening, &super::admission(config))
                        .map_err(failed)
                        .and_then(|listener| node.serve(listener, &effective));
                    return served.map_err(|error| HandOverError::NotBack { why, error });
                }
                Err(error) if Instant::now() >= until => return Err(HandOverError::NotBack { why, error }),
                Err(_) => std::thread::sleep(BACK_PAUSE),
            }
        }
    }
}

/// What is in memory when nothing touches it any more.
fn leave(store: &Store) -> Result<Left, HandOverError> {
    let until = Instant::now() + QUIET_LIMIT;
    let kept = loop {
        match store.kept() {
            Some(kept) => break kept,
            None if Instant::now() >= until => return Err(HandOverError::NotQuiet),
            None => std::thread::sleep(QUIET_PAUSE),
        }
    };
    Ok(Left { arena: store.arena_fd().try_clone_to_owned()?, pages: store.pages(), kept })
}

/// Gives everything to the new node, or says why it is still this one's.
fn give(ended: &Ended, mut successor: Successor) -> Result<(), String> {
    successor.give(&ended.left, ended.listener.as_fd()).map_err(|error| error.to_string())?;
    let (mut state, mut limit) = (Giving::AwaitsReady, READY_LIMIT);
    loop {
        let heard = successor.hear(limit).unwrap_or_else(|error| match state {
            Giving::AwaitsReady => Heard::GaveUp(error.to_string()),
            // It was told that it has the memory, and may go on with it.
            Giving::AwaitsTaken => Heard::Late,
        });
        match state.on(heard) {
            GivingStep::SayYours => {
                successor.say_yours().map_err(|error| error.to_string())?;
                (state, limit) = (Giving::AwaitsTaken, TAKEN_LIMIT);
            }
            GivingStep::Leave => return Ok(()),
            GivingStep::TakeBack(why) => return Err(why),
        }
    }
}
