//! One region that is offered to peers: what they may do with it, and who touches it now. Checks
//! what an operation names against it.

use super::command::{Fault, FaultCode, PeerRegion, Section};
use super::leases::LeaseTable;
use forebay_transfer::Backing;
use forebay_transfer::lock::{RwLock, RwLockReadGuard};
use std::ptr::NonNull;
use std::sync::Arc;

/// What peers may do with a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    /// Only under a lease that lives.
    pub leased: bool,
}

impl Access {
    /// Reads and writes by everybody who is let in.
    pub const OPEN: Access = Access { read: true, write: true, leased: false };
    /// Reads under a lease.
    pub const LEASED_READ: Access = Access { read: true, write: false, leased: true };
}

/// What an operation wants of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Read,
    Write,
}

/// Adjacent bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub start: NonNull<u8>,
    pub len: usize,
}

/// One offered region.
pub(super) struct Export {
    pub region: PeerRegion,
    pub access: Access,
    pub backing: Arc<dyn Backing>,
    /// Held by whoever touches the memory. `false`: withdrawn.
    pub offered: RwLock<bool>,
}

/// Holds an export: its memory may be touched until this is dropped.
pub(super) type Held<'a> = RwLockReadGuard<'a, bool>;

impl Export {
    /// `None`: the region was withdrawn, or its memory is not there any more.
    pub fn hold(&self) -> Option<Held<'_>> {
        let held = self.offered.read();
        (*held && self.backing.is_there(0, self.backing.len(), false)).then_some(held)
    }

    /// Whether this is the registration that is meant, and it is offered for what is wished.
    pub fn check(&self, section: &Section, wish: Wish) -> Result<(), Fault> {
        let PeerRegion { key, generation, .. } = self.region;
        if section.generation != generation {
            return Err(Fault::new(
                FaultCode::StaleGeneration,
                format!("key {key} names generation {generation}, not {}", section.generation),
            ));
        }
        let allowed = match wish {
            Wish::Read => self.access.read,
            Wish::Write => self.access.write,
        };
        if !allowed {
            return Err(Fault::new(
                FaultCode::NotAllowed,
                format!("the region with key {key} is not offered for a {wish:?}"),
            ));
        }
        Ok(())
    }

    /// Appends the addresses of a section's spans, which have to lie in the region and under the
    /// lease.
    pub fn append(
        &self,
        section: &Section,
        wish: Wish,
        leases: &LeaseTable,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), Fault> {
        let PeerRegion { key, len: region_len, .. } = self.region;
        for (offset, len) in section.runs.iter().flat_map(super::runs::Run::spans) {
            let piece = self.piece(offset, len).ok_or_else(|| Fault {
                code: FaultCode::OutOfBounds,
                text: format!(
                    "span {} of {len} bytes at {offset}; the region with key {key} has {region_len}",
                    pieces.len()
                ),
            })?;
            if !self.backing.is_there(offset as usize, len as usize, wish == Wish::Write) {
                return Err(Fault::new(
                    FaultCode::StaleGeneration,
                    format!("{len} bytes at {offset} of key {key} are not mapped for a {wish:?} any more"),
                ));
            }
            if self.access.leased && !leases.permits(section.lease, self.region, offset, len) {
                let lease = section.lease;
                return Err(Fault::new(
                    FaultCode::NoLease,
                    format!("lease {lease} does not cover {len} bytes at {offset} of key {key}"),
                ));
            }
            pieces.push(piece);
        }
        Ok(())
    }

    fn piece(&self, offset: u64, len: u64) -> Option<Piece> {
        let end = offset.checked_add(len)?;
        if end > self.region.len {
            return None;
        }
        // SAFETY: the end lies inside the backing, whose length fits into usize, so the start does.
        let start = unsafe { self.backing.as_ptr().add(offset as usize) };
        NonNull::new(start).map(|start| Piece { start, len: len as usize })
    }
}
