//! Fetching the chunks of a lease into the node's memory before anybody loads them, in their order
//! and some at a time.

use super::lease::Lease;
use super::leased_chunk::bring;
use forebay_transfer::Class;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Chunks that are asked for in one message, and messages under way.
const CHUNKS: usize = 16;
const MESSAGES: usize = 2;

struct Fetch {
    /// Who lets go of it wants no more.
    lease: Weak<Lease>,
    next: AtomicUsize,
}

/// Has the chunks of a lease that are on the node's disk or on peers come into its memory, in their
/// order, until the lease is dropped. A chunk that does not come is left to whoever loads it.
pub fn fetch(lease: &Arc<Lease>) {
    let next = AtomicUsize::new(lease.in_memory());
    let fetch = Arc::new(Fetch { lease: Arc::downgrade(lease), next });
    (0..MESSAGES).for_each(|_| fetch.go_on());
}

impl Fetch {
    /// Asks for the next chunks. When all of them have come, for others.
    fn go_on(self: &Arc<Self>) {
        let Some(lease) = self.lease.upgrade() else { return };
        let Ok(held) = lease.alive() else { return };
        let first = self.next.fetch_add(CHUNKS, Ordering::Relaxed);
        let chunks: Vec<usize> = (first..lease.len().min(first + CHUNKS)).collect();
        let (fetch, left) = (Arc::clone(self), AtomicUsize::new(chunks.len()));
        let on_end = move |_, brought: Result<_, String>| {
            if brought.is_ok() && left.fetch_sub(1, Ordering::AcqRel) == 1 {
                fetch.go_on();
            }
        };
        bring(held, &chunks, Class::Prefetch, None, Arc::new(on_end));
    }
}
