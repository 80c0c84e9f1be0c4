//! What cannot be shown from outside: damage on the way between two connections, and strangers who
//! find a worker.
#![allow(clippy::unwrap_used)]

use super::connection::UcxConnection;
use super::endpoint_description::EndpointDescription;
use super::{Fabric, UcxContext, UcxError};
use crate::tcp::*;
use crate::transport;
use forebay_transfer::{
    Class, End, HostBuffer, Limits, LinkSpec, MoverThread, PathSpec, Place, Reason, Span, SpanPair, Transfer,
};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BYTES: usize = 1 << 20;

fn rail() -> Option<Arc<UcxContext>> {
    match UcxContext::open(Fabric::Memory, &[]) {
        Ok(rail) => Some(rail),
        Err(UcxError::NoLibrary { why }) => {
            testkit::skipped(format_args!("libucp.so.0 is not installed ({why})"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Flips a bit in the middle of the next large part of the stream, in either direction.
struct Damaging {
    connection: Box<UcxConnection>,
    armed: Arc<AtomicBool>,
}

impl Damaging {
    fn hits(&self, bytes: usize) -> bool {
        bytes > 10_000 && self.armed.swap(false, Ordering::Relaxed)
    }
}

impl Wire for Damaging {
    unsafe fn send(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        let whole: usize = slices.iter().map(|slice| slice.iov_len).sum();
        if !self.hits(whole) {
            // SAFETY: the caller's word.
            return unsafe { self.connection.send(slices) };
        }
        let part = |slice: &libc::iovec| {
            // SAFETY: the caller's word.
            unsafe { std::slice::from_raw_parts(slice.iov_base.cast::<u8>(), slice.iov_len) }.to_vec()
        };
        let mut bytes: Vec<u8> = slices.iter().flat_map(part).collect();
        bytes[whole / 2] ^= 1;
        let slice = slice(bytes.as_mut_ptr(), whole);
        // SAFETY: the slice is the vector.
        unsafe { self.connection.send(&[slice]) }
    }

    unsafe fn receive(&mut self, slices: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: the caller's word.
        let received = unsafe { self.connection.receive(slices) }?;
        // Frames are received into less than that.
        if slices[0].iov_len > 20_000 && self.hits(received) {
            // SAFETY: the first slice is writable, and not empty.
            unsafe { *slices[0].iov_base.cast::<u8>() ^= 1 };
        }
        Ok(received)
    }
}

impl Carrier for Damaging {
    fn wait(&mut self, waker: &WakeUp, sending: bool, timeout: Option<Duration>) -> io::Result<Ready> {
        self.connection.wait(waker, sending, timeout)
    }

    fn reset(self: Box<Self>) {
        self.connection.reset();
    }

    fn part(self: Box<Self>, farewell: &[u8]) {
        self.connection.part(farewell);
    }
}

#[test]
fn damage_on_the_way_is_found_in_both_directions_and_named() {
    let Some(rail) = rail() else { return };
    let exports = Arc::new(Exports::default());
    exports.offer(7, Arc::new(HostBuffer::new(BYTES)), Access::OPEN).unwrap();
    let me = Identity::starting([1; 16]).unwrap();
    let (anywhere, options) = (([127, 0, 0, 1], 0).into(), ServerOptions::default());
    let server = TcpServer::listen(anywhere, me, exports, None, options).unwrap();
    let (mut connection, own) = UcxConnection::new(&rail).unwrap();
    let answer = transport::accept(&rail, &server.acceptor(), &own.to_bytes()).unwrap();
    connection.connect(&EndpointDescription::parse(&answer, &own).unwrap()).unwrap();
    let armed = Arc::new(AtomicBool::new(false));
    let carrier = Damaging { connection: Box::new(connection), armed: Arc::clone(&armed) };
    let regions = PeerRegions::default();
    let (flow, peer) = Flow::over(Box::new(carrier), me, regions.clone(), &FlowOptions::default()).unwrap();
    let thread = MoverThread::spawn(Limits::default()).unwrap();
    let mover = thread.handle();
    let (here, there) = (Place::Host(0), Place::Peer(1));
    let link = mover.add_link(LinkSpec::new("flow", 2, 64 << 20), Box::new(flow)).unwrap();
    mover.add_path(PathSpec::direct(here, there, link)).unwrap().unwrap();
    mover.add_path(PathSpec::direct(there, here, link)).unwrap().unwrap();
    let theirs = regions.register(&mover, there, peer.regions[0], 0).unwrap();
    let ours = mover.register(here, Arc::new(HostBuffer::new(BYTES))).unwrap();
    let (ours, theirs) = (Span::new(ours, 0, BYTES as u64), Span::new(theirs, 0, BYTES as u64));
    for (from, to) in [(ours, theirs), (theirs, ours)] {
        let run = || mover.run(Transfer::new(vec![SpanPair::new(from, to)], Class::Demand)).unwrap();
        armed.store(true, Ordering::Relaxed);
        let End::Failed(failure) = run() else { panic!("damage was taken for data") };
        assert!(matches!(failure.reason, Reason::Corrupt { .. }), "{}", failure.reason);
        assert!(!armed.load(Ordering::Relaxed));
        assert_eq!(run(), End::Done { bytes: BYTES as u64 }, "the flow is still good");
    }
}

/// What a connection receives within a while.
fn received(connection: &mut UcxConnection) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 100];
    let until = Instant::now() + Duration::from_secs(10);
    let wake = WakeUp::new().unwrap();
    loop {
        let slice = slice(bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the slice is the vector.
        match unsafe { connection.receive(&[slice]) } {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                connection.wait(&wake, false, Some(Duration::from_millis(10))).unwrap();
            }
            result => return result.map(|len| bytes[..len].to_vec()),
        }
    }
}

fn send(connection: &mut UcxConnection, bytes: &[u8]) {
    let slice = slice(bytes.as_ptr().cast_mut(), bytes.len());
    // SAFETY: the slice is the bytes.
    assert_eq!(unsafe { connection.send(&[slice]) }.unwrap(), bytes.len());
}

#[test]
fn whoever_knows_the_address_but_not_the_secret_is_not_heard() {
    let Some(rail) = rail() else { return };
    let (mut one, one_description) = UcxConnection::new(&rail).unwrap();
    let (mut other, other_description) = UcxConnection::new(&rail).unwrap();
    let (mut stranger, _) = UcxConnection::new(&rail).unwrap();
    one.connect(&other_description).unwrap();
    other.connect(&one_description).unwrap();
    stranger.connect(&EndpointDescription { secret: [0; 16], ..other_description }).unwrap();
    send(&mut stranger, b"let me in");
    Box::new(stranger).reset();
    send(&mut one, b"hello");
    assert_eq!(received(&mut other).unwrap(), b"hello");
    send(&mut other, b"and welcome");
    assert_eq!(received(&mut one).unwrap(), b"and welcome");
    Box::new(one).part(b"goodbye");
    assert_eq!(received(&mut other).unwrap(), b"goodbye");
    assert_eq!(received(&mut other).unwrap(), b"", "the end");
}
