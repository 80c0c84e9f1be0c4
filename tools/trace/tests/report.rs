//! The report from records made by hand: its figures, its text and its page. Nothing here was
//! measured.

use forebay_trace::record::{
    Choice, Counter, DecisionSample, Failure, FailureKind, Line, LinkSample, LoadSample, Outcome, RecordLog,
    RequestRecord, RunInfo,
};
use forebay_trace::report::{
    Class, OUTSIDE_PEER_TOKENS, OUTSIDE_SSD_TOKENS, OUTSIDE_TOKENS, TokenSources, WrongTokens, html,
    summarize, terminal,
};

fn request(arm: &str, number: u32) -> RequestRecord {
    let at_s = f64::from(number);
    RequestRecord {
        arm: arm.into(),
        session: format!("s{}", number % 3),
        turn: number / 3,
        backend: Some(format!("engine-{}", number % 2)),
        arrival_s: at_s,
        start_s: at_s,
        ttft_s: Some(1.0 + at_s),
        tpot_s: Some(0.02),
        e2e_s: 10.0 + at_s,
        input_tokens: 10_000,
        carried_tokens: 0,
        early: false,
        asked_tokens: Some(100),
        output_tokens: 100,
        estimated: false,
        cached_tokens: Some(6_000),
        external_cached_tokens: Some(2_000),
        ssd_cached_tokens: Some(500),
        peer_cached_tokens: Some(300),
        wrong_tokens: Some(0),
        outcome: Outcome::Ok,
    }
}

fn failed(record: RequestRecord, kind: FailureKind) -> RequestRecord {
    RequestRecord { outcome: Outcome::Failed(Failure::new(kind, "as told")), ..record }
}

fn log_of(records: impl IntoIterator<Item = RequestRecord>) -> RecordLog {
    RecordLog { requests: records.into_iter().collect(), ..RecordLog::default() }
}

/// Six arms with samples of everything.
fn full_log() -> RecordLog {
    let mut log = RecordLog::default();
    for arm in ["round-robin", "least-loaded", "session-sticky", "linear", "lmetric", "lpwl"] {
        log.push(Line::Run(RunInfo {
            arm: arm.into(),
            start: None,
            parameters: vec![("clock ratio".into(), "20".into())],
        }));
        (0..40).for_each(|number| log.push(Line::Request(request(arm, number))));
        for at in 0..50 {
            log.push(Line::Load(LoadSample {
                arm: arm.into(),
                at_s: f64::from(at),
                instance: format!("engine-{}", at % 2),
                running: at % 7,
                waiting: 1,
                kv_usage: 0.5,
            }));
        }
        for (at_s, bytes) in [(1.0, 1_000_000), (2.0, 12_345_678_901)] {
            let link = "memory to engine-0".into();
            log.push(Line::Link(LinkSample { arm: arm.into(), at_s, link, bytes, lots: bytes / 1_000_000 }));
        }
        log.push(Line::Counter(Counter { arm: arm.into(), name: "corruptions caught".into(), value: 1_234 }));
        (0..40).for_each(|number| log.push(Line::Decision(decision(arm, number))));
    }
    log
}

/// One in four of each choice. Predictions are off by a tenth of a second, one way and the other.
fn decision(arm: &str, number: usize) -> DecisionSample {
    let weighed = |value: f64| (number % 4 != 3).then_some(value);
    DecisionSample {
        arm: arm.into(),
        at_s: number as f64,
        choice: Choice::ALL[number % 4],
        predicted_ttft_s: weighed(if number.is_multiple_of(4) { 1.1 } else { 0.9 }),
        ttft_s: Some(1.0),
        regret_s: weighed(number as f64 / 40.0),
        over_best_other_s: weighed(-0.5),
    }
}

#[test]
fn failed_requests_are_counted_by_kind_and_stay_out_of_the_latencies() {
    let slow = RequestRecord { ttft_s: Some(1e6), e2e_s: 1e6, ..request("a", 3) };
    let none = RequestRecord { ttft_s: None, ..request("a", 4) };
    let log = log_of([
        request("a", 0),
        request("a", 1),
        request("a", 2),
        failed(slow, FailureKind::Reset),
        failed(none, FailureKind::Reset),
    ]);
    let arm = &summarize(&log).arms[0];
    assert_eq!((arm.requests, arm.failed()), (5, 2));
    assert_eq!(arm.failures.get("reset"), Some(&2));
    assert_eq!((arm.ttft_s.count, arm.ttft_s.p50), (3, Some(2.0)));
    assert_eq!(arm.e2e_s.p50, Some(11.0));
    assert_eq!(arm.output_tokens, 300);
    assert!(arm.span_s > 1e5, "the span holds failed requests too");
}

#[test]
fn tokens_are_split_by_the_engines_own_account() {
    let more_cached =
        RequestRecord { cached_tokens: Some(12_000), external_cached_tokens: None, ..request("a", 1) };
    let silent = RequestRecord { cached_tokens: None, external_cached_tokens: None, ..request("a", 2) };
    let arm = &summarize(&log_of([request("a", 0), more_cached, silent])).arms[0];
    let expected =
        TokenSources { gpu: 14_000, memory: 1_200, ssd: 500, peer: 300, computed: 4_000, unreported: 10_000 };
    assert_eq!(arm.sources, expected);
    assert_eq!(arm.sources.hit_rate(), Some(0.8));
}

#[test]
fn what_engines_count_only_in_all_is_taken_out_of_what_was_on_the_gpu() {
    let unsplit = |arm: &str| RequestRecord {
        external_cached_tokens: None,
        ssd_cached_tokens: None,
        peer_cached_tokens: None,
        ..request(arm, 0)
    };
    let mut log = log_of([unsplit("a"), unsplit("b"), unsplit("c")]);
    let mut count = |arm: &str, counts: [u64; 3]| {
        for (name, value) in [OUTSIDE_TOKENS, OUTSIDE_SSD_TOKENS, OUTSIDE_PEER_TOKENS].into_iter().zip(counts)
        {
            log.push(Line::Counter(Counter { arm: arm.into(), name: name.into(), value }));
        }
    };
    count("b", [2_000, 500, 300]);
    count("c", [9_000, 5_500, 700]);
    let sources: Vec<TokenSources> = summarize(&log).arms.iter().map(|arm| arm.sources).collect();
    let split =
        |gpu, memory, ssd, peer| TokenSources { gpu, memory, ssd, peer, computed: 4_000, unreported: 0 };
    assert_eq!(sources, [split(6_000, 0, 0, 0), split(4_000, 1_200, 500, 300), split(0, 0, 5_500, 500)]);
}

#[test]
fn classes_follow_executed_tokens_and_not_the_length_of_the_prompt() {
    let executing = |number, executed: u32| RequestRecord {
        input_tokens: 120_000,
        cached_tokens: Some(120_000 - executed),
        ..request("a", number)
    };
    let edges = [4_999, 5_000, 19_999, 20_000, 49_999, 50_000, 120_000];
    let log =
        log_of(edges.into_iter().enumerate().map(|(number, executed)| executing(number as u32, executed)));
    let classes = &summarize(&log).arms[0].classes;
    assert_eq!(classes.iter().map(|class| class.class).collect::<Vec<_>>(), Class::ALL);
    assert_eq!(classes.iter().map(|class| class.requests).collect::<Vec<_>>(), [1, 2, 2, 2]);
    assert_eq!(classes[1].ttft_s.p50, Some(2.5));
    assert!((classes.iter().map(|class| class.share).sum::<f64>() - 1.0).abs() < 1e-12);
}

#[test]
fn unchecked_answers_are_not_counted_as_right() {
    let unchecked = |number| RequestRecord { wrong_tokens: None, ..request("a", number) };
    assert_eq!(summarize(&log_of([unchecked(0)])).arms[0].wrong, None);
    let wrong = RequestRecord { wrong_tokens: Some(3), ..request("a", 1) };
    let arm = &summarize(&log_of([unchecked(0), wrong, request("a", 2)])).arms[0];
    assert_eq!(arm.wrong, Some(WrongTokens { tokens: 3, checked_requests: 2 }));
}

#[test]
fn wrong_tokens_of_failed_requests_count_too() {
    let wrong = failed(RequestRecord { wrong_tokens: Some(2), ..request("a", 0) }, FailureKind::Truncated);
    assert_eq!(summarize(&log_of([wrong])).arms[0].wrong.map(|wrong| wrong.tokens), Some(2));
}

#[test]
fn arms_keep_the_order_of_the_run_and_links_their_last_sample() {
    let summary = summarize(&full_log());
    let arms: Vec<&str> = summary.arms.iter().map(|arm| arm.arm.as_str()).collect();
    assert_eq!(arms, ["round-robin", "least-loaded", "session-sticky", "linear", "lmetric", "lpwl"]);
    assert_eq!(summary.arms[0].links[0].bytes, 12_345_678_901);
    assert_eq!(summary.arms[5].counters["corruptions caught"], 1_234);
    assert_eq!(summary.arms[0].imbalance(), Some(1.0));
}

#[test]
fn the_terminal_tables_fit_100_columns() {
    let mut log = full_log();
    log.requests.iter_mut().for_each(|record| record.start_s += 20.0);
    let text = terminal(&summarize(&log));
    assert!(text.contains("lpwl 20.0 s."), "a note of more than one line: {text}");
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
    }
    assert!(text.contains("session-sticky"), "{text}");
    assert!(text.contains("60.0"), "{text}");
}

#[test]
fn decisions_are_counted_by_choice_and_predictions_compared_with_what_came() {
    let mut log = full_log();
    log.decisions.push(DecisionSample { ttft_s: None, ..decision("lpwl", 0) });
    let summary = summarize(&log);
    let decisions = summary.arms[5].decisions.as_ref().unwrap();
    assert_eq!((decisions.decisions, decisions.ttft_off_s.count), (41, 30));
    assert_eq!(Choice::ALL.map(|choice| decisions.count(choice)), [11, 10, 10, 10, 0]);
    let near = |value: Option<f64>, wanted: f64| value.is_some_and(|value| (value - wanted).abs() < 1e-9);
    assert!(near(decisions.ttft_off_s.p50, 0.1) && near(decisions.ttft_error_s.p50, -0.1), "{decisions:?}");
    assert!(near(decisions.over_best_other_s.p90, -0.5), "{decisions:?}");
    assert!(terminal(&summary).contains("regret p50"));
    let without = RecordLog { decisions: Vec::new(), ..full_log() };
    let summary = summarize(&without);
    assert_eq!(summary.arms[5].decisions, None);
    assert!(!html(&summary, &without).contains("plot-choices") && !terminal(&summary).contains("regret p50"));
}

#[test]
fn a_late_replayer_and_early_turns_are_told() {
    let late = |number| RequestRecord { start_s: f64::from(number) + 0.9, ..request("a", number) };
    let early = RequestRecord { early: true, ..late(3) };
    let text = terminal(&summarize(&log_of([late(0), late(1), late(2), early])));
    assert!(
        text.contains("sent late, because the machine was busy or the window full (p90): a 0.900 s."),
        "{text}"
    );
    assert!(text.contains("Turns sent before the previous answer was complete: a 1."), "{text}");
}

#[test]
fn the_page_needs_nothing_but_itself() {
    let log = full_log();
    let page = html(&summarize(&log), &log);
    for outside in ["http:", "https:", "//cdn", "@import", "url(", "src="] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert_eq!(page.matches("href=").count(), 1, "only the empty icon");
    for id in [
        "plot-ttft",
        "plot-hits",
        "plot-load-5",
        "plot-links-5",
        "plot-choices-5",
        "plot-predicted-5",
        "classes",
        "how",
        "parameters",
    ] {
        assert!(page.contains(&format!("id=\"{id}\"")), "{id}");
    }
}

#[test]
fn names_of_a_log_cannot_become_markup() {
    let mut log = log_of([request("<img src=x onerror=alert(1)>", 0)]);
    log.push(Line::Run(RunInfo {
        arm: "b".into(),
        start: None,
        parameters: vec![("<b>".into(), "</td><script>".into())],
    }));
    let page = html(&summarize(&log), &log);
    assert!(!page.contains("<img") && !page.contains("<b>&lt;") && !page.contains("</td><script>"));
    assert!(page.contains("&lt;img src=x"));
}

#[test]
fn an_empty_log_and_one_with_only_failures_still_give_a_report() {
    let only_failures = log_of([failed(
        RequestRecord { ttft_s: None, tpot_s: None, cached_tokens: None, backend: None, ..request("a", 0) },
        FailureKind::Unreachable,
    )]);
    for log in [RecordLog::default(), only_failures] {
        let summary = summarize(&log);
        assert!(html(&summary, &log).contains("Replay report"));
        assert!(!terminal(&summary).contains("NaN"));
        assert!(!html(&summary, &log).contains("NaN"));
    }
}
