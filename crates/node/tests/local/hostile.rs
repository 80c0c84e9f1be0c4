//! Whoever does not speak the protocol loses the connection, and nobody else notices.

use crate::rig::*;
use forebay_client::protocol::request::Request;
use forebay_node::Node;
use forebay_store::{StoreEnd, TenantId};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use testkit::eventually;

const NUMBER: u64 = 7;

/// A frame of the local protocol, written by hand. `len`: of the body, as its header says.
fn frame(len: u32, kind: u16, zero: u16, body: &[u8]) -> Vec<u8> {
    let named = [&[0; 8], kind.to_le_bytes().as_slice(), &NUMBER.to_le_bytes(), body].concat();
    frame_with(len, kind, zero, body, &blake3::hash(&named).as_bytes()[..8])
}

/// The same with a digest of one's own.
fn frame_with(len: u32, kind: u16, zero: u16, body: &[u8], digest: &[u8]) -> Vec<u8> {
    let len = len.saturating_add(8).to_le_bytes();
    let header = [len.as_slice(), &kind.to_le_bytes(), &zero.to_le_bytes(), &NUMBER.to_le_bytes()];
    [header.concat().as_slice(), body, digest].concat()
}

/// A request as clients say it, under this number.
fn said(request: Request, number: u64) -> Vec<u8> {
    request.encode(number).encode()
}

fn hello_of(version: u16) -> Vec<u8> {
    let body = [b"FBLOCAL\n".as_slice(), &version.to_le_bytes(), &[0; 4], &[0; 4], &[0; 2]].concat();
    frame(body.len() as u32, 1, 0, &body)
}

fn hello() -> Vec<u8> {
    hello_of(8)
}

/// A commit of so many slots, without checksums.
fn commit_of(slots: u32) -> Vec<u8> {
    let body = [slots.to_le_bytes().as_slice(), &[0; 12].repeat(slots as usize)].concat();
    frame(body.len() as u32, 8, 0, &body)
}

/// A hello as clients of version 3 said it, without a digest.
fn old_hello() -> Vec<u8> {
    let mut frame = hello_of(3);
    frame.truncate(frame.len() - 8);
    frame[0] -= 8;
    frame
}

/// A connection that has been let in and has reserved a slot, written by hand.
pub fn raw_reservation(socket: &std::path::Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    let shape = [1u32.to_le_bytes().as_slice(), &1u32.to_le_bytes(), &1000u64.to_le_bytes()].concat();
    // Each process has a chunk of its own.
    let id = std::process::id().to_le_bytes().repeat(8);
    let body = [&shape, 1u32.to_le_bytes().as_slice(), &id, &[0], &[0; 32]].concat();
    stream.write_all(&[hello(), frame(body.len() as u32, 7, 0, &body)].concat()).unwrap();
    // A welcome of 24 bytes and an answer of 21, each behind its header and before its digest.
    stream.read_exact(&mut [0; 16 + 24 + 8 + 16 + 21 + 8]).unwrap();
    stream
}

/// How long a child of a client has its sockets.
pub const CHILD_LIVES: Duration = Duration::from_secs(20);

/// Forks: the child has all that this process has open, and does nothing with it.
pub fn leave_sockets_to_a_child() {
    let (told, forked) = std::io::pipe().map(|(reader, writer)| (writer, reader)).unwrap();
    std::thread::spawn(move || {
        let mut child = std::process::Command::new("true");
        let stay = move || {
            (&told).write_all(&[1])?;
            std::thread::sleep(CHILD_LIVES);
            Ok(())
        };
        // SAFETY: between fork and exec it writes and sleeps, and takes nothing that another thread
        // may have had.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut child, stay) };
        let _ = child.spawn();
    });
    (&forked).read_exact(&mut [0]).unwrap();
}

/// Asks for more than anybody takes, and hangs up behind a goodbye.
pub fn leave_unheard(mut stream: UnixStream) {
    stream.write_all(&frame(0, 13, 0, b"").repeat(3_000)).unwrap();
    // By now the node waits for room.
    std::thread::sleep(Duration::from_millis(200));
    stream.write_all(&frame(0, 15, 0, b"")).unwrap();
}

/// What the node says until it hangs up.
fn said_to(site: &Site, bytes: &[u8]) -> String {
    let mut socket = UnixStream::connect(site.socket()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // The node may hang up before it has read all.
    let _ = socket.write_all(bytes);
    let mut said = Vec::new();
    let _ = socket.read_to_end(&mut said);
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn strange_bytes_are_refused_with_what_is_wrong_and_harm_nobody() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    for (bytes, says) in [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), "at most"),
        (vec![0x16; 64], "at most"),
        (frame(u32::MAX, 1, 0, b""), "at most"),
        (frame(0, 1, 9, b""), "not 0"),
        (old_hello(), "the protocol's version is 3; allowed is 8"),
        (hello_of(7), "the protocol's version is 7; allowed is 8"),
        (hello_of(9), "the protocol's version is 9; allowed is 8"),
        ([hello(), frame_with(0, 14, 0, b"", &[1; 8])].concat(), "its digest is wrong"),
        (
            [hello(), vec![4, 0, 0, 0, 14, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]].concat(),
            "at least the 8",
        ),
        (frame(0, 2, 0, b""), "needs"),
        (frame(0, 14, 0, b""), "no hello"),
        ([hello(), hello()].concat(), "second hello"),
        ([hello(), frame(4, 2, 0, &u32::MAX.to_le_bytes())].concat(), "needs"),
        ([hello(), frame(0, 999, 0, b"")].concat(), "allowed is 1 to 24"),
        ([hello(), frame(2, 24, 0, &[0xff; 2])].concat(), "a tenant is 65535; allowed is 0 to 65534"),
        ([hello(), said(Request::For(TenantId(3)), 1), said(Request::Ping, 2)].concat(), "another request"),
        ([hello(), frame(1, 13, 0, b"x")].concat(), "left behind the end"),
        ([hello(), frame(4, 8, 0, &[0; 4])].concat(), "the number of chunks is 0; allowed is 1 to 256"),
        ([hello(), commit_of(257)].concat(), "the number of chunks is 257; allowed is 1 to 256"),
    ] {
        let said = said_to(&site, &bytes);
        assert!(said.contains(says), "{says:?} is not in {said:?}");
    }
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    eventually("all of them are gone", || node.stat().clients == 1);
}

#[test]
fn connections_that_say_nothing_keep_no_client_out() {
    let site = Site::new();
    let mut config = site.config();
    // Without the room of their own they would be the only clients there may be, for longer than
    // this test takes.
    (config.limits.clients, config.limits.unauthenticated) = (4, 4);
    config.limits.authentication_ms = 60_000;
    let node = Node::start(&config).unwrap();
    let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(site.socket()).unwrap()).collect();
    for _ in 0..4 {
        let peer = site.peer();
        assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
        node.store().delete(TenantId(0), &ids());
    }
    let mut told = Vec::new();
    (&silent[0]).read_to_end(&mut told).unwrap();
    let told = String::from_utf8_lossy(&told);
    assert!(told.contains("4 connections have not said who they are"), "{told}");
}

#[test]
fn unfinished_requests_of_all_clients_are_bounded_in_bytes_and_in_time() {
    let site = Site::new();
    let mut config = site.config();
    config.limits.unfinished = 16 << 20;
    let node = Node::start(&config).unwrap();
    let begin = |body: usize| {
        let mut stream = UnixStream::connect(site.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let part = [hello(), frame(body as u32, 2, 0, &vec![0; body / 2])].concat();
        // The node may hang up before it has read all.
        let _ = stream.write_all(&part);
        // The welcome.
        stream.read_exact(&mut [0; 16 + 24]).unwrap();
        stream
    };
    let ended = |mut stream: UnixStream| {
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    };
    let held = [begin(8 << 20), begin(8 << 20)];
    let refused = ended(begin(8 << 20));
    assert!(refused.contains("limits.unfinished is 16777216"), "{refused}");
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES }, "short requests always have room");
    for stream in held {
        let late = ended(stream);
        assert!(late.contains("has not come whole within 10 s"), "{late}");
    }
    eventually("they are gone", || node.stat().clients == 1);
    drop(begin(8 << 20));
}

#[test]
fn names_of_leases_and_slots_that_were_never_given_are_nothing() {
    let site = Site::new();
    let node = site.node();
    let peer = site.peer();
    assert_eq!(peer.store(0), StoreEnd::Stored { bytes: CHUNK_BYTES });
    let lease = peer.lease();
    let made_up: Vec<u8> = [1u64, 2, 3, u64::MAX].iter().flat_map(|name| name.to_le_bytes()).collect();
    let release = [4u32.to_le_bytes().as_slice(), &made_up].concat();
    let one = 1u32.to_le_bytes();
    let commit = [one.as_slice(), &1u64.to_le_bytes(), &one, &[0; 4]].concat();
    let mut all = hello();
    all.extend(frame(release.len() as u32, 6, 0, &release));
    all.extend(frame(commit.len() as u32, 8, 0, &commit));
    all.extend(frame(8, 9, 0, &1u64.to_le_bytes()));
    all.extend(frame(0, 15, 0, b""));
    let said = said_to(&site, &all);
    assert!(said.contains("slot 1 is not reserved"), "{said}");
    assert!(peer.hit(&lease, 0), "another client's lease is untouched");
    eventually("it is gone", || node.stat().clients == 1);
}
