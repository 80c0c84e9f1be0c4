//! What the demo's host, cluster and SSDs are to be: sizes, numbers and names, and the faults that
//! it can inject.

use super::vllm::Vllm;
use forebay_emulator::truth::Oracle;
use forebay_emulator::{EngineConfig, namespace};
use forebay_results::output::Error;
use forebay_router::{Backend, DecisionLogPlace, EngineModel, Policy, RouterConfig};
use forebay_steps::Profile;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// KV bytes that are really kept for a token in a layer. Small, so that many engines fit a small
/// machine.
pub const KV_BYTES_PER_TOKEN_LAYER: usize = 4;
/// Tokens of a chunk in the memory tier.
pub const CHUNK_TOKENS: usize = 256;
/// Tokens per streamed chunk after the first, as with vLLM's `--stream-interval`: model time runs
/// faster than real time, and so would the stream's events.
pub const STREAM_INTERVAL: usize = 16;
/// Real time between two samples of load and links.
pub const SAMPLE_EVERY: Duration = Duration::from_millis(100);
/// A decision log of more than half of this begins anew; no demo comes near it.
const DECISION_LOG_BYTES: u64 = 1 << 30;
/// Prefixes that the oracle remembers; more than the demo's traces have.
const ORACLE_BLOCKS: usize = 1 << 20;

/// What the router and the report call an engine.
pub fn engine_name(number: usize) -> String {
    format!("engine-{number}")
}

/// What the store is called that all engines share.
pub fn store_name() -> Option<String> {
    Some("demo".to_owned())
}

/// What a node is called.
pub fn node_name(number: usize) -> String {
    format!("node-{number}")
}

/// A fault to inject.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// Each byte that the store's links move has one bit flipped with this probability.
    FlipBit(f64),
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let chance = text.strip_prefix("flip-bit:").and_then(|chance| chance.parse::<f64>().ok());
        let chance = chance.filter(|chance| *chance > 0.0 && *chance <= 1.0);
        chance.map(Fault::FlipBit).ok_or_else(|| {
            format!("'{text}' is no fault; allowed: flip-bit:P with P above 0 and at most 1, such as flip-bit:1e-5")
        })
    }
}

/// Everything in one process.
pub struct HostSpec {
    /// GPU and model that each engine emulates.
    pub profile: Profile,
    pub engines: u16,
    /// KV pool of each.
    pub pool_tokens: usize,
    /// Memory tier, in tokens.
    pub memory_tokens: u64,
    /// What lies below it, if anything.
    pub ssd: Option<SsdSpec>,
    /// Model seconds per real second.
    pub clock_ratio: f64,
    /// What the links do to the bytes.
    pub fault: Option<Fault>,
    /// Seed of faults.
    pub seed: u64,
}

/// Nodes and engines in processes of their own.
pub struct ClusterSpec {
    /// Its engines, and the memory and SSDs of all nodes together.
    pub host: HostSpec,
    /// How many nodes; engine `i` belongs to node `i` modulo this.
    pub nodes: u16,
    /// Whether one of them is to be killed.
    pub kill_one: bool,
    /// What its engines are, if they are not emulated.
    pub vllm: Option<Vllm>,
}

/// Where the logs are, and how long new ones are made.
#[derive(Debug, Clone)]
pub struct SsdSpec {
    /// The directory; made if it is missing.
    pub directory: PathBuf,
    /// Length of a new log.
    pub bytes: u64,
}

impl HostSpec {
    /// One line for people.
    pub fn description(&self) -> String {
        let fault = match self.fault {
            Some(Fault::FlipBit(chance)) => format!(", a flipped bit per {:.0} bytes moved", 1.0 / chance),
            None => String::new(),
        };
        let ssd = match &self.ssd {
            Some(ssd) => format!(", an SSD log in {} below it", ssd.directory.display()),
            None => String::new(),
        };
        format!(
            "Host: {} engines of profile {}, KV pool {} tokens each, {} tokens of shared host memory{ssd}, clock x{}{fault}",
            self.engines, self.profile.name, self.pool_tokens, self.memory_tokens, self.clock_ratio
        )
    }

    /// What an engine must answer.
    pub fn oracle(&self) -> Result<Oracle, Error> {
        Ok(Oracle::new(self.engine_config().truth()?, self.profile.model.vocab, ORACLE_BLOCKS))
    }

    /// How an engine is started.
    pub fn engine_config(&self) -> EngineConfig {
        let mut profile = self.profile.clone();
        profile.memory.pool_tokens = self.pool_tokens;
        let namespace = namespace(&profile);
        EngineConfig {
            kv_bytes_per_token_layer: KV_BYTES_PER_TOKEN_LAYER,
            chunk_tokens: CHUNK_TOKENS,
            clock_ratio: self.clock_ratio,
            stream_interval: STREAM_INTERVAL,
            ..EngineConfig::new(profile, namespace.key())
        }
    }

    /// What the router takes an engine for.
    pub fn engine_model(&self) -> EngineModel {
        let engine = self.engine_config();
        EngineModel::new(&engine.profile, engine.launch)
    }

    /// How the router is started.
    pub fn router_config(&self, backends: Vec<Backend>, policy: Policy, decision_log: &Path) -> RouterConfig {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let place = DecisionLogPlace { path: decision_log.to_owned(), bytes: DECISION_LOG_BYTES };
        let config = RouterConfig::new(listen, backends, policy, self.engine_model());
        RouterConfig { decision_log: Some(place), ..config }
    }

    /// KV bytes that are really kept for a token.
    pub fn bytes_per_token(&self) -> u64 {
        (self.profile.model.layers * KV_BYTES_PER_TOKEN_LAYER) as u64
    }
}

impl ClusterSpec {
    /// One line for people.
    pub fn description(&self) -> String {
        let HostSpec { engines, profile, pool_tokens, memory_tokens, clock_ratio, .. } = &self.host;
        let ssd = match &self.host.ssd {
            Some(ssd) => format!(", SSD logs in {} below it", ssd.directory.display()),
            None => String::new(),
        };
        let (nodes, kill) = (self.nodes, if self.kill_one { ", of which one is killed halfway" } else { "" });
        let plural = if nodes == 1 { "node" } else { "nodes" };
        let what = match &self.vllm {
            Some(vllm) => format!("vLLMs with {}", vllm.model.display()),
            None => format!("engines of profile {}", profile.name),
        };
        format!(
            "Cluster: {engines} {what} on {nodes} {plural}{kill}, each a process; KV pool {pool_tokens} tokens \
             each, {memory_tokens} tokens of node memory in all{ssd}, clock x{clock_ratio}"
        )
    }

    /// KV bytes that are really kept for a token.
    pub fn bytes_per_token(&self) -> u64 {
        match self.vllm {
            Some(_) => self.host.profile.model.kv_bytes_per_token,
            None => self.host.bytes_per_token(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_a_name_and_a_probability() {
        assert_eq!("flip-bit:1e-5".parse(), Ok(Fault::FlipBit(1e-5)));
        for bad in ["flip-bit", "flip-bit:", "flip-bit:0", "flip-bit:2", "flip-bit:nan", "drop:0.1"] {
            let error = bad.parse::<Fault>().unwrap_err();
            assert!(error.contains(bad) && error.contains("flip-bit:P"), "{error}");
        }
    }
}
