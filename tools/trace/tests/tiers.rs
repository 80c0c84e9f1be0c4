//! What tiers would have held of the Mooncake traces, against the published figures of an
//! independent simulator (Python, 512-token blocks, memory 2 % and SSD 20 % of the distinct
//! blocks); and what the adaptive policy is good for on those and on made-up traffic. The traces
//! are no part of the project: the tests look for them in `FOREBAY_TRACES` or beside the workspace
//! and say so when they skip.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_store::admission::Policy;
use forebay_trace::format::{Format, ReadOptions, TraceReader, write_line};
use forebay_trace::generate::{Generator, Marginals};
use forebay_trace::info;
use forebay_trace::request::TraceRequest;
use forebay_trace::tiers::{ModelCost, TierRow, TierStudy};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::{Path, PathBuf};

/// The requirement: the adaptive policy's hits against those of the better of the two others.
const MOST_POINTS_BELOW: f64 = 1.0;

const POLICIES: [Policy; 3] = [Policy::All, Policy::SecondHit, Policy::Adaptive];

fn trace(name: &str) -> Option<Vec<TraceRequest>> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let traces = std::env::var_os("FOREBAY_TRACES").map_or(beside, PathBuf::from);
    let path = traces.join(name);
    if !path.exists() {
        testkit::skipped(format_args!("no trace {name}; set FOREBAY_TRACES to the directory that has it"));
        return None;
    }
    Some(TraceReader::open(&path, ReadOptions::default()).unwrap().map(Result::unwrap).collect())
}

/// The trace with other block ids, so that another part of the chunks is sampled.
fn renamed(requests: &[TraceRequest], by: u64) -> Vec<TraceRequest> {
    let rename = |request: &TraceRequest| TraceRequest {
        blocks: request.blocks.iter().map(|block| block + (by << 32)).collect(),
        ..request.clone()
    };
    requests.iter().map(rename).collect()
}

/// The policies in the order of [`POLICIES`].
fn study(requests: &[TraceRequest], sizes: &str) -> [TierRow; 3] {
    let mut text = Vec::new();
    requests.iter().for_each(|request| write_line(&mut text, request).unwrap());
    let input = std::io::Cursor::new(text);
    let mut reader = TraceReader::from_input("inline", input, Format::Forebay, ReadOptions::default());
    let prefix = info::info(&mut reader, &[]).unwrap().prefix.unwrap();
    let study = TierStudy {
        sizes: vec![sizes.parse().unwrap()],
        policies: POLICIES.to_vec(),
        model: ModelCost::DENSE_8B,
        endurance_bytes_per_day: None,
    };
    let report = study.run(requests.iter().cloned().map(Ok), &prefix).unwrap();
    report.rows.try_into().unwrap()
}

/// Percent of all blocks.
fn points(share: f64) -> f64 {
    share * 100.0
}

/// Checks the requirement and says what happened. Returns what the adaptive policy wrote, as a
/// share of what `all` did.
#[track_caller]
fn assert_adaptive_follows(name: &str, [all, second_hit, adaptive]: &[TierRow; 3]) -> f64 {
    let hits = [all, second_hit, adaptive].map(|row| points(row.ssd_hits));
    let written = |row: &TierRow| row.written_bytes as f64 / all.written_bytes as f64;
    println!(
        "{name}: hits on the SSD {hits:.2?}, written {:.2} {:.2}",
        written(second_hit),
        written(adaptive)
    );
    assert!(hits[2] >= hits[0].max(hits[1]) - MOST_POINTS_BELOW, "{name}: {hits:?}");
    written(adaptive)
}

#[test]
fn the_mooncake_tables_of_the_study_are_reproduced() {
    // Hits on the SSD in points and blocks written, `all` and `freq >= 2`; hits in memory are 7.93
    // and 7.78.
    let published = [
        ("conversation", 7.93, [(27.1, 184_814), (15.0, 43_617)]),
        ("synthetic", 7.78, [(33.0, 72_226), (33.4, 28_213)]),
    ];
    for (name, memory_points, policies) in published {
        let Some(mut requests) = trace(&format!("mooncake-fast25/{name}_trace.jsonl")) else { return };
        // The other simulator takes the last block of a prompt for a whole one.
        requests.iter_mut().for_each(|request| request.input_tokens = 512 * request.blocks.len() as u32);
        let rows = study(&requests, "memory=2%,ssd=20%");
        let block_bytes = 512 * u64::from(ModelCost::DENSE_8B.kv_bytes_per_token);
        for (row, (ssd_points, blocks)) in rows.iter().zip(policies) {
            // The other simulator drops chunks in the middle of a request, and does not renew the
            // SSD's copy of a chunk that memory drops; what it remembers of the past has no limit.
            let written = row.written_bytes / block_bytes;
            let found = (points(row.memory_hits), points(row.ssd_hits), written);
            assert!((found.0 - memory_points).abs() < 0.01, "{name} {}: {found:?}", row.admission);
            assert!((found.1 - ssd_points).abs() < 0.3, "{name} {}: {found:?}", row.admission);
            assert!(
                (written as f64 / blocks as f64 - 1.0).abs() < 0.01,
                "{name} {}: {found:?}",
                row.admission
            );
        }
        // With `all` the same simulator prints 0.3309 and 0.4307 of the FLOP saved.
        let flop_points = if name == "conversation" { 33.09 } else { 43.07 };
        let found = points(rows[0].flop_saved);
        assert!((found - flop_points).abs() < 0.4, "{name}: {found}");
    }
}

#[test]
fn adaptive_is_as_good_as_the_better_policy_on_the_mooncake_traces() {
    for name in ["conversation", "synthetic"] {
        let Some(requests) = trace(&format!("mooncake-fast25/{name}_trace.jsonl")) else { return };
        for sample in 0..4 {
            let rows = study(&renamed(&requests, sample), "memory=2%,ssd=20%");
            assert_adaptive_follows(name, &rows);
        }
    }
}

#[test]
fn adaptive_is_as_good_as_the_better_policy_for_generated_agents() {
    let agents = [
        ("claude-code", Marginals { sessions: 30, ..Marginals::CLAUDE_CODE.parse().unwrap() }),
        ("demo", Marginals::DEMO.parse().unwrap()),
    ];
    for (name, marginals) in agents {
        let requests: Vec<TraceRequest> = Generator::new(&marginals, 1).unwrap().collect();
        for sizes in ["memory=1%,ssd=5%", "memory=2%,ssd=20%"] {
            assert_adaptive_follows(name, &study(&requests, sizes));
        }
    }
}

#[test]
fn adaptive_saves_writes_where_most_is_read_once() {
    for seed in 0..3 {
        let requests = documents(seed, 12_000, 2_000, 0.4);
        for sizes in ["memory=1%,ssd=5%", "memory=2%,ssd=20%"] {
            let written = assert_adaptive_follows("documents", &study(&requests, sizes));
            assert!(written < 0.75, "{written}");
        }
    }
}

#[test]
fn adaptive_keeps_what_is_read_twice() {
    for seed in 0..3 {
        let requests = documents(seed, 12_000, 2_000, 0.97);
        for sizes in ["memory=2%,ssd=20%", "memory=5%,ssd=40%"] {
            assert_adaptive_follows("documents", &study(&requests, sizes));
        }
    }
}

/// Prompts about documents of 10 to 90 blocks: a share of them about one of `documents`, the first
/// ones most often (the n-th in proportion to 1/n), the others about one that never comes again.
fn documents(seed: u64, prompts: u64, documents: u64, share: f64) -> Vec<TraceRequest> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut prompt = |number: u64| {
        let popular = (documents as f64).powf(random.random::<f64>()) as u64;
        let document = if random.random_bool(share) { popular } else { documents + number };
        let blocks = 10 + document.wrapping_mul(0x9E37_79B9_7F4A_7C15) % 81;
        TraceRequest {
            session: number.to_string(),
            arrival_us: number * 300_000,
            input_tokens: 64 * blocks as u32,
            block_tokens: 64,
            blocks: (0..blocks).map(|block| (document << 8) + block).collect(),
            ..TraceRequest::default()
        }
    };
    (0..prompts).map(&mut prompt).collect()
}
