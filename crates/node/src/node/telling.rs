//! Telling clients that watch which chunks have left the store. This file knows when the store is to tell; it must never know
//! which chunks a client watches: that is its desk's affair.

use super::Shared;
use crate::local::desk::Desk;
use forebay_store::Left;
use std::ops::ControlFlow;
use std::sync::Arc;

impl Shared {
    /// A client watches: from now on the store tells what leaves it, until no client watches any more.
    pub fn tell_who_watches(self: &Arc<Self>) -> std::io::Result<()> {
        let mut telling = self.telling.lock();
        if !*telling {
            let node = Arc::downgrade(self);
            self.store.on_leave(move |left| match node.upgrade() {
                Some(node) => node.tell_left(left),
                None => ControlFlow::Break(()),
            })?;
            *telling = true;
        }
        Ok(())
    }

    fn tell_left(&self, left: Left<'_>) -> ControlFlow<()> {
        let mut telling = self.telling.lock();
        let watching: Vec<Arc<Desk>> = self.desks().into_iter().filter(|desk| desk.watches()).collect();
        if watching.is_empty() {
            *telling = false;
            return ControlFlow::Break(());
        }
        drop(telling);
        watching.iter().for_each(|desk| desk.tell_left(left));
        ControlFlow::Continue(())
    }
}
