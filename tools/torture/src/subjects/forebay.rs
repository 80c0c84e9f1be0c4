//! Forebay's SSD tier as a subject: one log in the directory, a value is a chunk of a few layers.
//! This file knows the tier as its users do, and is one of them: what it copies it checks. The
//! faults are in the kernel and the medium that the tier is given, and in memory behind it.

use super::faulty_medium::FaultyMedium;
use super::memory;
use crate::faults::Faults;
use crate::faulty_kernel::FaultyKernel;
use crate::protocol::{Fault, Is, Setup};
use crate::serve::Subject;
use forebay_kv::{ChunkId, Digest};
use forebay_store::disk::{DiskFile, DiskLink, DiskOptions, Kernel, Threads, Uring};
use forebay_store::log::DiskTierConfig;
use forebay_store::ssd::{
    Check, Existing, FileMedium, LayerRead, Source, Ssd, SsdOptions, SsdWriteEnd, Staged, Volume, init,
};
use forebay_store::{TenantId, checksum};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, HostBuffer, Limits, Memory, MoverHandle, MoverThread, Place, Span};
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

/// Layers of a value. Each is whole pages, as of models.
const LAYERS: u64 = 4;
/// The store is cut into so many segments, roughly.
const SEGMENTS: u64 = 32;
/// Far above what values can be in the log.
const CHUNKS_MAX: u32 = 1 << 14;
/// All values are one tenant's.
const TENANT: TenantId = TenantId(1);
const HOST: Place = Place::Host(0);
/// For as long as a command may take.
const LEASE_US: u64 = 60_000_000;

/// After so long an engine has computed anew what it waits for, and says so with the deadline of
/// its request.
const READ_US: u64 = 2_000_000;

type Failure = Box<dyn Error + Send + Sync>;

#[derive(Debug, Default)]
pub struct Forebay {
    faults: Arc<Faults>,
    open: Mutex<Option<Open>>,
    /// Layers that were not what was read when they were used.
    corrupt_copies: AtomicU64,
}

/// Everything about an open store, for any number of threads.
#[derive(Debug, Clone)]
struct Open {
    ssd: Ssd,
    mover: Arc<MoverThread>,
    namespace: String,
}

impl Forebay {
    fn open_log(&self, setup: &Setup) -> Result<Open, Failure> {
        let path = setup.dir.join("log");
        if !path.exists() {
            let segment_bytes = (setup.capacity_bytes / SEGMENTS).next_power_of_two();
            init(&path, setup.capacity_bytes, segment_bytes, Existing::Keep)?;
        }
        let volume = self.open_volume(&path)?;
        let mover = MoverThread::spawn(Limits::default())?;
        let config = SsdOptions {
            tier: DiskTierConfig { max_chunks: CHUNKS_MAX, ..DiskTierConfig::default() },
            staging_bytes: setup.staging_bytes,
            ..SsdOptions::default()
        };
        let ssd = Ssd::open(&mover.handle(), HOST, vec![volume], config)?;
        Ok(Open { ssd, mover: Arc::new(mover), namespace: setup.namespace.clone() })
    }

    /// What `Volume::open` does, with faults between the log and the system.
    fn open_volume(&self, path: &Path) -> Result<Volume, Failure> {
        let inner = FileMedium::open(path)?;
        let mut options = File::options();
        let same = Arc::new(options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?);
        let medium = FaultyMedium::new(inner, Arc::clone(&same), Arc::clone(&self.faults));
        let (disk, options) = (DiskFile::open(path)?, DiskOptions::default());
        let kernel: Box<dyn Kernel> = match Uring::open(&disk, options.depth) {
            Ok(uring) => Box::new(uring),
            Err(_) => Box::new(Threads::open(&disk, options.depth)?),
        };
        let kernel = FaultyKernel::over(kernel, same, Arc::clone(&self.faults));
        Ok(Volume { link: DiskLink::over(Box::new(kernel), disk, options)?, medium: Arc::new(medium) })
    }

    /// Copies layers and compares each copy with the checksum that came with it, as whoever uses
    /// them does.
    fn use_layers(&self, memory: &Memory, staged: &Staged) -> Option<Vec<u8>> {
        let spans: Vec<Span> = staged.layers().filter_map(|layer| staged.span(layer)).collect();
        if let Some((at, bits)) = self.faults.flip(staged.len_bytes() as usize) {
            memory::flip(memory, &spans, at, bits);
        }
        let layers: Option<Vec<_>> = spans.iter().map(|span| memory::copy(memory, span)).collect();
        let layers = layers?;
        let sums: Vec<u32> = layers.iter().map(|layer| checksum::of_pieces(&[layer])).collect();
        if sums != staged.crcs() {
            self.corrupt_copies.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(layers.concat())
    }

    fn opened(&self) -> Result<Open, Is> {
        self.open.lock().clone().ok_or_else(|| failed("not open"))
    }
}

impl Open {
    fn id(&self, key: u64) -> ChunkId {
        let name = [self.namespace.as_bytes(), &key.to_le_bytes()].concat();
        ChunkId::from_bytes(*Digest::of(&name).as_bytes())
    }

    fn put(&self, key: u64, value: &[u8]) -> Result<(), Is> {
        let mover: MoverHandle = self.mover.handle();
        let buffer = HostBuffer::new(value.len());
        buffer.write(0, value);
        let region = mover.register(HOST, Arc::new(buffer)).map_err(failed)?;
        let layer_bytes = value.len() as u64 / LAYERS;
        let layers =
            (0..LAYERS).map(|layer| vec![Span::new(region, layer * layer_bytes, layer_bytes)]).collect();
        let (sender, end) = mpsc::channel();
        let on_end = move |end| _ = sender.send(end);
        let source = Source { id: self.id(key), parent: None, layers, crcs: None };
        let taken = self.ssd.write(TENANT, source, Class::WriteBack, on_end);
        let stored = taken.map_err(refused).and_then(|()| match end.recv().map_err(failed)? {
            SsdWriteEnd::Stored { .. } | SsdWriteEnd::AlreadyHere => Ok(()),
            SsdWriteEnd::Deleted => Err(refused("deleted meanwhile")),
            SsdWriteEnd::Failed(not_written) => Err(refused(not_written)),
        });
        // Memory that a failed transfer might still touch is kept.
        let _ = mover.unregister(region).map_err(failed)?;
        stored
    }

    /// One lease and one request for the values up to the first that is not here, as an engine asks
    /// for a prefix. Whatever the reason why there are none, the caller computes them anew.
    fn get(&self, keys: &[u64]) -> Result<Vec<Option<Staged>>, Is> {
        let mut values: Vec<Option<Staged>> = keys.iter().map(|_| None).collect();
        let ids: Vec<ChunkId> = keys.iter().map(|key| self.id(*key)).collect();
        let lease = self.ssd.lease(TENANT, &ids, LEASE_US);
        if lease.is_empty() {
            return Ok(values);
        }
        let wants: Vec<LayerRead> = (0..lease.len())
            .map(|chunk| LayerRead { chunk, layers: 0..LAYERS as usize, into: None, check: Check::AtRead })
            .collect();
        let (sender, end) = mpsc::channel();
        let on_end = move |end| _ = sender.send(end);
        let deadline_us = self.mover.handle().now_us() + READ_US;
        if self.ssd.read(&lease, &wants, Class::Demand, Some(deadline_us), on_end).is_err() {
            return Ok(values);
        }
        for (value, end) in values.iter_mut().zip(end.recv().map_err(failed)?) {
            *value = end.ok();
        }
        Ok(values)
    }
}

fn refused(reason: impl ToString) -> Is {
    Is::Refused { reason: reason.to_string() }
}

fn failed(reason: impl ToString) -> Is {
    Is::Error { reason: reason.to_string() }
}

impl Subject for Forebay {
    fn open(&self, setup: &Setup) -> Result<(), Is> {
        let open = self.open_log(setup).map_err(refused)?;
        *self.open.lock() = Some(open);
        Ok(())
    }

    fn put(&self, key: u64, value: Vec<u8>) -> Result<(), Is> {
        self.opened()?.put(key, &value)
    }

    fn get_many(&self, keys: &[u64]) -> Result<Vec<Option<Vec<u8>>>, Is> {
        let open = self.opened()?;
        let staged = open.get(keys)?;
        let mover = open.mover.handle();
        Ok(staged.iter().map(|staged| self.use_layers(mover.memory(), staged.as_ref()?)).collect())
    }

    fn delete(&self, key: u64) -> Result<(), Is> {
        let open = self.opened()?;
        open.ssd.delete(TENANT, &[open.id(key)]);
        Ok(())
    }

    fn flush(&self) -> Result<(), Is> {
        self.opened()?.ssd.flush().map_err(refused)
    }

    fn faults(&self) -> &Faults {
        &self.faults
    }

    fn cannot_play(&self, fault: &Fault) -> Option<&'static str> {
        matches!(fault, Fault::Torn { .. }).then_some("it has no ring")
    }

    fn noticed(&self) -> Option<u64> {
        let stat = self.opened().ok()?.ssd.stat();
        let failed_commits: u64 = stat.volumes.iter().map(|volume| volume.failed_commits).sum();
        let corrupt_copies = self.corrupt_copies.load(Ordering::Relaxed);
        Some(stat.corrupt + stat.io_faults + failed_commits + corrupt_copies)
    }

    fn close(&self) -> Result<(), Is> {
        let open = self.open.lock().take();
        open.map_or(Ok(()), |open| open.ssd.close().map_err(refused))
    }
}
