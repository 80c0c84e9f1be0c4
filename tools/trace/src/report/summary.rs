//! What a record log says, in figures: per arm latencies, hits, wrong tokens, failures and classes.

use super::decisions::{DecisionSummary, decisions};
use super::gpus::{GpuSummary, gpus};
use crate::quantile::Quantiles;
use crate::record::{Outcome, RecordLog, RequestRecord};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Counters of engines that say in all, and not in each answer, how many of the cached tokens were
/// not in their own caches: all of these, and of them those from an SSD and those from other nodes.
pub const OUTSIDE_TOKENS: &str = "tokens loaded from nodes";
/// See [`OUTSIDE_TOKENS`].
pub const OUTSIDE_SSD_TOKENS: &str = "tokens loaded from SSD";
/// See [`OUTSIDE_TOKENS`].
pub const OUTSIDE_PEER_TOKENS: &str = "tokens loaded from peers";

/// The figures of a whole log.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Summary {
    /// One entry per arm, in the order in which the arms ran.
    pub arms: Vec<ArmSummary>,
    /// Lines of the log that could not be read.
    pub skipped_lines: usize,
}

/// The figures of one arm.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ArmSummary {
    pub arm: String,
    /// Requests that ended.
    pub requests: usize,
    /// Failed requests by kind. Latencies, tokens and classes below count only the requests that
    /// did not fail.
    pub failures: BTreeMap<&'static str, usize>,
    /// From the first request due to the last end, in model seconds.
    pub span_s: f64,
    /// Time to first token, from when the request was due.
    pub ttft_s: Quantiles,
    /// Time per token after the first.
    pub tpot_s: Quantiles,
    /// Time to the end of the answer, from when the request was due.
    pub e2e_s: Quantiles,
    /// How late requests were sent. Part of the latencies; large values mean that the replayer was
    /// the bottleneck or that its window was full.
    pub start_delay_s: Quantiles,
    /// Turns that were sent before the previous answer was complete.
    pub early: usize,
    /// Where prompt tokens came from.
    pub sources: TokenSources,
    /// Tokens answered.
    pub output_tokens: u64,
    /// Tokens that these answers were asked for; `None` where the log does not say.
    pub asked_tokens: Option<u64>,
    /// Answers with fewer tokens than were asked for. They did not fail.
    pub short_answers: usize,
    /// Answers whose tokens are a number of events, because the server counts none.
    pub estimated_answers: usize,
    /// Wrong tokens among the checked ones, over all requests; `None` when nobody checked.
    pub wrong: Option<WrongTokens>,
    /// Requests by executed tokens, the smallest class first.
    pub classes: Vec<ClassSummary>,
    /// Requests per engine.
    pub instances: BTreeMap<String, usize>,
    /// What each link moved, by name.
    pub links: Vec<LinkTotal>,
    pub counters: BTreeMap<String, u64>,
    /// What the router decided; `None` where its log was not read.
    pub decisions: Option<DecisionSummary>,
    /// What the GPUs of the machine that replayed did, as far as it has any.
    pub gpus: Vec<GpuSummary>,
}

/// Where the prompt tokens of an arm came from, as its engines report it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TokenSources {
    /// Found in the GPU's own cache.
    pub gpu: u64,
    /// Fetched from outside of the GPU, but neither from an SSD nor from a peer.
    pub memory: u64,
    /// Fetched from an SSD.
    pub ssd: u64,
    /// Fetched from another node.
    pub peer: u64,
    pub computed: u64,
    /// Tokens of requests whose engine did not report its hits. They are in none of the above.
    pub unreported: u64,
}

/// Checked tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct WrongTokens {
    /// Tokens that were wrong or missing.
    pub tokens: u64,
    /// Answers that were checked.
    pub checked_requests: usize,
}

/// What one link moved during an arm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinkTotal {
    pub link: String,
    pub bytes: u64,
    pub lots: u64,
}

/// Requests whose engine executed a like number of prompt tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassSummary {
    pub class: Class,
    pub requests: usize,
    /// Their share of all requests whose hits are known, 0 to 1.
    pub share: f64,
    /// Their time to first token.
    pub ttft_s: Quantiles,
    /// Their time per token after the first.
    pub tpot_s: Quantiles,
}

/// Classes by executed tokens, which are input less cached as the engine reports it, not as a
/// router estimates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Fewer than 5,000.
    Warm,
    /// 5,000 to 20,000.
    Medium,
    /// 20,000 to 50,000.
    Heavy,
    /// 50,000 or more.
    VeryHeavy,
}

impl Class {
    /// All classes, the smallest first.
    pub const ALL: [Class; 4] = [Class::Warm, Class::Medium, Class::Heavy, Class::VeryHeavy];

    /// The class of a request.
    pub fn of(executed_tokens: u32) -> Class {
        match executed_tokens {
            0..5_000 => Class::Warm,
            5_000..20_000 => Class::Medium,
            20_000..50_000 => Class::Heavy,
            50_000.. => Class::VeryHeavy,
        }
    }

    /// The class in words.
    pub fn label(self) -> &'static str {
        match self {
            Class::Warm => "WARM < 5k",
            Class::Medium => "MEDIUM 5-20k",
            Class::Heavy => "HEAVY 20-50k",
            Class::VeryHeavy => "HEAVY > 50k",
        }
    }
}

impl Summary {
    /// The names of all counters, in order.
    pub fn counter_names(&self) -> Vec<&str> {
        let names: BTreeSet<&str> =
            self.arms.iter().flat_map(|arm| arm.counters.keys().map(String::as_str)).collect();
        names.into_iter().collect()
    }
}

impl TokenSources {
    /// All tokens whose source is known.
    pub fn known(&self) -> u64 {
        self.gpu + self.memory + self.ssd + self.peer + self.computed
    }

    /// Share of tokens that were not computed, 0 to 1; `None` when no engine reported.
    pub fn hit_rate(&self) -> Option<f64> {
        let known = self.known();
        (known > 0).then(|| (known - self.computed) as f64 / known as f64)
    }

    fn add(&mut self, record: &RequestRecord) {
        let input = u64::from(record.input_tokens);
        let Some(cached) = record.cached_tokens else {
            self.unreported += input;
            return;
        };
        let cached = u64::from(cached).min(input);
        let external = u64::from(record.external_cached_tokens.unwrap_or(0)).min(cached);
        let ssd = u64::from(record.ssd_cached_tokens.unwrap_or(0)).min(external);
        self.gpu += cached - external;
        let peer = u64::from(record.peer_cached_tokens.unwrap_or(0)).min(external - ssd);
        self.memory += external - ssd - peer;
        self.ssd += ssd;
        self.peer += peer;
        self.computed += input - cached;
    }

    /// Takes what was not on the GPU out of what answers call cached.
    fn tell_apart(&mut self, counters: &BTreeMap<String, u64>) {
        let counted = |name| counters.get(name).copied().unwrap_or(0);
        let outside = counted(OUTSIDE_TOKENS).min(self.gpu);
        let ssd = counted(OUTSIDE_SSD_TOKENS).min(outside);
        let peer = counted(OUTSIDE_PEER_TOKENS).min(outside - ssd);
        self.gpu -= outside;
        self.memory += outside - ssd - peer;
        self.ssd += ssd;
        self.peer += peer;
    }
}

impl ArmSummary {
    /// Failed requests of all kinds.
    pub fn failed(&self) -> usize {
        self.failures.values().sum()
    }

    /// The figures that results objects keep of an arm, as name, unit and value; those that were
    /// not measured are absent.
    pub fn figures(&self) -> Vec<(&'static str, &'static str, f64)> {
        let measured = [
            ("ttft_p50_s", "s", self.ttft_s.p50),
            ("ttft_p90_s", "s", self.ttft_s.p90),
            ("ttft_p99_s", "s", self.ttft_s.p99),
            ("tpot_p90_s", "s", self.tpot_s.p90),
            ("tpot_p99_s", "s", self.tpot_s.p99),
            ("e2e_p50_s", "s", self.e2e_s.p50),
            ("hit_rate", "share", self.sources.hit_rate()),
            ("wrong_tokens", "tokens", self.wrong.map(|wrong| wrong.tokens as f64)),
            ("failures", "requests", Some(self.failed() as f64)),
            ("short_answers", "requests", self.asked_tokens.map(|_| self.short_answers as f64)),
        ];
        measured.into_iter().filter_map(|(name, unit, value)| Some((name, unit, value?))).collect()
    }

    /// Requests of the busiest engine over those of the mean engine; `None` with fewer than two
    /// engines.
    pub fn imbalance(&self) -> Option<f64> {
        let most = *self.instances.values().max().filter(|_| self.instances.len() > 1)?;
        let mean = self.instances.values().sum::<usize>() as f64 / self.instances.len() as f64;
        Some(most as f64 / mean)
    }
}

/// The figures of a log.
pub fn summarize(log: &RecordLog) -> Summary {
    let arms = arms(log)
        .into_iter()
        .map(|arm| {
            let of_requests = summarize_requests(arm, log.requests.iter().filter(|record| record.arm == arm));
            let (links, counters) = (links(arm, log), counters(arm, log));
            let mut sources = of_requests.sources;
            sources.tell_apart(&counters);
            ArmSummary {
                links,
                counters,
                sources,
                decisions: decisions(arm, log),
                gpus: gpus(arm, log),
                ..of_requests
            }
        })
        .collect();
    Summary { arms, skipped_lines: log.skipped.len() }
}

/// The arms of a log in the order in which they first appear.
fn arms(log: &RecordLog) -> Vec<&str> {
    let named = log.runs.iter().map(|run| run.arm.as_str());
    let mut arms = Vec::new();
    for arm in named.chain(log.requests.iter().map(|record| record.arm.as_str())) {
        if !arms.contains(&arm) {
            arms.push(arm);
        }
    }
    arms
}

fn summarize_requests<'a>(arm: &str, records: impl Iterator<Item = &'a RequestRecord>) -> ArmSummary {
    let records: Vec<&RequestRecord> = records.collect();
    let ok: Vec<&RequestRecord> = records.iter().copied().filter(|record| record.is_ok()).collect();
    let mut summary = ArmSummary {
        arm: arm.to_owned(),
        requests: records.len(),
        span_s: span_s(&records),
        ttft_s: Quantiles::of(ok.iter().filter_map(|record| record.ttft_s)),
        tpot_s: Quantiles::of(ok.iter().filter_map(|record| record.tpot_s)),
        e2e_s: Quantiles::of(ok.iter().map(|record| record.e2e_s)),
        start_delay_s: Quantiles::of(records.iter().map(|record| record.start_delay_s())),
        early: records.iter().filter(|record| record.early).count(),
        output_tokens: ok.iter().map(|record| u64::from(record.output_tokens)).sum(),
        asked_tokens: ok.iter().map(|record| record.asked_tokens.map(u64::from)).sum(),
        short_answers: ok.iter().filter(|record| record.missing_tokens() > 0).count(),
        estimated_answers: ok.iter().filter(|record| record.estimated).count(),
        wrong: wrong(&records),
        classes: classes(&ok),
        ..ArmSummary::default()
    };
    ok.iter().for_each(|record| summary.sources.add(record));
    for record in &records {
        if let Outcome::Failed(failure) = &record.outcome {
            *summary.failures.entry(failure.kind.label()).or_default() += 1;
        }
        if let Some(backend) = &record.backend {
            *summary.instances.entry(backend.clone()).or_default() += 1;
        }
    }
    summary
}

/// Samples count from the start of the arm, so each link's last one is its total.
fn links(arm: &str, log: &RecordLog) -> Vec<LinkTotal> {
    let samples = log.links.iter().filter(|sample| sample.arm == arm);
    let totals: BTreeMap<&str, (u64, u64)> =
        samples.map(|sample| (sample.link.as_str(), (sample.bytes, sample.lots))).collect();
    let total = |(link, (bytes, lots)): (&str, _)| LinkTotal { link: link.to_owned(), bytes, lots };
    totals.into_iter().map(total).collect()
}

fn counters(arm: &str, log: &RecordLog) -> BTreeMap<String, u64> {
    let counters = log.counters.iter().filter(|counter| counter.arm == arm);
    counters.map(|counter| (counter.name.clone(), counter.value)).collect()
}

fn span_s(records: &[&RequestRecord]) -> f64 {
    let first = records.iter().map(|record| record.arrival_s).min_by(f64::total_cmp);
    let last = records.iter().map(|record| record.arrival_s + record.e2e_s).max_by(f64::total_cmp);
    first.zip(last).map_or(0.0, |(first, last)| last - first)
}

fn wrong(records: &[&RequestRecord]) -> Option<WrongTokens> {
    let checked: Vec<u32> = records.iter().filter_map(|record| record.wrong_tokens).collect();
    let tokens = checked.iter().map(|&tokens| u64::from(tokens)).sum();
    (!checked.is_empty()).then_some(WrongTokens { tokens, checked_requests: checked.len() })
}

fn classes(ok: &[&RequestRecord]) -> Vec<ClassSummary> {
    let classed: Vec<(Class, &RequestRecord)> =
        ok.iter().filter_map(|record| Some((Class::of(record.executed_tokens()?), *record))).collect();
    let of_class =
        |class| classed.iter().filter(move |(other, _)| *other == class).map(|(_, record)| *record);
    Class::ALL
        .into_iter()
        .map(|class| ClassSummary {
            class,
            requests: of_class(class).count(),
            share: of_class(class).count() as f64 / classed.len().max(1) as f64,
            ttft_s: Quantiles::of(of_class(class).filter_map(|record| record.ttft_s)),
            tpot_s: Quantiles::of(of_class(class).filter_map(|record| record.tpot_s)),
        })
        .collect()
}
