//! The engine's page for Prometheus, under vLLM's names where vLLM has the same thing. The text
//! itself is written by `prometheus-client`. Times are model seconds.

use crate::stats::Stats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::prometheus_text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric, MetricEncoder,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt;

/// The text of an engine's `/metrics`.
pub fn render(stats: Stats, model: &str, block_tokens: usize) -> String {
    let labels = [("engine", "0".to_owned()), ("model_name", model.to_owned())];
    let labels = labels.map(|(name, value)| (name.into(), value.into()));
    let mut registry = Registry::with_labels(labels.into_iter());
    registry.register_collector(Box::new(Page { stats, block_tokens: block_tokens.to_string() }));
    let mut text = String::with_capacity(8 << 10);
    // Neither a String nor these names refuse anything.
    let _ = encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Page {
    stats: Stats,
    block_tokens: String,
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Families(&mut encoder);
        self.state(&mut page)?;
        self.tokens(&mut page)?;
        self.times(&mut page)?;
        self.chunks(&mut page)?;
        let stats = &self.stats;
        page.gauge("forebay_lost_blocks", "Blocks lost to I/O that may never end", stats.blocks_lost)?;
        let (help, dropped) = ("Batches of KV events not published", stats.dropped_event_batches);
        page.counter("forebay_dropped_kv_event_batches", help, dropped)?;
        page.counter("forebay_steps", "Steps computed", stats.steps)?;
        page.counter("forebay_busy_seconds", "Model time of all steps", stats.busy_s)?;
        let help = "Model time by which steps took too long to emulate";
        page.counter("forebay_lag_seconds", help, stats.lag_s)
    }
}

impl Page {
    fn state(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let stats = &self.stats;
        let used = stats.blocks_used as f64 / (stats.blocks_total.max(1)) as f64;
        page.gauge("vllm:num_requests_running", "Requests with a share in every step", stats.running)?;
        page.gauge("vllm:num_requests_waiting", "Requests in the queue", stats.waiting)?;
        page.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them", used)?;
        let blocks = stats.blocks_total.to_string();
        let labels = [("block_size", &self.block_tokens[..]), ("num_gpu_blocks", &blocks[..])];
        let mut info = page.family("vllm:cache_config_info", "Blocks of the KV pool", MetricType::Gauge)?;
        ConstGauge::new(1u64).encode(info.encode_family(&labels)?)
    }

    fn tokens(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let (stats, cache) = (&self.stats, &self.stats.scheduler);
        let help = "Tokens looked up in the GPU's prefix cache";
        page.counter("vllm:prefix_cache_queries", help, cache.gpu_queries_tokens)?;
        page.counter("vllm:prefix_cache_hits", "Tokens found there", cache.gpu_hits_tokens)?;
        let help = "Tokens looked up in the store";
        page.counter("vllm:external_prefix_cache_queries", help, cache.store_queries_tokens)?;
        let help = "Tokens that came from the store";
        page.counter("vllm:external_prefix_cache_hits", help, cache.store_hits_tokens)?;
        let (disk, peers) = (cache.disk_hits_tokens, cache.peer_hits_tokens);
        let tiers = [("memory", cache.store_hits_tokens - disk - peers), ("disk", disk), ("peer", peers)];
        let help = "Tokens that came from the store, by tier";
        page.counters("forebay_external_prefix_cache_hits", help, "tier", tiers)?;
        let help = "Requests whose blocks were taken, to be recomputed";
        page.counter("vllm:num_preemptions", help, cache.preemptions)?;
        page.counter("vllm:prompt_tokens", "Tokens of prompts", stats.prompt_tokens)?;
        page.counter("vllm:generation_tokens", "Tokens of output", stats.output_tokens)?;
        let ends = [("length", stats.finished), ("abort", stats.aborted), ("error", stats.failed)];
        page.counters("vllm:request_success", "Requests by how they ended", "finished_reason", ends)
    }

    fn times(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let times = &self.stats.times;
        page.histogram("vllm:time_to_first_token_seconds", "Time to the first token", &times.ttft)?;
        let help = "Time per output token after the first";
        page.histogram("vllm:request_time_per_output_token_seconds", help, &times.tpot)?;
        page.histogram("vllm:e2e_request_latency_seconds", "Time to the last token", &times.e2e)
    }

    fn chunks(&self, page: &mut Families<'_, '_>) -> fmt::Result {
        let store = &self.stats.store;
        let loaded = [
            ("good", store.loaded_chunks),
            ("corrupt", store.corrupt_chunks),
            ("node_gone", store.node_gone_chunks),
            ("dead_lease", store.dead_lease_chunks),
            ("missing", store.missing_chunks),
            ("unmoved", store.unmoved_chunks),
            ("unused", store.unused_chunks),
        ];
        let help = "Chunks to be loaded from the store, by outcome";
        page.counters("forebay_loaded_chunks", help, "outcome", loaded)?;
        let good = [
            ("memory", store.loaded_chunks - store.disk_chunks - store.peer_chunks),
            ("disk", store.disk_chunks),
            ("peer", store.peer_chunks),
        ];
        let help = "Chunks loaded with every byte right, by where the store had them";
        page.counters("forebay_good_chunks", help, "source", good)?;
        let help = "Chunks of prompts that were computed because no node could be asked for them";
        page.counter("forebay_unasked_chunks", help, store.unasked_chunks)?;
        let decided = [("loaded", store.gate_loaded_chunks), ("recomputed", store.gate_recomputed_chunks)];
        let help = "Chunks that the store had, but not in memory, by what was quicker";
        page.counters("forebay_gate_chunks", help, "decision", decided)?;
        let stored = [
            ("stored", store.stored_chunks),
            ("refused", store.refused_chunks),
            ("skipped", self.stats.scheduler.unstored_chunks),
        ];
        page.counters("forebay_stored_chunks", "Chunks given to the store, by outcome", "outcome", stored)
    }
}

/// The families of a page, each with its samples. `_total` is added to the names of counters.
struct Families<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Families<'_, '_> {
    fn family<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.0.encode_descriptor(name, &format!("{help}."), None, kind)
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        ConstGauge::new(value).encode(self.family(name, help, MetricType::Gauge)?)
    }

    fn counter(&mut self, name: &str, help: &str, value: impl EncodeCounterValue) -> fmt::Result {
        ConstCounter::new(value).encode(self.family(name, help, MetricType::Counter)?)
    }

    /// A counter for each value of a label.
    fn counters<const COUNT: usize>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: [(&'static str, u64); COUNT],
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Counter)?;
        let mut values = values.into_iter();
        values.try_for_each(|(value, count)| {
            ConstCounter::new(count).encode(family.encode_family(&[(label, value)])?)
        })
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) -> fmt::Result {
        histogram.encode(self.family(name, help, MetricType::Histogram)?)
    }
}
