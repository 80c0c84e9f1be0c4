//! The messages of Envoy's `envoy.service.ext_proc.v3`, as far as they are read or written here:
//! fields that nobody here knows are skipped. Names and numbers are Envoy's. Decision 033 says why
//! they are written down here.

use bytes::Bytes;
use prost::{Enumeration, Message, Oneof};
use prost_types::Struct;
use std::collections::HashMap;

/// The path of the one method.
pub const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
/// The service, as health checks name it.
pub const SERVICE: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

/// What Envoy says.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingRequest {
    #[prost(oneof = "Told", tags = "2, 3, 4, 5, 6, 7")]
    pub request: Option<Told>,
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// Nothing may be answered.
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// In the first message only.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Told {
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct ProtocolConfiguration {
    #[prost(enumeration = "BodySendMode", tag = "1")]
    pub request_body_mode: i32,
    #[prost(enumeration = "BodySendMode", tag = "2")]
    pub response_body_mode: i32,
    #[prost(bool, tag = "3")]
    pub send_body_without_waiting_for_header_response: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum BodySendMode {
    None = 0,
    Streamed = 1,
    Buffered = 2,
    BufferedPartial = 3,
    FullDuplexStreamed = 4,
    Grpc = 5,
}

#[derive(Clone, PartialEq, Message)]
pub struct HttpHeaders {
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct HttpBody {
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct HttpTrailers {}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderMap {
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

/// The value is in one of the two.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

/// What filters know of a request, by their namespaces.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    #[prost(map = "string, message", tag = "1")]
    pub filter_metadata: HashMap<String, Struct>,
}

/// What Envoy is told.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingResponse {
    #[prost(oneof = "Said", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub response: Option<Said>,
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Said {
    #[prost(message, tag = "1")]
    RequestHeaders(HeadersResponse),
    #[prost(message, tag = "2")]
    ResponseHeaders(HeadersResponse),
    #[prost(message, tag = "3")]
    RequestBody(BodyResponse),
    #[prost(message, tag = "4")]
    ResponseBody(BodyResponse),
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersResponse),
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersResponse),
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

#[derive(Clone, PartialEq, Message)]
pub struct HeadersResponse {
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub struct BodyResponse {
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct TrailersResponse {}

/// Its status is left at 0: continue.
#[derive(Clone, PartialEq, Message)]
pub struct CommonResponse {
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
    /// The route is looked for again, by the new headers.
    #[prost(bool, tag = "5")]
    pub clear_route_cache: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderMutation {
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
    #[prost(string, repeated, tag = "2")]
    pub remove_headers: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    #[prost(enumeration = "HeaderAppendAction", tag = "3")]
    pub append_action: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum HeaderAppendAction {
    AppendIfExistsOrAdd = 0,
    OverwriteIfExistsOrAdd = 2,
}

#[derive(Clone, PartialEq, Message)]
pub struct BodyMutation {
    #[prost(message, optional, tag = "3")]
    pub streamed_response: Option<StreamedBodyResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StreamedBodyResponse {
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// An answer that no engine gives.
#[derive(Clone, PartialEq, Message)]
pub struct ImmediateResponse {
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// For Envoy's access log.
    #[prost(string, tag = "5")]
    pub details: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub code: i32,
}
