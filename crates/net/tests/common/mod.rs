//! Agents with a buffer each, and what tests do with them.
#![allow(dead_code)]

pub mod busy;
pub mod ends;
pub mod heap;
pub mod log;
pub mod other;
pub mod relay;
pub mod tls;

use forebay_net::ucx::{Fabric, UcxContext, UcxError};
use forebay_net::*;
use forebay_transfer::{HostBuffer, SplitMix};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Long enough for the slowest machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Well below the 30 s that the mover gives an operation: what is over by then was ended by the
/// connection.
pub const BELOW_OPERATIONS: Duration = Duration::from_secs(15);

/// An agent and the memory that it offers.
pub struct End {
    pub agent: Agent,
    pub memory: Arc<HostBuffer>,
    pub registration: Registration,
}

pub fn end(name: &str, bytes: usize) -> End {
    end_with(AgentConfig::named(name), bytes)
}

pub fn end_with(config: AgentConfig, bytes: usize) -> End {
    let agent = Agent::start(config).unwrap();
    let memory = Arc::new(HostBuffer::new(bytes));
    let registration = agent.register(Arc::clone(&memory) as _, Access::OPEN).unwrap();
    End { agent, memory, registration }
}

/// Rails over these transports, on this machine only.
pub fn on_rails(names: &[&str]) -> Vec<RailOptions> {
    let devices = |name| if name == "tcp" { vec!["lo".to_string()] } else { Vec::new() };
    names.iter().map(|name| RailOptions::named(name, devices(*name)).unwrap()).collect()
}

/// Opens UCX for a fabric on this machine only. Says so if the library is missing.
pub fn open_ucx(fabric: Fabric) -> Option<Arc<UcxContext>> {
    let devices = if fabric == Fabric::Tcp { vec!["lo".to_string()] } else { Vec::new() };
    match UcxContext::open(fabric, &devices) {
        Ok(context) => Some(context),
        Err(error @ UcxError::NoLibrary { .. }) => {
            testkit::skipped(format_args!("libucp.so.0 is not installed ({error})"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether the library for rails is here. Says so if not.
pub fn ucx_is_here() -> bool {
    open_ucx(Fabric::Memory).is_some()
}

/// Two agents, the first of which knows the second.
pub fn two(bytes: usize) -> (End, End) {
    let (one, two) = (end("one", bytes), end("two", bytes));
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    (one, two)
}

/// Blocks of one length side by side.
pub fn blocks(base: u64, len: u64, count: u64) -> Descriptors {
    Descriptors::from_runs([Run { address: base, len, count, stride: len }]).unwrap()
}

/// A request for all blocks of both ends, in an order of its own at the other one.
pub fn scattered(one: &End, peer: &str, base: u64, op: Op, block: u64, count: u64) -> Request {
    let local = one.agent.prepare_local(&blocks(one.registration.base(), block, count)).unwrap();
    let remote = one.agent.prepare_remote(peer, &blocks(base, block, count)).unwrap();
    let order = Select::Indices(shuffled(count));
    one.agent.request(op, (&local, Select::All), (&remote, order), None, None).unwrap()
}

/// All numbers below `count`, in an order that is always the same.
pub fn shuffled(count: u64) -> Vec<u32> {
    let mut dice = SplitMix(count);
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    for at in (1..numbers.len()).rev() {
        numbers.swap(at, (dice.draw() % (at as u64 + 1)) as usize);
    }
    numbers
}

pub fn post(request: &Request) -> mpsc::Receiver<forebay_net::End> {
    let (sender, receiver) = mpsc::channel();
    request.post(move |end| sender.send(end).unwrap()).unwrap();
    receiver
}

pub fn run(request: &Request) -> forebay_net::End {
    post(request).recv_timeout(LONG).unwrap()
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
