//! The UCX link with two real ends, over UCX's `tcp` and over shared memory: what the TCP link
//! promises holds here as well. Every test says so and passes where the library is missing.
#![allow(clippy::unwrap_used)]

mod common;

use Direction::{Read as READ, Write as WRITE};
use common::ends::{
    Asking, Direction, KEY, Owner, asking_over, cancel_again_and_again, compare_both_ways, identity,
    scattered,
};
use common::other::{Other as Process, order, say};
use common::{BELOW_OPERATIONS, LONG, open_ucx};
use forebay_net::tcp::*;
use forebay_net::transport::{OpenTransport as _, TransportError, accept, connect};
use forebay_net::ucx::*;
use forebay_transfer::End;
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use testkit::eventually;

/// The rails of this machine.
fn rails() -> Vec<Arc<UcxContext>> {
    [Fabric::Memory, Fabric::Tcp].into_iter().filter_map(open_ucx).collect()
}

fn owner(bytes: usize, access: Access) -> Owner {
    let options = ServerOptions { greeting_limit_us: 10_000_000, ..ServerOptions::default() };
    common::ends::owner(bytes, access, options)
}

fn options() -> FlowOptions {
    FlowOptions { connect_limit_us: 20_000_000, ..FlowOptions::default() }
}

/// A flow over a rail, with the regions that its operations name and the one that is offered.
fn flow(
    rail: &Arc<UcxContext>,
    options: &FlowOptions,
    exchange: impl FnMut(Vec<u8>) -> Result<Vec<u8>, TransportError>,
) -> (Flow, PeerRegions, PeerRegion) {
    let regions = PeerRegions::default();
    let (flow, peer, _) = connect(rail, identity(2), regions.clone(), options, exchange).unwrap();
    (flow, regions, peer.regions[0])
}

/// An asking end in the process of the owner.
fn beside(rail: &Arc<UcxContext>, owner: &Owner) -> Asking {
    leased(rail, owner, 0)
}

fn leased(rail: &Arc<UcxContext>, owner: &Owner, lease: u64) -> Asking {
    let exchange = |offer: Vec<u8>| accept(rail, &owner.server.acceptor(), &offer);
    let (flow, regions, offered) = flow(rail, &options(), exchange);
    asking_over(vec![flow], &regions, offered, lease)
}

/// Why one small operation fails.
fn fault(asking: &Asking, direction: Direction) -> String {
    match asking.run(direction, &[(0, 0)], 4096) {
        End::Failed(failure) => failure.reason.to_string(),
        end => panic!("{end:?}"),
    }
}

#[test]
fn scattered_blocks_arrive_both_ways() {
    for (rail, (count, block)) in
        rails().iter().flat_map(|rail| [(2_000, 26_000), (40, 1 << 20)].map(|of| (rail, of)))
    {
        let owner = owner((count * block) as usize, Access::OPEN);
        compare_both_ways(&owner, &beside(rail, &owner), count, block);
    }
}

#[test]
fn thousands_of_small_operations_one_after_another() {
    for rail in rails() {
        let owner = owner(1 << 20, Access::OPEN);
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

#[test]
fn what_is_not_offered_now_is_refused_and_the_flow_stays() {
    for rail in rails() {
        let owner = owner(1 << 20, Access::LEASED_READ);
        let spans = vec![LeasedSpan { region: owner.region, offset: 0, len: 1 << 20 }];
        let grant = || owner.leases.grant([2; 16], spans.clone(), u64::MAX, |_| {}).unwrap();
        let [first, second] = [grant(), grant()];
        let [asking, other] = [first, second].map(|lease| leased(&rail, &owner, lease));
        assert_eq!(asking.run(READ, &[(0, 0)], 4096), End::Done { bytes: 4096 });
        assert!(fault(&asking, WRITE).contains("NotAllowed"));
        assert!(owner.leases.revoke(first));
        assert!(fault(&asking, READ).contains("NoLease"));
        assert_eq!(other.run(READ, &[(0, 0)], 4096), End::Done { bytes: 4096 });
        assert!(owner.exports.withdraw(KEY));
        assert!(fault(&other, READ).contains("UnknownRegion"));
        owner.exports.offer(KEY, Arc::clone(&owner.memory) as _, Access::OPEN).unwrap();
        assert!(fault(&other, READ).contains("StaleGeneration"));
        assert_eq!((&asking.flows[0].stats().broken, &other.flows[0].stats().broken), (&None, &None));
    }
}

#[test]
fn spans_beyond_the_region_are_refused() {
    for rail in rails() {
        let owner = owner(1 << 20, Access::OPEN);
        let exchange = |offer: Vec<u8>| accept(&rail, &owner.server.acceptor(), &offer);
        let (flow, regions, offered) = flow(&rail, &options(), exchange);
        let larger = PeerRegion { len: 2 << 20, ..offered };
        let asking = asking_over(vec![flow], &regions, larger, 0);
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
        let owner = owner((MANY * BLOCK) as usize, Access::OPEN);
        cancel_again_and_again(&owner, &beside(&rail, &owner), MANY, BLOCK, 30, 3);
    }
}

/// A peer in a process of its own, and the connection over which offers are made to it.
struct Other {
    process: Process,
    control: TcpStream,
}

impl Other {
    fn spawn(bytes: u64, fabric: Fabric) -> Other {
        let process = Process::spawn("the_other_process", format_args!("{bytes} {fabric:?}"));
        let control = TcpStream::connect(&process.said).unwrap();
        Other { process, control }
    }

    fn ask(&self, rail: &Arc<UcxContext>, options: &FlowOptions) -> Asking {
        let (flow, regions, offered) = flow(rail, options, |offer| {
            put(&self.control, &offer);
            Ok(get(&self.control).unwrap())
        });
        asking_over(vec![flow], &regions, offered, 0)
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
    let Some(order) = order() else { return };
    let (bytes, fabric) = order.split_once(' ').unwrap();
    let fabric = if fabric == "Tcp" { Fabric::Tcp } else { Fabric::Memory };
    let (owner, rail) = (owner(bytes.parse().unwrap(), Access::OPEN), open_ucx(fabric).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    say(listener.local_addr().unwrap());
    let (control, _) = listener.accept().unwrap();
    while let Some(offer) = get(&control) {
        put(&control, &accept(&rail, &owner.server.acceptor(), &offer).unwrap());
    }
}

/// A peer that is in the middle of a long transfer.
fn busy_other(
    rail: &Arc<UcxContext>,
    direction: Direction,
    options: &FlowOptions,
) -> (Other, Asking, mpsc::Receiver<End>) {
    let other = Other::spawn(MANY * BLOCK, rail.fabric());
    let asking = other.ask(rail, options);
    let blocks: Vec<_> = scattered(MANY, 5).into_iter().cycle().take(200 * MANY as usize).collect();
    let end = asking.submit(asking.transfer(direction, &blocks, BLOCK));
    asking.wait_for_bytes();
    (other, asking, end)
}

#[test]
fn a_killed_peer_ends_every_operation_and_leaves_nothing_behind() {
    for (rail, direction) in rails().iter().flat_map(|rail| [WRITE, READ].map(|direction| (rail, direction)))
    {
        let (other, asking, end) = busy_other(rail, direction, &options());
        let killed = Instant::now();
        other.process.signal(Signal::KILL);
        let end = end.recv_timeout(LONG).unwrap();
        println!("{:?} {direction:?}: {:?} after SIGKILL", rail.fabric(), killed.elapsed());
        assert!(matches!(&end, End::Failed(_)), "not failed");
        assert!(killed.elapsed() < BELOW_OPERATIONS, "{:?}", killed.elapsed());
        assert_eq!(asking.flows[0].stats().broken, Some(Broken::Closed));
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
        let options = FlowOptions { progress_limit_us: limit_us, ..options() };
        let (other, asking, end) = busy_other(rail, direction, &options);
        let stopped = Instant::now();
        other.process.signal(Signal::STOP);
        let end = end.recv_timeout(LONG).unwrap();
        assert!(matches!(&end, End::Failed(_)), "{end:?}");
        println!("{:?} {direction:?}: {:?} after SIGSTOP", rail.fabric(), stopped.elapsed());
        assert!(stopped.elapsed() < BELOW_OPERATIONS, "{:?}", stopped.elapsed());
        assert_eq!(asking.flows[0].stats().broken, Some(Broken::Frozen { limit_us }));
    }
}

#[test]
fn flow_and_server_hear_of_each_others_end() {
    for rail in rails() {
        let owner = owner(1 << 20, Access::OPEN);
        let asking = beside(&rail, &owner);
        assert_eq!(owner.server.stats().flows, 1);
        drop(asking);
        eventually("the server was told", || owner.server.stats().flows == 0);
        let asking = beside(&rail, &owner);
        drop(owner);
        eventually("the flow was told", || asking.flows[0].stats().broken.is_some());
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
    match UcxContext::open(Fabric::Tcp, &["nothing0".into()]) {
        Err(error @ UcxError::NoTransport { .. }) => assert!(error.to_string().contains("tcp/lo"), "{error}"),
        Err(UcxError::NoLibrary { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_offer_that_is_none_is_refused() {
    for rail in rails() {
        let owner = owner(4096, Access::OPEN);
        for offer in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 100]] {
            let refused = accept(&rail, &owner.server.acceptor(), offer).unwrap_err();
            assert!(refused.to_string().starts_with("the peer's UCX address: "), "{refused}");
        }
        let declined = TransportError::Declined("the peer has no UCX".to_string());
        let refused = rail.connect(&mut |_| Err(declined.clone())).err().unwrap();
        assert_eq!(refused, declined);
        assert_eq!(owner.server.stats().flows, 0);
    }
}
