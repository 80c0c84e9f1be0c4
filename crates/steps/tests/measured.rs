//! The shipped profiles against what was measured: our own results in `bench/results`, and figures
//! that others have published. A profile's text says no more than what is shown here.

use forebay_steps::{Launch, Profile, StepModel, StepShare};
use serde_json::Value;
use std::path::Path;

/// The median of each row of a results file whose name begins with `prefix`, by the name's rest.
fn rows(file: &str, prefix: &str) -> Vec<(String, f64)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/results").join(file);
    let results: Value =
        serde_json::from_str(&std::fs::read_to_string(path).expect("kept results")).expect("JSON");
    let rows = results["rows"].as_array().expect("rows").iter();
    let rows =
        rows.filter_map(|row| Some((row["name"].as_str()?.strip_prefix(prefix)?, row["value"].as_f64()?)));
    rows.map(|(name, value)| (name.to_owned(), value)).collect()
}

fn model(profile: &str) -> (Profile, StepModel) {
    let profile = Profile::shipped(profile).expect("shipped");
    let model = StepModel::new(&profile, Launch::Graph);
    (profile, model)
}

/// A prompt alone at an idle engine, whose first `hit` tokens need not be computed.
fn ttft_s(profile: &str, tokens: usize, hit: usize) -> f64 {
    let (profile, model) = model(profile);
    let (mut us, mut context_tokens) = (model.api_us(tokens), hit);
    while context_tokens < tokens {
        let new_tokens = profile.scheduler.max_batched_tokens.min(tokens - context_tokens);
        us += model.step_us([StepShare { context_tokens, new_tokens }]);
        context_tokens += new_tokens;
    }
    us / 1e6
}

fn tokens(size: &str) -> usize {
    size.strip_suffix('k').and_then(|size| size.parse::<usize>().ok()).expect("such as 8k") * 1024
}

#[test]
fn cold_prompts_take_what_was_measured_on_h200_and_h100() {
    // Long prompts, and short ones, whose time is the API's more than the GPU's.
    let table = [
        ("h200-llama-3.1-8b", "vllm-h200.json", 0.04, 0.12),
        ("h200-llama-3.1-8b", "vllm-h200-graphs.json", 0.04, 0.0),
        ("h200-llama-3.1-8b", "vllm-h200-gate.json", 0.04, 0.0),
        ("h100-llama-3.1-8b", "vllm-h100-links.json", 0.03, 0.05),
        ("h100-llama-3.1-8b", "vllm-h100-links-second.json", 0.03, 0.3),
        ("h100-llama-3.1-8b", "vllm-h100-links-third.json", 0.03, 0.3),
    ];
    for (profile, file, long, short) in table {
        let rows = rows(file, "vllm.ttft.recompute.");
        assert!(!rows.is_empty(), "{file}");
        for (size, measured_s) in rows {
            let error = ttft_s(profile, tokens(&size), 0) / measured_s - 1.0;
            let allowed = if tokens(&size) >= 8_192 { long } else { short };
            assert!(error.abs() <= allowed, "{file}: {size} is wrong by {:.1} %", error * 100.0);
        }
    }
}

#[test]
fn decodes_take_what_was_measured_on_an_h200() {
    let (_, model) = model("h200-llama-3.1-8b");
    let measured = rows("vllm-steps-h200-graphs.json", "vllm.steps.decode_ms.");
    let measured: Vec<(u64, f64)> =
        measured.iter().filter_map(|(requests, ms)| Some((requests.parse().ok()?, *ms))).collect();
    assert_eq!(measured.len(), 2);
    for (requests, ms) in measured {
        let error = model.decode_step_us(requests, 0) / 1e3 / ms - 1.0;
        assert!(error.abs() <= 0.01, "{requests} requests: wrong by {:.1} %", error * 100.0);
    }
}

/// TTFTs that the agentic-kvc project published for this pair: tokens, how many of them were in
/// HBM, and seconds.
const PUBLISHED: [(usize, usize, f64, f64); 4] = [
    (1_024, 0, 0.078, 0.13),
    (65_536, 0, 15.2, 0.11),
    (1_024, 1_023, 0.042, 0.33),
    (65_536, 65_535, 0.111, 0.1),
];

#[test]
fn published_ttfts_of_the_h20_are_as_far_off_as_the_profile_says() {
    for (tokens, hit, published_s, allowed) in PUBLISHED {
        let error = ttft_s("h20-qwen3-coder-30b-a3b", tokens, hit) / published_s - 1.0;
        assert!(error.abs() <= allowed, "{tokens} tokens, {hit} held: wrong by {:.1} %", error * 100.0);
    }
}

#[test]
fn the_page_has_the_constants_of_the_profiles() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/step-model.md");
    let page = std::fs::read_to_string(page).unwrap();
    let profiles: Vec<Profile> = Profile::names().map(|name| Profile::shipped(name).unwrap()).collect();
    type Cell = fn(&Profile) -> String;
    let table: [(&str, Cell); 7] = [
        ("", |profile| format!("`{}`", profile.name)),
        ("`floor` without and with graphs, ms", |profile| {
            let step = &profile.step;
            format!("{}, {}", step.floor_eager_us / 1e3, step.floor_graph_us / 1e3)
        }),
        ("`linear`, us", |profile| profile.step.linear_us_per_token.to_string()),
        ("`attention`, ns", |profile| profile.step.attention_ns_per_pair.to_string()),
        ("`kv_read`, ns", |profile| profile.step.kv_read_ns_per_context_token.to_string()),
        ("`request`, us", |profile| profile.step.us_per_request.to_string()),
        ("API, ms and us per token", |profile| {
            format!("{}, {}", profile.api.us_per_request / 1e3, profile.api.us_per_token)
        }),
    ];
    for (name, cell) in table {
        let cells: Vec<String> = profiles.iter().map(cell).collect();
        let row = format!("| {name} | {} |", cells.join(" | ")).replace("|  |", "| |");
        assert!(page.contains(&row), "not in the page: {row}");
    }
}
