//! An endpoint picker with sockets, and a gRPC client that says what Envoy would: what it is told,
//! and what comes of it in the books. Engines answer probes only: nobody sends them anything here.

use super::api::{
    self, BodySendMode, HeaderMap, HeaderValue, HttpBody, HttpHeaders, ImmediateResponse, Metadata,
    ProcessingRequest, ProcessingResponse, ProtocolConfiguration, Said, Told,
};
use super::{Epp, EppConfig, EppHandle};
use crate::elastic::KvNetwork;
use crate::{Backend, EngineModel, Failure, HandOverConfig, HandOverEnd, Policy, Protocol, RouterConfig};
use bytes::Bytes;
use forebay_steps::{Launch, Profile};
use futures_util::stream::{self, StreamExt};
use http::uri::PathAndQuery;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::Duration;
use testkit::eventually_async;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codegen::Service;
use tonic::{Code, Status, Streaming};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_prost::ProstCodec;

const PROMPT: &str = r#"{"model":"m","prompt":"Once upon a time","stream":true}"#;
const DESTINATION: &str = "x-gateway-destination-endpoint";

/// Something that answers probes, and has no list of models. It ends when it is dropped.
struct Engine {
    address: SocketAddr,
    answering: JoinHandle<()>,
}

impl Engine {
    async fn start() -> Engine {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answering = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
            }
        });
        Engine { address, answering }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.answering.abort();
    }
}

async fn engines<const COUNT: usize>() -> [Engine; COUNT] {
    let mut started = Vec::new();
    for _ in 0..COUNT {
        started.push(Engine::start().await);
    }
    started.try_into().unwrap_or_else(|_| unreachable!())
}

fn config(policy: Policy, engines: &[Engine]) -> RouterConfig {
    let backend = |(number, engine): (usize, &Engine)| {
        Backend::new(format!("e{number}"), format!("http://{}", engine.address))
    };
    let backends = engines.iter().enumerate().map(backend).collect();
    let model = EngineModel::new(&Profile::shipped(Profile::DEFAULT).unwrap(), Launch::Graph);
    let mut config = RouterConfig::new(anywhere(), backends, policy, model);
    config.threads = 1;
    config.limits.drain = Duration::from_millis(200);
    config.limits.probe_timeout = Duration::from_secs(20);
    config
}

fn anywhere() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn spawn(router: RouterConfig) -> EppHandle {
    Epp::spawn(EppConfig { router, health: anywhere(), pages: anywhere() }).unwrap()
}

/// One HTTP/2 connection.
#[derive(Clone)]
struct Channel(hyper::client::conn::http2::SendRequest<Body>);

impl Channel {
    async fn connect(address: SocketAddr) -> Channel {
        let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        Channel(sender)
    }
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<hyper::body::Incoming>;
    type Error = hyper::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Envoy, with one request. Dropping it is as if the client went away.
struct Envoy {
    say: mpsc::UnboundedSender<ProcessingRequest>,
    heard: Streaming<ProcessingResponse>,
}

impl Envoy {
    async fn connect(epp: &EppHandle) -> Envoy {
        let channel = Channel::connect(epp.addr()).await;
        let origin = format!("http://{}", epp.addr()).parse().unwrap();
        let mut grpc = Grpc::with_origin(channel, origin);
        let (say, said) = mpsc::unbounded_channel();
        let said = stream::unfold(said, |mut said| async { said.recv().await.map(|next| (next, said)) });
        let codec = ProstCodec::<ProcessingRequest, ProcessingResponse>::default();
        let path = PathAndQuery::from_static(api::PROCESS);
        let heard = grpc.streaming(tonic::Request::new(said.boxed()), path, codec).await.unwrap();
        Envoy { say, heard: heard.into_inner() }
    }

    fn say(&self, told: Told) {
        self.say_with(told, None, None);
    }

    fn say_with(&self, told: Told, metadata: Option<Metadata>, config: Option<ProtocolConfiguration>) {
        let message = ProcessingRequest {
            request: Some(told),
            metadata_context: metadata,
            observability_mode: false,
            protocol_config: config,
        };
        self.say.send(message).unwrap();
    }

    async fn hear(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        tokio::time::timeout(Duration::from_secs(20), self.heard.message()).await.unwrap()
    }

    /// Says a request and hears where it goes: what is set in its head, and the body.
    async fn ask(&mut self, headers: &[(&str, &str)], body: &str) -> Sent {
        self.ask_within(headers, body, None).await
    }

    async fn ask_within(&mut self, headers: &[(&str, &str)], body: &str, subset: Option<Kind>) -> Sent {
        let metadata = subset
            .map(|subset| metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", subset));
        let all = [&[(":method", "POST"), (":path", "/v1/completions")], headers].concat();
        self.say_with(Told::RequestHeaders(head(&all, false)), metadata, None);
        self.say(Told::RequestBody(HttpBody {
            body: Bytes::copy_from_slice(body.as_bytes()),
            end_of_stream: true,
        }));
        self.sent().await
    }

    async fn sent(&mut self) -> Sent {
        let ProcessingResponse { response, dynamic_metadata } = self.hear().await.unwrap().unwrap();
        let head = match response.unwrap() {
            Said::Immediate(answer) => return Sent::Answered(answer),
            Said::RequestHeaders(head) => head.response.unwrap().header_mutation.unwrap(),
            other => panic!("{other:?}"),
        };
        let set: Vec<(String, String)> = head.set_headers.into_iter().map(|set| pair(set.header)).collect();
        let Some(Said::RequestBody(body)) = self.hear().await.unwrap().unwrap().response else { panic!() };
        let body = body.response.unwrap().body_mutation.unwrap().streamed_response.unwrap().body;
        let body = String::from_utf8(body.to_vec()).unwrap();
        Sent::Away { set, metadata: dynamic_metadata.unwrap(), body }
    }

    /// Says an answer, with the engine that gave it, and returns its body as it goes on.
    async fn answer(&mut self, status: &str, served: Option<SocketAddr>, body: &[u8]) -> Answer {
        let metadata = served.map(|at| {
            let at = Kind::StringValue(at.to_string());
            metadata("envoy.lb", "x-gateway-destination-endpoint-served", at)
        });
        let headers = [(":status", status), ("content-type", "text/event-stream")];
        self.say_with(Told::ResponseHeaders(head(&headers, false)), metadata, None);
        let Some(Said::ResponseHeaders(head)) = self.hear().await.unwrap().unwrap().response else {
            panic!()
        };
        let set = head.response.unwrap().header_mutation.unwrap().set_headers;
        let set = set.into_iter().map(|set| pair(set.header)).collect();
        let body = Bytes::copy_from_slice(body);
        self.say(Told::ResponseBody(HttpBody { body, end_of_stream: true }));
        let Some(Said::ResponseBody(body)) = self.hear().await.unwrap().unwrap().response else { panic!() };
        let body = body.response.unwrap().body_mutation.unwrap().streamed_response.unwrap();
        assert!(body.end_of_stream);
        Answer { set, body: String::from_utf8(body.body.to_vec()).unwrap() }
    }
}

#[derive(Debug)]
enum Sent {
    Away { set: Vec<(String, String)>, metadata: Struct, body: String },
    Answered(ImmediateResponse),
}

struct Answer {
    set: Vec<(String, String)>,
    body: String,
}

impl Sent {
    /// Where it goes, in order.
    fn to(&self) -> Vec<SocketAddr> {
        let Sent::Away { set, .. } = self else { panic!("{self:?}") };
        value(set, DESTINATION).split(',').map(|at| at.parse().unwrap()).collect()
    }

    /// The status and the reason of an answer.
    fn answered(&self) -> (i32, String) {
        let Sent::Answered(answer) = self else { panic!("{self:?}") };
        let set = &answer.headers.as_ref().unwrap().set_headers;
        let set: Vec<(String, String)> = set.iter().map(|set| pair(set.header.clone())).collect();
        (answer.status.unwrap().code, value(&set, "x-llm-d-request-dropped-reason").to_owned())
    }
}

fn value<'a>(set: &'a [(String, String)], name: &str) -> &'a str {
    set.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
}

fn pair(header: Option<HeaderValue>) -> (String, String) {
    let header = header.unwrap();
    (header.key, String::from_utf8(header.raw_value.to_vec()).unwrap())
}

fn head(of: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let value = |&(key, value): &(&str, &str)| HeaderValue {
        key: key.to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    HttpHeaders { headers: Some(HeaderMap { headers: of.iter().map(value).collect() }), end_of_stream }
}

fn metadata(namespace: &str, key: &str, kind: Kind) -> Metadata {
    let fields = [(key.to_owned(), Value { kind: Some(kind) })].into();
    Metadata { filter_metadata: [(namespace.to_owned(), Struct { fields })].into() }
}

const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";
const TOKEN: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";

#[tokio::test]
async fn a_request_goes_to_an_engine_and_a_second_one_and_both_ways_of_saying_it_are_equal() {
    let engines = engines::<3>().await;
    let epp = spawn(config(Policy::Lpwl, &engines));
    let mut envoy = Envoy::connect(&epp).await;
    let sent = envoy.ask(&[], PROMPT).await;
    let to = sent.to();
    assert!(to.len() == 2 && to[0] != to[1] && to.iter().all(|at| engines.iter().any(|e| e.address == *at)));
    let Sent::Away { set, metadata, body } = sent else { panic!() };
    let Some(Kind::StructValue(lb)) = &metadata.fields["envoy.lb"].kind else { panic!("{metadata:?}") };
    let said = Kind::StringValue(value(&set, DESTINATION).to_owned());
    assert_eq!(lb.fields[DESTINATION].kind, Some(said));
    assert!(body.contains("\"include_usage\":true"), "usage is asked for: {body}");
    assert_eq!(epp.stats().backends.iter().map(|of| of.in_flight).sum::<u32>(), 1);
    let answer = envoy.answer("200", Some(to[0]), [TOKEN, USAGE].concat().as_bytes()).await;
    assert_eq!(answer.body, TOKEN, "what the client did not ask for is taken out");
    let stats = epp.stats();
    let of = stats.backends.iter().find(|of| of.name == value(&answer.set, "x-forebay-backend")).unwrap();
    assert_eq!((of.answered, of.in_flight, of.prompt_tokens, of.cached_tokens), (1, 0, 10, 4));
}

#[tokio::test]
async fn a_subset_is_kept_to_and_where_nobody_is_in_it_the_answer_is_503() {
    let engines = engines::<3>().await;
    let epp = spawn(config(Policy::RoundRobin, &engines));
    let last = engines[2].address;
    let text = |at: &str| Kind::StringValue(at.to_owned());
    let list = |of: &[&str]| {
        let values = of.iter().map(|at| Value { kind: Some(text(at)) }).collect();
        Kind::ListValue(ListValue { values })
    };
    let at = last.to_string();
    for subset in [text(&at), list(&[&at]), text(&format!(" {at} , 10.0.0.1:80")), list(&["x", &at])] {
        for _ in 0..3 {
            let sent = Envoy::connect(&epp).await.ask_within(&[], PROMPT, Some(subset.clone())).await;
            assert_eq!(sent.to(), [last], "{subset:?}");
        }
    }
    let by_host = Envoy::connect(&epp).await.ask_within(&[], PROMPT, Some(text("127.0.0.1"))).await;
    assert_eq!(by_host.to().len(), 2);
    for nobody in [text("10.0.0.1:80"), list(&[]), text(""), Kind::NumberValue(1.0)] {
        let sent = Envoy::connect(&epp).await.ask_within(&[], PROMPT, Some(nobody)).await;
        assert_eq!(sent.answered(), (503, "rejected-no-engine".to_owned()));
    }
}

#[tokio::test]
async fn the_books_move_to_the_engine_that_answered() {
    let engines = engines::<2>().await;
    let epp = spawn(config(Policy::Lpwl, &engines));
    let mut envoy = Envoy::connect(&epp).await;
    let to = envoy.ask(&[], PROMPT).await.to();
    let answer = envoy.answer("200", Some(to[1]), [TOKEN, USAGE].concat().as_bytes()).await;
    let stats = epp.stats();
    let named = |at: SocketAddr| {
        let number = engines.iter().position(|engine| engine.address == at).unwrap();
        &stats.backends[number]
    };
    let (first, second) = (named(to[0]), named(to[1]));
    assert_eq!(first.failures[Failure::PassedOver as usize], 1);
    assert_eq!((first.answered, first.in_flight, second.answered, second.in_flight), (0, 0, 1, 0));
    assert_eq!((second.prompt_tokens, value(&answer.set, "x-forebay-backend")), (10, &second.name[..]));
    let attempts: Vec<u32> = epp.decisions().iter().map(|decision| decision.attempt).collect();
    assert_eq!(attempts, [1, 2]);
}

#[tokio::test]
async fn an_answer_of_an_unknown_engine_is_nobodys_and_passes() {
    let engines = engines::<2>().await;
    let epp = spawn(config(Policy::Lpwl, &engines));
    let mut envoy = Envoy::connect(&epp).await;
    envoy.ask(&[], r#"{"model":"m","prompt":"a"}"#).await.to();
    let answer = envoy.answer("200", Some(([10, 0, 0, 9], 80).into()), TOKEN.as_bytes()).await;
    assert_eq!((&answer.body[..], answer.set.len()), (TOKEN, 0));
    let stats = epp.stats();
    assert!(stats.backends.iter().all(|of| of.answered == 0 && of.in_flight == 0));
    assert_eq!(stats.backends.iter().map(|of| of.failures[Failure::PassedOver as usize]).sum::<u64>(), 1);
}

#[tokio::test]
async fn a_request_ends_once_however_its_stream_ends() {
    let engines = engines::<1>().await;
    let epp = spawn(config(Policy::Lpwl, &engines));
    let ends = || {
        let of = epp.stats().backends.remove(0);
        (of.in_flight, of.answered, of.cancelled, of.failures.iter().sum::<u64>())
    };
    let mut envoy = Envoy::connect(&epp).await;
    envoy.ask(&[], PROMPT).await.to();
    assert_eq!(ends(), (1, 0, 0, 0));
    drop(envoy);
    eventually_async("the client that went away before an answer is gone", || ends() == (0, 0, 1, 0)).await;
    let mut envoy = Envoy::connect(&epp).await;
    envoy.ask(&[], PROMPT).await.to();
    envoy.say(Told::ResponseHeaders(head(&[(":status", "200")], false)));
    envoy.say(Told::ResponseBody(HttpBody { body: TOKEN.into(), end_of_stream: false }));
    envoy.hear().await.unwrap();
    drop(envoy);
    eventually_async("and so is one that left in its middle", || ends() == (0, 0, 2, 0)).await;
    let mut envoy = Envoy::connect(&epp).await;
    envoy.ask(&[], PROMPT).await.to();
    envoy.answer("500", None, b"{}").await;
    assert_eq!(ends(), (0, 1, 2, 0));
    drop(envoy);
    let mut envoy = Envoy::connect(&epp).await;
    envoy.ask(&[], PROMPT).await.to();
    let error = b"data: {\"error\":{\"message\":\"out of blocks\"}}\n\n";
    envoy.answer("200", None, error).await;
    assert_eq!(ends(), (0, 1, 2, 1), "an engine that says that it failed has not answered");
}

#[tokio::test]
async fn a_body_that_envoy_does_not_show_is_answered_when_the_stream_ends() {
    let engines = engines::<1>().await;
    let epp = spawn(config(Policy::Lpwl, &engines));
    let mut envoy = Envoy::connect(&epp).await;
    let none = BodySendMode::None as i32;
    let config = ProtocolConfiguration {
        request_body_mode: none,
        response_body_mode: none,
        send_body_without_waiting_for_header_response: false,
    };
    let asked = head(&[(":method", "POST"), (":path", "/v1/completions")], false);
    envoy.say_with(Told::RequestHeaders(asked), None, Some(config));
    assert!(matches!(envoy.hear().await.unwrap().unwrap().response, Some(Said::RequestHeaders(_))));
    envoy.say(Told::ResponseHeaders(head(&[(":status", "200")], false)));
    envoy.hear().await.unwrap();
    let ends = || {
        let of = epp.stats().backends.remove(0);
        (of.in_flight, of.answered, of.cancelled)
    };
    assert_eq!(ends(), (1, 0, 0));
    // Envoy resets its streams.
    drop(envoy);
    eventually_async("it has ended", || ends() == (0, 1, 0)).await;
}

#[tokio::test]
async fn an_slo_that_no_engine_keeps_is_429_with_a_reason_and_a_bad_one_is_400() {
    let engines = engines::<1>().await;
    let mut config = config(Policy::Lpwl, &engines);
    config.engine_model.max_seqs = 1;
    let epp = spawn(config);
    let mut running = Envoy::connect(&epp).await;
    running.ask(&[], PROMPT).await.to();
    let hurried = [("x-llm-d-slo-ttft-ms", "0.001")];
    let refused = Envoy::connect(&epp).await.ask(&hurried, PROMPT).await;
    assert_eq!(refused.answered(), (429, "rejected-saturated".to_owned()));
    let Sent::Answered(answer) = refused else { panic!() };
    let error: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(error["error"]["code"], "ttft_slo");
    let bad = Envoy::connect(&epp).await.ask(&[("x-llm-d-slo-tpot-ms", "fast")], PROMPT).await;
    assert_eq!(bad.answered(), (400, String::new()));
}

#[tokio::test]
async fn paths_are_what_they_are_to_the_router_and_its_own_pages_are_not_for_clients() {
    let engines = engines::<1>().await;
    let epp = spawn(config(Policy::Lpwl, &engines));
    let ask = async |method: &str, path: &str| {
        let mut envoy = Envoy::connect(&epp).await;
        envoy.say(Told::RequestHeaders(head(&[(":method", method), (":path", path)], true)));
        match envoy.hear().await.unwrap().unwrap().response.unwrap() {
            Said::Immediate(answer) => answer.status.unwrap().code,
            Said::RequestHeaders(_) => 0,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ask("GET", "/version").await, 0, "it goes to an engine");
    assert_eq!((ask("GET", "/health").await, ask("GET", "/v1/models").await), (200, 200));
    assert_eq!((ask("GET", "/v1/completions").await, ask("POST", "/sleep").await), (405, 403));
    for hidden in ["/metrics", "/debug/decisions", "/admin/engines", "/nowhere"] {
        assert_eq!(ask("GET", hidden).await, 404, "{hidden}");
    }
}

#[tokio::test]
async fn too_many_requests_are_503_and_those_under_way_go_on() {
    let engines = engines::<1>().await;
    let mut config = config(Policy::Lpwl, &engines);
    config.limits.max_in_flight = 1;
    let epp = spawn(config);
    let mut running = Envoy::connect(&epp).await;
    running.ask(&[], PROMPT).await.to();
    let refused = Envoy::connect(&epp).await.ask(&[], PROMPT).await;
    assert_eq!(refused.answered(), (503, "rejected-saturated".to_owned()));
    running.answer("200", None, TOKEN.as_bytes()).await;
    drop(running);
    // That its stream has ended may be seen a little later.
    let mut taken = false;
    for _ in 0..500 {
        taken = matches!(Envoy::connect(&epp).await.ask(&[], PROMPT).await, Sent::Away { .. });
        if taken {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(taken, "there is room again");
}

/// Engines that compute a token in a millisecond, and decode slowly behind long contexts.
fn slow() -> Profile {
    let mut profile = Profile::shipped(Profile::DEFAULT).unwrap();
    profile.step.linear_us_per_token = 1_000.0;
    profile.step.attention_ns_per_pair = 0.0;
    profile.step.kv_read_ns_per_context_token = 10_000.0;
    profile.step.us_per_request = 10.0;
    (profile.step.floor_eager_us, profile.step.floor_graph_us) = (1_000.0, 1_000.0);
    profile.memory.pool_tokens = 32_768;
    profile
}

/// A prompt that shares nothing with another one.
fn tokens(seed: usize, count: usize, stream: bool) -> String {
    let ids: Vec<String> = (0..count).map(|at| (seed * 100_000 + at).to_string()).collect();
    format!(r#"{{"model":"m","prompt":[{}],"stream":{stream}}}"#, ids.join(","))
}

#[tokio::test]
async fn a_prompt_is_handed_over_by_a_header_and_both_engines_have_it_in_their_books() {
    let engines = engines::<2>().await;
    let mut config = config(Policy::Elastic, &engines);
    config.engine_model = EngineModel::new(&slow(), Launch::Graph);
    let network = KvNetwork { layers: 1, ..KvNetwork::new(&slow(), 25.0) };
    config.hand_over = Some(HandOverConfig { protocol: Protocol::Nixl, network });
    let epp = spawn(config);
    // One engine decodes behind a long context, the other one has a prompt to compute.
    let mut decoding = Envoy::connect(&epp).await;
    let busy = decoding.ask(&[], &tokens(1, 1_600, true)).await.to()[0];
    decoding.say(Told::ResponseHeaders(head(&[(":status", "200")], false)));
    decoding.say(Told::ResponseBody(HttpBody { body: TOKEN.into(), end_of_stream: false }));
    decoding.hear().await.unwrap();
    decoding.hear().await.unwrap();
    let mut waiting = Envoy::connect(&epp).await;
    waiting.ask(&[], &tokens(2, 700, false)).await.to();
    let mut envoy = Envoy::connect(&epp).await;
    let sent = envoy.ask(&[], &tokens(3, 700, true)).await;
    let Sent::Away { set, .. } = &sent else { panic!("{sent:?}") };
    assert_eq!(value(set, "x-prefiller-host-port"), busy.to_string());
    assert!(!sent.to().contains(&busy), "it is not asked twice: {sent:?}");
    let prefiller = engines.iter().position(|engine| engine.address == busy).unwrap();
    let answer = envoy.answer("200", Some(sent.to()[0]), [TOKEN, USAGE].concat().as_bytes()).await;
    assert_eq!(value(&answer.set, "x-forebay-prefill"), format!("e{prefiller}"));
    let stats = epp.stats();
    let [of_prefiller, of_decoder] = [prefiller, 1 - prefiller].map(|number| &stats.backends[number]);
    assert_eq!(of_prefiller.hand_overs[HandOverEnd::Handed as usize], 1);
    assert_eq!((of_prefiller.answered, of_prefiller.in_flight), (1, 1));
    assert_eq!((of_decoder.answered, of_decoder.in_flight), (1, 1));
}

#[tokio::test]
async fn what_the_protocol_does_not_allow_ends_the_stream_with_a_reason() {
    let engines = engines::<1>().await;
    let epp = spawn(config(Policy::Lpwl, &engines));
    let mut envoy = Envoy::connect(&epp).await;
    let config = ProtocolConfiguration {
        request_body_mode: BodySendMode::BufferedPartial as i32,
        response_body_mode: BodySendMode::None as i32,
        send_body_without_waiting_for_header_response: false,
    };
    let asked = head(&[(":method", "POST"), (":path", "/v1/completions")], false);
    envoy.say_with(Told::RequestHeaders(asked), None, Some(config));
    let status = envoy.hear().await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("request_body_mode is 3"), "{status}");
    assert!(epp.metrics().contains("forebay_route_refused_total{reason=\"protocol\"} 1\n"));
}

#[tokio::test]
async fn health_has_three_names_and_says_when_the_picker_is_about_to_end() {
    let engines = engines::<1>().await;
    let mut config = config(Policy::Lpwl, &engines);
    config.limits.shutdown_delay = Duration::from_secs(20);
    let epp = spawn(config);
    let mut clients = Vec::new();
    for address in [epp.addr(), epp.health_addr()] {
        let origin: http::Uri = format!("http://{address}").parse().unwrap();
        clients.push(HealthClient::with_origin(Channel::connect(address).await, origin));
    }
    let mut check = async |client: usize, service: &str| {
        let request = HealthCheckRequest { service: service.to_owned() };
        let answer = clients[client].check(request).await;
        answer.map(|answer| answer.into_inner().status()).map_err(|status| status.code())
    };
    for client in 0..2 {
        for service in ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"] {
            let said = check(client, service).await;
            assert_eq!(said, Ok(ServingStatus::Serving), "{service} of client {client}");
        }
        assert_eq!(check(client, "nobody").await, Err(Code::NotFound), "client {client}");
    }
    let (hurry, hurried) = tokio::sync::oneshot::channel::<()>();
    let ending = tokio::spawn(epp.shutdown_or_hurry(async { drop(hurried.await) }));
    // Each address is asked until it says so: the end may begin between two questions.
    for client in 0..2 {
        while check(client, "readiness").await == Ok(ServingStatus::Serving) {
            tokio::task::yield_now().await;
        }
        assert_eq!(check(client, "readiness").await, Ok(ServingStatus::NotServing));
        assert_eq!(check(client, "liveness").await, Ok(ServingStatus::Serving));
    }
    drop(hurry);
    ending.await.unwrap();
}

#[tokio::test]
async fn engines_with_names_for_hosts_are_refused() {
    let engines = engines::<1>().await;
    let mut config = config(Policy::Lpwl, &engines);
    config.backends.push(Backend::new("named", "http://localhost:8000"));
    let refused =
        Epp::spawn(EppConfig { router: config, health: anywhere(), pages: anywhere() }).unwrap_err();
    assert!(refused.to_string().starts_with("engine named: 'localhost:8000' is the name of a host"));
}
