//! What an engine says of itself: its list of models and its page of metrics, under vLLM's names.
//! It knows the two formats. Whatever is not there is unknown.

use forebay_trace::replay::sample;
use serde::Deserialize;
use std::collections::BTreeSet;

/// `/v1/models`.
#[derive(Debug, Deserialize)]
pub struct Models {
    pub data: Vec<Model>,
}

#[derive(Debug, Deserialize)]
pub struct Model {
    pub id: String,
    /// Longest context, prompt and output together.
    #[serde(default)]
    pub max_model_len: Option<usize>,
    /// Set for an adapter of another model.
    #[serde(default)]
    pub parent: Option<String>,
}

/// `/metrics`, as far as it matters here.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics {
    pub running: f64,
    pub waiting: f64,
    /// Requests that ended, however they did.
    pub ended: Option<f64>,
    /// Prompt tokens that were found in the cache.
    pub hit_tokens: Option<f64>,
    pub block_tokens: Option<usize>,
    pub blocks: Option<usize>,
    /// Engines behind the page.
    pub engines: usize,
}

impl Metrics {
    /// What a page says; `None` where it is not that of a vLLM.
    pub fn parse(page: &str) -> Option<Metrics> {
        let (mut metrics, mut engines) = (Metrics::default(), BTreeSet::new());
        for line in page.lines() {
            if line.starts_with("vllm:cache_config_info{") {
                metrics.block_tokens = label(line, "block_size").and_then(|text| text.parse().ok());
                metrics.blocks = label(line, "num_gpu_blocks").and_then(|text| text.parse().ok());
            }
            let Some((name, value)) = sample(line) else { continue };
            match name {
                "vllm:num_requests_running" => {
                    engines.insert(label(line, "engine").unwrap_or_default());
                    metrics.running += value;
                }
                "vllm:num_requests_waiting" => metrics.waiting += value,
                "vllm:request_success_total" => *metrics.ended.get_or_insert(0.0) += value,
                "vllm:prefix_cache_hits_total" | "vllm:external_prefix_cache_hits_total" => {
                    *metrics.hit_tokens.get_or_insert(0.0) += value;
                }
                _ => {}
            }
        }
        metrics.engines = engines.len();
        (metrics.engines > 0).then_some(metrics)
    }

    /// Tokens whose KV fits.
    pub fn pool_tokens(&self) -> Option<usize> {
        self.block_tokens?.checked_mul(self.blocks?)
    }

    /// Whether nobody uses the engine.
    pub fn is_idle(&self) -> bool {
        self.running + self.waiting == 0.0
    }
}

/// The value of a label of a sample line.
fn label<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let labels = &line[line.find('{')? + 1..];
    labels.split(',').find_map(|pair| {
        let (found, value) = pair.split_once('=')?;
        (found == name).then(|| value.split('"').nth(1))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 1.0
vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 2.0
vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 48.0
vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"m\"} 3.0
vllm:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"m\"} 4.0
vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0
";

    #[test]
    fn a_page_of_vllm_says_what_runs_what_ended_and_what_fits() {
        let metrics = Metrics::parse(PAGE).unwrap();
        assert_eq!((metrics.running, metrics.waiting, metrics.engines), (1.0, 2.0, 1));
        assert_eq!((metrics.ended, metrics.hit_tokens), (Some(7.0), Some(48.0)));
        assert_eq!(metrics.pool_tokens(), Some(1_600));
        assert!(!metrics.is_idle());
    }

    #[test]
    fn ranks_of_one_server_are_several_engines() {
        let two = PAGE.to_owned() + &PAGE.replace("engine=\"0\"", "engine=\"1\"");
        assert_eq!(Metrics::parse(&two).unwrap().engines, 2);
    }

    #[test]
    fn what_a_page_does_not_say_is_unknown() {
        let metrics = Metrics::parse("vllm:num_requests_running 0.0\n").unwrap();
        assert_eq!((metrics.ended, metrics.hit_tokens, metrics.pool_tokens()), (None, None, None));
        assert!(metrics.is_idle());
        let unknown = PAGE.replace("\"100\"", "\"None\"");
        assert_eq!(Metrics::parse(&unknown).unwrap().pool_tokens(), None);
        assert_eq!(Metrics::parse("up 1\n"), None);
    }
}
