//! The replayer against a fake engine over real sockets: what it sends, when it sends it, and what
//! it records of every way in which a request can end.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod fake_engine;

use fake_engine::{Behaviour, FakeCheck, FakeEngine, Seen, output};
use forebay_trace::record::{FailureKind, Outcome, RequestRecord};
use forebay_trace::replay::{Endpoint, Options, Pacing, ReplayError, ReplayOutcome, Replayer, Timeouts};
use forebay_trace::request::TraceRequest;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

const AT_ONCE: Behaviour = Behaviour::Answer(Duration::ZERO);

fn request(session: &str, turn: u32, arrival_ms: u64, input_tokens: u32, blocks: &[u64]) -> TraceRequest {
    let request = serde_json::json!({
        "session": session, "turn": turn, "arrival_us": arrival_ms * 1_000, "input_tokens": input_tokens,
        "output_tokens": 8, "block_tokens": 16, "blocks": blocks,
    });
    serde_json::from_value(request).unwrap()
}

fn thinking(request: TraceRequest, think_ms: u64) -> TraceRequest {
    TraceRequest { think_us: Some(think_ms * 1_000), ..request }
}

fn options(pacing: Pacing) -> Options {
    let timeouts = Timeouts {
        connect: Duration::from_secs(5),
        first_token: Duration::from_millis(1_500),
        progress: Duration::from_millis(1_000),
    };
    Options { arm: "test".into(), pacing, timeouts, ..Options::default() }
}

async fn replay(
    engine: &FakeEngine,
    options: Options,
    trace: Vec<TraceRequest>,
) -> (ReplayOutcome, Vec<RequestRecord>) {
    let replayer = Replayer::new(&engine.url, options).unwrap();
    let mut records = Vec::new();
    let keep = |record: &RequestRecord| {
        records.push(record.clone());
        Ok(())
    };
    let cancel = CancellationToken::new();
    let run = replayer.run(trace, Some(Arc::new(FakeCheck)), keep, &cancel);
    let outcome = tokio::time::timeout(Duration::from_secs(20), run).await.expect("a replay ends").unwrap();
    (outcome, records)
}

#[tokio::test]
async fn a_request_asks_for_exactly_what_the_trace_says() {
    let engine = FakeEngine::start(|_| AT_ONCE).await;
    let (outcome, records) =
        replay(&engine, options(Pacing::Open), vec![request("s", 0, 0, 40, &[1, 2, 3])]).await;
    assert_eq!((outcome.done, outcome.failed, outcome.wrong_tokens), (1, 0, 0));
    let seen = engine.seen();
    assert_eq!(seen[0].session, "s");
    assert_eq!(seen[0].prompt.len(), 40);
    for (name, value) in [
        ("max_tokens", serde_json::json!(8)),
        ("min_tokens", serde_json::json!(8)),
        ("ignore_eos", serde_json::json!(true)),
        ("stream", serde_json::json!(true)),
        ("return_token_ids", serde_json::json!(true)),
        ("stream_options", serde_json::json!({"include_usage": true})),
    ] {
        assert_eq!(seen[0].body[name], value, "{name}");
    }
    let record = &records[0];
    assert_eq!(record.backend.as_deref(), Some("fake-0"));
    assert_eq!((record.input_tokens, record.output_tokens), (40, 8));
    assert_eq!((record.cached_tokens, record.external_cached_tokens), (Some(20), Some(10)));
    assert!(record.is_ok() && record.ttft_s.is_some() && record.tpot_s.is_some());
}

#[tokio::test]
async fn the_chat_endpoint_gets_one_message_with_a_word_for_each_token_and_the_headers_asked_for() {
    let engine = FakeEngine::start(|_| Behaviour::NoTokenIds).await;
    let headers = [("authorization", "Bearer sk-1"), ("x-team", "blue")]
        .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
    let chat = Options {
        endpoint: Endpoint::Chat,
        headers: headers.into_iter().collect(),
        ..options(Pacing::Closed)
    };
    let replayer = Replayer::new(&engine.url, chat).unwrap();
    let mut records = Vec::new();
    let keep = |record: &RequestRecord| {
        records.push(record.clone());
        Ok(())
    };
    let trace = vec![request("s", 0, 0, 40, &[1, 2, 3]), request("t", 0, 0, 40, &[1, 2, 9])];
    let outcome = replayer.run(trace, None, keep, &CancellationToken::new()).await.unwrap();
    assert_eq!((outcome.done, outcome.failed), (2, 0), "{records:?}");
    assert!(records.iter().all(|record| record.output_tokens == 8 && record.ttft_s.is_some()));
    let seen = engine.seen();
    let content = |seen: &Seen| seen.body["messages"][0]["content"].as_str().unwrap().to_owned();
    let [first, second] = [content(&seen[0]), content(&seen[1])];
    assert_eq!([&first, &second].map(|text| text.split(' ').count()), [40, 40]);
    let words = |text: &str| text.split(' ').take(32).map(str::to_owned).collect::<Vec<_>>();
    assert!(words(&first) == words(&second) && first != second, "a common beginning stays one");
    for seen in seen {
        assert_eq!((&seen.path[..], seen.body.get("prompt")), ("/v1/chat/completions", None));
        for (name, value) in [("authorization", "Bearer sk-1"), ("x-team", "blue")] {
            assert!(seen.headers.contains(&(name.into(), value.into())), "{:?}", seen.headers);
        }
    }
}

/// Takes TLS off connections and hands them on to `engine`; returns where, and its certificate.
async fn tls_in_front_of(engine: &FakeEngine) -> (String, String) {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = certified.signing_key.serialize_der();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key.try_into().unwrap())
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let behind = engine.url.trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, behind) = (acceptor.clone(), behind.clone());
            tokio::spawn(async move {
                let Ok(mut front) = acceptor.accept(stream).await else { return };
                let mut back = tokio::net::TcpStream::connect(behind).await.unwrap();
                drop(tokio::io::copy_bidirectional(&mut front, &mut back).await);
            });
        }
    });
    (format!("https://localhost:{port}"), certified.cert.pem())
}

#[tokio::test]
async fn an_https_server_is_used_if_its_certificate_is_trusted_and_not_otherwise() {
    let engine = FakeEngine::start(|_| AT_ONCE).await;
    let (url, certificate) = tls_in_front_of(&engine).await;
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca.pem");
    std::fs::write(&ca, certificate).unwrap();
    let other = directory.path().join("other.pem");
    let stranger = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&other, stranger.cert.pem()).unwrap();
    for (ca, done) in [(ca, 1), (other, 0)] {
        let replayer = Replayer::new(&url, Options { ca: Some(ca), ..options(Pacing::Open) }).unwrap();
        let mut records = Vec::new();
        let keep = |record: &RequestRecord| {
            records.push(record.clone());
            Ok(())
        };
        let trace = vec![request("s", 0, 0, 40, &[1, 2, 3])];
        let outcome = replayer.run(trace, None, keep, &CancellationToken::new()).await.unwrap();
        assert_eq!((outcome.done, engine.seen().len()), (done, 1), "{records:?}");
        if let Outcome::Failed(failure) = &records[0].outcome {
            assert_eq!(failure.kind, FailureKind::Unreachable);
            assert!(failure.detail.contains("certificate"), "{}", failure.detail);
        }
    }
    let empty = directory.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let error = Replayer::new(&url, Options { ca: Some(empty), ..Options::default() }).unwrap_err();
    assert!(error.to_string().contains("there is no certificate in it"), "{error}");
}

#[tokio::test]
async fn an_answer_of_zero_tokens_is_asked_for_as_one_because_the_api_has_no_shorter() {
    let engine = FakeEngine::start(|_| AT_ONCE).await;
    let silent = TraceRequest { output_tokens: 0, ..request("s", 0, 0, 40, &[1, 2, 3]) };
    let (outcome, records) = replay(&engine, options(Pacing::Open), vec![silent]).await;
    assert_eq!((outcome.done, outcome.wrong_tokens), (1, 0));
    assert_eq!(engine.seen()[0].body["max_tokens"], 1);
    assert_eq!((records[0].output_tokens, records[0].tpot_s), (1, None));
}

#[tokio::test]
async fn each_turn_carries_the_tokens_that_were_really_answered() {
    let engine = FakeEngine::start(|_| AT_ONCE).await;
    let trace = vec![
        thinking(request("s", 0, 0, 40, &[1, 2, 3]), 0),
        thinking(request("s", 1, 1, 64, &[1, 2, 4, 5]), 0),
        thinking(request("s", 2, 2, 90, &[1, 2, 4, 5, 6, 7]), 0),
    ];
    let (outcome, records) = replay(&engine, options(Pacing::Closed), trace).await;
    assert_eq!((outcome.done, outcome.wrong_tokens), (3, 0));
    let prompts: Vec<Vec<u32>> = engine.seen().into_iter().map(|seen| seen.prompt).collect();
    for turn in 0..2 {
        let said = [prompts[turn].clone(), output(&prompts[turn], 8)].concat();
        assert_eq!(prompts[turn + 1][..said.len()], said, "turn {}", turn + 1);
    }
    assert_eq!(records.iter().map(|record| record.carried_tokens).collect::<Vec<_>>(), [0, 48, 72]);
    assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [40, 64, 90]);
}

#[tokio::test]
async fn a_closed_loop_waits_for_the_answer_and_thinks() {
    let engine = FakeEngine::start(|_| Behaviour::Answer(Duration::from_millis(80))).await;
    let trace = vec![request("s", 0, 0, 32, &[1, 2]), thinking(request("s", 1, 1, 48, &[1, 2, 3]), 120)];
    let (_, records) = replay(&engine, options(Pacing::Closed), trace).await;
    let seen = engine.seen();
    let gap = seen[1].at - seen[0].at;
    assert!(gap >= Duration::from_millis(200), "{gap:?}");
    assert!((records[1].arrival_s - records[0].e2e_s - 0.12).abs() < 0.05, "{records:?}");
}

#[tokio::test]
async fn the_clock_ratio_scales_all_times_of_trace_and_records_alike() {
    let engine = FakeEngine::start(|_| Behaviour::Answer(Duration::from_millis(50))).await;
    let trace = vec![request("s", 0, 0, 32, &[1, 2]), thinking(request("s", 1, 1, 48, &[1, 2, 3]), 1_000)];
    let fast = Options { clock_ratio: 10.0, ..options(Pacing::Closed) };
    let (outcome, records) = replay(&engine, fast, trace).await;
    let seen = engine.seen();
    let gap = seen[1].at - seen[0].at;
    // Unscaled, the think time alone would be 1 s.
    assert!((Duration::from_millis(150)..Duration::from_millis(1_000)).contains(&gap), "{gap:?}");
    assert!(records[0].ttft_s.unwrap() >= 0.5, "{records:?}");
    assert!(outcome.span_s >= 2.0, "{outcome:?}");
}

#[tokio::test]
async fn an_open_loop_does_not_wait_for_answers() {
    let engine = FakeEngine::start(|_| Behaviour::Answer(Duration::from_secs(1))).await;
    let trace = (0..5).map(|turn| request("s", turn, u64::from(turn) * 20, 32, &[1, 2])).collect();
    let mut patient = options(Pacing::Open);
    patient.timeouts.first_token = Duration::from_secs(15);
    let (_, records) = replay(&engine, patient, trace).await;
    let seen = engine.seen();
    let span = seen[4].at - seen[0].at;
    // They are due within 80 ms; four answers would take 4 s.
    assert!((Duration::from_millis(30)..Duration::from_secs(3)).contains(&span), "{span:?}");
    assert_eq!(records.iter().filter(|record| record.early).count(), 4);
}

#[tokio::test]
async fn no_more_are_in_flight_than_allowed_and_their_waiting_is_counted() {
    let engine = FakeEngine::start(|_| Behaviour::Answer(Duration::from_millis(60))).await;
    let trace = (0..6).map(|id| request(&format!("s{id}"), 0, 0, 32, &[1, 2])).collect();
    let narrow = Options { max_in_flight: 2, ..options(Pacing::Open) };
    let (outcome, records) = replay(&engine, narrow, trace).await;
    assert_eq!(outcome.done, 6);
    assert_eq!(engine.most_open(), 2);
    let last = records.iter().max_by(|a, b| a.start_s.total_cmp(&b.start_s)).unwrap();
    assert!(last.start_delay_s() > 0.1, "{last:?}");
    assert!(last.ttft_s.unwrap() > 0.16, "latency counts from when the request was due: {last:?}");
    assert_eq!(last.arrival_s, 0.0);
}

#[tokio::test]
async fn every_way_to_fail_is_a_record_with_its_reason_and_the_replay_ends() {
    let table = [
        (Behaviour::Hang, FailureKind::FirstTokenTimeout, 0),
        (Behaviour::OnlyComments, FailureKind::FirstTokenTimeout, 0),
        (Behaviour::HangAfter(3), FailureKind::ProgressTimeout, 3),
        (Behaviour::ResetAfter(3), FailureKind::Reset, 3),
        (Behaviour::EndAfter(3), FailureKind::Truncated, 3),
        (Behaviour::Endless, FailureKind::Garbage, 8),
        (Behaviour::Garbage, FailureKind::Garbage, 0),
        (Behaviour::NoHttp, FailureKind::Unreachable, 0),
        (Behaviour::Html, FailureKind::Garbage, 0),
        (Behaviour::Status500, FailureKind::Status, 0),
        (Behaviour::ErrorEvent, FailureKind::EngineError, 0),
    ];
    let engine = FakeEngine::start(move |seen: &Seen| table[seen.session.parse::<usize>().unwrap()].0).await;
    let trace = (0..table.len()).map(|id| request(&id.to_string(), 0, 0, 32, &[1, 2])).collect();
    let start = Instant::now();
    let (outcome, records) = replay(&engine, options(Pacing::Closed), trace).await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!((outcome.done, outcome.failed), (0, table.len() as u64));
    for (id, (behaviour, kind, tokens)) in table.into_iter().enumerate() {
        let record = records.iter().find(|record| record.session == id.to_string()).unwrap();
        let Outcome::Failed(failure) = &record.outcome else { panic!("{behaviour:?} passed: {record:?}") };
        assert_eq!(failure.kind, kind, "{behaviour:?}: {failure}");
        assert_eq!(record.output_tokens, tokens, "{behaviour:?}");
        assert_eq!(record.wrong_tokens, Some(0), "{behaviour:?}: what came was right");
        assert!(!failure.detail.is_empty());
    }
}

#[tokio::test]
async fn an_engine_that_is_not_there_is_a_record() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone =
        FakeEngine { url: format!("http://{}", listener.local_addr().unwrap()), ..FakeEngine::default() };
    drop(listener);
    let (outcome, records) =
        replay(&gone, options(Pacing::Open), vec![request("s", 0, 0, 32, &[1, 2])]).await;
    assert_eq!(outcome.failed, 1);
    assert!(
        matches!(&records[0].outcome, Outcome::Failed(failure) if failure.kind == FailureKind::Unreachable)
    );
}

#[tokio::test]
async fn a_session_goes_on_after_a_failed_turn_with_what_really_arrived() {
    let engine =
        FakeEngine::start(|seen| if seen.prompt.len() == 32 { Behaviour::EndAfter(3) } else { AT_ONCE })
            .await;
    let trace = vec![request("s", 0, 0, 32, &[1, 2]), thinking(request("s", 1, 1, 48, &[1, 2, 3]), 0)];
    let (outcome, records) = replay(&engine, options(Pacing::Closed), trace).await;
    assert_eq!((outcome.done, outcome.failed), (1, 1));
    let seen = engine.seen();
    assert_eq!(seen[1].prompt[32..35], output(&seen[0].prompt, 3));
    assert_eq!(records[1].carried_tokens, 35);
}

#[tokio::test]
async fn wrong_and_missing_tokens_are_counted() {
    let engine = FakeEngine::start(|seen| match seen.session.as_str() {
        "wrong" => Behaviour::WrongToken,
        "less" => Behaviour::OneTokenLess,
        "unseen" => Behaviour::NoTokenIds,
        _ => AT_ONCE,
    })
    .await;
    let trace =
        ["wrong", "less", "unseen", "right"].map(|session| request(session, 0, 0, 32, &[1, 2])).to_vec();
    let (outcome, records) = replay(&engine, options(Pacing::Open), trace).await;
    assert_eq!((outcome.done, outcome.wrong_tokens), (4, 2));
    let wrong = |session: &str| {
        let record = records.iter().find(|record| record.session == session).unwrap();
        (record.wrong_tokens, record.output_tokens)
    };
    assert_eq!(wrong("wrong"), (Some(1), 8));
    assert_eq!(wrong("less"), (Some(1), 7));
    assert_eq!(wrong("unseen"), (None, 8), "tokens without ids cannot be checked");
    assert_eq!(wrong("right"), (Some(0), 8));
}

#[tokio::test]
async fn a_cancelled_replay_ends_at_once_and_keeps_what_was_recorded() {
    let engine =
        FakeEngine::start(|seen| if seen.session == "quick" { AT_ONCE } else { Behaviour::Hang }).await;
    let trace = vec![
        request("quick", 0, 0, 32, &[1, 2]),
        request("stuck", 0, 1, 32, &[1, 2]),
        request("later", 0, 60_000, 32, &[1, 2]),
    ];
    let timeouts = Timeouts { first_token: Duration::from_secs(60), ..options(Pacing::Open).timeouts };
    let replayer = Replayer::new(&engine.url, Options { timeouts, ..options(Pacing::Open) }).unwrap();
    let cancel = CancellationToken::new();
    let mut progress = replayer.progress();
    let canceller = cancel.clone();
    tokio::spawn(async move {
        progress.wait_for(|progress| progress.done == 1 && progress.in_flight == 1).await.unwrap();
        canceller.cancel();
    });
    let mut records = 0;
    let keep = |_: &RequestRecord| {
        records += 1;
        Ok(())
    };
    let start = Instant::now();
    let outcome = replayer.run(trace, None, keep, &cancel).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(outcome.cancelled);
    assert_eq!((outcome.done, outcome.failed, outcome.cut_off), (1, 0, 1));
    assert_eq!(records, 1);
}

#[tokio::test]
async fn a_record_that_cannot_be_kept_ends_the_replay() {
    let engine = FakeEngine::start(|_| AT_ONCE).await;
    let trace = (0..50).map(|id| request(&format!("s{id}"), 0, id * 20, 32, &[1, 2])).collect::<Vec<_>>();
    let replayer = Replayer::new(&engine.url, options(Pacing::Open)).unwrap();
    let full = |_: &RequestRecord| Err(std::io::ErrorKind::StorageFull.into());
    let outcome = replayer.run(trace, None, full, &CancellationToken::new()).await;
    assert!(matches!(outcome, Err(ReplayError::Record(_))), "{outcome:?}");
    assert!(engine.seen().len() < 50);
}

#[tokio::test]
async fn bad_options_are_refused_with_the_option_named() {
    let refused = |options| Replayer::new("http://127.0.0.1:1", options).unwrap_err().to_string();
    assert!(refused(Options { clock_ratio: 0.0, ..Options::default() }).contains("clock_ratio"));
    assert!(refused(Options { clock_ratio: f64::NAN, ..Options::default() }).contains("clock_ratio"));
    assert!(refused(Options { max_in_flight: 0, ..Options::default() }).contains("max_in_flight"));
    assert!(refused(Options { vocab: 0, ..Options::default() }).contains("vocab"));
    assert!(Replayer::new("ftp://x", Options::default()).unwrap_err().to_string().contains("ftp://x"));
}

#[tokio::test]
async fn an_empty_trace_ends_at_once() {
    let engine = FakeEngine::start(|_| AT_ONCE).await;
    let (outcome, records) = replay(&engine, options(Pacing::Closed), Vec::new()).await;
    assert_eq!((outcome.done, records.len()), (0, 0));
}
