//! A real vLLM as an engine of the demo: what it is told, how it says that it serves, what it
//! counts. It knows vLLM's command line and metrics and a model's `config.json`.

use super::processes::Launch;
use super::rows::{self, Count};
use crate::cmd::vllm::{TRANSFER_OPTION, transfer_config};
use crate::metrics_page::MetricsPage;
use forebay_steps::ModelFacts;
use forebay_trace::report::{OUTSIDE_PEER_TOKENS, OUTSIDE_SSD_TOKENS, OUTSIDE_TOKENS};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Deserialize;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// vLLM imports for a while before it does anything, and much longer where several start on a small
/// machine.
const START_LIMIT: Duration = Duration::from_secs(600);
/// It says that it serves a moment before it does.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const ANSWER_TRIES_EVERY: Duration = Duration::from_millis(100);
/// Tokens of a block; from 0.32 on vLLM wants a multiple of 32 on a CPU.
const BLOCK_TOKENS: usize = 32;

/// Starts vLLM's command line in a process that ends with the one that started it, whose id is
/// `PARENT`: a signal comes when it does, unless it has already.
const LAUNCHER: &str = "import ctypes, os, runpy, signal\n\
                        ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n\
                        if os.getppid() != PARENT: os._exit(1)\n\
                        runpy.run_module('vllm.entrypoints.cli.main', run_name='__main__')\n";

/// Which vLLM, and what it serves.
#[derive(Debug, Clone)]
pub struct Vllm {
    /// The Python that has it and Forebay.
    pub python: PathBuf,
    /// The model's directory.
    pub model: PathBuf,
}

/// A model that the demo cannot say anything of.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// There is no such file.
    #[error("{file}: {error}")]
    Io { file: PathBuf, error: std::io::Error },
    /// It does not say what is needed.
    #[error("{file}: {error}")]
    Json { file: PathBuf, error: serde_json::Error },
}

/// A vLLM that does not answer.
#[derive(Debug, thiserror::Error)]
#[error("http://{address} did not answer within {} s of saying that it would", ANSWER_LIMIT.as_secs())]
pub struct NotAnswering {
    address: SocketAddr,
}

/// What a model's `config.json` says, as far as it is needed.
#[derive(Deserialize)]
struct Config {
    vocab_size: u32,
    max_position_embeddings: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    hidden_size: usize,
    head_dim: Option<usize>,
}

impl Vllm {
    /// What is known of the model. Its KV is taken for one of four bytes a number, which is the
    /// most that there is.
    pub fn facts(&self, pool_tokens: usize) -> Result<ModelFacts, ModelError> {
        let file = self.model.join("config.json");
        let text = std::fs::read(&file).map_err(|error| ModelError::Io { file: file.clone(), error })?;
        let config: Config =
            serde_json::from_slice(&text).map_err(|error| ModelError::Json { file, error })?;
        let heads = config.num_key_value_heads.unwrap_or(config.num_attention_heads);
        let head_dim = config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
        Ok(ModelFacts {
            name: "demo".to_owned(),
            layers: config.num_hidden_layers,
            vocab: config.vocab_size,
            max_model_tokens: config.max_position_embeddings.min(pool_tokens),
            kv_bytes_per_token: (2 * 4 * config.num_hidden_layers * heads * head_dim) as u64,
        })
    }

    /// Serves on a free port with our connector, with a pool of `pool_tokens`.
    pub fn launch(
        &self,
        number: usize,
        node: &Path,
        pool_tokens: usize,
        context_tokens: usize,
    ) -> std::io::Result<Launch> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        // vLLM keeps a block for itself. 0.33 refuses to start if the others do not hold a request.
        let blocks = pool_tokens.div_ceil(BLOCK_TOKENS) + 1;
        let options = [
            ("--served-model-name", "demo".to_owned()),
            ("--host", Ipv4Addr::LOCALHOST.to_string()),
            ("--port", port.to_string()),
            ("--max-model-len", context_tokens.to_string()),
            ("--block-size", BLOCK_TOKENS.to_string()),
            ("--num-gpu-blocks-override", blocks.to_string()),
            (TRANSFER_OPTION, transfer_config(node)),
        ];
        let launcher = LAUNCHER.replace("PARENT", &std::process::id().to_string());
        let mut arguments: Vec<OsString> = vec!["-c".into(), launcher.into(), "serve".into()];
        arguments.push(self.model.clone().into_os_string());
        arguments.extend(options.into_iter().flat_map(|(name, value)| [OsString::from(name), value.into()]));
        arguments.extend(["--enforce-eager", "--enable-prompt-tokens-details"].map(OsString::from));
        let processors = processors();
        let processor = processors.get(number % processors.len().max(1)).copied().unwrap_or(0);
        let environment = [
            ("PYTHONHASHSEED", "0".to_owned()),
            ("HF_HUB_OFFLINE", "1".to_owned()),
            ("VLLM_NO_USAGE_STATS", "1".to_owned()),
            ("TORCHDYNAMO_DISABLE", "1".to_owned()),
            ("VLLM_CPU_KVCACHE_SPACE", "1".to_owned()),
            // Otherwise all engines compute on the first processor.
            ("VLLM_CPU_OMP_THREADS_BIND", processor.to_string()),
        ];
        let environment = environment.map(|(name, value)| (name, value.into())).into();
        Ok(Launch { program: Some(self.python.clone()), arguments, environment, limit: START_LIMIT })
    }
}

/// Processors that this process may use, and its children with it.
fn processors() -> Vec<usize> {
    let ours = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|processor| ours.is_set(*processor)).collect()
}

/// The address at which vLLM says that it serves.
pub fn address_in(line: &str) -> Option<SocketAddr> {
    line.split_once("Starting vLLM server on http://")?.1.split_whitespace().next()?.parse().ok()
}

/// Waits until it does.
pub async fn wait_until_it_answers(address: SocketAddr) -> Result<(), NotAnswering> {
    let answered = async {
        while MetricsPage::of(address).await.is_err() {
            tokio::time::sleep(ANSWER_TRIES_EVERY).await;
        }
    };
    tokio::time::timeout(ANSWER_LIMIT, answered).await.map_err(|_| NotAnswering { address })
}

/// What all engines counted. Where hits came from, vLLM's answers do not say.
pub fn counts(pages: &[MetricsPage]) -> Vec<Count> {
    let sum = |name| pages.iter().map(|page| page.count(name, "")).sum();
    vec![
        (rows::POOL_TOKENS, sum("vllm:prefix_cache_hits_total")),
        (OUTSIDE_TOKENS, sum("vllm:external_prefix_cache_hits_total")),
        (OUTSIDE_SSD_TOKENS, sum("vllm:forebay_tokens_disk_total")),
        (OUTSIDE_PEER_TOKENS, sum("vllm:forebay_tokens_peer_total")),
        ("tokens of prompts", sum("vllm:prompt_tokens_total")),
        (rows::CHUNKS_STORED, sum("vllm:forebay_stores_done_total")),
        (rows::CORRUPTIONS_CAUGHT, sum("vllm:forebay_chunks_corrupt_total")),
        (rows::PREEMPTIONS, sum("vllm:num_preemptions_total")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_names_the_address_is_known_from_others() {
        let line = "(APIServer pid=7) INFO 11-21 22:32:56 [api_server.py:677] Starting vLLM server on http://127.0.0.1:8101\n";
        assert_eq!(address_in(line), Some(SocketAddr::from(([127, 0, 0, 1], 8101))));
        assert_eq!(address_in("see http://127.0.0.1:8101 for more\n"), None);
    }

    #[test]
    fn a_model_is_what_its_configuration_says() {
        let directory = tempfile::tempdir().unwrap();
        let vllm = Vllm { python: "python".into(), model: directory.path().to_owned() };
        assert!(vllm.facts(4096).unwrap_err().to_string().contains("config.json"));
        let text = r#"{"vocab_size": 2000, "max_position_embeddings": 8192, "num_hidden_layers": 4,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "other": []}"#;
        std::fs::write(directory.path().join("config.json"), text).unwrap();
        let facts = vllm.facts(4096).unwrap();
        assert_eq!((facts.vocab, facts.max_model_tokens, facts.layers), (2000, 4096, 4));
        assert_eq!(facts.kv_bytes_per_token, 2 * 4 * 4 * 2 * 64);
    }

    #[test]
    fn an_engine_is_told_its_node_and_its_pool() {
        let vllm = Vllm { python: "py".into(), model: "m".into() };
        let launch = vllm.launch(0, Path::new("/n.sock"), 100, 90).unwrap();
        let told: Vec<String> =
            launch.arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let after = |name: &str| told[told.iter().position(|word| word == name).unwrap() + 1].clone();
        assert_eq!((after("--num-gpu-blocks-override"), after("--max-model-len")), ("5".into(), "90".into()));
        assert!(after("--kv-transfer-config").contains(r#""node":"/n.sock""#));
        assert_eq!(launch.program, Some("py".into()));
        let parent = format!("getppid() != {}:", std::process::id());
        assert!(told[1].contains(&parent), "{}", told[1]);
        let bound =
            &launch.environment.iter().find(|(name, _)| *name == "VLLM_CPU_OMP_THREADS_BIND").unwrap().1;
        assert_eq!(bound.to_string_lossy(), processors()[0].to_string());
    }
}
