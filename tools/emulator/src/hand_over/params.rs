//! The `kv_transfer_params` of requests and answers. This file knows their JSON.

use serde::{Deserialize, Serialize};

/// An engine's part in a hand-over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Another engine says the answer. Whoever asks may have chosen the key.
    Prefill { key: Option<String> },
    /// The prompt's KV is at another engine.
    Decode(Source),
}

/// Where a prompt's KV is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Host and port of the prefiller's API.
    pub address: String,
    pub key: String,
    /// Which KV fits.
    pub identity: Option<String>,
}

/// What a request says. Fields that are not used here may hold anything.
#[derive(Deserialize)]
pub struct RequestParams {
    do_remote_decode: Option<bool>,
    do_remote_prefill: Option<bool>,
    remote_host: Option<String>,
    remote_port: Option<u16>,
    remote_request_id: Option<String>,
    forebay: Option<RequestTicket>,
}

/// What is Forebay's own in it.
#[derive(Deserialize)]
struct RequestTicket {
    identity: Option<String>,
    keys: Option<[String; 1]>,
    direct: Option<RequestDirect>,
}

#[derive(Deserialize)]
struct RequestDirect {
    ranks: [(String, String); 1],
}

impl RequestParams {
    /// What the engine is to do; `None` where it is an ordinary request.
    pub fn role(self) -> Option<Role> {
        if self.do_remote_decode == Some(true) {
            let key = self.forebay.and_then(|ours| ours.keys).map(|[key]| key);
            return Some(Role::Prefill { key });
        }
        if self.do_remote_prefill != Some(true) {
            return None;
        }
        let (identity, direct) = self.forebay.map_or((None, None), |ours| (ours.identity, ours.direct));
        if let Some(RequestDirect { ranks: [(address, key)] }) = direct {
            return Some(Role::Decode(Source { address, key, identity }));
        }
        let address = format!("{}:{}", self.remote_host?, self.remote_port?);
        Some(Role::Decode(Source { address, key: self.remote_request_id?, identity }))
    }
}

/// What a prefiller answers: the fields of NixlConnector, and those of Forebay's connector.
#[derive(Clone, Debug, Serialize)]
pub struct PrefillParams {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_block_ids: [Vec<u32>; 1],
    remote_engine_id: String,
    remote_request_id: String,
    remote_host: String,
    remote_port: u16,
    tp_size: u32,
    remote_num_tokens: usize,
    forebay: Ticket,
}

#[derive(Clone, Debug, Serialize)]
struct Ticket {
    version: u32,
    identity: String,
    chunk_tokens: usize,
    tp: u32,
    block_tokens: usize,
    tokens: usize,
    direct: Direct,
}

#[derive(Clone, Debug, Serialize)]
struct Direct {
    host: String,
    device: &'static str,
    ranks: [(String, String); 1],
}

impl PrefillParams {
    /// Of a prompt of `tokens` tokens that is kept under the key and the request's id.
    pub fn new(
        address: std::net::SocketAddr,
        identity: &str,
        request_id: &str,
        key: &str,
        tokens: usize,
        block_tokens: usize,
    ) -> PrefillParams {
        let host = address.ip().to_string();
        PrefillParams {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: [Vec::new()],
            remote_engine_id: address.to_string(),
            remote_request_id: request_id.to_owned(),
            remote_host: host.clone(),
            remote_port: address.port(),
            tp_size: 1,
            remote_num_tokens: tokens,
            forebay: Ticket {
                version: 1,
                identity: identity.to_owned(),
                chunk_tokens: block_tokens,
                tp: 1,
                block_tokens,
                tokens,
                direct: Direct { host, device: "emulated", ranks: [(address.to_string(), key.to_owned())] },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn role(params: serde_json::Value) -> Option<Role> {
        serde_json::from_value::<RequestParams>(params).unwrap().role()
    }

    #[test]
    fn what_a_prefiller_answers_tells_a_decoder_where_its_blocks_are_with_and_without_our_part() {
        let address = ([127, 0, 0, 1], 8000).into();
        let answered = PrefillParams::new(address, "id", "cmpl-1", "key", 100, 16);
        let mut params = serde_json::to_value(answered).unwrap();
        let source = |key: &str, identity: Option<&str>| {
            let (address, identity) = ("127.0.0.1:8000".to_owned(), identity.map(str::to_owned));
            Some(Role::Decode(Source { address, key: key.to_owned(), identity }))
        };
        assert_eq!(role(params.clone()), source("key", Some("id")));
        params.as_object_mut().unwrap().remove("forebay");
        assert_eq!(role(params), source("cmpl-1", None));
    }

    #[test]
    fn a_prefill_has_the_key_that_was_chosen_and_other_requests_have_no_part() {
        let nulls = json!({"do_remote_decode": true, "remote_host": null, "remote_port": null});
        assert_eq!(role(nulls), Some(Role::Prefill { key: None }));
        let chosen = json!({"do_remote_decode": true, "forebay": {"keys": ["k"]}});
        assert_eq!(role(chosen), Some(Role::Prefill { key: Some("k".into()) }));
        assert_eq!(role(json!({})), None);
        assert_eq!(role(json!({"do_remote_prefill": true})), None, "nobody says where");
    }
}
