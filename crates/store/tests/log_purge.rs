//! What ends with a tenant: every byte of it, wherever relocations, segments and the file system
//! have left some.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "each test file uses a part of the simulation")]
mod sim;

use forebay_kv::ChunkId;
use forebay_store::log::*;
use forebay_store::{ChunkShape, TenantId};
use sim::{Got, Host, SimDisk, config, disks, id, layers_of, shape};
use std::ops::Range;

const TENANT: TenantId = TenantId(3);

/// Stores chunks, each durably.
fn store(host: &mut Host, numbers: Range<u64>, tenant: TenantId, shape: &ChunkShape) {
    for number in numbers {
        host.store(tenant, &id(number), None, shape).unwrap();
        host.reclaim().unwrap();
        host.commit().unwrap();
    }
}

/// Has all be overwritten that is to be: what one round frees is overwritten by the next.
fn scrub(host: &mut Host) {
    for _ in 0..3 {
        host.scrub().unwrap();
        host.commit().unwrap();
    }
}

fn are_gone(disk: &SimDisk, numbers: Range<u64>, shape: &ChunkShape) {
    let image = disk.image();
    for number in numbers {
        let layer = &layers_of(&id(number), shape)[0];
        assert!(image.chunks(4096).all(|page| !page.starts_with(&layer[..64])), "chunk {number}");
    }
}

#[test]
fn no_byte_of_a_tenant_that_is_gone_is_left_on_the_disk() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    for number in 0..400 {
        let tenant = TenantId(number as u16 % 2);
        host.store(tenant, &id(number), None, &shape(0)).unwrap();
        host.reclaim().unwrap();
        if host.tier.commit_is_urgent(0) {
            host.commit().unwrap();
        }
    }
    let kept = host.tier.resident().filter(|(tenant, _)| *tenant == TenantId(0)).count();
    assert!(host.tier.doom_tenant(1_000_000, TenantId(1)) > 0 && kept > 0);
    host.commit().unwrap();
    // The end of the process does not end the scrubbing.
    let mut host = Host::open(&config(), &disks).unwrap();
    scrub(&mut host);
    assert_eq!(host.tier.resident().count(), kept);
    let image = disks[0].image();
    let is_left = |needle: &[u8]| image.chunks(4096).any(|page| page.starts_with(needle));
    for number in 0..400 {
        let layer = &layers_of(&id(number), &shape(0))[0];
        let resident = host.tier.contains(&id(number));
        assert!(resident || number % 2 == 0 || !is_left(&layer[..64]), "chunk {number} is still there");
        assert!(!resident || is_left(&layer[..64]));
    }
}

#[test]
fn a_segment_is_used_again_only_when_all_of_it_was_overwritten() {
    const SEGMENT_BYTES: u64 = 20 << 20;
    for first_fails in [false, true] {
        let disk = SimDisk::with_log(84 << 20, SEGMENT_BYTES, 64 << 10);
        let mut host = Host::open(&config(), &[disk]).unwrap();
        host.store(TENANT, &id(0), None, &shape(0)).unwrap();
        host.tier.doom_tenant(1, TENANT);
        host.commit().unwrap();
        // The first piece takes longer than all others, or has to be written again.
        let mut first = host.tier.next_scrub(2);
        let begin = first.as_ref().unwrap().offset;
        if first_fails {
            host.tier.end_scrub(first.take().unwrap(), false);
        }
        let mut overwritten = 0;
        while let Some(scrub) = host.tier.next_scrub(2) {
            overwritten += scrub.bytes;
            host.tier.end_scrub(scrub, true);
        }
        let opened: Vec<DiskWrite> = (1..5)
            .filter_map(|number| {
                let shape = ChunkShape::new([4096 * number]).unwrap();
                match host.tier.begin_write(3, TENANT, &id(number), None, &shape) {
                    Ok(DiskBegun::Write(write)) => Some(write),
                    _ => None,
                }
            })
            .collect();
        let is_used = opened.iter().any(|write| (begin..begin + SEGMENT_BYTES).contains(&write.slot_at));
        assert_eq!(is_used, first_fails, "{opened:?}");
        assert!(!first_fails || overwritten == SEGMENT_BYTES, "{overwritten}");
        first.into_iter().for_each(|scrub| host.tier.end_scrub(scrub, true));
    }
}

#[test]
fn a_log_opens_however_many_tenants_are_being_overwritten() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    for tenant in 0..65 {
        host.store(TenantId(tenant), &id(u64::from(tenant)), None, &shape(0)).unwrap();
        host.reclaim().unwrap();
        host.commit().unwrap();
    }
    for tenant in 0..65 {
        host.tier.doom_tenant(1_000, TenantId(tenant));
    }
    for number in 100..110 {
        host.store(TenantId(99), &id(number), None, &shape(0)).unwrap();
        host.commit().unwrap();
    }
    let mut host = Host::open(&config(), &disks).unwrap();
    assert_eq!(host.tier.resident().count(), 10);
    scrub(&mut host);
    are_gone(&disks[0], 0..65, &shape(0));
}

#[test]
fn what_could_not_be_given_to_the_file_system_is_overwritten_with_its_tenant() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    store(&mut host, 0..200, TENANT, &shape(0));
    host.tier.delete(TENANT, &(0..200).map(id).collect::<Vec<_>>());
    host.close().unwrap();
    let mut host = Host::open(&config(), &disks).unwrap();
    host.commit().unwrap();
    host.tier.shrink(0, 1 << 20);
    let mut failed = 0;
    while let Some(withdrawal) = host.tier.next_withdrawal(0) {
        host.tier.end_withdrawal(withdrawal, false);
        failed += 1;
    }
    assert!(failed > 4, "{failed}");
    host.commit().unwrap();
    let mut host = Host::open(&config(), &disks).unwrap();
    host.tier.doom_tenant(1_000, TENANT);
    scrub(&mut host);
    are_gone(&disks[0], 0..200, &shape(0));
}

#[test]
fn no_byte_of_a_tenant_that_is_gone_is_left_behind_the_slots_of_another_one() {
    let (one, two) = (TenantId(1), TenantId(2));
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    // Seven slots to the end of a segment, then two of another length and a rest.
    let (short, long) = (ChunkShape::new([4096]).unwrap(), ChunkShape::new([20_480]).unwrap());
    store(&mut host, 0..200, one, &short);
    store(&mut host, 1000..1100, two, &long);
    let kept: Vec<ChunkId> = host.tier.resident().map(|(_, id)| id).collect();
    host.tier.doom_tenant(1_000_000, one);
    scrub(&mut host);
    are_gone(&disks[0], 0..200, &short);
    assert!(kept.len() > 10);
    for id in kept {
        assert_eq!(host.get(two, &id), Got::Bytes(layers_of(&id, &long)));
    }
}

#[test]
fn what_is_being_relocated_when_its_tenant_ends_is_overwritten_too() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    let relocation = (0..400).find_map(|number| {
        host.store(TENANT, &id(number), None, &shape(0)).unwrap();
        // Some are in use, so that they are relocated rather than dropped.
        if number % 4 == 0 {
            host.tier.lease(0, TENANT, &[id(number)], 1_000_000);
        }
        host.commit().unwrap();
        host.tier.next_relocation(0)
    });
    let relocation = relocation.unwrap();
    let mut slot = vec![0; relocation.read.shape.stride_bytes() as usize];
    disks[0].read_at(relocation.read.slot_at, &mut slot).unwrap();
    disks[0].write_at(relocation.write.slot_at, &slot).unwrap();
    host.tier.doom_tenant(1, TENANT);
    host.commit().unwrap();
    host.scrub().unwrap();
    host.tier.end_relocation(2, relocation, RelocationEnd::Written);
    for _ in 0..3 {
        host.commit().unwrap();
        host.scrub().unwrap();
    }
    let image = disks[0].image();
    assert!(image.chunks(4096).all(|page| !page.starts_with(&slot[..64])));
}

#[test]
fn what_was_to_be_given_to_the_file_system_while_its_tenant_ends_is_overwritten_if_it_stays() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    store(&mut host, 0..200, TENANT, &shape(0));
    host.tier.delete(TENANT, &(0..200).map(id).collect::<Vec<_>>());
    host.commit().unwrap();
    host.tier.doom_tenant(1_000, TENANT);
    host.tier.shrink(0, 1 << 20);
    let withdrawals: Vec<Withdrawal> = std::iter::from_fn(|| host.tier.next_withdrawal(0)).collect();
    assert!(withdrawals.len() > 4, "{}", withdrawals.len());
    scrub(&mut host);
    withdrawals.into_iter().for_each(|withdrawal| host.tier.end_withdrawal(withdrawal, false));
    scrub(&mut host);
    are_gone(&disks[0], 0..200, &shape(0));
}

#[test]
fn what_is_forgotten_is_overwritten_after_a_crash_and_where_the_log_had_moved_it_from() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    // Chunks in use are moved when their segments are emptied, and leave bytes behind.
    store(&mut host, 0..1, TENANT, &shape(0));
    let lease = host.tier.lease(0, TENANT, &[id(0)], 1_000_000);
    store(&mut host, 1..400, TenantId(9), &shape(0));
    assert!(lease.is_some() && host.tier.contains(&id(0)), "it is still there");
    assert_eq!(host.tier.forget(1, TENANT, &[id(0), id(1000)]), [true, false]);
    host.commit().unwrap();
    // The process ends before anything is overwritten.
    let mut host = Host::open(&config(), &disks).unwrap();
    assert!(!host.tier.contains(&id(0)));
    scrub(&mut host);
    are_gone(&disks[0], 0..1, &shape(0));
    assert!(host.tier.resident().count() > 10, "others' chunks stay");
}

#[test]
fn chunks_that_are_forgotten_one_by_one_cost_a_sweep_a_minute() {
    let disks = disks(1);
    let mut host = Host::open(&config(), &disks).unwrap();
    store(&mut host, 0..100, TENANT, &shape(0));
    // Segments that come free meanwhile are overwritten behind a commit.
    let overwritten = |host: &mut Host, now_us| {
        let mut bytes = 0;
        for _ in 0..3 {
            while let Some(scrub) = host.tier.next_scrub(now_us) {
                bytes += scrub.bytes;
                host.tier.end_scrub(scrub, true);
            }
            host.commit().unwrap();
        }
        bytes
    };
    host.tier.forget(1, TENANT, &[id(98)]);
    let all = overwritten(&mut host, 2);
    host.tier.forget(3, TENANT, &[id(99)]);
    let one = overwritten(&mut host, 4);
    assert!(one > 0 && one < all / 4, "{one} of {all}");
    assert!(overwritten(&mut host, 120_000_000) > 0, "what is due comes later");
    assert_eq!(overwritten(&mut host, 300_000_000), 0, "and once");
}
