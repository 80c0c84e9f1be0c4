//! Whatever a client sends, it is read or refused: nothing here may panic.

use super::fields::{Fields, Options};
use super::{chat, prompt};
use proptest::prelude::*;

/// Reads a body as both endpoints do. Says whether either of them would take it.
fn read(body: &[u8]) -> bool {
    let Ok(fields) = Fields::parse(body) else { return false };
    let options = Options::parse(&fields, &["max_completion_tokens", "max_tokens"]);
    let prompts = fields.raw("prompt").map(|value| prompt::parse(value, 1_000));
    let chat = chat::parse(&fields, 1_000);
    let tokens = prompts.into_iter().flatten().flatten().chain(chat).flat_map(|prompt| prompt.tokens);
    let any = tokens.inspect(|token| assert!(*token < 1_000)).count() > 0;
    options.is_ok() && any
}

/// JSON with the names and types that matter, and others in their places.
fn json() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f32>().prop_map(|number| format!("{number:?}")),
        "[ -~]{0,12}".prop_map(|text| serde_json::Value::from(text).to_string()),
        Just("\" t12 text\"".to_owned()),
        Just("\"\\ud800\"".to_owned()),
    ];
    let name = prop_oneof![
        Just("prompt"),
        Just("messages"),
        Just("role"),
        Just("content"),
        Just("type"),
        Just("text"),
        Just("max_tokens"),
        Just("stream"),
        Just("stream_options"),
        Just("n"),
        Just("x\\u0000\\\""),
    ];
    leaf.prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(|items| format!("[ {}]", items.join(","))),
            prop::collection::vec((name.clone(), inner), 0..6).prop_map(|fields| {
                let fields: Vec<String> =
                    fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
                format!("{{{}}}", fields.join(","))
            }),
        ]
    })
}

proptest! {
    #[test]
    fn arbitrary_json_is_read_or_refused(body in json()) {
        read(body.as_bytes());
        read(format!("{{\"prompt\":{body}}}").as_bytes());
        read(format!("{{\"messages\":[{body}],\"stream\":true}}").as_bytes());
    }

    #[test]
    fn arbitrary_bytes_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..200)) {
        read(&body);
    }
}

#[test]
fn good_bodies_are_taken() {
    assert!(read(br#"{"prompt": [1, 2, 3], "max_tokens": 4, "unknown": {"a": [1]}}"#));
    assert!(read(
        br#"{ "prompt" : [ [1], [2] ], "stream": true, "stream_options": {"include_usage": null} }"#
    ));
    assert!(read(br#"{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]}]}"#));
    assert!(!read(br#"{"prompt": "a", "max_tokens": 4294967296}"#));
}
