//! What a node offers to its peers: memory by key and generation, and the leases under which it may
//! be used. This file checks what an operation names against what is offered.
//!
//! Memory that is withdrawn is quiet when [`Exports::withdraw`] returns: every flow touches it only
//! while it holds the export, for one system call at a time, and nobody can hold an export that is
//! withdrawn. Copies of GPUs' memory, which go on by themselves, are waited for.

use super::command::{Command, Fault, FaultCode, PeerRegion};
use super::export::{Access, Copying, DeviceMemory, Export, Memory, OpKind};
use super::frame::REGIONS_MAX;
use super::leases::LeaseTable;
use super::payload::Payload;
use super::staging::Stager;
use forebay_transfer::lock::RwLock;
use forebay_transfer::{Backing, RegionId};
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use thiserror::Error;

/// Why a region is not offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ExportError {
    #[error("key {key} is in use by generation {generation}; withdraw it first")]
    InUse { key: u64, generation: u64 },
    #[error("{REGIONS_MAX} regions are offered; no more may")]
    TooMany,
}

/// The table of what is offered. Shared by all flows of a node.
pub struct Exports {
    table: RwLock<Table>,
    leases: LeaseTable,
}

struct Table {
    offered: HashMap<u64, Arc<Export>>,
    next_generation: u64,
}

impl Default for Exports {
    fn default() -> Exports {
        Exports::new(LeaseTable::default())
    }
}

impl Exports {
    /// An empty table. What is offered under leases only is offered under these.
    pub fn new(leases: LeaseTable) -> Exports {
        // Generations start at random, so that none that an earlier process gave out, and a peer
        // kept, is right by chance.
        let next_generation = RandomState::new().build_hasher().finish() >> 1;
        Exports { table: RwLock::new(Table { offered: HashMap::new(), next_generation }), leases }
    }

    /// Offers memory under a key, at a generation that no offer had before.
    pub fn offer(
        &self,
        key: u64,
        backing: Arc<dyn Backing>,
        access: Access,
    ) -> Result<PeerRegion, ExportError> {
        self.offer_memory(key, Memory::Host(backing), access)
    }

    /// Offers memory of a GPU: its bytes pass through staging.
    pub fn offer_device(
        &self,
        key: u64,
        memory: DeviceMemory,
        access: Access,
    ) -> Result<PeerRegion, ExportError> {
        self.offer_memory(key, Memory::Device(memory), access)
    }

    fn offer_memory(&self, key: u64, memory: Memory, access: Access) -> Result<PeerRegion, ExportError> {
        let mut table = self.table.write();
        if let Some(export) = table.offered.get(&key) {
            return Err(ExportError::InUse { key, generation: export.region.generation });
        }
        if table.offered.len() >= REGIONS_MAX {
            return Err(ExportError::TooMany);
        }
        let region = PeerRegion { key, generation: table.next_generation, len: memory.len() };
        table.next_generation += 1;
        table.offered.insert(key, Arc::new(Export::new(region, access, memory)));
        Ok(region)
    }

    /// Ends an offer. When this returns, no flow touches the memory any more; operations that are
    /// not through fail. Says whether the key was offered.
    pub fn withdraw(&self, key: u64) -> bool {
        let mut table = self.table.write();
        let Some(export) = table.offered.remove(&key) else { return false };
        drop(table);
        export.withdraw();
        true
    }

    pub fn regions(&self) -> Vec<PeerRegion> {
        let table = self.table.read();
        let mut regions: Vec<_> = table.offered.values().map(|export| export.region).collect();
        regions.sort_unstable_by_key(|region| region.key);
        regions
    }

    /// The memory that an operation names, if all of it is offered for that.
    pub(super) fn resolve(&self, command: &Command, op_kind: OpKind) -> Result<Grant, Fault> {
        let mut found = Vec::with_capacity(command.sections.len());
        let table = self.table.read();
        for section in &command.sections {
            let export = table.offered.get(&section.key).ok_or_else(|| unknown(section.key))?;
            export.check(section, op_kind)?;
            found.push(Arc::clone(export));
        }
        drop(table);
        let mut stretches = Vec::with_capacity(command.spans() as usize);
        let mut leases: Vec<(u64, PeerRegion)> = Vec::new();
        for (section, export) in command.sections.iter().zip(&found) {
            export.append(section, op_kind, &self.leases, &mut stretches)?;
            let lease = (section.lease, export.region);
            if export.access.leased && !leases.contains(&lease) {
                leases.push(lease);
            }
        }
        found.sort_unstable_by_key(|export| export.region.key);
        found.dedup_by_key(|export| export.region.key);
        // SAFETY: the stretches lie in backings that the exports keep alive, and the payload keeps
        // the exports.
        let payload = unsafe { Payload::new(stretches, found.into()) };
        let grant = Grant { payload, leases };
        self.still_leased(&grant).map(|()| grant)
    }

    /// What memory of a GPU is to its mover. `None`: it is host memory.
    pub(crate) fn device_region(&self, key: u64, generation: u64) -> Result<Option<RegionId>, Fault> {
        let table = self.table.read();
        let export = table.offered.get(&key).ok_or_else(|| unknown(key))?;
        export.check_generation(generation)?;
        match &export.memory {
            Memory::Device(device) => Ok(Some(device.region)),
            Memory::Host(_) => Ok(None),
        }
    }

    /// Has `keep` note that a peer's GPU may reach what an operation names, all of it memory of
    /// GPUs. None of that is withdrawn before it is noted.
    pub(crate) fn grant<R>(
        &self,
        command: &Command,
        op_kind: OpKind,
        keep: impl FnOnce(Granted) -> R,
    ) -> Result<R, Fault> {
        let grant = self.resolve(command, op_kind)?;
        let exports = grant.payload.exports();
        let on_host = exports.iter().find(|export| matches!(export.memory, Memory::Host(_)));
        if let Some(export) = on_host {
            let key = export.region.key;
            return Err(Fault::new(FaultCode::NotAllowed, format!("key {key} is no memory of a GPU")));
        }
        // The end of a lease stops no copy of a peer's, and what it was for may be used again then.
        // A read finds that out afterwards, a write would be too late.
        if op_kind == OpKind::Write && !grant.leases.is_empty() {
            return Err(Fault::new(FaultCode::NotAllowed, "no GPU of a peer writes under a lease"));
        }
        let held = exports.iter().map(|export| export.hold()).collect::<Option<Vec<_>>>();
        let held = held.ok_or_else(Fault::withdrawn)?;
        let regions = exports.iter().map(|export| export.region).collect();
        let kept = keep(Granted { regions, leases: grant.leases });
        drop(held);
        Ok(kept)
    }

    /// Whether every lease of what was granted still lives.
    pub(crate) fn are_leased(&self, granted: &Granted) -> Result<(), Fault> {
        self.all_live(&granted.leases)
    }

    /// Whether every lease of an operation still lives.
    pub(super) fn still_leased(&self, grant: &Grant) -> Result<(), Fault> {
        self.all_live(&grant.leases)
    }

    fn all_live(&self, leases: &[(u64, PeerRegion)]) -> Result<(), Fault> {
        match leases.iter().find(|(lease, region)| !self.leases.is_alive(*lease, *region)) {
            None => Ok(()),
            Some((lease, region)) => Err(Fault {
                code: FaultCode::NoLease,
                text: format!("lease {lease} of the region with key {} does not live", region.key),
            }),
        }
    }
}

fn unknown(key: u64) -> Fault {
    Fault::new(FaultCode::UnknownRegion, format!("no region has key {key}"))
}

/// Memory of GPUs that a peer's GPU may reach, and the leases under which.
pub(crate) struct Granted {
    pub regions: Vec<PeerRegion>,
    leases: Vec<(u64, PeerRegion)>,
}

/// The memory that an operation may use, and the leases under which.
pub(super) struct Grant {
    pub payload: Payload,
    leases: Vec<(u64, PeerRegion)>,
}

impl Grant {
    /// What copies the bytes of it that lie in memory of GPUs, if any do.
    pub fn stager(&self) -> Option<&Stager> {
        self.payload.exports().iter().find_map(|export| match &export.memory {
            Memory::Device(device) => Some(&*device.stager),
            Memory::Host(_) => None,
        })
    }

    /// Has every offer of GPUs' memory last until a copy has ended. `None`: one was withdrawn.
    pub fn begin_copy(&self) -> Option<Vec<Copying>> {
        let exports = self.payload.exports().iter();
        let devices = exports.filter(|export| matches!(export.memory, Memory::Device(_)));
        devices.map(Export::begin_copy).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::command::Section;
    use super::super::leases::LeasedSpan;
    use super::super::runs::Run;
    use super::*;
    use forebay_transfer::HostBuffer;

    fn command(section: Section) -> Command {
        Command { sections: vec![section] }
    }

    fn section(generation: u64, lease: u64, offset: u64, len: u32) -> Section {
        let run = Run { offset, len, count: 1, stride: 0 };
        Section { key: 5, generation, lease, runs: vec![run] }
    }

    fn code(exports: &Exports, section: Section, op_kind: OpKind) -> Option<FaultCode> {
        exports.resolve(&command(section), op_kind).err().map(|fault| fault.code)
    }

    /// 100 bytes that are offered under leases, and a lease of the first ones.
    fn leased(len: u64) -> (Exports, u64, u64) {
        let exports = Exports::default();
        let region = exports.offer(5, Arc::new(HostBuffer::new(100)), Access::LEASED_READ).unwrap();
        let spans = vec![LeasedSpan { region, offset: 0, len }];
        let lease = exports.leases.grant([1; 16], spans, u64::MAX, |_| {}).unwrap();
        (exports, region.generation, lease)
    }

    #[test]
    fn only_what_is_offered_is_served() {
        let (exports, now, lease) = leased(100);
        let unknown = Section { key: 6, ..section(now, lease, 0, 100) };
        assert_eq!(code(&exports, unknown, OpKind::Read), Some(FaultCode::UnknownRegion));
        let read = |generation, lease, offset, len| {
            code(&exports, section(generation, lease, offset, len), OpKind::Read)
        };
        assert_eq!(read(now, lease, 0, 100), None);
        assert_eq!(read(now, lease, 1, 100), Some(FaultCode::OutOfBounds));
        assert_eq!(read(now, lease, u64::MAX - 1, 1), Some(FaultCode::OutOfBounds));
        assert_eq!(read(now - 1, lease, 0, 1), Some(FaultCode::StaleGeneration));
        assert_eq!(read(now + 1, lease, 0, 1), Some(FaultCode::StaleGeneration));
        assert_eq!(code(&exports, section(now, lease, 0, 1), OpKind::Write), Some(FaultCode::NotAllowed));
        assert_eq!(read(now, lease + 1, 0, 1), Some(FaultCode::NoLease));
    }

    #[test]
    fn a_lease_covers_the_spans_that_it_was_granted_for_and_no_others() {
        let (exports, now, lease) = leased(50);
        assert_eq!(code(&exports, section(now, lease, 10, 40), OpKind::Read), None);
        assert_eq!(code(&exports, section(now, lease, 10, 41), OpKind::Read), Some(FaultCode::NoLease));
        let runs = vec![Run { offset: 0, len: 10, count: 6, stride: 10 }];
        let strided = Section { runs, ..section(now, lease, 0, 1) };
        assert_eq!(code(&exports, strided, OpKind::Read), Some(FaultCode::NoLease), "the last span of a run");
    }

    #[test]
    fn a_withdrawn_region_cannot_be_held_and_its_generation_never_comes_back() {
        let exports = Exports::default();
        let memory = Arc::new(HostBuffer::new(100));
        let generation = exports.offer(5, Arc::clone(&memory) as _, Access::OPEN).unwrap().generation;
        let again = exports.offer(5, Arc::clone(&memory) as _, Access::OPEN);
        assert_eq!(again, Err(ExportError::InUse { key: 5, generation }));
        let mut grant = exports.resolve(&command(section(generation, 0, 0, 100)), OpKind::Read).unwrap();
        let part = grant.payload.cut(100);
        assert!(part.owners().hold().is_some());
        assert!(exports.withdraw(5) && !exports.withdraw(5));
        assert!(part.owners().hold().is_none());
        let later = exports.offer(5, memory, Access::OPEN).unwrap();
        assert!(later.generation > generation);
        assert!(part.owners().hold().is_none(), "a new offer must not revive what an old operation named");
    }
}
