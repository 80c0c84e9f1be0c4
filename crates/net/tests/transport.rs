//! A transport that this program brings itself: agents use it as they use their own, over the
//! public interface alone. Its carrier is two queues in memory.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_net::tcp::{Carrier, Ready, WakeUp, Wire};
use forebay_net::transport::{
    Connected, Exchange, OpenTransport, Reach, Transport, TransportError, TransportInfo,
};
use forebay_net::{AgentConfig, Op, RailOptions, Request, TCP};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::fd::OwnedFd;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use testkit::eventually;

/// Bytes that a queue holds at most, so that senders are held up now and then.
const QUEUE_BYTES: usize = 100_000;

/// How often an idle end looks whether it was cut.
const POLL: Duration = Duration::from_millis(10);
/// The next payload that is sent is damaged.
static DAMAGED: AtomicBool = AtomicBool::new(false);
/// Every end finds that its peer has closed.
static CUT: AtomicBool = AtomicBool::new(false);
/// One test at a time: those that cut and damage do so for all.
static ONE: Mutex<()> = Mutex::new(());

/// The transport. Endpoints that were offered wait here under a number, which is all of the offer.
struct Queues {
    offered: Mutex<Vec<Option<Box<End>>>>,
}

static QUEUES: Queues = Queues { offered: Mutex::new(Vec::new()) };

impl Transport for Queues {
    fn info(&self) -> TransportInfo {
        TransportInfo { name: "queues", path: "queues", code: 200, rank: 0, reach: Reach::Host }
    }

    fn open(&self, devices: &[String]) -> Result<Box<dyn OpenTransport>, TransportError> {
        match devices {
            [] => Ok(Box::new(Opened)),
            _ => Err(TransportError::Failed("queues have no devices".into())),
        }
    }
}

struct Opened;

impl OpenTransport for Opened {
    fn connect(&self, exchange: &mut Exchange<'_>) -> Result<Connected, TransportError> {
        let (one, other) = End::pair().map_err(|error| TransportError::Failed(error.to_string()))?;
        let number = {
            let mut offered = QUEUES.offered.lock().unwrap();
            offered.push(Some(Box::new(other)));
            offered.len() - 1
        };
        let answer = exchange(number.to_string().into_bytes())?;
        assert_eq!(answer, b"taken");
        Ok(Connected { carrier: Box::new(one), report: "two queues".into() })
    }

    fn accept(&self, offer: &[u8]) -> Result<(Box<dyn Carrier>, Vec<u8>), TransportError> {
        let number = std::str::from_utf8(offer).ok().and_then(|text| text.parse::<usize>().ok());
        let mut offered = QUEUES.offered.lock().unwrap();
        let end = number.and_then(|number| offered.get_mut(number)).and_then(Option::take);
        let end = end.ok_or_else(|| TransportError::Failed("no such offer".into()))?;
        Ok((end, b"taken".to_vec()))
    }
}

/// Bytes on their way in one direction.
struct Queue {
    bytes: Mutex<(VecDeque<u8>, bool)>,
    /// Tells the receiver of bytes, or of the end.
    filled: OwnedFd,
    /// Tells the sender of room.
    drained: OwnedFd,
}

struct End {
    incoming: Arc<Queue>,
    outgoing: Arc<Queue>,
}

fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn tell(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

fn forget(event: &OwnedFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}

impl End {
    fn pair() -> io::Result<(End, End)> {
        let queue = || -> io::Result<Arc<Queue>> {
            Ok(Arc::new(Queue { bytes: Mutex::default(), filled: event()?, drained: event()? }))
        };
        let (one, other) = (queue()?, queue()?);
        let back = End { incoming: Arc::clone(&other), outgoing: Arc::clone(&one) };
        Ok((End { incoming: one, outgoing: other }, back))
    }

    fn room(&self) -> usize {
        QUEUE_BYTES - self.outgoing.bytes.lock().unwrap().0.len()
    }

    fn is_readable(&self) -> bool {
        let bytes = self.incoming.bytes.lock().unwrap();
        !bytes.0.is_empty() || bytes.1 || CUT.load(Ordering::Relaxed)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        for queue in [&self.outgoing, &self.incoming] {
            queue.bytes.lock().unwrap().1 = true;
            tell(&queue.filled);
            tell(&queue.drained);
        }
    }
}

impl Wire for End {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut room = self.room();
        let mut queue = self.outgoing.bytes.lock().unwrap();
        if queue.1 {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let before = queue.0.len();
        for slice in slices {
            let len = slice.iov_len.min(room);
            // SAFETY: the caller says that the slices are readable.
            queue.0.extend(unsafe { std::slice::from_raw_parts(slice.iov_base.cast::<u8>(), len) });
            room -= len;
        }
        // Frames are shorter than that; payload is not.
        if queue.0.len() - before > 8_000 && DAMAGED.swap(false, Ordering::Relaxed) {
            queue.0[before + 4_000] ^= 1;
        }
        let sent = queue.0.len() - before;
        tell(&self.outgoing.filled);
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let mut queue = self.incoming.bytes.lock().unwrap();
        if CUT.load(Ordering::Relaxed) {
            return Ok(0);
        }
        if queue.0.is_empty() {
            return if queue.1 { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let mut received = 0;
        for slice in slices {
            let len = slice.iov_len.min(queue.0.len());
            let bytes: Vec<u8> = queue.0.drain(..len).collect();
            // SAFETY: the caller says that the slices are writable.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slice.iov_base.cast(), len) };
            received += len;
        }
        tell(&self.incoming.drained);
        Ok(received)
    }
}

impl Carrier for End {
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        forget(&self.incoming.filled);
        forget(&self.outgoing.drained);
        // Nobody wakes an idle end when all are cut.
        let timeout = Some(timeout.map_or(POLL, |timeout| timeout.min(POLL)));
        let found = self.is_readable() || (sending && self.room() > 0);
        let mut fds = vec![PollFd::new(&self.incoming.filled, PollFlags::IN)];
        if sending {
            fds.push(PollFd::new(&self.outgoing.drained, PollFlags::IN));
        }
        waker.wait_beside(&mut fds, if found { Some(Duration::ZERO) } else { timeout })?;
        let writable = sending && self.room() > 0;
        Ok(Ready { readable: self.is_readable(), writable, reset: false })
    }

    fn reset(self: Box<Self>) {}

    fn part(mut self: Box<Self>, farewell: &[u8]) {
        let slice = libc::iovec { iov_base: farewell.as_ptr().cast_mut().cast(), iov_len: farewell.len() };
        // SAFETY: the slice is the farewell. Whoever does not listen is not told.
        let _ = unsafe { self.send(&[slice]) };
    }
}

fn agent(name: &str, rails: Vec<RailOptions>, bytes: usize) -> common::End {
    end_with(AgentConfig { rails, ..AgentConfig::named(name) }, bytes)
}

fn queues(devices: Vec<String>) -> RailOptions {
    RailOptions { transport: &QUEUES, devices }
}

#[test]
fn a_transport_of_the_programs_own_carries_the_bytes_and_is_named_in_the_stats() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (block, count) = (26_000, 200);
    let bytes = (block * count) as usize;
    let rails = || vec![queues(Vec::new())];
    let (one, two) = (agent("one", rails(), bytes), agent("two", rails(), bytes));
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    one.agent.connect("two").unwrap();
    let flows = || one.agent.stats()[0].flows.clone();
    eventually("the transport is taken", || flows().iter().any(|flow| flow.path == "queues"));
    for (op, seed) in [(Op::Write, 1), (Op::Read, 3)] {
        let (ours, theirs) = (fill(&one.memory, bytes, seed), fill(&two.memory, bytes, seed + 1));
        let request = scattered(&one, "two", two.registration.base(), op, block, count);
        assert_eq!(run(&request), forebay_net::End::Done { bytes: bytes as u64 });
        let (from, to) = match op {
            Op::Write => (ours, common::bytes(&two.memory, bytes)),
            Op::Read => (theirs, common::bytes(&one.memory, bytes)),
        };
        let sorted = |bytes: &[u8]| {
            let mut blocks: Vec<_> = bytes.chunks(block as usize).map(<[u8]>::to_vec).collect();
            blocks.sort_unstable();
            blocks
        };
        assert!(sorted(&from) == sorted(&to), "{op:?}");
    }
    let stat = &one.agent.stats()[0];
    let carried: HashMap<_, _> = stat.counts.paths.iter().map(|(path, of)| (*path, of.moved_bytes)).collect();
    assert_eq!(carried, HashMap::from([("queues", 2 * bytes as u64)]));
    assert_eq!(flows()[1].report.as_deref(), Some("two queues"));
    assert!(stat.counts.faults.is_empty() && stat.idle_rails.is_empty(), "{stat:?}");
}

#[test]
fn where_a_transport_of_the_programs_own_cannot_be_opened_bytes_take_tcp_and_it_is_said_why() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (one, two) = (
        agent("one", vec![queues(vec!["q0".into()])], 4096),
        agent("two-plain", vec![queues(Vec::new())], 4096),
    );
    log::capture();
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    let request = scattered(&one, "two-plain", two.registration.base(), Op::Write, 512, 8);
    assert_eq!(run(&request), forebay_net::End::Done { bytes: 4096 });
    let stat = || one.agent.stats().remove(0);
    eventually("it was tried", || !stat().idle_rails.is_empty());
    assert_eq!(stat().idle_rails[0].why.to_string(), "it cannot be opened: queues have no devices");
    assert_eq!(stat().counts.paths[TCP].moved_bytes, 4096);
    let line = log::line(&["WARN", "rail not used", "peer=\"two-plain\"", "rail=\"queues\""]);
    assert!(line.contains("reason=it cannot be opened: queues have no devices"), "{line}");
}

/// Two agents with the transport taken, and all of the second one's memory to be read by the first.
fn taken(name: &str) -> (common::End, common::End, Request) {
    let rails = || vec![queues(Vec::new())];
    let (one, two) = (agent("one", rails(), 1 << 20), agent(name, rails(), 1 << 20));
    one.agent.add_peer(&two.agent.metadata()).unwrap();
    one.agent.connect(name).unwrap();
    eventually("the transport is taken", || is_taken(&one));
    let request = scattered(&one, name, two.registration.base(), Op::Read, 1 << 14, 1 << 6);
    (one, two, request)
}

fn is_taken(end: &common::End) -> bool {
    end.agent.stats()[0].flows.iter().any(|flow| flow.path == "queues")
}

#[test]
fn a_lost_transport_leaves_the_bytes_to_tcp_and_comes_back_and_each_is_told_once() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    log::capture();
    let (one, _two, request) = taken("two-cut");
    log::line(&["INFO", "rail up", "peer=\"two-cut\"", "rail=\"queues\"", "path=\"queues\""]);
    CUT.store(true, Ordering::Relaxed);
    let lost = log::line(&["WARN", "rail lost", "peer=\"two-cut\"", "rail=\"queues\"", "path=\"tcp\""]);
    assert!(lost.contains("reason=the peer closed the connection"), "{lost}");
    assert_eq!(run(&request), forebay_net::End::Done { bytes: 1 << 20 });
    CUT.store(false, Ordering::Relaxed);
    eventually("it is back", || is_taken(&one));
    assert_eq!(log::lines(&["peer lost", "two-cut"]), [""; 0]);
}

#[test]
fn damage_on_a_transport_is_found_counted_and_told_once() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    log::capture();
    let (one, _two, request) = taken("two-damaged");
    DAMAGED.store(true, Ordering::Relaxed);
    let end = run(&request);
    assert!(matches!(&end, forebay_net::End::Failed { why, .. } if why.kind() == "corrupt"), "{end:?}");
    log::line(&["WARN", "corrupt frame", "peer=\"two-damaged\"", "path=\"queues\""]);
    assert_eq!(one.agent.stats()[0].counts.faults["corrupt"], 1);
}
