//! What peers say to this agent beside asking for memory: notifications are kept here, words about rails go to those,
//! everything else to whoever answers calls. This file knows channels; it must never know what is said on them.

use crate::event::Event;
use crate::leases::LeaseTable;
use crate::notifications::{Inbox, Notification};
use crate::rails::Rails;
use crate::tcp::{Identity, Reply, Service};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First byte of a call that is a notification.
pub(crate) const NOTIFICATIONS: u8 = 0;
/// First byte of a call for the agent's service.
pub(crate) const CALLS: u8 = 1;
/// First byte of a call about rails.
pub(crate) const RAILS: u8 = 2;

/// Between two lines that tell of the same.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Takes in what peers say.
pub(crate) struct CallHandler {
    inbox: Mutex<Inbox>,
    pub event: Event,
    leases: LeaseTable,
    rails: Arc<Rails>,
    service: Option<Arc<dyn Service>>,
    refused_told: Mutex<Option<Instant>>,
}

impl CallHandler {
    pub fn new(leases: LeaseTable, rails: Arc<Rails>, service: Option<Arc<dyn Service>>) -> CallHandler {
        let (inbox, event, refused_told) = (Mutex::default(), Event::default(), Mutex::default());
        CallHandler { inbox, event, leases, rails, service, refused_told }
    }

    /// The notifications that wait, with their senders' names.
    pub fn take_notifications(&self) -> Vec<(String, Vec<u8>)> {
        self.inbox.lock().take()
    }

    fn notification(&self, from: Identity, bytes: &[u8], reply: Reply) {
        let Some(notification) = Notification::parse(bytes) else {
            return reply.refuse("a notification that is cut".into());
        };
        let taken = self.inbox.lock().take_in(from.instance, &notification);
        match taken {
            Ok(new) => {
                reply.send(Vec::new());
                if new {
                    self.event.set();
                }
            }
            Err(why) => {
                self.tell_refused(&why);
                reply.refuse(why);
            }
        }
    }

    /// Once a minute at most.
    fn tell_refused(&self, why: &str) {
        let mut told = self.refused_told.lock();
        if told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
            *told = Some(Instant::now());
            tracing::warn!("notifications of peers are refused until those that wait are taken: {why}");
        }
    }
}

impl Service for CallHandler {
    fn call(&self, from: Identity, mut body: Vec<u8>, reply: Reply) {
        match (body.first(), &self.service) {
            (Some(&NOTIFICATIONS), _) => self.notification(from, &body[1..], reply),
            (Some(&CALLS), Some(service)) => {
                body.remove(0);
                service.call(from, body, reply);
            }
            (Some(&RAILS), _) => {
                body.remove(0);
                self.rails.call(body, reply);
            }
            (Some(&CALLS), None) => reply.refuse("this agent answers no calls".into()),
            (channel, _) => reply.refuse(format!("a call on channel {channel:?}, which means nothing")),
        }
    }

    fn gone(&self, from: Identity) {
        self.inbox.lock().gone(from.instance);
        self.leases.holder_is_gone(from.instance);
        if let Some(service) = &self.service {
            service.gone(from);
        }
    }
}
