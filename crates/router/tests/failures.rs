//! What clients and engines see when something fails: real sockets, engines that misbehave by
//! script.

mod common;

use common::*;
use forebay_router::{Failure, Policy, RouterHandle};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use testkit::eventually_async;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Has so many more requests wait at engines at the same time, each asked again while there is no
/// place for it.
async fn take_places(router: &RouterHandle, engines: &[&Engine], count: usize) -> JoinSet<u16> {
    let at_engines = || engines.iter().map(|engine| engine.requests_of(HELD)).sum::<usize>();
    let before = at_engines();
    let mut asking = JoinSet::new();
    for _ in 0..count {
        let mut client = Client::connect(router).await;
        asking.spawn(async move {
            loop {
                match client.complete(HELD).await.status {
                    503 => tokio::time::sleep(5 * MS).await,
                    status => return status,
                }
            }
        });
    }
    eventually_async("all requests are at engines", || at_engines() == before + count).await;
    asking
}

#[tokio::test]
async fn a_backend_that_is_down_costs_clients_nothing() {
    let engine = Engine::start(well).await;
    let down = Nobody::new();
    let router = router(Policy::RoundRobin, &[down.url(), engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    for _ in 0..20 {
        let got = client.complete(PROMPT).await;
        assert_eq!((got.status, got.backend()), (200, "e1"));
    }
    let stats = router.stats();
    assert!(!stats.backends[0].up && stats.backends[0].ejections == 1);
    assert!(failures(&router, 0, Failure::Refused) <= 1, "one request at most was spent on it");
}

#[tokio::test]
async fn no_backend_at_all_is_503_at_once() {
    let down = Nobody::new();
    let router = router(Policy::Lpwl, &[down.url()], |_| {});
    let mut client = Client::connect(&router).await;
    let start = Instant::now();
    for _ in 0..3 {
        let got = client.complete(PROMPT).await;
        assert_eq!((got.status, got.headers.contains_key("retry-after")), (503, true));
        assert_eq!(got.json()["error"]["type"], "service_unavailable_error");
    }
    assert_eq!(client.get("/health").await.status, 503);
    assert_eq!(client.get("/v1/models").await.status, 503);
    assert!(start.elapsed() < PATIENCE, "it waited for something");
}

#[tokio::test]
async fn a_backend_that_hangs_before_the_first_byte_is_given_up_in_time_and_another_answers() {
    for steps in [vec![Step::Hang], vec![stream_head(), Step::Hang]] {
        let hung = Engine::start(only_probes(steps)).await;
        let engine = Engine::start(well).await;
        let urls = [hung.url(), engine.url()];
        let router = router(Policy::RoundRobin, &urls, |limits| limits.first_byte = SECOND);
        let start = Instant::now();
        let got = Client::connect(&router).await.complete(STREAM).await;
        let took = start.elapsed();
        assert_eq!((got.status, got.backend(), got.broken), (200, "e1", false));
        assert!(took >= SECOND && took < PATIENCE, "{took:?}");
        assert_eq!(failures(&router, 0, Failure::FirstByteTimeout), 1);
        eventually_async("the hung engine sees that the router has gone", || hung.left() == 1).await;
        assert_eq!((hung.requests(), engine.requests()), (1, 1));
    }
}

#[tokio::test]
async fn when_every_backend_hangs_the_client_gets_504_after_the_stated_attempts() {
    let engines = [
        Engine::start(only_probes(vec![Step::Hang])).await,
        Engine::start(only_probes(vec![Step::Hang])).await,
    ];
    let urls = engines.each_ref().map(Engine::url);
    let router = router(Policy::RoundRobin, &urls, |limits| limits.first_byte = 500 * MS);
    let got = Client::connect(&router).await.complete(STREAM).await;
    assert_eq!(got.status, 504, "{}", got.body);
    let asked = || engines.each_ref().map(Engine::requests);
    eventually_async("both engines are asked", || asked() == [1, 1]).await;
}

#[tokio::test]
async fn requests_that_wait_for_a_backend_that_probes_find_dead_are_sent_elsewhere() {
    let hung = Engine::start(|_, _| vec![Step::Hang]).await;
    let engine = Engine::start(well).await;
    let urls = [hung.url(), engine.url()];
    let router = router(Policy::RoundRobin, &urls, |limits| {
        limits.probe_timeout = SECOND;
        limits.reprobe_interval = 20 * MS;
    });
    let start = Instant::now();
    let got = Client::connect(&router).await.complete(PROMPT).await;
    assert_eq!((got.status, got.backend()), (200, "e1"));
    // Three probes of 1 s, two pauses of 20 ms; the deadline for the first byte is 120 s.
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    assert_eq!(failures(&router, 0, Failure::Ejected), 1);
}

#[tokio::test]
async fn a_backend_that_answers_garbage_is_passed_over_and_alone_gives_502() {
    let garbage =
        Engine::start(only_probes(vec![Step::Write("SSH-2.0-OpenSSH_9.2\r\n\r\n".into()), Step::Close]))
            .await;
    let engine = Engine::start(well).await;
    let both = router(Policy::RoundRobin, &[garbage.url(), engine.url()], |_| {});
    assert_eq!(Client::connect(&both).await.complete(PROMPT).await.backend(), "e1");
    let alone = router(Policy::RoundRobin, &[garbage.url()], |_| {});
    let got = Client::connect(&alone).await.complete(PROMPT).await;
    assert_eq!(got.status, 502, "{}", got.body);
    assert_eq!(failures(&alone, 0, Failure::Garbage), 1);
}

#[tokio::test]
async fn an_answer_without_a_byte_is_tried_elsewhere() {
    for steps in [vec![Step::Close], vec![Step::Reset], vec![stream_head(), Step::Reset]] {
        let closing = Engine::start(only_probes(steps)).await;
        let engine = Engine::start(well).await;
        let router = router(Policy::RoundRobin, &[closing.url(), engine.url()], |_| {});
        let got = Client::connect(&router).await.complete(STREAM).await;
        assert_eq!((got.status, got.backend(), got.broken), (200, "e1", false));
        assert_eq!((closing.requests(), engine.requests()), (1, 1));
    }
}

#[tokio::test]
async fn a_stream_that_breaks_after_its_first_byte_is_never_sent_twice_and_the_client_is_told() {
    for end in [Step::Reset, Step::Close, Step::Hang] {
        let breaking = Engine::start(only_probes(vec![stream_head(), event("a"), end])).await;
        let engine = Engine::start(well).await;
        let urls = [breaking.url(), engine.url()];
        let router = router(Policy::RoundRobin, &urls, |limits| limits.progress = 200 * MS);
        let start = Instant::now();
        let got = Client::connect(&router).await.complete(STREAM).await;
        assert_eq!((got.status, got.backend(), got.broken), (200, "e0", true));
        let events: Vec<&str> = got.body.split_terminator("\n\n").collect();
        assert_eq!(events.len(), 2, "{}", got.body);
        assert_eq!(events[0], r#"data: {"choices":[{"index":0,"text":"a"}]}"#);
        let error: serde_json::Value =
            serde_json::from_str(events[1].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(error["error"]["code"], 502);
        assert_eq!((breaking.requests(), engine.requests()), (1, 0));
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn half_an_event_is_never_passed_on_as_the_last() {
    let half = chunk("data: {\"choices\":[{\"ind");
    let engine = Engine::start(only_probes(vec![stream_head(), event("a"), half, Step::Reset])).await;
    let router = router(Policy::RoundRobin, &[engine.url()], |_| {});
    let got = Client::connect(&router).await.complete(STREAM).await;
    assert!(got.broken && !got.body.contains("\"ind\"") && got.body.ends_with("}\n\n"), "{}", got.body);
}

#[tokio::test]
async fn a_short_document_is_never_taken_for_a_whole_one() {
    let short =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"choices\":";
    let engine = Engine::start(only_probes(vec![Step::Write(short.into()), Step::Close])).await;
    let router = router(Policy::RoundRobin, &[engine.url()], |_| {});
    let got = Client::connect(&router).await.complete(PROMPT).await;
    assert!(got.broken, "{got:?}");
    assert_eq!(failures(&router, 0, Failure::BrokenOff), 1);
}

#[tokio::test]
async fn a_busy_backend_is_passed_over_and_the_last_one_speaks_for_itself() {
    let busy = || only_probes(document("503 Service Unavailable", r#"{"error":"full"}"#));
    let (first, second) = (Engine::start(busy()).await, Engine::start(well).await);
    let one_busy = router(Policy::RoundRobin, &[first.url(), second.url()], |_| {});
    assert_eq!(Client::connect(&one_busy).await.complete(PROMPT).await.backend(), "e1");
    assert!(one_busy.stats().backends[0].up, "one such answer does not eject");
    let (first, second) = (Engine::start(busy()).await, Engine::start(busy()).await);
    let all_busy = router(Policy::RoundRobin, &[first.url(), second.url()], |_| {});
    let got = Client::connect(&all_busy).await.complete(PROMPT).await;
    assert_eq!((got.status, &got.body[..]), (503, r#"{"error":"full"}"#));
    assert_eq!((first.requests(), second.requests()), (1, 1));
}

#[tokio::test]
async fn an_answer_that_blames_the_request_is_the_clients_to_see_and_not_tried_again() {
    let engine = Engine::start(only_probes(document("400 Bad Request", r#"{"error":"no"}"#))).await;
    let other = Engine::start(well).await;
    let router = router(Policy::RoundRobin, &[engine.url(), other.url()], |_| {});
    let got = Client::connect(&router).await.complete(PROMPT).await;
    assert_eq!((got.status, &got.body[..], other.requests()), (400, r#"{"error":"no"}"#, 0));
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_at_the_engine_whatever_it_had_so_far() {
    let hang = vec![Step::Hang];
    let one_event = vec![stream_head(), event("a"), Step::Hang];
    for (steps, has_begun) in [(hang, false), (one_event, true)] {
        let engine = Engine::start(only_probes(steps)).await;
        let router = router(Policy::Lpwl, &[engine.url()], |_| {});
        let mut client = Client::connect(&router).await;
        let asking = client.begin("POST", "/v1/completions", &[], STREAM);
        let mut answer = None;
        tokio::select! {
            begun = asking => answer = Some(begun.unwrap()),
            () = eventually_async("the engine has the request", || engine.requests() == 1), if !has_begun => {}
        }
        if let Some(answer) = &mut answer {
            assert!(answer.body_mut().frame().await.unwrap().unwrap().is_data());
        }
        assert_eq!(answer.is_some(), has_begun);
        client.vanish();
        // Nothing else ends it: the limits for first bytes and for progress are longer.
        eventually_async("the engine works for nobody any more", || engine.left() == 1).await;
        let load = || router.stats().backends[0].clone();
        eventually_async("the request is counted", || load().cancelled == 1).await;
        assert_eq!((load().in_flight, load().pending_prefill_tokens), (0, 0));
    }
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_disconnected_in_time() {
    let mut steps = vec![stream_head()];
    steps.extend((0..400).map(|_| event(&"x".repeat(64 * 1024))));
    let engine = Engine::start(only_probes(steps)).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.client_stall = 200 * MS);
    let mut stream = tokio::net::TcpStream::connect(router.addr()).await.unwrap();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n{STREAM}",
        STREAM.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    eventually_async("the request is counted", || router.stats().backends[0].cancelled == 1).await;
    eventually_async("the engine sees that nobody waits", || engine.left() == 1).await;
}

#[tokio::test]
async fn wrong_requests_are_refused_with_the_right_code_and_never_reach_an_engine() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.max_body_bytes = 10_000);
    let mut client = Client::connect(&router).await;
    for (path, body, field, message) in [
        ("/v1/completions", r#"{"prompt":5}"#, "prompt", "found a number"),
        ("/v1/completions", r#"{"prompt":"a","stream":"yes"}"#, "stream", "found a string"),
        ("/v1/completions", r#"{"prompt":"a","model":1}"#, "model", "found a number"),
        ("/v1/chat/completions", r#"{"messages":{}}"#, "messages", "found an object"),
        ("/v1/chat/completions", r#"{"model":"m"}"#, "messages", "required"),
    ] {
        let got = Got::read(client.begin("POST", path, &[], body).await.unwrap()).await;
        let error = &got.json()["error"];
        assert_eq!((got.status, &error["param"]), (400, &serde_json::json!(field)));
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
    for body in ["", "{", "[]", "\u{0}\u{1}", r#"{"prompt":"a"} trailing"#] {
        assert_eq!(client.complete(body).await.status, 400, "{body:?}");
    }
    let deep = format!(r#"{{"prompt":{}}}"#, "[".repeat(9_000));
    assert_eq!(client.complete(&deep).await.status, 400);
    let got = client.begin("GET", "/v1/completions", &[], "").await.unwrap();
    assert_eq!(Got::read(got).await.status, 405);
    assert_eq!(client.get("/v1/nothing").await.status, 404);
    let long = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(10_000));
    assert_eq!(client.complete(&long).await.status, 413);
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_body_without_announced_length_is_limited_too() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.max_body_bytes = 10_000);
    let mut stream = tokio::net::TcpStream::connect(router.addr()).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let piece = format!("3e8\r\n{}\r\n", "x".repeat(1_000));
    for _ in 0..11 {
        stream.write_all(piece.as_bytes()).await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    let mut answer = vec![0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn a_body_that_does_not_come_is_408_in_time() {
    let engine = Engine::start(well).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.client_stall = 100 * MS);
    let mut stream = tokio::net::TcpStream::connect(router.addr()).await.unwrap();
    stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 50\r\n\r\n{")
        .await
        .unwrap();
    let mut answer = vec![0; 12];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(answer, b"HTTP/1.1 408");
}

#[tokio::test]
async fn more_requests_than_allowed_are_refused_and_the_others_served() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = Engine::start(held(gate.clone(), well)).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.max_in_flight = 4);
    for _ in 0..2 {
        // The second time, all places have been given back.
        let mut asking = take_places(&router, &[&engine], 4).await;
        for _ in 0..6 {
            assert_eq!(Client::connect(&router).await.complete(HELD).await.status, 503);
        }
        gate.add_permits(4);
        while let Some(status) = asking.join_next().await {
            assert_eq!(status.unwrap(), 200);
        }
    }
}

#[tokio::test]
async fn connections_that_an_engine_closes_between_requests_are_no_failures() {
    let closing = |path: &str, body: &str| {
        let mut steps = well(path, body);
        steps.extend([Step::Wait(20 * MS), Step::Close]);
        steps
    };
    let engine = Engine::start(closing).await;
    let router = router(Policy::Lpwl, &[engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    for pause in [0, 5, 15, 19, 20, 21, 25, 30, 40] {
        assert_eq!(client.complete(PROMPT).await.status, 200);
        tokio::time::sleep(pause * MS).await;
    }
    // What was under way at that moment is sent again, and counted as what it is.
    let backend = &router.stats().backends[0];
    let kept = backend.failures[Failure::ClosedKept as usize];
    assert_eq!((backend.failures.iter().sum::<u64>() - kept, backend.ejections), (0, 0));
}

#[tokio::test]
async fn after_a_storm_of_failures_nothing_is_left_behind() {
    let hang = vec![stream_head(), event("a"), Step::Hang];
    let gate = Arc::new(Semaphore::new(0));
    let engines = [
        Engine::start(held(gate.clone(), well)).await,
        Engine::start(held(gate.clone(), only_probes(vec![stream_head(), event("a"), Step::Reset]))).await,
        Engine::start(held(gate.clone(), only_probes(hang))).await,
        Engine::start(held(gate.clone(), only_probes(vec![Step::Close]))).await,
    ];
    let router = router(Policy::LeastLoaded, &engines.each_ref().map(Engine::url), |limits| {
        limits.progress = 100 * MS;
        limits.max_in_flight = 24;
    });
    let mut storm = Vec::new();
    for number in 0..24_u32 {
        let mut client = Client::connect(&router).await;
        storm.push(tokio::spawn(async move {
            for turn in 0..10_u32 {
                let patience = Duration::from_millis(u64::from((number * 7 + turn * 13) % 150));
                let asking = client.begin("POST", "/v1/completions", &[], STREAM);
                match tokio::time::timeout(patience, asking).await {
                    Ok(Ok(answer)) => drop(tokio::time::timeout(patience, Got::read(answer)).await),
                    Ok(Err(_)) => return,
                    Err(_) => return client.vanish(),
                }
            }
        }));
    }
    for client in storm {
        client.await.unwrap();
    }
    let idle = || {
        router.stats().backends.iter().all(|backend| {
            (backend.in_flight, backend.pending_prefill_tokens, backend.context_tokens) == (0, 0, 0)
        })
    };
    eventually_async("nothing is left of any request", idle).await;
    // All places are free again, and not one more.
    let mut asking = take_places(&router, &engines.each_ref(), 24).await;
    assert_eq!(Client::connect(&router).await.complete(HELD).await.status, 503);
    gate.add_permits(24);
    while let Some(status) = asking.join_next().await {
        assert_eq!(status.unwrap(), 200);
    }
}

#[tokio::test]
async fn a_request_that_may_have_run_is_sent_again_once_and_elsewhere() {
    let garbage = || vec![Step::Write("SSH-2.0-OpenSSH_9.2\r\n\r\n".into()), Step::Close];
    let head = || vec![stream_head(), Step::Reset];
    for steps in [vec![Step::Close], vec![Step::Reset], vec![Step::Hang], garbage(), head()] {
        for (attempts, wanted) in [(1, 1), (2, 2), (3, 2), (9, 2)] {
            let engines = engines(4, only_probes(steps.clone())).await;
            let router = router(Policy::RoundRobin, &urls(&engines), |limits| {
                limits.attempts = attempts;
                limits.first_byte = 200 * MS;
            });
            let got = Client::connect(&router).await.complete(STREAM).await;
            assert!(got.status >= 502, "{got:?}");
            let all = format!("{wanted} requests with {attempts} attempts");
            eventually_async(&all, || sent(&engines) == wanted).await;
            assert!(engines.iter().all(|engine| engine.requests() <= 1), "twice at one engine");
        }
    }
}

#[tokio::test]
async fn on_kept_connections_a_request_runs_no_more_often() {
    // Answers once on each connection, and takes the second request without a word.
    let script = |path: &str, body: &str| {
        if body.contains("job") { vec![Step::Wait(20 * MS), Step::Close] } else { well(path, body) }
    };
    const JOB: &str = r#"{"model":"m","prompt":"job"}"#;
    for (count, attempts, wanted) in [(3, 3, 2), (3, 1, 1), (1, 3, 2), (1, 1, 1)] {
        let engines = engines(count, script).await;
        let router = router(Policy::RoundRobin, &urls(&engines), |limits| limits.attempts = attempts);
        let mut client = Client::connect(&router).await;
        for _ in 0..2 * count {
            assert_eq!(client.complete(PROMPT).await.status, 200);
        }
        assert_eq!(client.complete(JOB).await.status, 502);
        let runs: usize = engines.iter().map(|engine| engine.requests_of(JOB)).sum();
        assert_eq!(runs, wanted, "{count} engines, {attempts} attempts");
        assert!(count == 1 || engines.iter().all(|engine| engine.requests_of(JOB) <= 1));
    }
}

#[tokio::test]
async fn a_request_that_never_arrived_is_sent_to_as_many_engines_as_allowed() {
    let (first, second, engine) = (Nobody::new(), Nobody::new(), Engine::start(well).await);
    let urls = [first.url(), second.url(), engine.url()];
    let router = router(Policy::RoundRobin, &urls, |limits| {
        limits.probe_interval = PATIENCE;
        limits.reprobe_interval = PATIENCE;
    });
    assert_eq!(Client::connect(&router).await.complete(PROMPT).await.status, 200);
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn statuses_for_which_another_engine_may_do_better_are_tried_elsewhere_once() {
    for status in ["404 Not Found", "429 Too Many Requests", "500 Oops", "502 Oops", "503 Oops", "504 Oops"] {
        let failing = || only_probes(document(status, r#"{"error":"first"}"#));
        let (first, engine) = (Engine::start(failing()).await, Engine::start(well).await);
        let one_fails = router(Policy::RoundRobin, &[first.url(), engine.url()], |_| {});
        let got = Client::connect(&one_fails).await.complete(STREAM).await;
        assert_eq!((got.status, got.backend()), (200, "e1"), "{status}");
        let engines = engines(4, failing()).await;
        let all_fail = router(Policy::RoundRobin, &urls(&engines), |_| {});
        let got = Client::connect(&all_fail).await.complete(PROMPT).await;
        assert_eq!(got.status.to_string(), status[..3]);
        assert_eq!((&got.body[..], sent(&engines)), (r#"{"error":"first"}"#, 2), "{status}");
        let alone = router(Policy::RoundRobin, &urls(&engines), |limits| limits.attempts = 1);
        assert_eq!(Client::connect(&alone).await.complete(PROMPT).await.status.to_string(), status[..3]);
        assert_eq!(sent(&engines), 3, "one attempt is one");
    }
}

#[tokio::test]
async fn an_engines_own_words_are_kept_when_no_other_says_more() {
    let busy = || only_probes(document("429 Too Many Requests", r#"{"error":"later"}"#));
    let seconds =
        [only_probes(vec![Step::Close]), only_probes(document("404 Not Found", r#"{"error":"what model"}"#))];
    for second in seconds {
        let (first, second) = (Engine::start(busy()).await, Engine::start(second).await);
        let router = router(Policy::RoundRobin, &[first.url(), second.url()], |_| {});
        let got = Client::connect(&router).await.complete(PROMPT).await;
        assert_eq!((got.status, got.backend(), &got.body[..]), (429, "e0", r#"{"error":"later"}"#));
        assert_eq!((first.requests(), second.requests()), (1, 1));
    }
}

#[tokio::test]
async fn a_connection_that_the_engine_may_close_any_moment_is_not_used_again() {
    for (keep, connections) in [(PATIENCE, 1), (MS, 2)] {
        let engine = Engine::start(well).await;
        let router = router(Policy::Lpwl, &[engine.url()], |limits| limits.keep_idle = keep);
        let mut client = Client::connect(&router).await;
        for _ in 0..2 {
            assert_eq!(client.complete(PROMPT).await.status, 200);
            tokio::time::sleep(10 * MS).await;
        }
        // The router's threads keep connections of their own; the client has one and so one thread.
        assert_eq!(engine.seen.lock().unwrap().connections, connections);
    }
}
