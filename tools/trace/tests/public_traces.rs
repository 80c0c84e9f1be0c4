//! The figures of public traces, against those that their descriptions state. The traces are no
//! part of the project: the tests look for them in `FOREBAY_TRACES` or beside the workspace and say
//! so when they skip.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_trace::format::{Format, ReadOptions, TraceReader};
use forebay_trace::info::{self, Info};
use forebay_trace::sample::{SampleOptions, sample};
use std::path::{Path, PathBuf};

const POOL_TOKENS: [u64; 4] = [281_888, 8 * 281_888, 32 * 281_888, 1_000_000_000_000];

fn trace(name: &str) -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let traces = std::env::var_os("FOREBAY_TRACES").map_or(beside, PathBuf::from);
    let path = traces.join(name);
    if !path.exists() {
        testkit::skipped(format_args!("no trace {name}; set FOREBAY_TRACES to the directory that has it"));
        return None;
    }
    Some(path)
}

fn info_of(path: &Path, format: Format) -> Info {
    let mut reader = TraceReader::open(path, ReadOptions { strict: true, ..ReadOptions::default() }).unwrap();
    assert_eq!(reader.format(), format);
    info::info(&mut reader, &POOL_TOKENS).unwrap()
}

/// Values as Python prints them with `decimals`: halves go to the even neighbour.
#[track_caller]
fn assert_printed<const N: usize>(found: [f64; N], expected: [f64; N], decimals: i32) {
    let scale = 10f64.powi(decimals);
    assert_eq!(found.map(|value| (value * scale).round_ties_even() / scale), expected);
}

#[test]
fn mooncake_conversation_has_its_published_figures() {
    let Some(path) = trace("mooncake-fast25/conversation_trace.jsonl") else { return };
    let info = info_of(&path, Format::Mooncake);
    assert_eq!((info.requests, info.skipped_lines, info.out_of_order), (12_031, 0, 0));
    assert_printed([info.span_s, info.input_per_output], [3_537.0, 35.0], 0);
    assert_printed([info.requests_per_s, info.prefill_share], [3.401, 0.972], 3);
    let (input, output) = (info.input_tokens, info.output_tokens);
    assert_printed(
        [input.mean, input.p50, input.p90, input.p99, input.max],
        [12_035.0, 6_909.0, 27_367.0, 85_400.0, 126_195.0],
        0,
    );
    assert_printed([output.mean, output.p50, output.p90, output.p99], [343.0, 350.0, 597.0, 1_119.0], 0);
    assert!(info.sessions.is_none());
    let prefix = info.prefix.unwrap();
    assert_eq!(
        (prefix.distinct_blocks, prefix.distinct_first_blocks, prefix.block_tokens),
        (182_790, 1, 512)
    );
    assert_printed([prefix.reused_blocks], [0.24], 2);
    assert_printed([prefix.max_hit_blocks, prefix.max_hit_tokens], [0.3664, 0.3736], 4);
    assert_printed([prefix.reuse.shared, prefix.requests_with_hit], [0.366, 1.0], 3);
    assert_printed([prefix.new_tokens.p50, prefix.new_tokens.p90], [2_470.0, 19_012.0], 0);
    assert_printed([prefix.warm, prefix.medium, prefix.heavy], [0.624, 0.282, 0.094], 3);
    assert_printed(
        [0, 1, 2, 3].map(|size| prefix.caches[size].hit_blocks),
        [0.0422, 0.0941, 0.2737, 0.3664],
        4,
    );
}

#[test]
fn mooncake_synthetic_has_its_published_figures() {
    let Some(path) = trace("mooncake-fast25/synthetic_trace.jsonl") else { return };
    let info = info_of(&path, Format::Mooncake);
    assert_eq!(info.requests, 3_993);
    assert_printed([info.span_s, info.input_per_output], [1_022.0, 103.0], 0);
    assert_printed([info.prefill_share], [0.990], 3);
    let (input, output) = (info.input_tokens, info.output_tokens);
    assert_printed(
        [input.mean, input.p50, input.p90, input.max],
        [15_325.0, 11_587.0, 38_611.0, 191_378.0],
        0,
    );
    assert_printed([output.mean, output.p50, output.p90, output.p99], [149.0, 69.0, 389.0, 768.0], 0);
    let prefix = info.prefix.unwrap();
    assert_eq!((prefix.distinct_blocks, prefix.distinct_first_blocks), (43_924, 2_211));
    assert_printed([prefix.max_hit_blocks, prefix.max_hit_tokens], [0.6396, 0.6512], 4);
    assert_printed([prefix.requests_with_hit], [0.446], 3);
    assert_printed([prefix.new_tokens.p50, prefix.new_tokens.p90], [374.0, 19_176.0], 0);
    assert_printed([prefix.warm, prefix.medium, prefix.heavy], [0.783, 0.125, 0.092], 3);
    assert_printed(
        [0, 1, 2, 3].map(|size| prefix.caches[size].hit_blocks),
        [0.0500, 0.2628, 0.5461, 0.6396],
        4,
    );
}

#[test]
fn azure_has_its_published_figures() {
    let cases = [
        (
            "code",
            8_819,
            [3_436.0, 73.0],
            0.9866,
            [2_048.0, 1_469.0, 5_188.0, 7_436.0],
            [28.0, 13.0, 55.0, 251.0],
        ),
        (
            "conv",
            19_366,
            [3_502.0, 5.0],
            0.8454,
            [1_155.0, 1_020.0, 2_734.0, 4_142.0],
            [211.0, 129.0, 424.0, 601.0],
        ),
    ];
    for (name, requests, span_and_ratio, prefill_share, input, output) in cases {
        let Some(path) = trace(&format!("azure-llm-2023/AzureLLMInferenceTrace_{name}.csv")) else { return };
        let info = info_of(&path, Format::Azure);
        assert_eq!(info.requests, requests);
        assert_printed([info.span_s, info.input_per_output], span_and_ratio, 0);
        assert_printed([info.prefill_share], [prefill_share], 4);
        let quantiles = |values: info::ValueSummary| [values.mean, values.p50, values.p90, values.p99];
        assert_printed(quantiles(info.input_tokens), input, 0);
        assert_printed(quantiles(info.output_tokens), output, 0);
        assert!(info.prefix.is_none() && info.sessions.is_none());
    }
}

#[test]
fn weka_has_its_published_figures() {
    let Some(path) = trace("weka-claude-code") else { return };
    let info = info_of(&path, Format::Weka);
    assert_eq!((info.requests, info.out_of_order), (2_891, 0));
    assert_printed([info.input_per_output], [250.0], 0);
    assert_printed([info.prefill_share], [0.996], 3);
    let (input, output) = (info.input_tokens, info.output_tokens);
    assert_printed(
        [input.mean, input.p50, input.p90, input.p99, input.max],
        [113_804.0, 98_015.0, 161_400.0, 527_889.0, 878_882.0],
        0,
    );
    assert_printed([output.mean, output.p50, output.p90, output.p99], [454.0, 199.0, 959.0, 4_454.0], 0);
    assert_printed([info.fits[0].share, info.fits[1].share], [0.78, 0.92], 2);

    let prefix = info.prefix.unwrap();
    assert_printed([prefix.max_hit_blocks, prefix.max_hit_tokens], [0.9649, 0.9646], 4);
    assert_printed([prefix.reuse.shared, prefix.reuse.within_session], [0.965, 0.965], 3);
    assert_printed(
        [prefix.new_tokens.p50, prefix.new_tokens.p90, prefix.new_tokens.p99],
        [713.0, 4_912.0, 73_180.0],
        0,
    );
    assert_printed([prefix.warm, prefix.medium, prefix.heavy], [0.902, 0.075, 0.023], 3);

    let sessions = info.sessions.unwrap();
    assert_eq!((sessions.sessions, sessions.sub_agents), (40, 2));
    assert_eq!((sessions.resets, sessions.continuations), (18, 2_818));
    assert_printed([sessions.turns.p90, sessions.turns.max], [147.0, 514.0], 0);
    assert_eq!(sessions.turns.p50, 38.5);
    assert_printed(
        [sessions.first_input_tokens.p50, sessions.last_input_tokens.p50],
        [66_768.0, 129_426.0],
        0,
    );
    let growth = sessions.growth_tokens.unwrap();
    assert_printed([growth.p50, growth.p90], [644.0, 3_429.0], 0);
    assert_eq!(sessions.system_tokens.unwrap().p50, 14_882.0);
    assert_printed([sessions.length_s.p50 / 60.0, sessions.length_s.p90 / 60.0], [47.0, 279.0], 0);
    assert_printed([sessions.largest_tenth], [0.387], 3);
}

/// The published times count a missing one as 0, which the figures of `info` leave out.
#[test]
fn weka_has_its_published_think_and_service_times() {
    let Some(path) = trace("weka-claude-code") else { return };
    let requests: Result<Vec<_>, _> = TraceReader::open(&path, ReadOptions::default()).unwrap().collect();
    let main: Vec<_> =
        requests.unwrap().into_iter().filter(|request| request.parent_session.is_none()).collect();
    let quantile = |share: f64, times_us: Vec<Option<u64>>| {
        let mut times_s: Vec<f64> = times_us.iter().map(|time| time.unwrap_or(0) as f64 / 1e6).collect();
        times_s.sort_by(f64::total_cmp);
        let position = share * (times_s.len() - 1) as f64;
        let (below, above) = (times_s[position as usize], times_s[position.ceil() as usize]);
        below + (above - below) * position.fract()
    };
    let think = || main.iter().map(|request| request.think_us).collect();
    let service = || main.iter().map(|request| request.service_us).collect();
    assert_printed([quantile(0.5, think()), quantile(0.9, think())], [8.5, 129.0], 1);
    assert_printed([quantile(0.5, service()), quantile(0.9, service())], [5.4, 19.5], 1);
}

#[test]
fn a_tenth_of_mooncake_conversation_keeps_its_reuse() {
    let Some(path) = trace("mooncake-fast25/conversation_trace.jsonl") else { return };
    for seed in 0..5 {
        let mut reader = TraceReader::open(&path, ReadOptions::default()).unwrap();
        let options = SampleOptions { keep: 0.1, seed, ..SampleOptions::default() };
        let report = sample(&mut reader, options, |_| Ok(())).unwrap();
        assert!((1_000..1_450).contains(&report.kept_requests), "{report:?}");
        let (before, after) = (report.reuse.unwrap().shared, report.kept_reuse.unwrap().shared);
        // Thinned request by request, 36.6 % would fall to 11.4 %.
        assert!((before - 0.3664).abs() < 1e-4 && after > 0.31, "{report:?}");
    }
}
