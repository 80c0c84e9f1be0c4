//! Flows and servers with nothing to do cost next to nothing, and leave nothing behind. A process
//! of its own, since CPU time and descriptors are counted for the whole process.
#![allow(clippy::unwrap_used)]

use forebay_net::tcp::*;
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
    let options = ServerOptions::default();
    let server = TcpServer::listen(([127, 0, 0, 1], 0).into(), me, exports, options).unwrap();
    let connect =
        || Flow::connect(server.address(), me, PeerRegions::default(), FlowOptions::default()).unwrap().0;
    drop(connect());
    eventually("the first one is gone", || server.stats().flows == 0);
    let before = settled_descriptors();
    for _ in 0..100 {
        drop((connect(), connect()));
    }
    let flows: Vec<_> = (0..8).map(|_| connect()).collect();
    // 0.5 % of a core, for all eight and their other ends together.
    assert_idle("CPU time of two seconds", Duration::from_millis(10), cpu_of_two_seconds);
    drop(flows);
    eventually("nobody is served", || server.stats().flows == 0);
    eventually("as many descriptors as before", || descriptors() <= before);
}
