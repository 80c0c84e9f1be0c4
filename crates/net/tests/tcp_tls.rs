//! TLS between two real ends: every byte is right, and who is not trusted, too late, silent or in
//! plain text is kept out.
#![allow(clippy::unwrap_used)]

mod common;

use common::ends::{asking, both_ways, identity, loopback, server};
use common::tls::Authority;
use forebay_net::tcp::*;
use rcgen::{CertificateParams, KeyPair, SanType, date_time_ymd};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use testkit::eventually;

const LIMIT: Duration = Duration::from_secs(20);

fn serving(tls: &Arc<TlsConfig>) -> ServerOptions {
    ServerOptions { tls: Some(Arc::clone(tls)), ..ServerOptions::default() }
}

fn flowing(tls: &Arc<TlsConfig>) -> FlowOptions {
    FlowOptions { tls: Some(Arc::clone(tls)), ..FlowOptions::default() }
}

/// A name that binds a certificate to a node.
fn named(node: u8) -> impl FnOnce(&mut CertificateParams) {
    move |params| {
        let name = format!("forebay:{}", format!("{node:02x}").repeat(16));
        params.subject_alt_names.push(SanType::URI(name.try_into().unwrap()));
    }
}

/// Why a connection did not come about. The flow may break only at its first use: with TLS 1.3 the
/// asking end is done before the owner has looked at its certificate.
fn refused(server: &TcpServer, options: FlowOptions) -> Broken {
    match Flow::connect(server.address(), identity(2), PeerRegions::default(), options) {
        Err(FlowError::Greeting { broken, .. }) => broken,
        other => panic!("{other:?}"),
    }
}

fn count(server: &TcpServer, code: RefusalCode) -> u64 {
    server.stats().refused.get(&code).copied().unwrap_or_default()
}

#[test]
fn scattered_blocks_of_any_length_arrive_both_ways_over_tls() {
    let tls = Authority::new().plain_node();
    both_ways(2_000, 26_000, 2, serving(&tls), flowing(&tls));
    both_ways(50_000, 40, 1, serving(&tls), flowing(&tls));
    both_ways(64, 1 << 20, 1, serving(&tls), flowing(&tls));
}

#[test]
fn small_buffers_of_the_system_cut_records_anywhere() {
    let tls = Authority::new().plain_node();
    let serving = ServerOptions { socket_buffer_bytes: Some(20_000), ..serving(&tls) };
    let flowing = FlowOptions { socket_buffer_bytes: Some(20_000), ..flowing(&tls) };
    both_ways(60, 26_000, 1, serving, flowing);
}

#[test]
fn calls_of_every_length_are_answered_over_tls() {
    struct Echo;
    impl Service for Echo {
        fn call(&self, _from: Identity, body: Vec<u8>, reply: Reply) {
            reply.send(body);
        }
        fn gone(&self, _from: Identity) {}
    }
    let tls = Authority::new().plain_node();
    let (exports, echo) = (Arc::default(), Some(Arc::new(Echo) as _));
    let server = TcpServer::listen(loopback(), identity(1), exports, echo, serving(&tls)).unwrap();
    let regions = PeerRegions::default();
    let (flow, _) = Flow::connect(server.address(), identity(2), regions, flowing(&tls)).unwrap();
    for bytes in [0, 1, 16_383, 16_384, 16_385, 300_000, 1 << 20] {
        let (sender, receiver) = mpsc::channel();
        flow.handle().call(vec![7; bytes], 20_000_000, move |end| drop(sender.send(end)));
        assert!(receiver.recv_timeout(LIMIT).unwrap() == Ok(vec![7; bytes]), "{bytes} bytes");
    }
}

#[test]
fn an_owner_of_another_authority_is_not_spoken_to() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (server, _memory, _) = server(4096, serving(&ours.node(&theirs, |_| {})));
    let broken = refused(&server, flowing(&ours.plain_node()));
    assert!(matches!(broken, Broken::Tls(_)), "{broken:?}");
    assert_eq!(server.stats().let_in, 0);
}

#[test]
fn an_asker_of_another_authority_is_not_let_in() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (server, _memory, _) = server(4096, serving(&ours.plain_node()));
    let broken = refused(&server, flowing(&ours.node(&theirs, |_| {})));
    // A connection that ends with bytes unread may lose the alert that says why.
    assert!(matches!(broken, Broken::Tls(_) | Broken::Closed), "{broken:?}");
    eventually("it was counted", || count(&server, RefusalCode::Certificate) == 1);
    assert_eq!(server.stats().let_in, 0);
}

#[test]
fn certificates_that_are_over_or_not_yet_valid_are_refused() {
    let authority = Authority::new();
    let over = authority.node(&authority, |params| params.not_after = date_time_ymd(2020, 1, 1));
    let early = authority.node(&authority, |params| params.not_before = date_time_ymd(2999, 1, 1));
    for unfit in [over, early] {
        let good = authority.plain_node();
        let (bad_server, _memory, _) = server(4096, serving(&unfit));
        let broken = refused(&bad_server, flowing(&good));
        assert!(matches!(broken, Broken::Tls(_)), "{broken:?}");
        let (good_server, _memory, _) = server(4096, serving(&good));
        refused(&good_server, flowing(&unfit));
        eventually("it was counted", || count(&good_server, RefusalCode::Certificate) == 1);
    }
}

#[test]
fn whoever_shows_no_certificate_is_not_let_in() {
    let authority = Authority::new();
    let (server, _memory, _) = server(4096, serving(&authority.plain_node()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.0.der().clone()).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let mut session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    // However it ends here; what counts is that the owner refuses.
    let _ = rustls::Stream::new(&mut session, &mut stream).read(&mut [0]);
    drop(stream);
    eventually("somebody was refused", || !server.stats().refused.is_empty());
    assert_eq!(server.stats().let_in, 0);
}

#[test]
fn a_certificate_with_names_speaks_for_these_nodes_only() {
    let authority = Authority::new();
    let (one, two) = (authority.node(&authority, named(1)), authority.node(&authority, named(2)));
    let (right, _memory, _) = server(4096, serving(&one));
    drop(asking(right.address(), 1, flowing(&two)));
    let broken = refused(&right, flowing(&one));
    assert!(
        matches!(&broken, Broken::Refused(refusal) if refusal.code == RefusalCode::Certificate),
        "{broken:?}"
    );
    assert_eq!(count(&right, RefusalCode::Certificate), 1);
    let (wrong, _memory, _) = server(4096, serving(&two));
    let broken = refused(&wrong, flowing(&two));
    assert!(
        matches!(&broken, Broken::Turned(refusal) if refusal.code == RefusalCode::Certificate),
        "{broken:?}"
    );
}

#[test]
fn plain_text_on_a_port_with_tls_is_refused_in_words_and_counted() {
    let tls = Authority::new().plain_node();
    let (server, _memory, _) = server(4096, serving(&tls));
    let broken = refused(&server, FlowOptions::default());
    assert!(
        matches!(&broken, Broken::Refused(refusal) if refusal.code == RefusalCode::NotEncrypted),
        "{broken:?}"
    );
    assert_eq!(count(&server, RefusalCode::NotEncrypted), 1);
    drop(asking(server.address(), 1, flowing(&tls)));
}

#[test]
fn tls_on_a_port_without_is_told_so() {
    let tls = Authority::new().plain_node();
    let (server, _memory, _) = server(4096, ServerOptions::default());
    let broken = refused(&server, flowing(&tls));
    assert!(
        matches!(&broken, Broken::Refused(refusal) if refusal.text.contains("without TLS")),
        "{broken:?}"
    );
}

#[test]
fn silence_in_the_handshake_ends_by_the_greeting_limit() {
    let tls = Authority::new().plain_node();
    let options = ServerOptions { greeting_limit_us: 200_000, ..serving(&tls) };
    let (hasty, _memory, _) = server(4096, options);
    // Nothing at all, a part of a record, and a record that is no handshake's.
    for said in [b"".as_slice(), b"\x16\x03\x01\x02", b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\xfc"] {
        let mut stream = TcpStream::connect(hasty.address()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(said).unwrap();
        let began = Instant::now();
        let _ = stream.read_to_end(&mut Vec::new());
        assert!(began.elapsed() < LIMIT, "not closed");
    }
    eventually("all are gone", || hasty.stats().flows == 0);
    eventually("others are let in", || {
        Flow::connect(hasty.address(), identity(2), PeerRegions::default(), flowing(&tls)).is_ok()
    });
    // And the other way round: an owner that takes connections and says nothing.
    let silent = std::net::TcpListener::bind(loopback()).unwrap();
    let options = FlowOptions { connect_limit_us: 200_000, ..flowing(&tls) };
    let address = silent.local_addr().unwrap();
    let found = Flow::connect(address, identity(2), PeerRegions::default(), options);
    assert!(matches!(found, Err(FlowError::Greeting { broken: Broken::Frozen { .. }, .. })), "{found:?}");
}

#[test]
fn bytes_that_were_changed_on_the_way_end_the_connection() {
    let tls = Authority::new().plain_node();
    let (server, _memory, _) = server(4096, serving(&tls));
    let mut failed = 0;
    for at in [20, 50, 100, 150, 200, 500] {
        let between = std::net::TcpListener::bind(loopback()).unwrap();
        let (address, there) = (between.local_addr().unwrap(), server.address());
        let carrier = std::thread::spawn(move || {
            let (mut asking, _) = between.accept().unwrap();
            let mut owner = TcpStream::connect(there).unwrap();
            let (mut back_from, mut back_to) = (owner.try_clone().unwrap(), asking.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut back_from, &mut back_to);
                let _ = back_to.shutdown(std::net::Shutdown::Both);
            });
            let (mut seen, mut part) = (0, [0; 256]);
            while let Ok(len @ 1..) = asking.read(&mut part) {
                if (seen..seen + len).contains(&at) {
                    part[at - seen] ^= 1;
                }
                seen += len;
                if owner.write_all(&part[..len]).is_err() {
                    break;
                }
            }
            let _ = owner.shutdown(std::net::Shutdown::Both);
        });
        let flow = Flow::connect(address, identity(2), PeerRegions::default(), flowing(&tls));
        failed += usize::from(flow.is_err());
        drop(flow);
        carrier.join().unwrap();
    }
    assert!(failed >= 5, "{failed} connections noticed");
}

#[test]
fn plain_text_beyond_loopback_needs_to_be_asked_for() {
    let listen =
        |options| TcpServer::listen(([0, 0, 0, 0], 0).into(), identity(1), Arc::default(), None, options);
    assert_eq!(listen(ServerOptions::default()).err().unwrap().kind(), std::io::ErrorKind::PermissionDenied);
    listen(ServerOptions { plain_beyond_loopback: true, ..ServerOptions::default() }).unwrap();
    listen(serving(&Authority::new().plain_node())).unwrap();
    // Nobody is there, and nobody is asked.
    let beyond = ([192, 0, 2, 1], 9).into();
    let found = Flow::connect(beyond, identity(2), PeerRegions::default(), FlowOptions::default());
    assert!(matches!(found, Err(FlowError::Plain { .. })), "{found:?}");
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let authority = Authority::new();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::default().signed_by(&key, &authority.0).unwrap().pem();
    let (key, authorities) = (key.serialize_pem(), authority.0.pem());
    let error = |certificates: &str, key: &str, authorities: &str| {
        let config = TlsConfig::from_pem(certificates.as_bytes(), key.as_bytes(), authorities.as_bytes());
        config.unwrap_err().to_string()
    };
    assert!(error("", &key, &authorities).starts_with("certificates"));
    assert!(error(&certificate, "nonsense", &authorities).starts_with("key"));
    assert!(error(&certificate, &key, "").starts_with("authorities"));
    let other = KeyPair::generate().unwrap().serialize_pem();
    assert!(error(&certificate, &other, &authorities).starts_with("certificate and key"));
}
