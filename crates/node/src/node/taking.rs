//! Beginning with the memory of another node of this host, which ends.

use super::{Node, NodeError, admission};
use crate::config::{NodeConfig, largest_chunk};
use crate::hand_over::{Layout, Left, Predecessor, TakeOverError, Taking, TakingStep};
use crate::local::clients::Inherited;
use crate::local::listener::Listener;
use rustix::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long the old node may take beside closing its logs: for what is leased and written, and for
/// its threads.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where chunks can lie in the memory of a node that is told this.
pub(super) fn layout(config: &NodeConfig) -> Layout {
    Layout { memory_bytes: config.memory.size, largest_chunk: largest_chunk(config) }
}

impl Node {
    /// Starts a node with the memory, and all that is in it, of the one that has the socket, which
    /// ends. Where none has it, as [`start`](Node::start). If this fails the other one goes on.
    pub fn take_over(config: &NodeConfig) -> Result<Node, NodeError> {
        Node::check(config)?;
        let begun = Instant::now();
        let patience = PATIENCE + Duration::from_secs(config.limits.close_s);
        let failed = |error| NodeError::TakeOver { path: config.socket.clone(), error };
        let asked = Predecessor::ask(&config.socket, layout(config), patience).map_err(failed)?;
        let Some(mut predecessor) = asked else {
            tracing::info!(socket = %config.socket.display(), "no node to take over from");
            return Node::start(config);
        };
        tracing::info!(socket = %config.socket.display(), "takes over");
        let (left, listening) = match predecessor.receive() {
            Ok(parts) => parts,
            Err(error) => {
                predecessor.give_up(&error);
                return Err(failed(error));
            }
        };
        Node::begin_with(config, left, listening, predecessor, begun)
    }

    /// Opens everything, and lets clients in when the memory is this node's.
    fn begin_with(
        config: &NodeConfig,
        left: Left,
        listening: OwnedFd,
        mut predecessor: Predecessor,
        begun: Instant,
    ) -> Result<Node, NodeError> {
        let (effective, chunks) = (config.effective(), left.kept.chunks.len());
        let failed = |error| NodeError::TakeOver { path: config.socket.clone(), error };
        let opened = Node::open(config, Some(left)).and_then(|node| {
            let listener = Listener::inherit(&config.socket, listening, &admission(config));
            Ok((node, listener.map_err(|error| failed(error.into()))?))
        });
        let (node, listener) = match (Taking::Opens.on(opened.is_ok()), opened) {
            (step, Ok(opened)) => {
                debug_assert_eq!(step, TakingStep::SayReady);
                opened
            }
            (_, Err(error)) => {
                predecessor.give_up(&error);
                return Err(error);
            }
        };
        if let Err(error) = take(&mut predecessor) {
            // The other one needs its logs and ports again before it hears that.
            drop(node);
            listener.leave();
            predecessor.give_up(&error);
            return Err(failed(error));
        }
        node.note_inherited(chunks, begun.elapsed());
        node.serve(listener, &effective)
    }

    /// The node has begun with another one's memory.
    pub(super) fn note_inherited(&self, chunks: usize, took: Duration) {
        tracing::info!(chunks, took_ms = took.as_millis() as u64, "memory taken over");
        // A node begins once.
        let _ = self.clients.inherited.set(Inherited { chunks, took });
    }
}

/// Says that this node is ready, and that it has the memory once it may.
fn take(predecessor: &mut Predecessor) -> Result<(), TakeOverError> {
    let yours = predecessor.say_ready();
    match Taking::AwaitsYours.on(yours.is_ok()) {
        TakingStep::SayTaken => predecessor.say_taken(),
        TakingStep::SayReady | TakingStep::GiveUp => {}
    }
    yours
}
