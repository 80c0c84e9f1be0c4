//! What a store has to show: its memory tier, and what happens between memory and disk. The disk
//! tier itself is in
//! [`ssd`](super::ssd).

use super::{counter, gauge, push_each, push_one, ssd};
use crate::metrics::{Family, Metric};
use forebay_store::{Counters, DiskSideStat, Stat};

const CAPACITY: Family = gauge("forebay_memory_capacity_bytes", "Length of the arena.");
const ARENA: Family = gauge("forebay_memory_bytes", "Where every byte of the arena is.");
const CHUNKS: Family = gauge("forebay_chunks", "Chunks that can be found, by tier.");
const LEASES: Family = gauge("forebay_leases", "Leases alive, by tier.");
const EXPIRED: Family = counter("forebay_leases_expired_total", "Leases that ended by time, by tier.");
const STORED: Family = counter("forebay_chunks_stored_total", "Chunks written in full, by tier.");
const EVICTED: Family = counter("forebay_chunks_evicted_total", "Chunks evicted, by tier.");
const PINNED: Family = gauge("forebay_pinned_chunks", "Chunks that are pinned, by tier.");
const PINNED_BYTES: Family = gauge("forebay_pinned_bytes", "What pinned chunks take, by tier.");
const PINS_BROKEN: Family =
    counter("forebay_pins_broken_total", "Pins that gave way since there was no other room, by tier.");
const REFUSED: Family = counter("forebay_refused_total", "Wishes refused, by tier and reason.");
const FORGOTTEN: Family = counter(
    "forebay_absences_forgotten_total",
    "Chunks of which it is forgotten why they are not there, by tier.",
);
const FAULTS: Family = counter("forebay_store_faults_total", "Bytes that went wrong, by tier and kind.");
const TENANT_USED: Family = gauge("forebay_tenant_used_bytes", "What a tenant uses, by tier.");
const TENANT_QUOTA: Family = gauge("forebay_tenant_quota_bytes", "What a tenant may use, by tier.");
const HITS: Family = counter("forebay_leased_chunks_total", "Chunks leased, by where they were.");
const WRITE_BACK: Family =
    counter("forebay_write_back_chunks_total", "Chunks for the disk, by how it ended.");
const WRITE_BACK_QUEUE: Family = gauge("forebay_write_back_waiting_chunks", "Chunks that wait for the disk.");
const ADMISSION: Family =
    counter("forebay_admission_bytes_total", "Bytes of chunks, by what admission said.");
const PROMOTED: Family = counter("forebay_promotions_total", "Chunks from disk to memory, by how it ended.");
const BAD_COPIES: Family =
    counter("forebay_bad_copies_total", "Layers that were right in staging and wrong at their target.");

pub fn collect(memory: &Stat, disk: Option<&DiskSideStat>, out: &mut Vec<Metric>) {
    collect_memory(memory, out);
    if let Some(disk) = disk {
        collect_disk_side(disk, out);
        collect_tier("disk", &disk.ssd.tier.counters, out);
        ssd::collect(&disk.ssd, out);
    }
}

fn collect_memory(stat: &Stat, out: &mut Vec<Metric>) {
    push_one(out, &CAPACITY, stat.capacity_bytes as f64);
    let arena = &stat.arena;
    let states = [
        ("used", arena.used_bytes),
        ("draining", arena.draining_bytes),
        ("quarantined", arena.quarantined_bytes),
        ("free", arena.free_bytes),
        ("tail", arena.tail_bytes),
    ];
    push_each(out, &ARENA, "state", &states);
    collect_tier("memory", &stat.counters, out);
}

fn collect_tier(tier: &'static str, counters: &Counters, out: &mut Vec<Metric>) {
    let tier = ("tier", tier);
    out.push(Metric::new(&CHUNKS, &[tier], counters.chunks as f64));
    out.push(Metric::new(&LEASES, &[tier], counters.leases as f64));
    out.push(Metric::new(&EXPIRED, &[tier], counters.leases_expired as f64));
    out.push(Metric::new(&STORED, &[tier], counters.stored as f64));
    out.push(Metric::new(&EVICTED, &[tier], counters.evicted as f64));
    out.push(Metric::new(&PINNED, &[tier], counters.pinned as f64));
    out.push(Metric::new(&PINNED_BYTES, &[tier], counters.pinned_bytes as f64));
    out.push(Metric::new(&PINS_BROKEN, &[tier], counters.pins_broken as f64));
    out.push(Metric::new(&FORGOTTEN, &[tier], counters.absences_forgotten as f64));
    let refusals = &counters.refusals;
    let reasons = [
        ("parent_missing", refusals.parent_missing),
        ("being_written", refusals.being_written),
        ("other_tenant", refusals.other_tenant),
        ("too_large", refusals.too_large),
        ("full", refusals.full),
        ("quota", refusals.quota),
        ("index_full", refusals.index_full),
        ("leases", refusals.leases),
    ];
    out.extend(
        reasons.map(|(reason, count)| Metric::new(&REFUSED, &[tier, ("reason", reason)], count as f64)),
    );
    let faults = &counters.faults;
    let kinds = [
        ("corrupt", faults.corrupt),
        ("write", faults.writes),
        ("read", faults.reads),
        ("lost", faults.lost),
    ];
    out.extend(kinds.map(|(kind, count)| Metric::new(&FAULTS, &[tier, ("kind", kind)], count as f64)));
    for tenant in &counters.tenants {
        let name = tenant.tenant.0.to_string();
        let labels = [tier, ("tenant", name.as_str())];
        out.push(Metric::new(&TENANT_USED, &labels, tenant.used_bytes as f64));
        out.push(Metric::new(&TENANT_QUOTA, &labels, tenant.quota_bytes as f64));
    }
}

fn collect_disk_side(stat: &DiskSideStat, out: &mut Vec<Metric>) {
    push_each(out, &HITS, "tier", &[("memory", stat.hits.memory), ("disk", stat.hits.disk)]);
    let write_back = &stat.write_back;
    let ends = [
        ("written", write_back.written),
        ("already_there", write_back.already_there),
        ("queue_full", write_back.queue_full),
        ("too_old", write_back.too_old),
        ("gone", write_back.gone),
        ("refused", write_back.refused),
        ("failed", write_back.failed),
    ];
    push_each(out, &WRITE_BACK, "end", &ends);
    let forgotten = write_back.absences_forgotten as f64;
    out.push(Metric::new(&FORGOTTEN, &[("tier", "write_back")], forgotten));
    push_one(out, &WRITE_BACK_QUEUE, (write_back.waiting + write_back.in_flight) as f64);
    let verdicts = &write_back.verdicts;
    let verdicts = [
        ("write", verdicts.write_bytes),
        ("used_once", verdicts.used_once_bytes),
        ("over_budget", verdicts.over_budget_bytes),
    ];
    push_each(out, &ADMISSION, "verdict", &verdicts);
    let promotions = &stat.promotions;
    let ends =
        [("promoted", promotions.promoted), ("refused", promotions.refused), ("failed", promotions.failed)];
    push_each(out, &PROMOTED, "end", &ends);
    push_one(out, &BAD_COPIES, stat.bad_copies as f64);
}
