//! What goes wrong with requests is told in the log, in one line that names the engine. The
//! router's threads write to the log of the whole process, so there is one test.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_router::{Limits, Policy};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use testkit::eventually_async;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn lines(&self, parts: &[&str]) -> usize {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count()
    }
}

#[tokio::test]
async fn each_fault_of_an_engine_and_each_step_of_the_end_is_one_line_that_names_it() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let is_ill = Arc::new(AtomicBool::new(false));
    let ill = is_ill.clone();
    let faulty = Engine::start(move |path, body| match path {
        "/health" if ill.load(Ordering::Relaxed) => vec![Step::Reset],
        "/v1/completions" if body.contains("break") => vec![stream_head(), event("a"), Step::Reset],
        "/v1/completions" => vec![Step::Reset],
        _ => well(path, body),
    })
    .await;
    let other = Engine::start(well).await;
    let urls = [faulty.url(), other.url()];
    let quick = |limits: &mut Limits| {
        limits.probe_interval = 20 * MS;
        limits.reprobe_interval = 20 * MS;
    };
    let router = router(Policy::RoundRobin, &urls, |limits| {
        quick(limits);
        limits.eject_after = 1000;
    });
    let mut client = Client::connect(&router).await;
    for _ in 0..8 {
        assert_eq!(client.complete(PROMPT).await.status, 200);
    }
    assert_eq!(log.lines(&["WARN", "request sent to another engine", "engine=\"e0\"", "to=\"e1\""]), 1);
    for _ in 0..4 {
        client = Client::connect(&router).await;
        client.complete(&STREAM.replace("Once", "break")).await;
    }
    assert_eq!(log.lines(&["WARN", "answer broke off", "engine=\"e0\"", "reason=\"broken-off\""]), 1);
    router.shutdown().await;
    let router = common::router(Policy::RoundRobin, &urls[..1], quick);
    is_ill.store(true, Ordering::Relaxed);
    eventually_async("the engine is ejected", || !router.stats().backends[0].up).await;
    assert_eq!(Client::connect(&router).await.complete(PROMPT).await.status, 503);
    is_ill.store(false, Ordering::Relaxed);
    eventually_async("the engine is back", || router.stats().backends[0].up).await;
    router.shutdown().await;
    let silent = Engine::start(|path, body| match path {
        "/v1/completions" => document(
            "200 OK",
            r#"{"usage":{"prompt_tokens":9000,"completion_tokens":1,"total_tokens":9001}}"#,
        ),
        _ => well(path, body),
    })
    .await;
    let router = common::router(Policy::Lpwl, &[silent.url()], quick);
    for _ in 0..20 {
        let long = PROMPT.replace("Once", &"Once ".repeat(8_000));
        assert_eq!(Client::connect(&router).await.complete(&long).await.status, 200);
    }
    router.shutdown().await;
    for line in [
        &["WARN", "engine reports no cached tokens", "engine=\"e0\"", "prompts=8"][..],
        &["WARN", "engine ejected", "engine=\"e0\"", "reason=\"silent\""],
        &["ERROR", "no engine is left", "last=\"e0\""],
        &["WARN", "no engine answered a request", "reason=\"no-engine\""],
        &["INFO", "engine is used again", "engine=\"e0\""],
    ] {
        assert_eq!(log.lines(line), 1, "{line:?}");
    }
    for line in ["shutdown begins", "drain begins", "drain ends"] {
        assert_eq!(log.lines(&["INFO", line]), 3, "{line}");
    }
}
