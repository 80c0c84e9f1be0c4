//! A store with an SSD in a temporary directory, and an emulated device to store from and load to.

use forebay_kv::ChunkId;
use forebay_store::admission::Policy;
use forebay_store::disk::DiskOptions;
use forebay_store::log::Medium;
use forebay_store::ssd::{Existing, Ssd, SsdOptions, Volume, init};
use forebay_store::{
    DiskSideStat, Lease, Load, NotLoaded, NotVerified, SLOT_ALIGN_BYTES, Store, StoreEnd, TenantId,
    TierConfig, WriteBackConfig,
};
use forebay_transfer::{
    Class, End, HostBuffer, HostLink, Limits, LinkSpec, MoverHandle, MoverThread, Pages, PathSpec, Place,
    RegionId, Span,
};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use testkit::ended;

const HOST: Place = Place::Host(0);
const DEVICE: Place = Place::Device(0);
pub const TENANT: TenantId = TenantId(0);
pub const MINUTE_US: u64 = 60_000_000;
pub const LAYERS: usize = 3;
/// Not a multiple of anything.
pub const LAYER_BYTES: u64 = 7_001;
pub const CHUNK_BYTES: u64 = LAYERS as u64 * LAYER_BYTES;
/// Chunks that fit side by side into the device, once to store from and once to load to.
const PLACES: usize = 64;
const LOG_BYTES: u64 = 16 << 20;

pub struct Rig {
    pub store: Store,
    device: Arc<HostBuffer>,
    region: RegionId,
    _handle: MoverHandle,
    _mover: MoverThread,
}

/// A directory with a log.
pub struct Disk {
    directory: tempfile::TempDir,
    /// How long it takes to make something durable, at least.
    sync_for: Duration,
}

struct Slow {
    inner: Arc<dyn Medium>,
    sync_for: Duration,
}

impl Medium for Slow {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, buffer)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        std::thread::sleep(self.sync_for);
        self.inner.sync()
    }

    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.inner.withdraw(offset, bytes)
    }

    fn restore(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.inner.restore(offset, bytes)
    }
}

impl Disk {
    pub fn new() -> Disk {
        Disk::with(LOG_BYTES, Duration::ZERO)
    }

    pub fn with(bytes: u64, sync_for: Duration) -> Disk {
        let disk = Disk { directory: tempfile::tempdir().unwrap(), sync_for };
        init(disk.path(), bytes, 1 << 20, Existing::Keep).unwrap();
        disk
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    /// Flips a bit wherever the bytes of a layer lie on disk.
    pub fn damage(&self, number: usize) {
        let mut bytes = std::fs::read(self.path()).unwrap();
        let layer = &truth(number)[..LAYER_BYTES as usize];
        let places: Vec<usize> = (0..bytes.len() - layer.len())
            .step_by(512)
            .filter(|at| bytes[*at..].starts_with(layer))
            .collect();
        assert!(!places.is_empty(), "the chunk lies on disk");
        for at in places {
            bytes[at + 100] ^= 1;
            use std::os::unix::fs::FileExt;
            let file = std::fs::OpenOptions::new().write(true).open(self.path()).unwrap();
            file.write_all_at(&bytes[at + 100..at + 101], at as u64 + 100).unwrap();
            file.sync_all().unwrap();
        }
    }
}

impl Rig {
    pub fn new(disk: &Disk, slots: u64) -> Rig {
        Rig::with_policy(disk, slots, Policy::All)
    }

    pub fn with_policy(disk: &Disk, slots: u64, policy: Policy) -> Rig {
        Rig::with(disk, slots, |config| config.admission.policy = policy)
    }

    /// With write-back as `change` makes it.
    pub fn with(disk: &Disk, slots: u64, change: impl FnOnce(&mut WriteBackConfig)) -> Rig {
        let slot_bytes = CHUNK_BYTES.next_multiple_of(SLOT_ALIGN_BYTES);
        let config = TierConfig { slab_bytes: slot_bytes, ..TierConfig::new(slots * slot_bytes) };
        let mover = MoverThread::spawn(Limits { attempts: 1, ..Limits::default() }).unwrap();
        let handle = mover.handle();
        let link = LinkSpec::new("host", 4, 64 << 20);
        let link = handle.add_link(link, Box::new(HostLink::new(1).unwrap())).unwrap();
        for (from, to) in [(HOST, DEVICE), (DEVICE, HOST), (HOST, HOST)] {
            handle.add_path(PathSpec::direct(from, to, link)).unwrap().unwrap();
        }
        let device = Arc::new(HostBuffer::new(2 * PLACES * CHUNK_BYTES as usize));
        let region = handle.register(DEVICE, device.clone()).unwrap();
        let ssd_config = SsdOptions { staging_bytes: 2 << 20, ..SsdOptions::default() };
        let mut volume = opened(|| Volume::open(disk.path(), DiskOptions::default()));
        volume.medium = Arc::new(Slow { inner: volume.medium, sync_for: disk.sync_for });
        let ssd = Ssd::open(&handle, HOST, vec![volume], ssd_config).unwrap();
        let mut write_back = WriteBackConfig::new(Policy::All, slots * slot_bytes, LOG_BYTES, CHUNK_BYTES);
        change(&mut write_back);
        let store = Store::open_with_ssd(&handle, HOST, Pages::Base, config, ssd, &write_back).unwrap();
        Rig { store, device, region, _handle: handle, _mover: mover }
    }

    /// The layers of place `place`, each as two spans.
    fn spans(&self, place: usize) -> Vec<Vec<Span>> {
        let start = place as u64 * CHUNK_BYTES;
        let layer = |layer: u64| {
            let at = start + layer * LAYER_BYTES;
            vec![Span::new(self.region, at, 3_000), Span::new(self.region, at + 3_000, LAYER_BYTES - 3_000)]
        };
        (0..LAYERS as u64).map(layer).collect()
    }

    pub fn begin_store(&self, number: usize, parent: Option<usize>) -> Option<Receiver<StoreEnd>> {
        let place = number % PLACES;
        assert!(self.device.write(place * CHUNK_BYTES as usize, &truth(number)));
        let (sender, receiver) = channel();
        let on_end = move |end| sender.send(end).unwrap();
        let parent = parent.map(id);
        let layers = self.spans(place);
        let begun = self.store.store_chunk(TENANT, id(number), parent, &layers, Class::WriteBack, on_end);
        begun.is_ok().then_some(receiver)
    }

    /// Stores a chain of chunks; says how many were taken in.
    pub fn store_chain(&self, chain: &[usize]) -> usize {
        let mut parent = None;
        for (taken, number) in chain.iter().enumerate() {
            let end = self.begin_store(*number, parent).map(|receiver| ended(&receiver));
            if !matches!(end, Some(StoreEnd::Stored { .. } | StoreEnd::AlreadyHere)) {
                return taken;
            }
            parent = Some(*number);
        }
        chain.len()
    }

    pub fn lease(&self, chain: &[usize]) -> Lease {
        self.store.lease(TENANT, &ids(chain), MINUTE_US)
    }

    /// Loads the first `chunks` chunks of a lease in one go.
    pub fn load(&self, lease: &Lease, chunks: usize) -> Result<End, NotLoaded> {
        let load = |chunk| Load { chunk, layers: 0..LAYERS, targets: self.spans(PLACES + chunk) };
        let (sender, receiver) = channel();
        let on_end = move |end| sender.send(end).unwrap();
        self.store.load_chunks(lease, (0..chunks).map(load).collect(), Class::Demand, None, on_end)?;
        Ok(ended(&receiver))
    }

    /// Checks that what was loaded verifies, and that it is right.
    pub fn verify(&self, lease: &Lease, chain: &[usize]) -> Result<(), NotVerified> {
        for (chunk, number) in chain.iter().enumerate() {
            let mut bytes = vec![0; CHUNK_BYTES as usize];
            assert!(self.device.read((PLACES + chunk) * CHUNK_BYTES as usize, &mut bytes));
            for (layer, bytes) in bytes.chunks(LAYER_BYTES as usize).enumerate() {
                self.store.verify(lease, chunk, layer, &[&bytes[..3_000], &bytes[3_000..]])?;
            }
            assert!(bytes == truth(*number), "verified bytes of chunk {number} are right");
        }
        Ok(())
    }

    /// Loads what there is of a chain, and says how many right chunks that are.
    pub fn load_all(&self, chain: &[usize]) -> usize {
        let lease = self.lease(chain);
        if lease.is_empty() {
            return 0;
        }
        match self.load(&lease, lease.len()) {
            Ok(End::Done { bytes }) => {
                assert_eq!(bytes, lease.len() as u64 * CHUNK_BYTES);
                assert_eq!(self.verify(&lease, &chain[..lease.len()]), Ok(()));
                lease.len()
            }
            Ok(end) => panic!("{end:?}"),
            Err(error) => panic!("{error}"),
        }
    }

    pub fn stat(&self) -> DiskSideStat {
        self.store.disk_stat().unwrap()
    }
}

/// What a crashed owner left under way ends a little later than it.
fn opened<T, E: std::fmt::Display>(open: impl Fn() -> Result<T, E>) -> T {
    for _ in 0..400 {
        if let Ok(opened) = open() {
            return opened;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    open().unwrap_or_else(|error| panic!("{error}"))
}

pub fn id(number: usize) -> ChunkId {
    ChunkId::from_bytes([number as u8 + 1; 32])
}

pub fn ids(chain: &[usize]) -> Vec<ChunkId> {
    chain.iter().map(|number| id(*number)).collect()
}

pub fn truth(number: usize) -> Vec<u8> {
    let word = |at: usize| (at as u32 + 1).wrapping_mul(2_654_435_761 + 2 * number as u32).to_le_bytes()[2];
    (0..CHUNK_BYTES as usize).map(word).collect()
}
