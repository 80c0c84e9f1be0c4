//! What a sample guarantees: whole sessions, the same ones for the same seed, untouched times.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_trace::request::TraceRequest;
use forebay_trace::sample::{SampleError, SampleOptions, Sampler};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

/// Requests of some sessions in order of arrival; every fourth session works for the one before it.
fn any_trace() -> impl Strategy<Value = Vec<TraceRequest>> {
    prop::collection::vec((0u32..40, 0u64..50), 0..300).prop_map(|rows| {
        let mut arrival_us = 0;
        let mut turns = HashMap::new();
        let mut request = |(session, gap_us): (u32, u64)| {
            arrival_us += gap_us;
            let turn: &mut u32 = turns.entry(session).or_default();
            *turn += 1;
            TraceRequest {
                session: format!("s{session}"),
                parent_session: (session % 4 == 3).then(|| format!("s{}", session - 1)),
                turn: *turn - 1,
                arrival_us,
                think_us: (session % 2 == 0).then_some(gap_us),
                input_tokens: 32 * *turn,
                output_tokens: 5,
                block_tokens: 16,
                blocks: (0..u64::from(*turn) * 2).map(|block| u64::from(session) * 1_000 + block).collect(),
                ..TraceRequest::default()
            }
        };
        rows.into_iter().map(&mut request).collect()
    })
}

fn sample(trace: &[TraceRequest], options: SampleOptions) -> Vec<TraceRequest> {
    let mut sampler = Sampler::new(options, true).unwrap();
    trace.iter().filter_map(|request| sampler.pass(request.clone()).unwrap()).collect()
}

fn roots(requests: &[TraceRequest]) -> HashSet<&str> {
    requests.iter().map(TraceRequest::root_session).collect()
}

proptest! {
    #[test]
    fn sessions_are_kept_whole_and_in_order(trace in any_trace(), keep in 0.05f64..1.0, seed in any::<u64>()) {
        let kept = sample(&trace, SampleOptions { keep, seed, ..SampleOptions::default() });
        let kept_roots = roots(&kept);
        let expected: Vec<_> = trace.iter().filter(|r| kept_roots.contains(r.root_session())).cloned().collect();
        prop_assert_eq!(kept, expected);
    }

    #[test]
    fn a_seed_decides_and_a_smaller_share_is_part_of_a_larger(trace in any_trace(), seed in any::<u64>()) {
        let of = |keep| sample(&trace, SampleOptions { keep, seed, ..SampleOptions::default() });
        let (small, large) = (of(0.3), of(0.6));
        prop_assert_eq!(&small, &of(0.3));
        prop_assert!(roots(&small).is_subset(&roots(&large)));
        prop_assert_eq!(of(1.0), trace);
    }

    #[test]
    fn a_window_has_the_sessions_that_begin_in_it(trace in any_trace(), start_us in 0u64..5_000, span_us in 1u64..5_000) {
        let options = SampleOptions { start_us, span_us: Some(span_us), ..SampleOptions::default() };
        let mut begins = HashMap::new();
        trace.iter().for_each(|r| { begins.entry(r.root_session()).or_insert(r.arrival_us); });
        let in_window = |r: &&TraceRequest| (start_us..start_us + span_us).contains(&begins[r.root_session()]);
        let shifted = |r: &TraceRequest| TraceRequest { arrival_us: r.arrival_us - start_us, ..r.clone() };
        let expected: Vec<_> = trace.iter().filter(in_window).map(shifted).collect();
        prop_assert_eq!(sample(&trace, options), expected);
    }
}

/// A service whose prompts all begin with one block and whose conversations are not recorded.
fn unrecorded_conversations() -> Vec<TraceRequest> {
    let turn = |(turn, conversation): (u64, u64)| {
        let own = (0..3 * turn + 4).map(move |block| 1 + conversation * 100 + block);
        // The last block is partial, so that it has another id in the next turn.
        let blocks: Vec<u64> =
            [0].into_iter().chain(own).chain([1_000_000 + conversation * 10 + turn]).collect();
        TraceRequest {
            session: format!("line-{turn}-{conversation}"),
            arrival_us: turn * 1_000_000 + conversation,
            input_tokens: blocks.len() as u32 * 512 - 100,
            output_tokens: 100,
            block_tokens: 512,
            blocks,
            ..TraceRequest::default()
        }
    };
    (0..5).flat_map(|number| (0..400).map(move |conversation| (number, conversation))).map(turn).collect()
}

#[test]
fn reuse_survives_where_conversations_are_not_recorded() {
    let trace = unrecorded_conversations();
    let report_of = |sessions_recorded| {
        let options = SampleOptions { keep: 0.1, seed: 7, ..SampleOptions::default() };
        let mut sampler = Sampler::new(options, sessions_recorded).unwrap();
        trace.iter().for_each(|request| drop(sampler.pass(request.clone()).unwrap()));
        sampler.report()
    };
    let (by_family, by_request) = (report_of(false), report_of(true));
    let before = by_family.reuse.unwrap().shared;
    assert!((20..60).contains(&by_family.kept_families), "{by_family:?}");
    assert_eq!(by_family.kept_requests, by_family.kept_families as u64 * 5);
    assert!((by_family.kept_reuse.unwrap().shared - before).abs() < 0.01, "{by_family:?}");
    assert!(by_request.kept_reuse.unwrap().shared < before - 0.2, "{by_request:?}");
}

#[test]
fn a_share_that_keeps_nothing_is_refused() {
    for keep in [0.0, -1.0, 1.1, f64::NAN] {
        let options = SampleOptions { keep, ..SampleOptions::default() };
        assert!(matches!(Sampler::new(options, true), Err(SampleError::Keep(_))));
    }
}
