//! The engine's counts as Prometheus reads them, under vLLM's names where vLLM has the same thing. This file knows names
//! and the text format; it must never count anything. Times are model seconds.

use crate::stats::{E2E_BOUNDS_S, Histogram, Stats, TPOT_BOUNDS_S, TTFT_BOUNDS_S};
use std::fmt::{Display, Write};

/// All metrics of an engine.
pub fn render(stats: &Stats, model: &str, block_tokens: usize) -> String {
    let mut text = Text { text: String::with_capacity(8 << 10), model: escape(model) };
    let used = stats.blocks_used as f64 / (stats.blocks_total.max(1)) as f64;
    text.gauge("vllm:num_requests_running", "Requests with a share in every step", stats.running);
    text.gauge("vllm:num_requests_waiting", "Requests in the queue", stats.waiting);
    text.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them", used);
    let (blocks, info) = (stats.blocks_total, "Blocks of the KV pool");
    text.labelled(
        "vllm:cache_config_info",
        "gauge",
        info,
        &[(format!("block_size=\"{block_tokens}\",num_gpu_blocks=\"{blocks}\""), 1)],
    );

    let cache = &stats.scheduler;
    text.counter(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the GPU's prefix cache",
        cache.gpu_queries_tokens,
    );
    text.counter("vllm:prefix_cache_hits", "Tokens found there", cache.gpu_hits_tokens);
    text.counter(
        "vllm:external_prefix_cache_queries",
        "Tokens looked up in the store",
        cache.store_queries_tokens,
    );
    text.counter(
        "vllm:external_prefix_cache_hits",
        "Tokens that came from the store",
        cache.store_hits_tokens,
    );
    let (disk, peers) = (cache.disk_hits_tokens, cache.peer_hits_tokens);
    let in_memory = cache.store_hits_tokens - disk - peers;
    text.labelled(
        "forebay_external_prefix_cache_hits_total",
        "counter",
        "Tokens that came from the store, by tier",
        &[
            ("tier=\"memory\"".to_owned(), in_memory),
            ("tier=\"disk\"".to_owned(), disk),
            ("tier=\"peer\"".to_owned(), peers),
        ],
    );
    text.counter(
        "vllm:num_preemptions",
        "Requests whose blocks were taken, to be recomputed",
        cache.preemptions,
    );
    text.counter("vllm:prompt_tokens", "Tokens of prompts", stats.prompt_tokens);
    text.counter("vllm:generation_tokens", "Tokens of output", stats.output_tokens);
    text.labelled(
        "vllm:request_success_total",
        "counter",
        "Requests by how they ended",
        &[
            ("finished_reason=\"length\"".to_owned(), stats.finished),
            ("finished_reason=\"abort\"".to_owned(), stats.aborted),
            ("finished_reason=\"error\"".to_owned(), stats.failed),
        ],
    );
    text.histogram(
        "vllm:time_to_first_token_seconds",
        "Time to the first token",
        &TTFT_BOUNDS_S,
        &stats.ttft,
    );
    let help = "Time per output token after the first";
    text.histogram("vllm:request_time_per_output_token_seconds", help, &TPOT_BOUNDS_S, &stats.tpot);
    text.histogram("vllm:e2e_request_latency_seconds", "Time to the last token", &E2E_BOUNDS_S, &stats.e2e);

    let store = &stats.store;
    text.labelled(
        "forebay_loaded_chunks_total",
        "counter",
        "Chunks to be loaded from the store, by outcome",
        &[
            ("outcome=\"good\"".to_owned(), store.loaded_chunks),
            ("outcome=\"corrupt\"".to_owned(), store.corrupt_chunks),
            ("outcome=\"node_gone\"".to_owned(), store.node_gone_chunks),
            ("outcome=\"dead_lease\"".to_owned(), store.dead_lease_chunks),
            ("outcome=\"missing\"".to_owned(), store.missing_chunks),
            ("outcome=\"unmoved\"".to_owned(), store.unmoved_chunks),
            ("outcome=\"unused\"".to_owned(), store.unused_chunks),
        ],
    );
    let by_source = |source: &str, chunks: u64| (format!("source=\"{source}\""), chunks);
    let near_chunks = store.disk_chunks + store.peer_chunks;
    text.labelled(
        "forebay_good_chunks_total",
        "counter",
        "Chunks loaded with every byte right, by where the store had them",
        &[
            by_source("memory", store.loaded_chunks - near_chunks),
            by_source("disk", store.disk_chunks),
            by_source("peer", store.peer_chunks),
        ],
    );
    let help = "Chunks of prompts that were computed because no node could be asked for them";
    text.counter("forebay_unasked_chunks", help, store.unasked_chunks);
    text.labelled(
        "forebay_gate_chunks_total",
        "counter",
        "Chunks that the store had, but not in memory, by what was quicker",
        &[
            ("decision=\"loaded\"".to_owned(), store.gate_loaded_chunks),
            ("decision=\"recomputed\"".to_owned(), store.gate_recomputed_chunks),
        ],
    );
    text.labelled(
        "forebay_stored_chunks_total",
        "counter",
        "Chunks given to the store, by outcome",
        &[
            ("outcome=\"stored\"".to_owned(), store.stored_chunks),
            ("outcome=\"refused\"".to_owned(), store.refused_chunks),
            ("outcome=\"skipped\"".to_owned(), cache.unstored_chunks),
        ],
    );
    text.gauge("forebay_lost_blocks", "Blocks lost to I/O that may never end", stats.blocks_lost);
    let (help, dropped) = ("Batches of KV events not published", stats.dropped_event_batches);
    text.counter("forebay_dropped_kv_event_batches", help, dropped);
    text.counter("forebay_steps", "Steps computed", stats.steps);
    text.counter("forebay_busy_seconds", "Model time of all steps", stats.busy_s);
    text.counter("forebay_lag_seconds", "Model time by which steps took too long to emulate", stats.lag_s);
    text.text
}

struct Text {
    text: String,
    model: String,
}

impl Text {
    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.labelled(name, "gauge", help, &[(String::new(), value)]);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.labelled(&format!("{name}_total"), "counter", help, &[(String::new(), value)]);
    }

    fn labelled(&mut self, name: &str, r#type: &str, help: &str, values: &[(String, impl Display)]) {
        self.head(name, r#type, help);
        values.iter().for_each(|(labels, value)| self.line(name, labels, value));
    }

    fn histogram<const BOUNDS: usize>(
        &mut self,
        name: &str,
        help: &str,
        bounds: &[f64; BOUNDS],
        histogram: &Histogram<BOUNDS>,
    ) {
        self.head(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        for (bound, count) in bounds.iter().zip(histogram.cumulative()) {
            self.line(&bucket, &format!("le=\"{bound:?}\""), count);
        }
        self.line(&bucket, "le=\"+Inf\"", histogram.count());
        self.line(&format!("{name}_sum"), "", histogram.sum());
        self.line(&format!("{name}_count"), "", histogram.count());
    }

    fn head(&mut self, name: &str, r#type: &str, help: &str) {
        // Writing to a String cannot fail, here and below.
        let _ = write!(self.text, "# HELP {name} {help}.\n# TYPE {name} {}\n", r#type);
    }

    fn line(&mut self, name: &str, labels: &str, value: impl Display) {
        let comma = if labels.is_empty() { "" } else { "," };
        let _ = writeln!(
            self.text,
            "{name}{{engine=\"0\",model_name=\"{}\"{comma}{labels}}} {value}",
            self.model
        );
    }
}

/// A label's value: backslashes, quotes and line ends must be escaped.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
