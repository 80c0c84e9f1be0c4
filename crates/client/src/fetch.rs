//! Chunks that come into the node's memory before anybody loads them. This file knows in which order, and how many come at a time;
//! it must never know who will load them.

use super::lease::Lease;
use super::lent::bring;
use forebay_transfer::Class;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Chunks of a lease that come at a time.
const AT_A_TIME: usize = 8;

struct Fetch {
    /// Who lets go of it wants no more.
    lease: Weak<Lease>,
    next: AtomicUsize,
}

/// Has the chunks of a lease that are on the node's disk or on peers come into its memory, in their order, until the lease is
/// dropped. A chunk that does not come is left to whoever loads it.
pub fn fetch(lease: &Arc<Lease>) {
    let next = AtomicUsize::new(lease.in_memory());
    let fetch = Arc::new(Fetch { lease: Arc::downgrade(lease), next });
    (0..AT_A_TIME).for_each(|_| fetch.go_on());
}

impl Fetch {
    /// Asks for the next chunk. When it has come, for another one.
    fn go_on(self: &Arc<Self>) {
        let Some(lease) = self.lease.upgrade() else { return };
        let Ok(held) = lease.alive() else { return };
        let chunk = self.next.fetch_add(1, Ordering::Relaxed);
        if chunk >= lease.len() {
            return;
        }
        let fetch = Arc::clone(self);
        bring(held, chunk, Class::Prefetch, None, move |brought| {
            if brought.is_ok() {
                fetch.go_on();
            }
        });
    }
}
