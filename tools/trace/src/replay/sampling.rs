//! Load samples from engines that export vLLM's metrics. It knows the Prometheus text format as far
//! as it needs.

use super::Transport;
use crate::record::{LoadSample, Start};
use http::{HeaderMap, Uri};
use std::str::FromStr;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};

/// An engine whose load is sampled.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    /// What samples call it.
    pub name: String,
    /// Where it serves `/metrics`.
    pub url: Uri,
}

/// One reading of an engine's metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LoadReading {
    /// `vllm:num_requests_running`.
    pub running: f64,
    /// `vllm:num_requests_waiting`.
    pub waiting: f64,
    /// `vllm:kv_cache_usage_perc`: a share from 0 to 1, whatever its name says.
    pub kv_usage: f64,
}

/// The load in a page of metrics, summed over the engine's label sets; `None` when it has no such
/// metrics.
///
/// ```
/// use forebay_trace::replay::read_load;
///
/// let page = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\"} 3.0\n";
/// assert_eq!(read_load(page).map(|load| load.running), Some(3.0));
/// ```
pub fn read_load(page: &str) -> Option<LoadReading> {
    let mut load = LoadReading::default();
    let mut found = false;
    for line in page.lines() {
        let Some((name, value)) = sample(line) else { continue };
        let field = match name {
            "vllm:num_requests_running" => &mut load.running,
            "vllm:num_requests_waiting" => &mut load.waiting,
            "vllm:kv_cache_usage_perc" => &mut load.kv_usage,
            _ => continue,
        };
        *field += value;
        found = true;
    }
    found.then_some(load)
}

/// Reads the load of `instances` every `interval` of real time and hands each sample to `sink`,
/// stamped with model time since now. An engine that does not answer gives no sample. Runs until it
/// is dropped.
pub async fn sample_load(
    transport: &Transport,
    arm: &str,
    instances: &[Instance],
    interval: Duration,
    clock_ratio: f64,
    mut sink: impl FnMut(LoadSample),
) {
    let start = Instant::now();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        for instance in instances {
            let at_s = start.elapsed().as_secs_f64() * clock_ratio;
            let page = transport.page(&instance.url, "/metrics", &HeaderMap::new()).await;
            let Some(load) = page.ok().as_deref().and_then(read_load) else { continue };
            sink(LoadSample {
                arm: arm.to_owned(),
                at_s,
                instance: instance.name.clone(),
                running: load.running as u32,
                waiting: load.waiting as u32,
                kv_usage: load.kv_usage,
            });
        }
    }
}

/// What the engines have done so far; `None` where one of them does not say it, or there are none.
pub async fn read_start(transport: &Transport, instances: &[Instance]) -> Option<Start> {
    let mut ended = 0.0;
    for instance in instances {
        let page = transport.page(&instance.url, "/metrics", &HeaderMap::new()).await.ok()?;
        ended += ended_requests(&page)?;
    }
    let start = if ended > 0.0 { Start::Warm } else { Start::Fresh };
    (!instances.is_empty()).then_some(start)
}

/// Requests that have ended, in a page of metrics.
fn ended_requests(page: &str) -> Option<f64> {
    let ended = page.lines().filter_map(sample).filter(|(name, _)| *name == "vllm:request_success_total");
    ended.map(|(_, value)| value).reduce(|all, value| all + value)
}

impl FromStr for Instance {
    type Err = String;

    /// Reads `NAME=URL`.
    fn from_str(text: &str) -> Result<Instance, String> {
        let (name, url) = text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=URL"))?;
        let uri: Uri = url.parse().map_err(|error| format!("{url:?} is no URL: {error}"))?;
        match uri.scheme_str() {
            Some("http" | "https") => Ok(Instance { name: name.to_owned(), url: uri }),
            _ => Err(format!("{url:?} does not begin with http:// or https://")),
        }
    }
}

/// The name and the value of a sample line `name{labels} value [timestamp]`.
pub fn sample(line: &str) -> Option<(&str, f64)> {
    let name_end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(name_end);
    // A label value may hold any character, but nothing after the value holds a brace.
    let values = rest.rfind('}').map_or(rest, |end| &rest[end + 1..]);
    let value: f64 = values.split_whitespace().next()?.parse().ok()?;
    (!name.starts_with('#') && value.is_finite()).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_vllm_metrics_gives_the_load() {
        let page = "# HELP vllm:num_requests_running n\n\
                    vllm:num_requests_running{engine=\"0\",model_name=\"a } 9\"} 3.0\n\
                    vllm:num_requests_waiting{engine=\"0\"} 2.0 1700000000\n\
                    vllm:kv_cache_usage_perc 0.25\n\
                    vllm:num_requests_waiting_by_reason{reason=\"x\"} 7\n\
                    vllm:num_requests_waiting NaN\n";
        assert_eq!(read_load(page), Some(LoadReading { running: 3.0, waiting: 2.0, kv_usage: 0.25 }));
    }

    #[test]
    fn an_instance_is_read_or_refused_with_its_text() {
        let instance: Instance = "engine-0=http://127.0.0.1:8000".parse().unwrap();
        assert_eq!((instance.name.as_str(), instance.url.port_u16()), ("engine-0", Some(8000)));
        for bad in ["engine-0", "a=b", "a=ftp://h", "a=http://"] {
            assert!(bad.parse::<Instance>().unwrap_err().contains(bad.trim_start_matches("a=")), "{bad}");
        }
    }

    #[test]
    fn an_engine_that_has_answered_is_known_by_its_page() {
        let page = "vllm:request_success_total{finished_reason=\"stop\"} 2\n\
                    vllm:request_success_total{finished_reason=\"length\"} 3\n";
        assert_eq!(ended_requests(page), Some(5.0));
        assert_eq!(ended_requests(&page.replace(['2', '3'], "0")), Some(0.0));
        assert_eq!(ended_requests("up 1\n"), None);
    }

    #[test]
    fn a_page_without_these_metrics_gives_nothing() {
        assert_eq!(read_load("up 1\n\n{\nvllm:num_requests_running\n"), None);
    }
}
