//! Flows and servers with nothing to do cost next to nothing, and leave nothing behind. A process of its own, since CPU
//! time and descriptors are counted for the whole process.
#![allow(clippy::unwrap_used)]

use forebay_links::tcp::*;
use forebay_mover::HostBuffer;
use std::sync::Arc;
use std::time::Duration;

fn cpu_time() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn idle_flows_cost_nothing_and_ended_ones_leave_nothing() {
    let exports = Arc::new(Exports::new(Arc::new(NoLeases)));
    exports.offer(7, Arc::new(HostBuffer::new(4096)), Access::OPEN).unwrap();
    let me = Identity::starting([1; 16]).unwrap();
    let options = ServerOptions::default();
    let server = TcpServer::listen(([127, 0, 0, 1], 0).into(), me, exports, options).unwrap();
    let connect =
        || TcpFlow::connect(server.address(), me, PeerRegions::default(), FlowOptions::default()).unwrap().0;
    drop(connect());
    std::thread::sleep(Duration::from_millis(200));
    let descriptors_before = descriptors();
    for _ in 0..100 {
        drop((connect(), connect()));
    }
    let flows: Vec<_> = (0..8).map(|_| connect()).collect();
    let before = cpu_time();
    std::thread::sleep(Duration::from_secs(2));
    let used = cpu_time() - before;
    // 0.5 % of a core, for all eight and their other ends together.
    assert!(used < Duration::from_millis(10), "{used:?}");
    drop(flows);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(descriptors(), descriptors_before);
    assert_eq!(server.stats().flows, 0);
}
