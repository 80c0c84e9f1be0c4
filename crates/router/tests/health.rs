//! Which engines are used: real sockets, engines that are ill by script.

mod common;

use common::*;
use forebay_router::{Failure, Policy};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use testkit::eventually_async;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

#[tokio::test]
async fn an_engine_that_fails_at_once_does_not_attract_the_traffic() {
    for status in ["500 Oops", "429 Too Many Requests", "503 Busy", "404 Not Found"] {
        for policy in [Policy::Lpwl, Policy::LeastLoaded, Policy::SessionSticky] {
            let failing = Engine::start(only_probes(document(status, "{}"))).await;
            let slow = |path: &str, body: &str| {
                let mut steps = if path == "/health" { vec![] } else { vec![Step::Wait(5 * MS)] };
                steps.extend(well(path, body));
                steps
            };
            let engine = Engine::start(slow).await;
            let router = router(policy, &[failing.url(), engine.url()], |_| {});
            let mut sessions = JoinSet::new();
            for session in 0..4 {
                let mut client = Client::connect(&router).await;
                sessions.spawn(async move {
                    for turn in 1..11 {
                        let text = format!("session {session} ").repeat(100 * turn);
                        let body = format!(r#"{{"prompt":"{text}"}}"#);
                        let got = client.complete_as(&format!("s{session}"), &body).await;
                        assert_eq!((got.status, got.backend()), (200, "e1"));
                    }
                });
            }
            while let Some(session) = sessions.join_next().await {
                session.unwrap();
            }
            // A model that an engine does not serve says nothing of the engine, which stays in use.
            let limit = if status.starts_with("404") { 40 } else { 20 };
            assert!(failing.requests() <= limit, "{policy} {status}: {} of 40", failing.requests());
            assert_eq!(router.stats().backends[0].index_chunks, 0);
        }
    }
}

#[tokio::test]
async fn an_engine_that_is_dead_behind_its_server_is_ejected_while_it_gets_traffic() {
    let is_dead = Arc::new(AtomicBool::new(false));
    let flag = is_dead.clone();
    let dying = move |path: &str, body: &str| {
        if !flag.load(Ordering::Relaxed) {
            return well(path, body);
        }
        let status = if path == "/health" { "503 Service Unavailable" } else { "500 Internal Server Error" };
        document(status, "{}")
    };
    let (dead, engine) = (Engine::start(dying).await, Engine::start(well).await);
    let router = router(Policy::RoundRobin, &[dead.url(), engine.url()], |_| {});
    let mut client = Client::connect(&router).await;
    for _ in 0..4 {
        assert_eq!(client.complete(PROMPT).await.status, 200);
    }
    is_dead.store(true, Ordering::Relaxed);
    for _ in 0..40 {
        let got = client.complete(PROMPT).await;
        assert_eq!((got.status, got.backend()), (200, "e1"));
    }
    assert!(!router.stats().backends[0].up);
    assert!(failures(&router, 0, Failure::ServerError) <= 3);
    is_dead.store(false, Ordering::Relaxed);
    eventually_async("it is back once it is well", || router.stats().backends[0].up).await;
}

#[tokio::test]
async fn probes_that_fail_eject_although_requests_are_answered() {
    let deaf = |path: &str, body: &str| {
        if path == "/health" { document("503 Service Unavailable", "") } else { well(path, body) }
    };
    let (deaf, engine) = (Engine::start(deaf).await, Engine::start(well).await);
    let router = router(Policy::RoundRobin, &[deaf.url(), engine.url()], |limits| {
        limits.reprobe_interval = 20 * MS;
    });
    let mut client = Client::connect(&router).await;
    let start = Instant::now();
    while router.stats().backends[0].up {
        assert_eq!(client.complete(PROMPT).await.status, 200);
        assert!(start.elapsed() < PATIENCE, "answers cleared the failed probes");
    }
}

#[tokio::test]
async fn long_answers_do_not_eject_healthy_engines_nor_fail_bystanders() {
    let gate = Arc::new(Semaphore::new(0));
    let engines = engines(2, held(gate.clone(), well)).await;
    let router = router(Policy::RoundRobin, &urls(&engines), |limits| {
        limits.first_byte = 50 * MS;
        limits.answer = PATIENCE;
        limits.probe_interval = 20 * MS;
    });
    let mut asking = JoinSet::new();
    for _ in 0..8 {
        let mut client = Client::connect(&router).await;
        asking.spawn(async move { client.complete(HELD).await.status });
    }
    eventually_async("all requests are sent", || sent(&engines) == 8).await;
    // Much longer than the limit for streams, while others are served.
    let mut client = Client::connect(&router).await;
    for _ in 0..20 {
        assert_eq!(client.complete(PROMPT).await.status, 200);
        tokio::time::sleep(10 * MS).await;
    }
    gate.add_permits(8);
    while let Some(status) = asking.join_next().await {
        assert_eq!(status.unwrap(), 200);
    }
    let stats = router.stats();
    assert_eq!(stats.backends.iter().map(|backend| backend.ejections).sum::<u64>(), 0);
    assert_eq!(sent(&engines), 28, "none was sent twice");
}

#[tokio::test]
async fn streams_that_begin_late_do_not_eject_an_engine_that_answers_probes() {
    let engines = engines(2, only_probes(vec![Step::Hang])).await;
    let router = router(Policy::RoundRobin, &urls(&engines), |limits| {
        limits.first_byte = 30 * MS;
        limits.probe_interval = 20 * MS;
    });
    let mut client = Client::connect(&router).await;
    for _ in 0..6 {
        assert_eq!(client.complete(STREAM).await.status, 504);
    }
    let stats = router.stats();
    assert!(stats.backends.iter().all(|backend| backend.up && backend.ejections == 0), "{stats:?}");
}

#[tokio::test]
async fn an_answer_without_a_stream_has_a_limit_of_its_own_and_is_not_asked_for_twice() {
    let engines = engines(2, only_probes(vec![Step::Hang])).await;
    let router = router(Policy::RoundRobin, &urls(&engines), |limits| limits.answer = 100 * MS);
    assert_eq!(Client::connect(&router).await.complete(PROMPT).await.status, 504);
    assert_eq!(sent(&engines), 1);
}

#[tokio::test]
async fn waiting_requests_are_not_failed_when_no_other_engine_is_up() {
    let gate = Arc::new(Semaphore::new(0));
    let silent = Arc::new(AtomicBool::new(false));
    let flag = silent.clone();
    let answering = held(gate.clone(), well);
    let script = move |path: &str, body: &str| {
        let is_silent = path == "/health" && flag.load(Ordering::Relaxed);
        if is_silent { vec![Step::Hang] } else { answering(path, body) }
    };
    let engine = Engine::start(script).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| {
        limits.probe_interval = 20 * MS;
        limits.reprobe_interval = 20 * MS;
        limits.probe_timeout = 100 * MS;
    });
    let mut client = Client::connect(&router).await;
    let asking = tokio::spawn(async move { client.complete(HELD).await.status });
    eventually_async("the engine has the request", || engine.requests() == 1).await;
    silent.store(true, Ordering::Relaxed);
    eventually_async("the engine is seen to be down", || !router.stats().backends[0].up).await;
    gate.add_permits(1);
    assert_eq!(asking.await.unwrap(), 200);
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn requests_under_way_at_an_engine_that_drains_are_not_sent_elsewhere() {
    // Its health says 503 and it takes no connections any more, but what it has it answers.
    let gate = Arc::new(Semaphore::new(0));
    let draining = Arc::new(AtomicBool::new(false));
    let flag = draining.clone();
    let answering = held(gate.clone(), well);
    let script = move |path: &str, body: &str| {
        if path == "/health" && flag.load(Ordering::Relaxed) {
            return document("503 Service Unavailable", "");
        }
        answering(path, body)
    };
    let (leaving, engine) = (Engine::start(script).await, Engine::start(well).await);
    let router = router(Policy::RoundRobin, &[leaving.url(), engine.url()], |limits| {
        limits.probe_interval = 20 * MS;
        limits.reprobe_interval = 20 * MS;
    });
    let mut client = Client::connect(&router).await;
    let asking = tokio::spawn(async move { client.complete(HELD).await });
    eventually_async("the engine has the request", || leaving.requests() == 1).await;
    draining.store(true, Ordering::Relaxed);
    eventually_async("the engine is seen to be down", || !router.stats().backends[0].up).await;
    tokio::time::sleep(50 * MS).await;
    gate.add_permits(1);
    let got = asking.await.unwrap();
    assert_eq!((got.status, got.backend(), engine.requests()), (200, "e0", 0));
}

#[tokio::test]
async fn requests_that_fail_take_no_engine_from_those_who_have_no_other() {
    let script = |path: &str, body: &str| {
        if body.contains("bad") { document("500 Oops", "{}") } else { well(path, body) }
    };
    let engines = engines(2, script).await;
    let router = router(Policy::RoundRobin, &urls(&engines), |_| {});
    let mut client = Client::connect(&router).await;
    for _ in 0..10 {
        assert_eq!(client.complete(r#"{"prompt":"bad"}"#).await.status, 500);
    }
    assert_eq!(client.complete(PROMPT).await.status, 200);
    assert_eq!(client.get("/health").await.status, 200);
}

#[tokio::test]
async fn probes_ask_for_the_path_that_was_given() {
    let script = |path: &str, body: &str| match path {
        "/ready?deep=1" => document("503 Service Unavailable", ""),
        _ => well(path, body),
    };
    let engine = Engine::start(script).await;
    let router = router(Policy::Lpwl, &[engine.url()], |limits| {
        limits.probe_path = "/ready?deep=1".into();
        limits.reprobe_interval = 20 * MS;
        limits.eject_after = 2;
    });
    eventually_async("the engine is seen to be down", || !router.stats().backends[0].up).await;
}

#[tokio::test]
async fn a_restarted_backend_gets_traffic_again() {
    let (first, second) = (Engine::start(well).await, Engine::start(well).await);
    let router = router(Policy::RoundRobin, &[first.url(), second.url()], |_| {});
    let mut client = Client::connect(&router).await;
    for _ in 0..4 {
        assert_eq!(client.complete(PROMPT).await.status, 200);
    }
    let address = first.address;
    drop(first);
    for _ in 0..10 {
        assert_eq!(client.complete(PROMPT).await.status, 200, "no client notices that an engine has gone");
    }
    eventually_async("the engine is seen to be down", || !router.stats().backends[0].up).await;
    let restarted = Engine::start_at(address, well).await;
    let start = Instant::now();
    while restarted.requests() == 0 {
        assert_eq!(client.complete(PROMPT).await.status, 200);
        tokio::time::sleep(5 * MS).await;
        assert!(start.elapsed() < PATIENCE, "no traffic yet");
    }
}
