//! A PCIe link of a relay in the node's process, as a link of the engine's mover.

use super::ring::Asker;
use super::session::Session;
use crate::links::Direction;
use crate::poller::WatchTrack;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Completion, Link, LinkOp, Memory, Outcome};
use std::sync::Arc;

/// The link. It stays for good; the connection behind its port comes and goes.
#[derive(Debug)]
pub struct RemoteLink {
    direction: Direction,
    port: Arc<Port>,
    track: WatchTrack,
}

/// Where a connection is plugged into a link.
#[derive(Debug, Default)]
pub struct Port(Mutex<Option<Plug>>);

#[derive(Debug)]
struct Plug {
    session: Arc<Session>,
    queue: usize,
    asker: Asker,
}

impl Port {
    /// Uses a queue of a connection from now on.
    pub fn connect(&self, session: &Arc<Session>, queue: usize) {
        *self.0.lock() = Some(Plug { session: Arc::clone(session), queue, asker: Asker::default() });
    }

    /// Asks for nothing more.
    pub fn disconnect(&self) {
        *self.0.lock() = None;
    }
}

impl RemoteLink {
    pub fn new(direction: Direction, port: &Arc<Port>, track: WatchTrack) -> RemoteLink {
        RemoteLink { direction, port: Arc::clone(port), track }
    }
}

impl Link for RemoteLink {
    fn start(&mut self, op: LinkOp, _memory: &Arc<Memory>, done: Completion) {
        let direction = self.direction;
        let mut plug = self.port.0.lock();
        let asked = match &mut *plug {
            Some(Plug { session, .. }) if session.is_down() => return session.park(done),
            Some(Plug { session, queue, asker }) => session.ask(*queue, asker, direction, &op),
            None => Err("no node is attached"),
        };
        drop(plug);
        match asked {
            Ok((request, bytes)) => {
                let watch = request.watch();
                let end = move |_| request.end(direction, bytes, done);
                self.track.when_passed(watch, Box::new(end));
            }
            Err(error) => done.finish(Outcome::Failed { error: error.into() }),
        }
    }
}
