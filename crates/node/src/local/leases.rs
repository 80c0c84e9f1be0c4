//! What one client holds: leases with the chunks that stay in place under them, and slots that it
//! writes. Time is an argument. A lease whose time is over stays usable until
//! [`ClientLeases::expire`] removes it: only that looks at the time, and the session's thread calls
//! it whenever it is about to wait and when the first lease runs out.
//!
//! When the client's connection ends, its leases end at once: whoever still reads finds that they
//! are dead. Its slots do not: its copies may still write them until the process has exited, or has
//! said before that none does.

use crate::config::LimitsConfig;
use forebay_kv::ChunkId;
use forebay_store::{LayerGuard, Lease, ReadGuard, Reservation, TenantId};
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;

/// Why a client does not get what it wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotHeld {
    #[error("the client has {limit} {what}; no more may be")]
    Limit { what: &'static str, limit: usize },
    #[error("lease {lease} is dead")]
    DeadLease { lease: u64 },
    #[error("chunk {chunk} is outside of lease {lease}, which has {chunks}")]
    Outside { lease: u64, chunk: usize, chunks: usize },
    #[error("slot {slot} is not reserved")]
    NoSlot { slot: u64 },
    #[error("the client is gone")]
    Gone,
}

/// A lease of the client.
#[derive(Debug)]
pub struct HeldLease {
    /// Whose chunks.
    pub tenant: TenantId,
    /// Of what is on this host.
    pub lease: Arc<Lease>,
    /// The chunks, those on peers included.
    pub ids: Arc<[ChunkId]>,
    /// Of those chunks that lie in the arena.
    guards: HashMap<usize, ReadGuard>,
    /// Of those that come layer by layer.
    layers: HashMap<usize, LayerGuard>,
    expires_us: u64,
}

/// What a client holds.
#[derive(Debug)]
pub struct ClientLeases {
    limits: LimitsConfig,
    leases: HashMap<u64, HeldLease>,
    slots: HashMap<u64, Reservation>,
    next: u64,
    loads: usize,
    gone: bool,
}

impl ClientLeases {
    pub fn new(limits: &LimitsConfig) -> ClientLeases {
        ClientLeases {
            limits: *limits,
            leases: HashMap::new(),
            slots: HashMap::new(),
            next: 1,
            loads: 0,
            gone: false,
        }
    }

    /// Leases and slots.
    pub fn count(&self) -> usize {
        self.leases.len() + self.slots.len()
    }
    pub fn leases(&self) -> usize {
        self.leases.len()
    }
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    pub fn room_for_lease(&self) -> Result<(), NotHeld> {
        let limit = self.limits.leases_per_client;
        if self.leases.len() < limit { Ok(()) } else { Err(NotHeld::Limit { what: "leases", limit }) }
    }

    pub fn room_for_slot(&self) -> Result<(), NotHeld> {
        let limit = self.limits.slots_per_client;
        if self.slots.len() < limit { Ok(()) } else { Err(NotHeld::Limit { what: "slots", limit }) }
    }

    /// A lease of a tenant's chunks, with the guards of the first ones. Names it.
    pub fn grant(
        &mut self,
        tenant: TenantId,
        (lease, ids): (Lease, &[ChunkId]),
        guards: Vec<ReadGuard>,
        expires_us: u64,
    ) -> u64 {
        let name = self.name();
        let (lease, guards) = (Arc::new(lease), guards.into_iter().enumerate().collect());
        let layers = HashMap::new();
        self.leases.insert(name, HeldLease { tenant, lease, ids: ids.into(), guards, layers, expires_us });
        name
    }

    /// A lease that has the chunk and was not removed; `expire` removes those whose time is over.
    pub fn lease(&self, name: u64, chunk: usize) -> Result<&HeldLease, NotHeld> {
        let held = self.leases.get(&name).ok_or(NotHeld::DeadLease { lease: name })?;
        match held.ids.len() {
            chunks if chunk >= chunks => Err(NotHeld::Outside { lease: name, chunk, chunks }),
            _ => Ok(held),
        }
    }

    /// Lets a lease live until then, if `renew` does.
    pub fn renew(&mut self, name: u64, expires_us: u64, renew: impl FnOnce(&Lease) -> bool) -> bool {
        let Some(held) = self.leases.get_mut(&name) else { return false };
        let alive = held.lease.is_empty() || renew(&held.lease);
        match alive {
            true => held.expires_us = expires_us,
            false => drop(self.leases.remove(&name)),
        }
        alive
    }

    pub fn release(&mut self, name: u64) {
        self.leases.remove(&name);
    }

    /// Ends the leases whose time has come.
    pub fn expire(&mut self, now_us: u64) {
        self.leases.retain(|_, held| held.expires_us > now_us);
    }

    pub fn next_expiry_us(&self) -> Option<u64> {
        self.leases.values().map(|held| held.expires_us).min()
    }

    /// A chunk is to be brought.
    pub fn begin_load(&mut self) -> Result<(), NotHeld> {
        let limit = self.limits.loads_per_client;
        if self.loads >= limit {
            return Err(NotHeld::Limit { what: "chunks under way", limit });
        }
        self.loads += 1;
        Ok(())
    }

    /// A chunk that was to be brought has come, or not.
    pub fn end_load(&mut self) {
        self.loads = self.loads.saturating_sub(1);
    }

    /// A chunk of a lease lies still in the arena from now on.
    pub fn keep(&mut self, name: u64, chunk: usize, guard: ReadGuard) -> Result<&ReadGuard, NotHeld> {
        let held = self.leases.get_mut(&name).ok_or(NotHeld::DeadLease { lease: name })?;
        Ok(held.guards.entry(chunk).or_insert(guard))
    }

    /// A layer of a chunk of a lease lies still in the arena from now on.
    pub fn keep_layer(&mut self, name: u64, chunk: usize, guard: LayerGuard) -> Result<(), NotHeld> {
        let held = self.leases.get_mut(&name).ok_or(NotHeld::DeadLease { lease: name })?;
        held.layers.insert(chunk, guard);
        Ok(())
    }

    /// A slot that the client will write. Names it.
    pub fn reserve(&mut self, slot: Reservation) -> Result<u64, NotHeld> {
        if self.gone {
            return Err(NotHeld::Gone);
        }
        let name = self.name();
        self.slots.insert(name, slot);
        Ok(name)
    }

    /// The client writes a slot no more.
    pub fn take_slot(&mut self, name: u64) -> Result<Reservation, NotHeld> {
        self.slots.remove(&name).ok_or(NotHeld::NoSlot { slot: name })
    }

    /// The connection has ended: no lease lives, and none will be. Slots stay.
    pub fn disconnect(&mut self) {
        self.gone = true;
        self.leases.clear();
    }

    /// Nothing of the client writes the arena any more.
    pub fn free_slots(&mut self) {
        self.slots.clear();
    }

    fn name(&mut self) -> u64 {
        let name = self.next;
        self.next += 1;
        name
    }
}

impl HeldLease {
    /// Of a chunk, if it lies in the arena.
    pub fn guard(&self, chunk: usize) -> Option<&ReadGuard> {
        self.guards.get(&chunk)
    }

    /// Whether what of a chunk lies in the arena is what was stored. If not, it is dropped.
    pub fn check(&self, chunk: usize) -> bool {
        self.guards.get(&chunk).is_none_or(ReadGuard::check)
            && self.layers.get(&chunk).is_none_or(LayerGuard::check)
    }
}
