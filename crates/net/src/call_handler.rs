//! What peers say to this agent beside asking for memory: notifications are kept here, words about
//! rails and memory of GPUs go to those, everything else to whoever answers calls. Channel 4 is in
//! `about.rs`; 5 is that of `forebay preflight net`, which agents decline.

use crate::about::About;
use crate::ipc::grants::Grants;
use crate::notifications::{IncomingNotifications, Notification};
use crate::rails::Rails;
use crate::tcp::{Event, Identity, LeaseTable, Reply, Service};
use forebay_transfer::LogGate;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;

/// First byte of a call that is a notification.
pub(crate) const NOTIFICATIONS: u8 = 0;
/// First byte of a call for the agent's service.
pub(crate) const CALLS: u8 = 1;
/// First byte of a call about rails.
pub(crate) const RAILS: u8 = 2;
/// First byte of a call about memory of GPUs.
pub(crate) const GPUS: u8 = 3;

/// Takes in what peers say.
pub(crate) struct CallHandler {
    incoming: Mutex<IncomingNotifications>,
    pub event: Event,
    leases: LeaseTable,
    rails: Arc<Rails>,
    grants: Arc<Grants>,
    service: Option<Arc<dyn Service>>,
    /// For the line that says that a notification was refused.
    refused: LogGate,
}

impl CallHandler {
    pub fn new(
        leases: LeaseTable,
        rails: Arc<Rails>,
        grants: Arc<Grants>,
        service: Option<Arc<dyn Service>>,
    ) -> CallHandler {
        let (incoming, event, refused) = (Mutex::default(), Event::default(), LogGate::new());
        CallHandler { incoming, event, leases, rails, grants, service, refused }
    }

    /// The notifications that wait, with their senders' names.
    pub fn take_notifications(&self) -> Vec<(String, Vec<u8>)> {
        self.incoming.lock().take()
    }

    fn notification(&self, from: Identity, bytes: &[u8], reply: Reply) {
        let Some(notification) = Notification::parse(bytes) else {
            return reply.refuse("a notification that is cut".into());
        };
        let taken = self.incoming.lock().take_in(from.instance, &notification);
        match taken {
            Ok(new) => {
                reply.send(Vec::new());
                if new {
                    self.event.set();
                }
            }
            Err(why) => {
                if let Some(repeated) = self.refused.pass() {
                    tracing::warn!(reason = why, repeated, "notification refused");
                }
                reply.refuse(why);
            }
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
            (Some(&GPUS), _) => self.grants.call(from, &body[1..], reply),
            _ if About::is_asked(&body) => reply.send(About::now().to_bytes()),
            (Some(&CALLS), None) => reply.refuse("this agent answers no calls".into()),
            (channel, _) => reply.refuse(format!("a call on channel {channel:?}, which means nothing")),
        }
    }

    fn gone(&self, from: Identity) {
        self.incoming.lock().gone(from.instance);
        self.leases.holder_is_gone(from.instance);
        self.grants.gone(from);
        if let Some(service) = &self.service {
            service.gone(from);
        }
    }
}
