//! Our side: the store itself, as its users call it, with slots, footers, checksums, commits and
//! eviction. What is read is compared with what was written: by the store, or on a GPU.

use super::file::TestFiles;
use super::gpu::{GpuSide, Moving};
use super::memory::{Buffers, Direction, Objects};
use crate::output::Error;
use forebay_kv::ChunkId;
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{
    Check, DiskLease, LayerRead, NotRead, NotWritten, ReadResults, Source, Ssd, SsdOptions, SsdWriteEnd,
    Staged, Volume,
};
use forebay_store::{Refused, TenantId};
use forebay_transfer::{Class, Limits, MoverThread, Place, RegionId, Span};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const HOST: Place = Place::Host(0);
const TENANT: TenantId = TenantId(0);
const TTL_US: u64 = 60_000_000;
/// How long to wait for room before asking again, and for a request at most.
const FULL_RETRY: Duration = Duration::from_micros(200);
const FULL_AT_MOST: Duration = Duration::from_secs(10);

/// A store on the files under test, whose chunks it spreads over them.
pub struct Ours {
    ssd: Ssd,
    buffers: Buffers,
    memory: RegionId,
    /// Checksum of what is in each buffer to write from.
    sums: Vec<u32>,
    /// Chunks in the order in which they were stored, each with the buffer that it was written
    /// from.
    stored: VecDeque<(ChunkId, usize)>,
    next: u64,
    gpu: Option<GpuSide>,
    _mover: MoverThread,
}

type WriteEnd = (Vec<(ChunkId, usize)>, Vec<SsdWriteEnd>);
type ReadEnd = (usize, Result<Vec<Staged>, NotRead>);

impl Ours {
    /// Opens the logs, with up to `depth` I/Os under way in all of them together.
    pub fn open(files: &TestFiles, objects: Objects, gpu: Option<u16>) -> Result<Ours, Error> {
        let mover = MoverThread::spawn(Limits::default())?;
        let buffers = Buffers::new(objects)?;
        let memory = mover.handle().register(HOST, buffers.arena.clone())?;
        let paths = files.paths();
        let depth = (objects.depth / paths.len()) as u32;
        let mut volumes = Vec::new();
        for path in paths {
            let volume = Volume::open(path, DiskOptions { depth, ..DiskOptions::default() })?;
            if let Err(error) = volume.link.handle().pin(buffers.arena.clone()) {
                eprintln!("forebay: measured without pinned memory: {error}");
            }
            volumes.push(volume);
        }
        let ssd = Ssd::open(&mover.handle(), HOST, volumes, SsdOptions::default())?;
        // SAFETY: nothing writes to buffers that are written from.
        let sums = (0..objects.slots).map(|slot| unsafe { buffers.sum(Direction::Write, slot) }).collect();
        let gpu = gpu.map(|gpu| GpuSide::new(gpu, &buffers)).transpose()?;
        Ok(Ours { ssd, buffers, memory, sums, stored: VecDeque::new(), next: 0, gpu, _mover: mover })
    }

    /// The memory, for the other side.
    pub fn memory(&self) -> &Buffers {
        &self.buffers
    }

    /// Stores so many new objects, one chunk each, in requests of `depth` objects, and makes them
    /// durable.
    pub fn store(&mut self, count: usize) -> Result<(), Error> {
        let Objects { depth, slots, .. } = self.buffers.objects;
        let (sender, receiver) = channel();
        let objects: Vec<(ChunkId, usize)> =
            (0..count).map(|number| (self.next_id(), number % slots)).collect();
        let mut under_way = 0;
        for batch in objects.chunks(depth) {
            while under_way == slots / depth {
                under_way -= self.check_stored(&receiver, &sender)?;
            }
            self.write(batch.to_vec(), &sender)?;
            under_way += 1;
        }
        while under_way > 0 {
            under_way -= self.check_stored(&receiver, &sender)?;
        }
        Ok(self.ssd.flush()?)
    }

    fn write(&self, batch: Vec<(ChunkId, usize)>, ended: &Sender<WriteEnd>) -> Result<(), Error> {
        let of_gpu = self.sums_of_gpu(&batch)?;
        let source = |(at, (id, slot)): (usize, &(ChunkId, usize))| Source {
            id: *id,
            parent: None,
            layers: vec![vec![self.span(Direction::Write, *slot)]],
            crcs: of_gpu.as_ref().map(|sums| vec![sums[at]]),
        };
        let sources = batch.iter().enumerate().map(source).collect();
        let ended = ended.clone();
        let on_end = move |ends| drop(ended.send((batch, ends)));
        Ok(self.ssd.write_many(TENANT, sources, Class::WriteBack, on_end)?)
    }

    fn span(&self, direction: Direction, slot: usize) -> Span {
        Span::new(self.memory, self.buffers.offset(direction, slot), self.buffers.objects.bytes)
    }

    /// Has objects come from the GPU, if they are there, with their checksums.
    fn sums_of_gpu(&self, batch: &[(ChunkId, usize)]) -> Result<Option<Vec<u32>>, Error> {
        let Some((gpu, (_, first))) = self.gpu.as_ref().zip(batch.first()) else { return Ok(None) };
        // Those that are written once more need not follow each other.
        let follow = batch.iter().zip(*first..).all(|((_, slot), expected)| *slot == expected);
        if !follow {
            return Ok(Some(batch.iter().map(|(_, slot)| self.sums[*slot]).collect()));
        }
        Ok(Some(gpu.begin(Direction::Write, *first, batch.len())?.ended()?))
    }

    /// Waits for a request, and says whether all of it is stored: 1 if it is, else 0, and the rest
    /// is on its way again.
    fn check_stored(
        &mut self,
        receiver: &Receiver<WriteEnd>,
        sender: &Sender<WriteEnd>,
    ) -> Result<usize, Error> {
        let (batch, ends) = receiver.recv_timeout(FULL_AT_MOST)?;
        let mut again = Vec::new();
        for (object, end) in batch.into_iter().zip(ends) {
            match end {
                SsdWriteEnd::Stored { .. } => self.stored.push_back(object),
                // Room that was given up is there again only when that is durable. The wait is part
                // of what is measured.
                SsdWriteEnd::Failed(NotWritten::Refused(Refused::Full { .. })) => again.push(object),
                end => return Err(format!("a write ended as {end:?}").into()),
            }
        }
        if again.is_empty() {
            return Ok(1);
        }
        std::thread::sleep(FULL_RETRY);
        self.write(again, sender)?;
        Ok(0)
    }

    fn next_id(&mut self) -> ChunkId {
        let mut id = [0; 32];
        // Any ids will do, as long as they are spread as digests are.
        id[..8].copy_from_slice(&self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        id[8..16].copy_from_slice(&self.next.to_le_bytes());
        self.next += 1;
        ChunkId::from_bytes(id)
    }

    /// Forgets what the store has evicted, and says how many objects it still has.
    pub fn resident(&mut self) -> usize {
        self.stored.retain(|(id, _)| self.ssd.contains(id));
        self.stored.len()
    }

    /// Brings what was stored into another order, in which it is then read.
    pub fn shuffle(&mut self, random: &mut StdRng) {
        self.stored.make_contiguous().shuffle(random);
    }

    /// Reads so many of the stored objects, the next ones in the order that
    /// [`shuffle`](Ours::shuffle) made, in requests of `depth` objects.
    pub fn retrieve(&mut self, count: usize) -> Result<(), Error> {
        let Objects { depth, slots, .. } = self.buffers.objects;
        let (sender, receiver) = channel();
        let batches = self.take_batches(count, depth);
        let mut reads = Reads { batches: &batches, leases: Vec::new(), moving: None };
        // Places of buffers that nobody uses.
        let mut free: Vec<usize> = (0..slots / depth).collect();
        for (number, batch) in batches.iter().enumerate() {
            let place = match free.pop() {
                Some(place) => place,
                None => self.check_next(&receiver, &mut reads)?,
            };
            reads.leases.push(Some((self.read((number, place), batch, &sender)?, place)));
        }
        for _ in free.len()..slots / depth {
            self.check_next(&receiver, &mut reads)?;
        }
        Ok(())
    }

    /// The next objects in order; they are the last ones from then on.
    fn take_batches(&mut self, count: usize, depth: usize) -> Vec<Vec<(ChunkId, usize)>> {
        let taken: Vec<_> = self.stored.iter().take(count).copied().collect();
        self.stored.rotate_left(taken.len());
        taken.chunks(depth).map(<[_]>::to_vec).collect()
    }

    fn read(
        &self,
        (number, place): (usize, usize),
        batch: &[(ChunkId, usize)],
        ended: &Sender<ReadEnd>,
    ) -> Result<DiskLease, Error> {
        let ids: Vec<ChunkId> = batch.iter().map(|(id, _)| *id).collect();
        let lease = self.ssd.lease(TENANT, &ids, TTL_US);
        if lease.len() < batch.len() {
            return Err(format!("only {} of {} objects are there", lease.len(), batch.len()).into());
        }
        let first = place * self.buffers.objects.depth;
        let (into, check): (fn(&Ours, usize) -> Option<Span>, _) = match self.gpu {
            Some(_) => (|own, slot| Some(own.span(Direction::Read, slot)), Check::AtUse),
            None => (|_, _| None, Check::AtRead),
        };
        let want = |chunk| LayerRead { chunk, layers: 0..1, into: into(self, first + chunk), check };
        let wants: Vec<LayerRead> = (0..batch.len()).map(want).collect();
        let ended = ended.clone();
        let on_end = move |ends: ReadResults| drop(ended.send((number, ends.into_iter().collect())));
        self.ssd.read(&lease, &wants, Class::Demand, None, on_end)?;
        Ok(lease)
    }

    /// Waits for a request, and compares what came with what was written. Gives a place of buffers
    /// that is free.
    fn check_next(&self, receiver: &Receiver<ReadEnd>, reads: &mut Reads) -> Result<usize, Error> {
        let Some(gpu) = &self.gpu else {
            let (number, end) = receiver.recv()?;
            let sums: Vec<Option<u32>> = end?.iter().map(|staged| staged.crc(0)).collect();
            return self.check(reads, number, sums.into_iter());
        };
        // One batch is copied while the next one is waited for.
        let next = match reads.is_more_to_come() {
            true => {
                let (number, end) = receiver.recv()?;
                let came = end?;
                let first = reads.place_of(number) * self.buffers.objects.depth;
                Some((number, gpu.begin(Direction::Read, first, came.len())?))
            }
            false => None,
        };
        match std::mem::replace(&mut reads.moving, next) {
            Some((number, moving)) => self.check(reads, number, moving.ended()?.into_iter().map(Some)),
            None => self.check_next(receiver, reads),
        }
    }

    /// Compares checksums of a request with those of what was written.
    fn check(
        &self,
        reads: &mut Reads,
        number: usize,
        mut sums: impl Iterator<Item = Option<u32>>,
    ) -> Result<usize, Error> {
        let place = reads.place_of(number);
        reads.leases[number] = None;
        let right = reads.batches[number].iter().all(|(_, slot)| sums.next() == Some(Some(self.sums[*slot])));
        if right { Ok(place) } else { Err("an object is not the one that was stored".into()) }
    }
}

/// Requests of a run.
struct Reads<'a> {
    batches: &'a [Vec<(ChunkId, usize)>],
    /// Of each that was begun its lease and its place of buffers, until it was checked.
    leases: Vec<Option<(DiskLease, usize)>>,
    /// On its way to the GPU.
    moving: Option<(usize, Moving)>,
}

impl Reads<'_> {
    fn place_of(&self, number: usize) -> usize {
        self.leases[number].as_ref().map_or(0, |(_, place)| *place)
    }

    /// Whether the disk has any of them.
    fn is_more_to_come(&self) -> bool {
        let open = self.leases.iter().flatten().count();
        open > usize::from(self.moving.is_some())
    }
}
