//! Nodes and engines as processes of their own, as on several hosts, with the router in this
//! process. It starts and stops them and can kill a node.

use super::node_config;
use super::processes::{Launch, Process};
use super::rows::{self, Count};
use super::spec::{
    CHUNK_TOKENS, ClusterSpec, KV_BYTES_PER_TOKEN_LAYER, SAMPLE_EVERY, STREAM_INTERVAL, engine_name,
    node_name, store_name,
};
use super::vllm;
use crate::metrics_page::MetricsPage;
use forebay_results::output::Error;
use forebay_router::{Backend, Policy, Router, RouterHandle};
use forebay_trace::record::{Line, RecordWriter};
use forebay_trace::replay::{Instance, Transport, sample_load};
use forebay_transfer::lock::Mutex;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use tempfile::TempDir;

/// A running cluster. Dropping it kills its processes.
pub struct Cluster {
    /// In front of the engines.
    pub router: RouterHandle,
    /// Whether a node is to be killed.
    pub kill_one: bool,
    engines: Vec<EngineProcess>,
    /// Whether these are vLLMs, which count other things.
    vllm: bool,
    /// Those that were not killed, in the order of their numbers.
    nodes: Mutex<Vec<Process>>,
    /// How many there were.
    node_count: usize,
    /// Sockets, configurations and the list of nodes; removed with this.
    _directory: TempDir,
}

struct EngineProcess {
    process: Process,
    address: SocketAddr,
}

impl ClusterSpec {
    /// Starts everything, cold but for SSDs.
    pub async fn start(&self, policy: Policy, decision_log: &Path) -> Result<Cluster, Error> {
        let directory = tempfile::Builder::new().prefix("forebay-demo-").tempdir()?;
        let nodes = self.start_nodes(directory.path(), policy).await?;
        let mut engines = Vec::new();
        for number in 0..usize::from(self.host.engines) {
            let socket = node_config::socket(directory.path(), number % usize::from(self.nodes));
            engines.push(self.start_engine(number, &socket).await?);
        }
        let backends = engines.iter().enumerate();
        // An engine loads from its peers too: all nodes are one store.
        let backends = backends.map(|(number, engine)| Backend {
            store: store_name(),
            ..Backend::new(engine_name(number), engine.url())
        });
        let router = Router::spawn(self.host.router_config(backends.collect(), policy, decision_log))?;
        let (kill_one, node_count) = (self.kill_one, nodes.len());
        let nodes = Mutex::new(nodes);
        let vllm = self.vllm.is_some();
        Ok(Cluster { router, kill_one, engines, vllm, nodes, node_count, _directory: directory })
    }

    /// Starts an engine and waits until it serves.
    async fn start_engine(&self, number: usize, socket: &Path) -> Result<EngineProcess, Error> {
        let name = engine_name(number);
        let Some(vllm) = &self.vllm else {
            let launch = Launch::own(self.engine_arguments(socket));
            let (process, address) = Process::start(&name, launch, address_in).await?;
            return Ok(EngineProcess { process, address });
        };
        let launch =
            vllm.launch(number, socket, self.host.pool_tokens, self.host.profile.model.max_model_tokens)?;
        let (process, address) = Process::start(&name, launch, vllm::address_in).await?;
        vllm::wait_until_it_answers(address).await?;
        Ok(EngineProcess { process, address })
    }

    /// Each node takes a free port; then all are told where all are.
    async fn start_nodes(&self, directory: &Path, policy: Policy) -> Result<Vec<Process>, Error> {
        node_config::write_list(directory, &[])?;
        let (mut nodes, mut addresses) = (Vec::new(), Vec::new());
        for number in 0..usize::from(self.nodes) {
            let config = node_config::write(directory, number, self, policy)?;
            let arguments = ["node".into(), "--config".into(), config.into_os_string()];
            let launch = Launch::own(arguments.into());
            let (node, address) = Process::start(&node_name(number), launch, peers_at).await?;
            nodes.push(node);
            addresses.push(address);
        }
        node_config::write_list(directory, &addresses)?;
        Ok(nodes)
    }

    fn engine_arguments(&self, socket: &Path) -> Vec<OsString> {
        let host = &self.host;
        let options = [
            ("--port", "0".to_owned()),
            ("--profile", host.profile.name.clone()),
            ("--clock-ratio", host.clock_ratio.to_string()),
            ("--pool-tokens", host.pool_tokens.to_string()),
            ("--kv-bytes-per-token-layer", KV_BYTES_PER_TOKEN_LAYER.to_string()),
            ("--chunk-tokens", CHUNK_TOKENS.to_string()),
            ("--stream-interval", STREAM_INTERVAL.to_string()),
        ];
        let options = options.into_iter().flat_map(|(name, value)| [OsString::from(name), value.into()]);
        let command = std::iter::once(OsString::from("engine")).chain(options);
        command.chain(["--node".into(), socket.into()]).collect()
    }
}

impl Cluster {
    /// How many engines there are.
    pub fn engines(&self) -> usize {
        self.engines.len()
    }

    /// Kills the last node with SIGKILL. Gives its name and those of its engines.
    pub async fn kill_one(&self) -> Result<(String, Vec<String>), Error> {
        let last = self.nodes.lock().pop();
        let number = self.node_count - 1;
        if let Some(node) = last {
            node.kill().await?;
        }
        let engines = (0..self.engines.len()).filter(|engine| engine % self.node_count == number);
        Ok((node_name(number), engines.map(engine_name).collect()))
    }

    /// Samples the load of engines until it cannot write any more.
    pub async fn sample(&self, arm: &str, clock_ratio: f64, records: &RecordWriter) -> Error {
        let instance = |(number, engine): (usize, &EngineProcess)| {
            Ok::<_, Error>(Instance { name: engine_name(number), url: engine.url().parse()? })
        };
        let instances: Vec<Instance> = match self.engines.iter().enumerate().map(instance).collect() {
            Ok(instances) => instances,
            Err(error) => return error,
        };
        let transport = match Transport::new(None, SAMPLE_EVERY) {
            Ok(transport) => transport,
            Err(error) => return error.into(),
        };
        let (failed, mut failure) = tokio::sync::mpsc::unbounded_channel();
        let sink = |sample| {
            if let Err(error) = records.write(&Line::Load(sample)) {
                drop(failed.send(error));
            }
        };
        tokio::select! {
            () = sample_load(&transport, arm, &instances, SAMPLE_EVERY, clock_ratio, sink) => {
                "sampling ended by itself".into()
            }
            error = failure.recv() => error.map_or("sampling ended by itself".into(), Error::from),
        }
    }

    /// What the engines counted themselves.
    pub async fn counts(&self) -> Result<Vec<Count>, Error> {
        let mut pages = Vec::new();
        for engine in &self.engines {
            pages.push(MetricsPage::of(engine.address).await?);
        }
        if self.vllm {
            return Ok(vllm::counts(&pages));
        }
        let sum = |name, label| pages.iter().map(|page| page.count(name, label)).sum::<u64>();
        let good = |source| sum("forebay_good_chunks_total", source);
        let loads = |outcome| sum("forebay_loaded_chunks_total", outcome);
        let misses = [
            loads("outcome=\"node_gone\""),
            sum("forebay_unasked_chunks_total", ""),
            loads("outcome=\"dead_lease\""),
            loads("outcome=\"missing\""),
            loads("outcome=\"unmoved\""),
            loads("outcome=\"corrupt\""),
        ];
        let counts = [
            (rows::CHUNKS_LOADED, loads("outcome=\"good\"")),
            (rows::CHUNKS_STORED, sum("forebay_stored_chunks_total", "outcome=\"stored\"")),
            (rows::SSD_CHUNKS, good("source=\"disk\"")),
            (rows::PEER_CHUNKS, good("source=\"peer\"")),
            (rows::PREEMPTIONS, sum("vllm:num_preemptions_total", "")),
        ];
        Ok(counts.into_iter().chain(rows::MISSES.into_iter().zip(misses)).collect())
    }

    /// Ends the router, the engines, then the nodes. All are ended, whatever happens to one of
    /// them.
    pub async fn stop(self) -> Result<(), Error> {
        self.router.shutdown().await;
        let nodes = self.nodes.into_inner();
        let mut outcome = Ok(());
        for process in self.engines.into_iter().map(|engine| engine.process).chain(nodes) {
            outcome = outcome.and(process.stop().await);
        }
        Ok(outcome?)
    }
}

impl EngineProcess {
    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// The address at which a node that is ready says it answers its peers.
fn peers_at(line: &str) -> Option<SocketAddr> {
    let said = line.strip_prefix("forebay node: ")?;
    said.trim_end().rsplit_once(", peers at ")?.1.parse().ok()
}

/// The address that an engine says it serves at.
fn address_in(line: &str) -> Option<SocketAddr> {
    line.split_once("http://")?.1.split_whitespace().next()?.parse().ok()
}
