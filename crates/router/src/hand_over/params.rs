//! What is said in a hand-over: `kv_transfer_params`, and the bodies of the requests to the two
//! engines. It knows JSON as bytes, and copies what it does not change. `docs/pd.md` has the
//! protocol of Forebay's connector.

use crate::json;
use crate::kv_hints;
use crate::request::PARAMS;
use crate::rewrite::with_fields;
use crate::usage::{self, Usage};
use bytes::Bytes;
use serde_json::{Map, Value, json};
use std::io;
use std::str::FromStr;
use std::time::Duration;

/// What engines know of hand-overs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Forebay's connector: both engines may be asked at once.
    Forebay,
    /// vLLM's NixlConnector.
    Nixl,
}

/// The text names no protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("hand-over: '{0}' is none of forebay, nixl")]
pub struct UnknownProtocol(String);

impl FromStr for Protocol {
    type Err = UnknownProtocol;

    fn from_str(text: &str) -> Result<Protocol, UnknownProtocol> {
        match text {
            "forebay" => Ok(Protocol::Forebay),
            "nixl" => Ok(Protocol::Nixl),
            other => Err(UnknownProtocol(other.to_owned())),
        }
    }
}

impl Protocol {
    /// How long a prefiller keeps blocks that nobody reads.
    pub fn lease(self) -> Duration {
        match self {
            Protocol::Forebay => Duration::from_secs(30),
            // `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` where it is not set.
            Protocol::Nixl => Duration::from_secs(480),
        }
    }
}

/// Fields of a request that a prefill has otherwise or not at all: it says one token, to nobody.
const NOT_OF_PREFILL: [&str; 13] = [
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "prompt_logprobs",
    "use_beam_search",
    PARAMS,
];

const OURS: &str = "forebay";

/// The `forebay` object of an engine's last answer to a prefill.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ticket(Map<String, Value>);

/// What a prefiller's answer says.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefillAnswer {
    /// The value of `kv_transfer_params`, for the decoder.
    pub params: Bytes,
    pub ticket: Option<Ticket>,
    pub usage: Option<Usage>,
}

/// Reads a prefiller's answer; `None` if it does not say where the KV is.
pub fn read_answer(body: &[u8]) -> Option<PrefillAnswer> {
    let fields = json::fields(body).map_while(Result::ok);
    let (_, params) = fields.filter(|(key, _)| key == PARAMS).last()?;
    let params = &body[params.at];
    let Value::Object(mut tree) = serde_json::from_slice(params).ok()? else { return None };
    if tree.get("do_remote_prefill") != Some(&Value::Bool(true)) {
        return None;
    }
    let ticket = match tree.remove(OURS) {
        Some(Value::Object(ours)) => Some(Ticket(ours)),
        _ => None,
    };
    let usage = usage::read(body).and_then(|report| report.usage);
    Some(PrefillAnswer { params: Bytes::copy_from_slice(params), ticket, usage })
}

/// What both engines are told when they are asked at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AtOnce {
    /// The values of `kv_transfer_params`.
    pub prefill: String,
    pub decode: String,
}

impl Ticket {
    /// The parameters of a hand-over under fresh keys. `None` if the prefiller's answer was not as
    /// its protocol has it.
    pub fn at_once(&self, draw: impl Fn() -> io::Result<String>) -> Option<AtOnce> {
        let mut ours = self.0.clone();
        ours.remove("tokens");
        ours.insert("at_once".into(), true.into());
        let mut keys = Vec::new();
        if let Some(direct) = ours.get_mut("direct") {
            for rank in direct.get_mut("ranks")?.as_array_mut()? {
                let key = draw().ok()?;
                *rank.as_array_mut().filter(|rank| rank.len() == 2)?.get_mut(1)? = key.clone().into();
                keys.push(key);
            }
        }
        let mut prefill = prefill_params();
        if !keys.is_empty() {
            prefill[OURS] = json!({ "keys": keys });
        }
        let decode = json!({ "do_remote_prefill": true, "do_remote_decode": false, OURS: ours });
        Some(AtOnce { prefill: prefill.to_string(), decode: decode.to_string() })
    }
}

/// What a prefiller is told: the fields that NixlConnector looks for.
pub fn prefill_params() -> Value {
    json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    })
}

/// 32 hexadecimal digits that nobody can guess.
pub fn draw_key() -> io::Result<String> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if filled < bytes.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// The body of the request to the prefiller: the same prompt, and one token that nobody reads.
pub fn prefill_body(body: &[u8], params: &str) -> Option<Bytes> {
    let params = kv_hints::handed_on(body, params);
    let limits = r#""stream":false,"max_tokens":1,"max_completion_tokens":1"#;
    with_fields(body, &format!("{limits},\"{PARAMS}\":{params}"), &NOT_OF_PREFILL).ok()
}

/// The body of the request to the decoder: what the client asked.
pub fn decode_body(body: &[u8], params: &[u8]) -> Option<Bytes> {
    let params = kv_hints::handed_on(body, std::str::from_utf8(params).ok()?);
    with_fields(body, &format!("\"{PARAMS}\":{params}"), &[PARAMS]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tree(bytes: &[u8]) -> Value {
        serde_json::from_slice(bytes).unwrap()
    }

    #[test]
    fn a_prefill_is_the_same_prompt_with_one_token_that_is_not_streamed() {
        let body = br#"{"model":"m","prompt":[1, 2],"max_tokens":90,"min_tokens":5,"n":1,"stream":true,
            "stream_options":{"include_usage":true},"logprobs":3,"cache_salt":"s","kv_transfer_params":null}"#;
        let params = prefill_params();
        let prefill = tree(&prefill_body(body, &params.to_string()).unwrap());
        let wanted = json!({"model": "m", "prompt": [1, 2], "max_tokens": 1, "max_completion_tokens": 1,
            "stream": false, "cache_salt": "s", "kv_transfer_params": params});
        assert_eq!(prefill, wanted);
    }

    #[test]
    fn both_are_told_the_same_fresh_keys_and_the_decoder_where_they_hold() {
        let answer = json!({"choices": [], "kv_transfer_params": {"do_remote_prefill": true, "remote_port": 0,
            "forebay": {"version": 1, "tokens": 9, "tp": 2,
                "direct": {"host": "h", "ranks": [["m0", "old"], ["m1", "old"]]}}}});
        let read = read_answer(answer.to_string().as_bytes()).unwrap();
        assert_eq!(tree(&read.params), answer["kv_transfer_params"]);
        let AtOnce { prefill, decode } = read.ticket.unwrap().at_once(draw_key).unwrap();
        let (prefill, decode) = (tree(prefill.as_bytes()), tree(decode.as_bytes()));
        let keys = prefill["forebay"]["keys"].as_array().unwrap();
        assert!(keys.iter().all(|key| key.as_str().unwrap().len() == 32) && keys[0] != keys[1]);
        assert_eq!(decode["forebay"]["direct"]["ranks"], json!([["m0", keys[0]], ["m1", keys[1]]]));
        assert_eq!(decode["forebay"]["at_once"], true);
        assert_eq!(
            (&decode["forebay"]["tokens"], &decode["do_remote_prefill"]),
            (&Value::Null, &json!(true))
        );
        assert_eq!(prefill["do_remote_decode"], true);
    }

    #[test]
    fn without_a_direct_way_there_are_no_keys() {
        let ticket = Ticket(Map::from_iter([("version".to_owned(), json!(1))]));
        let said = ticket.at_once(draw_key).unwrap();
        assert!(tree(said.prefill.as_bytes()).get("forebay").is_none() && said.decode.contains("at_once"));
    }

    #[test]
    fn an_answer_that_does_not_say_where_the_kv_is_is_no_hand_over() {
        for answer in [
            r#"{"choices":[]}"#,
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":{"do_remote_prefill":false}}"#,
            r#"{"kv_transfer_params":[1]}"#,
            "no JSON",
            "",
        ] {
            assert_eq!(read_answer(answer.as_bytes()), None, "{answer}");
        }
        let odd = r#"{"kv_transfer_params":{"do_remote_prefill":true,"forebay":{"direct":{"ranks":[[1]]}}}}"#;
        assert_eq!(read_answer(odd.as_bytes()).unwrap().ticket.unwrap().at_once(draw_key), None);
    }

    proptest! {
        #[test]
        fn all_other_fields_of_a_request_are_what_they_were(
            object in prop::collection::btree_map(".{0,5}", crate::json::tests::any_json(), 0..6),
        ) {
            let tree: Map<String, Value> = object.into_iter().collect();
            let body = serde_json::to_vec(&tree).unwrap();
            let decode: Map<String, Value> =
                serde_json::from_slice(&decode_body(&body, b"{\"a\":1}").unwrap()).unwrap();
            let mut wanted = tree.clone();
            wanted.insert(PARAMS.into(), json!({"a": 1}));
            prop_assert_eq!(decode, wanted);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = read_answer(&bytes);
            let _ = prefill_body(&bytes, "{}");
            let _ = read_answer(&[b"{\"kv_transfer_params\":", &bytes[..], b"}"].concat());
        }
    }
}
