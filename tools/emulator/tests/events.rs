//! Guarantees of KV events: a subscriber sees in vLLM's format what enters and leaves the prefix
//! cache, and can ask for what it missed.

mod common;

use bytes::Bytes;
use common::{config, spawn, tokens};
use forebay_emulator::EngineConfig;
use forebay_emulator::events::EventsConfig;
use forebay_emulator::truth::BlockHasher;
use rmpv::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use zeromq::{DealerSocket, ReqSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const LIMIT: Duration = Duration::from_secs(60);

fn with_events() -> EngineConfig {
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    EngineConfig {
        kv_events: Some(EventsConfig { publish: free, replay: Some(free), topic: "kv@engine-0".into() }),
        ..config()
    }
}

/// One event, its fields by name.
type Event = BTreeMap<String, Value>;

fn decode(payload: &[u8]) -> Vec<Event> {
    let batch = rmpv::decode::read_value(&mut &payload[..]).expect("msgpack");
    let batch = batch.as_array().expect("an array").clone();
    assert_eq!(batch.len(), 3, "timestamp, events, rank");
    assert!(batch[0].as_f64().expect("a timestamp") > 1.7e9);
    assert_eq!(batch[2].as_u64(), Some(0));
    let events = batch[1].as_array().expect("events");
    let fields = |event: &Value| {
        let map = event.as_map().expect("a map").iter();
        map.map(|(name, value)| (name.as_str().expect("a name").to_owned(), value.clone())).collect()
    };
    events.iter().map(fields).collect()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(|number| number.as_u64().expect("a number")).collect()
}

async fn receive(socket: &mut impl SocketRecv) -> Vec<Bytes> {
    let message = tokio::time::timeout(LIMIT, socket.recv()).await.expect("in time").expect("a message");
    message.into_vec()
}

fn number(frame: &[u8]) -> i64 {
    i64::from_be_bytes(frame.try_into().expect("8 bytes"))
}

/// Everything that a replay from `first` on answers, by a socket that has sent nothing else.
async fn replay_all(socket: &mut DealerSocket, first: u64) -> Vec<(i64, Bytes)> {
    let frames = vec![Bytes::new(), Bytes::copy_from_slice(&first.to_be_bytes())];
    socket.send(ZmqMessage::try_from(frames).expect("frames")).await.expect("it is sent");
    let mut batches = Vec::new();
    loop {
        let frames = receive(socket).await;
        assert_eq!((frames.len(), frames[0].len()), (3, 0), "an empty frame, a number, a payload");
        if number(&frames[1]) == -1 {
            assert!(frames[2].is_empty());
            return batches;
        }
        batches.push((number(&frames[1]), frames[2].clone()));
    }
}

#[tokio::test]
async fn a_subscriber_sees_what_is_cached_in_vllms_format() {
    let config = with_events();
    let (engine, client) = spawn(&config).await;
    let (publish, _) = engine.kv_events().expect("events are on");
    let mut subscriber = SubSocket::new();
    subscriber.connect(&format!("tcp://{publish}")).await.unwrap();
    subscriber.subscribe("kv@engine-0").await.unwrap();
    // It takes a while until the engine knows of it. Number 0 said that the cache is empty, and
    // each prompt brings two.
    let (mut next, mut last) = (1, 0);
    while last == 0 {
        client.complete(&tokens(40, 100 + next as u32), 10).await;
        next += 2;
        let short = Duration::from_millis(50);
        if let Ok(message) = tokio::time::timeout(short, subscriber.recv()).await {
            last = number(&message.expect("a message").into_vec()[1]);
        }
    }
    while last < next - 1 {
        last = number(&receive(&mut subscriber).await[1]);
    }

    let prompt = tokens(40, 1);
    client.complete(&prompt, 10).await;
    let frames = receive(&mut subscriber).await;
    assert_eq!(frames.len(), 3);
    assert_eq!(&frames[0][..], b"kv@engine-0");
    assert_eq!(number(&frames[1]), next);
    let events = decode(&frames[2]);
    let mut names = Vec::new();
    BlockHasher::new(&config.namespace, 16).extend(&mut names, &prompt);
    let names: Vec<u64> = names.iter().map(|name| name.low_u64()).collect();
    assert_eq!(events.len(), 1);
    let stored = &events[0];
    assert_eq!(stored["type"].as_str(), Some("BlockStored"));
    assert_eq!(numbers(&stored["block_hashes"]), names);
    assert!(stored["parent_block_hash"].is_nil());
    assert_eq!(
        numbers(&stored["token_ids"]),
        prompt[..32].iter().map(|token| u64::from(*token)).collect::<Vec<_>>()
    );
    assert_eq!((stored["block_size"].as_u64(), stored["medium"].as_str()), (Some(16), Some("GPU")));

    // The third block is full once 8 tokens of output are in it, and follows the second.
    let frames = receive(&mut subscriber).await;
    assert_eq!(number(&frames[1]), next + 1);
    let stored = &decode(&frames[2])[0];
    assert_eq!(stored["parent_block_hash"].as_u64(), Some(names[1]));
    engine.shutdown(LIMIT).await;
}

#[tokio::test]
async fn evicted_blocks_are_reported_and_the_events_add_up() {
    let mut config = with_events();
    config.profile.memory.pool_tokens = 512;
    let (engine, client) = spawn(&config).await;
    for seed in 0..4 {
        client.complete(&tokens(300, seed), 4).await;
    }
    let (_, replay) = engine.kv_events().expect("events are on");
    let mut socket = DealerSocket::new();
    socket.connect(&format!("tcp://{}", replay.expect("a replay socket"))).await.unwrap();
    let batches = replay_all(&mut socket, 0).await;
    let ordered: Vec<i64> = batches.iter().map(|(number, _)| *number).collect();
    assert_eq!(ordered, (0..batches.len() as i64).collect::<Vec<_>>(), "no gaps");
    let events: Vec<Event> = batches.iter().flat_map(|(_, payload)| decode(payload)).collect();
    assert_eq!(events[0]["type"].as_str(), Some("AllBlocksCleared"));
    let mut cached = std::collections::HashSet::new();
    let mut removed = 0;
    for event in &events[1..] {
        let hashes = numbers(&event["block_hashes"]);
        match event["type"].as_str() {
            Some("BlockStored") => hashes.into_iter().for_each(|hash| assert!(cached.insert(hash))),
            Some("BlockRemoved") => {
                removed += hashes.len();
                hashes.iter().for_each(|hash| assert!(cached.remove(hash)));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(removed > 0, "4 prompts of 19 blocks do not fit 32");
    assert!(cached.len() <= 32);

    let later = replay_all(&mut socket, ordered.len() as u64 - 1).await;
    assert_eq!(later.len(), 1, "only from the number on that was asked for");
    assert_eq!(replay_all(&mut socket, u64::MAX).await.len(), 0);
    engine.shutdown(LIMIT).await;
}

#[tokio::test]
async fn a_req_socket_is_answered_and_garbage_is_ignored() {
    let (engine, _client) = spawn(&with_events()).await;
    let (_, replay) = engine.kv_events().expect("events are on");
    let endpoint = format!("tcp://{}", replay.expect("a replay socket"));
    let mut garbage = DealerSocket::new();
    garbage.connect(&endpoint).await.unwrap();
    for frames in [vec![Bytes::from_static(b"x")], vec![Bytes::new(), Bytes::from_static(b"short")]] {
        garbage.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    }
    let mut socket = ReqSocket::new();
    socket.connect(&endpoint).await.unwrap();
    socket.send(ZmqMessage::from(Bytes::copy_from_slice(&0u64.to_be_bytes()))).await.unwrap();
    let frames = receive(&mut socket).await;
    assert_eq!(number(&frames[0]), 0);
    assert_eq!(decode(&frames[1])[0]["type"].as_str(), Some("AllBlocksCleared"));
    engine.shutdown(LIMIT).await;
}

#[tokio::test]
async fn who_asks_for_replays_and_takes_none_keeps_nothing_from_others() {
    let (engine, client) = spawn(&with_events()).await;
    let (publish, replay) = engine.kv_events().expect("events are on");
    for seed in 100..300 {
        client.complete(&tokens(40, seed), 10).await;
    }
    let mut stuck = DealerSocket::new();
    stuck.connect(&format!("tcp://{}", replay.expect("a replay socket"))).await.unwrap();
    // More than the socket's queue and the system keep for it.
    for _ in 0..1_000 {
        let frames = vec![Bytes::new(), Bytes::copy_from_slice(&0u64.to_be_bytes())];
        stuck.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    }
    let mut subscriber = SubSocket::new();
    subscriber.connect(&format!("tcp://{publish}")).await.unwrap();
    subscriber.subscribe("kv@engine-0").await.unwrap();
    let mut heard = 0;
    for seed in 2..100 {
        client.complete(&tokens(40, seed), 1).await;
        let short = Duration::from_millis(50);
        heard += usize::from(tokio::time::timeout(short, subscriber.recv()).await.is_ok());
    }
    assert!(heard > 50, "{heard} of 98 batches were published");
    engine.shutdown(LIMIT).await;
}

#[tokio::test]
async fn an_address_in_use_is_an_error() {
    let (engine, _client) = spawn(&with_events()).await;
    let (publish, _) = engine.kv_events().expect("events are on");
    let mut config = with_events();
    config.kv_events = Some(EventsConfig { publish, replay: None, topic: String::new() });
    let error = forebay_emulator::Engine::spawn(config, None).await.expect_err("the address is taken");
    assert!(error.to_string().contains(&publish.to_string()), "{error}");
    engine.shutdown(LIMIT).await;
}
