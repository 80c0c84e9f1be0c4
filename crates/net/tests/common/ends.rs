//! Two ends of flows for tests: a server that offers a buffer, a mover that uses it, and blocks
//! that can be compared.

pub use super::{bytes, fill};
use forebay_net::tcp::*;
use forebay_transfer::{
    Class, End, HostBuffer, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place, RegionId, Span,
    SpanPair, SplitMix, Transfer,
};
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::Duration;

pub const HERE: Place = Place::Host(0);
pub const THERE: Place = Place::Peer(1);
pub const KEY: u64 = 7;

pub fn identity(node: u8) -> Identity {
    Identity::starting([node; 16]).unwrap()
}

pub fn loopback() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// The end that owns memory: a server in this process that offers one buffer.
pub struct Owner {
    pub server: TcpServer,
    pub memory: Arc<HostBuffer>,
    pub exports: Arc<Exports>,
    pub region: PeerRegion,
    pub leases: LeaseTable,
}

pub fn owner(bytes: usize, access: Access, options: ServerOptions) -> Owner {
    let leases = LeaseTable::default();
    let exports = Arc::new(Exports::new(leases.clone()));
    let memory = Arc::new(HostBuffer::new(bytes));
    let region = exports.offer(KEY, Arc::clone(&memory) as _, access).unwrap();
    let server = TcpServer::listen(loopback(), identity(1), Arc::clone(&exports), None, options).unwrap();
    Owner { server, memory, exports, region, leases }
}

pub fn server(bytes: usize, options: ServerOptions) -> (TcpServer, Arc<HostBuffer>, Arc<Exports>) {
    let Owner { server, memory, exports, .. } = owner(bytes, Access::OPEN, options);
    (server, memory, exports)
}

/// The end that asks: a mover with flows to a peer and a buffer as large as the peer's. The mover,
/// with it the flows, is dropped first.
pub struct Asking {
    thread: Option<MoverThread>,
    pub mover: MoverHandle,
    pub flows: Vec<FlowHandle>,
    pub memory: Arc<HostBuffer>,
    pub ours: RegionId,
    pub theirs: RegionId,
}

pub fn asking(address: SocketAddr, flows: usize, options: FlowOptions) -> Asking {
    let (regions, me) = (PeerRegions::default(), identity(2));
    let connect = |_| Flow::connect(address, me, regions.clone(), options.clone()).unwrap();
    let (flows, mut peers): (Vec<_>, Vec<_>) = (0..flows).map(connect).unzip();
    asking_over(flows, &regions, peers.remove(0).regions[0], 0)
}

/// Asks over flows that were connected with these regions.
pub fn asking_over(flows: Vec<Flow>, regions: &PeerRegions, offered: PeerRegion, lease: u64) -> Asking {
    let thread = MoverThread::spawn(Limits { attempts: 1, ..Limits::default() }).unwrap();
    let mover = thread.handle();
    let mut handles = Vec::new();
    for (number, flow) in flows.into_iter().enumerate() {
        handles.push(flow.handle());
        let spec = LinkSpec::new(format!("flow{number}"), 3, 64 << 20);
        let link = mover.add_link(spec, Box::new(flow)).unwrap();
        mover.add_path(PathSpec::direct(HERE, THERE, link)).unwrap().unwrap();
        mover.add_path(PathSpec::direct(THERE, HERE, link)).unwrap().unwrap();
    }
    let theirs = regions.register(&mover, THERE, offered, lease).unwrap();
    let memory = Arc::new(HostBuffer::new(offered.len as usize));
    let ours = mover.register(HERE, Arc::clone(&memory) as _).unwrap();
    Asking { thread: Some(thread), mover, flows: handles, memory, ours, theirs }
}

#[derive(Clone, Copy, Debug)]
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

    pub fn run(&self, direction: Direction, blocks: &[(u64, u64)], block: u64) -> End {
        self.mover.run(self.transfer(direction, blocks, block)).unwrap()
    }

    /// Waits until the first operation is done.
    pub fn wait_for_bytes(&self) {
        while self.flows[0].stats().done == 0 {
            assert_eq!(self.flows[0].stats().broken, None);
            std::thread::sleep(Duration::from_millis(1));
        }
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

/// Writes and reads scattered blocks over so many flows, and compares every byte.
pub fn both_ways(count: u64, block: u64, flows: usize, serving: ServerOptions, options: FlowOptions) {
    let owner = owner((count * block) as usize, Access::OPEN, serving);
    let asking = asking(owner.server.address(), flows, options);
    compare_both_ways(&owner, &asking, count, block);
    let used = asking.flows.iter().filter(|flow| flow.stats().done > 0).count();
    assert_eq!(used, flows, "every flow is a route and pulls");
}

/// Writes and reads scattered blocks, and compares every byte.
pub fn compare_both_ways(owner: &Owner, asking: &Asking, count: u64, block: u64) {
    let (len, blocks) = ((count * block) as usize, scattered(count, 3));
    let whole = |offset: u64| (offset * block) as usize..((offset + 1) * block) as usize;
    for direction in [Direction::Write, Direction::Read] {
        let ours_before = fill(&asking.memory, len, 11);
        let theirs_before = fill(&owner.memory, len, 12);
        assert_eq!(asking.run(direction, &blocks, block), End::Done { bytes: len as u64 });
        let (ours_after, theirs_after) = (bytes(&asking.memory, len), bytes(&owner.memory, len));
        for (ours, theirs) in &blocks {
            let (from, to) = match direction {
                Direction::Write => (&ours_before[whole(*ours)], &theirs_after[whole(*theirs)]),
                Direction::Read => (&theirs_before[whole(*theirs)], &ours_after[whole(*ours)]),
            };
            assert!(from == to, "{direction:?}: block {ours} of ours and {theirs} of theirs");
        }
    }
}

/// Cancels transfers of scattered blocks in both directions at any time: what is said to have ended
/// touches no byte any more, and the flows are still good. At least so many are cancelled.
pub fn cancel_again_and_again(
    owner: &Owner,
    asking: &Asking,
    count: u64,
    block: u64,
    rounds: u64,
    least: u32,
) {
    let (blocks, mut cancelled) = (scattered(count, 5), 0);
    for round in 0..rounds {
        let direction = if round % 2 == 0 { Direction::Write } else { Direction::Read };
        let (sender, receiver) = mpsc::channel();
        let transfer = asking.transfer(direction, &blocks, block);
        let submitted = asking.mover.submit(transfer, move |end| drop(sender.send(end))).unwrap();
        std::thread::sleep(Duration::from_micros(round * 250));
        asking.mover.cancel(submitted);
        cancelled += u32::from(matches!(receiver.recv().unwrap(), End::Cancelled { .. }));
        // The source changes and the target is used for something else.
        let ours_after = fill(&asking.memory, 1 << 20, round);
        let theirs_after = fill(&owner.memory, 1 << 20, round + 100);
        std::thread::sleep(Duration::from_millis(5));
        assert!(bytes(&asking.memory, 1 << 20) == ours_after);
        assert!(bytes(&owner.memory, 1 << 20) == theirs_after);
    }
    assert!(cancelled >= least, "{cancelled} transfers were cancelled before their end");
    let end = asking.run(Direction::Read, &blocks, block);
    assert_eq!(end, End::Done { bytes: count * block }, "the flows are still good");
}
