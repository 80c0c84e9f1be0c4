//! Flows and servers with nothing to do cost next to nothing, and ended ones leave nothing behind:
//! over TCP, and over UCX where that is here. A process of its own, since CPU time and descriptors
//! are counted for the whole process.
#![allow(clippy::unwrap_used)]

mod common;

use common::ends::{identity, owner};
use common::open_ucx;
use forebay_net::tcp::*;
use forebay_net::transport::{accept, connect};
use forebay_net::ucx::Fabric;
use std::time::Duration;
use testkit::eventually;
use testkit::idle::{assert_idle, cpu_of_two_seconds, descriptors, settled_descriptors};

#[test]
fn idle_flows_cost_nothing_and_ended_ones_leave_nothing() {
    let options = ServerOptions { greeting_limit_us: 20_000_000, ..ServerOptions::default() };
    let server = owner(4096, Access::OPEN, options).server;
    let options = FlowOptions { connect_limit_us: 20_000_000, ..FlowOptions::default() };
    let over_tcp = || Flow::connect(server.address(), identity(2), PeerRegions::default(), options.clone());
    check("tcp", &server, (100, 8), &|| over_tcp().unwrap().0);
    for rail in [Fabric::Memory, Fabric::Tcp].into_iter().filter_map(open_ucx) {
        check(&format!("UCX {:?}", rail.fabric()), &server, (15, 4), &|| {
            let exchange = |offer: Vec<u8>| accept(&rail, &server.acceptor(), &offer);
            connect(&rail, identity(2), PeerRegions::default(), &options, exchange).unwrap().0
        });
        assert_eq!(rail.quarantined(), 0);
    }
}

/// So many pairs of flows come and go, then so many flows stay and do nothing.
fn check(what: &str, server: &TcpServer, (ended, idle): (usize, usize), connect: &dyn Fn() -> Flow) {
    drop(connect());
    eventually("the first one is gone", || server.stats().flows == 0);
    let before = settled_descriptors();
    for _ in 0..ended {
        drop((connect(), connect()));
    }
    eventually("the others are gone", || server.stats().flows == 0);
    let flows: Vec<_> = (0..idle).map(|_| connect()).collect();
    // 0.5 % of a core, for all of them and their other ends together.
    assert_idle(&format!("{what}: CPU time of two seconds"), Duration::from_millis(10), cpu_of_two_seconds);
    drop(flows);
    eventually("nobody is served", || server.stats().flows == 0);
    eventually("as many descriptors as before", || descriptors() <= before);
}
