//! The router's page for Prometheus: names, help and labels of what the router counts. The text
//! itself is written by `prometheus-client`.

use crate::engine::{Engine, Statuses};
use crate::hand_over::HandOverEnd;
use crate::health::Failure;
use crate::policy::Reason;
use crate::rank_events::Dropped;
use crate::refusal::Refusal;
use crate::reported_load::Unread;
use crate::request_trace::TracingCounts;
use crate::stats::{BackendStats, RouterStats};
use http::StatusCode;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::prometheus_text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is counted beside the engines' figures.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests refused because of what the client sent.
    pub bad_requests: AtomicU64,
    /// Requests refused because too many were under way.
    pub overloaded: AtomicU64,
    /// Requests that no engine answered.
    pub unanswered: AtomicU64,
    /// Requests refused because no engine would keep to their SLO.
    pub too_late: AtomicU64,
    /// Streams of Envoy that ended because of what it said on them.
    pub protocol_errors: AtomicU64,
    /// Requests whose hints about KV were taken out: their client may send none.
    pub hints_removed: AtomicU64,
    /// The router's own answers.
    pub own_statuses: Statuses,
}

impl Counters {
    /// A request is answered with a refusal.
    pub fn refused(&self, refusal: &Refusal) {
        if refusal.status == StatusCode::TOO_MANY_REQUESTS {
            self.too_late.fetch_add(1, Ordering::Relaxed);
        } else if refusal.status.is_client_error() {
            self.bad_requests.fetch_add(1, Ordering::Relaxed);
        }
        self.own_statuses.count(refusal.status);
    }

    /// All of it now, beside what engines answered.
    pub fn counts(&self, engines: &[Arc<Engine>], lost_lines: LostLines, tracing: TracingCounts) -> Counts {
        let of_engine = |engine: &Arc<Engine>| (engine.name().to_owned(), engine.statuses.counts());
        let own = (String::new(), self.own_statuses.counts());
        Counts {
            statuses: engines.iter().map(of_engine).chain([own]).collect(),
            lost_lines,
            tracing,
            bad_request: self.bad_requests.load(Ordering::Relaxed),
            overloaded: self.overloaded.load(Ordering::Relaxed),
            no_answer: self.unanswered.load(Ordering::Relaxed),
            ttft_slo: self.too_late.load(Ordering::Relaxed),
            protocol: self.protocol_errors.load(Ordering::Relaxed),
            hints_removed: self.hints_removed.load(Ordering::Relaxed),
        }
    }
}

/// Lines of logs that were lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostLines {
    pub requests: u64,
    pub decisions: u64,
}

/// [`Counters`] at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Answers by status: those of each backend, and last, without a name, the router's own.
    pub statuses: Vec<(String, Vec<(u16, u64)>)>,
    pub lost_lines: LostLines,
    pub tracing: TracingCounts,
    /// What the client sent was wrong: status 400 to 413.
    pub bad_request: u64,
    pub hints_removed: u64,
    /// Too many requests in flight: 503.
    pub overloaded: u64,
    /// No backend answered: 502, 503 or 504.
    pub no_answer: u64,
    /// No backend would keep to the SLO of TTFT: 429.
    pub ttft_slo: u64,
    /// Envoy said what the protocol of endpoint pickers does not allow.
    pub protocol: u64,
}

/// The text of `/metrics`.
pub fn render(stats: RouterStats, counts: Counts) -> String {
    let mut registry = Registry::with_prefix("forebay_route");
    registry.register_collector(Box::new(Page { stats, counts }));
    let mut text = String::with_capacity(8 * 1024);
    // Neither a String nor these names refuse anything.
    let _ = encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Page {
    stats: RouterStats,
    counts: Counts,
}

type Labels<'a, const COUNT: usize> = [(&'static str, &'a str); COUNT];

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Families(&mut encoder);
        page.gauge("info", "The policy in use.", [([("policy", self.stats.policy)], 1)])?;
        self.state(&mut page)?;
        self.requests(&mut page)?;
        self.hand_overs(&mut page)?;
        self.tokens(&mut page)?;
        self.chunks(&mut page)?;
        self.kv_events(&mut page)?;
        self.stores(&mut page)?;
        self.statuses(&mut page)?;
        self.times(&mut page)?;
        self.decisions(&mut page)?;
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let cpu_s = cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9;
        page.counter("process_cpu_seconds", "CPU time of all threads of the process.", [([], cpu_s)])?;
        let refused = [
            ("bad-request", self.counts.bad_request),
            ("overloaded", self.counts.overloaded),
            ("no-answer", self.counts.no_answer),
            ("ttft-slo", self.counts.ttft_slo),
            ("protocol", self.counts.protocol),
        ];
        let refused = refused.map(|(reason, count)| ([("reason", reason)], count));
        page.counter("refused", "Requests answered by the router itself.", refused)?;
        let help = "Requests whose client's hints about KV were taken out.";
        page.counter("hints_removed", help, [([], self.counts.hints_removed)])?;
        let lost = self.counts.lost_lines;
        let help = "Lines of the request log that were lost.";
        page.counter("request_log_dropped", help, [([], lost.requests)])?;
        let help = "Lines of the decision log that were lost.";
        page.counter("decision_log_dropped", help, [([], lost.decisions)])?;
        self.tracing(&mut page)
    }
}

impl Page {
    fn tracing(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let of = self.counts.tracing;
        let help = "Requests whose traceparent was ignored, since the standard does not allow it.";
        page.counter("traceparents_ignored", help, [([], of.ignored)])?;
        let ends = [("taken", of.pushes_taken), ("failed", of.pushes_failed)];
        let ends = ends.map(|(end, count)| ([("end", end)], count));
        page.counter("trace_pushes", "Pushes of spans to the collector, by how they ended.", ends)?;
        let help =
            "Spans that were dropped because too many waited to be pushed, or the collector refuses them.";
        page.counter("spans_dropped", help, [([], of.spans_dropped)])
    }

    fn each<Value>(
        &self,
        value: impl Fn(&BackendStats) -> Value,
    ) -> impl Iterator<Item = (Labels<'_, 1>, Value)> {
        self.stats.backends.iter().map(move |backend| ([("backend", &backend.name[..])], value(backend)))
    }

    fn state(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        page.gauge("backend_up", "1 if requests may be sent to it.", self.each(|of| of.up.into()))?;
        page.gauge("in_flight", "Requests in flight.", self.each(|of| of.in_flight.into()))?;
        let help = "Requests there that the router has not sent, by the engine's own metrics.";
        page.gauge("others_in_flight", help, self.each(|of| of.others_in_flight))?;
        let help = "Tokens whose KV fits its GPU, by its own metrics or as the router was told.";
        page.gauge("pool_tokens", help, self.each(|of| of.pool_tokens))?;
        let unread = self.stats.backends.iter().flat_map(|of| {
            let reasons = Unread::NAMES.iter().map(|(_, name)| *name).zip(of.unread_metrics);
            reasons.map(|(reason, count)| ([("backend", &of.name[..]), ("reason", reason)], count))
        });
        page.counter("unread_engine_metrics", "Times that its metrics could not be read.", unread)?;
        let help = "Prompt tokens not yet computed, estimated.";
        page.gauge("pending_prefill_tokens", help, self.each(|of| of.pending_prefill_tokens))?;
        let help = "Prompt tokens of requests in flight, estimated.";
        page.gauge("context_tokens", help, self.each(|of| of.context_tokens))?;
        let help = "Prompt chunks in the shadow prefix index.";
        page.gauge("index_chunks", help, self.each(|of| of.index_chunks as u64))?;
        page.counter("ejections", "Times it was taken out of use.", self.each(|of| of.ejections))
    }

    fn requests(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let ends = self.stats.backends.iter().flat_map(|of| {
            let failures = Failure::NAMES.iter().map(|(_, name)| *name).zip(of.failures);
            let ends = [("answered", of.answered), ("cancelled", of.cancelled)].into_iter().chain(failures);
            ends.map(move |(end, count)| ([("backend", &of.name[..]), ("end", end)], count))
        });
        page.counter("attempts", "Attempts to have a request answered, by how they ended.", ends)
    }

    fn hand_overs(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let ends = self.stats.backends.iter().flat_map(|of| {
            let ends = HandOverEnd::NAMES.iter().map(|(_, name)| *name).zip(of.hand_overs);
            ends.map(move |(end, count)| ([("backend", &of.name[..]), ("end", end)], count))
        });
        let help = "Prompts that it was to compute for other engines, by how the hand-over ended.";
        page.counter("hand_overs", help, ends)
    }

    fn tokens(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let help = "Prompt tokens of answers that reported what was cached.";
        page.counter("prompt_tokens", help, self.each(|of| of.prompt_tokens))?;
        let help = "Prompt tokens that engines had cached, as reported.";
        page.counter("cached_tokens", help, self.each(|of| of.cached_tokens))?;
        let help = "Prompt tokens that the router believed cached.";
        page.counter("predicted_tokens", help, self.each(|of| of.predicted_tokens))?;
        let help =
            "Answers that did not report how much of the prompt was cached, which teach the router nothing.";
        page.counter("answers_without_cached_tokens", help, self.each(|of| of.without_cached_tokens))?;
        let errors = self.stats.backends.iter().flat_map(|of| {
            let errors = [("over", of.over_predicted_tokens), ("under", of.under_predicted_tokens)];
            errors.map(|(direction, tokens)| ([("backend", &of.name[..]), ("direction", direction)], tokens))
        });
        let help = "Difference of predicted and reported cached tokens, summed over requests.";
        page.counter("hit_prediction_error_tokens", help, errors)
    }

    /// What cannot be computed anew with any cache: different chunks of all that came.
    fn chunks(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let help = "Chunks of 512 bytes of prompts that were routed.";
        page.counter("prompt_chunks", help, [([], self.stats.prompt_chunks)])?;
        let help = "Different prompt chunks since the start, estimated: no cache can have had these.";
        page.gauge("distinct_prompt_chunks", help, [([], self.stats.distinct_prompt_chunks)])
    }

    fn kv_events(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let help = "1 if its KV events tell how much it holds.";
        page.gauge("kv_events_followed", help, self.each(|of| of.kv_events_followed.into()))?;
        let help = "Blocks that it holds, by its KV events.";
        page.gauge("kv_live_blocks", help, self.each(|of| of.kv_live_blocks))?;
        let help = "Batches of its KV events that were taken in.";
        page.counter("kv_event_batches", help, self.each(|of| of.kv_events.batches))?;
        let help = "Times that batches of its KV events were missing.";
        page.counter("kv_event_gaps", help, self.each(|of| of.kv_events.gaps))?;
        let help = "Times that it was asked for KV events again.";
        page.counter("kv_event_replays", help, self.each(|of| of.kv_events.replays))?;
        let help = "Times that its cache was emptied, by its KV events.";
        page.counter("kv_emptied", help, self.each(|of| of.kv_events.emptied))?;
        let dropped = self.stats.backends.iter().flat_map(|of| {
            let reasons = Dropped::NAMES.iter().map(|(_, name)| *name).zip(of.kv_events.dropped);
            reasons.map(|(reason, count)| ([("backend", &of.name[..]), ("reason", reason)], count))
        });
        page.counter("kv_events_dropped", "KV events that were left out.", dropped)
    }

    fn stores(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let stores = self.stats.stores.iter();
        let samples = stores.map(|store| ([("store", &store.name[..])], store.chunks as u64));
        page.gauge("store_chunks", "Prompt chunks in the shadow index of a store.", samples)
    }

    /// An empty backend is the router itself.
    fn statuses(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let statuses: Vec<(&str, String, u64)> = self
            .counts
            .statuses
            .iter()
            .flat_map(|(name, of)| {
                of.iter().map(move |&(status, count)| (&name[..], status.to_string(), count))
            })
            .collect();
        let statuses = statuses.iter();
        let samples = statuses.map(|(name, code, count)| ([("backend", *name), ("code", &code[..])], *count));
        page.counter(
            "responses",
            "Answers to clients by status; without a backend the router's own.",
            samples,
        )
    }

    fn times(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let help = "From the decision to the first byte of the answer.";
        self.histogram(page, "first_byte_seconds", help, |of| &of.first_byte_seconds)?;
        let help = "What the times to the first bytes of these answers were predicted to be, summed.";
        page.counter("predicted_first_byte_seconds", help, self.each(|of| of.predicted_first_byte_seconds))?;
        let help = "From the decision to the end of a whole answer.";
        self.histogram(page, "request_seconds", help, |of| &of.request_seconds)?;
        let help = "Time for each token of a streamed answer after its first.";
        self.histogram(page, "output_token_seconds", help, |of| &of.output_token_seconds)
    }

    fn histogram(
        &self,
        page: &mut Families<'_, '_>,
        name: &str,
        help: &str,
        of: impl Fn(&BackendStats) -> &Histogram,
    ) -> fmt::Result {
        let mut family = page.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let mut backends = self.stats.backends.iter();
        backends.try_for_each(|backend| {
            let labels = [("backend", &backend.name[..])];
            of(backend).encode(family.encode_family(&labels)?)
        })
    }

    fn decisions(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let reasons = Reason::NAMES.iter().map(|(_, name)| *name).zip(self.stats.reasons);
        let help = "Decisions where an attempt goes, by the rule that settled it.";
        page.counter("decisions", help, reasons.map(|(reason, count)| ([("reason", reason)], count)))
    }
}

/// The families of a page, each with its samples.
struct Families<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Families<'_, '_> {
    fn gauge<'l, const COUNT: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'l, COUNT>, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        let mut samples = samples.into_iter();
        samples.try_for_each(|(labels, value)| ConstGauge::new(value).encode(family.encode_family(&labels)?))
    }

    /// `_total` is added to the name.
    fn counter<'l, const COUNT: usize>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels<'l, COUNT>, impl EncodeCounterValue)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        let mut samples = samples.into_iter();
        samples
            .try_for_each(|(labels, value)| ConstCounter::new(value).encode(family.encode_family(&labels)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_its_type_and_histograms_are_cumulative() {
        let mut backend = BackendStats::new("a");
        for seconds in [0.01, 3.0, 1_000.0] {
            backend.first_byte_seconds.observe(seconds);
        }
        backend.count_failure(Failure::Garbage);
        backend.count_first_byte(10_000, 20_000);
        backend.request_seconds.observe(7.0);
        backend.count_output_tokens(40_000, 3);
        backend.count_output_tokens(40_000, 1);
        let mut reasons = [0; Reason::NAMES.len()];
        reasons[Reason::Turn as usize] = 4;
        let backends = vec![backend];
        let stats = RouterStats {
            policy: "lpwl",
            decisions: 4,
            reasons,
            prompt_chunks: 12,
            distinct_prompt_chunks: 5,
            backends,
            stores: Vec::new(),
        };
        let statuses = vec![("a".into(), vec![(200, 5), (500, 6)]), (String::new(), vec![(404, 7)])];
        let lost_lines = LostLines { requests: 8, decisions: 9 };
        let counts = Counts {
            statuses,
            lost_lines,
            tracing: TracingCounts { ignored: 10, spans_dropped: 11, pushes_taken: 12, pushes_failed: 13 },
            bad_request: 1,
            hints_removed: 6,
            overloaded: 2,
            no_answer: 3,
            ttft_slo: 4,
            protocol: 5,
        };
        let text = render(stats, counts);
        for line in [
            "forebay_route_first_byte_seconds_bucket{backend=\"a\",le=\"0.02\"} 2",
            "forebay_route_first_byte_seconds_bucket{backend=\"a\",le=\"5\"} 3",
            "forebay_route_first_byte_seconds_bucket{backend=\"a\",le=\"+Inf\"} 4",
            "forebay_route_first_byte_seconds_count{backend=\"a\"} 4",
            "forebay_route_predicted_first_byte_seconds_total{backend=\"a\"} 0.02",
            "forebay_route_request_seconds_sum{backend=\"a\"} 7.0",
            "forebay_route_output_token_seconds_bucket{backend=\"a\",le=\"0.02\"} 1",
            "forebay_route_output_token_seconds_count{backend=\"a\"} 1",
            "forebay_route_decisions_total{reason=\"turn\"} 4",
            "forebay_route_decisions_total{reason=\"slo\"} 0",
            "forebay_route_attempts_total{backend=\"a\",end=\"garbage\"} 1",
            "forebay_route_refused_total{reason=\"no-answer\"} 3",
            "forebay_route_refused_total{reason=\"ttft-slo\"} 4",
            "forebay_route_refused_total{reason=\"protocol\"} 5",
            "forebay_route_responses_total{backend=\"a\",code=\"500\"} 6",
            "forebay_route_responses_total{backend=\"\",code=\"404\"} 7",
            "forebay_route_request_log_dropped_total 8",
            "forebay_route_decision_log_dropped_total 9",
            "forebay_route_traceparents_ignored_total 10",
            "forebay_route_spans_dropped_total 11",
            "forebay_route_trace_pushes_total{end=\"failed\"} 13",
            "# TYPE forebay_route_in_flight gauge",
            "forebay_route_prompt_chunks_total 12",
            "forebay_route_distinct_prompt_chunks 5",
        ] {
            assert!(text.lines().any(|candidate| candidate == line), "{line} missing in\n{text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let family = line.split(['{', ' ']).next().unwrap();
            let family =
                ["_bucket", "_sum", "_count"].iter().fold(family, |name, end| name.trim_end_matches(end));
            assert!(text.contains(&format!("# TYPE {family} ")), "{family} has no type");
        }
    }
}
