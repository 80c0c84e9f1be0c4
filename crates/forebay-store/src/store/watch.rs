//! Telling others which chunks this store has: a thread that sleeps until chunks came or went, and then says which, in
//! batches. This file knows waiting and asking; it must never make anybody who stores or evicts wait.

use super::{Shared, Store};
use forebay_kv::ChunkId;
use std::collections::HashSet;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Changes of so long a time are told together.
const BATCH_FOR: Duration = Duration::from_millis(20);

impl Store {
    /// Has `listener` told, on a thread of its own, which chunks are here from now on, in memory or on disk, and which in
    /// neither any more. It begins with all that are here. The order between chunks is not kept, and a chunk may be told
    /// again. With the store the thread ends.
    pub fn on_change(
        &self,
        listener: impl FnMut(&[ChunkId], &[ChunkId]) + Send + 'static,
    ) -> std::io::Result<()> {
        let (bell, rings) = channel();
        let shared = &self.shared;
        let mut here: HashSet<ChunkId> = {
            let mut tier = shared.tier();
            tier.changes.watch(bell.clone());
            tier.resident_rows().map(|row| *tier.id_of(row)).collect()
        };
        if let Some(disk) = &shared.disk {
            here.extend(disk.ssd.watch(bell));
        }
        let shared: Weak<Shared> = Arc::downgrade(shared);
        std::thread::Builder::new()
            .name("forebay-tell".into())
            .spawn(move || tell(here, rings, shared, listener))?;
        Ok(())
    }
}

fn tell(
    here: HashSet<ChunkId>,
    rings: Receiver<()>,
    shared: Weak<Shared>,
    mut listener: impl FnMut(&[ChunkId], &[ChunkId]),
) {
    let mut changed = here;
    loop {
        let (added, removed): (Vec<ChunkId>, Vec<ChunkId>) = {
            let Some(shared) = shared.upgrade() else { return };
            changed.drain().partition(|id| shared.has(id))
        };
        if !(added.is_empty() && removed.is_empty()) {
            listener(&added, &removed);
        }
        if rings.recv().is_err() {
            return;
        }
        std::thread::sleep(BATCH_FOR);
        // Both tiers may have rung. A ring that comes later than this is for what comes later too.
        while rings.try_recv().is_ok() {}
        let Some(shared) = shared.upgrade() else { return };
        changed.extend(shared.tier().changes.take());
        if let Some(disk) = &shared.disk {
            changed.extend(disk.ssd.take_changes());
        }
    }
}

impl Shared {
    fn has(&self, id: &ChunkId) -> bool {
        self.tier().contains(id) || self.open_disk().is_some_and(|disk| disk.ssd.contains(id))
    }
}
