//! What a flow is told while a mover owns it, how it is used, and what it has done.

use super::call::{CallEnd, CallError};
use super::command::PeerRegion;
use super::error::Broken;
use super::greeting::Identity;
use super::tls::TlsConfig;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Completion, Inbox, LinkOp, Memory, OpId, Outcome};
use std::sync::Arc;

/// How a flow is used.
#[derive(Clone)]
pub struct FlowOptions {
    /// Shown to the peer if it asks for one. At most [`TOKEN_BYTES_MAX`](super::TOKEN_BYTES_MAX)
    /// bytes.
    pub token: Vec<u8>,
    /// The instance to speak to; another one is an error. `None`: whoever answers.
    pub instance: Option<[u8; 16]>,
    /// Connecting and the greeting may take this long.
    pub connect_limit_us: u64,
    /// With something under way and no byte moved for this long, the peer counts as frozen and the
    /// flow ends.
    pub progress_limit_us: u64,
    pub op_limit_us: u64,
    /// A flow that is in use asks after this much silence whether the peer is alive.
    pub ping_after_us: u64,
    /// The socket's buffers, each; the system decides otherwise.
    pub socket_buffer_bytes: Option<usize>,
    /// This node's certificate and whom it trusts. `None`: plain text.
    pub tls: Option<Arc<TlsConfig>>,
    /// Plain text also to addresses beyond loopback.
    pub plain_beyond_loopback: bool,
}

impl Default for FlowOptions {
    fn default() -> FlowOptions {
        FlowOptions {
            token: Vec::new(),
            instance: None,
            connect_limit_us: 5_000_000,
            progress_limit_us: 2_000_000,
            op_limit_us: 30_000_000,
            ping_after_us: 1_000_000,
            socket_buffer_bytes: None,
            tls: None,
            plain_beyond_loopback: false,
        }
    }
}

/// Who was found at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerInfo {
    pub identity: Identity,
    /// What it offered when the flow began.
    pub regions: Vec<PeerRegion>,
}

/// What a flow has done so far.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlowStats {
    pub moved_bytes: u64,
    pub done: u64,
    pub failed: u64,
    pub corrupt: u64,
    pub broken: Option<Broken>,
}

/// What a flow is asked to do.
pub(super) enum Message {
    Op(LinkOp, Arc<Memory>, Completion),
    Call(Vec<u8>, u64, Caller),
    CancelOp(OpId),
    Doubt,
    Sever,
}

/// Whoever waits for the end of a call. Hears of it once, also when the flow's thread comes to
/// grief.
pub(super) struct Caller {
    pub on_reply: Option<Box<dyn FnOnce(CallEnd) + Send>>,
    /// Hears of an answer that comes after the call was given up.
    pub on_late: Option<Box<dyn FnOnce(Vec<u8>) + Send>>,
}

impl Caller {
    pub fn hear(&mut self, end: CallEnd) {
        if let Some(on_reply) = self.on_reply.take() {
            on_reply(end);
        } else if let (Ok(answer), Some(on_late)) = (end, self.on_late.take()) {
            on_late(answer);
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(on_reply) = self.on_reply.take() {
            on_reply(Err(Broken::Ended.into()));
        }
    }
}

/// Speaks to a flow while a mover owns it. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct FlowHandle {
    pub(super) inbox: Arc<Inbox<Message>>,
    state: Arc<Mutex<State>>,
}

type Watcher = Box<dyn FnOnce(Broken) + Send>;

struct State {
    stats: FlowStats,
    /// Who wants to know why the flow has ended. `None`: they were told.
    watchers: Option<Vec<Watcher>>,
}

impl FlowHandle {
    pub(super) fn new(inbox: Arc<Inbox<Message>>) -> FlowHandle {
        let state = State { stats: FlowStats::default(), watchers: Some(Vec::new()) };
        FlowHandle { inbox, state: Arc::new(Mutex::new(state)) }
    }

    /// Counts an outcome and tells whoever waits for it.
    pub(super) fn end(&self, done: Option<Completion>, outcome: Outcome) {
        let mut state = self.state.lock();
        match &outcome {
            Outcome::Moved { bytes } => {
                state.stats.done += 1;
                state.stats.moved_bytes += bytes;
            }
            Outcome::Failed { .. } | Outcome::Denied { .. } => state.stats.failed += 1,
            Outcome::Corrupt => state.stats.corrupt += 1,
        }
        drop(state);
        if let Some(done) = done {
            done.finish(outcome);
        }
    }

    /// The flow has ended; its operations and calls end now.
    pub(super) fn set_broken(&self, broken: &Broken) {
        self.state.lock().stats.broken = Some(broken.clone());
    }

    /// Its operations and calls have ended.
    pub(super) fn tell_watchers(&self, broken: &Broken) {
        let watchers = self.state.lock().watchers.take();
        watchers.into_iter().flatten().for_each(|watcher| watcher(broken.clone()));
    }

    /// Ends the connection now. Operations that are under way fail at once and touch nothing any
    /// more, at either end; the peer is not waited for. For a peer that is known to be frozen or
    /// gone.
    pub fn sever(&self) {
        // A flow that has ended has nothing left to sever.
        let _ = self.inbox.post(Message::Sever);
    }

    /// Another flow has found the peer frozen. This one ends as well, unless it has moved a byte
    /// lately: then it is that other connection which is.
    pub fn doubt(&self) {
        // A flow that has ended is beyond doubt.
        let _ = self.inbox.post(Message::Doubt);
    }

    /// Asks the peer for something beside its memory and tells `on_reply`, once, on the flow's
    /// thread, which moves no byte meanwhile. Calls overtake operations, and each other's answers.
    /// A call that waits is given up after `limit_us`.
    pub fn call(
        &self,
        body: Vec<u8>,
        limit_us: u64,
        on_reply: impl FnOnce(Result<Vec<u8>, CallError>) + Send + 'static,
    ) {
        self.call_and_hear(body, limit_us, on_reply, |_| {});
    }

    /// The same, for who has to know the answer also after the limit: `on_late` is told then, once,
    /// if one comes.
    pub fn call_and_hear(
        &self,
        body: Vec<u8>,
        limit_us: u64,
        on_reply: impl FnOnce(Result<Vec<u8>, CallError>) + Send + 'static,
        on_late: impl FnOnce(Vec<u8>) + Send + 'static,
    ) {
        let caller = Caller { on_reply: Some(Box::new(on_reply)), on_late: Some(Box::new(on_late)) };
        if let Err(Message::Call(_, _, mut caller)) = self.inbox.post(Message::Call(body, limit_us, caller)) {
            caller.hear(Err(self.stats().broken.unwrap_or(Broken::Ended).into()));
        }
    }

    /// Tells `watcher`, once, why the flow has ended: on the flow's thread after all operations and
    /// calls, or at once if that is past.
    pub fn on_broken(&self, watcher: impl FnOnce(Broken) + Send + 'static) {
        let mut state = self.state.lock();
        if let Some(watchers) = &mut state.watchers {
            return watchers.push(Box::new(watcher));
        }
        let broken = state.stats.broken.clone();
        drop(state);
        watcher(broken.unwrap_or(Broken::Ended));
    }

    pub fn stats(&self) -> FlowStats {
        self.state.lock().stats.clone()
    }
}

impl std::fmt::Debug for FlowHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlowHandle").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
