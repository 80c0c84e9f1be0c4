//! Two emulated engines and an elastic router before them, loaded so that prompts are handed over:
//! one engine decodes behind a long context, the other one has a prompt to compute.

use bytes::Bytes;
use forebay_emulator::truth::Oracle;
use forebay_emulator::{Engine, EngineConfig, EngineHandle};
use forebay_kv::NamespaceKey;
use forebay_router::elastic::KvNetwork;
use forebay_router::{
    Backend, EngineModel, HandOverConfig, HandOverRecord, Policy, Protocol, Router, RouterConfig,
    RouterHandle,
};
use forebay_steps::{Launch, Profile};
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

pub const PREFILLER: usize = 0;
pub const DECODER: usize = 1;

/// Tokens of a prompt that is handed over: half a second and more of computing.
const PROMPT_TOKENS: usize = 700;
const OUTPUT_TOKENS: usize = 12;

/// Slow enough for both engines' steps to be seen: a millisecond a token.
fn profile() -> Profile {
    let mut profile = Profile::shipped(Profile::DEFAULT).expect("shipped");
    profile.step.linear_us_per_token = 1_000.0;
    profile.step.attention_ns_per_pair = 0.0;
    profile.step.kv_read_ns_per_context_token = 10_000.0;
    profile.step.us_per_request = 10.0;
    (profile.step.floor_eager_us, profile.step.floor_graph_us) = (1_000.0, 1_000.0);
    (profile.api.us_per_request, profile.api.us_per_token) = (100.0, 0.1);
    profile.memory.pool_tokens = 32_768;
    // So that long prompts of others do not stand in the way.
    profile.scheduler.max_batched_tokens = 2_048;
    profile
}

/// An engine in a runtime of its own, so that killing it closes all of its sockets.
struct Emulated {
    runtime: Option<Runtime>,
    engine: Option<EngineHandle>,
    address: SocketAddr,
}

impl Emulated {
    async fn start(config: EngineConfig) -> Emulated {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let engine = runtime.spawn(Engine::spawn(config, None)).await.expect("no panic").expect("it starts");
        let address = engine.address();
        Emulated { runtime: Some(runtime), engine: Some(engine), address }
    }

    fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        drop(self.engine.take());
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        self.kill();
    }
}

pub struct Site {
    engines: [Emulated; 2],
    router: RouterHandle,
    oracle: Oracle,
    http: Http,
    /// Requests that keep the engines busy.
    load: Vec<JoinHandle<()>>,
}

type Http = Client<HttpConnector, Full<Bytes>>;

/// A request.
#[derive(Clone)]
pub struct Asked {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub is_stream: bool,
    /// Other fields, each behind a comma.
    pub more: String,
}

/// An answer, and what it should be.
pub struct Got {
    headers: HeaderMap,
    tokens: Vec<u32>,
    right: Vec<u32>,
    body: String,
}

impl Got {
    pub fn assert_right(&self, what: &str) {
        assert_eq!(self.tokens, self.right, "{what}: {}", self.body);
    }

    /// Right, or the beginning of it, and the client is told that it is not whole.
    pub fn assert_right_or_broken(&self, what: &str) {
        let is_whole = self.tokens == self.right;
        let is_told = self.body.contains("\"error\"") && !self.body.contains("[DONE]");
        assert!(self.right.starts_with(&self.tokens) && (is_whole || is_told), "{what}: {}", self.body);
    }

    pub fn backend(&self) -> &str {
        self.headers["x-forebay-backend"].to_str().expect("text")
    }

    pub fn prefiller(&self) -> Option<&str> {
        self.headers.get("x-forebay-prefill").map(|name| name.to_str().expect("text"))
    }
}

impl Asked {
    fn body(&self) -> String {
        let Asked { prompt, max_tokens, is_stream, more } = self;
        let prompt = json!(prompt);
        format!(
            "{{\"prompt\":{prompt},\"max_tokens\":{max_tokens},\"stream\":{is_stream},\
             \"return_token_ids\":true{more}}}"
        )
    }
}

impl Site {
    /// Starts all of it, and waits until both engines are as busy as is needed.
    pub async fn start(protocol: Protocol) -> Site {
        let profile = profile();
        let config = EngineConfig::new(profile.clone(), NamespaceKey::from_bytes([7; 32]));
        let truth = config.truth().expect("a possible shape");
        let oracle = Oracle::new(truth, profile.model.vocab, 10_000);
        let engines = [Emulated::start(config.clone()).await, Emulated::start(config).await];
        let names = engines.iter().zip(["e0", "e1"]);
        let backends = names.map(|(engine, name)| Backend::new(name, format!("http://{}", engine.address)));
        let model = EngineModel::new(&profile, Launch::Graph);
        let listen = ([127, 0, 0, 1], 0).into();
        let mut config = RouterConfig::new(listen, backends.collect(), Policy::Elastic, model);
        let network = KvNetwork { layers: 1, ..KvNetwork::new(&profile, 25.0) };
        config.hand_over = Some(HandOverConfig { protocol, network });
        config.threads = 1;
        config.limits.drain = Duration::from_millis(300);
        let router = Router::spawn(config).expect("it starts");
        let http = Client::builder(TokioExecutor::new()).build_http();
        let mut site = Site { engines, router, oracle, http, load: Vec::new() };
        site.make_busy().await;
        site
    }

    /// The first engine streams an answer behind a long context. The second one has an answer to
    /// say that comes as a whole: as far as the router sees, its prompt is not computed.
    async fn make_busy(&mut self) {
        let long = Asked { is_stream: true, max_tokens: 25_000, ..self.prompt(900, 1_600) };
        self.load.push(self.load(&long));
        self.until("the first engine decodes", |site| {
            let stats = site.router.stats();
            stats.backends[PREFILLER].context_tokens > 0
                && stats.backends[PREFILLER].pending_prefill_tokens == 0
        })
        .await;
        let whole = Asked { is_stream: false, max_tokens: 25_000, ..self.prompt(901, PROMPT_TOKENS) };
        self.load.push(self.load(&whole));
        self.until("the second engine has something to compute", |site| {
            site.router.stats().backends[DECODER].pending_prefill_tokens > 0
        })
        .await;
    }

    fn load(&self, asked: &Asked) -> JoinHandle<()> {
        let request = self.request(asked);
        let http = self.http.clone();
        tokio::spawn(async move {
            if let Ok(answer) = http.request(request).await {
                drop(answer.into_body().collect().await);
            }
        })
    }

    fn prompt(&self, seed: u32, tokens: usize) -> Asked {
        let token =
            |place: usize| (place as u32).wrapping_mul(2_654_435_761).wrapping_add(seed * 77) % 151_936;
        let prompt = (0..tokens).map(token).collect();
        Asked { prompt, max_tokens: OUTPUT_TOKENS, is_stream: true, more: String::new() }
    }

    /// A prompt that no other number gives.
    pub fn new_prompt(&self, number: u32) -> Asked {
        self.prompt(number, PROMPT_TOKENS)
    }

    pub fn engine(&self, engine: usize) -> &EngineHandle {
        self.engines[engine].engine.as_ref().expect("it lives")
    }

    pub fn kill(&mut self, engine: usize) {
        self.engines[engine].kill();
    }

    /// Answers that an engine has said to the end.
    pub fn finished(&self, engine: usize) -> u64 {
        self.engine(engine).stats().finished
    }

    /// Requests to each engine whose client went away.
    pub fn cancelled(&self) -> Vec<u64> {
        self.router.stats().backends.iter().map(|of| of.cancelled).collect()
    }

    /// The hand-overs that were decided, in order.
    pub fn hand_overs(&self) -> Vec<HandOverRecord> {
        self.router.decisions().into_iter().filter_map(|decision| decision.hand_over).collect()
    }

    fn request(&self, asked: &Asked) -> Request<Full<Bytes>> {
        Request::post(format!("http://{}/v1/completions", self.router.addr()))
            .header("content-type", "application/json")
            .body(Full::new(asked.body().into()))
            .expect("a request")
    }

    pub async fn ask(&self, asked: &Asked) -> Got {
        self.ask_task(asked).await.expect("no panic")
    }

    pub fn ask_task(&self, asked: &Asked) -> JoinHandle<Got> {
        let request = self.request(asked);
        let (http, is_stream) = (self.http.clone(), asked.is_stream);
        let right = self.oracle.predict(&asked.prompt, asked.max_tokens.min(OUTPUT_TOKENS));
        tokio::spawn(async move {
            let (head, body) = http.request(request).await.expect("an answer").into_parts();
            let body = String::from_utf8_lossy(&read(body).await).into_owned();
            let tokens = if is_stream { streamed(&body) } else { whole(&body) };
            Got { headers: head.headers, tokens, right, body }
        })
    }

    /// Ends the other load and waits until nobody has anything to do.
    pub async fn assert_quiet(&self) {
        self.load.iter().for_each(JoinHandle::abort);
        self.until("the router has nothing in flight", |site| {
            let idle =
                |of: &forebay_router::BackendStats| (of.in_flight, of.pending_prefill_tokens) == (0, 0);
            site.router.stats().backends.iter().all(idle)
        })
        .await;
        for emulated in &self.engines {
            let Some(engine) = &emulated.engine else { continue };
            self.until("an engine has nothing to do", |_| {
                let stats = engine.stats();
                (stats.running, stats.waiting) == (0, 0)
            })
            .await;
        }
    }

    /// No engine keeps blocks for another one, and the router counts none.
    pub fn assert_nothing_kept(&self) {
        assert!((0..2).all(|engine| self.engine(engine).kept_prompts() == 0));
        let stats = self.router.stats();
        assert!(stats.backends.iter().all(|of| of.context_tokens == 0), "{stats:?}");
    }

    pub async fn until(&self, what: &str, is_so: impl Fn(&Site) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so(self) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.router.stats());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// What comes of a body, which may break off.
async fn read(mut body: Incoming) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        bytes.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
    }
    bytes
}

fn ids(choice: &Value) -> Vec<u32> {
    let ids = choice["token_ids"].as_array().cloned().unwrap_or_default();
    ids.iter().filter_map(Value::as_u64).map(|id| id as u32).collect()
}

fn whole(body: &str) -> Vec<u32> {
    let answer: Value = serde_json::from_str(body).unwrap_or_default();
    ids(&answer["choices"][0])
}

fn streamed(body: &str) -> Vec<u32> {
    let events = body.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let events = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    events.flat_map(|event| ids(&event["choices"][0])).collect()
}
