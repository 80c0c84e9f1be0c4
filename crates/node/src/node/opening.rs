//! Opening the store that the configuration describes, with its disks. This file knows sizes and
//! defaults.

use super::{HOST, NoMemory, NodeError, memory};
use crate::config::{LimitsConfig, NodeConfig, SsdConfig, largest_chunk, segment_bytes};
use crate::hand_over::Left;
use forebay_store::disk::DiskOptions;
use forebay_store::log::DiskTierConfig;
use forebay_store::ssd::{Existing, Ssd, SsdOptions, Volume, WRITES_MAX, init};
use forebay_store::{Memory, OpenError, SLOT_ALIGN_BYTES, Store, TierConfig, WriteBackConfig};
use forebay_transfer::MoverHandle;
use forebay_transfer::Pages;
use std::path::{Path, PathBuf};

/// Staging of disks at least.
const STAGING_BYTES_MIN: u64 = 64 << 20;
/// And if that is no more than an eighth of the arena: chunks of 8 MiB came at 1.2 GB/s by way of
/// 66 MiB, at 1.4 to 1.5 by way of 256.
const STAGING_BYTES_USUAL: u64 = 256 << 20;
/// Tables of what is on disk are for no shorter chunks than these.
const CHUNK_BYTES_MIN: u64 = 64 << 10;
/// What waits for staging beside clients' loads: chunks on their way to disk, and those that peers
/// are to be lent.
const OTHERS_WAITING_MAX: usize = WRITES_MAX + 4096;

/// Opens the store, over memory that another node has left if there is some.
pub(super) fn open_store(
    mover: &MoverHandle,
    config: &NodeConfig,
    left: Option<Left>,
) -> Result<Store, NodeError> {
    let arena_bytes = if left.is_some() { 0 } else { config.memory.size };
    let mut tier = TierConfig::new(config.memory.size);
    tier.max_lease_us = config.limits.lease_us();
    (tier.default_quota_bytes, tier.quotas) = config.tenants.memory_quotas();
    tier.slab_bytes = largest_chunk(config);
    // Before a log is made.
    check_memory_beside(config, arena_bytes)?;
    if config.ssd.is_empty() {
        return Ok(Store::over(mover, HOST, open_memory(config, tier, left)?, None)?);
    }
    let open = |ssd| open_volume(ssd, of_new(ssd, config, tier.slab_bytes));
    let volumes = config.ssd.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let (default_quota_bytes, quotas) = config.tenants.ssd_quotas();
    // As the logs were made, whatever is said of new ones.
    let capacities = volumes.iter().map(Volume::capacity_bytes).collect::<Result<Vec<_>, _>>()?;
    let ssd_bytes = capacities.into_iter().sum();
    let max_chunks = chunks_max(ssd_bytes, config.memory.chunk_size);
    let disk = DiskTierConfig { max_chunks, default_quota_bytes, quotas, ..DiskTierConfig::default() };
    let keys = config.tenants.read_keys().map_err(NodeError::Config)?;
    let segments = volumes.iter().map(Volume::segment_bytes).collect::<Result<Vec<_>, _>>()?;
    let longest = segments.into_iter().max().unwrap_or(0);
    let staging_bytes = staging_bytes(config.memory.size, longest, tier.slab_bytes);
    memory::check(config, arena_bytes, staging_bytes)?;
    let waiting_max = waiting_max(&config.limits);
    let check = config.ssd_check.into();
    let on_disk = SsdOptions { tier: disk, keys, staging_bytes, waiting_max, check, ..Default::default() };
    let ssd = Ssd::open(mover, HOST, volumes, on_disk)?;
    let policy = config.write_back.policy();
    let write_back = WriteBackConfig::new(policy, config.memory.size, ssd_bytes, config.memory.chunk_size);
    Ok(Store::over(mover, HOST, open_memory(config, tier, left)?, Some((ssd, &write_back)))?)
}

/// A new arena, or the one that another node has left.
fn open_memory(config: &NodeConfig, tier: TierConfig, left: Option<Left>) -> Result<Memory, OpenError> {
    match left {
        Some(Left { arena, pages, kept }) => Memory::take_over(arena, pages, tier, &kept),
        None => Memory::new(Pages::from(config.memory.pages), tier),
    }
}

/// Whether the memory that the configuration asks for is left, as if all logs were new.
pub(super) fn check_memory(config: &NodeConfig) -> Result<(), NoMemory> {
    check_memory_beside(config, config.memory.size)
}

fn check_memory_beside(config: &NodeConfig, arena_bytes: u64) -> Result<(), NoMemory> {
    let largest = largest_chunk(config);
    let longest = config.ssd.iter().map(|ssd| of_new(ssd, config, largest)).max();
    let staging = longest.map_or(0, |longest| staging_bytes(config.memory.size, longest, largest));
    memory::check(config, arena_bytes, staging)
}

/// Memory between disks and the arena: of several chunks, so that a disk is read while others are
/// verified and copied on, in proportion to the arena, and never less than the largest one.
fn staging_bytes(memory: u64, segment: u64, largest_chunk: u64) -> u64 {
    let largest = segment.min(largest_chunk.saturating_add(SLOT_ALIGN_BYTES));
    segment.saturating_mul(2).max(STAGING_BYTES_USUAL).min(memory / 8).max(largest).max(STAGING_BYTES_MIN)
}

/// Chunks that are known on disk: as many usual ones as there is room for.
fn chunks_max(ssd_bytes: u64, usual_chunk: u64) -> u32 {
    let chunks = ssd_bytes / usual_chunk.max(CHUNK_BYTES_MIN);
    u32::try_from(chunks).unwrap_or(u32::MAX).max(DiskTierConfig::default().max_chunks)
}

/// What may wait for that memory: all that clients are allowed to load, so that it is late at
/// worst, and never refused.
fn waiting_max(limits: &LimitsConfig) -> usize {
    limits.loads().saturating_add(OTHERS_WAITING_MAX)
}

/// Segments of a log of this node, if it is made now.
fn of_new(ssd: &SsdConfig, config: &NodeConfig, largest_chunk: u64) -> u64 {
    segment_bytes(ssd, config.memory.chunk_size, largest_chunk)
}

/// Opens a log, and makes it if it is not there and may be made.
fn open_volume(config: &SsdConfig, segment_bytes: u64) -> Result<Volume, NodeError> {
    let path = &config.path;
    if !path.exists() {
        let mount = mount_of(path);
        if !config.create {
            return Err(NodeError::NoLog { path: path.clone(), mount });
        }
        let (path, mount) = (path.display(), mount.display());
        tracing::warn!(%path, %mount, "new, empty log made");
        init(&config.path, config.size, segment_bytes, Existing::Keep)?;
    }
    Ok(Volume::open(path, DiskOptions::default())?)
}

/// Where the file system is mounted that a new file at this path would be on.
fn mount_of(path: &Path) -> PathBuf {
    use std::os::unix::fs::MetadataExt;
    let device = |directory: &Path| std::fs::metadata(directory).ok().map(|found| found.dev());
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let directory = whole.parent().and_then(|parent| parent.canonicalize().ok());
    let Some(directory) = directory else { return whole };
    let on = device(&directory);
    let same = directory.ancestors().take_while(|above| device(above) == on).last();
    same.unwrap_or(&directory).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_chunks_are_known_on_disk_as_there_is_room_for() {
        for (bytes, usual, chunks) in [
            (100 << 30, 1 << 20, 1 << 20),
            (16 << 40, 1 << 20, 1 << 24),
            (500 << 30, 256 << 10, 2_048_000),
            (1 << 40, 1, 1 << 24),
        ] {
            assert_eq!(chunks_max(bytes, usual), chunks, "{bytes} {usual}");
        }
    }

    #[test]
    fn all_that_clients_may_load_may_wait_for_staging_while_as_much_is_written_as_may_be() {
        for (clients, loads_per_client) in [(1, 1), (64, 1024), (4096, 65_536), (usize::MAX, 2)] {
            let limits = LimitsConfig { clients, loads_per_client, ..LimitsConfig::default() };
            assert!(waiting_max(&limits) >= limits.loads().saturating_add(WRITES_MAX));
        }
    }

    #[test]
    fn staging_holds_the_largest_chunk_and_several_usual_ones_and_is_small_beside_the_arena() {
        let (mib, gib) = (1 << 20, 1 << 30);
        for (memory, segment, largest_chunk, staging) in [
            (gib / 2, 16 * mib, 16 * mib, 64 * mib),
            (gib, 16 * mib, 16 * mib, 128 * mib),
            (64 * gib, 33 * mib, 32 * mib, 256 * mib),
            (64 * gib, 128 * mib, gib, 256 * mib),
            (gib, 256 * mib, 16 * mib, 128 * mib),
            (gib, 256 * mib, 200 * mib, 200 * mib + SLOT_ALIGN_BYTES),
            (gib, 256 * mib, gib, 256 * mib),
        ] {
            let found = staging_bytes(memory, segment, largest_chunk);
            assert_eq!(found, staging, "{memory} {segment} {largest_chunk}");
        }
    }
}
