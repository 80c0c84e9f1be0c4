//! The UCX link with two real ends, over UCX's `tcp` and over shared memory: what the TCP link
//! promises holds here as well. Every test says so and passes where the library is missing.
#![allow(clippy::unwrap_used)]

use forebay_net::tcp::*;
use forebay_net::transport::{Rail as _, TransportError, accept, connect};
use forebay_net::ucx::*;
use forebay_transfer::SplitMix;
use forebay_transfer::{
    Class, End, HostBuffer, Limits, Link, LinkSpec, MoverHandle, MoverThread, PathSpec, Place, RegionId,
    Span, SpanPair, Transfer,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const HERE: Place = Place::Host(0);
const THERE: Place = Place::Peer(1);
const KEY: u64 = 7;
const PEER: &str = "FOREBAY_TEST_UCX_PEER";

/// Patience with a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// Well below the 30 s that the mover gives an operation: what is over by then was ended by the
/// flow.
const BELOW_OPERATIONS: Duration = Duration::from_secs(15);
const FABRICS: [Fabric; 2] = [Fabric::Memory, Fabric::Tcp];

fn identity(node: u8) -> Identity {
    Identity::starting([node; 16]).unwrap()
}

/// Opens a rail on this machine only, or says why the test is skipped.
fn rail(fabric: Fabric) -> Option<UcxRail> {
    let devices = if fabric == Fabric::Tcp { vec!["lo".to_string()] } else { Vec::new() };
    match UcxRail::open(fabric, &devices) {
        Ok(rail) => Some(rail),
        Err(error @ UcxError::NoLibrary { .. }) => {
            testkit::skipped(format_args!("libucp.so.0 is not installed ({error})"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The rails of this machine.
fn rails() -> Vec<UcxRail> {
    FABRICS.into_iter().filter_map(rail).collect()
}

/// The owning end.
struct Owner {
    server: TcpServer,
    memory: Arc<HostBuffer>,
    exports: Arc<Exports>,
}

fn owner(bytes: usize, leases: Arc<dyn Leases>, access: Access) -> Owner {
    let exports = Arc::new(Exports::new(leases));
    let memory = Arc::new(HostBuffer::new(bytes));
    exports.offer(KEY, Arc::clone(&memory) as _, access).unwrap();
    let options = ServerOptions { greeting_limit_us: 10_000_000, ..ServerOptions::default() };
    let server =
        TcpServer::listen(([127, 0, 0, 1], 0).into(), identity(1), Arc::clone(&exports), options).unwrap();
    Owner { server, memory, exports }
}

fn open_owner(bytes: usize) -> Owner {
    owner(bytes, Arc::new(NoLeases), Access::OPEN)
}

/// The asking end: a mover with one flow, and a buffer as large as the peer's. The mover, with it
/// the flow, ends first.
struct Asking {
    thread: Option<MoverThread>,
    mover: MoverHandle,
    flow: FlowHandle,
    memory: Arc<HostBuffer>,
    ours: RegionId,
    theirs: RegionId,
}

fn options() -> FlowOptions {
    FlowOptions { connect_limit_us: 20_000_000, ..FlowOptions::default() }
}

fn over_ucx(
    rail: &UcxRail,
    options: FlowOptions,
    lease: u64,
    exchange: impl FnMut(Vec<u8>) -> Result<Vec<u8>, TransportError>,
) -> Asking {
    let regions = PeerRegions::default();
    let (flow, peer, _) = connect(rail, identity(2), regions.clone(), &options, exchange).unwrap();
    let handle = flow.handle();
    asking(Box::new(flow), handle, &regions, peer.regions[0], lease)
}

/// An asking end in the process of the owner.
fn beside(rail: &UcxRail, owner: &Owner) -> Asking {
    leased(rail, owner, 0)
}

fn leased(rail: &UcxRail, owner: &Owner, lease: u64) -> Asking {
    let exchange = |offer: Vec<u8>| accept(rail, &owner.server.acceptor(), &offer);
    over_ucx(rail, options(), lease, exchange)
}

fn asking(
    link: Box<dyn Link>,
    flow: FlowHandle,
    regions: &PeerRegions,
    offered: PeerRegion,
    lease: u64,
) -> Asking {
    let thread = MoverThread::spawn(Limits { attempts: 1, ..Limits::default() }).unwrap();
    let mover = thread.handle();
    let link = mover.add_link(LinkSpec::new("flow", 3, 64 << 20), link).unwrap();
    mover.add_path(PathSpec::direct(HERE, THERE, link)).unwrap().unwrap();
    mover.add_path(PathSpec::direct(THERE, HERE, link)).unwrap().unwrap();
    let theirs = regions.register(&mover, THERE, offered, lease).unwrap();
    let memory = Arc::new(HostBuffer::new(offered.len as usize));
    let ours = mover.register(HERE, Arc::clone(&memory) as _).unwrap();
    Asking { thread: Some(thread), mover, flow, memory, ours, theirs }
}

#[derive(Clone, Copy, Debug)]
enum Direction {
    Write,
    Read,
}
use Direction::{Read as READ, Write as WRITE};

impl Asking {
    /// Blocks `(ours, theirs)` of the same length.
    fn transfer(&self, direction: Direction, blocks: &[(u64, u64)], block: u64) -> Transfer {
        let pair = |(ours, theirs): &(u64, u64)| {
            let ours = Span::new(self.ours, ours * block, block);
            let theirs = Span::new(self.theirs, theirs * block, block);
            match direction {
                WRITE => SpanPair::new(ours, theirs),
                READ => SpanPair::new(theirs, ours),
            }
        };
        Transfer::new(blocks.iter().map(pair).collect(), Class::Demand)
    }

    fn run(&self, direction: Direction, blocks: &[(u64, u64)], block: u64) -> End {
        self.mover.run(self.transfer(direction, blocks, block)).unwrap()
    }

    /// Why one small operation fails.
    fn fault(&self, direction: Direction) -> String {
        match self.run(direction, &[(0, 0)], 4096) {
            End::Failed(failure) => failure.reason.to_string(),
            end => panic!("{end:?}"),
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.thread.take();
    }
}

/// Every slot of the one side with a slot of the other, both in an order of their own.
fn scattered(count: u64, seed: u64) -> Vec<(u64, u64)> {
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

fn fill(buffer: &HostBuffer, bytes: usize, seed: u64) -> Vec<u8> {
    let mut dice = SplitMix(seed);
    let noise: Vec<u8> = (0..bytes / 8 + 1).flat_map(|_| dice.draw().to_le_bytes()).take(bytes).collect();
    assert!(buffer.write(0, &noise));
    noise
}

fn bytes(buffer: &HostBuffer, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    assert!(buffer.read(0, &mut read));
    read
}

#[test]
fn scattered_blocks_arrive_both_ways() {
    for (rail, (count, block)) in
        rails().iter().flat_map(|rail| [(2_000, 26_000), (40, 1 << 20)].map(|of| (rail, of)))
    {
        let len = (count * block) as usize;
        let owner = open_owner(len);
        let asking = beside(rail, &owner);
        let blocks = scattered(count, 3);
        let whole = |offset: u64| (offset * block) as usize..((offset + 1) * block) as usize;
        for direction in [WRITE, READ] {
            let ours_before = fill(&asking.memory, len, 11);
            let theirs_before = fill(&owner.memory, len, 12);
            assert_eq!(asking.run(direction, &blocks, block), End::Done { bytes: len as u64 });
            let (ours_after, theirs_after) = (bytes(&asking.memory, len), bytes(&owner.memory, len));
            for (ours, theirs) in &blocks {
                let (from, to) = match direction {
                    WRITE => (&ours_before[whole(*ours)], &theirs_after[whole(*theirs)]),
                    READ => (&theirs_before[whole(*theirs)], &ours_after[whole(*ours)]),
                };
                assert!(from == to, "{:?} {direction:?}: {ours} of ours, {theirs} of theirs", rail.fabric());
            }
        }
    }
}

#[test]
fn thousands_of_small_operations_one_after_another() {
    for rail in rails() {
        let owner = open_owner(1 << 20);
        let asking = beside(&rail, &owner);
        for round in 0..2_000u64 {
            let sent = (round * 0x9E37_79B9).to_le_bytes();
            assert!(asking.memory.write(0, &sent));
            let slot = round % 1_000 + 1;
            assert_eq!(asking.run(WRITE, &[(0, slot)], 8), End::Done { bytes: 8 });
            assert_eq!(asking.run(READ, &[(slot, slot)], 8), End::Done { bytes: 8 });
            let mut read = [0; 8];
            assert!(asking.memory.read(slot as usize * 8, &mut read));
            assert_eq!(read, sent);
        }
    }
}

/// A lease that lives until it is ended.
struct Lease(AtomicBool);

impl Leases for Lease {
    fn is_alive(&self, lease: u64, _region: PeerRegion) -> bool {
        lease == 9 && self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn what_is_not_offered_now_is_refused_and_the_flow_stays() {
    for rail in rails() {
        let lease = Arc::new(Lease(AtomicBool::new(true)));
        let owner = owner(1 << 20, Arc::clone(&lease) as _, Access::LEASED_READ);
        let asking = leased(&rail, &owner, 9);
        assert_eq!(asking.run(READ, &[(0, 0)], 4096), End::Done { bytes: 4096 });
        assert!(asking.fault(WRITE).contains("NotAllowed"));
        lease.0.store(false, Ordering::Relaxed);
        assert!(asking.fault(READ).contains("NoLease"));
        lease.0.store(true, Ordering::Relaxed);
        assert_eq!(asking.run(READ, &[(0, 0)], 4096), End::Done { bytes: 4096 });
        assert!(owner.exports.withdraw(KEY));
        assert!(asking.fault(READ).contains("UnknownRegion"));
        owner.exports.offer(KEY, Arc::clone(&owner.memory) as _, Access::OPEN).unwrap();
        assert!(asking.fault(READ).contains("StaleGeneration"));
        assert_eq!(asking.flow.stats().broken, None);
    }
}

#[test]
fn spans_beyond_the_region_are_refused() {
    for rail in rails() {
        let owner = open_owner(1 << 20);
        let regions = PeerRegions::default();
        let exchange = |offer: Vec<u8>| accept(&rail, &owner.server.acceptor(), &offer);
        let connected = connect(&rail, identity(2), regions.clone(), &options(), exchange);
        let (flow, peer, _) = connected.unwrap();
        let larger = PeerRegion { len: 2 << 20, ..peer.regions[0] };
        let handle = flow.handle();
        let asking = asking(Box::new(flow), handle, &regions, larger, 0);
        for direction in [WRITE, READ] {
            let end = asking.run(direction, &[(0, 1)], (1 << 20) - 1);
            let End::Failed(failure) = end else { panic!("{end:?}") };
            assert!(failure.reason.to_string().contains("OutOfBounds"), "{}", failure.reason);
        }
        assert_eq!(asking.run(READ, &[(0, 0)], 4096), End::Done { bytes: 4096 });
    }
}

const MANY: u64 = 512;
const BLOCK: u64 = 64 << 10;

#[test]
fn after_a_cancelled_transfer_has_ended_no_byte_of_it_is_written() {
    for rail in rails() {
        let len = (MANY * BLOCK) as usize;
        let owner = open_owner(len);
        let asking = beside(&rail, &owner);
        let blocks = scattered(MANY, 5);
        let mut cancelled = 0;
        for round in 0..30 {
            let direction = if round % 2 == 0 { WRITE } else { READ };
            let (sender, receiver) = mpsc::channel();
            let transfer = asking.transfer(direction, &blocks, BLOCK);
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
        assert!(cancelled >= 3, "{cancelled} transfers were cancelled before their end");
        assert_eq!(
            asking.run(READ, &blocks, BLOCK),
            End::Done { bytes: len as u64 },
            "the flow is still good"
        );
    }
}

/// A peer in a process of its own, and the connection over which offers are made to it.
struct Other {
    child: Child,
    control: TcpStream,
}

impl Other {
    fn spawn(bytes: u64, fabric: Fabric) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--ignored", "--nocapture"])
            .env(PEER, format!("{bytes} {fabric:?}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let port: Option<u16> =
            lines.find_map(|line| line.unwrap().split_once("PORT ").map(|(_, port)| port.parse().unwrap()));
        let control = TcpStream::connect(("127.0.0.1", port.unwrap())).unwrap();
        Other { child, control }
    }

    fn ask(&self, rail: &UcxRail, options: FlowOptions) -> Asking {
        over_ucx(rail, options, 0, |offer| {
            put(&self.control, &offer);
            Ok(get(&self.control).unwrap())
        })
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn put(mut stream: &TcpStream, bytes: &[u8]) {
    stream.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
}

fn get(mut stream: &TcpStream) -> Option<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len).ok()?;
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    stream.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

/// Not a test: what [`Other`] runs. Ends with its control connection.
#[test]
#[ignore = "started by other tests"]
fn the_other_process() {
    let Ok(what) = std::env::var(PEER) else { return };
    let (bytes, fabric) = what.split_once(' ').unwrap();
    let fabric = if fabric == "Tcp" { Fabric::Tcp } else { Fabric::Memory };
    let (owner, rail) = (open_owner(bytes.parse().unwrap()), rail(fabric).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("PORT {}", listener.local_addr().unwrap().port());
    std::io::stdout().flush().unwrap();
    let (control, _) = listener.accept().unwrap();
    while let Some(offer) = get(&control) {
        put(&control, &accept(&rail, &owner.server.acceptor(), &offer).unwrap());
    }
}

/// Waits until the first operation is done.
fn wait_for_bytes(asking: &Asking) {
    while asking.flow.stats().done == 0 {
        assert_eq!(asking.flow.stats().broken, None);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A peer that is in the middle of a long transfer.
fn busy_other(
    rail: &UcxRail,
    direction: Direction,
    options: FlowOptions,
) -> (Other, Asking, mpsc::Receiver<End>) {
    let other = Other::spawn(MANY * BLOCK, rail.fabric());
    let asking = other.ask(rail, options);
    let blocks: Vec<_> = scattered(MANY, 5).into_iter().cycle().take(200 * MANY as usize).collect();
    let (sender, receiver) = mpsc::channel();
    let transfer = asking.transfer(direction, &blocks, BLOCK);
    asking.mover.submit(transfer, move |end| drop(sender.send(end))).unwrap();
    wait_for_bytes(&asking);
    (other, asking, receiver)
}

#[test]
fn a_killed_peer_ends_every_operation_and_leaves_nothing_behind() {
    for (rail, direction) in rails().iter().flat_map(|rail| [WRITE, READ].map(|direction| (rail, direction)))
    {
        let (other, asking, end) = busy_other(rail, direction, options());
        let killed = Instant::now();
        other.signal(rustix::process::Signal::KILL);
        let end = end.recv_timeout(LONG).unwrap();
        println!("{:?} {direction:?}: {:?} after SIGKILL", rail.fabric(), killed.elapsed());
        assert!(matches!(&end, End::Failed(_)), "not failed");
        assert!(killed.elapsed() < BELOW_OPERATIONS, "{:?}", killed.elapsed());
        assert_eq!(asking.flow.stats().broken, Some(Broken::Closed));
        let end = asking.run(direction, &[(0, 0)], BLOCK);
        assert!(matches!(&end, End::Failed(_)), "{end:?}");
        drop(asking);
        assert_eq!(rail.quarantined(), 0, "{:?}", rail.fabric());
    }
}

#[test]
fn a_stopped_peer_is_reported_within_the_limit() {
    for (rail, direction) in rails().iter().flat_map(|rail| [WRITE, READ].map(|direction| (rail, direction)))
    {
        let limit_us = 2_000_000;
        let (other, asking, end) =
            busy_other(rail, direction, FlowOptions { progress_limit_us: limit_us, ..options() });
        let stopped = Instant::now();
        other.signal(rustix::process::Signal::STOP);
        let end = end.recv_timeout(LONG).unwrap();
        assert!(matches!(&end, End::Failed(_)), "{end:?}");
        println!("{:?} {direction:?}: {:?} after SIGSTOP", rail.fabric(), stopped.elapsed());
        assert!(stopped.elapsed() < BELOW_OPERATIONS, "{:?}", stopped.elapsed());
        assert_eq!(asking.flow.stats().broken, Some(Broken::Frozen { limit_us }));
    }
}

#[test]
fn flow_and_server_hear_of_each_others_end() {
    for rail in rails() {
        let owner = open_owner(1 << 20);
        let asking = beside(&rail, &owner);
        assert_eq!(owner.server.stats().flows, 1);
        drop(asking);
        let until = Instant::now() + Duration::from_secs(20);
        while owner.server.stats().flows > 0 {
            assert!(Instant::now() < until, "the server was not told");
            std::thread::sleep(Duration::from_millis(5));
        }
        let asking = beside(&rail, &owner);
        drop(owner);
        while asking.flow.stats().broken.is_none() {
            assert!(Instant::now() < until, "the flow was not told");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(asking);
        assert_eq!(rail.quarantined(), 0);
    }
}

#[test]
fn a_rail_says_what_it_took_and_why_not_the_rest() {
    for rail in rails() {
        let mut accepted = Vec::new();
        let mut exchange = |offer: Vec<u8>| {
            let (carrier, answer) = rail.accept(&offer)?;
            accepted.push(carrier);
            Ok(answer)
        };
        let report = rail.connect(&mut exchange).unwrap().report;
        let expected: &[&str] =
            if rail.fabric() == Fabric::Tcp { &["tcp"] } else { &["posix", "sysv", "cma"] };
        let taken: Vec<_> = report.lines().filter_map(|line| line.strip_prefix("  taken  ")).collect();
        let is_expected = |line: &&str| expected.iter().any(|name| line.starts_with(&format!("{name}/")));
        assert!(!taken.is_empty() && taken.iter().all(is_expected), "{report}");
        assert!(report.contains(": of another fabric"), "{report}");
    }
    match UcxRail::open(Fabric::Tcp, &["nothing0".into()]) {
        Err(error @ UcxError::NoTransport { .. }) => assert!(error.to_string().contains("tcp/lo"), "{error}"),
        Err(UcxError::NoLibrary { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_offer_that_is_none_is_refused() {
    for rail in rails() {
        let owner = open_owner(4096);
        for offer in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 100]] {
            let refused = accept(&rail, &owner.server.acceptor(), offer).unwrap_err();
            assert!(refused.to_string().starts_with("the peer's UCX address: "), "{refused}");
        }
        let declined = TransportError::Declined("the peer has no UCX".to_string());
        let refused = rail.connect(&mut |_| Err(declined.clone())).unwrap_err();
        assert_eq!(refused, declined);
        assert_eq!(owner.server.stats().flows, 0);
    }
}
