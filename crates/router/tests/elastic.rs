//! What `elastic` does to requests that are not handed over: nothing.

mod common;

use common::*;
use forebay_router::elastic::KvNetwork;
use forebay_router::{HandOverConfig, Policy, Protocol, RouterHandle};
use forebay_steps::Profile;

fn elastic(urls: &[String]) -> RouterHandle {
    let network = KvNetwork::new(&Profile::shipped(Profile::DEFAULT).expect("shipped"), 25.0);
    configured(Policy::Elastic, urls, |config| {
        config.hand_over = Some(HandOverConfig { protocol: Protocol::Forebay, network });
    })
}

#[tokio::test]
async fn where_nothing_is_handed_over_engines_see_what_they_see_without_it() {
    let mut seen = Vec::new();
    for is_elastic in [false, true] {
        let engines = [Engine::start(well).await, Engine::start(well).await];
        let urls = engines.each_ref().map(Engine::url);
        let router = if is_elastic { elastic(&urls) } else { router(Policy::AddedLatency, &urls, |_| {}) };
        let mut client = Client::connect(&router).await;
        let mut answers = Vec::new();
        for number in 0..6 {
            for stream in [false, true] {
                let body = format!(r#"{{"model":"m","prompt":"{number}","stream":{stream},"max_tokens":3}}"#);
                let got = client.complete(&body).await;
                assert!(!got.headers.contains_key("x-forebay-prefill"));
                answers.push((got.backend().to_owned(), got.body));
            }
        }
        let without_host = |head: &String| {
            head.lines().filter(|line| !line.starts_with("host:")).collect::<Vec<_>>().join("\n")
        };
        let requests = engines.each_ref().map(|engine| {
            let seen = engine.seen.lock().unwrap();
            (seen.bodies.clone(), seen.heads.iter().map(without_host).collect::<Vec<_>>())
        });
        seen.push((answers, requests));
    }
    assert_eq!(seen[0], seen[1]);
}

#[tokio::test]
async fn a_decision_says_what_else_could_have_been_done() {
    let engines = [Engine::start(well).await, Engine::start(well).await];
    let router = elastic(&engines.each_ref().map(Engine::url));
    let mut client = Client::connect(&router).await;
    client.complete(PROMPT).await;
    let decisions = client.get("/debug/decisions").await.json();
    let decision = &decisions[0];
    assert_eq!((&decision["policy"], &decision["hand_over"]), (&"elastic".into(), &serde_json::Value::Null));
    let options = decision["options"].as_array().unwrap();
    assert_eq!((options.len(), &options[0]["backend"]), (2, &decision["backend"]));
    assert_ne!(options[1]["prefill_backend"], options[1]["backend"]);
    assert!(options[1]["added_s"].as_f64().unwrap() > options[0]["added_s"].as_f64().unwrap());
}
