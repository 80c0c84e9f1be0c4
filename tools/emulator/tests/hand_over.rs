//! Hand-overs between two emulated engines: the decoder reads the prefiller's blocks, and what it
//! says is right.

mod common;

use common::{Client, ids, oracle, spawn, tokens};
use forebay_emulator::EngineHandle;
use forebay_emulator::hand_over::Fault;
use http::StatusCode;
use serde_json::{Value, json};

/// The answer of an engine that is asked to prefill.
async fn prefill(client: &Client, prompt: &[u32], more: Value) -> Value {
    let mut params = json!({"do_remote_decode": true, "remote_block_ids": null});
    params.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    let body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params});
    let (status, answer) = client.post("/v1/completions", body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    answer
}

/// What an engine says with these parameters, and how many tokens it did not compute.
async fn decode(client: &Client, prompt: &[u32], params: &Value) -> (Vec<u32>, u64) {
    let body = json!({
        "prompt": prompt, "max_tokens": 9, "return_token_ids": true, "kv_transfer_params": params
    });
    let (status, answer) = client.post("/v1/completions", body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let cached = answer["usage"]["prompt_tokens_details"]["external_cached_tokens"].as_u64();
    (ids(&answer["choices"][0]["token_ids"]), cached.expect("a count"))
}

async fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    testkit::eventually_async(what, is_so).await;
}

fn is_empty(engine: &EngineHandle) -> bool {
    (engine.kept_prompts(), engine.stats().blocks_used) == (0, 0)
}

#[tokio::test]
async fn a_decoder_reads_what_a_prefiller_keeps_and_says_the_right_tokens() {
    let config = common::config();
    let ((first, p), (second, d)) = (spawn(&config).await, spawn(&config).await);
    let prompt = tokens(500, 3);
    let right = oracle(&config).predict(&prompt, 9);
    for own_key in [false, true] {
        let more = if own_key { json!({"forebay": {"keys": ["chosen"]}}) } else { json!({}) };
        let answer = prefill(&p, &prompt, more).await;
        assert_eq!((first.kept_prompts(), first.stats().blocks_used), (1, 31), "500 tokens, whole blocks");
        let mut params = answer["kv_transfer_params"].clone();
        assert_eq!(params["forebay"]["direct"]["ranks"][0][1] == "chosen", own_key);
        if !own_key {
            // As a proxy passes it on that knows NixlConnector's fields only.
            params.as_object_mut().expect("an object").remove("forebay");
        }
        let (said, loaded) = decode(&d, &prompt, &params).await;
        assert_eq!((said, loaded), (right.clone(), if own_key { 0 } else { 496 }), "the second is a hit");
        if own_key {
            // Nobody has read it: it was all cached. The prefiller keeps it for its lease.
            assert_eq!(first.kept_prompts(), 1);
        } else {
            wait_until("the prefiller lets go", || is_empty(&first)).await;
        }
    }
    assert_eq!(second.stats().blocks_used, 0);
}

#[tokio::test]
async fn a_decoder_that_is_asked_at_once_waits_for_its_prefiller() {
    let config = common::config();
    let ((first, p), (_second, d)) = (spawn(&config).await, spawn(&config).await);
    let ticket = prefill(&p, &tokens(40, 1), json!({})).await["kv_transfer_params"]["forebay"].clone();
    let prompt = tokens(500, 9);
    let mut params = json!({"do_remote_prefill": true, "forebay": ticket});
    params["forebay"]["direct"]["ranks"][0][1] = json!("fresh");
    let asked = async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        prefill(&p, &prompt, json!({"forebay": {"keys": ["fresh"]}})).await
    };
    let ((said, loaded), _) = tokio::join!(decode(&d, &prompt, &params), asked);
    assert_eq!((said, loaded), (oracle(&config).predict(&prompt, 9), 496));
    wait_until("only the first prompt is kept", || first.kept_prompts() == 1).await;
}

#[tokio::test]
async fn a_decoder_whose_prefiller_is_gone_or_of_another_kind_computes() {
    let config = common::config();
    let ((first, p), (_second, d)) = (spawn(&config).await, spawn(&config).await);
    let prompt = tokens(200, 4);
    let mut params = prefill(&p, &prompt, json!({})).await["kv_transfer_params"].clone();
    params["forebay"]["identity"] = json!("another model's");
    let right = oracle(&config).predict(&prompt, 9);
    assert_eq!(decode(&d, &prompt, &params).await, (right, 0));
    let prompt = tokens(200, 5);
    let params = prefill(&p, &prompt, json!({})).await["kv_transfer_params"].clone();
    first.shutdown(std::time::Duration::ZERO).await;
    assert_eq!(decode(&d, &prompt, &params).await, (oracle(&config).predict(&prompt, 9), 0));
}

#[tokio::test]
async fn a_request_that_cannot_be_handed_over_is_refused_by_field() {
    let (engine, client) = spawn(&common::config()).await;
    let ask = async |prompt: Value| {
        let params = json!({"do_remote_decode": true});
        client.post("/v1/completions", json!({"prompt": prompt, "kv_transfer_params": params})).await
    };
    let (status, answer) = ask(json!(["one", "two"])).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &"kv_transfer_params".into()));
    engine.set_fault(Some(Fault::RefusePrefill));
    assert_eq!(ask(json!("one")).await.0, StatusCode::INTERNAL_SERVER_ERROR);
}
