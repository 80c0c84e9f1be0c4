//! What clients say of single chunks, by name: to keep, fetch ahead, send away and forget them.

use crate::rig::*;
use forebay_client::protocol::control::{LISTED_MAX, Reason, Report, Verb, Verdict};
use forebay_client::protocol::explain::Place;
use forebay_node::{Node, NodeConfig, SsdConfig, WriteBackPolicy};
use forebay_store::{PIN_US_MAX, StoreEnd, TenantId};
use testkit::eventually;

/// A node with room for so many chunks in memory, and an SSD.
fn config_of(site: &Site, chunks: u64, with_ssd: bool) -> NodeConfig {
    let mut config = site.config();
    (config.memory.size, config.memory.largest_chunk) = (chunks * (64 << 10), 64 << 10);
    if with_ssd {
        let path = site.folder.path().join("log");
        config.ssd = vec![SsdConfig { path, size: 16 << 20, segment_size: 1 << 20, create: true }];
        config.write_back = WriteBackPolicy::All;
    }
    config
}

fn ask(peer: &Peer, verb: Verb, numbers: &[usize]) -> Vec<Report> {
    let ids: Vec<_> = numbers.iter().map(|number| id(*number)).collect();
    peer.client.control(verb, &ids).unwrap().unwrap()
}

fn verdicts(reports: &[Report]) -> Vec<(Verdict, Reason)> {
    reports.iter().map(|report| (report.verdict, report.reason)).collect()
}

fn places(peer: &Peer, numbers: &[usize]) -> Vec<Place> {
    ask(peer, Verb::List, numbers).iter().map(|report| report.place).collect()
}

const YES: (Verdict, Reason) = (Verdict::Accepted, Reason::None);
const NOT_STORED: (Verdict, Reason) = (Verdict::Rejected, Reason::NotStored);

#[test]
fn a_pinned_chunk_outlives_pressure_and_what_is_beyond_the_budget_is_clipped() {
    let site = Site::new();
    let _node = Node::start(&config_of(&site, 8, false)).unwrap();
    let peer = site.peer();
    (0..4).for_each(|number| assert!(matches!(peer.store(number), StoreEnd::Stored { .. })));
    let pinned = ask(&peer, Verb::Pin { ttl_ms: 60_000 }, &[0, 1, 2, 7]);
    let over = (Verdict::Clipped, Reason::OverBudget);
    assert_eq!(verdicts(&pinned), [YES, YES, over, NOT_STORED], "a quarter of memory");
    assert!(pinned[0].pinned_ms > 50_000 && pinned[2].pinned_ms == 0, "{pinned:?}");
    let writer = Writer::new(&site, CHUNK_BYTES as usize);
    for number in 20..40 {
        let sources: Vec<_> = (0..LAYERS as u64)
            .map(|layer| vec![forebay_transfer::Span::new(writer.region, layer * LAYER_BYTES, LAYER_BYTES)])
            .collect();
        let (sender, stored) = std::sync::mpsc::channel();
        let class = forebay_transfer::Class::WriteBack;
        let on_end = move |end| drop(sender.send(end));
        writer.client.store_chunk(id(number), None, &sources, class, on_end).unwrap();
        assert!(matches!(testkit::ended(&stored), StoreEnd::Stored { .. }), "others store all the same");
    }
    let gone = Place::Nowhere;
    assert_eq!(places(&peer, &[0, 1, 2, 3]), [Place::Memory, Place::Memory, gone, gone]);
    assert_eq!(verdicts(&ask(&peer, Verb::Unpin, &[0, 1, 2])), [YES, YES, NOT_STORED]);
    assert_eq!(verdicts(&ask(&peer, Verb::Unpin, &[0])), [(Verdict::Rejected, Reason::NotPinned)]);
    let years = ask(&peer, Verb::Pin { ttl_ms: u64::MAX }, &[0]);
    assert_eq!(verdicts(&years), [(Verdict::Clipped, Reason::TtlCut)]);
    assert!(years[0].pinned_ms <= PIN_US_MAX / 1000);
    assert_eq!(verdicts(&ask(&peer, Verb::Demote, &[1])), [(Verdict::Rejected, Reason::NoDisk)]);
}

#[test]
fn a_paused_session_leaves_memory_and_is_back_before_it_is_asked() {
    let site = Site::new();
    let node = Node::start(&config_of(&site, 8, true)).unwrap();
    let peer = site.peer();
    (0..4).for_each(|number| assert!(matches!(peer.store(number), StoreEnd::Stored { .. })));
    node.store().flush().unwrap();
    assert_eq!(verdicts(&ask(&peer, Verb::Demote, &[0, 1, 2, 3])), [YES; 4]);
    assert_eq!(places(&peer, &[0, 1, 2, 3]), [Place::Disk; 4]);
    assert_eq!(verdicts(&ask(&peer, Verb::Prefetch, &[0, 1, 2, 3, 7])), [YES, YES, YES, YES, NOT_STORED]);
    eventually("all are in memory", || places(&peer, &[0, 1, 2, 3]) == [Place::Memory; 4]);
    let lease = peer.lease();
    assert!((0..4).all(|number| peer.hit(&lease, number)));
}

#[test]
fn what_is_forgotten_during_a_load_is_read_to_the_end_and_never_found_again() {
    let site = Site::new();
    let node = Node::start(&config_of(&site, 8, true)).unwrap();
    let peer = site.peer();
    (0..3).for_each(|number| assert!(matches!(peer.store(number), StoreEnd::Stored { .. })));
    node.store().flush().unwrap();
    let lease = peer.lease();
    assert_eq!(verdicts(&ask(&peer, Verb::Forget, &[2, 5])), [YES, NOT_STORED]);
    assert!(peer.hit(&lease, 2), "who had leased it reads what was stored");
    assert_eq!((peer.lease().len(), places(&peer, &[2])), (2, vec![Place::Nowhere]));
    assert_eq!(node.store().to_overwrite(), 1);
    drop(lease);
    eventually("it is overwritten", || node.store().to_overwrite() == 0);
    let other = forebay_client::ClientOptions { tenant: TenantId(3), ..options(&site.socket()) };
    let other = connect(other).unwrap();
    assert_eq!(verdicts(&ask(&other, Verb::Forget, &[0])), [NOT_STORED], "another tenant's");
    assert_eq!(places(&peer, &[0, 1]), [Place::Memory; 2]);
}

#[test]
fn a_request_of_too_many_chunks_and_a_tenant_that_is_nobodys_are_refused() {
    let site = Site::new();
    let _node = Node::start(&config_of(&site, 8, false)).unwrap();
    let peer = site.peer();
    let refused = peer.client.control(Verb::List, &vec![id(0); LISTED_MAX + 1]).unwrap_err().to_string();
    assert!(refused.contains("16385") && refused.contains("16384"), "{refused}");
    let all = peer.client.control(Verb::Prefetch, &vec![id(0); LISTED_MAX]).unwrap().unwrap();
    assert!(all.len() == LISTED_MAX && all.iter().all(|report| report.reason == Reason::NotStored));
    let nobody = forebay_client::ClientOptions { tenant: TenantId::NOBODY, ..options(&site.socket()) };
    assert!(connect(nobody).is_err());
}
