//! The figures of small traces, counted by hand.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_trace::format::{Format, ReadOptions, TraceReader, write_line};
use forebay_trace::info::{Info, InfoError, info};
use forebay_trace::request::TraceRequest;
use std::io::Cursor;

fn info_of(requests: &[TraceRequest], cache_tokens: &[u64]) -> Result<Info, InfoError> {
    let mut text = Vec::new();
    requests.iter().for_each(|request| write_line(&mut text, request).unwrap());
    let mut reader =
        TraceReader::from_input("test", Cursor::new(text), Format::Forebay, ReadOptions::default());
    info(&mut reader, cache_tokens)
}

/// A request of `blocks` blocks of 1,000 tokens, the first of which are the session's earlier ones.
fn request(session: &str, second: u64, blocks: impl IntoIterator<Item = u64>) -> TraceRequest {
    let blocks: Vec<u64> = blocks.into_iter().collect();
    TraceRequest {
        session: session.into(),
        arrival_us: second * 1_000_000,
        input_tokens: blocks.len() as u32 * 1_000,
        output_tokens: 100,
        block_tokens: 1_000,
        blocks,
        ..TraceRequest::default()
    }
}

/// Two sessions that share one block, with a sub-agent and a reset.
fn trace() -> Vec<TraceRequest> {
    let thinking = |request: TraceRequest, think_us| TraceRequest { think_us: Some(think_us), ..request };
    vec![
        TraceRequest { system_tokens: Some(1_000), ..request("a", 0, 0..10) },
        request("b", 10, (0..1).chain(100..124)),
        thinking(request("a", 20, 0..14), 5_000_000),
        TraceRequest { parent_session: Some("a".into()), ..request("a/1", 30, (0..1).chain(200..203)) },
        thinking(request("a", 40, (0..1).chain(300..304)), 7_000_000),
    ]
}

#[test]
fn prefixes_and_caches_are_counted() {
    let info = info_of(&trace(), &[10_000, 1_000_000]).unwrap();
    assert_eq!((info.requests, info.span_s, info.requests_per_s), (5, 40.0, 0.125));
    assert_eq!((info.input_tokens.max, info.input_tokens.p50), (25_000.0, 10_000.0));
    assert_eq!((info.input_per_output, info.prefill_share), (58_000.0 / 500.0, 58_000.0 / 58_500.0));
    let prefix = info.prefix.unwrap();
    // Known at their time: nothing, block 0, ten blocks, block 0, block 0.
    assert_eq!((prefix.max_hit_blocks, prefix.max_hit_tokens), (13.0 / 58.0, 13.0 / 58.0));
    assert_eq!((prefix.distinct_blocks, prefix.distinct_first_blocks), (45, 1));
    assert_eq!((prefix.reused_blocks, prefix.requests_with_hit), (10.0 / 45.0, 0.8));
    assert_eq!((prefix.reuse.shared, prefix.reuse.within_session), (13.0 / 58.0, 12.0 / 58.0));
    // New: 10, 24, 4, 3 and 4 thousand tokens.
    assert_eq!((prefix.warm, prefix.medium, prefix.heavy), (0.6, 0.2, 0.2));
    assert_eq!((prefix.new_tokens.p50, prefix.new_tokens.max), (4_000.0, 24_000.0));
    // Ten blocks hold the first ten of the last prompt each time: block 0 always hits, the others
    // of "a" are gone.
    let hits: Vec<f64> = prefix.caches.iter().map(|cache| cache.hit_blocks * 58.0).collect();
    assert!((hits[0] - 4.0).abs() < 1e-9 && (hits[1] - 13.0).abs() < 1e-9, "{hits:?}");
}

#[test]
fn classes_have_their_stated_limits() {
    let new = |tokens: u32| TraceRequest {
        session: tokens.to_string(),
        input_tokens: tokens,
        ..request("", 0, [u64::from(tokens)])
    };
    let prefix = info_of(&[4_999, 5_000, 19_999, 20_000].map(new), &[]).unwrap().prefix.unwrap();
    assert_eq!((prefix.warm, prefix.medium, prefix.heavy), (0.25, 0.5, 0.25));
}

#[test]
fn sessions_are_those_of_the_main_lines() {
    let sessions = info_of(&trace(), &[]).unwrap().sessions.unwrap();
    assert_eq!((sessions.sessions, sessions.sub_agents), (2, 1));
    assert_eq!((sessions.turns.mean, sessions.turns.max), (2.0, 3.0));
    assert_eq!((sessions.first_input_tokens.max, sessions.last_input_tokens.mean), (25_000.0, 15_000.0));
    assert_eq!((sessions.continuations, sessions.resets), (2, 1));
    let growth = sessions.growth_tokens.unwrap();
    assert_eq!((growth.max, growth.mean), (4_000.0, -2_500.0));
    assert_eq!((sessions.think_s.unwrap().mean, sessions.service_s), (6.0, None));
    assert_eq!((sessions.length_s.max, sessions.system_tokens.unwrap().p50), (40.0, 1_000.0));
}

#[test]
fn a_prompt_that_shrinks_a_little_is_no_reset() {
    let trace = [request("a", 0, 0..10), request("a", 1, 0..7), request("a", 2, 0..4)];
    assert_eq!(info_of(&trace, &[]).unwrap().sessions.unwrap().resets, 1);
}

#[test]
fn a_trace_without_sessions_or_prefixes_says_so() {
    let bare = |second: u64| TraceRequest {
        block_tokens: 0,
        blocks: Vec::new(),
        ..request(&second.to_string(), second, 0..3)
    };
    let info = info_of(&[bare(5), bare(3)], &[1_000]).unwrap();
    assert!(info.prefix.is_none() && info.sessions.is_none());
    assert_eq!((info.out_of_order, info.span_s), (1, 2.0));
    assert!(
        info.to_string().starts_with("2 requests, no sessions recorded, 2.0 s (forebay format)\n"),
        "{info}"
    );
    assert!(matches!(info_of(&[], &[]), Err(InfoError::Empty { skipped_lines: 0 })));
}

#[test]
fn the_table_fits_a_terminal_of_100_columns() {
    let text = info_of(&trace(), &[281_888]).unwrap().to_string();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
}
