//! Telling others which chunks this store has, and which it has no more: threads that sleep until
//! chunks came or went, and then say which, in batches. This file knows waiting and asking; it must
//! never make anybody who stores or evicts wait. A store that nobody watches keeps nothing for it.

use super::{Store, StoreInner};
use crate::tier::Names;
use forebay_kv::ChunkId;
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Changes of so long a time are told together.
const BATCH_FOR: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changed<'a> {
    /// What it had before but for these.
    Some { added: &'a [ChunkId], removed: &'a [ChunkId] },
    /// These chunks, and no others.
    All(&'a [ChunkId]),
}

/// What a store has no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left<'a> {
    These(&'a [ChunkId]),
    /// Too many to be named: any chunk may have gone.
    Any,
}

/// The right to look what came or went. With it the store ends to keep that.
struct Watch {
    key: u64,
    rings: Receiver<()>,
    shared: Weak<StoreInner>,
}

impl Store {
    /// Has `listener` told, on a thread of its own, which chunks are here from now on, in memory or
    /// on disk, and which in neither any more. It begins with all that are here, and so it does
    /// again after more changes than can be named. The order between chunks is not kept, and a
    /// chunk may be told again. With the store the thread ends.
    pub fn on_change(&self, mut listener: impl FnMut(Changed<'_>) + Send + 'static) -> std::io::Result<()> {
        let watch = Watch::begin(&self.shared);
        let tell = move || {
            let mut next = Some(Names { ids: Vec::new(), more: true });
            while let Some(Names { ids, more }) = next {
                // Nobody but the store's users keeps it while the listener is at it.
                let Some(shared) = watch.shared.upgrade() else { return };
                if more {
                    let all = shared.all();
                    drop(shared);
                    listener(Changed::All(&all));
                } else {
                    let (added, removed): (Vec<_>, Vec<_>) = ids.into_iter().partition(|id| shared.has(id));
                    drop(shared);
                    listener(Changed::Some { added: &added, removed: &removed });
                }
                next = watch.next();
            }
        };
        std::thread::Builder::new().name("forebay-tell".into()).spawn(tell)?;
        Ok(())
    }

    /// Has `listener` told, on a thread of its own, which chunks go from now on: that were in
    /// memory or on disk, and are in neither when it is told. A chunk may be told again, and may
    /// have come back since. It ends with the store, or when the listener breaks.
    pub fn on_leave(
        &self,
        mut listener: impl FnMut(Left<'_>) -> ControlFlow<()> + Send + 'static,
    ) -> std::io::Result<()> {
        let watch = Watch::begin(&self.shared);
        let tell = move || {
            while let Some(Names { mut ids, more }) = watch.next() {
                if !more {
                    let Some(shared) = watch.shared.upgrade() else { return };
                    ids.retain(|id| !shared.has(id));
                }
                let left = if more { Left::Any } else { Left::These(&ids) };
                if left != Left::These(&[]) && listener(left).is_break() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("forebay-leave".into()).spawn(tell)?;
        Ok(())
    }
}

impl Watch {
    fn begin(shared: &Arc<StoreInner>) -> Watch {
        static KEYS: AtomicU64 = AtomicU64::new(0);
        let (key, (bell, rings)) = (KEYS.fetch_add(1, Ordering::Relaxed), channel());
        shared.tier.lock().changes.watch(key, bell.clone());
        if let Some(disk) = &shared.disk {
            disk.ssd.watch(key, bell);
        }
        Watch { key, rings, shared: Arc::downgrade(shared) }
    }

    /// Waits until chunks came or went, and says which, each once. `None`: the store is gone.
    fn next(&self) -> Option<Names> {
        self.rings.recv().ok()?;
        std::thread::sleep(BATCH_FOR);
        // Both tiers may have rung. A ring that comes later than this is for what comes later too.
        while self.rings.try_recv().is_ok() {}
        let shared = self.shared.upgrade()?;
        let mut names = shared.tier.lock().changes.take(self.key);
        if let Some(disk) = &shared.disk {
            let more = disk.ssd.take_changes(self.key);
            names.ids.extend(more.ids);
            names.more |= more.more;
        }
        let mut seen = HashSet::with_capacity(names.ids.len());
        names.ids.retain(|id| seen.insert(*id));
        Some(names)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.tier.lock().changes.unwatch(self.key);
        if let Some(disk) = &shared.disk {
            disk.ssd.unwatch(self.key);
        }
    }
}

impl StoreInner {
    fn has(&self, id: &ChunkId) -> bool {
        self.tier.lock().contains(id) || self.open_disk().is_some_and(|disk| disk.ssd.contains(id))
    }

    fn all(&self) -> Vec<ChunkId> {
        let mut all: HashSet<ChunkId> = {
            let tier = self.tier.lock();
            tier.resident_rows().map(|row| *tier.id_of(row)).collect()
        };
        if let Some(disk) = &self.disk {
            all.extend(disk.ssd.residents());
        }
        all.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChunkShape, TenantId, TierConfig};
    use forebay_transfer::lock::Mutex;
    use forebay_transfer::{Limits, MoverThread, Pages, Place};
    use std::sync::mpsc::channel;

    const TENANT: TenantId = TenantId(0);

    fn id(number: usize) -> ChunkId {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        ChunkId::from_bytes(bytes)
    }

    #[test]
    fn a_batch_of_more_chunks_than_are_named_is_told_whole() {
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let mut config = TierConfig::new(1 << 20);
        config.slab_bytes = 64 << 10;
        let store = Store::open(&mover.handle(), Place::Host(0), Pages::Base, config).unwrap();
        let put = |number| {
            let shape = ChunkShape::new([1000]).unwrap();
            let slot = store.reserve(TENANT, id(number), None, &shape).unwrap().unwrap();
            let checksums = slot.checksums();
            slot.commit(&checksums).unwrap();
        };
        put(0);
        let told: Arc<Mutex<HashSet<ChunkId>>> = Arc::default();
        let (kept, (go, may_go)) = (Arc::clone(&told), channel::<()>());
        let listener = move |changed: Changed<'_>| {
            let mut kept = kept.lock();
            match changed {
                Changed::All(all) => *kept = all.iter().copied().collect(),
                Changed::Some { added, removed } => {
                    kept.extend(added);
                    kept.retain(|id| !removed.contains(id));
                }
            }
            drop(kept);
            // Slow, so that what comes meanwhile is one batch.
            let _ = may_go.recv();
        };
        store.on_change(listener).unwrap();
        let eventually = |numbers: &[usize]| {
            let wanted: HashSet<ChunkId> = numbers.iter().map(|number| id(*number)).collect();
            testkit::eventually("these chunks are told", || *told.lock() == wanted);
        };
        eventually(&[0]);
        (10..10 + (1 << 20)).for_each(|number| store.shared.tier.lock().changes.note(&id(number)));
        store.delete(TENANT, &[id(0)]);
        put(1);
        drop(go);
        eventually(&[1]);
    }
}
