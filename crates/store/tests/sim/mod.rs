//! A simulated disk, and the smallest possible driver of a disk tier on it: one operation at a
//! time, no threads, no clock.
//!
//! The disk remembers which writes were not synced yet. A *kill* ends the process: what was written
//! stays. A *power cut* takes any of the unsynced writes back, whole or by sectors, as a real
//! disk's cache may.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_store::log::*;
use forebay_store::{ChunkShape, ReadEnd, TenantId};
use forebay_transfer::SplitMix;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

const SECTOR: usize = 512;

/// A disk that fails everything after a given number of writes.
#[derive(Debug, Clone)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    bytes: Vec<u8>,
    /// Offset and earlier bytes of writes since the last sync.
    unsynced: Vec<(usize, Vec<u8>)>,
    /// Writes and syncs until everything fails.
    steps_left: Option<u64>,
    steps: u64,
    /// Sectors that cannot be read, and reads that failed.
    unreadable: BTreeSet<u64>,
    /// Whether they cannot be read after they were written either.
    for_good: bool,
    /// Reads of them until they can be read again, without having been written.
    failures_left: u64,
    failed_reads: u64,
}

impl SimDisk {
    pub fn new(bytes: u64) -> SimDisk {
        let bytes = vec![0; bytes as usize];
        let state = State {
            bytes,
            unsynced: Vec::new(),
            steps_left: None,
            steps: 0,
            unreadable: BTreeSet::new(),
            for_good: false,
            failures_left: u64::MAX,
            failed_reads: 0,
        };
        SimDisk { state: Arc::new(Mutex::new(state)) }
    }

    /// A disk with an empty log.
    pub fn with_log(bytes: u64, segment_bytes: u64, journal_bytes: u64) -> SimDisk {
        let disk = SimDisk::new(bytes);
        let layout = Layout::with_journal(bytes, segment_bytes, journal_bytes).unwrap();
        for (offset, page) in empty_log(LogUuid([7; 16]), layout) {
            disk.write_at(offset, &page).unwrap();
        }
        disk.sync().unwrap();
        disk
    }

    /// Everything fails after so many more writes and syncs.
    pub fn fail_after(&self, steps: u64) {
        self.state.lock().unwrap().steps_left = Some(steps);
    }

    /// Reads that touch these bytes fail from now on, and no others: until the bytes are written,
    /// or for good.
    pub fn make_unreadable(&self, bytes: Range<u64>, for_good: bool) {
        let state = &mut *self.state.lock().unwrap();
        (state.unreadable, state.for_good, state.failures_left) =
            (sectors(bytes).collect(), for_good, u64::MAX);
    }

    /// So many reads that touch these bytes fail from now on.
    pub fn fail_reads(&self, bytes: Range<u64>, reads: u64) {
        self.make_unreadable(bytes, false);
        self.state.lock().unwrap().failures_left = reads;
    }

    pub fn failed_reads(&self) -> u64 {
        self.state.lock().unwrap().failed_reads
    }

    pub fn steps(&self) -> u64 {
        self.state.lock().unwrap().steps
    }

    pub fn revive(&self) {
        self.state.lock().unwrap().steps_left = None;
    }

    /// Loses any of what was not synced, whole writes or sectors of them.
    pub fn cut_power(&self, random: &mut impl FnMut() -> u64) {
        let state = &mut *self.state.lock().unwrap();
        for (offset, before) in std::mem::take(&mut state.unsynced).into_iter().rev() {
            let mode = random() % 4;
            for (sector, bytes) in before.chunks(SECTOR).enumerate() {
                let lost = mode == 0 || (mode == 1 && random().is_multiple_of(2));
                if lost {
                    let at = offset + sector * SECTOR;
                    state.bytes[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
    }

    pub fn image(&self) -> Vec<u8> {
        self.state.lock().unwrap().bytes.clone()
    }

    pub fn set_image(&self, image: &[u8]) {
        self.state.lock().unwrap().bytes.copy_from_slice(image);
    }

    pub fn flip(&self, bit: usize) {
        let state = &mut *self.state.lock().unwrap();
        let at = bit / 8 % state.bytes.len();
        state.bytes[at] ^= 1 << (bit % 8);
    }
}

fn sectors(bytes: Range<u64>) -> Range<u64> {
    bytes.start / SECTOR as u64..bytes.end.div_ceil(SECTOR as u64)
}

impl State {
    fn step(&mut self) -> io::Result<()> {
        self.steps += 1;
        match &mut self.steps_left {
            Some(0) => Err(io::Error::other("the process was killed")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Medium for SimDisk {
    fn bytes(&self) -> u64 {
        self.state.lock().unwrap().bytes.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let state = &mut *self.state.lock().unwrap();
        let end = offset + buffer.len() as u64;
        let fails = state.unreadable.range(sectors(offset..end)).next().is_some();
        if fails && state.failures_left > 0 {
            state.failed_reads += 1;
            state.failures_left -= 1;
            return Err(io::Error::other("a sector cannot be read"));
        }
        let at = offset as usize;
        buffer.copy_from_slice(&state.bytes[at..at + buffer.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let state = &mut *self.state.lock().unwrap();
        state.step()?;
        let at = offset as usize;
        let end = offset + bytes.len() as u64;
        if !state.for_good {
            let written = sectors(offset..end);
            state.unreadable.retain(|sector| !written.contains(sector));
        }
        state.unsynced.push((at, state.bytes[at..at + bytes.len()].to_vec()));
        state.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let state = &mut *self.state.lock().unwrap();
        state.step()?;
        state.unsynced.clear();
        Ok(())
    }

    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.write_at(offset, &vec![0; bytes as usize])
    }

    fn restore(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        self.state.lock().unwrap().step()
    }
}

/// The layers of a chunk: a function of its id.
pub fn layers_of(id: &ChunkId, shape: &ChunkShape) -> Vec<Vec<u8>> {
    let layer = |layer: usize| {
        let range = shape.layer(layer).unwrap();
        let seed = u64::from_le_bytes(id.as_bytes()[..8].try_into().unwrap());
        let mut stream = SplitMix(seed ^ (layer as u64) << 56);
        let words = (range.end - range.start).div_ceil(8);
        let mut bytes: Vec<u8> = (0..words).flat_map(|_| stream.draw().to_le_bytes()).collect();
        bytes.truncate((range.end - range.start) as usize);
        bytes
    };
    (0..shape.layers()).map(layer).collect()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    Miss,
    Corrupt,
    Bytes(Vec<Vec<u8>>),
}

/// A disk tier over simulated disks.
pub struct Host {
    pub tier: DiskTier,
    pub disks: Vec<SimDisk>,
    pub recovered: Vec<Recovered>,
    now_us: u64,
}

impl Host {
    pub fn open(config: &DiskTierConfig, disks: &[SimDisk]) -> Result<Host, NotOpened> {
        let media: Vec<&dyn Medium> = disks.iter().map(|disk| disk as &dyn Medium).collect();
        let (tier, recovered) = DiskTier::open(config, &media)?;
        Ok(Host { tier, disks: disks.to_vec(), recovered, now_us: 0 })
    }

    fn now(&mut self) -> u64 {
        self.now_us += 1;
        self.now_us
    }

    /// Stores a chunk. `Ok(false)` if the tier refused it.
    pub fn store(
        &mut self,
        tenant: TenantId,
        id: &ChunkId,
        parent: Option<&ChunkId>,
        shape: &ChunkShape,
    ) -> io::Result<bool> {
        let now = self.now();
        let write = match self.tier.begin_write(now, tenant, id, parent, shape) {
            Ok(DiskBegun::Write(write)) => write,
            Ok(DiskBegun::AlreadyHere) => return Ok(true),
            Err(_) => return Ok(false),
        };
        if let Err(error) = self.write_chunk(&write, &layers_of(id, shape)) {
            self.tier.abort(now, write, 0);
            return Err(error);
        }
        Ok(self.tier.end_write(now, write).is_ok())
    }

    fn write_chunk(&self, write: &DiskWrite, layers: &[Vec<u8>]) -> io::Result<()> {
        let shape = &write.shape;
        let mut slot = vec![0; shape.footer_at() as usize];
        for (number, layer) in layers.iter().enumerate() {
            let place = shape.layer(number).unwrap();
            slot[place.start as usize..place.end as usize].copy_from_slice(layer);
        }
        let crcs: Vec<u32> = layers.iter().map(|layer| crc32c(layer)).collect();
        slot.extend(self.tier.footer(write, &crcs).encode());
        self.disks[write.volume].write_at(write.slot_at, &slot)
    }

    fn read_slot(&self, read: &DiskRead) -> Option<Vec<Vec<u8>>> {
        let shape = &read.shape;
        let mut slot = vec![0; shape.stride_bytes() as usize];
        self.disks[read.volume].read_at(read.slot_at, &mut slot).unwrap();
        let footer = Footer::of(&read.copy, &slot[shape.footer_at() as usize..]).ok()?;
        let layer = |layer: usize| {
            let place = shape.layer(layer).unwrap();
            let bytes = &slot[place.start as usize..place.end as usize];
            footer.verify(layer, &[bytes]).ok().map(|()| bytes.to_vec())
        };
        (0..shape.layers()).map(layer).collect()
    }

    pub fn get(&mut self, tenant: TenantId, id: &ChunkId) -> Got {
        let now = self.now();
        let Some((lease, _)) = self.tier.lease(now, tenant, std::slice::from_ref(id), 1000) else {
            return Got::Miss;
        };
        let read = self.tier.begin_read(now, lease, 0).unwrap();
        let bytes = self.read_slot(&read);
        let end = if bytes.is_some() { ReadEnd::Done } else { ReadEnd::Corrupt };
        self.tier.end_read(now, read, end);
        self.tier.release(now, lease);
        bytes.map_or(Got::Corrupt, Got::Bytes)
    }

    /// Carries chunks forward until enough segments are free or on their way.
    pub fn reclaim(&mut self) -> io::Result<()> {
        let now = self.now();
        while let Some(relocation) = self.tier.next_relocation(now) {
            let outcome = match self.read_slot(&relocation.read) {
                None => Ok(RelocationEnd::Corrupt),
                Some(layers) => self.write_chunk(&relocation.write, &layers).map(|()| RelocationEnd::Written),
            };
            let failed = RelocationEnd::Failed { read_lost_bytes: 0, write_lost_bytes: 0 };
            self.tier.end_relocation(now, relocation, *outcome.as_ref().unwrap_or(&failed));
            outcome?;
        }
        Ok(())
    }

    pub fn scrub(&mut self) -> io::Result<()> {
        let now = self.now();
        while let Some(scrub) = self.tier.next_scrub(now) {
            let zeros = vec![0; scrub.bytes as usize];
            let outcome = self.disks[scrub.volume].write_at(scrub.offset, &zeros);
            self.tier.end_scrub(scrub, outcome.is_ok());
            outcome?;
        }
        Ok(())
    }

    pub fn commit(&mut self) -> io::Result<()> {
        for volume in 0..self.disks.len() {
            let now = self.now();
            if let Some(commit) = self.tier.next_commit(now, volume) {
                self.carry_out(commit)?;
            }
        }
        Ok(())
    }

    pub fn close(mut self) -> io::Result<()> {
        for volume in 0..self.disks.len() {
            let commit = self.tier.close(volume).unwrap();
            self.carry_out(commit)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, commit: Commit) -> io::Result<()> {
        let disk = self.disks[commit.volume].clone();
        let outcome = commit.write_to(&disk);
        let now = self.now();
        self.tier.end_commit(now, commit, outcome.is_ok());
        outcome
    }
}

pub fn id(number: u64) -> ChunkId {
    let mut bytes = [0; 32];
    // Ids are digests: every byte depends on the number.
    bytes.chunks_mut(8).enumerate().for_each(|(word, chunk)| {
        chunk.copy_from_slice(&SplitMix(number * 4 + word as u64).draw().to_le_bytes());
    });
    ChunkId::from_bytes(bytes)
}

/// Of several shapes.
pub fn shape(number: u64) -> ChunkShape {
    match number % 3 {
        0 => ChunkShape::new([4096, 4096]).unwrap(),
        1 => ChunkShape::new([100, 5000, 7]).unwrap(),
        _ => ChunkShape::new([12_288]).unwrap(),
    }
}

pub fn config() -> DiskTierConfig {
    DiskTierConfig { max_chunks: 512, ..DiskTierConfig::default() }
}

/// Small disks, with a log each.
pub fn disks(count: u64) -> Vec<SimDisk> {
    (0..count).map(|_| SimDisk::with_log(1 << 20, 64 << 10, 16 << 10)).collect()
}
