//! Flows over UCX with nothing to do cost next to nothing, and ended ones leave nothing behind. A
//! process of its own, since CPU time and descriptors are counted for the whole process.
#![allow(clippy::unwrap_used)]

use forebay_net::tcp::*;
use forebay_net::transport::{accept, connect};
use forebay_net::ucx::*;
use forebay_transfer::HostBuffer;
use std::sync::Arc;
use std::time::Duration;
use testkit::eventually;
use testkit::idle::{assert_idle, cpu_of_two_seconds, descriptors, settled_descriptors};

#[test]
fn idle_flows_cost_nothing_and_ended_ones_leave_nothing() {
    let exports = Arc::new(Exports::new(Arc::new(NoLeases)));
    exports.offer(7, Arc::new(HostBuffer::new(4096)), Access::OPEN).unwrap();
    let me = Identity::starting([1; 16]).unwrap();
    let options = ServerOptions { greeting_limit_us: 20_000_000, ..ServerOptions::default() };
    let server = TcpServer::listen(([127, 0, 0, 1], 0).into(), me, exports, options).unwrap();
    for fabric in [Fabric::Memory, Fabric::Tcp] {
        let devices = if fabric == Fabric::Tcp { vec!["lo".into()] } else { Vec::new() };
        let rail = match UcxRail::open(fabric, &devices) {
            Err(UcxError::NoLibrary { why }) => {
                testkit::skipped(format_args!("libucp.so.0 is not installed ({why})"));
                return;
            }
            rail => rail.unwrap(),
        };
        let connected = || {
            let exchange = |offer: Vec<u8>| accept(&rail, &server.acceptor(), &offer);
            let options = FlowOptions { connect_limit_us: 20_000_000, ..FlowOptions::default() };
            connect(&rail, me, PeerRegions::default(), &options, exchange).unwrap().0
        };
        drop(connected());
        eventually("the first one is gone", || server.stats().flows == 0);
        let before = settled_descriptors();
        for _ in 0..30 {
            drop(connected());
        }
        eventually("as many descriptors as before", || descriptors() <= before);
        let flows: Vec<_> = (0..4).map(|_| connected()).collect();
        // 0.5 % of a core, for all four and their other ends together.
        let what = format!("{fabric:?}: CPU time of two seconds");
        assert_idle(&what, Duration::from_millis(10), cpu_of_two_seconds);
        drop(flows);
        eventually("as many descriptors as before", || descriptors() <= before);
        assert_eq!(rail.quarantined(), 0);
    }
}
