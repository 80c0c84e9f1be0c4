//! A store over a log on the disk under test, and what playing the trace on it gives. Its memory
//! has room for all that is loaded and stored, so that nothing is lost for want of memory, and
//! nothing of it is there when the trace begins.

use super::trace::{CHUNK_BYTES, LAYERS, MIB, Trace, What};
use crate::disk::file::TestFile;
use crate::output::{Error, Outcome};
use crate::timing::{Cost, cost};
use forebay_kv::ChunkId;
use forebay_store::admission::Policy;
use forebay_store::disk::DiskOptions;
use forebay_store::ssd::{Ssd, SsdOptions, Volume};
use forebay_store::{ChunkShape, Store, TenantId, TierConfig, Timing, WriteBackConfig, WriteBackStat};
use forebay_transfer::{Backing, Class, HostLink, Limits, LinkSpec, MoverThread, Pages, PathSpec, Place};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

const HOST: Place = Place::Host(0);
const TENANT: TenantId = TenantId(0);
const TTL_US: u64 = 60_000_000;
/// How often the bytes that wait are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);
const LIMIT: Duration = Duration::from_secs(60);
/// Numbers of stores begin behind those of chunks that are loaded.
const FIRST_STORE: u64 = 1 << 32;

/// What a trace gave.
pub struct Figures {
    /// Of each chunk that was loaded, and of each load as a whole.
    pub read_ms: Vec<f64>,
    pub load_ms: Vec<f64>,
    pub waiting_bytes_max: u64,
    /// When the trace had ended, and when all that waited then was written.
    at_end: WriteBackStat,
    pub end: WriteBackStat,
    pub cost: Cost,
    lasted: Duration,
}

impl Figures {
    pub fn stored_mean_ms(&self) -> f64 {
        self.end.written_after_us as f64 / 1e3 / self.end.written.max(1) as f64
    }

    /// While the trace lasted.
    pub fn write_mib_per_s(&self) -> f64 {
        self.at_end.written_bytes as f64 / MIB as f64 / self.lasted.as_secs_f64()
    }

    /// Chunks that are not on the disk in the end.
    pub fn not_written(&self) -> u64 {
        self.end.too_old + self.end.queue_full + self.end.gone + self.end.refused + self.end.failed
    }

    pub fn cpu_s_per_gb(&self) -> f64 {
        let bytes = self.read_ms.len() as u64 * CHUNK_BYTES + self.at_end.written_bytes;
        self.cost.cpu_s * 1e9 / bytes as f64
    }
}

/// A store and what it needs. The store is dropped first.
struct Rig {
    store: Store,
    shape: ChunkShape,
    _mover: MoverThread,
}

/// Stores on the disk what the trace loads.
pub fn store_all(file: &TestFile, trace: &Trace) -> Outcome<()> {
    let rig = Rig::open(file, trace, Timing::AtOnce)?;
    for number in 0..trace.chunks() {
        rig.put(id(number as u64))?;
        if number % 64 == 63 {
            rig.store.flush()?;
        }
    }
    rig.store.flush()?;
    match rig.store.disk_stat().map(|stat| stat.write_back.written) {
        Some(written) if written == trace.chunks() as u64 => Ok(rig.store.close()?),
        written => Err(format!("{written:?} of {} chunks were stored", trace.chunks()).into()),
    }
}

/// Plays the trace, without its stores if there is no timing.
pub fn play(file: &TestFile, trace: &Trace, timing: Option<Timing>) -> Outcome<Figures> {
    let rig = Rig::open(file, trace, timing.unwrap_or(Timing::AtOnce))?;
    rig.touch_memory();
    let mut played = Played::default();
    let (sender, came) = channel();
    let cost = cost(|| rig.play(trace, timing.is_some(), &mut played, &sender))?;
    drop(sender);
    let at_end = rig.write_back_stat()?;
    rig.store.flush()?;
    let end = rig.write_back_stat()?;
    let mut loads: Vec<f64> = vec![0.0; played.loads];
    let mut read_ms = Vec::new();
    while let Ok((load, ms)) = came.recv_timeout(LIMIT) {
        let ms = ms.ok_or("a chunk was not loaded")?;
        loads[load] = f64::max(loads[load], ms);
        read_ms.push(ms);
    }
    if read_ms.len() != trace.chunks() {
        return Err(format!("{} of {} chunks were loaded", read_ms.len(), trace.chunks()).into());
    }
    // Makes room for the stores of the next one.
    let stored: Vec<ChunkId> = (0..trace.stores() as u64).map(|number| id(FIRST_STORE + number)).collect();
    rig.store.delete(TENANT, &stored);
    rig.store.close()?;
    let waiting_bytes_max = played.waiting_bytes_max;
    Ok(Figures { read_ms, load_ms: loads, waiting_bytes_max, at_end, end, cost, lasted: trace.lasts })
}

#[derive(Default)]
struct Played {
    loads: usize,
    waiting_bytes_max: u64,
}

/// The number of a load and how long a chunk of it took, if it came.
type Came = (usize, Option<f64>);

impl Rig {
    fn open(file: &TestFile, trace: &Trace, timing: Timing) -> Outcome<Rig> {
        let mover = MoverThread::spawn(Limits::default())?;
        let handle = mover.handle();
        let link = handle.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(1)?))?;
        handle.add_path(PathSpec::direct(HOST, HOST, link))??;
        let memory_bytes = (trace.chunks() + trace.stores() + 16) as u64 * CHUNK_BYTES * 5 / 4;
        let memory_bytes = memory_bytes.next_multiple_of(64 * MIB);
        let ssd = Ssd::open(&handle, HOST, vec![opened(file)?], SsdOptions::default())?;
        let mut write_back = WriteBackConfig::new(Policy::All, memory_bytes, file.log_bytes(), CHUNK_BYTES);
        write_back.timing = timing;
        let tier = TierConfig { slab_bytes: 16 * MIB, ..TierConfig::new(memory_bytes) };
        let store = Store::open_with_ssd(&handle, HOST, Pages::Transparent, tier, ssd, &write_back)?;
        let shape = ChunkShape::new((0..LAYERS).map(|_| CHUNK_BYTES / LAYERS))?;
        Ok(Rig { store, shape, _mover: mover })
    }

    /// The first touch of a page takes as long as a read of it, and has nothing to do with the
    /// disk.
    fn touch_memory(&self) {
        let arena = self.store.arena_memory();
        // SAFETY: all of it is the store's own, which does nothing with it yet.
        unsafe { arena.as_ptr().write_bytes(1, arena.len()) };
    }

    fn play(&self, trace: &Trace, stores: bool, played: &mut Played, came: &Sender<Came>) -> Outcome<()> {
        let begun = Instant::now();
        let wait_until = |at: Duration, played: &mut Played| -> Outcome<()> {
            loop {
                let waiting_bytes = self.write_back_stat()?.waiting_bytes;
                played.waiting_bytes_max = played.waiting_bytes_max.max(waiting_bytes);
                let left = at.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    return Ok(());
                }
                std::thread::sleep(left.min(LOOK_EVERY));
            }
        };
        for (at, what) in &trace.events {
            wait_until(*at, played)?;
            match what {
                What::Store(number) if stores => self.put(id(FIRST_STORE + *number as u64))?,
                What::Store(_) => {}
                What::Load(chunks) => {
                    let ids: Vec<ChunkId> = chunks.clone().map(|chunk| id(chunk as u64)).collect();
                    self.load(&ids, played.loads, begun + *at, came)?;
                    played.loads += 1;
                }
            }
        }
        wait_until(trace.lasts, played)
    }

    /// Begins to load chunks that were wanted at `wanted`.
    fn load(&self, ids: &[ChunkId], number: usize, wanted: Instant, came: &Sender<Came>) -> Outcome<()> {
        let lease = Arc::new(self.store.lease(TENANT, ids, TTL_US));
        if (lease.len(), lease.in_memory()) != (ids.len(), 0) {
            return Err("chunks of the trace are not on the disk".into());
        }
        let (came, kept) = (came.clone(), Arc::clone(&lease));
        self.store.fetch_many(&lease, 0..ids.len(), Class::Demand, None, move |_, guard| {
            let _lease = &kept;
            let ms = wanted.elapsed().as_secs_f64() * 1e3;
            // Whoever would listen has found another fault if it is gone.
            let _ = came.send((number, guard.ok().map(|_| ms)));
        });
        Ok(())
    }

    /// Stores a chunk of whatever its slot holds.
    fn put(&self, id: ChunkId) -> Outcome<()> {
        let slot = self.store.reserve(TENANT, id, None, &self.shape)?.ok_or("it is there already")?;
        let checksums = slot.checksums();
        Ok(slot.commit(&checksums)?)
    }

    fn write_back_stat(&self) -> Outcome<WriteBackStat> {
        Ok(self.store.disk_stat().ok_or("no disk")?.write_back)
    }
}

/// The log, of which the last owner may not have let go quite yet.
fn opened(file: &TestFile) -> Outcome<Volume> {
    let begun = Instant::now();
    loop {
        match Volume::open(file.path(), DiskOptions::default()) {
            Ok(volume) => return Ok(volume),
            Err(error) if begun.elapsed() > LIMIT => return Err(Error::from(error)),
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

fn id(number: u64) -> ChunkId {
    let mut id = [0; 32];
    // Any ids will do, as long as they are spread as digests are.
    id[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    id[8..16].copy_from_slice(&number.to_le_bytes());
    ChunkId::from_bytes(id)
}
