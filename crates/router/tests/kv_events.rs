//! What the router makes of KV events, with emulated engines that publish them over real sockets:
//! an engine that evicts, one that restarts, and publishers that lie.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_emulator::events::EventsConfig;
use forebay_emulator::{Engine as Emulated, EngineConfig, EngineHandle, namespace};
use forebay_router::{AdminToken, Backend, EventAddress, Policy, RouterConfig, RouterHandle};
use forebay_steps::Profile;
use std::net::SocketAddr;
use std::time::Duration;
use testkit::eventually_async;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const FREE: SocketAddr = SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0));
/// Bytes of a prompt that takes half of an engine's pool, and tokens of that pool.
const HALF_BYTES: usize = 32_000;
const POOL_TOKENS: usize = 16_384;

/// Where an engine listens and publishes.
type Place = (SocketAddr, (SocketAddr, Option<SocketAddr>));

const ANYWHERE: Place = (FREE, (FREE, Some(FREE)));

/// An engine with a small pool and a fast clock that publishes events.
async fn emulated((listen, (publish, replay)): Place) -> EngineHandle {
    let mut profile = Profile::shipped(Profile::DEFAULT).unwrap();
    profile.memory.pool_tokens = POOL_TOKENS;
    let namespace = namespace(&profile).key();
    let kv_events = Some(EventsConfig { publish, replay, topic: "kv@e@m".into() });
    let usual = EngineConfig::new(profile, namespace);
    let config = EngineConfig { model: "m".into(), clock_ratio: 2_000.0, listen, kv_events, ..usual };
    Emulated::spawn(config, None).await.unwrap()
}

fn backend(name: &str, engine: &EngineHandle) -> Backend {
    let (publish, replay) = engine.kv_events().unwrap();
    let replay = replay.map(|replay| format!("tcp://{replay}"));
    let events = vec![EventAddress { publish: format!("tcp://{publish}"), replay }];
    Backend { events, ..Backend::new(name, format!("http://{}", engine.address())) }
}

/// A router that follows both engines' events, and does not see by probes what happens to them.
async fn following(engines: &[EngineHandle; 2]) -> RouterHandle {
    let router = configured(Policy::Lpwl, &[], |config| {
        config.backends = vec![backend("e0", &engines[0]), backend("e1", &engines[1])];
        config.limits.probe_interval = Duration::from_secs(600);
        config.any_model = true;
    });
    eventually_async("events are followed", || {
        router.stats().backends.iter().all(|backend| backend.kv_events_followed)
    })
    .await;
    router
}

/// A request for one token to a prompt of so many bytes that has nothing in common with others.
fn prompt(name: &str, bytes: usize) -> String {
    let words: String =
        (0..).flat_map(|word| format!("{name}{word} ").into_bytes()).map(char::from).take(bytes).collect();
    serde_json::json!({"model": "m", "prompt": words, "max_tokens": 1}).to_string()
}

/// Two engines. The first has a whole prompt, the second its first half.
async fn with_a_prompt_on_both(engines: &[EngineHandle; 2]) -> RouterHandle {
    let router = following(engines).await;
    let mut client = Client::connect(&router).await;
    router.drain("e0").unwrap();
    assert_eq!(client.complete(&prompt("a", HALF_BYTES / 2)).await.backend(), "e1");
    router.add(&backend("e0", &engines[0])).unwrap();
    router.drain("e1").unwrap();
    assert_eq!(client.complete(&prompt("a", HALF_BYTES)).await.backend(), "e0");
    router.add(&backend("e1", &engines[1])).unwrap();
    assert_eq!(client.complete(&prompt("a", HALF_BYTES)).await.backend(), "e0", "it has more of it");
    router
}

#[tokio::test]
async fn an_engine_that_evicted_a_prompt_unseen_is_not_chosen_for_it() {
    let engines = [emulated(ANYWHERE).await, emulated(ANYWHERE).await];
    let router = with_a_prompt_on_both(&engines).await;
    let before = router.stats().backends[0].kv_events.batches;
    // Past the router.
    let mut client = Client::connect_to(engines[0].address()).await;
    for name in ["b", "c", "d"] {
        assert_eq!(client.complete(&prompt(name, HALF_BYTES)).await.status, 200);
    }
    // Each prompt is at least one batch.
    let has_heard = || router.stats().backends[0].kv_events.batches >= before + 3;
    eventually_async("the router has heard of it", has_heard).await;
    let got = Client::connect(&router).await.complete(&prompt("a", HALF_BYTES)).await;
    assert_eq!(got.backend(), "e1", "{:?}", router.decisions().last());
    router.shutdown().await;
}

#[tokio::test]
async fn an_engine_that_restarted_is_not_chosen_for_what_it_lost() {
    let engines = [emulated(ANYWHERE).await, emulated(ANYWHERE).await];
    let router = with_a_prompt_on_both(&engines).await;
    let [first, second] = engines;
    let place = (first.address(), first.kv_events().unwrap());
    first.shutdown(Duration::ZERO).await;
    let again = emulated(place).await;
    let has_heard = || {
        let stats = &router.stats().backends[0];
        stats.kv_events.emptied == 1 && stats.kv_events_followed
    };
    eventually_async("the router has heard of it", has_heard).await;
    let got = Client::connect(&router).await.complete(&prompt("a", HALF_BYTES)).await;
    assert_eq!((got.status, got.backend()), (200, "e1"));
    router.shutdown().await;
    drop((again, second));
}

#[tokio::test]
async fn a_router_that_comes_later_knows_how_much_an_engine_holds() {
    let engine = emulated(ANYWHERE).await;
    let mut client = Client::connect_to(engine.address()).await;
    assert_eq!(client.complete(&prompt("a", HALF_BYTES)).await.status, 200);
    let engines = [engine, emulated(ANYWHERE).await];
    let router = following(&engines).await;
    let held = router.stats().backends.iter().map(|backend| backend.kv_live_blocks).collect::<Vec<_>>();
    assert!(held[0] > 100 && held[1] == 0, "{held:?}");
    router.shutdown().await;
}

#[tokio::test]
async fn too_many_addresses_of_events_are_refused_by_their_number_and_not_by_their_length() {
    let router = configured(Policy::Lpwl, &["http://127.0.0.1:1".into()], |config| {
        config.admin_token = Some(AdminToken::new(b"secret".to_vec()));
    });
    let mut client = Client::connect(&router).await;
    let address = |rank: u32| {
        let host = "prefill-0.inference.svc.cluster.local";
        let (publish, replay) =
            (format!("tcp://{host}:{}", 5_557 + rank), format!("tcp://{host}:{}", 6_657 + rank));
        serde_json::json!({"publish": publish, "replay": replay})
    };
    let events: Vec<_> = (0..1_025).map(address).collect();
    let body = serde_json::json!({"url": "http://127.0.0.1:2", "events": events}).to_string();
    let token = [("authorization", "Bearer secret")];
    let got = client.ask("PUT", "/admin/engines/e1", &token, &body).await;
    assert_eq!(got.status, 400, "{}", got.body);
    assert!(got.body.contains("1025 addresses, at most 1024 are allowed"), "{}", got.body);
    router.shutdown().await;
}

/// Greets whoever connects as a publisher does, and then sends it these bytes, again and again.
async fn forger(bytes: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind(FREE).await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xFF, 0x7F, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let bytes = bytes.clone();
            tokio::spawn(async move {
                let mut theirs = [0; 64];
                stream.write_all(&greeting).await?;
                stream.read_exact(&mut theirs).await?;
                stream.write_all(b"\x04\x19\x05READY\x0BSocket-Type\0\0\0\x03PUB").await?;
                stream.write_all(&bytes).await?;
                // Until the router has had enough.
                stream.read_to_end(&mut Vec::new()).await
            });
        }
    });
    address
}

#[tokio::test]
async fn a_publisher_that_lies_harms_nobody_and_is_counted() {
    let long = |claimed: u64| [&[2][..], &claimed.to_be_bytes()].concat();
    let batch = [&b"\x01\x00\x01\x08"[..], &7_u64.to_be_bytes(), b"\x00\x03???"].concat();
    for (bytes, reason) in [
        (long(u64::MAX), "oversized"),
        (long(1 << 40), "oversized"),
        (b"\x00\x05hello".to_vec(), "unreadable"),
        (batch, ""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(1_000), ""),
    ] {
        let publish = format!("tcp://{}", forger(bytes).await);
        let engine = Engine::start(well).await;
        let router = configured(Policy::Lpwl, &[], |config: &mut RouterConfig| {
            let events = vec![EventAddress { publish, replay: None }];
            config.backends = vec![Backend { events, ..Backend::new("e0", engine.url()) }];
        });
        let mut client = Client::connect(&router).await;
        assert_eq!(client.complete(PROMPT).await.status, 200);
        if !reason.is_empty() {
            let line = format!("kv_events_dropped_total{{backend=\"e0\",reason=\"{reason}\"}} 0");
            let mut page = client.get("/metrics").await.body;
            for _ in 0..200 {
                if !page.contains(&line) {
                    break;
                }
                tokio::time::sleep(20 * MS).await;
                page = client.get("/metrics").await.body;
            }
            assert!(!page.contains(&line) && page.contains(reason), "{reason}");
        }
        assert_eq!(client.complete(PROMPT).await.status, 200);
        assert!(!router.stats().backends[0].kv_events_followed);
        router.shutdown().await;
    }
}
