//! One region that is offered to peers: what they may do with it, and who touches it now. Checks
//! what an operation names against it.

use super::command::{Fault, FaultCode, PeerRegion, Section};
use super::leases::LeaseTable;
use super::staging::Stager;
use forebay_transfer::lock::{Condvar, Mutex, RwLock, RwLockReadGuard};
use forebay_transfer::{Backing, RegionId, Span};
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

/// What an operation does to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpKind {
    Read,
    Write,
}

/// Adjacent bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub start: NonNull<u8>,
    pub len: usize,
}

/// Adjacent bytes of an operation, of whichever memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stretch {
    Host(Piece),
    Device(Span),
}

impl Stretch {
    pub fn len(&self) -> usize {
        match self {
            Stretch::Host(piece) => piece.len,
            Stretch::Device(span) => span.len as usize,
        }
    }
}

/// What is offered.
pub(super) enum Memory {
    Host(Arc<dyn Backing>),
    Device(DeviceMemory),
}

/// Memory of a GPU, as a region of the mover that copies it.
#[derive(Clone)]
pub struct DeviceMemory {
    pub region: RegionId,
    pub len: u64,
    pub stager: Arc<Stager>,
}

impl Memory {
    pub fn len(&self) -> u64 {
        match self {
            Memory::Host(backing) => backing.len() as u64,
            Memory::Device(device) => device.len,
        }
    }

    /// Memory of a GPU is there as long as whoever registered it keeps their word: nobody can be
    /// asked cheaply. A copy of what is gone fails.
    fn is_there(&self, offset: usize, len: usize, write: bool) -> bool {
        match self {
            Memory::Host(backing) => backing.is_there(offset, len, write),
            Memory::Device(_) => true,
        }
    }
}

/// One offered region.
pub(super) struct Export {
    pub region: PeerRegion,
    pub access: Access,
    pub memory: Memory,
    /// Held by whoever touches the memory. `false`: withdrawn.
    offered: RwLock<bool>,
    /// Copies of memory of a GPU that are under way. They begin while the export is held.
    copying: Mutex<usize>,
    copied: Condvar,
}

/// Holds an export: its memory may be touched until this is dropped.
pub(super) type Held<'a> = RwLockReadGuard<'a, bool>;

/// A copy of memory of a GPU that is under way. The offer cannot end before this is dropped.
pub(super) struct Copying(Arc<Export>);

impl Drop for Copying {
    fn drop(&mut self) {
        *self.0.copying.lock() -= 1;
        self.0.copied.notify_all();
    }
}

impl Export {
    pub fn new(region: PeerRegion, access: Access, memory: Memory) -> Export {
        let (offered, copying) = (RwLock::new(true), Mutex::new(0));
        Export { region, access, memory, offered, copying, copied: Condvar::default() }
    }

    /// `None`: the region was withdrawn, or its memory is not there any more.
    pub fn hold(&self) -> Option<Held<'_>> {
        let held = self.offered.read();
        (*held && self.memory.is_there(0, self.memory.len() as usize, false)).then_some(held)
    }

    /// Notes that a copy begins. `None`: the region was withdrawn.
    pub fn begin_copy(self: &Arc<Export>) -> Option<Copying> {
        let _held = self.hold()?;
        *self.copying.lock() += 1;
        Some(Copying(Arc::clone(self)))
    }

    /// Ends the offer, and waits until nobody touches the memory.
    pub fn withdraw(&self) {
        *self.offered.write() = false;
        self.copied.wait_while(&mut self.copying.lock(), |copying| *copying > 0);
    }

    /// Whether this is the registration that is meant.
    pub fn check_generation(&self, meant: u64) -> Result<(), Fault> {
        let PeerRegion { key, generation, .. } = self.region;
        if meant == generation {
            return Ok(());
        }
        let text = format!("key {key} names generation {generation}, not {meant}");
        Err(Fault::new(FaultCode::StaleGeneration, text))
    }

    /// Whether this is the registration that is meant, and it is offered for that.
    pub fn check(&self, section: &Section, op_kind: OpKind) -> Result<(), Fault> {
        self.check_generation(section.generation)?;
        let key = self.region.key;
        let allowed = match op_kind {
            OpKind::Read => self.access.read,
            OpKind::Write => self.access.write,
        };
        if !allowed {
            return Err(Fault::new(
                FaultCode::NotAllowed,
                format!("the region with key {key} is not offered for a {op_kind:?}"),
            ));
        }
        Ok(())
    }

    /// Appends the addresses of a section's spans, which have to lie in the region and under the
    /// lease.
    pub fn append(
        &self,
        section: &Section,
        op_kind: OpKind,
        leases: &LeaseTable,
        stretches: &mut Vec<Stretch>,
    ) -> Result<(), Fault> {
        let PeerRegion { key, len: region_len, .. } = self.region;
        for (offset, len) in section.runs.iter().flat_map(super::runs::Run::spans) {
            let stretch = self.stretch(offset, len).ok_or_else(|| Fault {
                code: FaultCode::OutOfBounds,
                text: format!(
                    "span {} of {len} bytes at {offset}; the region with key {key} has {region_len}",
                    stretches.len()
                ),
            })?;
            if !self.memory.is_there(offset as usize, len as usize, op_kind == OpKind::Write) {
                return Err(Fault::new(
                    FaultCode::StaleGeneration,
                    format!("{len} bytes at {offset} of key {key} are not mapped for a {op_kind:?} any more"),
                ));
            }
            if self.access.leased && !leases.permits(section.lease, self.region, offset, len) {
                let lease = section.lease;
                return Err(Fault::new(
                    FaultCode::NoLease,
                    format!("lease {lease} does not cover {len} bytes at {offset} of key {key}"),
                ));
            }
            stretches.push(stretch);
        }
        Ok(())
    }

    fn stretch(&self, offset: u64, len: u64) -> Option<Stretch> {
        let end = offset.checked_add(len)?;
        if end > self.region.len {
            return None;
        }
        let backing = match &self.memory {
            Memory::Host(backing) => backing,
            Memory::Device(device) => return Some(Stretch::Device(Span::new(device.region, offset, len))),
        };
        // SAFETY: the end lies inside the backing, whose length fits into usize, so the start does.
        let start = unsafe { backing.as_ptr().add(offset as usize) };
        NonNull::new(start).map(|start| Stretch::Host(Piece { start, len: len as usize }))
    }
}
