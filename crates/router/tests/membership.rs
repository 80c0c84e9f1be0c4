//! Engines that come and go while requests are under way, over real sockets.

mod common;

use common::*;
use forebay_router::{AdminToken, Backend, Policy, RouterConfig, RouterHandle};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use testkit::eventually_async;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const TOKEN: [(&str, &str); 1] = [("authorization", "Bearer secret")];

fn with_token(config: &mut RouterConfig) {
    config.admin_token = Some(AdminToken::new(b"secret".to_vec()));
}

/// A request to the admin API.
async fn admin(router: &RouterHandle, method: &str, path: &str, body: &str) -> Got {
    Client::connect(router).await.ask(method, path, &TOKEN, body).await
}

async fn put(router: &RouterHandle, name: &str, engine: &Engine) -> Got {
    let body = format!(r#"{{"url":"{}"}}"#, engine.url());
    admin(router, "PUT", &format!("/admin/engines/{name}"), &body).await
}

fn names(router: &RouterHandle) -> Vec<String> {
    router.stats().backends.into_iter().map(|backend| backend.name).collect()
}

fn in_flight(router: &RouterHandle, name: &str) -> u32 {
    let backends = router.stats().backends;
    backends.iter().find(|backend| backend.name == name).map_or(0, |backend| backend.in_flight)
}

/// Answers after a moment, so that requests are under way at any time.
fn slow(path: &str, body: &str) -> Vec<Step> {
    let mut steps = if path.starts_with("/v1/c") { vec![Step::Wait(3 * MS)] } else { vec![] };
    steps.extend(well(path, body));
    steps
}

#[tokio::test]
async fn engines_come_drain_and_go_under_load_and_no_request_is_lost_or_misled() {
    let engines = [Engine::start(slow).await, Engine::start(slow).await, Engine::start(slow).await];
    let urls = [engines[0].url(), engines[1].url()];
    let router = configured(Policy::LeastLoaded, &urls, with_token);
    let is_over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for _ in 0..6 {
        let (mut client, is_over) = (Client::connect(&router).await, is_over.clone());
        clients.spawn(async move {
            let mut answers = 0;
            while !is_over.load(Ordering::Relaxed) {
                let got = client.complete(STREAM).await;
                assert!(got.status == 200 && got.body.ends_with("data: [DONE]\n\n"), "{}", got.body);
                answers += 1;
            }
            answers
        });
    }
    assert_eq!(put(&router, "e2", &engines[2]).await.status, 200);
    eventually_async("the new engine is used", || engines[2].requests() > 10).await;
    for round in 0..5 {
        let got = admin(&router, "POST", "/admin/engines/e0/drain", "").await;
        assert_eq!((got.status, got.json()[0]["state"].as_str()), (200, Some("draining")));
        eventually_async("it finishes what it has", || in_flight(&router, "e0") == 0).await;
        let (before, others) = (engines[0].requests(), engines[1].requests());
        eventually_async("others go on", || engines[1].requests() > others + 20).await;
        assert_eq!(engines[0].requests(), before, "round {round}: a draining engine got a request");
        assert_eq!(admin(&router, "DELETE", "/admin/engines/e0", "").await.status, 200);
        assert_eq!(names(&router), ["e1", "e2"]);
        assert_eq!(put(&router, "e0", &engines[0]).await.status, 200);
        eventually_async("it is used again", || engines[0].requests() > before).await;
        assert_eq!(admin(&router, "DELETE", "/admin/engines/e0", "").await.status, 200);
        eventually_async("it leaves", || names(&router) == ["e1", "e2"]).await;
        let (before, others) = (engines[0].requests(), engines[1].requests());
        eventually_async("others go on", || engines[1].requests() > others + 20).await;
        assert_eq!(engines[0].requests(), before, "round {round}: a removed engine got a request");
        assert_eq!(put(&router, "e0", &engines[0]).await.status, 200);
    }
    is_over.store(true, Ordering::Relaxed);
    let answers: usize = clients.join_all().await.into_iter().sum();
    assert_eq!(sent(&engines), answers, "each request ran once");
}

#[tokio::test]
async fn a_removed_engine_finishes_its_streams_and_then_nobody_asks_it_for_anything() {
    let gate = Arc::new(Semaphore::new(0));
    let held_back = gate.clone();
    let engine = Engine::start(move |path: &str, body: &str| match path {
        "/v1/completions" => vec![stream_head(), event("a"), Step::Gate(held_back.clone()), stream_end()],
        _ => well(path, body),
    });
    let engine = engine.await;
    let router = configured(Policy::Lpwl, &[engine.url()], with_token);
    let mut client = Client::connect(&router).await;
    let asking = tokio::spawn(async move { client.complete(STREAM).await });
    eventually_async("the stream has begun", || in_flight(&router, "e0") == 1).await;
    eventually_async("the engine has it", || engine.requests() == 1).await;
    let got = admin(&router, "DELETE", "/admin/engines/e0", "").await;
    assert_eq!((got.status, got.json()[0]["state"].as_str()), (200, Some("leaving")));
    assert_eq!(Client::connect(&router).await.complete(PROMPT).await.status, 503);
    assert_eq!(put(&router, "e0", &Engine::start(well).await).await.status, 409, "its name is taken");
    gate.add_permits(1);
    let got = asking.await.unwrap();
    assert!(got.status == 200 && got.body.ends_with("data: [DONE]\n\n"), "{}", got.body);
    eventually_async("it is gone", || names(&router).is_empty()).await;
    drop(engine);
    assert_eq!(put(&router, "e0", &Engine::start(well).await).await.status, 200);
}

#[tokio::test]
async fn only_the_token_opens_the_admin_api_and_mistakes_are_named() {
    let engine = Engine::start(well).await;
    let router = configured(Policy::Lpwl, &[engine.url()], with_token);
    let mut client = Client::connect(&router).await;
    let stranger = client.get("/admin/engines").await;
    assert_eq!((stranger.status, &stranger.headers["www-authenticate"]), (401, &"Bearer".parse().unwrap()));
    for (path, allowed) in [("/admin/engines", "GET"), ("/admin/engines/e0", "PUT, DELETE")] {
        let got = client.ask("OPTIONS", path, &[], "").await;
        assert_eq!(
            (got.status, got.headers["allow"].to_str().unwrap()),
            (204, allowed),
            "a browser asks first"
        );
    }
    assert_eq!(admin(&router, "GET", "/admin/engines", "").await.json()[0]["url"], engine.url());
    for (method, path, body, status, message) in [
        ("POST", "/admin/engines/e9/drain", "", 404, "no engine is named 'e9'"),
        ("DELETE", "/admin/engines/e9", "", 404, "no engine is named 'e9'"),
        ("PUT", "/admin/engines/e1", "{}", 400, "missing field `url`"),
        ("PUT", "/admin/engines/e1", r#"{"url":"h:1"}"#, 400, "is not of the form http://HOST:PORT"),
        ("PUT", "/admin/engines/e%201", r#"{"url":"http://h:1"}"#, 400, "backend name"),
        ("PUT", "/admin/engines/e1", r#"{"url":"http://h:1","drain":1}"#, 400, "unknown field `drain`"),
        ("PUT", "/admin/engines/e0", r#"{"url":"http://h:1"}"#, 409, "there already"),
        ("GET", "/admin/engines/e0", "", 405, "takes PUT, DELETE"),
    ] {
        let got = admin(&router, method, path, body).await;
        assert!(
            got.status == status && got.body.contains(message),
            "{method} {path}: {} {}",
            got.status,
            got.body
        );
    }
    assert_eq!(names(&router), ["e0"]);
    let closed = configured(Policy::Lpwl, &[engine.url()], |_| {});
    assert_eq!(admin(&closed, "GET", "/admin/engines", "").await.status, 403);
}

fn list(engines: &[(&str, &Engine)]) -> String {
    let entry = |(name, engine): &(&str, &Engine)| {
        format!("[[engines]]\nname = \"{name}\"\nurl = \"{}\"\n", engine.url())
    };
    engines.iter().map(entry).collect()
}

#[tokio::test]
async fn a_file_says_which_engines_there_are_and_a_broken_one_changes_nothing() {
    let (a, b) = (Engine::start(well).await, Engine::start(well).await);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("engines.toml");
    std::fs::write(&path, list(&[("a", &a)])).unwrap();
    let router = configured(Policy::Lpwl, &[], |config| config.backends_file = Some(path.clone()));
    eventually_async("the first engine is there", || names(&router) == ["a"]).await;
    assert_eq!(Client::connect(&router).await.complete(PROMPT).await.backend(), "a");
    std::fs::write(&path, "[[engines]]\nname = ").unwrap();
    tokio::time::sleep(2500 * MS).await;
    assert_eq!(names(&router), ["a"]);
    std::fs::write(&path, list(&[("b", &b)])).unwrap();
    eventually_async("the other has taken its place", || names(&router) == ["b"]).await;
    assert_eq!(Client::connect(&router).await.complete(PROMPT).await.backend(), "b");
}

#[tokio::test]
async fn each_address_of_a_name_is_an_engine() {
    let engine = Engine::start(well).await;
    let url = engine.url().replace("127.0.0.1", "localhost");
    let named = Backend::new("pods", url);
    let router = configured(Policy::Lpwl, &[], |config| config.dns_backends = vec![named]);
    let is_there = || names(&router).contains(&"pods-127.0.0.1".to_owned());
    eventually_async("the address is an engine", is_there).await;
    assert_eq!(Client::connect(&router).await.complete(PROMPT).await.backend(), "pods-127.0.0.1");
}
