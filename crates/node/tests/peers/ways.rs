//! What carries bytes between nodes: UCX's rails, and TLS. Whatever it is, hits are the same, and
//! who is not trusted has none.

use crate::neighbours::{Pair, store_all, write};
use crate::rig::*;
use forebay_net::{RailOptions, TCP};
use forebay_node::{Node, NodeConfig, RailConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use testkit::eventually;

/// Stores at the left node and loads at the right one.
fn all_are_hits(pair: &Pair, until: impl Fn(&Node) -> bool) -> (Node, Node) {
    let (left, right) = (pair.left.node(), pair.right.node());
    let reader = pair.right.peer();
    store_all(&pair.left.peer());
    eventually("the peer is found", || reader.client.lookup(&ids()) == CHUNKS && until(&right));
    let lease = reader.lease();
    assert!((0..CHUNKS).all(|number| reader.hit(&lease, number)));
    (left, right)
}

#[test]
fn bytes_take_a_rail_that_both_nodes_have() {
    let options = RailOptions::named("memory", Vec::new()).unwrap();
    if let Err(error) = options.transport.open(&[]) {
        testkit::skipped(format_args!("shared memory cannot be opened ({error})"));
        return;
    }
    let (pair, path) = (Pair::new(), "ucx_memory");
    for site in [&pair.left, &pair.right] {
        let mut config = site.config();
        let rail = RailConfig { fabric: "memory".into(), devices: Vec::new() };
        config.peers.as_mut().unwrap().rails = vec![rail];
        write(site, &config);
    }
    let has_rail = |node: &Node| {
        let peers = node.peering_stat().unwrap().peers;
        peers.iter().any(|peer| peer.flows.iter().any(|flow| flow.path == path))
    };
    let (_left, right) = all_are_hits(&pair, has_rail);
    let counts = &right.peering_stat().unwrap().peers[0].counts;
    assert_eq!(counts.paths[path].moved_bytes, CHUNKS as u64 * CHUNK_BYTES);
    assert!(counts.faults.is_empty(), "{:?}", counts.faults);
}

#[test]
fn a_rail_that_is_not_there_leaves_tcp() {
    let pair = Pair::new();
    let mut config = pair.right.config();
    let rail = RailConfig { fabric: "tcp".into(), devices: vec!["nosuch0".into()] };
    config.peers.as_mut().unwrap().rails = vec![rail];
    write(&pair.right, &config);
    let (_left, right) = all_are_hits(&pair, |_| true);
    let counts = &right.peering_stat().unwrap().peers[0].counts;
    assert_eq!(counts.paths[TCP].moved_bytes, CHUNKS as u64 * CHUNK_BYTES);
}

/// Signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Gives a node a certificate of this authority, which it trusts.
    fn admit(&self, site: &Site) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().signed_by(&key, &self.0).unwrap();
        let file = |name: &str, pem: String| {
            let path = site.folder.path().join(name);
            std::fs::write(&path, pem).unwrap();
            Some(path)
        };
        let mut config = site.config();
        let peers = config.peers.as_mut().unwrap();
        peers.certificate = file("node.pem", certificate.pem());
        peers.key = file("node.key", key.serialize_pem());
        peers.authorities = file("authority.pem", self.0.pem());
        write(site, &config);
    }
}

#[test]
fn nodes_with_certificates_of_one_authority_have_hits_from_each_other() {
    let (pair, authority) = (Pair::new(), Authority::new());
    authority.admit(&pair.left);
    authority.admit(&pair.right);
    let (_left, right) = all_are_hits(&pair, |_| true);
    let stat = right.peering_stat().unwrap();
    assert_eq!((stat.pulled, stat.not_pulled, stat.corrupt), (CHUNKS as u64, 0, 0));
    assert!(stat.peers[0].counts.faults.is_empty(), "{:?}", stat.peers[0].counts.faults);
}

#[test]
fn a_node_of_another_authority_or_in_plain_text_is_no_peer() {
    for stranger in [Some(Authority::new()), None] {
        let pair = Pair::new();
        Authority::new().admit(&pair.left);
        if let Some(other) = &stranger {
            other.admit(&pair.right);
        }
        let (left, right) = (pair.left.node(), pair.right.node());
        let (one, other) = (pair.left.peer(), pair.right.peer());
        store_all(&one);
        let tried = |node: &Node| {
            let peers = node.peering_stat().unwrap().peers;
            peers.iter().any(|peer| peer.state == "resting" || !peer.counts.faults.is_empty())
        };
        eventually("it was tried", || {
            assert_eq!(other.client.lookup(&ids()), 0);
            tried(&right)
        });
        assert_eq!(left.peering_stat().unwrap().lent, 0);
    }
}

#[test]
fn a_certificate_that_is_none_is_refused_with_its_reason_before_anything_starts() {
    let pair = Pair::new();
    Authority::new().admit(&pair.left);
    std::fs::write(pair.left.folder.path().join("node.pem"), "no certificate").unwrap();
    let error = NodeConfig::read(&pair.left.folder.path().join("node.toml")).unwrap_err().to_string();
    assert!(error.starts_with("peers: "), "{error}");
}
