//! Our side: batches of objects, each batch a transfer through the mover and the disk link; the checksum of
//! each object is computed before it is written and compared after it was read. It measures what callers of the mover get; it must never reach around it.

use super::Failure;
use super::memory::{Buffers, Direction, Objects};
use forebay_links::disk::{DiskFile, DiskHandle, DiskLink, DiskOptions};
use forebay_mover::{
    Class, End, Limits, LinkSpec, MoverHandle, MoverThread, Place, RegionId, RouteSpec, Span, SpanPair,
    Transfer,
};
use std::collections::HashMap;
use std::sync::mpsc;

const HOST: Place = Place::Host(0);
const DISK: Place = Place::Disk(0);
/// More than is ever under way: how deep the disk's queue is, is the link's to say.
const WINDOW_LOTS: u32 = 64;
const WINDOW_BYTES: u64 = 64 << 20;

/// A mover with the file under test.
pub struct Linked {
    handle: MoverHandle,
    disk: DiskHandle,
    kept: RegionId,
    _mover: MoverThread,
}

/// Objects of one size in the file.
pub struct Session<'a> {
    linked: &'a Linked,
    buffers: Buffers,
    memory: RegionId,
    /// Checksum of what is in each buffer to write from.
    sources: Vec<u32>,
    /// Checksum of the object at each place.
    kept: HashMap<u64, u32>,
}

impl Linked {
    /// Takes the file over, with up to `depth` I/Os under way.
    pub fn new(file: DiskFile, depth: usize) -> Result<Linked, Failure> {
        let bytes = file.bytes();
        let mover = MoverThread::spawn(Limits::default())?;
        let handle = mover.handle();
        let link = DiskLink::open(file, DiskOptions { depth: depth as u32, ..DiskOptions::default() })?;
        let disk = link.handle();
        let id = handle.add_link(LinkSpec::new("disk0", WINDOW_LOTS, WINDOW_BYTES), Box::new(link))?;
        handle.add_route(RouteSpec::direct(HOST, DISK, id))??;
        handle.add_route(RouteSpec::direct(DISK, HOST, id))??;
        let kept = disk.register(&handle, DISK, 0, bytes)?;
        Ok(Linked { handle, disk, kept, _mover: mover })
    }

    /// Writes the whole file once: what was only set aside is slower to write the first time.
    pub fn fill(&self, bytes: u64) -> Result<(), Failure> {
        let objects = Objects { bytes: 1 << 20, depth: 8, slots: 16 };
        let mut session = self.session(objects)?;
        session
            .store_all(&(0..bytes / objects.bytes).map(|number| number * objects.bytes).collect::<Vec<_>>())
    }

    /// Buffers for objects of one size.
    pub fn session(&self, objects: Objects) -> Result<Session<'_>, Failure> {
        let buffers = Buffers::new(objects)?;
        let memory = self.handle.register(HOST, buffers.arena.clone())?;
        if let Err(error) = self.disk.pin(buffers.arena.clone()) {
            eprintln!("forebay: measured without pinned memory: {error}");
        }
        // SAFETY: nothing writes to buffers that are written from.
        let sources = (0..objects.slots).map(|slot| unsafe { buffers.sum(Direction::Write, slot) }).collect();
        Ok(Session { linked: self, buffers, memory, sources, kept: HashMap::new() })
    }
}

impl Session<'_> {
    /// The memory, for the other side.
    pub fn memory(&self) -> &Buffers {
        &self.buffers
    }

    /// Writes every place once.
    pub fn store_all(&mut self, places: &[u64]) -> Result<(), Failure> {
        self.run(Direction::Write, places)
    }

    /// Takes note that somebody else wrote the buffers `slots` to `places`.
    pub fn note_written(&mut self, places: &[u64], slots: &[usize]) {
        self.kept.extend(places.iter().zip(slots).map(|(place, slot)| (*place, self.sources[*slot])));
    }

    /// Moves one object for each place, a batch of `depth` objects in one transfer.
    pub fn run(&mut self, direction: Direction, places: &[u64]) -> Result<(), Failure> {
        let Objects { depth, slots, .. } = self.buffers.objects;
        let (sender, receiver) = mpsc::channel();
        let mut batches = places.chunks(depth);
        let mut under_way = 0;
        for first_slot in (0..slots).step_by(depth) {
            let Some(batch) = batches.next() else { break };
            self.submit(direction, first_slot, batch, &sender)?;
            under_way += 1;
        }
        let mut in_slot: Vec<&[u64]> = places.chunks(depth).take(under_way).collect();
        while under_way > 0 {
            let (first_slot, end) = receiver.recv()?;
            self.check(direction, first_slot, in_slot[first_slot / depth], &end)?;
            match batches.next() {
                Some(batch) => {
                    in_slot[first_slot / depth] = batch;
                    self.submit(direction, first_slot, batch, &sender)?;
                }
                None => under_way -= 1,
            }
        }
        Ok(())
    }

    fn submit(
        &mut self,
        direction: Direction,
        first_slot: usize,
        places: &[u64],
        ended: &mpsc::Sender<(usize, End)>,
    ) -> Result<(), Failure> {
        let len = self.buffers.objects.bytes;
        let pair = |(place, slot): (&u64, usize)| {
            let memory = Span::new(self.memory, self.buffers.offset(direction, slot), len);
            let disk = Span::new(self.linked.kept, *place, len);
            match direction {
                Direction::Read => SpanPair::new(disk, memory),
                Direction::Write => SpanPair::new(memory, disk),
            }
        };
        let pairs = places.iter().zip(first_slot..).map(pair).collect();
        let class = match direction {
            Direction::Read => Class::Demand,
            Direction::Write => Class::WriteBack,
        };
        if direction == Direction::Write {
            for (place, slot) in places.iter().zip(first_slot..) {
                // SAFETY: nothing writes to buffers that are written from.
                self.kept.insert(*place, unsafe { self.buffers.sum(direction, slot) });
            }
        }
        let ended = ended.clone();
        let on_end = move |end| drop(ended.send((first_slot, end)));
        self.linked.handle.submit(Transfer::new(pairs, class), on_end)?;
        Ok(())
    }

    fn check(
        &self,
        direction: Direction,
        first_slot: usize,
        places: &[u64],
        end: &End,
    ) -> Result<(), Failure> {
        let bytes = places.len() as u64 * self.buffers.objects.bytes;
        if *end != (End::Done { bytes }) {
            return Err(format!("a batch ended as {end:?}").into());
        }
        if direction == Direction::Write {
            return Ok(());
        }
        let is_wrong = |(place, slot): &(&u64, usize)| {
            // SAFETY: the transfer into the buffer ended, and the next one was not submitted yet.
            Some(&unsafe { self.buffers.sum(Direction::Read, *slot) }) != self.kept.get(place)
        };
        let wrong = places.iter().zip(first_slot..).find(is_wrong);
        match wrong {
            None => Ok(()),
            Some((place, _)) => Err(format!("wrong bytes in the object at {place}").into()),
        }
    }
}
