//! The messages of etcd's JSON gateway: requests as bodies, answers and events from bytes that are
//! not trusted.
//!
//! The gateway writes 64-bit numbers as strings, bytes as base64, and leaves out what is zero.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use thiserror::Error;

/// Bytes of an error's text that are kept.
const TEXT_CHARS_MAX: usize = 256;

/// A question that has one answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Grant {
        ttl_s: u32,
    },
    KeepAlive {
        lease: i64,
    },
    Revoke {
        lease: i64,
    },
    /// Keys from `from` up to `end`, as of a revision; 0 is the present one.
    List {
        from: Vec<u8>,
        end: Vec<u8>,
        revision: i64,
        limit: usize,
    },
    Write {
        changes: Vec<Change>,
    },
}

/// A change that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Put { key: Vec<u8>, value: Vec<u8>, lease: i64 },
    Delete { key: Vec<u8> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Response {
    Granted {
        lease: i64,
        ttl_s: i64,
    },
    /// The lease lives. `revision` is that of the whole of etcd.
    Alive {
        revision: i64,
    },
    Revoked,
    Listed {
        entries: Vec<Entry>,
        more: bool,
        revision: i64,
    },
    /// `replaced_leases` are those that the keys put had before.
    Written {
        replaced_leases: Vec<i64>,
    },
}

/// A key and what is under it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub(super) struct Entry {
    #[serde(deserialize_with = "bytes")]
    pub key: Vec<u8>,
    #[serde(deserialize_with = "bytes")]
    pub value: Vec<u8>,
    #[serde(deserialize_with = "number")]
    pub mod_revision: i64,
    #[serde(deserialize_with = "number")]
    pub lease: i64,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum Failure {
    /// Nobody answered in time, or an etcd that has no leader.
    #[error("no answer: {0}")]
    Unreachable(String),
    #[error("the lease is gone")]
    LeaseGone,
    #[error("the revision is compacted")]
    Compacted,
    #[error("refused: {0}")]
    Refused(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    Created,
    Events {
        events: Vec<Event>,
        /// More events of the same revision follow.
        is_fragment: bool,
    },
    /// Everything up to the revision has been said.
    Progress {
        revision: i64,
    },
    /// The revision asked for is compacted.
    Compacted,
    /// Nothing more comes.
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub entry: Entry,
    pub is_delete: bool,
}

impl Request {
    pub fn path(&self) -> &'static str {
        match self {
            Request::Grant { .. } => "/v3/lease/grant",
            Request::KeepAlive { .. } => "/v3/lease/keepalive",
            Request::Revoke { .. } => "/v3/lease/revoke",
            Request::List { .. } => "/v3/kv/range",
            Request::Write { .. } => "/v3/kv/txn",
        }
    }

    pub fn body(&self) -> String {
        let body = match self {
            Request::Grant { ttl_s } => json!({"TTL": ttl_s.to_string()}),
            Request::KeepAlive { lease } | Request::Revoke { lease } => json!({"ID": lease.to_string()}),
            Request::List { from, end, revision, limit } => json!({
                "key": STANDARD.encode(from),
                "range_end": STANDARD.encode(end),
                "revision": revision.to_string(),
                "limit": limit.to_string(),
            }),
            Request::Write { changes } => {
                json!({"success": changes.iter().map(Change::operation).collect::<Vec<_>>()})
            }
        };
        body.to_string()
    }

    pub fn answer(&self, status: u16, body: &[u8]) -> Result<Response, Failure> {
        if status != 200 {
            return Err(Failure::read(status, body));
        }
        match self {
            Request::Grant { .. } => {
                let Granted { lease, ttl_s } = parsed(body)?;
                let is_one = lease != 0 && ttl_s > 0;
                is_one.then_some(Response::Granted { lease, ttl_s }).ok_or_else(|| Failure::strange(body))
            }
            Request::KeepAlive { .. } => match parsed::<Streamed<Alive>>(body)?.result {
                Some(Alive { ttl_s: 1.., header }) => Ok(Response::Alive { revision: header.revision }),
                Some(_) => Err(Failure::LeaseGone),
                None => Err(Failure::read(status, body)),
            },
            Request::Revoke { .. } => Ok(Response::Revoked),
            Request::List { .. } => {
                let Listed { header, entries, more } = parsed(body)?;
                Ok(Response::Listed { entries, more, revision: header.revision })
            }
            Request::Write { .. } => {
                let Written { succeeded, responses } = parsed(body)?;
                let puts = responses.into_iter().filter_map(|response| response.put?.before);
                let replaced_leases = puts.map(|before| before.lease).filter(|&lease| lease != 0).collect();
                succeeded
                    .then_some(Response::Written { replaced_leases })
                    .ok_or_else(|| Failure::strange(body))
            }
        }
    }
}

impl Change {
    fn operation(&self) -> Value {
        match self {
            Change::Put { key, value, lease } => json!({"requestPut": {
                "key": STANDARD.encode(key),
                "value": STANDARD.encode(value),
                "lease": lease.to_string(),
                "prev_kv": true,
            }}),
            Change::Delete { key } => json!({"requestDeleteRange": {"key": STANDARD.encode(key)}}),
        }
    }
}

impl Failure {
    /// What an error means. Etcd's texts are the same in all versions of its API; the codes around
    /// them are not.
    fn read(status: u16, body: &[u8]) -> Failure {
        let text: String = String::from_utf8_lossy(body).chars().take(TEXT_CHARS_MAX).collect();
        if text.contains("requested lease not found") {
            Failure::LeaseGone
        } else if text.contains("required revision has been compacted") {
            Failure::Compacted
        } else if status >= 500 {
            Failure::Unreachable(text)
        } else {
            Failure::Refused(text)
        }
    }

    fn strange(body: &[u8]) -> Failure {
        Failure::Refused(String::from_utf8_lossy(body).chars().take(TEXT_CHARS_MAX).collect())
    }
}

/// The body that opens a watch on the keys from `from` up to `end`, beginning with a revision.
pub(super) fn watch_body(from: &[u8], end: &[u8], revision: i64) -> String {
    let create = json!({
        "key": STANDARD.encode(from),
        "range_end": STANDARD.encode(end),
        "start_revision": revision.to_string(),
        "progress_notify": true,
        "fragment": true,
    });
    json!({ "create_request": create }).to_string()
}

impl Message {
    /// Reads one line of a watch. What cannot be understood ends it: a change may have been missed.
    pub fn read(line: &[u8]) -> Message {
        let Ok(Streamed { result: Some(watched) }) = serde_json::from_slice::<Streamed<Watched>>(line) else {
            return Message::Ended;
        };
        if watched.canceled {
            return if watched.compact_revision > 0 { Message::Compacted } else { Message::Ended };
        }
        if watched.created {
            return Message::Created;
        }
        if watched.events.is_empty() {
            return Message::Progress { revision: watched.header.revision };
        }
        let events = watched.events.into_iter();
        let events = events.map(|event| Event { entry: event.kv, is_delete: event.kind == "DELETE" });
        Message::Events { events: events.collect(), is_fragment: watched.fragment }
    }
}

fn parsed<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|_| Failure::strange(body))
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Header {
    #[serde(deserialize_with = "number")]
    revision: i64,
}

#[derive(Deserialize)]
struct Streamed<T> {
    result: Option<T>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Granted {
    #[serde(rename = "ID", deserialize_with = "number")]
    lease: i64,
    #[serde(rename = "TTL", deserialize_with = "number")]
    ttl_s: i64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Alive {
    header: Header,
    #[serde(rename = "TTL", deserialize_with = "number")]
    ttl_s: i64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Listed {
    header: Header,
    #[serde(rename = "kvs")]
    entries: Vec<Entry>,
    more: bool,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Written {
    succeeded: bool,
    responses: Vec<WrittenOne>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WrittenOne {
    #[serde(rename = "response_put")]
    put: Option<Put>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Put {
    #[serde(rename = "prev_kv")]
    before: Option<Entry>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Watched {
    header: Header,
    created: bool,
    canceled: bool,
    #[serde(deserialize_with = "number")]
    compact_revision: i64,
    fragment: bool,
    events: Vec<WatchedEvent>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WatchedEvent {
    #[serde(rename = "type")]
    kind: String,
    kv: Entry,
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written<'a> {
        Number(i64),
        #[serde(borrow)]
        Digits(std::borrow::Cow<'a, str>),
    }
    match Written::deserialize(deserializer)? {
        Written::Number(number) => Ok(number),
        Written::Digits(digits) => digits.parse().map_err(serde::de::Error::custom),
    }
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
    STANDARD.decode(text.as_bytes()).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn answers_are_read_as_etcd_writes_them() {
        let grant = Request::Grant { ttl_s: 5 };
        let body = br#"{"header":{"cluster_id":"1","revision":"9"},"ID":"7587","TTL":"5"}"#;
        assert_eq!(grant.answer(200, body), Ok(Response::Granted { lease: 7587, ttl_s: 5 }));
        assert!(matches!(grant.answer(200, b"{}"), Err(Failure::Refused(_))));

        let renew = Request::KeepAlive { lease: 7 };
        let body = br#"{"result":{"header":{"revision":"12"},"ID":"7","TTL":"5"}}"#;
        assert_eq!(renew.answer(200, body), Ok(Response::Alive { revision: 12 }));
        let gone = br#"{"result":{"header":{"revision":"12"},"ID":"7"}}"#;
        assert_eq!(renew.answer(200, gone), Err(Failure::LeaseGone));

        let write = Request::Write { changes: Vec::new() };
        let body = br#"{"header":{},"succeeded":true,"responses":[{"response_put":{"header":{},
            "prev_kv":{"key":"YQ==","create_revision":"2","mod_revision":"2","version":"1","lease":"33"}}}]}"#;
        assert_eq!(write.answer(200, body), Ok(Response::Written { replaced_leases: vec![33] }));
        let body = br#"{"error":"etcdserver: requested lease not found","code":5}"#;
        assert_eq!(write.answer(404, body), Err(Failure::LeaseGone));
        assert!(matches!(write.answer(503, b"no leader"), Err(Failure::Unreachable(_))));
    }

    #[test]
    fn events_are_read_as_etcd_writes_them() {
        let line = br#"{"result":{"header":{"revision":"4"},"events":[
            {"kv":{"key":"YQ==","create_revision":"4","mod_revision":"4","version":"1","value":"Yg=="}},
            {"type":"DELETE","kv":{"key":"Yw==","mod_revision":"4"}}]}}"#;
        let put = Entry { key: b"a".to_vec(), value: b"b".to_vec(), mod_revision: 4, ..Entry::default() };
        let deleted = Entry { key: b"c".to_vec(), mod_revision: 4, ..Entry::default() };
        let events = vec![Event { entry: put, is_delete: false }, Event { entry: deleted, is_delete: true }];
        assert_eq!(Message::read(line), Message::Events { events, is_fragment: false });
        let line = br#"{"result":{"header":{},"canceled":true,"compact_revision":"8"}}"#;
        assert_eq!(Message::read(line), Message::Compacted);
        assert_eq!(Message::read(br#"{"error":{"grpc_code":14}}"#), Message::Ended);
        assert_eq!(Message::read(br#"{"result":{"created":true}}"#), Message::Created);
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_answer_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), status: u16) {
            let _ = Message::read(&bytes);
            let _ = Request::Grant { ttl_s: 1 }.answer(status, &bytes);
            let _ = Request::KeepAlive { lease: 1 }.answer(200, &bytes);
        }
    }
}
