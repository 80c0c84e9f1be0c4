//! An engine's page for Prometheus, in vLLM's names: text in, numbers out. The page comes from
//! another process and may hold anything; what makes no sense is refused by name.

use crate::prometheus_text::Sample;

/// Nothing that one engine counts comes near it.
const LARGEST: f64 = (1_u64 << 40) as f64;

const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";
const KV_USE: &str = "vllm:kv_cache_usage_perc";
const CACHE_CONFIG: &str = "vllm:cache_config_info";

/// What an engine says of itself; of one with several data-parallel ranks, all of them together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineMetrics {
    /// Requests with a share in every step.
    pub running: u64,
    /// Requests in its queue.
    pub waiting: u64,
    /// Tokens whose KV fits its GPU, where it says so.
    pub pool_tokens: Option<u64>,
    /// Tokens whose KV its requests hold, where it says so.
    pub held_tokens: Option<u64>,
}

/// Why a page tells nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadPage {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{name} is '{value}', {allowed} is allowed")]
    Nonsense { name: &'static str, value: String, allowed: &'static str },
}

/// Sums and counts of the samples of all ranks.
#[derive(Default)]
struct Samples {
    running: Option<u64>,
    waiting: Option<u64>,
    pool_tokens: Option<u64>,
    use_sum: f64,
    uses: u32,
}

/// Reads a page.
pub fn read(page: &[u8]) -> Result<EngineMetrics, BadPage> {
    let mut samples = Samples::default();
    for line in page.split(|&byte| byte == b'\n').filter(|line| line.starts_with(b"vllm:")) {
        samples.add(line)?;
    }
    let Samples { running, waiting, pool_tokens, use_sum, uses } = samples;
    // Ranks have pools of one size.
    let held = |pool: u64| (use_sum / f64::from(uses) * pool as f64).round() as u64;
    Ok(EngineMetrics {
        running: running.ok_or(BadPage::Missing(RUNNING))?,
        waiting: waiting.ok_or(BadPage::Missing(WAITING))?,
        pool_tokens,
        held_tokens: pool_tokens.filter(|_| uses > 0).map(held),
    })
}

impl Samples {
    fn add(&mut self, line: &[u8]) -> Result<(), BadPage> {
        let sample = Sample::of(line);
        let is_it = |known: &&str| known.as_bytes() == sample.name;
        match [RUNNING, WAITING, KV_USE, CACHE_CONFIG].into_iter().find(is_it) {
            Some(name @ (RUNNING | WAITING)) => {
                let sum = if name == RUNNING { &mut self.running } else { &mut self.waiting };
                let requests = count(name, sample.value())?;
                *sum = Some(sum.unwrap_or(0).saturating_add(requests));
            }
            Some(name @ KV_USE) => {
                let value = sample.value();
                let share = number(value).filter(|share| (0.0..=1.0).contains(share));
                self.use_sum += share.ok_or_else(|| nonsense(name, value, "0 to 1"))?;
                self.uses = self.uses.saturating_add(1);
            }
            Some(name @ CACHE_CONFIG) => {
                let (Some(blocks), Some(tokens)) =
                    (sample.label(b"num_gpu_blocks"), sample.label(b"block_size"))
                else {
                    return Ok(());
                };
                // Before its memory has been measured an engine does not know.
                if blocks == b"None" {
                    return Ok(());
                }
                let pool = count(name, blocks)?.saturating_mul(count(name, tokens)?);
                let known = |pool: u64| pool > 0 && pool as f64 <= LARGEST;
                let pool = Some(pool).filter(|&pool| known(pool));
                let pool = pool.ok_or_else(|| nonsense(name, blocks, "a pool that a GPU has"))?;
                self.pool_tokens = Some(self.pool_tokens.unwrap_or(0).saturating_add(pool));
            }
            _ => {}
        }
        Ok(())
    }
}

fn count(name: &'static str, text: &[u8]) -> Result<u64, BadPage> {
    let whole = |value: &f64| (0.0..=LARGEST).contains(value) && value.fract() == 0.0;
    let value = number(text).filter(whole);
    value.map(|value| value as u64).ok_or_else(|| nonsense(name, text, "a count"))
}

fn number(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn nonsense(name: &'static str, value: &[u8], allowed: &'static str) -> BadPage {
    let value = String::from_utf8_lossy(&value[..value.len().min(32)]).into_owned();
    BadPage::Nonsense { name, value, allowed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } \" b"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a } \" b"} 12.0 1712345678901
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 12.0
vllm:kv_cache_usage_perc{engine="0",model_name="x"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",x="num_gpu_blocks=\"7\""} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3"} 0.0
"#;

    fn with(line: &str) -> Result<EngineMetrics, BadPage> {
        let name = line.split(['{', ' ']).next().unwrap();
        let others = PAGE.lines().filter(|other| other.split(['{', ' ']).next() != Some(name));
        read(others.chain([line]).collect::<Vec<_>>().join("\n").as_bytes())
    }

    #[test]
    fn load_and_pool_are_read_and_others_passed_over() {
        let read = read(PAGE.as_bytes()).unwrap();
        assert_eq!((read.running, read.waiting), (3, 12));
        assert_eq!((read.pool_tokens, read.held_tokens), (Some(16_000), Some(4_000)));
    }

    #[test]
    fn ranks_are_added_up() {
        let second = PAGE.replace("engine=\"0\"", "engine=\"1\"").replace("0.25", "0.75");
        let both = read(format!("{PAGE}{second}").as_bytes()).unwrap();
        let expected =
            EngineMetrics { running: 6, waiting: 24, pool_tokens: Some(32_000), held_tokens: Some(16_000) };
        assert_eq!(both, expected);
    }

    #[test]
    fn a_page_without_requests_is_refused_and_one_without_a_pool_is_not() {
        assert_eq!(
            read(b"{\"choices\":[]}").unwrap_err().to_string(),
            "vllm:num_requests_running is missing"
        );
        let no_pool = with("vllm:cache_config_info{num_gpu_blocks=\"None\",block_size=\"16\"} 1").unwrap();
        assert_eq!((no_pool.running, no_pool.pool_tokens, no_pool.held_tokens), (3, None, None));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_name_and_value() {
        for (line, message) in [
            ("vllm:num_requests_running -1", "vllm:num_requests_running is '-1', a count is allowed"),
            ("vllm:num_requests_waiting NaN", "vllm:num_requests_waiting is 'NaN', a count is allowed"),
            ("vllm:num_requests_waiting 1e300", "vllm:num_requests_waiting is '1e300', a count is allowed"),
            ("vllm:num_requests_running 1.5", "vllm:num_requests_running is '1.5', a count is allowed"),
            ("vllm:num_requests_running{a=\"b} 1", "vllm:num_requests_running is '', a count is allowed"),
            ("vllm:kv_cache_usage_perc 25", "vllm:kv_cache_usage_perc is '25', 0 to 1 is allowed"),
            (
                "vllm:cache_config_info{num_gpu_blocks=\"0\",block_size=\"16\"} 1",
                "vllm:cache_config_info is '0', a pool that a GPU has is allowed",
            ),
        ] {
            assert_eq!(with(line).unwrap_err().to_string(), message, "{line}");
        }
    }

    fn is_sane(read: &Result<EngineMetrics, BadPage>) -> bool {
        let Ok(read) = read else { return true };
        let held = read.held_tokens.unwrap_or(0);
        read.held_tokens.is_none() || read.pool_tokens.is_some_and(|pool| held <= pool)
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_read_or_refused_and_nothing_else(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            name in prop::sample::select(vec![RUNNING, WAITING, KV_USE, CACHE_CONFIG]),
        ) {
            prop_assert!(is_sane(&read(&bytes)));
            prop_assert!(is_sane(&read(&[name.as_bytes(), &bytes].concat())));
            let labelled = [PAGE.as_bytes(), name.as_bytes(), b"{", &bytes].concat();
            prop_assert!(is_sane(&read(&labelled)));
        }

        #[test]
        fn a_damaged_page_is_read_or_refused_and_nothing_else(
            damage in prop::collection::vec((0..PAGE.len(), any::<u8>()), 1..6),
            cut in 0..PAGE.len(),
        ) {
            let mut page = PAGE.as_bytes().to_vec();
            damage.into_iter().for_each(|(at, byte)| page[at] = byte);
            prop_assert!(is_sane(&read(&page)));
            prop_assert!(is_sane(&read(&page[..cut])));
        }
    }
}
