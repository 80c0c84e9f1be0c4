//! One engine as all threads of a router see it: where it is, what the log is told of it, who waits
//! for news of it, and the statuses of its answers. It lives as long as anybody has to do with it,
//! also after it has left.

use crate::config::Target;
use crate::hand_over::Ticket;
use crate::log_lines::EngineLines;
use forebay_transfer::lock::Mutex;
use http::StatusCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Notify, watch};

#[derive(Debug)]
pub struct Engine {
    /// Its place in the dispatcher's lists, where another one may come after it has left.
    pub slot: usize,
    /// Nobody else's, ever.
    pub id: u64,
    pub target: Target,
    /// Log lines about it.
    pub lines: EngineLines,
    /// Wakes those who wait for a first byte of it when there is news of it, or another engine has
    /// come back.
    pub news: Notify,
    /// Its answers to clients.
    pub statuses: Statuses,
    /// What its last prefill for another engine said of itself.
    ticket: Mutex<Option<Arc<Ticket>>>,
    has_left: watch::Sender<bool>,
}

impl Engine {
    pub fn new(slot: usize, id: u64, target: Target) -> Engine {
        Engine {
            slot,
            id,
            target,
            lines: EngineLines::default(),
            news: Notify::new(),
            statuses: Statuses::default(),
            ticket: Mutex::default(),
            has_left: watch::Sender::new(false),
        }
    }

    pub fn name(&self) -> &str {
        &self.target.name
    }

    /// What its last prefill for another engine said of itself, if that went well.
    pub fn ticket(&self) -> Option<Arc<Ticket>> {
        self.ticket.lock().clone()
    }

    pub fn set_ticket(&self, ticket: Option<Ticket>) {
        *self.ticket.lock() = ticket.map(Arc::new);
    }

    /// It is gone: whoever watches it may stop.
    pub fn leave(&self) {
        self.has_left.send_replace(true);
    }

    /// Ends when it is gone.
    pub async fn left(&self) {
        // The sender lives as long as this engine.
        let _ = self.has_left.subscribe().wait_for(|left| *left).await;
    }
}

const FIRST_STATUS: u16 = 100;
const STATUSES: usize = 500;

/// How many answers had which status, from 100 on.
#[derive(Debug)]
pub struct Statuses([AtomicU64; STATUSES]);

impl Default for Statuses {
    fn default() -> Statuses {
        Statuses([const { AtomicU64::new(0) }; STATUSES])
    }
}

impl Statuses {
    pub fn count(&self, status: StatusCode) {
        if let Some(count) = self.0.get(usize::from(status.as_u16().saturating_sub(FIRST_STATUS))) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Those that there were.
    pub fn counts(&self) -> Vec<(u16, u64)> {
        let counts = (FIRST_STATUS..).zip(self.0.iter().map(|count| count.load(Ordering::Relaxed)));
        counts.filter(|&(_, count)| count > 0).collect()
    }
}
