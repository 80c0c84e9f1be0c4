//! What the disk tier has to show: space, reads and writes, staging memory, and each volume.

use super::{counter, gauge, push_each, push_one};
use crate::metrics::{Family, Metric};
use forebay_store::ssd::{SsdStat, VolumeStat};

const CAPACITY: Family = gauge("forebay_disk_capacity_bytes", "Length of all segments.");
const LIVE: Family = gauge("forebay_disk_live_bytes", "Bytes of chunks on disk.");
const LIVE_LIMIT: Family = gauge("forebay_disk_live_limit_bytes", "Bytes of chunks on disk at most.");
const SEGMENTS: Family = gauge("forebay_disk_segments", "Segments, by state.");
const PENDING: Family = gauge("forebay_disk_pending_records", "Changes that are not durable.");
const CARRIED: Family = counter("forebay_disk_carried_bytes_total", "Bytes that were carried forward.");
const READS: Family = counter("forebay_disk_reads_total", "Requests to read that ended with verified bytes.");
const WRITES: Family = counter("forebay_disk_writes_total", "Chunks written, by way.");
const BYTES: Family = counter("forebay_disk_bytes_total", "Bytes of layers, by direction.");
const FAULTS: Family = counter("forebay_disk_faults_total", "What went wrong on disk, by kind.");
const STAGING: Family = gauge("forebay_staging_bytes", "Staging memory, by state.");
const STAGING_WAITS: Family = counter("forebay_staging_reservations_total", "Reservations not met at once.");
const COMMITS: Family = counter("forebay_volume_commits_total", "Commits of a volume, by how they ended.");
const LAST_COMMIT: Family = gauge("forebay_volume_last_commit_seconds", "How long the last commit took.");
const READ_ONLY: Family = gauge("forebay_volume_read_only", "1 if nothing is written because commits fail.");
const PHYSICAL: Family = gauge("forebay_volume_physical_bytes", "Bytes of the disk that the volume holds.");
const IOS: Family = counter("forebay_volume_ios_total", "I/Os of the volume.");
const IO_FAULTS: Family = counter("forebay_volume_io_faults_total", "I/Os that failed, by kind.");

pub(super) fn collect(stat: &SsdStat, out: &mut Vec<Metric>) {
    collect_space(stat, out);
    push_one(out, &READS, stat.reads as f64);
    let staged_writes = stat.writes.saturating_sub(stat.direct_writes);
    push_each(out, &WRITES, "way", &[("direct", stat.direct_writes), ("staged", staged_writes)]);
    push_each(out, &BYTES, "direction", &[("read", stat.read_bytes), ("write", stat.written_bytes)]);
    let kinds = [("corrupt", stat.corrupt), ("io", stat.io_faults), ("chore", stat.failed_chores)];
    push_each(out, &FAULTS, "kind", &kinds);
    let staging = &stat.staging;
    let states = [
        ("used", staging.used_bytes),
        ("free", staging.capacity_bytes.saturating_sub(staging.used_bytes)),
        ("quarantined", staging.quarantined_bytes),
    ];
    push_each(out, &STAGING, "state", &states);
    push_each(out, &STAGING_WAITS, "end", &[("waited", staging.waited), ("refused", staging.refused)]);
    for (number, volume) in stat.volumes.iter().enumerate() {
        collect_volume(&number.to_string(), volume, out);
    }
}

fn collect_space(stat: &SsdStat, out: &mut Vec<Metric>) {
    let space = &stat.tier.space;
    push_one(out, &CAPACITY, space.capacity_bytes as f64);
    push_one(out, &LIVE, space.live_bytes as f64);
    push_one(out, &LIVE_LIMIT, space.live_limit_bytes as f64);
    let states = [
        ("free", space.free_segments as u64),
        ("open", space.open_segments as u64),
        ("sealed", space.sealed_segments as u64),
        ("withdrawn", space.withdrawn_segments as u64),
    ];
    push_each(out, &SEGMENTS, "state", &states);
    push_one(out, &PENDING, space.pending_records as f64);
    push_one(out, &CARRIED, stat.tier.relocated_bytes as f64);
}

fn collect_volume(number: &str, volume: &VolumeStat, out: &mut Vec<Metric>) {
    let name = ("volume", number);
    let commits = [("done", volume.commits), ("failed", volume.failed_commits)];
    out.extend(commits.map(|(end, count)| Metric::new(&COMMITS, &[name, ("end", end)], count as f64)));
    out.push(Metric::new(&LAST_COMMIT, &[name], volume.last_commit_us as f64 / 1e6));
    out.push(Metric::new(&READ_ONLY, &[name], f64::from(volume.read_only)));
    out.push(Metric::new(&PHYSICAL, &[name], volume.physical_bytes as f64));
    out.push(Metric::new(&IOS, &[name], volume.link.ios as f64));
    let link = &volume.link;
    let kinds = [
        ("truncated", link.truncated),
        ("no_space", link.no_space),
        ("device", link.device),
        ("other", link.other),
    ];
    out.extend(kinds.map(|(kind, count)| Metric::new(&IO_FAULTS, &[name, ("kind", kind)], count as f64)));
}
