//! The decision log of a real router: a line for each decision that has ended, which other policies
//! can decide again, and no request that waits for it.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use forebay_router::{DecisionLogPlace, Line, Policy, Replay, RouterConfig, RouterHandle};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A router of two engines that logs to a file.
fn logging(policy: Policy, engines: &[Engine; 2], path: &Path) -> RouterHandle {
    let place = DecisionLogPlace { path: path.to_owned(), bytes: 1 << 20 };
    let log = |config: &mut RouterConfig| config.decision_log = Some(place);
    configured(policy, &engines.each_ref().map(Engine::url), log)
}

fn lines(path: &PathBuf) -> Vec<Line> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(!text.contains("Once upon"), "{text}");
    text.lines().map(|line| Line::read(line.as_bytes()).unwrap()).collect()
}

#[tokio::test]
async fn each_decision_that_has_ended_is_a_line_that_can_be_decided_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("decisions.jsonl");
    let engines = [Engine::start(well).await, Engine::start(well).await];
    let router = logging(Policy::Lpwl, &engines, &path);
    let mut client = Client::connect(&router).await;
    for _ in 0..5 {
        client.complete_as("s1", STREAM).await;
    }
    drop(client);
    router.shutdown().await;

    let lines = lines(&path);
    let [Line::Router(router), decisions @ ..] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!((router.policy, decisions.len()), (Policy::Lpwl, 5));
    let mut replay = Replay::new(&[Policy::Lpwl, Policy::RoundRobin]);
    for (number, line) in decisions.iter().enumerate() {
        let Line::Decision(decision) = line else { panic!("{line:?}") };
        let (record, outcome) = (&decision.record, decision.record.outcome.unwrap());
        assert_eq!((record.number, record.policy, record.attempt), (number as u64, Policy::Lpwl, 1));
        assert_eq!(record.candidates.len(), 2);
        assert!(record.candidates.iter().all(|candidate| candidate.score.is_some()));
        assert_eq!((outcome.status, outcome.prompt_tokens), (Some(200), Some(10)));
        assert_eq!((outcome.cached_tokens, outcome.completion_tokens), (Some(4), Some(1)));
        assert!(outcome.first_byte_us.unwrap() <= decision.total_us && record.predicted.first_byte_us > 0);
        assert_eq!(record.home.is_some(), number > 0);
        replay.add(&router.engine_model, decision).unwrap();
    }
    let different: Vec<u64> = replay.replayed().map(|replayed| replayed.different).collect();
    assert_eq!(different[..2], [0, 0], "the policy of the log decides as it did");
}

#[tokio::test]
async fn a_request_that_is_tried_again_has_a_line_for_each_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("decisions.jsonl");
    let broken = only_probes(document("503 Service Unavailable", "{}"));
    let engines = [Engine::start(broken).await, Engine::start(well).await];
    let router = logging(Policy::RoundRobin, &engines, &path);
    let mut client = Client::connect(&router).await;
    assert_eq!(client.complete(PROMPT).await.backend(), "e1");
    drop(client);
    router.shutdown().await;
    let lines = lines(&path);
    let attempts = lines.iter().filter_map(|line| match line {
        Line::Decision(decision) => Some(&decision.record),
        Line::Router(_) => None,
    });
    let attempts: Vec<_> = attempts.map(|record| (record.attempt, &record.backend[..])).collect();
    assert_eq!(attempts, [(1, "e0"), (2, "e1")]);
    let Line::Decision(second) = &lines[2] else { panic!() };
    assert!(!second.record.candidates[0].known.eligible, "it was tried");
}

#[tokio::test]
async fn a_full_disk_stops_no_request_and_is_counted() {
    let engines = [Engine::start(well).await, Engine::start(well).await];
    let router = logging(Policy::Lpwl, &engines, Path::new("/dev/full"));
    let mut client = Client::connect(&router).await;
    for _ in 0..3 {
        assert_eq!(client.complete(PROMPT).await.status, 200);
    }
    let lost = "forebay_route_decision_log_dropped_total 3\n";
    for _ in 0..100 {
        if client.get("/metrics").await.body.contains(lost) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{}", client.get("/metrics").await.body);
}
