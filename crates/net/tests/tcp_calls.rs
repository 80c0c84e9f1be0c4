//! Calls between two real ends: answered from any thread, ended once whatever happens, and the
//! owner hears who is gone.
#![allow(clippy::unwrap_used)]

mod common;

use common::ends::{self, identity, loopback};
use forebay_net::tcp::*;
use forebay_net::{About, Agent, AgentConfig};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use testkit::eventually;

const LIMIT: Duration = Duration::from_secs(20);
const LIMIT_US: u64 = 20_000_000;

/// Answers from a thread of its own: `echo...` with the same, `keep...` never, all else not at all.
#[derive(Default)]
struct Echo {
    kept: Mutex<Vec<Reply>>,
    gone: Mutex<Vec<Identity>>,
}

impl Service for Echo {
    fn call(&self, _from: Identity, body: Vec<u8>, reply: Reply) {
        if body.starts_with(b"keep") {
            self.kept.lock().unwrap().push(reply);
        } else {
            std::thread::spawn(
                move || if body.starts_with(b"echo") { reply.send(body) } else { drop(reply) },
            );
        }
    }

    fn gone(&self, from: Identity) {
        self.gone.lock().unwrap().push(from);
    }
}

fn server(options: ServerOptions) -> (TcpServer, Arc<Echo>) {
    let echo = Arc::new(Echo::default());
    let service = Some(Arc::clone(&echo) as _);
    let server = TcpServer::listen(loopback(), identity(1), Arc::default(), service, options).unwrap();
    (server, echo)
}

fn connect(server: &TcpServer, me: Identity) -> Flow {
    Flow::connect(server.address(), me, PeerRegions::default(), FlowOptions::default()).unwrap().0
}

fn ask(flow: &Flow, body: &[u8], limit_us: u64) -> mpsc::Receiver<Result<Vec<u8>, CallError>> {
    let (sender, receiver) = mpsc::channel();
    flow.handle().call(body.to_vec(), limit_us, move |end| drop(sender.send(end)));
    receiver
}

#[test]
fn calls_are_answered_refused_or_late_and_each_ends_once() {
    let (server, _echo) = server(ServerOptions::default());
    let flow = connect(&server, identity(2));
    let bodies: Vec<Vec<u8>> = (0..300).map(|at| format!("echo {at}").into_bytes()).collect();
    let replies: Vec<_> = bodies.iter().map(|body| ask(&flow, body, LIMIT_US)).collect();
    for (body, reply) in bodies.into_iter().zip(replies) {
        assert_eq!(reply.recv_timeout(LIMIT).unwrap(), Ok(body));
        assert!(reply.recv_timeout(LIMIT).is_err(), "a second answer");
    }
    let refused = ask(&flow, b"other", LIMIT_US).recv_timeout(LIMIT).unwrap();
    assert!(matches!(refused, Err(CallError::Refused(_))), "{refused:?}");
    let late = ask(&flow, b"keep", 50_000).recv_timeout(LIMIT).unwrap();
    assert_eq!(late, Err(CallError::Late { limit_us: 50_000 }));
    let long = [b"echo".as_slice(), &vec![7; CALL_BYTES_MAX as usize - 4]].concat();
    assert_eq!(ask(&flow, &long, LIMIT_US).recv_timeout(LIMIT).unwrap(), Ok(long));
}

#[test]
fn a_node_that_only_offers_memory_refuses_calls() {
    let (server, ..) = ends::server(4096, ServerOptions::default());
    let end = ask(&connect(&server, identity(2)), b"echo", LIMIT_US).recv_timeout(LIMIT).unwrap();
    assert!(matches!(end, Err(CallError::Refused(_))), "{end:?}");
}

#[test]
fn calls_end_and_watchers_hear_when_the_owner_goes() {
    let options = ServerOptions { drain_limit_us: 50_000, ..ServerOptions::default() };
    let (server, echo) = server(options);
    let flow = connect(&server, identity(2));
    let kept = ask(&flow, b"keep", LIMIT_US);
    eventually("the call has come", || echo.kept.lock().unwrap().len() == 1);
    let (sender, receiver) = mpsc::channel();
    flow.handle().on_broken(move |broken| drop(sender.send(broken)));
    drop(server);
    assert_eq!(kept.recv_timeout(LIMIT).unwrap(), Err(CallError::Broken(Broken::Closed)));
    assert_eq!(receiver.recv_timeout(LIMIT).unwrap(), Broken::Closed);
    let (sender, receiver) = mpsc::channel();
    flow.handle().on_broken(move |broken| drop(sender.send(broken)));
    assert_eq!(receiver.recv_timeout(LIMIT).unwrap(), Broken::Closed, "past, but told");
    let after = ask(&flow, b"echo", LIMIT_US).recv_timeout(LIMIT).unwrap();
    assert_eq!(after, Err(CallError::Broken(Broken::Closed)));
    let handle = flow.handle();
    drop(flow);
    let (sender, receiver) = mpsc::channel();
    handle.call(Vec::new(), LIMIT_US, move |end| drop(sender.send(end)));
    assert_eq!(receiver.recv_timeout(LIMIT).unwrap(), Err(CallError::Broken(Broken::Closed)));
}

#[test]
fn the_owner_hears_once_that_an_instance_is_gone_with_its_last_connection() {
    let (server, echo) = server(ServerOptions::default());
    let (one, other) = (identity(2), identity(2));
    let (first, second, third) = (connect(&server, one), connect(&server, one), connect(&server, other));
    drop(first);
    eventually("two connections are left", || server.stats().flows == 2);
    assert_eq!(*echo.gone.lock().unwrap(), []);
    drop(second);
    eventually("the first instance is gone", || *echo.gone.lock().unwrap() == [one]);
    drop(third);
    eventually("both are gone", || *echo.gone.lock().unwrap() == [one, other]);
}

#[test]
fn a_flow_that_is_dropped_first_hears_its_answers() {
    let (server, echo) = server(ServerOptions::default());
    let flow = connect(&server, identity(2));
    let answered = ask(&flow, b"echo", LIMIT_US);
    let late = ask(&flow, b"keep", 300_000);
    eventually("the call has come", || echo.kept.lock().unwrap().len() == 1);
    drop(flow);
    assert_eq!(answered.try_recv().unwrap(), Ok(b"echo".to_vec()));
    assert_eq!(late.try_recv().unwrap(), Err(CallError::Late { limit_us: 300_000 }));
}

#[test]
fn an_agent_tells_its_version_and_its_clock_to_whoever_was_let_in() {
    let agent = Agent::start(AgentConfig::named("one")).unwrap();
    let address = agent.address().unwrap();
    let flow = Flow::connect(address, identity(2), PeerRegions::default(), FlowOptions::default()).unwrap().0;
    let before_us = About::now().time_us;
    let answer = ask(&flow, &About::question(), LIMIT_US).recv_timeout(LIMIT).unwrap().unwrap();
    let about = About::parse(&answer).unwrap();
    assert_eq!(about.version, env!("CARGO_PKG_VERSION"));
    assert!((before_us..=About::now().time_us).contains(&about.time_us), "{about:?}");
    let longer = ask(&flow, &[&About::question()[..], &[0]].concat(), LIMIT_US);
    assert!(matches!(longer.recv_timeout(LIMIT).unwrap(), Err(CallError::Refused(_))));
}
