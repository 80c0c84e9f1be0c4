//! Two ends of flows for tests: a server that offers a buffer, a mover that uses it, and blocks
//! that can be compared.
#![allow(dead_code, reason = "each test binary uses a part")]

use forebay_net::tcp::*;
use forebay_transfer::SplitMix;
use forebay_transfer::{
    Class, End, HostBuffer, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place, RegionId, Span,
    SpanPair, Transfer,
};
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};

pub const HERE: Place = Place::Host(0);
pub const THERE: Place = Place::Peer(1);
pub const KEY: u64 = 7;

pub fn identity(node: u8) -> Identity {
    Identity::starting([node; 16]).unwrap()
}

pub fn loopback() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// A server in this process that offers one buffer.
pub fn server(bytes: usize, options: ServerOptions) -> (TcpServer, Arc<HostBuffer>, Arc<Exports>) {
    let exports = Arc::new(Exports::new(Arc::new(NoLeases)));
    let memory = Arc::new(HostBuffer::new(bytes));
    exports.offer(KEY, Arc::clone(&memory) as _, Access::OPEN).unwrap();
    let server = TcpServer::listen(loopback(), identity(1), Arc::clone(&exports), options).unwrap();
    (server, memory, exports)
}

/// A mover with flows to a peer and a buffer as large as the peer's. The mover, with it the flows,
/// is dropped first.
pub struct Asking {
    thread: Option<MoverThread>,
    pub mover: MoverHandle,
    pub flows: Vec<FlowHandle>,
    pub memory: Arc<HostBuffer>,
    pub ours: RegionId,
    pub theirs: RegionId,
}

pub fn asking(address: SocketAddr, flows: usize, options: FlowOptions) -> Asking {
    let thread = MoverThread::spawn(Limits { attempts: 1, ..Limits::default() }).unwrap();
    let mover = thread.handle();
    let regions = PeerRegions::default();
    let mut handles = Vec::new();
    let mut offered = None;
    let me = identity(2);
    for number in 0..flows {
        let (flow, peer) = Flow::connect(address, me, regions.clone(), options.clone()).unwrap();
        handles.push(flow.handle());
        let link =
            mover.add_link(LinkSpec::new(format!("flow{number}"), 3, 64 << 20), Box::new(flow)).unwrap();
        mover.add_path(PathSpec::direct(HERE, THERE, link)).unwrap().unwrap();
        mover.add_path(PathSpec::direct(THERE, HERE, link)).unwrap().unwrap();
        offered = Some(peer.regions[0]);
    }
    let offered = offered.unwrap();
    let theirs = regions.register(&mover, THERE, offered, 0).unwrap();
    let memory = Arc::new(HostBuffer::new(offered.len as usize));
    let ours = mover.register(HERE, Arc::clone(&memory) as _).unwrap();
    Asking { thread: Some(thread), mover, flows: handles, memory, ours, theirs }
}

#[derive(Clone, Copy)]
pub enum Direction {
    Write,
    Read,
}

impl Asking {
    /// Blocks `(ours, theirs)` of the same length.
    pub fn transfer(&self, direction: Direction, blocks: &[(u64, u64)], block: u64) -> Transfer {
        let pair = |(ours, theirs): &(u64, u64)| {
            let ours = Span::new(self.ours, ours * block, block);
            let theirs = Span::new(self.theirs, theirs * block, block);
            match direction {
                Direction::Write => SpanPair::new(ours, theirs),
                Direction::Read => SpanPair::new(theirs, ours),
            }
        };
        Transfer::new(blocks.iter().map(pair).collect(), Class::Demand)
    }

    /// Submits a transfer whose end is sent.
    pub fn submit(&self, transfer: Transfer) -> mpsc::Receiver<End> {
        let (sender, receiver) = mpsc::channel();
        self.mover.submit(transfer, move |end| drop(sender.send(end))).unwrap();
        receiver
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.thread.take();
    }
}

/// Every slot of the one side with a slot of the other, both in an order of their own.
pub fn scattered(count: u64, seed: u64) -> Vec<(u64, u64)> {
    let mut dice = SplitMix(seed);
    let mut shuffled = || {
        let mut slots: Vec<u64> = (0..count).collect();
        for at in (1..slots.len()).rev() {
            slots.swap(at, (dice.draw() % (at as u64 + 1)) as usize);
        }
        slots
    };
    shuffled().into_iter().zip(shuffled()).collect()
}

pub fn fill(buffer: &HostBuffer, bytes: usize, seed: u64) -> Vec<u8> {
    let mut dice = SplitMix(seed);
    let noise: Vec<u8> = (0..bytes / 8 + 1).flat_map(|_| dice.draw().to_le_bytes()).take(bytes).collect();
    assert!(buffer.write(0, &noise));
    noise
}

pub fn bytes(buffer: &HostBuffer, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    assert!(buffer.read(0, &mut read));
    read
}

/// Writes and reads scattered blocks over so many flows, and compares every byte.
pub fn both_ways(count: u64, block: u64, flows: usize, serving: ServerOptions, options: FlowOptions) {
    let len = (count * block) as usize;
    let (server, theirs, _) = server(len, serving);
    let asking = asking(server.address(), flows, options);
    let blocks = scattered(count, 3);
    let whole = |offset: u64| (offset * block) as usize..((offset + 1) * block) as usize;
    for direction in [Direction::Write, Direction::Read] {
        let ours_before = fill(&asking.memory, len, 11);
        let theirs_before = fill(&theirs, len, 12);
        let end = asking.mover.run(asking.transfer(direction, &blocks, block)).unwrap();
        assert_eq!(end, End::Done { bytes: len as u64 });
        let (ours_after, theirs_after) = (bytes(&asking.memory, len), bytes(&theirs, len));
        for (ours, theirs) in &blocks {
            let (from, to) = match direction {
                Direction::Write => (&ours_before[whole(*ours)], &theirs_after[whole(*theirs)]),
                Direction::Read => (&theirs_before[whole(*theirs)], &ours_after[whole(*ours)]),
            };
            assert!(from == to, "block {ours} of ours and {theirs} of theirs");
        }
    }
    let used = asking.flows.iter().filter(|flow| flow.stats().done > 0).count();
    assert_eq!(used, flows, "every flow is a route and pulls");
}
