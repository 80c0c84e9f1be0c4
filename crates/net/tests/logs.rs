//! What happens to a peer is told, once, by the line that `docs/reference/logs.md` has for it.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_net::{AgentConfig, LeasedSpan};
use std::time::Duration;

#[test]
fn a_peer_that_comes_and_goes_is_told_once_each_with_the_reason() {
    log::capture();
    let (one, two) = (end("one", 4096), end("two-comes", 4096));
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    one.agent.connect("two-comes").unwrap();
    log::line(&["INFO", "peer up", "peer=\"two-comes\""]);
    drop(two);
    let lost = log::line(&["WARN", "peer lost", "peer=\"two-comes\""]);
    assert!(lost.contains("reason=the peer closed the connection"), "{lost}");
}

#[test]
fn a_peer_that_is_not_reached_is_told_once_with_the_reason_and_what_to_do() {
    log::capture();
    let one = end("one", 4096);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    one.agent.add_address("two-nowhere", nobody).unwrap();
    for _ in 0..3 {
        one.agent.connect("two-nowhere").unwrap_err();
    }
    let line = log::line(&["WARN", "peer not reached", "peer=\"two-nowhere\""]);
    assert!(["reason=\"refused\"", "detail=", "advice="].iter().all(|part| line.contains(part)), "{line}");
}

#[test]
fn a_peer_that_is_refused_is_told_once_at_the_end_that_refuses() {
    log::capture();
    let one = end("one", 4096);
    let config = AgentConfig { token: b"secret".to_vec(), ..AgentConfig::named("two-strict") };
    let two = end_with(config, 4096);
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    one.agent.connect("two-strict").unwrap_err();
    let line = log::line(&["WARN", "server: peer refused", "reason=\"token\""]);
    assert!(line.contains("from=\"127.0.0.1\"") && !line.contains("secret"), "{line}");
}

#[test]
fn a_lease_that_expires_is_told() {
    log::capture();
    let one = end("one", 4096);
    let span = LeasedSpan { region: one.registration.offered(), offset: 0, len: 8 };
    one.agent.leases().grant([1; 16], vec![span], 1_000, |_| {}).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    log::line(&["WARN", "lease expired", "leases=1"]);
}
