//! Memory that the driver knows: of GPUs, pinned, managed.
//!
//! A device address is reserved and cannot be read or written: whoever follows it on the host dies
//! as with a GPU. Its bytes lie in a memfd, mapped a second time for the engines, and can be mapped
//! by other processes.

use crate::abi::{Code, Outcome};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ptr::null_mut;

const PAGE_BYTES: u64 = 4096;
/// Freed areas that are remembered, to tell who still uses them. Their addresses are nobody's
/// meanwhile.
const FREED_MAX: usize = 256;

/// A mapping of this process, ended when dropped.
pub struct Mapping {
    pub at: u64,
    bytes: usize,
}

impl Mapping {
    /// Addresses that nobody can read or write; one page more than asked for, so that areas never
    /// touch.
    pub fn reserved(bytes: u64) -> Outcome<Mapping> {
        Mapping::anonymous(bytes + PAGE_BYTES, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    /// Memory of this process.
    pub fn private(bytes: u64) -> Outcome<Mapping> {
        Mapping::anonymous(bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }

    fn anonymous(bytes: u64, access: ProtFlags, flags: MapFlags) -> Outcome<Mapping> {
        let bytes = usize::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        // SAFETY: a new mapping where the kernel likes it; it replaces none.
        let at = unsafe { mmap_anonymous(null_mut(), bytes, access, flags) };
        at.map(|at| Mapping { at: at as u64, bytes }).map_err(|_| Code::OUT_OF_MEMORY)
    }

    /// The addresses without what was there. Nobody can read or write them, and the kernel puts
    /// nothing else there.
    fn emptied(self) -> Mapping {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: it replaces this value's own mapping, which nobody uses any more.
        let _ = unsafe { mmap_anonymous(self.at as *mut _, self.bytes, ProtFlags::empty(), flags) };
        self
    }

    /// The bytes of a file from `offset` on.
    pub fn of(file: impl AsFd, bytes: u64, offset: u64) -> Outcome<Mapping> {
        let bytes = usize::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes it; it replaces none.
        let at = unsafe { mmap(null_mut(), bytes, access, MapFlags::SHARED, file, offset) };
        at.map(|at| Mapping { at: at as u64, bytes }).map_err(|_| Code::MAP_FAILED)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping is this value's own; areas are dropped when no operation uses them
        // any more.
        let _ = unsafe { munmap(self.at as *mut _, self.bytes) };
    }
}

/// A file of zeroes in memory.
pub fn zeroes(bytes: u64) -> Outcome<OwnedFd> {
    let file = memfd_create("fake-cuda", MemfdFlags::CLOEXEC).map_err(|_| Code::OUT_OF_MEMORY)?;
    ftruncate(&file, bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(file)
}

/// Bytes to be moved from one address to another.
#[derive(Debug, Clone, Copy)]
pub struct Move {
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
}

/// Physical memory, of which cuMemMap makes areas.
pub struct Physical {
    pub gpu: usize,
    pub bytes: u64,
    pub file: OwnedFd,
}

/// What an area is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// From cuMemAlloc.
    Device,
    /// Mapped by cuMemMap.
    Virtual,
    /// Another process's, by cuIpcOpenMemHandle.
    Foreign,
    /// From cuMemHostAlloc.
    Pinned,
    /// By cuMemHostRegister.
    Registered,
    /// From cuMemAllocManaged.
    Managed,
}

impl Kind {
    /// Whether the bytes lie on a GPU.
    pub fn on_device(self) -> bool {
        matches!(self, Kind::Device | Kind::Virtual | Kind::Foreign)
    }
}

/// An area of memory.
pub struct Area {
    pub base: u64,
    pub bytes: u64,
    pub kind: Kind,
    /// The GPU that has it, or, for host memory, whose context was current.
    pub gpu: usize,
    /// GPUs that may reach it whatever peer access says. Only for virtual and foreign memory.
    pub access: Vec<usize>,
    pub file: Option<OwnedFd>,
    /// Where this process may read and write the bytes.
    pub backing: u64,
    /// What the area keeps mapped.
    pub mappings: Vec<Mapping>,
}

/// All areas, and who may reach whose.
#[derive(Default)]
pub struct Memory {
    areas: BTreeMap<u64, Area>,
    /// (who, whose), by cuCtxEnablePeerAccess.
    pub peers: HashSet<(usize, usize)>,
    freed: VecDeque<Freed>,
}

/// Where an area was.
struct Freed {
    base: u64,
    bytes: u64,
    /// Unless somebody else keeps its addresses, as a reservation does.
    _addresses: Option<Mapping>,
}

/// Why bytes are not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// Nobody ever had them, as far as the driver knows.
    Unknown,
    /// They were freed or unmapped.
    Freed,
    /// They begin or end outside of the area that has the rest.
    Beyond,
}

impl Memory {
    /// New memory of a GPU.
    pub fn allocate(&mut self, gpu: usize, bytes: u64) -> Outcome<u64> {
        let file = zeroes(bytes)?;
        let backing = Mapping::of(&file, bytes, 0)?;
        self.add_device(Kind::Device, gpu, bytes, file, backing, Vec::new())
    }

    /// Device memory whose bytes are mapped at `backing`.
    pub fn add_device(
        &mut self,
        kind: Kind,
        gpu: usize,
        bytes: u64,
        file: OwnedFd,
        backing: Mapping,
        access: Vec<usize>,
    ) -> Outcome<u64> {
        let public = Mapping::reserved(bytes)?;
        let base = public.at;
        self.add(Area {
            base,
            bytes,
            kind,
            gpu,
            access,
            file: Some(file),
            backing: backing.at,
            mappings: vec![public, backing],
        });
        Ok(base)
    }

    /// New host memory: pinned or managed.
    pub fn allocate_host(&mut self, kind: Kind, gpu: usize, bytes: u64) -> Outcome<u64> {
        let mapping = Mapping::private(bytes)?;
        let base = mapping.at;
        self.add_host(kind, gpu, base, bytes, vec![mapping]);
        Ok(base)
    }

    /// Host memory that is there already.
    pub fn add_host(&mut self, kind: Kind, gpu: usize, base: u64, bytes: u64, mappings: Vec<Mapping>) {
        let (access, file) = (Vec::new(), None);
        self.add(Area { base, bytes, kind, gpu, access, file, backing: base, mappings });
    }

    /// Takes an area in.
    pub fn add(&mut self, area: Area) {
        self.areas.insert(area.base, area);
    }

    /// Takes out the area that begins at `base`, if it is of one of the `kinds`, and gives its
    /// size.
    pub fn remove(&mut self, base: u64, kinds: &[Kind]) -> Option<u64> {
        self.areas.get(&base).filter(|area| kinds.contains(&area.kind))?;
        let mut area = self.areas.remove(&base)?;
        // What is not registered any more is pageable from now on, not freed.
        if area.kind != Kind::Registered {
            let own = area.mappings.iter().position(|mapping| mapping.at == base);
            let addresses = own.map(|own| area.mappings.swap_remove(own).emptied());
            self.note_freed(base, area.bytes, addresses);
        }
        Some(area.bytes)
    }

    /// Remembers where something was, and keeps its addresses unless somebody else does.
    pub fn note_freed(&mut self, base: u64, bytes: u64, addresses: Option<Mapping>) {
        if self.freed.len() == FREED_MAX {
            self.freed.pop_front();
        }
        self.freed.push_back(Freed { base, bytes, _addresses: addresses });
    }

    /// The area that has `at`.
    pub fn find(&self, at: u64) -> Option<&Area> {
        let (_, area) = self.areas.range(..=at).next_back()?;
        (at - area.base < area.bytes).then_some(area)
    }

    /// As [`find`](Memory::find), to be changed.
    pub fn find_mut(&mut self, at: u64) -> Option<&mut Area> {
        let (_, area) = self.areas.range_mut(..=at).next_back()?;
        (at - area.base < area.bytes).then_some(area)
    }

    /// The area that has all of `bytes` bytes at `at`.
    pub fn span(&self, at: u64, bytes: u64) -> Result<&Area, Lost> {
        let end = at.checked_add(bytes.max(1)).ok_or(Lost::Beyond)?;
        if let Some(area) = self.find(at) {
            return if end <= area.base + area.bytes { Ok(area) } else { Err(Lost::Beyond) };
        }
        if self.areas.range(at..end).next().is_some() {
            return Err(Lost::Beyond);
        }
        let was_here = |freed: &Freed| freed.base < end && at < freed.base + freed.bytes;
        Err(if self.freed.iter().any(was_here) { Lost::Freed } else { Lost::Unknown })
    }

    /// Whether a GPU reaches an area.
    pub fn reaches(&self, gpu: usize, area: &Area) -> bool {
        match area.kind {
            Kind::Device => gpu == area.gpu || self.peers.contains(&(gpu, area.gpu)),
            Kind::Virtual | Kind::Foreign => area.access.contains(&gpu),
            Kind::Pinned | Kind::Registered | Kind::Managed => true,
        }
    }

    /// The GPU that has an address; `None` for the host's.
    pub fn gpu_of(&self, at: u64) -> Option<usize> {
        self.find(at).filter(|area| area.kind.on_device()).map(|area| area.gpu)
    }

    /// Where this process reads and writes the bytes of an address. What the driver does not know
    /// is the host's own.
    pub fn raw(&self, at: u64) -> u64 {
        self.find(at).map_or(at, |area| area.backing + (at - area.base))
    }

    /// Areas of which `wanted` holds, and their bytes.
    pub fn count(&self, wanted: impl Fn(&Area) -> bool) -> (u64, u64) {
        let sizes = self.areas.values().filter(|area| wanted(area)).map(|area| area.bytes);
        sizes.fold((0, 0), |(areas, sum), bytes| (areas + 1, sum + bytes))
    }

    /// All areas, by address.
    pub fn areas(&self) -> impl Iterator<Item = &Area> {
        self.areas.values()
    }

    /// Reserved addresses that are used anew are not freed ones any more.
    pub fn forget_freed(&mut self, base: u64, bytes: u64) {
        self.freed.retain(|freed| freed.base >= base + bytes || base >= freed.base + freed.bytes);
    }
}
