//! The SSD tier as its users have it: the disk tier, its volumes, the mover and a little staging
//! memory, joined. This file opens, closes and answers what needs no I/O.
//!
//! Glue throughout: `read`, `write` and `relocate` turn chunks into transfers; `commit` runs the
//! log's commits; `pool` lends staging; `volume` and `file_medium` are the files; `crypt` encrypts
//! what a tenant wants encrypted. None of it decides what stays on disk, and nothing that was read
//! is seen by anybody before it was verified.

mod check;
mod commit;
mod committer;
mod crypt;
mod error;
mod file_medium;
mod in_flight;
mod inner;
mod key_file;
mod lease;
mod log_lines;
mod pool;
mod read;
mod relocate;
mod staged;
mod staging;
mod stat;
mod thread_pool;
mod volume;
mod write;

pub use check::Check;
pub use crypt::{ENCRYPTION_BYTES, EncryptionError, KEY_BYTES, TenantKeys};
pub use error::{NotRead, NotWritten, SsdError};
pub use file_medium::FileMedium;
pub use inner::{VOLUMES_MAX, WRITES_MAX};
pub use key_file::{KeysNotRead, LineProblem};
pub use lease::DiskLease;
pub use pool::{NotStaged, StagingUse};
pub use read::{LayerRead, ReadResults};
pub use staged::Staged;
pub use stat::{SsdStat, VolumeStat};
pub use volume::{Existing, Volume, init};
pub use write::{Source, SsdWriteEnd};

use crate::absence::AbsenceLog;
use crate::log::{DiskTier, DiskTierConfig, Medium, PAGE_BYTES};
use crate::tenant::TenantId;
use crate::tier::{KnownChunk, Names, Unchanged};
use committer::Committer;
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Arena, Backing, LinkSpec, MoverHandle, Pages, PathSpec, Place};
use in_flight::InFlight;
use inner::{Core, OpenVolume, SsdInner};
use log_lines::LogLines;
use pool::Pool;
use relocate::Relocating;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use thread_pool::ThreadPool;

/// Lots and bytes in flight on a volume's link. The link itself bounds its I/Os; this only has to
/// keep it busy.
const WINDOW_LOTS: u32 = 64;
const WINDOW_BYTES: u64 = 64 << 20;

#[derive(Debug)]
pub struct SsdOptions {
    pub tier: DiskTierConfig,
    /// Memory that chunks pass through, rounded down to pages. No request may need more.
    pub staging_bytes: u64,
    /// Requests that may wait for it at a time; one more is refused.
    pub waiting_max: usize,
    /// How long a change may wait to become durable, unless somebody [flushes](Ssd::flush).
    pub commit_interval_us: u64,
    /// What the disk is to have left for others. Below it the store gives space back, above twice
    /// as much it takes space again. 0 for a disk of one's own.
    pub reserve_bytes: u64,
    /// Tenants whose chunks are encrypted.
    pub keys: TenantKeys,
    /// Who compares what is fetched into memory with its checksums.
    pub check: Check,
}

impl Default for SsdOptions {
    /// 64 MiB of staging for which 4096 requests may wait, commits after 20 ms, no reserve, no
    /// keys; reads check what they bring.
    fn default() -> SsdOptions {
        SsdOptions {
            tier: DiskTierConfig::default(),
            staging_bytes: 64 << 20,
            waiting_max: 4096,
            commit_interval_us: 20_000,
            reserve_bytes: 0,
            keys: TenantKeys::default(),
            check: Check::default(),
        }
    }
}

/// Chunks at rest on disk, for any number of threads. Cheap to clone.
///
/// What is written can be read at once, and survives a crash from the next commit on. Dropping the
/// last clone without [`close`](Ssd::close) is a crash as far as the disk is concerned, and safe. A
/// log is owned until all clones, leases and operations are gone. Staging and links stay with the
/// mover until the mover ends.
#[derive(Debug, Clone)]
pub struct Ssd {
    owner: Arc<Owner>,
}

/// Ends the threads with the last clone.
#[derive(Debug)]
struct Owner {
    shared: Arc<SsdInner>,
    committers: Mutex<Vec<JoinHandle<()>>>,
}

impl Ssd {
    /// Opens the logs on these volumes, whatever state a crash left them in. Links, memory at
    /// `host` and routes between `host` and the volumes are added to the mover.
    pub fn open(
        mover: &MoverHandle,
        host: Place,
        volumes: Vec<Volume>,
        config: SsdOptions,
    ) -> Result<Ssd, SsdError> {
        if volumes.is_empty() || volumes.len() > VOLUMES_MAX {
            return Err(SsdError::Volumes { volumes: volumes.len() });
        }
        let media: Vec<&dyn Medium> = volumes.iter().map(|volume| &*volume.medium).collect();
        let (tier, recovered) = DiskTier::open_telling_volume(&config.tier, &media)
            .map_err(|not| volumes[not.volume].not_opened(not.error))?;
        let system = |doing| move |source| SsdError::System { doing, source };
        let staging_bytes = config.staging_bytes - config.staging_bytes % PAGE_BYTES as u64;
        let staging: Arc<dyn Backing> = Arc::new(Arena::new(staging_bytes, Pages::Transparent)?);
        let region = mover.register(host, Arc::clone(&staging))?;
        let open = |volume| open_volume(mover, host, volume, &staging, config.commit_interval_us);
        let volumes = volumes.into_iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let threads = Arc::new(ThreadPool::start().map_err(system("starting threads"))?);
        let pool = Arc::new(Pool::new(region, staging, config.waiting_max));
        let shared = SsdInner {
            core: Mutex::new(Core::new(tier)),
            mover: mover.clone(),
            staging: pool,
            volumes,
            threads,
            counts: Mutex::default(),
            lines: LogLines::default(),
            keys: config.keys,
            reads: InFlight::new(usize::MAX),
            writes: InFlight::new(WRITES_MAX),
            reserve_bytes: config.reserve_bytes,
            check: config.check,
            start_relocation: Relocating::start,
        };
        let shared = Arc::new(shared);
        let listener = Arc::downgrade(&shared);
        mover.on_quiet(move |spans| {
            if let Some(shared) = listener.upgrade() {
                shared.quiet(spans);
            }
        })?;
        for (volume, recovered) in shared.volumes.iter().zip(&recovered) {
            shared.lines.opened(volume.disk.path(), recovered);
        }
        let owner = Owner { shared: Arc::clone(&shared), committers: Mutex::default() };
        for number in 0..shared.volumes.len() {
            let shared = Arc::clone(&shared);
            let committer = std::thread::Builder::new()
                .name("forebay-commit".into())
                .spawn(move || commit::run(&shared, number))
                .map_err(system("starting a committer"))?;
            owner.committers.lock().push(committer);
        }
        Ok(Ssd { owner: Arc::new(owner) })
    }

    pub fn contains(&self, id: &ChunkId) -> bool {
        self.shared().look(|tier| tier.contains(id))
    }

    /// How many of `ids`, a sequence from its first chunk on, are here and the tenant's,
    /// without a gap. Looking keeps nothing: only a lease does.
    pub fn lookup(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        self.shared().look(|tier| tier.lookup(tenant, ids))
    }

    /// Whether a chunk is here and the tenant's.
    pub fn has(&self, tenant: TenantId, id: &ChunkId) -> bool {
        self.shared().look(|tier| tier.has(tenant, id))
    }

    /// Keeps a chunk, and those that it continues, from being evicted for `ttl_us` or the longest
    /// time that there is, and says until when.
    pub fn pin(&self, tenant: TenantId, id: &ChunkId, ttl_us: u64) -> Result<u64, Unchanged> {
        self.shared().change(|tier, now_us| tier.pin(now_us, tenant, id, ttl_us))
    }

    /// Ends the pin of a chunk.
    pub fn unpin(&self, tenant: TenantId, id: &ChunkId) -> Result<(), Unchanged> {
        self.shared().change(|tier, now_us| tier.unpin(now_us, tenant, id))
    }

    /// When the pin of a chunk ends, if it is pinned.
    pub fn pinned_until_us(&self, tenant: TenantId, id: &ChunkId) -> Option<u64> {
        self.shared().change_quietly(|tier, now_us| tier.pinned_until_us(now_us, tenant, id))
    }

    /// Drops these chunks as [`delete`](Ssd::delete) does, and has their bytes overwritten, also
    /// after a crash; and then, once a minute at most, every byte that no chunk has. Says of each
    /// whether it was here.
    pub fn forget(&self, tenant: TenantId, ids: &[ChunkId]) -> Vec<bool> {
        let gone = self.shared().change(|tier, now_us| tier.forget(now_us, tenant, ids));
        self.shared().volumes.iter().for_each(|volume| volume.committer.hurry());
        gone
    }

    /// Drops these chunks, even if leased, pinned or being written, and says how many there were.
    /// Their bytes stay on disk until they are overwritten by others.
    pub fn delete(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        self.shared().change(|tier, _| tier.delete(tenant, ids))
    }

    /// Ends a tenant: its chunks are gone at once, and every byte that no other chunk has is
    /// overwritten soon, also after a crash. Says how many chunks there were.
    pub fn purge(&self, tenant: TenantId) -> usize {
        let count = self.shared().change(|tier, now_us| tier.doom_tenant(now_us, tenant));
        self.shared().volumes.iter().for_each(|volume| volume.committer.hurry());
        count
    }

    /// Who compares what is fetched with its checksums.
    pub(crate) fn check(&self) -> Check {
        self.shared().check
    }

    /// Bytes of a chunk were wrong where they were used, and no read has compared them: it is
    /// dropped, and the fault counted.
    pub(crate) fn drop_found_corrupt(&self, tenant: TenantId, id: &ChunkId) {
        let shared = self.shared();
        if shared.change(|tier, _| tier.drop_corrupt_named(tenant, id)) {
            shared.counts.lock().corrupt += 1;
            shared.lines.wrong_at_use(id);
        }
    }

    /// From now on changes are kept for `key`, and `bell` is rung with the first one after each
    /// [look](Ssd::take_changes).
    pub(crate) fn watch(&self, key: u64, bell: Sender<()>) {
        self.shared().change_quietly(|tier, _| tier.changes.watch(key, bell));
    }

    /// Changes are not kept for `key` any more.
    pub(crate) fn unwatch(&self, key: u64) {
        self.shared().change_quietly(|tier, _| tier.changes.unwatch(key));
    }

    /// Chunks that came or went since `key` last looked.
    pub(crate) fn take_changes(&self, key: u64) -> Names {
        self.shared().change_quietly(|tier, _| tier.changes.take(key))
    }

    pub(crate) fn known(&self, id: &ChunkId) -> Option<KnownChunk> {
        self.shared().look(|tier| tier.known(id))
    }

    /// Why chunks are not on the disk, as far as it is remembered.
    pub(crate) fn absences(&self) -> AbsenceLog {
        self.shared().look(|tier| tier.absences.copy())
    }

    pub(crate) fn residents(&self) -> Vec<ChunkId> {
        self.shared().look(|tier| tier.resident_rows().map(|row| *tier.id_of(row)).collect())
    }

    pub fn stat(&self) -> SsdStat {
        self.shared().stat()
    }

    /// Sleeps until everything is durable whose end was told before this call. An error means that
    /// some of it may not be.
    pub fn flush(&self) -> Result<(), SsdError> {
        for (number, volume) in self.shared().volumes.iter().enumerate() {
            let failed = |error| SsdError::Commit { volume: number, error };
            volume.committer.flush().map_err(failed)?;
        }
        Ok(())
    }

    /// Lets nothing more in, waits for what is under way, makes everything durable and says so in
    /// the files. Other clones refuse everything from now on.
    pub fn close(self) -> Result<(), SsdError> {
        let shared = self.shared();
        shared.reads.close();
        shared.writes.close();
        shared.staging.close();
        shared.writes.wait_until_idle();
        shared.reads.wait_until_idle();
        self.owner.end_committers();
        for number in 0..shared.volumes.len() {
            let failed =
                |error: std::io::Error| SsdError::Commit { volume: number, error: error.to_string() };
            commit::close(shared, number).map_err(failed)?;
        }
        Ok(())
    }

    fn shared(&self) -> &Arc<SsdInner> {
        &self.owner.shared
    }
}

impl Owner {
    fn end_committers(&self) {
        self.shared.volumes.iter().for_each(|volume| volume.committer.stop());
        for committer in self.committers.lock().drain(..) {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = committer.join();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.end_committers();
    }
}

/// Adds a volume's link, region and routes to the mover.
fn open_volume(
    mover: &MoverHandle,
    host: Place,
    volume: Volume,
    staging: &Arc<dyn Backing>,
    commit_interval_us: u64,
) -> Result<OpenVolume, SsdError> {
    /// Places are never used twice: the mover goes on serving a link's routes after its store is
    /// gone.
    static NEXT_PLACE: AtomicU16 = AtomicU16::new(0);
    let place = Place::Disk(NEXT_PLACE.fetch_add(1, Ordering::Relaxed));
    let Volume { link, medium } = volume;
    let disk = link.handle();
    // Where memory cannot be pinned, each I/O pins it anew.
    let _ = disk.pin(Arc::clone(staging));
    let spec = LinkSpec::new(format!("{place:?}"), WINDOW_LOTS, WINDOW_BYTES);
    let link = mover.add_link(spec, Box::new(link))?;
    let region = disk.register(mover, place, 0, medium.bytes())?;
    for (from, to) in [(host, place), (place, host)] {
        mover.add_path(PathSpec::direct(from, to, link))??;
    }
    Ok(OpenVolume { medium, disk, region, committer: Committer::new(commit_interval_us) })
}
