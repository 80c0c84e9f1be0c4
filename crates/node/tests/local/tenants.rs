//! What tenants may use, and whose chunks nobody can read who has the disk alone.

use crate::rig::*;
use forebay_client::protocol::control::{Verb, Verdict};
use forebay_node::{NodeConfig, QuotaConfig, SsdConfig, TenantsConfig, WriteBackPolicy};
use forebay_store::{StoreEnd, TenantId};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// The tenant of clients that name none.
const TENANT: u16 = 0;

fn start(site: &Site, change: impl FnOnce(&mut NodeConfig)) -> Result<NodeConfig, String> {
    let mut config = site.config();
    change(&mut config);
    let path = site.folder.path().join("node.toml");
    std::fs::write(&path, config.to_toml()).unwrap();
    NodeConfig::read(&path).map_err(|error| error.to_string())
}

#[test]
fn a_tenant_keeps_no_more_than_its_quota_and_others_are_not_touched() {
    const QUOTA_BYTES: u64 = 200 << 10;
    for (tenant, is_limited) in [(TENANT, true), (TENANT + 1, false)] {
        let site = Site::new();
        let quota = QuotaConfig { tenant, memory: Some(QUOTA_BYTES), ssd: None };
        start(&site, |config| config.tenants.quotas = vec![quota]).unwrap();
        let (node, peer) = (site.node(), site.peer());
        let ends: Vec<StoreEnd> = (0..CHUNKS).map(|number| peer.store(number)).collect();
        let used_bytes = node.store().stat().counters.tenants[0].used_bytes;
        assert_eq!(used_bytes <= QUOTA_BYTES, is_limited, "{used_bytes}");
        assert_eq!(peer.client.lookup(&ids()) < CHUNKS, is_limited, "{ends:?}");
    }
}

/// A client whose requests are all for this tenant.
fn peer_for(site: &Site, tenant: u16) -> Peer {
    let mut peer = site.peer();
    peer.client = peer.client.for_tenant(Some(TenantId(tenant)));
    peer
}

#[test]
fn a_request_for_a_tenant_is_charged_to_it_and_nobody_else_finds_its_chunks() {
    const OTHER: u16 = 3;
    let site = Site::new();
    let quota = QuotaConfig { tenant: OTHER, memory: Some(200 << 10), ssd: None };
    start(&site, |config| config.tenants.quotas = vec![quota]).unwrap();
    let (node, own, other) = (site.node(), site.peer(), peer_for(&site, OTHER));
    (0..CHUNKS).for_each(|number| drop(other.store(number)));
    let used = node.store().stat().counters.tenants;
    assert_eq!(used.iter().map(|used| used.tenant).collect::<Vec<_>>(), [TenantId(OTHER)]);
    assert!(used[0].used_bytes <= 200 << 10, "its quota is the one that counts");
    let found = other.client.lookup(&ids());
    assert!((1..CHUNKS).contains(&found), "{found}");
    let lease = other.lease();
    assert!(lease.len() == found && (0..found).all(|number| other.hit(&lease, number)));
    drop(lease);
    assert_eq!((own.client.lookup(&ids()), own.lease().len()), (0, 0));
    let forget = |peer: &Peer| {
        let reports = peer.client.control(Verb::Forget, &ids()).unwrap().unwrap();
        reports.iter().filter(|report| report.verdict == Verdict::Accepted).count()
    };
    assert_eq!(forget(&own), 0, "they are not its own to forget");
    assert_eq!(other.client.lookup(&ids()), found);
    assert_eq!((forget(&other), other.client.lookup(&ids())), (found, 0));
    assert!(matches!(own.store(0), StoreEnd::Stored { .. }), "the same connection's own tenant");
}

fn file_holds(path: &std::path::Path, bytes: &[u8]) -> bool {
    std::fs::read(path).unwrap().windows(bytes.len()).any(|window| window == bytes)
}

#[test]
fn chunks_of_a_tenant_with_a_key_are_sealed_on_ssd_and_read_with_it() {
    // The tenant of requests, that of the client, and whether the former has a key.
    for (tenant, own, sealed) in [(TENANT, TENANT, true), (TENANT, TENANT, false), (9, TENANT, true)] {
        let site = Site::new();
        let (log, keys) = (site.folder.path().join("log"), site.folder.path().join("keys"));
        let made = start(&site, |config| {
            config.ssd =
                vec![SsdConfig { path: log.clone(), size: 16 << 20, segment_size: 1 << 20, create: true }];
            config.write_back = WriteBackPolicy::All;
            if sealed {
                std::fs::write(&keys, format!("{tenant} {}\n", "5a".repeat(32))).unwrap();
                std::fs::set_permissions(&keys, PermissionsExt::from_mode(0o600)).unwrap();
                config.tenants.key_file = Some(keys.clone());
            }
        });
        made.unwrap();
        let node = site.node();
        let peer = || if tenant == own { site.peer() } else { peer_for(&site, tenant) };
        let writer = peer();
        assert!((0..CHUNKS).all(|number| writer.store(number) == StoreEnd::Stored { bytes: CHUNK_BYTES }));
        drop(writer);
        node.drain(Duration::from_secs(60)).unwrap();
        assert_eq!(file_holds(&log, &truth(3)[..64]), !sealed);
        let (node, reader) = (site.node(), peer());
        assert_eq!(node.store().stat().chunks, 0, "all of them are on disk");
        let lease = reader.lease();
        assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
    }
}

#[test]
fn keys_that_others_may_read_are_refused_with_what_to_do() {
    let site = Site::new();
    let keys = site.folder.path().join("keys");
    std::fs::write(&keys, format!("{TENANT} {}\n", "5a".repeat(32))).unwrap();
    std::fs::set_permissions(&keys, PermissionsExt::from_mode(0o644)).unwrap();
    let why = start(&site, |config| {
        let log = site.folder.path().join("log");
        config.ssd = vec![SsdConfig { path: log, size: 16 << 20, segment_size: 1 << 20, create: true }];
        config.tenants = TenantsConfig { key_file: Some(keys), ..TenantsConfig::default() };
    });
    let why = why.unwrap_err();
    assert!(why.starts_with("tenants: key file") && why.contains("has mode 0644"), "{why}");
}
