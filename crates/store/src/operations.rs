//! Operations on slots: which reads and writes still use the bytes of a slot, so that nobody else
//! gets them before it is quiet. This file knows when a slot may be used again.

use crate::tenant::TenantId;
use std::collections::HashMap;
use std::hash::Hash;

/// Slots with operations under way, or with bytes that lost operations may still touch.
#[derive(Debug)]
pub(crate) struct Operations<Slot> {
    owned: HashMap<Slot, Owned>,
}

#[derive(Debug, Default)]
struct Owned {
    operations: u32,
    /// Bytes of the slot that lost operations may still touch.
    lost_bytes: u64,
    /// Who pays for the slot although its chunk is gone.
    payer: Option<TenantId>,
    /// The chunk is gone.
    vacated: bool,
}

/// What follows from the end of an operation, or of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Settled {
    /// Who stops paying for the slot.
    pub refunded: Option<TenantId>,
    /// The slot's chunk is gone and nothing touches its bytes.
    pub free: bool,
}

/// Why a slot without a chunk is not free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// Operations are under way. The tenant still pays.
    Draining,
    /// A lost operation may still touch the bytes. Nobody pays.
    Quarantined,
}

impl<Slot: Copy + Eq + Hash> Operations<Slot> {
    pub fn new() -> Operations<Slot> {
        Operations { owned: HashMap::new() }
    }

    /// An operation begins to read or write the slot. Until it ends the slot is not given to
    /// anybody else.
    pub fn begin(&mut self, slot: Slot) {
        self.owned.entry(slot).or_default().operations += 1;
    }

    /// An operation ended. `lost_bytes` of the slot may still be touched by a part of it that is
    /// lost.
    pub fn end(&mut self, slot: Slot, lost_bytes: u64) -> Settled {
        let Some(owned) = self.owned.get_mut(&slot) else { return Settled::default() };
        debug_assert!(owned.operations > 0, "an operation ends once");
        owned.operations = owned.operations.saturating_sub(1);
        owned.lost_bytes += lost_bytes;
        self.settle(slot)
    }

    /// Bytes of the slot that were lost are touched by nobody any more.
    pub fn quiet(&mut self, slot: Slot, bytes: u64) -> Settled {
        let Some(owned) = self.owned.get_mut(&slot) else { return Settled::default() };
        owned.lost_bytes = owned.lost_bytes.saturating_sub(bytes);
        self.settle(slot)
    }

    /// The chunk leaves its slot, for which `payer` paid, if anybody did.
    pub fn vacate(&mut self, slot: Slot, payer: Option<TenantId>) -> Settled {
        let owned = self.owned.entry(slot).or_default();
        (owned.vacated, owned.payer) = (true, payer);
        self.settle(slot)
    }

    fn settle(&mut self, slot: Slot) -> Settled {
        let Some(owned) = self.owned.get_mut(&slot).filter(|owned| owned.operations == 0) else {
            return Settled::default();
        };
        let (vacated, lost) = (owned.vacated, owned.lost_bytes > 0);
        let refunded = owned.payer.take();
        if !lost {
            self.owned.remove(&slot);
        }
        Settled { refunded, free: vacated && !lost }
    }

    /// Slots whose chunk is gone and that are not free.
    pub fn waiting(&self) -> impl Iterator<Item = (Slot, Waits)> + '_ {
        self.owned.iter().filter(|(_, owned)| owned.vacated).map(|(slot, owned)| {
            (*slot, if owned.operations == 0 { Waits::Quarantined } else { Waits::Draining })
        })
    }

    /// Whether a slot is used or may be.
    pub fn contains(&self, slot: Slot) -> bool {
        self.owned.contains_key(&slot)
    }

    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.owned.keys().copied()
    }
}
