//! The body of a request as bytes. It finds, in one pass and without building a tree, the few
//! fields that routing needs, and says how to ask for usage by changing the bytes in one place.

use crate::json::{self, Kind, SyntaxError, Value};
use bytes::Bytes;
use memchr::memmem;
use std::borrow::Cow;
use std::ops::Range;

/// The field of a body, and of its object, in which vLLM finds hints about KV.
pub const PARAMS: &str = "kv_transfer_params";
pub const HINT: &str = "kv_hint";

/// Which of the calls that complete a prompt a body belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/completions`: the prompt is in `prompt`.
    Completions,
    /// `/v1/chat/completions`: the prompt is in `messages`, after `tools`.
    ChatCompletions,
    /// `/v1/responses`: the prompt is in `input`, after `instructions` and `tools`.
    Responses,
    /// `/v1/messages`: the prompt is in `messages`, after `system` and `tools`.
    Messages,
}

/// In what form a prompt is given: bytes per token differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptKind {
    /// A string, or several.
    Text,
    /// Chat messages.
    Messages,
    /// A list of token ids, or several.
    TokenIds,
}

/// The fields beside the prompt that decide which KV fits, in vLLM, SGLang or both: what is
/// rendered before or into the prompt, and what engines mix into the keys of their caches. What
/// only changes a prompt's end, such as `add_generation_prompt`, is not among them.
const SEPARATORS: [&str; 18] = [
    "model",
    "lora_path",
    "cache_salt",
    "extra_key",
    "data_parallel_rank",
    "tools",
    "functions",
    "documents",
    "instructions",
    "system",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "mm_processor_kwargs",
    "media_io_kwargs",
];

/// Those of [`SEPARATORS`] that are rendered as text before the prompt: from tools to system.
const PREAMBLE: Range<usize> = 5..10;

/// Fields with which a request stays at one engine: several answers, or what is said of each token
/// of the prompt. Whoever sends parameters of a hand-over makes it himself.
const NOT_HANDED_OVER: [&str; 6] = [PARAMS, "n", "best_of", "use_beam_search", "echo", "prompt_logprobs"];

/// What a body says, as positions in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFacts {
    /// The form of the prompt.
    pub kind: PromptKind,
    /// The JSON value of the prompt; empty where it is given in a form that cannot be compared.
    pub prompt: Range<usize>,
    /// The JSON value of `model`, where it is a string.
    pub model: Range<usize>,
    /// Are there perhaps images, sounds or films in it?
    pub has_media: bool,
    /// The JSON values beside `prompt` without whose equality no KV fits, each with a number that
    /// names its field.
    pub separators: Vec<(u8, Range<usize>)>,
    /// Bytes of text that are rendered before the prompt: tools, documents and instructions.
    pub preamble_bytes: usize,
    /// The JSON value of `user`, where it is a string.
    pub user: Option<Range<usize>>,
    /// Does the client want a stream?
    pub stream: bool,
    /// One engine may compute its prompt and another say the answer.
    pub may_hand_over: bool,
    /// The change that makes the engine report usage in a stream; `None` when it will anyway.
    pub ask_for_usage: Option<Edit>,
}

/// Put `text` in place of the bytes at `at`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// The bytes to replace, possibly none.
    pub at: Range<usize>,
    /// What comes there.
    pub text: &'static str,
}

impl Edit {
    /// A body with this change, in parts that are not copied.
    pub fn apply(&self, body: &Bytes) -> [Bytes; 3] {
        let text = Bytes::from_static(self.text.as_bytes());
        [body.slice(..self.at.start), text, body.slice(self.at.end..)]
    }
}

/// A body that cannot be routed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// Not a JSON object.
    #[error("the body is not a JSON object: {0}")]
    NotAnObject(#[from] SyntaxError),
    /// A field is missing.
    #[error("{0}: this field is required")]
    Missing(&'static str),
    /// A field has a type that the API does not allow.
    #[error("{field}: expected {expected}, found {found}")]
    WrongType {
        field: &'static str,
        /// What the API allows.
        expected: &'static str,
        found: &'static str,
    },
}

impl BadRequest {
    /// The field at fault, for the `param` of an OpenAI error.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            BadRequest::NotAnObject(_) => None,
            BadRequest::Missing(field) | BadRequest::WrongType { field, .. } => Some(field),
        }
    }
}

/// Reads a body. Fields that routing does not need are not looked at: the engine judges them.
pub fn read(endpoint: Endpoint, body: &[u8]) -> Result<RequestFacts, BadRequest> {
    let fields = Fields::find(body)?;
    let (prompt, kind, has_media) = fields.prompt(endpoint, body)?;
    let model = fields.separators.first().and_then(Option::as_ref);
    if let Some(model) = model {
        expect("model", model, "a string", &[Kind::String, Kind::Null])?;
    }
    let model = model.filter(|model| model.kind == Kind::String).map_or(0..0, |model| model.at.clone());
    let may_hand_over = may_hand_over(endpoint, body, &fields, has_media);
    let stream = flag("stream", body, fields.stream.as_ref())?;
    // The other calls report usage in every stream.
    let usage = match endpoint {
        Endpoint::Completions | Endpoint::ChatCompletions => usage_edit(body, fields.stream_options)?,
        Endpoint::Responses | Endpoint::Messages => None,
    };
    let is_set = |value: &Value| value.kind != Kind::Null;
    let preamble = fields.separators[PREAMBLE].iter().flatten().filter(|value| is_set(value));
    let preamble_bytes = preamble.map(|value| value.at.len()).sum();
    let separators = fields.separators.into_iter().enumerate();
    let separators = separators.filter_map(|(number, value)| Some((number as u8, value.filter(is_set)?.at)));
    Ok(RequestFacts {
        kind,
        prompt,
        model,
        has_media,
        separators: separators.collect(),
        preamble_bytes,
        user: fields.user.filter(|user| user.kind == Kind::String).map(|user| user.at),
        stream,
        may_hand_over,
        ask_for_usage: if stream { usage } else { None },
    })
}

impl RequestFacts {
    /// The model that the body names, if it names one.
    pub fn model<'a>(&self, body: &'a [u8]) -> Option<Cow<'a, str>> {
        string(&body[self.model.clone()])
    }
}

/// The model that a body names which is not read otherwise: a JSON object or a form with files.
pub fn model_of(body: &[u8]) -> Option<Cow<'_, str>> {
    if body.trim_ascii_start().starts_with(b"{") {
        let fields = json::fields(body).map_while(Result::ok);
        let (_, model) = fields.filter(|(key, value)| key == "model" && value.kind == Kind::String).last()?;
        return string(&body[model.at]);
    }
    let field = memmem::find(body, b"name=\"model\"")?;
    let value = &body[field + memmem::find(&body[field..], b"\r\n\r\n")? + 4..];
    let value = &value[..memmem::find(value, b"\r\n--")?];
    std::str::from_utf8(value).ok().filter(|model| !model.is_empty()).map(Cow::Borrowed)
}

/// The text of a JSON string that is not empty.
fn string(json: &[u8]) -> Option<Cow<'_, str>> {
    let inner = json.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let text = if memchr::memchr(b'\\', inner).is_some() {
        Cow::Owned(serde_json::from_slice(json).ok()?)
    } else {
        Cow::Borrowed(std::str::from_utf8(inner).ok()?)
    };
    (!text.is_empty()).then_some(text)
}

/// The fields that matter; of a repeated one the last, as JSON readers commonly have it.
#[derive(Default)]
struct Fields {
    separators: [Option<Value>; SEPARATORS.len()],
    prompt: Option<Value>,
    prompt_embeds: Option<Value>,
    messages: Option<Value>,
    input: Option<Value>,
    user: Option<Value>,
    stream: Option<Value>,
    stream_options: Option<Value>,
    /// One of [`NOT_HANDED_OVER`] asks for something.
    is_odd: bool,
}

impl Fields {
    fn find(body: &[u8]) -> Result<Fields, BadRequest> {
        let mut fields = Fields::default();
        for field in json::fields(body) {
            let (key, value) = field?;
            let place = match &*key {
                "prompt" => &mut fields.prompt,
                "prompt_embeds" => &mut fields.prompt_embeds,
                "messages" => &mut fields.messages,
                "input" => &mut fields.input,
                "user" => &mut fields.user,
                "stream" => &mut fields.stream,
                "stream_options" => &mut fields.stream_options,
                key if NOT_HANDED_OVER.contains(&key) => {
                    let value = &body[value.at];
                    let is_hint = key == PARAMS && says_hints_alone(value);
                    fields.is_odd |= !is_hint && !matches!(value, b"null" | b"false" | b"1");
                    continue;
                }
                key => match SEPARATORS.iter().position(|name| *name == key) {
                    Some(number) => &mut fields.separators[number],
                    None => continue,
                },
            };
            *place = Some(value);
        }
        Ok(fields)
    }

    /// Where the prompt is, in what form, and whether there are perhaps media in it.
    fn prompt(
        &self,
        endpoint: Endpoint,
        body: &[u8],
    ) -> Result<(Range<usize>, PromptKind, bool), BadRequest> {
        match endpoint {
            Endpoint::Completions => {
                let prompt = self.prompt.as_ref().filter(|prompt| prompt.kind != Kind::Null);
                if prompt.is_none() && self.prompt_embeds.is_some() {
                    return Ok((0..0, PromptKind::TokenIds, false));
                }
                let prompt = self.prompt.as_ref().ok_or(BadRequest::Missing("prompt"))?;
                Ok((prompt.at.clone(), prompt_kind(body, prompt)?, false))
            }
            Endpoint::ChatCompletions | Endpoint::Messages => {
                let messages = self.messages.as_ref().ok_or(BadRequest::Missing("messages"))?;
                expect("messages", messages, "an array", &[Kind::Array])?;
                Ok((messages.at.clone(), PromptKind::Messages, messages.has_media))
            }
            Endpoint::Responses => {
                let input = self.input.as_ref().ok_or(BadRequest::Missing("input"))?;
                expect("input", input, "a string or an array", &[Kind::String, Kind::Array])?;
                Ok((input.at.clone(), PromptKind::Messages, input.has_media))
            }
        }
    }
}

/// Whether parameters say nothing but hints: then the request may be handed over.
fn says_hints_alone(params: &[u8]) -> bool {
    json::fields(params).all(|field| field.is_ok_and(|(key, _)| key == HINT))
}

/// A request for one answer to one prompt without media.
fn may_hand_over(endpoint: Endpoint, body: &[u8], fields: &Fields, has_media: bool) -> bool {
    let is_one = match (endpoint, &fields.prompt) {
        (Endpoint::Completions, Some(prompt)) => {
            let inner = body[prompt.at.start + 1..prompt.at.end].trim_ascii_start();
            prompt.kind == Kind::String || inner.first().is_some_and(u8::is_ascii_digit)
        }
        (Endpoint::ChatCompletions, _) => true,
        (Endpoint::Completions, None) | (Endpoint::Responses | Endpoint::Messages, _) => false,
    };
    is_one && !has_media && !fields.is_odd
}

/// `prompt` is a string, an array of strings, of token ids, or of arrays of token ids.
fn prompt_kind(body: &[u8], prompt: &Value) -> Result<PromptKind, BadRequest> {
    let expected = "a string, an array of strings or an array of token ids";
    expect("prompt", prompt, expected, &[Kind::String, Kind::Array])?;
    let inner = body[prompt.at.start + 1..prompt.at.end].trim_ascii_start();
    let text = prompt.kind == Kind::String || inner.starts_with(b"\"");
    Ok(if text { PromptKind::Text } else { PromptKind::TokenIds })
}

/// How to make `stream_options.include_usage` true.
fn usage_edit(body: &[u8], options: Option<Value>) -> Result<Option<Edit>, BadRequest> {
    let Some(options) = options else {
        // The body is an object with at least a prompt in it, so a comma follows.
        let start = body.iter().position(|&byte| byte == b'{').map_or(0, |brace| brace + 1);
        return Ok(Some(Edit { at: start..start, text: r#""stream_options":{"include_usage":true},"# }));
    };
    expect("stream_options", &options, "an object", &[Kind::Object, Kind::Null])?;
    if options.kind == Kind::Null {
        return Ok(Some(Edit { at: options.at, text: r#"{"include_usage":true}"# }));
    }
    let start = options.at.start;
    let inner = &body[options.at.clone()];
    let (mut fields, mut include_usage) = (0, None);
    for field in json::fields(inner) {
        let (key, value) = field.map_err(|error| SyntaxError { at: start + error.at, ..error })?;
        fields += 1;
        if key == "include_usage" {
            include_usage = Some(value);
        }
    }
    let asked = flag("stream_options.include_usage", inner, include_usage.as_ref())?;
    Ok(match include_usage {
        Some(_) if asked => None,
        Some(value) => Some(Edit { at: start + value.at.start..start + value.at.end, text: "true" }),
        None if fields == 0 => Some(Edit { at: options.at, text: r#"{"include_usage":true}"# }),
        None => Some(Edit { at: start + 1..start + 1, text: r#""include_usage":true,"# }),
    })
}

/// A boolean that may be absent or null, which are false.
fn flag(field: &'static str, bytes: &[u8], value: Option<&Value>) -> Result<bool, BadRequest> {
    let Some(value) = value else { return Ok(false) };
    expect(field, value, "a boolean", &[Kind::Boolean, Kind::Null])?;
    Ok(&bytes[value.at.clone()] == b"true")
}

fn expect(
    field: &'static str,
    value: &Value,
    expected: &'static str,
    allowed: &[Kind],
) -> Result<(), BadRequest> {
    if allowed.contains(&value.kind) {
        return Ok(());
    }
    let found = match value.kind {
        Kind::Null => "null",
        Kind::Boolean => "a boolean",
        Kind::Number => "a number",
        Kind::String => "a string",
        Kind::Object => "an object",
        Kind::Array => "an array",
    };
    Err(BadRequest::WrongType { field, expected, found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::tests::any_json;
    use proptest::prelude::*;
    use serde_json::{Value as Tree, json};

    fn completions(body: &str) -> Result<RequestFacts, BadRequest> {
        read(Endpoint::Completions, body.as_bytes())
    }

    fn edited(body: &[u8], edit: &Edit) -> Vec<u8> {
        [&body[..edit.at.start], edit.text.as_bytes(), &body[edit.at.end..]].concat()
    }

    #[test]
    fn prompts_of_all_forms_are_found() {
        let table = [
            (r#"{"prompt":"a"}"#, PromptKind::Text, r#""a""#),
            (r#"{"prompt": [ "a", "b" ] }"#, PromptKind::Text, r#"[ "a", "b" ]"#),
            (r#"{"prompt":[1,2]}"#, PromptKind::TokenIds, "[1,2]"),
            (r#"{"prompt":[[1],[2]]}"#, PromptKind::TokenIds, "[[1],[2]]"),
            (r#"{"prompt":"first","prompt":"last"}"#, PromptKind::Text, r#""last""#),
        ];
        for (body, kind, prompt) in table {
            let facts = completions(body).unwrap();
            assert_eq!((facts.kind, &body[facts.prompt]), (kind, prompt));
        }
        let body = r#"{"messages":[{"role":"user","content":"x"}],"tools":[{}],"model":"m","user":"u"}"#;
        let facts = read(Endpoint::ChatCompletions, body.as_bytes()).unwrap();
        assert_eq!(&body[facts.prompt], r#"[{"role":"user","content":"x"}]"#);
        let separators = facts.separators.iter().map(|(number, at)| (*number, &body[at.clone()]));
        assert_eq!(separators.collect::<Vec<_>>(), [(0, r#""m""#), (5, "[{}]")]);
        assert_eq!(facts.preamble_bytes, "[{}]".len());
        assert_eq!(&body[facts.user.unwrap()], r#""u""#);
    }

    /// Where instructions or a system prompt are.
    fn preamble(facts: &RequestFacts) -> Range<usize> {
        let is_it = |number: u8| ["instructions", "system"].contains(&SEPARATORS[usize::from(number)]);
        facts.separators.iter().find(|(number, _)| is_it(*number)).map(|(_, at)| at.clone()).unwrap()
    }

    #[test]
    fn the_prompts_and_instructions_of_the_responses_and_messages_apis_are_found() {
        let body = r#"{"model":"m","input":"hi","instructions":"be brief","stream":true}"#;
        let facts = read(Endpoint::Responses, body.as_bytes()).unwrap();
        let parts = [facts.prompt.clone(), preamble(&facts)].map(|at| &body[at]);
        assert_eq!((parts, facts.ask_for_usage), ([r#""hi""#, r#""be brief""#], None));
        let body = r#"{"system":[{}],"messages":[],"stream":true,"model":null}"#;
        let facts = read(Endpoint::Messages, body.as_bytes()).unwrap();
        let parts = [facts.prompt.clone(), preamble(&facts)].map(|at| &body[at]);
        assert_eq!((parts, facts.model(body.as_bytes())), (["[]", "[{}]"], None));
        let missing = read(Endpoint::Responses, b"{}").unwrap_err();
        assert_eq!(missing.to_string(), "input: this field is required");
    }

    #[test]
    fn a_prompt_of_embeddings_is_the_engines_to_judge() {
        for body in [r#"{"prompt_embeds":"AAAA"}"#, r#"{"prompt":null,"prompt_embeds":["AAAA"]}"#] {
            assert_eq!(completions(body).unwrap().prompt, 0..0, "{body}");
        }
    }

    #[test]
    fn the_model_is_found_in_any_body_that_names_one() {
        let form = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nRIFF\r\n--b\r\n\
                    Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--\r\n";
        let table = [
            (r#"{"input":["a"],"model":"m"}"#, Some("m")),
            (r#" {"model":"a\u002fb"}"#, Some("a/b")),
            (r#"{"model":7}"#, None),
            (r#"{"model":""}"#, None),
            (form, Some("whisper")),
            ("", None),
            ("name=\"model\"", None),
        ];
        for (body, model) in table {
            assert_eq!(model_of(body.as_bytes()).as_deref(), model, "{body}");
        }
    }

    #[test]
    fn wrong_types_are_refused_by_the_name_of_the_field() {
        let table = [
            (
                r#"{"prompt":7}"#,
                "prompt: expected a string, an array of strings or an array of token ids, found a number",
            ),
            (
                r#"{"prompt":null}"#,
                "prompt: expected a string, an array of strings or an array of token ids, found null",
            ),
            (r#"{"model":"m"}"#, "prompt: this field is required"),
            (r#"{"prompt":"a","model":[]}"#, "model: expected a string, found an array"),
            (r#"{"prompt":"a","stream":"yes"}"#, "stream: expected a boolean, found a string"),
            (r#"{"prompt":"a","stream_options":3}"#, "stream_options: expected an object, found a number"),
            (
                r#"{"prompt":"a","stream_options":{"include_usage":{}}}"#,
                "stream_options.include_usage: expected a boolean, found an object",
            ),
        ];
        for (body, message) in table {
            assert_eq!(completions(body).unwrap_err().to_string(), message);
        }
        let error = read(Endpoint::ChatCompletions, br#"{"messages":"hi"}"#).unwrap_err();
        assert_eq!(error.to_string(), "messages: expected an array, found a string");
        assert_eq!(error.field(), Some("messages"));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in
            ["", "[]", "7", "{", r#"{"prompt":"a""#, r#"{"prompt":"a",}"#, r#"{"prompt":tru}"#, "\"prompt\""]
        {
            assert!(
                matches!(completions(body), Err(BadRequest::NotAnObject(_))),
                "{body}: {:?}",
                completions(body)
            );
        }
    }

    #[test]
    fn usage_is_asked_for_in_streams_only_and_only_when_the_client_did_not() {
        for body in [
            r#"{"prompt":"a"}"#,
            r#"{"prompt":"a","stream":false}"#,
            r#"{"prompt":"a","stream":null,"stream_options":null}"#,
            r#"{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}"#,
        ] {
            assert_eq!(completions(body).unwrap().ask_for_usage, None, "{body}");
        }
    }

    fn stream_options() -> impl Strategy<Value = Option<Tree>> {
        prop::sample::select(vec![
            None,
            Some(Tree::Null),
            Some(json!({})),
            Some(json!({"include_usage": false})),
            Some(json!({"include_usage": null})),
            Some(json!({"continuous_usage_stats": true})),
            Some(json!({"a": [1, {"include_usage": false}], "include_usage": false, "b": "}"})),
        ])
    }

    proptest! {
        #[test]
        fn the_edit_makes_the_engine_report_usage_and_changes_nothing_else(
            options in stream_options(),
            others in prop::collection::btree_map("[a-z]{1,8}", any_json(), 0..5),
            pretty: bool,
        ) {
            let mut body = Tree::Object(others.into_iter().collect());
            body["prompt"] = json!("a");
            body["stream"] = json!(true);
            if let Some(options) = &options {
                body["stream_options"] = options.clone();
            }
            let mut wanted = body.clone();
            if !wanted["stream_options"].is_object() {
                wanted["stream_options"] = json!({});
            }
            wanted["stream_options"]["include_usage"] = json!(true);
            let text = if pretty { serde_json::to_vec_pretty(&body) } else { serde_json::to_vec(&body) }.unwrap();
            let facts = read(Endpoint::Completions, &text).unwrap();
            let sent: Tree = serde_json::from_slice(&edited(&text, &facts.ask_for_usage.unwrap())).unwrap();
            prop_assert_eq!(sent, wanted);
        }

        #[test]
        fn the_scanner_finds_what_a_full_parse_finds(
            fields in prop::collection::btree_map("(prompt|messages|model|tools|cache_salt|documents|user|stream|.{0,5})", any_json(), 0..8),
            pretty: bool,
        ) {
            let body = Tree::Object(fields.into_iter().collect());
            let text = if pretty { serde_json::to_vec_pretty(&body) } else { serde_json::to_vec(&body) }.unwrap();
            let prompt = &body["prompt"];
            let well_typed = (prompt.is_string() || prompt.is_array())
                && (body.get("model").is_none_or(|model| model.is_string() || model.is_null()))
                && (body["stream"].is_boolean() || body["stream"].is_null());
            let facts = read(Endpoint::Completions, &text);
            prop_assert_eq!(facts.is_ok(), well_typed, "{:?}", facts);
            if let Ok(facts) = facts {
                let value = |at: Range<usize>| serde_json::from_slice::<Tree>(&text[at]).unwrap_or_default();
                prop_assert_eq!(&value(facts.prompt), prompt);
                let model = value(facts.model.clone());
                prop_assert_eq!(model.as_str(), body["model"].as_str());
                for (number, name) in SEPARATORS.iter().enumerate() {
                    let found = facts.separators.iter().find(|(found, _)| usize::from(*found) == number);
                    let found = found.map_or(Tree::Null, |(_, at)| value(at.clone()));
                    prop_assert_eq!(&found, &body[*name]);
                }
                prop_assert_eq!(facts.user.is_some(), body["user"].is_string());
                prop_assert_eq!(facts.stream, body["stream"] == json!(true));
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(body: Vec<u8>) {
            let _ = read(Endpoint::Completions, &body);
            let _ = read(Endpoint::ChatCompletions, &body);
            let _ = model_of(&body);
        }
    }
}
