//! What Envoy is told, as messages: where a request goes, what passes on unchanged, and answers
//! that no engine gives. It knows names of headers and metadata, which are those of the endpoint
//! picker protocol and of llm-d.

use super::api::*;
use crate::request_trace::TRACEPARENT;
use bytes::Bytes;
use http::{HeaderName, HeaderValue as HttpHeaderValue, Response, header};
use prost_types::value::Kind;
use prost_types::{Struct, Value};

/// Header and metadata with the engines to ask, in order.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
const DESTINATION_NAMESPACE: &str = "envoy.lb";
/// Metadata with the engine that was asked in the end, in the same namespace.
const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Metadata with the engines that may be chosen.
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// The engine that computes the prompt. llm-d's sidecar beside the chosen engine asks it.
pub const PREFILLER: &str = "x-prefiller-host-port";
/// Headers that say where KV or a prompt is. A client may not say it.
const NOT_OF_CLIENTS: [&str; 3] = [PREFILLER, "x-kv-cache-source-host-port", "x-data-parallel-host-port"];

/// Envoy recommends that a piece of a body has at most 64 KiB.
const PIECE_BYTES: usize = 60 * 1024;

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// The chosen engine, and the one that is asked if that one fails: `IP:PORT` and `,`.
    pub endpoints: String,
    /// The engine that computes the prompt, if that is another one.
    pub prefiller: Option<String>,
    /// What engines are told of their trace, if that is not what the client says.
    pub traceparent: Option<HttpHeaderValue>,
}

/// Headers that are set, with their values.
pub type Set = Vec<(HeaderName, Bytes)>;

/// The request's head passes on, to its destination if that is known already.
pub fn request_headers(destination: Option<&Destination>) -> ProcessingResponse {
    let (response, dynamic_metadata) = passing(destination);
    let said = Said::RequestHeaders(HeadersResponse { response: Some(response) });
    ProcessingResponse { response: Some(said), dynamic_metadata }
}

/// The body that Envoy holds passes on, to its destination if that is known only now.
pub fn request_body(destination: Option<&Destination>) -> ProcessingResponse {
    let (response, dynamic_metadata) = passing(destination);
    let said = Said::RequestBody(BodyResponse { response: Some(response) });
    ProcessingResponse { response: Some(said), dynamic_metadata }
}

/// The request's trailers pass on.
pub fn request_trailers(destination: Option<&Destination>) -> ProcessingResponse {
    let dynamic_metadata = destination.map(metadata);
    ProcessingResponse { response: Some(Said::RequestTrailers(TrailersResponse {})), dynamic_metadata }
}

fn passing(destination: Option<&Destination>) -> (CommonResponse, Option<Struct>) {
    let Some(destination) = destination else { return (CommonResponse::default(), None) };
    let mut set = vec![set_header(DESTINATION, destination.endpoints.clone().into())];
    set.extend(destination.prefiller.as_ref().map(|at| set_header(PREFILLER, at.clone().into())));
    let traceparent = destination.traceparent.as_ref().map(|value| Bytes::copy_from_slice(value.as_bytes()));
    set.extend(traceparent.map(|value| set_header(TRACEPARENT.as_str(), value)));
    let is_set = |name: &str| name == PREFILLER && destination.prefiller.is_some();
    let removed = NOT_OF_CLIENTS.into_iter().filter(|name| !is_set(name));
    // Usage is read in plain answers.
    let removed = removed.chain([header::ACCEPT_ENCODING.as_str()]);
    let mutation = HeaderMutation { set_headers: set, remove_headers: removed.map(str::to_owned).collect() };
    let common =
        CommonResponse { header_mutation: Some(mutation), body_mutation: None, clear_route_cache: true };
    (common, Some(metadata(destination)))
}

fn metadata(destination: &Destination) -> Struct {
    let of = |key: &str, kind| Struct { fields: [(key.to_owned(), Value { kind: Some(kind) })].into() };
    let endpoints = of(DESTINATION, Kind::StringValue(destination.endpoints.clone()));
    of(DESTINATION_NAMESPACE, Kind::StructValue(endpoints))
}

/// The whole of a body that is streamed, in pieces. `is_end`: no trailers follow.
pub fn request_pieces(body: Bytes, is_end: bool) -> impl Iterator<Item = ProcessingResponse> {
    pieces(body, is_end, Said::RequestBody)
}

/// A part of an answer that is streamed, in pieces; `is_end`: it was the last one.
pub fn answer_pieces(bytes: Bytes, is_end: bool) -> impl Iterator<Item = ProcessingResponse> {
    pieces(bytes, is_end, Said::ResponseBody)
}

/// One piece at least where it is the end; else none of nothing.
fn pieces(
    mut bytes: Bytes,
    is_end: bool,
    said: fn(BodyResponse) -> Said,
) -> impl Iterator<Item = ProcessingResponse> {
    let mut is_over = bytes.is_empty() && !is_end;
    std::iter::from_fn(move || {
        if is_over {
            return None;
        }
        let body = bytes.split_to(bytes.len().min(PIECE_BYTES));
        is_over = bytes.is_empty();
        let streamed = StreamedBodyResponse { body, end_of_stream: is_end && is_over };
        let mutation = BodyMutation { streamed_response: Some(streamed) };
        let common = CommonResponse { body_mutation: Some(mutation), ..CommonResponse::default() };
        Some(of(said(BodyResponse { response: Some(common) })))
    })
}

/// The answer's head passes on, with these headers.
pub fn answer_headers(set: Set) -> ProcessingResponse {
    let mutation = HeaderMutation { set_headers: set_headers(set), remove_headers: Vec::new() };
    let common = CommonResponse { header_mutation: Some(mutation), ..CommonResponse::default() };
    of(Said::ResponseHeaders(HeadersResponse { response: Some(common) }))
}

/// The part of an answer that Envoy holds passes on as it is.
pub fn answer_body() -> ProcessingResponse {
    of(Said::ResponseBody(BodyResponse { response: Some(CommonResponse::default()) }))
}

pub fn answer_trailers() -> ProcessingResponse {
    of(Said::ResponseTrailers(TrailersResponse {}))
}

/// This is the answer, and no engine is asked.
pub fn immediate(answer: Response<Bytes>) -> ProcessingResponse {
    let (head, body) = answer.into_parts();
    let set = head
        .headers
        .iter()
        .map(|(name, value)| set_header(name.as_str(), Bytes::copy_from_slice(value.as_bytes())));
    of(Said::Immediate(ImmediateResponse {
        status: Some(HttpStatus { code: head.status.as_u16().into() }),
        headers: Some(HeaderMutation { set_headers: set.collect(), remove_headers: Vec::new() }),
        body,
        details: "forebay_epp".to_owned(),
    }))
}

fn of(said: Said) -> ProcessingResponse {
    ProcessingResponse { response: Some(said), dynamic_metadata: None }
}

fn set_headers(set: Set) -> Vec<HeaderValueOption> {
    set.into_iter().map(|(name, value)| set_header(name.as_str(), value)).collect()
}

/// In the place of what the client or the engine may have said.
fn set_header(name: &str, value: Bytes) -> HeaderValueOption {
    let header = HeaderValue { key: name.to_owned(), value: String::new(), raw_value: value };
    HeaderValueOption {
        header: Some(header),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
    }
}

impl Metadata {
    /// The engine that served a request, as Envoy says it with the answer.
    pub fn served(&self) -> Option<&str> {
        match self.get(DESTINATION_NAMESPACE, SERVED)? {
            Kind::StringValue(served) if !served.is_empty() => Some(served),
            _ => None,
        }
    }

    /// The engines that may be chosen, if Envoy says it: a text with commas, or a list of texts.
    pub fn subset(&self) -> Option<Vec<String>> {
        let parts = |text: &str| text.split(',').map(|part| part.trim().to_owned()).collect::<Vec<_>>();
        let subset: Vec<String> = match self.get(SUBSET_NAMESPACE, SUBSET)? {
            Kind::StringValue(text) => parts(text),
            Kind::ListValue(list) => {
                let texts = list.values.iter().filter_map(|value| match &value.kind {
                    Some(Kind::StringValue(text)) => Some(parts(text)),
                    _ => None,
                });
                texts.flatten().collect()
            }
            // It is a hint that nobody meets.
            _ => Vec::new(),
        };
        Some(subset.into_iter().filter(|part| !part.is_empty()).collect())
    }

    fn get(&self, namespace: &str, key: &str) -> Option<&Kind> {
        self.filter_metadata.get(namespace)?.fields.get(key)?.kind.as_ref()
    }
}
