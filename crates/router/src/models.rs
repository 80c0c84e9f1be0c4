//! Which engine serves which models, as the engines' own lists say: LoRA adapters are listed like
//! models. `listing` reads the lists.
//!
//! An engine whose list cannot be read, or is empty, may serve anything: what it does not serve it
//! refuses itself.

use crate::config::Target;
use crate::dispatcher::BackendSet;
use crate::probe::ShortAnswer;
use forebay_transfer::lock::RwLock;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::time::Instant;
use tokio::sync::Mutex;

#[derive(Debug, Clone)]
pub struct Listed {
    /// The name that requests give.
    pub id: String,
    /// The engine's whole entry.
    pub object: Box<RawValue>,
}

/// What an engine said of its models.
#[derive(Debug)]
pub enum ListAnswer {
    List(Vec<Listed>),
    /// Something else: an answer without a list that can be read.
    Other(ShortAnswer),
    /// Nothing.
    Failed,
}

/// The lists of all engines.
#[derive(Debug)]
pub struct Models {
    lists: RwLock<Lists>,
    /// When the lists were last read for an unknown model.
    pub read_again: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct Lists {
    of: Vec<Option<Known>>,
    /// The engines that list a model.
    serving: HashMap<String, BackendSet>,
    /// The engines without a list.
    unlisted: BackendSet,
}

#[derive(Debug)]
struct Known {
    models: Vec<Listed>,
    /// The engine says it to anybody, and not only to those with a key.
    open: bool,
}

impl Models {
    /// No lists yet, of `backends` engines.
    pub fn new(backends: usize) -> Models {
        let mut lists =
            Lists { of: (0..backends).map(|_| None).collect(), serving: HashMap::new(), unlisted: 0 };
        lists.index();
        Models { lists: RwLock::new(lists), read_again: Mutex::new(None) }
    }

    /// The engines that may serve a model: those that list it, and those without a list. None: it
    /// is unknown.
    pub fn serving(&self, model: &str) -> BackendSet {
        let lists = self.lists.read();
        // SGLang takes an adapter as BASE:ADAPTER and lists the base.
        let base = || model.split_once(':').and_then(|(base, _)| lists.serving.get(base));
        lists.serving.get(model).or_else(base).copied().unwrap_or(0) | lists.unlisted
    }

    /// The last list of an engine, if it is for anybody.
    pub fn open_list(&self, backend: usize) -> Option<Vec<Listed>> {
        let lists = self.lists.read();
        lists.of[backend].as_ref().filter(|known| known.open).map(|known| known.models.clone())
    }

    /// Notes what an engine said, without a key if `open`. Who says nothing, or nothing without a
    /// key, keeps its list.
    pub fn note(&self, target: &Target, backend: usize, said: &ListAnswer, open: bool) {
        let list = match said {
            ListAnswer::List(list) => Some(Known { models: list.clone(), open }),
            ListAnswer::Failed => return,
            ListAnswer::Other(answer) if [401, 403].contains(&answer.status.as_u16()) => return,
            ListAnswer::Other(_) => None,
        };
        let mut lists = self.lists.write();
        let before = std::mem::replace(&mut lists.of[backend], list);
        if let (Some(_), ListAnswer::Other(answer)) = (before, said) {
            warn_unlisted(target, answer.status);
        }
        lists.index();
    }
}

impl Lists {
    fn index(&mut self) {
        self.serving.clear();
        self.unlisted = 0;
        for (backend, list) in self.of.iter().enumerate() {
            match list {
                None => self.unlisted |= 1 << backend,
                Some(known) => {
                    for model in &known.models {
                        *self.serving.entry(model.id.clone()).or_default() |= 1 << backend;
                    }
                }
            }
        }
    }
}

/// Says so in the log.
pub fn warn_unlisted(target: &Target, status: StatusCode) {
    tracing::warn!(engine = target.name, status = status.as_u16(), "list of models cannot be read",);
}

/// The models in the body of an answer; `None` where there are none.
pub fn parse(body: &[u8]) -> Option<Vec<Listed>> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Box<RawValue>>,
    }
    #[derive(Deserialize)]
    struct Entry {
        id: String,
    }
    let list: List = serde_json::from_slice(body).ok()?;
    let models = list.data.into_iter().map(|object| {
        let entry: Entry = serde_json::from_str(object.get()).ok()?;
        Some(Listed { id: entry.id, object })
    });
    models.collect::<Option<Vec<Listed>>>().filter(|models| !models.is_empty())
}

/// A list as the API has it: each name once, as the first engine describes it.
pub fn union(lists: impl IntoIterator<Item = Vec<Listed>>) -> Vec<Listed> {
    let mut models: Vec<Listed> = Vec::new();
    for model in lists.into_iter().flatten() {
        if models.iter().all(|known| known.id != model.id) {
            models.push(model);
        }
    }
    models
}

pub fn json(models: &[Listed]) -> Vec<u8> {
    #[derive(Serialize)]
    struct List<'a> {
        object: &'static str,
        data: Vec<&'a RawValue>,
    }
    let list = List { object: "list", data: models.iter().map(|model| &*model.object).collect() };
    // Text that was JSON already: nothing in it can fail.
    serde_json::to_vec(&list).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use http::HeaderValue;

    fn list(ids: &[&str]) -> ListAnswer {
        let data: Vec<_> = ids.iter().map(|id| serde_json::json!({"id": id, "object": "model"})).collect();
        ListAnswer::List(parse(serde_json::json!({ "data": data }).to_string().as_bytes()).unwrap())
    }

    fn target() -> Target {
        let host = HeaderValue::from_static("h:1");
        Target { name: "a".into(), header: host.clone(), authority: "h:1".into(), store: None, host }
    }

    #[test]
    fn a_model_is_served_by_those_that_list_it_and_by_those_without_a_list() {
        let models = Models::new(3);
        assert_eq!(models.serving("m"), 0b111, "nobody has said anything");
        models.note(&target(), 0, &list(&["m", "adapter"]), true);
        models.note(&target(), 1, &list(&["m"]), false);
        let asked = ["m", "adapter", "other", "m:adapter-2"];
        assert_eq!(asked.map(|model| models.serving(model)), [0b111, 0b101, 0b100, 0b111]);
        models.note(&target(), 2, &list(&["third"]), true);
        assert_eq!(asked.map(|model| models.serving(model)), [0b011, 0b001, 0, 0b011]);
        models.note(&target(), 0, &ListAnswer::Failed, true);
        assert_eq!(models.serving("adapter"), 0b001, "an engine that is down is still known");
        let said = |status| ListAnswer::Other(ShortAnswer { status, body: Bytes::new() });
        models.note(&target(), 1, &said(StatusCode::UNAUTHORIZED), true);
        assert_eq!(models.serving("m"), 0b011, "what it says to those with a key still holds");
        let open = [0, 1].map(|backend| models.open_list(backend).is_some());
        assert_eq!(open, [true, false], "and is not shown to others");
        models.note(&target(), 1, &said(StatusCode::NOT_FOUND), true);
        assert_eq!(models.serving("other"), 0b010);
    }

    #[test]
    fn what_is_no_list_of_models_is_none() {
        for body in ["", "{}", "[]", r#"{"data":[]}"#, r#"{"data":[{"name":"m"}]}"#, r#"{"data":7}"#] {
            assert!(parse(body.as_bytes()).is_none(), "{body}");
        }
    }

    #[test]
    fn the_union_has_each_model_once_as_its_engine_describes_it() {
        let parse = |text: &str| parse(text.as_bytes()).unwrap();
        let first = parse(r#"{"data":[{"id":"m","max_model_len":8192}]}"#);
        let second = parse(r#"{"data":[{"id":"m","max_model_len":1},{"id":"lora","parent":"m"}]}"#);
        let text = String::from_utf8(json(&union([first, second]))).unwrap();
        let wanted =
            r#"{"object":"list","data":[{"id":"m","max_model_len":8192},{"id":"lora","parent":"m"}]}"#;
        assert_eq!(text, wanted);
    }
}
