//! Chunks that are forgotten at one node leave its peers too, and whoever did not answer is named.

use crate::http;
use crate::neighbours::*;
use crate::rig::*;
use forebay_client::ClientOptions;
use forebay_client::protocol::control::{Reason, Verb, Verdict};
use forebay_node::{MetricsConfig, Node};
use forebay_store::TenantId;
use forebay_transfer::End;
use rustix::process::Signal;
use std::time::{Duration, Instant};
use testkit::{ended, eventually};

const YES: (Verdict, Reason) = (Verdict::Accepted, Reason::None);
const NOT_STORED: (Verdict, Reason) = (Verdict::Rejected, Reason::NotStored);
const UNREACHED: (Verdict, Reason) = (Verdict::Clipped, Reason::PeersUnreached);

fn forget(peer: &Peer) -> Vec<(Verdict, Reason)> {
    let reports = peer.client.control(Verb::Forget, &ids()).unwrap().unwrap();
    reports.iter().map(|report| (report.verdict, report.reason)).collect()
}

fn up(node: &Node) -> bool {
    node.peering_stat().unwrap().peers.iter().all(|peer| peer.state == "up")
}

#[test]
fn a_forgotten_chunk_is_gone_at_every_peer() {
    let [one, two, asked] = neighbours(["a", "b", "c"]);
    let nodes = [&one, &two].map(Site::node);
    let (node, client) = (asked.node(), asked.peer());
    [&one, &two].iter().for_each(|site| store_all(&site.peer()));
    eventually("both peers are found", || client.client.lookup(&ids()) == CHUNKS && up(&node));
    assert_eq!(forget(&client), [YES; CHUNKS], "peers had them, and this node had none");
    assert!(nodes.iter().all(|node| ids().iter().all(|id| node.store().lookup(TenantId(0), &[*id]) == 0)));
    eventually("they are overwritten", || nodes.iter().all(|node| node.store().to_overwrite() == 0));
    assert_eq!(client.client.lookup(&ids()), 0);
    assert_eq!(forget(&client), [NOT_STORED; CHUNKS]);
}

#[test]
fn a_peer_that_does_not_answer_is_named() {
    let pair = Pair::new();
    let mut config = pair.right.config();
    config.metrics = Some(MetricsConfig::new(([127, 0, 0, 1], 0).into()));
    let (left, right) = (pair.left.child("node"), Node::start(&config).unwrap());
    let client = pair.right.peer();
    store_all(&pair.left.peer());
    store_all(&client);
    eventually("the peer is there", || {
        client.client.lookup(&[id(CHUNKS)]);
        up(&right)
    });
    let named = |questions: u32| {
        let page = http::get(right.metrics_address().unwrap(), "GET", "/metrics").1;
        page.contains(&format!("forebay_peering_unforgotten_total{{peer=\"left\"}} {questions}\n"))
    };
    assert!(!named(1));
    left.signal(Signal::STOP);
    let since = Instant::now();
    assert_eq!(forget(&client), [UNREACHED; CHUNKS]);
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    assert!(named(1) && right.store().lookup(TenantId(0), &ids()) == 0, "here it is done at once");
    left.signal(Signal::CONT);
    eventually("it is reached again", || matches!(forget(&client)[0], YES | NOT_STORED));
    assert_eq!(pair.left.peer().client.lookup(&ids()), 0);
    left.kill();
    assert_eq!(forget(&client), [UNREACHED; CHUNKS], "one that is down may come again with its disk");
}

#[test]
fn a_chunk_on_its_way_is_not_stored_once_it_is_forgotten() {
    let pair = Pair::new();
    let (left, right) = (pair.left.child("node"), pair.right.node());
    let client = pair.right.peer();
    store_all(&pair.left.peer());
    eventually("the peer is found", || client.client.lookup(&ids()) == CHUNKS);
    let lease = client.lease();
    left.signal(Signal::STOP);
    let load = client.begin_load(&lease, 0).unwrap();
    assert_eq!(forget(&client), [UNREACHED; CHUNKS]);
    // It lends the chunk first, for so it was asked, and forgets it then.
    left.signal(Signal::CONT);
    assert!(!matches!(ended(&load), End::Done { .. }));
    eventually("the peer has forgotten it", || pair.left.peer().client.lookup(&ids()) == 0);
    assert_eq!(right.store().lookup(TenantId(0), &ids()), 0);
    eventually("no slot is left over", || right.store().stat().rows == 0);
}

#[test]
fn a_tenants_forget_touches_no_other_tenants_chunks_at_a_peer() {
    let pair = Pair::new();
    let (left, _right) = (pair.left.node(), pair.right.node());
    let (mine, options) = (pair.right.peer(), options(&pair.right.socket()));
    store_all(&pair.left.peer());
    eventually("the peer is found", || mine.client.lookup(&ids()) == CHUNKS);
    let other = connect(ClientOptions { tenant: TenantId(3), ..options }).unwrap();
    assert_eq!(forget(&other), [NOT_STORED; CHUNKS]);
    assert_eq!(left.store().lookup(TenantId(0), &ids()), CHUNKS);
    assert_eq!(forget(&mine), [YES; CHUNKS]);
    assert_eq!(left.store().lookup(TenantId(0), &ids()), 0);
}
