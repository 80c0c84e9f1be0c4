//! The GPUs of a mover as somebody who opens memory of GPUs in other processes of the host, and has
//! them open what is registered here: CUDA IPC. A GPU is trusted with a peer's memory only after a
//! pattern came there and back right. Who may open what is not known here.

use crate::device::{DeviceMemory, ForeignMemory, Stream};
use crate::driver::abi::{Address, IpcHandle};
use crate::driver::{BatchCopy, CopyList, CudaError, Relaxed};
use crate::gpu::Gpu;
use crate::ipc::{self, bytes_from};
use crate::kernels::{Kernels, Piece};
use crate::links::{PEER_BLOCKS, Table, Tables, come_to_an_end};
use crate::peers::{Distrust, OPENED_BYTES, check_opened};
use crate::places::GpuPlaces;
use crate::poller::Track;
use crate::stream_copy::pointer_range;
use forebay_transfer::lock::{Mutex, RwLock};
use forebay_transfer::{Ipc, LinkOp, Memory, OnCopied, Place, RegionId, SpanPair};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Weak};

/// Peers that may check at a time whether they reach a GPU's memory: each writes to a part of its
/// own.
const CHECKS: u64 = 32;
/// Lots of one direction that a kernel may have at a time, of all peers; more go by copy engine.
const LISTS: usize = 16;
/// Pieces below this on average go by kernel: a copy engine takes a microsecond for each.
const KERNEL_PIECE_BYTES: u64 = 256 << 10;
/// Allocations whose handles are remembered in a process, and GPUs whose check is.
const REMEMBERED_MAX: usize = 4096;

type Name = [u8; 64];
/// Of a GPU.
type Uuid = [u8; 16];
/// Whether a GPU is trusted, or why not.
type Trusted = Result<(), String>;

/// What this process has exported. The driver opens no handle in the process that it comes from.
static OWN: Mutex<Option<HashMap<Name, (Address, u64)>>> = Mutex::new(None);

/// What a region is opened by. Bytes, little endian, in the order of the fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Export {
    /// Of the allocation that the region lies in.
    handle: Name,
    /// Where in it the region begins.
    offset: u64,
    bytes: u64,
    /// The GPU that it lies on.
    gpu: Uuid,
    /// Memory of that GPU that nobody else uses, to try it with.
    check: Name,
    check_offset: u64,
}

const EXPORT_BYTES: usize = 64 + 8 + 8 + 16 + 64 + 8;

impl Export {
    fn to_bytes(self) -> Vec<u8> {
        let Export { handle, offset, bytes, gpu, check, check_offset } = self;
        let mut out = Vec::with_capacity(EXPORT_BYTES);
        out.extend(handle);
        out.extend(offset.to_le_bytes());
        out.extend(bytes.to_le_bytes());
        out.extend(gpu);
        out.extend(check);
        out.extend(check_offset.to_le_bytes());
        out
    }

    /// `None`: these bytes are no export.
    fn parse(bytes: &[u8]) -> Option<Export> {
        fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
            bytes.split_first_chunk().map(|(number, rest)| (u64::from_le_bytes(*number), rest))
        }
        let (handle, rest) = bytes.split_first_chunk()?;
        let (offset, rest) = number(rest)?;
        let (length, rest) = number(rest)?;
        let (gpu, rest) = rest.split_first_chunk()?;
        let (check, rest) = rest.split_first_chunk()?;
        let (check_offset, rest) = number(rest)?;
        let (handle, gpu, check) = (*handle, *gpu, *check);
        rest.is_empty().then_some(Export { handle, offset, bytes: length, gpu, check, check_offset })
    }
}

/// An allocation that GPUs of this process reach: a peer's, or its own.
#[derive(Debug)]
struct Mapped {
    start: Address,
    bytes: u64,
    /// Of a peer: mapped until this is dropped.
    _foreign: Option<ForeignMemory>,
}

/// By what they are to the mover.
type Regions = RwLock<HashMap<RegionId, Arc<Mapped>>>;

/// Memory of GPUs of other processes, opened and copied. The agent has to end before its mover
/// does, and both before this.
#[derive(Debug)]
pub struct IpcMemory {
    places: Arc<GpuPlaces>,
    streams: Mutex<HashMap<u16, Arc<Streams>>>,
    regions: Arc<Regions>,
    /// Opened once for each GPU of this end.
    mapped: Mutex<HashMap<(Name, u16), Weak<Mapped>>>,
    /// Of each GPU.
    checks: Mutex<HashMap<u16, Checks>>,
    /// GPUs of peers and of this end: whether they reach each other's memory.
    trusted: Mutex<HashMap<(Uuid, u16), Trusted>>,
}

/// Memory that peers try a GPU with.
#[derive(Debug)]
struct Checks {
    _memory: DeviceMemory,
    handle: Name,
    /// How many were told of it.
    told: u64,
}

/// What an operation copies.
struct Resolved {
    pieces: Vec<Piece>,
    /// Stays mapped until then.
    mapped: Vec<Arc<Mapped>>,
    /// From a peer, not to one.
    reads: bool,
}

/// The streams of a GPU, one in each direction.
#[derive(Debug)]
struct Streams {
    kernels: Arc<Kernels>,
    reads: OneWay,
    writes: OneWay,
}

/// Copies in one direction: small pieces by a kernel, which takes them side by side, and large ones
/// by the copy engine, which leaves the GPU to whoever computes.
#[derive(Debug)]
struct OneWay {
    track: Track,
    kernels: Arc<Kernels>,
    tables: Arc<Tables>,
    /// Where the driver copies many pieces by one call.
    batch: Option<(BatchCopy, Mutex<CopyList>)>,
}

/// An open region. Closed when it is dropped and nothing copies any more.
struct Open {
    region: RegionId,
    places: Arc<GpuPlaces>,
    regions: Arc<Regions>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.places.forget(self.region);
        self.regions.write().remove(&self.region);
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

/// Has this process know its own allocation by its handle.
fn remember(handle: Name, start: Address, bytes: u64) {
    let mut own = OWN.lock();
    let own = own.get_or_insert_default();
    if own.len() >= REMEMBERED_MAX {
        own.clear();
    }
    own.insert(handle, (start, bytes));
}

fn own(handle: &Name) -> Option<(Address, u64)> {
    OWN.lock().as_ref().and_then(|own| own.get(handle).copied())
}

impl IpcMemory {
    pub fn new(places: &Arc<GpuPlaces>) -> IpcMemory {
        IpcMemory {
            places: Arc::clone(places),
            streams: Mutex::default(),
            regions: Arc::default(),
            mapped: Mutex::default(),
            checks: Mutex::default(),
            trusted: Mutex::default(),
        }
    }

    /// A part of memory that a peer may try a GPU with: its handle, and where it begins.
    fn check_part(&self, kernels: &Kernels) -> Result<(Name, u64), CudaError> {
        let device = kernels.device();
        let mut checks = self.checks.lock();
        let checks = match checks.entry(device.index()) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(empty) => {
                let memory = DeviceMemory::new(device, CHECKS * OPENED_BYTES)?;
                let handle = memory.export()?.0;
                remember(handle, memory.address(), memory.bytes());
                empty.insert(Checks { _memory: memory, handle, told: 0 })
            }
        };
        checks.told += 1;
        Ok((checks.handle, checks.told % CHECKS * OPENED_BYTES))
    }

    /// An allocation, for a GPU of this end.
    fn map(&self, kernels: &Kernels, handle: Name, gpu: Uuid) -> Result<Arc<Mapped>, String> {
        let device = kernels.device();
        let mut mapped = self.mapped.lock();
        mapped.retain(|_, known| known.strong_count() > 0);
        if let Some(known) = mapped.get(&(handle, device.index())).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let new = match own(&handle) {
            Some((start, bytes)) => self.map_own(kernels, start, bytes)?,
            None => {
                reaches(device, gpu)?;
                let foreign = ForeignMemory::open(device, IpcHandle(handle)).map_err(text)?;
                let start = foreign.address();
                let bytes = bytes_from(device.driver(), start).unwrap_or(0);
                Mapped { start, bytes, _foreign: Some(foreign) }
            }
        };
        let new = Arc::new(new);
        mapped.insert((handle, device.index()), Arc::downgrade(&new));
        Ok(new)
    }

    /// An allocation of this process.
    fn map_own(&self, kernels: &Kernels, start: Address, bytes: u64) -> Result<Mapped, String> {
        let device = kernels.device();
        let range = pointer_range(device.driver(), start).map_err(text)?;
        if range.start != start || range.bytes() != bytes {
            return Err("the allocation has been freed".into());
        }
        let lies_on = range.device().ok_or("it is no memory of a GPU")?;
        if lies_on != device.index() {
            let owner = self.places.open(lies_on).map_err(text)?;
            if !device.connect(owner.device()) {
                return Err(format!("GPUs {} and {lies_on} do not reach each other", device.index()));
            }
        }
        Ok(Mapped { start, bytes, _foreign: None })
    }

    /// Whether bytes come right to memory of a peer's GPU and back. Tried once.
    fn trust(&self, kernels: &Arc<Kernels>, export: &Export) -> Result<(), String> {
        let key = (export.gpu, kernels.device().index());
        let mut trusted = self.trusted.lock();
        if let Some(known) = trusted.get(&key) {
            return known.clone();
        }
        let memory = self.map(kernels, export.check, export.gpu)?;
        let end = export.check_offset.checked_add(OPENED_BYTES);
        if end.is_none_or(|end| end > memory.bytes) {
            return Err("the peer has no memory to try it with".into());
        }
        let seen = check_opened(kernels, memory.start + export.check_offset);
        let known = seen.clone().map_err(text);
        // What could not be tried may be another time.
        if !matches!(seen, Err(Distrust::Refused(_))) {
            if trusted.len() >= REMEMBERED_MAX {
                trusted.clear();
            }
            trusted.insert(key, known.clone());
        }
        known
    }

    fn streams(&self, place: Place) -> Result<Arc<Streams>, String> {
        let Place::Device(index) = place else { return Err(format!("{place:?} is no GPU")) };
        let mut streams = self.streams.lock();
        if let Some(known) = streams.get(&index) {
            return Ok(Arc::clone(known));
        }
        let kernels = self.places.open(index).map_err(text)?;
        let one_way = || OneWay::new(&kernels, &self.places).map_err(text);
        let (reads, writes) = (one_way()?, one_way()?);
        let new = Arc::new(Streams { kernels, reads, writes });
        streams.insert(index, Arc::clone(&new));
        Ok(new)
    }

    fn resolve(&self, op: &LinkOp, memory: &Memory) -> Result<Resolved, String> {
        let regions = self.regions.read();
        let reads = op.pairs.first().is_some_and(|pair| regions.contains_key(&pair.from.region));
        let theirs = |pair: &SpanPair| {
            if reads { pair.from.region } else { pair.to.region }
        };
        let mut kept = HashMap::new();
        for run in op.pairs.chunk_by(|one, next| theirs(one) == theirs(next)) {
            let region = theirs(&run[0]);
            let mapped = regions.get(&region).ok_or_else(|| format!("{region:?} is not open"))?;
            kept.insert(region, Arc::clone(mapped));
        }
        drop(regions);
        let pieces = self.places.addresses().resolve(op, memory).map_err(text)?;
        Ok(Resolved { pieces, mapped: kept.into_values().collect(), reads })
    }
}

/// Whether a GPU may reach another one's memory, if this process sees that. It need not.
fn reaches(device: &Gpu, other: Uuid) -> Result<(), String> {
    if device.is_part().map_err(text)? {
        return Err(format!("GPU {} is an instance of a partitioned GPU (MIG)", device.index()));
    }
    let driver = device.driver();
    let seen = (0..Gpu::count(driver).map_err(text)?).filter_map(|index| Gpu::find(driver, index).ok());
    let found = seen.filter(|gpu| gpu.index() != device.index()).find(|gpu| gpu.uuid() == Ok(other));
    match found {
        Some(owner) if !device.can_reach(&owner).map_err(text)? => {
            Err(format!("GPUs {} and {} do not reach each other", device.index(), owner.index()))
        }
        _ => Ok(()),
    }
}

impl OneWay {
    fn new(kernels: &Arc<Kernels>, places: &GpuPlaces) -> Result<OneWay, CudaError> {
        let device = kernels.device();
        let track = places.tracks().track(Stream::new(device)?);
        let batch = device.driver().batch_copy().map(|batch| (batch, Mutex::default()));
        let (kernels, tables) = (Arc::clone(kernels), Tables::new(device, LISTS)?);
        Ok(OneWay { track, kernels, tables, batch })
    }

    /// Queues a lot. What is returned is read by the GPU until the stream has come past it.
    ///
    /// # Safety
    ///
    /// The device was entered. What holds for `cuMemcpyAsync` holds for all pieces, of which no two
    /// overlap.
    unsafe fn queue(&self, pieces: &[Piece], bytes: u64) -> Result<Option<Table>, CudaError> {
        let stream = self.track.stream();
        let are_small = pieces.len() > 1 && bytes < KERNEL_PIECE_BYTES * pieces.len() as u64;
        if let Some(table) = are_small.then(|| self.tables.fill(pieces)).flatten() {
            let (list, count) = (table.address(), pieces.len() as u32);
            // SAFETY: the list is held until the stream has come past it; the rest is this
            // function's contract.
            unsafe { self.kernels.copy(stream, list, count, bytes, PEER_BLOCKS)? };
            return Ok(Some(table));
        }
        if let Some((batch, list)) = self.batch.as_ref().filter(|_| pieces.len() > 1) {
            let mut list = list.lock();
            pieces.iter().for_each(|piece| list.add(piece.from, piece.to, piece.bytes));
            // SAFETY: by this function's contract; the stream is no default stream.
            unsafe { batch.queue(stream.device().driver(), &mut list, stream.handle())? };
            return Ok(None);
        }
        for piece in pieces {
            // SAFETY: by this function's contract.
            unsafe { stream.copy(piece.from, piece.to, piece.bytes)? };
        }
        Ok(None)
    }
}

impl Ipc for IpcMemory {
    fn export(&self, region: RegionId) -> Result<Vec<u8>, String> {
        let _relaxed = Relaxed::enter(self.places.driver());
        let (address, bytes) = self.places.addresses().range(region).ok_or("it is not registered")?;
        let range = pointer_range(self.places.driver(), address).map_err(text)?;
        let lies_on = range.device().ok_or("it is no memory of a GPU")?;
        let kernels = self.places.open(lies_on).map_err(text)?;
        let device = kernels.device();
        if device.is_part().map_err(text)? {
            return Err(format!("GPU {lies_on} is an instance of a partitioned GPU (MIG)"));
        }
        let exported = ipc::export(device, address).map_err(text)?;
        let offset = address - exported.start;
        if offset + bytes > exported.bytes {
            return Err(format!("{bytes} bytes from {address:#x} on lie in several allocations"));
        }
        let handle = exported.handle.0;
        remember(handle, exported.start, exported.bytes);
        let (check, check_offset) = self.check_part(&kernels).map_err(text)?;
        let gpu = device.uuid().map_err(text)?;
        Ok(Export { handle, offset, bytes, gpu, check, check_offset }.to_bytes())
    }

    fn open(&self, place: Place, exported: &[u8], region: RegionId) -> Result<Box<dyn Send + Sync>, String> {
        let _relaxed = Relaxed::enter(self.places.driver());
        let export = Export::parse(exported).ok_or("what the peer exports means nothing here")?;
        let kernels = Arc::clone(&self.streams(place)?.kernels);
        self.trust(&kernels, &export)?;
        let mapped = self.map(&kernels, export.handle, export.gpu)?;
        // A peer may say that it has more than it has.
        let end = export.offset.checked_add(export.bytes);
        if end.is_none_or(|end| end > mapped.bytes) {
            let Export { offset, bytes, .. } = export;
            let has = mapped.bytes;
            return Err(format!("the peer says {bytes} bytes at {offset} of an allocation of {has}"));
        }
        self.places.addresses().insert(region, mapped.start + export.offset, export.bytes);
        self.regions.write().insert(region, mapped);
        let (places, regions) = (Arc::clone(&self.places), Arc::clone(&self.regions));
        Ok(Box::new(Open { region, places, regions }))
    }

    fn copy(&self, place: Place, op: &LinkOp, memory: &Memory, on_copied: OnCopied) {
        let resolved = self.streams(place).and_then(|streams| Ok((streams, self.resolve(op, memory)?)));
        let (streams, Resolved { pieces, mapped, reads }) = match resolved {
            Ok(resolved) => resolved,
            Err(why) => return on_copied(Err(why)),
        };
        let one_way = if reads { &streams.reads } else { &streams.writes };
        let track = &one_way.track;
        let _current = match track.stream().device().enter() {
            Ok(current) => current,
            Err(error) => return on_copied(Err(text(error))),
        };
        // SAFETY: the pieces were resolved from registered memory, which the mover keeps registered
        // and to itself until `on_copied`, and from a peer's, which is mapped until then; no two
        // pieces of a lot overlap.
        let posted = unsafe { one_way.queue(&pieces, op.bytes) };
        let on_passed = Box::new(move |passed: Result<(), CudaError>| {
            drop(mapped);
            on_copied(posted.and(passed).map_err(text));
        });
        if let Err((error, on_passed)) = track.when_passed(on_passed) {
            come_to_an_end(track);
            on_passed(Err(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_export_comes_back_as_it_was_and_nothing_else_is_one(
            gpu in any::<[u8; 16]>(), numbers in any::<[u64; 3]>(), cut in 0..EXPORT_BYTES
        ) {
            let [offset, bytes, check_offset] = numbers;
            let export = Export { handle: [1; 64], offset, bytes, gpu, check: [2; 64], check_offset };
            let mut said = export.to_bytes();
            prop_assert_eq!(Export::parse(&said), Some(export));
            prop_assert_eq!(Export::parse(&said[..cut]), None);
            said.push(0);
            prop_assert_eq!(Export::parse(&said), None);
        }
    }
}
