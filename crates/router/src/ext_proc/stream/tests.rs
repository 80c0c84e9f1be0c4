//! A stand-in for Envoy says requests and answers in every mode, cut in every way, and looks
//! whether what it is told keeps to the protocol.

use super::*;
use crate::ext_proc::api::{BodyResponse, HeaderMap as SaidHeaders, HeaderValue, HttpTrailers, Said};
use proptest::prelude::*;

const MODES: [BodySendMode; 4] =
    [BodySendMode::None, BodySendMode::Streamed, BodySendMode::Buffered, BodySendMode::FullDuplexStreamed];
const MAX_BODY: usize = 1 << 20;

fn headers(of: &[(&str, &str)]) -> Option<SaidHeaders> {
    let value = |&(key, value): &(&str, &str)| HeaderValue {
        key: key.to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    Some(SaidHeaders { headers: of.iter().map(value).collect() })
}

fn message(told: Told) -> ProcessingRequest {
    ProcessingRequest { request: Some(told), ..ProcessingRequest::default() }
}

fn request_head(end_of_stream: bool) -> Told {
    let headers = headers(&[(":method", "POST"), (":path", "/v1/completions")]);
    Told::RequestHeaders(HttpHeaders { headers, end_of_stream })
}

fn answer_head(end_of_stream: bool) -> Told {
    Told::ResponseHeaders(HttpHeaders { headers: headers(&[(":status", "200")]), end_of_stream })
}

fn body(body: Bytes, end_of_stream: bool) -> HttpBody {
    HttpBody { body, end_of_stream }
}

fn config(request: BodySendMode, answer: BodySendMode, at_once: bool) -> Option<ProtocolConfiguration> {
    Some(ProtocolConfiguration {
        request_body_mode: request as i32,
        response_body_mode: answer as i32,
        send_body_without_waiting_for_header_response: at_once,
    })
}

fn destination() -> Destination {
    Destination { endpoints: "10.0.0.1:1,10.0.0.2:2".into(), prefiller: None, traceparent: None }
}

/// Whoever decides and looks at answers: it changes nothing.
struct Driver {
    stream: Stream,
    decisions: usize,
    seen_body: Option<Bytes>,
    seen_answer: Vec<u8>,
    /// The first message has been said.
    has_said: bool,
    config: Option<ProtocolConfiguration>,
}

impl Driver {
    fn new(config: Option<ProtocolConfiguration>) -> Driver {
        Driver {
            stream: Stream::new(MAX_BODY),
            decisions: 0,
            seen_body: None,
            seen_answer: Vec::new(),
            has_said: false,
            config,
        }
    }

    fn say(&mut self, told: Told) -> Result<Vec<ProcessingResponse>, Violation> {
        let mut message = message(told);
        if !std::mem::replace(&mut self.has_said, true) {
            message.protocol_config = self.config;
        }
        Ok(match self.stream.on(message)? {
            Step::Say(said) => said,
            Step::Decide(asked) => {
                self.decisions += 1;
                self.seen_body = asked.body.clone();
                let body = asked.body.unwrap_or_default();
                self.stream.decided(Decision::Send { destination: destination(), body })
            }
            Step::Refuse(_) => self.stream.answered(Response::new(Bytes::new())),
            Step::Begin(_) => self.stream.begun(Set::new()),
            Step::Pass(bytes, part) => {
                self.seen_answer.extend_from_slice(&bytes);
                self.stream.passed(bytes, part)
            }
        })
    }
}

/// What Envoy was told, as kinds and bytes.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    kinds: Vec<&'static str>,
    /// The bodies, where they were streamed back.
    request: Vec<u8>,
    answer: Vec<u8>,
    /// Whether a body ended, and nothing came after that.
    ended: Vec<bool>,
    destinations: usize,
}

impl Heard {
    fn hear(&mut self, said: Vec<ProcessingResponse>) {
        for ProcessingResponse { response, dynamic_metadata } in said {
            self.destinations += usize::from(dynamic_metadata.is_some());
            let kind = match response.unwrap() {
                Said::RequestHeaders(_) => "request head",
                Said::ResponseHeaders(_) => "answer head",
                Said::RequestBody(body) => {
                    self.piece(body, true);
                    "request body"
                }
                Said::ResponseBody(body) => {
                    self.piece(body, false);
                    "answer body"
                }
                Said::RequestTrailers(_) => "request trailers",
                Said::ResponseTrailers(_) => "answer trailers",
                Said::Immediate(_) => "immediate",
            };
            self.kinds.push(kind);
        }
    }

    fn piece(&mut self, body: BodyResponse, of_request: bool) {
        let Some(mutation) = body.response.unwrap().body_mutation else { return };
        let piece = mutation.streamed_response.unwrap();
        assert!(piece.body.len() <= 64 * 1024);
        let whole = if of_request { &mut self.request } else { &mut self.answer };
        whole.extend_from_slice(&piece.body);
        self.ended.push(piece.end_of_stream);
    }
}

/// A body in pieces.
fn cut(body: &Bytes, cuts: &[usize]) -> Vec<Bytes> {
    let mut rest = body.clone();
    let mut pieces: Vec<Bytes> = cuts.iter().map(|&cut| rest.split_to(cut.min(rest.len()))).collect();
    pieces.push(rest);
    pieces
}

/// How bodies are said in a mode: as they are cut, or all at once.
fn bodies(mode: BodySendMode, body: &Bytes, cuts: &[usize]) -> Vec<Bytes> {
    match mode {
        BodySendMode::None => Vec::new(),
        BodySendMode::Buffered => vec![body.clone()],
        _ => cut(body, cuts),
    }
}

fn any_body() -> impl Strategy<Value = Bytes> {
    (0..200_000_usize, any::<u8>()).prop_map(|(length, first)| {
        (0..length).map(|at| first.wrapping_add((at % 251) as u8)).collect::<Vec<u8>>().into()
    })
}

proptest! {
    #[test]
    fn any_cutting_gives_one_decision_and_the_bodies_pass_unchanged(
        modes in prop::sample::select(MODES.to_vec()).prop_flat_map(|request| {
            (Just(request), prop::sample::select(MODES.to_vec()), any::<bool>())
        }),
        (request, answer) in (any_body(), any_body()),
        (request_cuts, answer_cuts) in (
            prop::collection::vec(0..90_000_usize, 0..5), prop::collection::vec(0..90_000_usize, 0..5)),
        (request_trailers, answer_trailers) in any::<(bool, bool)>(),
        without_body: bool,
    ) {
        let (request_mode, answer_mode, at_once) = modes;
        let mut driver = Driver::new(config(request_mode, answer_mode, at_once));
        let mut heard = Heard::default();
        let mut said = 1;
        heard.hear(driver.say(request_head(without_body)).unwrap());
        if !without_body {
            let pieces = bodies(request_mode, &request, &request_cuts);
            let last = pieces.len().wrapping_sub(1);
            for (at, piece) in pieces.into_iter().enumerate() {
                let is_end = at == last && !request_trailers;
                heard.hear(driver.say(Told::RequestBody(body(piece, is_end))).unwrap());
                said += 1;
            }
            if request_trailers {
                heard.hear(driver.say(Told::RequestTrailers(HttpTrailers {})).unwrap());
                said += 1;
            }
        }
        prop_assert_eq!((driver.decisions, heard.destinations), (1, 1));
        let waits = match request_mode {
            BodySendMode::FullDuplexStreamed | BodySendMode::Buffered => true,
            BodySendMode::Streamed => at_once,
            _ => false,
        };
        let wanted = match (waits, without_body) {
            (_, true) => Some(Bytes::new()),
            (true, false) => Some(request.clone()),
            (false, false) => None,
        };
        prop_assert_eq!(&driver.seen_body, &wanted);
        prop_assert_eq!(heard.kinds[0], "request head");
        if request_mode == BodySendMode::FullDuplexStreamed && !without_body {
            prop_assert_eq!(&heard.request, &request);
            let (last, others) = heard.ended.split_last().map_or((!request_trailers, &[][..]), |(l, o)| (*l, o));
            prop_assert_eq!(last, !request_trailers);
            prop_assert!(!others.contains(&true));
        } else {
            prop_assert_eq!(heard.kinds.len(), said, "one answer to each message");
        }
        if request_trailers && !without_body {
            prop_assert_eq!(heard.kinds.last(), Some(&"request trailers"));
        }

        let mut heard = Heard::default();
        let mut said = 1;
        heard.hear(driver.say(answer_head(false)).unwrap());
        let pieces = bodies(answer_mode, &answer, &answer_cuts);
        let last = pieces.len().wrapping_sub(1);
        for (at, piece) in pieces.into_iter().enumerate() {
            let is_end = at == last && !answer_trailers;
            heard.hear(driver.say(Told::ResponseBody(body(piece, is_end))).unwrap());
            said += 1;
        }
        if answer_trailers {
            heard.hear(driver.say(Told::ResponseTrailers(HttpTrailers {})).unwrap());
            said += 1;
        }
        let shown = if answer_mode == BodySendMode::None { Bytes::new() } else { answer.clone() };
        prop_assert_eq!(&driver.seen_answer, &shown);
        if answer_mode == BodySendMode::FullDuplexStreamed {
            prop_assert_eq!(&heard.answer, &answer);
        } else {
            prop_assert_eq!(heard.kinds.len(), said, "one answer to each message");
        }
        prop_assert_eq!(driver.decisions, 1);
    }

    #[test]
    fn any_order_of_messages_gives_one_decision_at_most_and_nothing_after_an_answer(
        said in prop::collection::vec((0..6_usize, any::<bool>(), 0..3_usize), 0..12),
        modes in (prop::sample::select(MODES.to_vec()), prop::sample::select(MODES.to_vec()), any::<bool>()),
    ) {
        let mut driver = Driver::new(config(modes.0, modes.1, modes.2));
        let mut heads = 0;
        for (kind, is_end, length) in said {
            let bytes = Bytes::from(vec![b'x'; length]);
            let told = match kind {
                0 => request_head(is_end),
                1 => Told::RequestBody(body(bytes, is_end)),
                2 => Told::RequestTrailers(HttpTrailers {}),
                3 => answer_head(is_end),
                4 => Told::ResponseBody(body(bytes, is_end)),
                _ => Told::ResponseTrailers(HttpTrailers {}),
            };
            heads += usize::from(kind == 0);
            match driver.say(told) {
                Ok(said) if !said.is_empty() => prop_assert!(heads > 0 || kind >= 3),
                Ok(_) => {}
                // The stream ends with an error.
                Err(_) => break,
            }
            prop_assert!(driver.decisions <= heads.min(1));
        }
    }
}

#[test]
fn a_body_that_is_too_long_is_refused_before_it_is_whole_and_nothing_is_said_after_that() {
    let mut driver = Driver::new(None);
    driver.say(request_head(false)).unwrap();
    let piece = || Told::RequestBody(body(vec![b'x'; MAX_BODY / 2].into(), false));
    assert!(driver.say(piece()).unwrap().is_empty() && driver.say(piece()).unwrap().is_empty());
    let mut heard = Heard::default();
    heard.hear(driver.say(piece()).unwrap());
    assert_eq!((heard.kinds, driver.stream.is_over()), (vec!["immediate"], true));
    assert!(driver.say(piece()).unwrap().is_empty() && driver.decisions == 0);
}

#[test]
fn what_the_protocol_does_not_allow_is_named() {
    let refused = |config, told| Driver::new(config).say(told).unwrap_err().to_string();
    let partial = config(BodySendMode::BufferedPartial, BodySendMode::None, false);
    let allowed = "NONE, STREAMED, BUFFERED and FULL_DUPLEX_STREAMED are allowed";
    assert_eq!(refused(partial, request_head(true)), format!("request_body_mode is 3; {allowed}"));
    let grpc = config(BodySendMode::None, BodySendMode::Grpc, false);
    assert_eq!(refused(grpc, request_head(true)), format!("response_body_mode is 5; {allowed}"));
    let early = Told::ResponseBody(body(Bytes::new(), true));
    assert_eq!(refused(None, early), "a part of an answer came where no head of one has come");
    let mut stream = Stream::new(MAX_BODY);
    assert_eq!(stream.on(ProcessingRequest::default()).unwrap_err(), Violation::Empty);
    let observed = ProcessingRequest { observability_mode: true, ..message(request_head(true)) };
    assert_eq!(stream.on(observed).unwrap_err(), Violation::Observed);
}

#[test]
fn an_answer_of_envoys_own_passes_before_the_request_is_here() {
    let mut driver = Driver::new(None);
    let mut heard = Heard::default();
    heard.hear(driver.say(request_head(false)).unwrap());
    heard.hear(driver.say(answer_head(false)).unwrap());
    heard.hear(driver.say(Told::ResponseBody(body("late".into(), true))).unwrap());
    assert_eq!((heard.kinds, driver.decisions), (vec!["answer head", "answer body"], 0));
    assert_eq!(heard.answer, b"late");
}

#[test]
fn what_the_picker_says_takes_the_place_of_what_clients_may_not_say() {
    let mut driver = Driver::new(None);
    driver.say(request_head(false)).unwrap();
    let said = driver.say(Told::RequestBody(body("four".into(), true))).unwrap();
    let Some(Said::RequestHeaders(head)) = &said[0].response else { panic!("{said:?}") };
    let mutation = head.response.as_ref().unwrap().header_mutation.as_ref().unwrap();
    let set = |option: &crate::ext_proc::api::HeaderValueOption| {
        let header = option.header.as_ref().unwrap();
        assert_eq!(option.append_action, 2, "in the place of what was said before");
        (header.key.clone(), String::from_utf8(header.raw_value.to_vec()).unwrap())
    };
    let set: Vec<(String, String)> = mutation.set_headers.iter().map(set).collect();
    let wanted = ("x-gateway-destination-endpoint".to_owned(), "10.0.0.1:1,10.0.0.2:2".to_owned());
    assert_eq!(set, [wanted]);
    let removed = ["x-prefiller-host-port", "x-kv-cache-source-host-port", "x-data-parallel-host-port"];
    assert_eq!(mutation.remove_headers[..3], removed);
    assert_eq!(mutation.remove_headers[3..], ["accept-encoding"]);
}
