//! What the log says of one peer: each change of its state, with the reason, at most once a minute.
//! `docs/reference/logs.md` has the lines.

use crate::capabilities::WhyIdle;
use crate::error::{PeerError, Unreachable};
use crate::tcp::Broken;
use forebay_transfer::LogGate;

/// The lines of one peer.
#[derive(Debug, Default)]
pub(crate) struct PeerLog {
    peer: String,
    up: LogGate,
    lost: LogGate,
    unreached: LogGate,
    rail_up: LogGate,
    rail_lost: LogGate,
    rail_not_used: LogGate,
    ipc_not_used: LogGate,
    corrupt: LogGate,
    notifications: LogGate,
}

impl PeerLog {
    pub fn of(peer: &str) -> PeerLog {
        PeerLog { peer: peer.to_owned(), ..PeerLog::default() }
    }

    /// The first connection came about.
    pub fn up(&self) {
        self.unreached.reset();
        if let Some(repeated) = self.up.pass() {
            tracing::info!(peer = self.peer, repeated, "peer up");
        }
    }

    /// The last connection ended.
    pub fn lost(&self, why: &Broken) {
        if let Some(repeated) = self.lost.pass() {
            tracing::warn!(peer = self.peer, reason = %why, repeated, "peer lost");
        }
    }

    /// No connection came about. Told at once where it is for another reason than before.
    pub fn unreached(&self, before: Option<&Unreachable>, now: &Unreachable) {
        if before.is_none_or(|before| before.reason != now.reason) {
            self.unreached.reset();
        }
        if let Some(repeated) = self.unreached.pass() {
            let (reason, advice) = (now.reason.label(), now.reason.advice());
            tracing::warn!(peer = self.peer, reason, detail = now.why, advice, repeated, "peer not reached");
        }
    }

    /// Bytes go over this rail from now on.
    pub fn rail_up(&self, rail: &str, path: &str) {
        if let Some(repeated) = self.rail_up.pass() {
            tracing::info!(peer = self.peer, rail, path, repeated, "rail up");
        }
    }

    /// A rail carries nothing, because something failed.
    pub fn rail_not_used(&self, rail: &str, why: &WhyIdle) {
        if let Some(repeated) = self.rail_not_used.pass() {
            tracing::warn!(peer = self.peer, rail, reason = %why, repeated, "rail not used");
        }
    }

    /// Bytes between GPUs of this host go over connections, because something failed.
    pub fn ipc_not_used(&self, why: &str) {
        if let Some(repeated) = self.ipc_not_used.pass() {
            tracing::warn!(peer = self.peer, reason = why, repeated, "GPU IPC not used");
        }
    }

    /// A rail has no connection any more; bytes go on over `path`.
    pub fn rail_lost(&self, rail: &str, why: &Broken, path: &str) {
        if let Some(repeated) = self.rail_lost.pass() {
            tracing::warn!(peer = self.peer, rail, reason = %why, path, repeated, "rail lost");
        }
    }

    /// A lot's bytes arrived with another checksum than they were sent with.
    pub fn corrupt(&self, path: &str) {
        if let Some(repeated) = self.corrupt.pass() {
            tracing::warn!(peer = self.peer, path, repeated, "corrupt frame");
        }
    }

    /// A notification did not arrive.
    pub fn notification_lost(&self, why: &PeerError) {
        if let Some(repeated) = self.notifications.pass() {
            tracing::warn!(peer = self.peer, reason = %why, repeated, "notification lost");
        }
    }
}
