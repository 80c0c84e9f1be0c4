//! The router's figures as Prometheus text. It knows names and the text format; it must never know how anything is
//! counted.

use crate::health::Failure;
use crate::stats::{BOUNDS_SECONDS, BackendStats, RouterStats};
use std::fmt::Write;

/// What is counted beside the backends' figures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Answers by status: those of each backend, and last the router's own.
    pub statuses: Vec<Vec<(u16, u64)>>,
    /// Lines of the request log that were lost.
    pub log_lines_dropped: u64,
    /// What the client sent was wrong: status 400 to 413.
    pub bad_request: u64,
    /// Too many requests in flight: 503.
    pub overloaded: u64,
    /// No backend answered: 502, 503 or 504.
    pub no_answer: u64,
}

/// The text of `/metrics`.
pub fn render(stats: &RouterStats, counts: &Counts) -> String {
    let mut text = Text(String::with_capacity(8 * 1024));
    let backends = &stats.backends;
    text.family("forebay_route_info", "gauge", "The policy in use.");
    text.line("forebay_route_info", &[("policy", stats.policy)], 1.0);
    text.per_backend(backends, "backend_up", "gauge", "1 if requests may be sent to it.", |b| {
        f64::from(b.up)
    });
    text.per_backend(backends, "in_flight", "gauge", "Requests in flight.", |b| f64::from(b.in_flight));
    let help = "Prompt tokens not yet computed, estimated.";
    text.per_backend(backends, "pending_prefill_tokens", "gauge", help, |b| b.pending_prefill_tokens as f64);
    let help = "Prompt tokens of requests in flight, estimated.";
    text.per_backend(backends, "context_tokens", "gauge", help, |b| b.context_tokens as f64);
    let help = "Prompt chunks in the shadow prefix index.";
    text.per_backend(backends, "index_chunks", "gauge", help, |b| b.index_chunks as f64);
    let help = "Times it was taken out of use.";
    text.per_backend(backends, "ejections_total", "counter", help, |b| b.ejections as f64);
    text.requests(backends);
    let help = "Prompt tokens of answers that reported what was cached.";
    text.per_backend(backends, "prompt_tokens_total", "counter", help, |b| b.prompt_tokens as f64);
    let help = "Prompt tokens that engines had cached, as reported.";
    text.per_backend(backends, "cached_tokens_total", "counter", help, |b| b.cached_tokens as f64);
    let help = "Prompt tokens that the router believed cached.";
    text.per_backend(backends, "predicted_tokens_total", "counter", help, |b| b.predicted_tokens as f64);
    let help =
        "Answers that did not report how much of the prompt was cached, which teach the router nothing.";
    text.per_backend(backends, "answers_without_cached_tokens_total", "counter", help, |b| {
        b.without_cached_tokens as f64
    });
    text.prediction_errors(backends);
    text.statuses(backends, &counts.statuses);
    text.first_byte(backends);
    text.family("forebay_route_refused_total", "counter", "Requests answered by the router itself.");
    for (reason, count) in [
        ("bad-request", counts.bad_request),
        ("overloaded", counts.overloaded),
        ("no-answer", counts.no_answer),
    ] {
        text.line("forebay_route_refused_total", &[("reason", reason)], count as f64);
    }
    let name = "forebay_route_request_log_dropped_total";
    text.family(name, "counter", "Lines of the request log that were lost.");
    text.line(name, &[], counts.log_lines_dropped as f64);
    text.0
}

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Label values are names that need no escaping: the configuration allows no others.
    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> =
            labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    /// An empty backend is the router itself.
    fn statuses(&mut self, backends: &[BackendStats], statuses: &[Vec<(u16, u64)>]) {
        let name = "forebay_route_responses_total";
        self.family(name, "counter", "Answers to clients by status; without a backend the router's own.");
        let names = backends.iter().map(|backend| &backend.name[..]).chain([""]);
        for (backend, statuses) in names.zip(statuses) {
            for &(status, count) in statuses {
                self.line(name, &[("backend", backend), ("code", &status.to_string())], count as f64);
            }
        }
    }

    fn per_backend(
        &mut self,
        backends: &[BackendStats],
        name: &str,
        kind: &str,
        help: &str,
        value: impl Fn(&BackendStats) -> f64,
    ) {
        let name = format!("forebay_route_{name}");
        self.family(&name, kind, help);
        for backend in backends {
            self.line(&name, &[("backend", &backend.name)], value(backend));
        }
    }

    fn requests(&mut self, backends: &[BackendStats]) {
        let name = "forebay_route_attempts_total";
        self.family(name, "counter", "Attempts to have a request answered, by how they ended.");
        for backend in backends {
            let name_label = ("backend", &backend.name[..]);
            self.line(name, &[name_label, ("end", "answered")], backend.answered as f64);
            self.line(name, &[name_label, ("end", "cancelled")], backend.cancelled as f64);
            for (failure, &count) in Failure::ALL.iter().zip(&backend.failures) {
                self.line(name, &[name_label, ("end", failure.name())], count as f64);
            }
        }
    }

    fn prediction_errors(&mut self, backends: &[BackendStats]) {
        let name = "forebay_route_hit_prediction_error_tokens_total";
        self.family(
            name,
            "counter",
            "Difference of predicted and reported cached tokens, summed over requests.",
        );
        for backend in backends {
            let name_label = ("backend", &backend.name[..]);
            self.line(name, &[name_label, ("direction", "over")], backend.over_predicted_tokens as f64);
            self.line(name, &[name_label, ("direction", "under")], backend.under_predicted_tokens as f64);
        }
    }

    fn first_byte(&mut self, backends: &[BackendStats]) {
        let name = "forebay_route_first_byte_seconds";
        self.family(name, "histogram", "From the decision to the first byte of the answer.");
        for backend in backends {
            let name_label = ("backend", &backend.name[..]);
            let histogram = &backend.first_byte_seconds;
            let mut count = 0;
            let bounds = BOUNDS_SECONDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
            for (bound, &bucket) in bounds.zip(&histogram.buckets) {
                count += bucket;
                self.line(&format!("{name}_bucket"), &[name_label, ("le", &bound)], count as f64);
            }
            self.line(&format!("{name}_sum"), &[name_label], histogram.sum);
            self.line(&format!("{name}_count"), &[name_label], count as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_its_type_and_histograms_are_cumulative() {
        let mut backend = BackendStats::new("a");
        for seconds in [0.01, 0.01, 3.0, 1_000.0] {
            backend.first_byte_seconds.observe(seconds);
        }
        backend.count_failure(Failure::Garbage);
        let stats = RouterStats { policy: "lpwl", decisions: 4, backends: vec![backend] };
        let statuses = vec![vec![(200, 5), (500, 6)], vec![(404, 7)]];
        let counts = Counts { statuses, log_lines_dropped: 8, bad_request: 1, overloaded: 2, no_answer: 3 };
        let text = render(&stats, &counts);
        for line in [
            "forebay_route_first_byte_seconds_bucket{backend=\"a\",le=\"0.02\"} 2",
            "forebay_route_first_byte_seconds_bucket{backend=\"a\",le=\"5\"} 3",
            "forebay_route_first_byte_seconds_bucket{backend=\"a\",le=\"+Inf\"} 4",
            "forebay_route_first_byte_seconds_count{backend=\"a\"} 4",
            "forebay_route_attempts_total{backend=\"a\",end=\"garbage\"} 1",
            "forebay_route_refused_total{reason=\"no-answer\"} 3",
            "forebay_route_responses_total{backend=\"a\",code=\"500\"} 6",
            "forebay_route_responses_total{backend=\"\",code=\"404\"} 7",
            "forebay_route_request_log_dropped_total 8",
            "# TYPE forebay_route_in_flight gauge",
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
