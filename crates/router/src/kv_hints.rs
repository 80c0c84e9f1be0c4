//! Hints about what is to become of a request's KV (`docs/hints.md`). The router makes them of
//! headers, which whoever stands before it sets, and takes out those that clients put into bodies.
//! Pure.

use crate::json::{self, Kind, SyntaxError, Value};
use crate::request::{Endpoint, HINT, PARAMS};
use crate::rewrite::with_fields;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use serde_json::json;
use std::borrow::Cow;

const TENANT: &str = "x-kv-tenant";
const SHARE: &str = "x-kv-share-tokens";
const PIN: &str = "x-kv-pin-ms";
const BACK: &str = "x-kv-back-in-ms";

/// Hints that cannot be made, or a body that they cannot be put into or taken out of.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadHint {
    #[error("{header}: '{value}'; {allowed} is allowed, once")]
    Header { header: &'static str, value: String, allowed: &'static str },
    #[error("{header}: hints are possible on /v1/completions, /v1/chat/completions and /v1/messages")]
    Endpoint { header: &'static str },
    #[error("the body is not a JSON object: {0}")]
    Body(#[from] SyntaxError),
    #[error("{PARAMS}: expected an object or null")]
    Params,
}

impl BadHint {
    /// The header or field at fault.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            BadHint::Header { header, .. } | BadHint::Endpoint { header } => Some(header),
            BadHint::Body(_) => None,
            BadHint::Params => Some(PARAMS),
        }
    }
}

/// A body with other hints than it came with.
#[derive(Debug, PartialEq, Eq)]
pub struct Replaced {
    pub body: Bytes,
    /// It had hints of its client's.
    pub had_hints: bool,
}

/// A body with the hints of its headers, and without any of its client's. `None`: it stays as it
/// is. Whatever an engine could read in another way than this does is refused, since a hint may be
/// in it.
pub fn replaced(
    endpoint: Option<Endpoint>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Option<Replaced>, BadHint> {
    let actions = actions(headers)?;
    if let Some((header, _)) = actions.first()
        && !matches!(endpoint, Some(Endpoint::Completions | Endpoint::ChatCompletions | Endpoint::Messages))
    {
        return Err(BadHint::Endpoint { header });
    }
    let media_type = headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    if body.is_empty() || (endpoint.is_none() && media_type.starts_with(b"multipart/")) {
        return Ok(None);
    }
    let params = last(body, PARAMS)?;
    let of_client: Vec<(Cow<str>, Value)> = match params.as_ref().map(|params| params.kind) {
        None | Some(Kind::Null) => Vec::new(),
        Some(Kind::Object) => json::fields(text_of(body, params.as_ref())).collect::<Result<_, _>>()?,
        Some(_) => return Err(BadHint::Params),
    };
    let had_hints = of_client.iter().any(|(key, _)| key == HINT);
    if !had_hints && actions.is_empty() {
        return Ok(None);
    }
    let field = |(key, value): &(Cow<str>, Value)| {
        let value = &text_of(body, params.as_ref())[value.at.clone()];
        format!("{}:{}", json!(key), String::from_utf8_lossy(value))
    };
    let mut fields: Vec<String> = of_client.iter().filter(|(key, _)| key != HINT).map(field).collect();
    if !actions.is_empty() {
        let actions: Vec<_> = actions.iter().map(|(_, action)| action).collect();
        let hint = json!({ "protocol_version": "0.1", "message_id": "router", "actions": actions });
        fields.push(format!("\"{HINT}\":{hint}"));
    }
    let more =
        if fields.is_empty() { String::new() } else { format!("\"{PARAMS}\":{{{}}}", fields.join(",")) };
    Ok(Some(Replaced { body: with_fields(body, &more, &[PARAMS])?, had_hints }))
}

/// The parameters of a hand-over with the hints of the request's body: they are for both engines.
pub fn handed_on(body: &[u8], params: &str) -> String {
    let of_client = last(body, PARAMS).ok().flatten().filter(|all| all.kind == Kind::Object);
    let of_client = text_of(body, of_client.as_ref());
    match (last(of_client, HINT), params.strip_prefix('{')) {
        (Ok(Some(hint)), Some(rest)) => {
            let comma = if rest.starts_with('}') { "" } else { "," };
            let hint = String::from_utf8_lossy(&of_client[hint.at]);
            format!("{{\"{HINT}\":{hint}{comma}{rest}")
        }
        _ => params.to_owned(),
    }
}

/// The value of a field of an object; of a repeated one the last, as JSON readers have it.
fn last(object: &[u8], name: &str) -> Result<Option<Value>, SyntaxError> {
    let mut found = None;
    for field in json::fields(object) {
        let (key, value) = field?;
        if key == name {
            found = Some(value);
        }
    }
    Ok(found)
}

/// The bytes of a value; an object without fields where there is none.
fn text_of<'a>(bytes: &'a [u8], value: Option<&Value>) -> &'a [u8] {
    value.map_or(b"{}", |value| &bytes[value.at.clone()])
}

/// What the headers say, each as an action.
fn actions(headers: &HeaderMap) -> Result<Vec<(&'static str, serde_json::Value)>, BadHint> {
    let action = |header, kind: &str, payload: serde_json::Value| {
        let said =
            json!({ "action_id": header, "action_type": kind, "action_version": "1.0", "payload": payload });
        (header, said)
    };
    let mut found = Vec::new();
    if let Some(tenant) = only(headers, TENANT, "a name")? {
        found.push(action(TENANT, "kv.tenant", json!({ "tenant": tenant })));
    }
    if let Some(tokens) = number(headers, SHARE, "a whole number of tokens")? {
        found.push(action(SHARE, "kv.share", json!({ "tokens": [0, tokens] })));
    }
    if let Some(ttl_ms) = number(headers, PIN, "a whole number of milliseconds")? {
        found.push(action(PIN, "kv.pin", json!({ "ttl_ms": ttl_ms })));
    }
    if let Some(back_in_ms) = number(headers, BACK, "a whole number of milliseconds")? {
        found.push(action(BACK, "kv.prefetch", json!({ "back_in_ms": back_in_ms })));
    }
    Ok(found)
}

fn only(headers: &HeaderMap, header: &'static str, allowed: &'static str) -> Result<Option<String>, BadHint> {
    let mut values = headers.get_all(header).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let shown = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let text = value.to_str().ok().map(str::trim).filter(|text| !text.is_empty());
    match (text, values.next()) {
        (Some(text), None) => Ok(Some(text.to_owned())),
        _ => Err(BadHint::Header { header, value: shown(value), allowed }),
    }
}

fn number(headers: &HeaderMap, header: &'static str, allowed: &'static str) -> Result<Option<u32>, BadHint> {
    let Some(text) = only(headers, header, allowed)? else { return Ok(None) };
    text.parse().map(Some).map_err(|_| BadHint::Header { header, value: text, allowed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value as Tree;

    const CHAT: Option<Endpoint> = Some(Endpoint::ChatCompletions);

    fn headers(all: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in all {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn made(all: &[(&'static str, &'static str)], body: &str) -> Option<Tree> {
        let Replaced { body, had_hints } = replaced(CHAT, &headers(all), body.as_bytes()).unwrap()?;
        assert!(had_hints || !all.is_empty());
        Some(serde_json::from_slice(&body).unwrap())
    }

    #[test]
    fn a_body_without_hints_is_not_written_anew() {
        for body in [
            r#"{"messages":[]}"#,
            r#"{"a":1,"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":{"x":1}}"#,
        ] {
            assert_eq!(made(&[], body), None);
        }
    }

    #[test]
    fn what_a_client_hints_is_taken_out_however_it_is_written() {
        for hint in [r#""kv_hint""#, r#""kv\u005fhint""#, r#""\u006bv_hint""#] {
            for params in ["\"kv_transfer_params\"", "\"kv_transfer\\u005fparams\""] {
                let body =
                    format!(r#"{{"a":1,{params}:{{"x":[2],{hint}:{{"actions":[]}},{hint}:3}},"b":2}}"#);
                assert_eq!(made(&[], &body), Some(json!({"a": 1, "b": 2, "kv_transfer_params": {"x": [2]}})));
                let twice = format!(r#"{{{params}:{{{hint}:1}},{params}:null,"b":2}}"#);
                let found = made(&[], &twice).unwrap_or(json!({"b": 2, "kv_transfer_params": null}));
                assert_eq!(found["kv_transfer_params"], Tree::Null);
                let both = format!(r#"{{{params}:{{"x":1,{hint}:1}},{params}:{{"y":2,{hint}:3}}}}"#);
                assert_eq!(
                    made(&[], &both),
                    Some(json!({"kv_transfer_params": {"y": 2}})),
                    "the last counts"
                );
            }
        }
    }

    #[test]
    fn headers_become_actions_beside_what_the_client_says() {
        let all = [
            ("x-kv-tenant", "acme"),
            ("x-kv-back-in-ms", "9000"),
            ("x-kv-pin-ms", "5"),
            ("x-kv-share-tokens", "64"),
        ];
        let body = made(&all, r#"{"a":1,"kv_transfer_params":{"kv_hint":{"actions":[7]},"x":2}}"#).unwrap();
        let params = &body["kv_transfer_params"];
        assert_eq!((&body["a"], &params["x"]), (&json!(1), &json!(2)));
        let said = |action: &Tree| (action["action_type"].clone(), action["payload"].clone());
        let actions: Vec<_> = params["kv_hint"]["actions"].as_array().unwrap().iter().map(said).collect();
        assert_eq!(
            actions,
            [
                (json!("kv.tenant"), json!({"tenant": "acme"})),
                (json!("kv.share"), json!({"tokens": [0, 64]})),
                (json!("kv.pin"), json!({"ttl_ms": 5})),
                (json!("kv.prefetch"), json!({"back_in_ms": 9000})),
            ]
        );
    }

    #[test]
    fn what_cannot_be_hinted_is_refused_with_what_is_allowed() {
        let refused = |endpoint, all: &[(&'static str, &'static str)], body: &str| {
            replaced(endpoint, &headers(all), body.as_bytes()).unwrap_err().to_string()
        };
        let twice = [("x-kv-tenant", "a"), ("x-kv-tenant", "b")];
        assert_eq!(refused(CHAT, &twice, "{}"), "x-kv-tenant: 'a'; a name is allowed, once");
        assert!(
            refused(CHAT, &[("x-kv-pin-ms", "-1")], "{}").starts_with("x-kv-pin-ms: '-1'; a whole number")
        );
        let tenant = [("x-kv-tenant", "a")];
        assert!(
            refused(Some(Endpoint::Responses), &tenant, "{}").starts_with("x-kv-tenant: hints are possible")
        );
        assert!(refused(None, &tenant, "{}").starts_with("x-kv-tenant: hints are possible"));
        assert_eq!(
            refused(CHAT, &tenant, r#"{"kv_transfer_params":3}"#),
            "kv_transfer_params: expected an object or null"
        );
        for body in ["[]", "\u{feff}{}", r#"{"kv_transfer_params":{"kv_hint":1},NaN"#, "{\0}"] {
            assert!(refused(None, &[], body).starts_with("the body is not a JSON object"), "{body}");
        }
        let form = [("content-type", "multipart/form-data; boundary=x")];
        assert_eq!(replaced(None, &headers(&form), b"--x"), Ok(None));
    }

    #[test]
    fn both_engines_of_a_hand_over_get_the_hints() {
        let body = br#"{"kv_transfer_params":{"kv_hint":{"actions":[1]}}}"#;
        let handed = |params| serde_json::from_str::<Tree>(&handed_on(body, params)).unwrap();
        assert_eq!(handed(r#"{"a":1}"#), json!({"a": 1, "kv_hint": {"actions": [1]}}));
        assert_eq!(handed("{}"), json!({"kv_hint": {"actions": [1]}}));
        assert_eq!(handed_on(b"{}", "{}"), "{}");
    }

    proptest! {
        #[test]
        fn no_body_that_python_reads_keeps_a_hint(bytes in "[\\{\\}\":,a-c\\\\u005f_ ]{0,40}") {
            let body = format!(r#"{{"kv_transfer_params":{{"kv_hint":1}},{bytes}}}"#);
            if let Ok(found) = replaced(CHAT, &HeaderMap::new(), body.as_bytes()) {
                let text = found.map_or(body, |found| String::from_utf8(found.body.to_vec()).unwrap());
                if let Ok(tree) = serde_json::from_str::<Tree>(&text) {
                    prop_assert!(tree["kv_transfer_params"].get("kv_hint").is_none(), "{text}");
                }
            }
        }
    }
}
