//! A calibration of an emulated engine, whose steps come from the step model: it finds the model
//! again, and refuses an engine that others use.
#![allow(clippy::unwrap_used)]

use forebay_calibrate::{CalibrateError, Calibration, Given, Header, Source, calibrate};
use forebay_emulator::{Engine, EngineConfig, EngineHandle, namespace};
use forebay_steps::Profile;
use std::time::Duration;

/// Twice as fast as the emulated GPU, and still so slow that a busy machine disturbs it little.
const RATIO: f64 = 2.0;

/// An engine with a short context, so that a calibration takes seconds.
fn profile() -> Profile {
    let mut profile = Profile::shipped("h20-qwen3-coder-30b-a3b").unwrap();
    profile.model.max_model_tokens = 8_400;
    profile.memory.pool_tokens = 65_536;
    profile.scheduler.max_batched_tokens = 2_048;
    profile.scheduler.max_seqs = 8;
    profile
}

async fn spawn(profile: Profile) -> (EngineHandle, String) {
    let config =
        EngineConfig { clock_ratio: RATIO, ..EngineConfig::new(profile.clone(), namespace(&profile).key()) };
    let engine = Engine::spawn(config, None).await.unwrap();
    let target = format!("http://{}", engine.address());
    (engine, target)
}

async fn calibrated(target: &str) -> Result<Calibration, CalibrateError> {
    let given = Given { max_batched_tokens: Some(2_048), max_seqs: Some(8), ..Given::default() };
    let like = Profile::shipped("h200-llama-3.1-8b").unwrap();
    calibrate(target, &given, &like, Duration::from_secs(30), |line| println!("{line}")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_profile_of_an_emulated_engine_is_found_again() {
    let wanted = profile();
    let (_engine, target) = spawn(wanted.clone()).await;
    let calibration = calibrated(&target).await.unwrap();
    println!("{}", calibration.table());
    calibration.check().unwrap();

    let facts = &calibration.facts;
    assert_eq!((facts.model.as_str(), facts.max_model_tokens.value), (wanted.model.name.as_str(), 8_400));
    assert_eq!((facts.pool_tokens.value, facts.pool_tokens.source), (65_536, Source::Engine));
    assert_eq!((facts.max_seqs.value, facts.max_seqs.source), (8, Source::Flag));

    // The text is a profile, and what it says is what was emulated. The sockets and a busy machine
    // take their part, most of a short time.
    let header =
        Header { name: "found".into(), target, version: "0".into(), date: "2026-01-01T00:00:00Z".into() };
    let like = Profile::shipped("h200-llama-3.1-8b").unwrap();
    let text = calibration.profile_text(&header, &like).unwrap();
    println!("{text}");
    let found = Profile::from_toml(&text).unwrap();
    let close = |name: &str, found: f64, wanted: f64, share: f64| {
        let wanted = wanted / RATIO;
        assert!((found / wanted - 1.0).abs() <= share, "{name}: {found} for {wanted}");
    };
    let (step, emulated) = (&found.step, &wanted.step);
    close("floor", step.floor_graph_us, emulated.floor_eager_us, 0.1);
    close("linear", step.linear_us_per_token, emulated.linear_us_per_token, 0.1);
    close("attention", step.attention_ns_per_pair, emulated.attention_ns_per_pair, 0.3);
    close("api", found.api.us_per_request, wanted.api.us_per_request, 0.5);
    assert_eq!(found.memory.pool_tokens, 65_536);
    assert!(text.contains("The engine does not say these three: those of h200-"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_others_use_is_refused() {
    let (engine, target) = spawn(profile()).await;
    let address = engine.address();
    let other = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let body = r#"{"prompt": [1, 2, 3], "max_tokens": 2000}"#;
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let refused = calibrated(&target).await.unwrap_err();
    assert!(matches!(refused, CalibrateError::Busy { running: 1, waiting: 0 }), "{refused}");
    drop(engine);
    other.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_context_is_too_short_is_refused_with_its_length() {
    let mut short = profile();
    short.model.max_model_tokens = 400;
    let (_engine, target) = spawn(short).await;
    let refused = calibrated(&target).await.unwrap_err().to_string();
    assert_eq!(refused, "the engine takes 400 tokens; a calibration needs at least 512");
}
