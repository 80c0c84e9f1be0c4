//! What a generated trace guarantees: it has the marginals that were asked for, and the same seed
//! gives the same trace.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use forebay_trace::format::{Format, ReadOptions, TraceReader, write_line};
use forebay_trace::generate::{Generator, LogNormal, Marginals};
use forebay_trace::info::info;
use forebay_trace::request::TraceRequest;
use forebay_trace::tokens::block_tokens;
use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;

fn generate(marginals: &Marginals, seed: u64) -> Vec<TraceRequest> {
    Generator::new(marginals, seed).unwrap().collect()
}

fn main_lines(requests: &[TraceRequest]) -> BTreeMap<&str, Vec<&TraceRequest>> {
    let mut lines: BTreeMap<&str, Vec<&TraceRequest>> = BTreeMap::new();
    for request in requests.iter().filter(|request| request.parent_session.is_none()) {
        lines.entry(&request.session).or_default().push(request);
    }
    lines
}

/// Both quantiles within `tolerance` of what was asked for, as a share of it.
#[track_caller]
fn assert_spread(name: &str, mut values: Vec<f64>, asked: LogNormal, tolerance: f64) {
    values.sort_by(f64::total_cmp);
    let (p50, p90) = (values[values.len() / 2], values[values.len() * 9 / 10]);
    let near = |found: f64, asked: f64| (found / asked - 1.0).abs() <= tolerance;
    assert!(near(p50, asked.p50) && near(p90, asked.p90), "{name}: p50 {p50} p90 {p90}, asked {asked:?}");
    assert!(values[0] >= asked.min.floor() && values[values.len() - 1] <= asked.max, "{name} out of bounds");
}

/// Many short sessions: the standard error of a quantile of n log-normal values is some 2 sigma /
/// sqrt(n).
#[test]
fn the_marginals_are_those_asked_for() {
    let mut marginals: Marginals = Marginals::CLAUDE_CODE.parse().unwrap();
    marginals.sessions = 4_000;
    marginals.main.turns = LogNormal { p50: 4.0, p90: 9.0, min: 1.0, max: 40.0 };
    marginals.main.first_own_tokens = LogNormal { p50: 9_600.0, p90: 20_000.0, min: 500.0, max: 60_000.0 };
    marginals.sub_agents.per_turn = 0.05;
    let requests = generate(&marginals, 1);
    let lines = main_lines(&requests);
    let each = |value: &dyn Fn(&TraceRequest) -> f64| -> Vec<f64> {
        lines.values().flatten().map(|request| value(request)).collect()
    };
    let pairs = || lines.values().flat_map(|line| line.windows(2));
    let mut sub_agents: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for request in &requests {
        if let Some(parent) = request.parent_session.as_deref() {
            sub_agents.entry(parent).or_default().push(request.arrival_us);
        }
    }
    let started_sub_agent = |turn: &&[&TraceRequest]| {
        let between = turn[0].arrival_us..turn[1].arrival_us;
        let arrivals = sub_agents.get(&turn[0].session[..]);
        arrivals.is_some_and(|arrivals| arrivals.iter().any(|arrival| between.contains(arrival)))
    };

    assert_eq!(lines.len(), 4_000);
    assert_spread(
        "turns",
        lines.values().map(|line| line.len() as f64).collect(),
        marginals.main.turns,
        0.13,
    );
    let own = lines.values().map(|line| f64::from(line[0].input_tokens - line[0].system_tokens.unwrap()));
    assert_spread("first prompt", own.collect(), marginals.main.first_own_tokens, 0.05);
    assert_spread(
        "output",
        each(&|request| request.output_tokens.into()),
        marginals.main.output_tokens,
        0.05,
    );
    let growth = pairs().map(|pair| f64::from(pair[1].input_tokens) - f64::from(pair[0].input_tokens));
    assert_spread(
        "growth",
        growth.filter(|&growth| growth > 0.0).collect(),
        marginals.main.growth_tokens,
        0.05,
    );
    let think =
        pairs().filter(|pair| !started_sub_agent(pair)).map(|pair| pair[1].think_us.unwrap() as f64 / 1e6);
    assert_spread("think time", think.collect(), marginals.main.think_s, 0.1);
    let starts = lines.values().map(|line| line[0].arrival_us as f64 / 1e6);
    let even = LogNormal { p50: 1_800.0, p90: 3_240.0, min: 0.0, max: 3_600.0 };
    assert_spread("starts", starts.collect(), even, 0.05);

    let agents =
        requests.iter().filter(|request| request.parent_session.is_some() && request.turn == 0).count();
    let turns_that_may = lines.values().map(|line| line.len() - 1).sum::<usize>() as f64;
    assert!(
        (agents as f64 / turns_that_may - 0.05).abs() < 0.006,
        "{agents} sub-agents in {turns_that_may} turns"
    );
    let of_second_prompt = lines.values().filter(|line| line[0].system_tokens == Some(14_882)).count() as f64;
    assert!((of_second_prompt / 4_000.0 - 0.6).abs() < 0.03, "{of_second_prompt}");
}

#[test]
fn prompts_only_grow_until_they_are_compacted_to_their_system_prompt() {
    let marginals = Marginals { sessions: 30, ..Marginals::CLAUDE_CODE.parse().unwrap() };
    let requests = generate(&marginals, 2);
    let mut resets = 0;
    for pair in main_lines(&requests).values().flat_map(|line| line.windows(2)) {
        let common =
            pair[0].blocks.iter().zip(&pair[1].blocks).take_while(|(one, other)| one == other).count();
        let system_blocks = (pair[0].system_tokens.unwrap() / 64) as usize;
        if pair[1].input_tokens > pair[0].input_tokens {
            assert_eq!(common, pair[0].blocks.len());
        } else {
            assert_eq!(common, system_blocks);
            resets += 1;
        }
        assert!(pair[1].input_tokens <= marginals.context_tokens);
        assert_eq!(pair[1].blocks.len(), (pair[1].input_tokens / 64) as usize);
        assert!(pair[1].arrival_us >= pair[0].arrival_us + pair[1].think_us.unwrap());
    }
    assert!(resets > 0);
}

#[test]
fn a_seed_gives_one_trace_and_more_sessions_change_none() {
    let few = Marginals { sessions: 5, ..Marginals::DEMO.parse().unwrap() };
    let more = Marginals { sessions: 9, ..Marginals::DEMO.parse().unwrap() };
    assert_eq!(generate(&few, 3), generate(&few, 3));
    assert_ne!(generate(&few, 3), generate(&few, 4));
    let of_first_five = |request: &TraceRequest| {
        let number = request.root_session().strip_prefix("session-").unwrap();
        number.parse::<u32>().unwrap() < 5
    };
    assert_eq!(generate(&few, 3), generate(&more, 3).into_iter().filter(of_first_five).collect::<Vec<_>>());
}

/// Results are compared across versions of this project and of its random numbers: this fails when
/// either changes them.
#[test]
fn the_demo_trace_never_changes() {
    let requests = generate(&Marginals::DEMO.parse().unwrap(), 1);
    let sum = |value: fn(&TraceRequest) -> u32| {
        requests.iter().map(|request| u64::from(value(request))).sum::<u64>()
    };
    let (input, output) = (sum(|request| request.input_tokens), sum(|request| request.output_tokens));
    assert_eq!((requests.len(), input, output), (345, 5_702_659, 37_802));
}

/// Seconds that an H20 takes for the prompt of Qwen3-Coder-30B-A3B, of which all but `new` tokens
/// are cached: 61.5 us for each new token and 5.9 ns for each pair of a new token and one before
/// it.
fn h20_prefill_s(new: f64, prompt: f64) -> f64 {
    new * 61.5e-6 + new * (prompt - new / 2.0) * 5.9e-9
}

#[test]
fn the_demo_trace_is_sized_for_four_engines_and_four_minutes() {
    for seed in 1..6 {
        let requests = generate(&Marginals::DEMO.parse().unwrap(), seed);
        assert!((250..=400).contains(&requests.len()), "seed {seed}: {} requests", requests.len());
        let mut text = Vec::new();
        requests.iter().for_each(|request| write_line(&mut text, request).unwrap());
        let mut reader =
            TraceReader::from_input("demo", Cursor::new(text), Format::Forebay, ReadOptions::default());
        let info = info(&mut reader, &[]).unwrap();
        let (prefix, sessions) = (info.prefix.unwrap(), info.sessions.unwrap());
        assert!((180.0..300.0).contains(&info.span_s), "seed {seed}: {} s", info.span_s);
        assert!((0.85..0.95).contains(&prefix.max_hit_tokens), "seed {seed}: {}", prefix.max_hit_tokens);
        assert!(prefix.reuse.across_sessions() > 0.02, "seed {seed}: {:?}", prefix.reuse);
        assert!(sessions.first_input_tokens.max <= 25_000.0 && info.input_tokens.max <= 60_000.0);

        let (mut warm_s, mut cold_s, mut last) = (0.0, 0.0, HashMap::new());
        for request in &requests {
            let prompt = f64::from(request.input_tokens);
            let before =
                last.insert(&request.session, prompt).unwrap_or(request.system_tokens.unwrap().into());
            warm_s += h20_prefill_s(prompt - before, prompt);
            cold_s += h20_prefill_s(prompt, prompt);
        }
        let of_four = |seconds: f64| seconds / (4.0 * info.span_s);
        assert!(of_four(warm_s) < 0.15, "seed {seed}: {} busy with all cached", of_four(warm_s));
        assert!(
            (0.5..1.0).contains(&of_four(cold_s)),
            "seed {seed}: {} busy with none cached",
            of_four(cold_s)
        );
    }
}

#[test]
fn blocks_of_a_generated_trace_become_different_tokens() {
    let requests = generate(&Marginals { sessions: 2, ..Marginals::DEMO.parse().unwrap() }, 1);
    let mut tokens_of: HashMap<Vec<u32>, u64> = HashMap::new();
    for &block in requests.iter().flat_map(|request| &request.blocks) {
        let tokens = block_tokens(block, 64, 150_000).collect();
        assert_eq!(*tokens_of.entry(tokens).or_insert(block), block);
    }
}
