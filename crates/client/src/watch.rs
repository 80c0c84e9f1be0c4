//! Telling a client which of the chunks that it watches the node has no more.

use super::Client;
use crate::protocol::answer::Answer;
use crate::protocol::request::Request;
use forebay_kv::ChunkId;
use parking_lot::Mutex;
use std::sync::Arc;

/// Watched chunks that the node has no more, neither in memory nor on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gone {
    /// These. They are not watched any more.
    These(Vec<ChunkId>),
    /// The node is gone, and nothing is watched any more: what is known of its chunks is void.
    All,
}

type OnGone = Arc<dyn Fn(Gone) + Send + Sync>;

/// Who is told.
#[derive(Default)]
pub(super) struct Watcher(Mutex<Option<OnGone>>);

impl Watcher {
    /// Tells. Called by the thread of a connection, in the order in which the node said it.
    pub fn tell(&self, gone: Gone) {
        let listener = self.0.lock().clone();
        if let Some(listener) = listener {
            listener(gone);
        }
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watcher")
    }
}

impl Client {
    /// Has `listener`, and no other any more, told of [watched](Client::watch_then) chunks that go.
    /// It runs on the client's threads: keep it short.
    pub fn on_gone(&self, listener: impl Fn(Gone) + Send + Sync + 'static) {
        if self.here().is_err() {
            return;
        }
        *self.shared.watcher.0.lock() = Some(Arc::new(listener));
    }

    /// Watches chunks from now on, those that are watched already too, without waiting. `on_answer`
    /// is called exactly once, as the listener is or, if there is no node, on this thread, with
    /// those of them that the node does not have or does not watch, since it watches too many: all,
    /// if it falls silent. Both are told in order: what goes after this was answered is told after
    /// it.
    pub fn watch_then(&self, ids: &[ChunkId], on_answer: impl FnOnce(Vec<ChunkId>) + Send + 'static) {
        let all = ids.to_vec();
        let Some(connection) = self.shared.connection() else { return on_answer(all) };
        self.shared.ask_patiently(&connection, &Request::Watch(ids.to_vec()), move |answer| match answer {
            Some(Answer::Watched(absent)) => on_answer(absent),
            _ => on_answer(all),
        });
    }
}
