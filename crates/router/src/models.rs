//! Which engine serves which models, as the engines' own lists say: LoRA adapters are listed like
//! models. `listing` reads the lists.
//!
//! An engine whose list cannot be read, or is empty, may serve anything: what it does not serve it
//! refuses itself.

use crate::config::Target;
use crate::engine::Engine;
use crate::probe::ShortAnswer;
use crate::slots::{EngineSet, SlotSet};
use forebay_transfer::lock::RwLock;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
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
#[derive(Debug, Default)]
pub struct Models {
    lists: RwLock<Lists>,
    /// When the lists were last read for an unknown model.
    pub read_again: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Lists {
    /// By the ids of engines.
    of: BTreeMap<u64, Entry>,
    /// The engines that serve a model: those that list it, and those without a list.
    serving: HashMap<String, Arc<EngineSet>>,
    /// The engines without a list.
    unlisted: Arc<EngineSet>,
}

#[derive(Debug)]
struct Entry {
    slot: usize,
    /// Not one that is about to leave.
    serves: bool,
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    models: Vec<Listed>,
    /// The engine says it to anybody, and not only to those with a key.
    open: bool,
}

impl Models {
    /// An engine comes, without a list. One that is there, or about to leave, keeps its list.
    pub fn add(&self, engine: &Engine) {
        let mut lists = self.lists.write();
        let entry = Entry { slot: engine.slot, serves: true, known: None };
        lists.of.entry(engine.id).or_insert(entry).serves = true;
        lists.index();
    }

    /// An engine is about to leave, and serves no models any more unless it is added again.
    pub fn leave(&self, engine: &Engine) {
        let mut lists = self.lists.write();
        if let Some(entry) = lists.of.get_mut(&engine.id) {
            entry.serves = false;
        }
        lists.index();
    }

    /// An engine is gone.
    pub fn remove(&self, engine: &Engine) {
        let mut lists = self.lists.write();
        lists.of.remove(&engine.id);
        lists.index();
    }

    /// Is there no engine that serves?
    pub fn is_empty(&self) -> bool {
        self.lists.read().of.values().all(|entry| !entry.serves)
    }

    /// The engines that may serve a model: those that list it, and those without a list. None: it
    /// is unknown.
    pub fn serving(&self, model: &str) -> Arc<EngineSet> {
        let lists = self.lists.read();
        // SGLang takes an adapter as BASE:ADAPTER and lists the base.
        let base = || model.split_once(':').and_then(|(base, _)| lists.serving.get(base));
        lists.serving.get(model).or_else(base).unwrap_or(&lists.unlisted).clone()
    }

    /// The last list of an engine, if it is for anybody.
    pub fn open_list(&self, engine: &Engine) -> Option<Vec<Listed>> {
        let lists = self.lists.read();
        let known = lists.of.get(&engine.id)?.known.as_ref();
        known.filter(|known| known.open).map(|known| known.models.clone())
    }

    /// Notes what an engine said, without a key if `open`. Who says nothing, or nothing without a
    /// key, keeps its list.
    pub fn note(&self, engine: &Engine, said: &ListAnswer, open: bool) {
        let list = match said {
            ListAnswer::List(list) => Some(Known { models: list.clone(), open }),
            ListAnswer::Failed => return,
            ListAnswer::Other(answer) if [401, 403].contains(&answer.status.as_u16()) => return,
            ListAnswer::Other(_) => None,
        };
        let mut lists = self.lists.write();
        // It may have left meanwhile.
        let Some(entry) = lists.of.get_mut(&engine.id) else { return };
        let before = std::mem::replace(&mut entry.known, list);
        if let (Some(_), ListAnswer::Other(answer)) = (before, said) {
            warn_unlisted(&engine.target, answer.status);
        }
        lists.index();
    }
}

impl Lists {
    fn index(&mut self) {
        let newest_id = self.of.keys().next_back().copied().unwrap_or_default();
        let set = |slots| Arc::new(EngineSet { slots, newest_id });
        let serving = || self.of.values().filter(|entry| entry.serves);
        let unlisted: SlotSet =
            serving().filter(|entry| entry.known.is_none()).map(|entry| entry.slot).collect();
        let mut listing: HashMap<&str, SlotSet> = HashMap::new();
        for entry in serving() {
            for model in entry.known.iter().flat_map(|known| &known.models) {
                listing.entry(&model.id).or_default().insert(entry.slot);
            }
        }
        let listing = listing.into_iter();
        let serving = listing.map(|(id, slots)| (id.to_owned(), set(slots.union(&unlisted)))).collect();
        (self.serving, self.unlisted) = (serving, set(unlisted));
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

    fn engine(slot: usize) -> Engine {
        let host = HeaderValue::from_static("h:1");
        let name = format!("e{slot}");
        let (authority, address) = ("h:1".to_owned(), None);
        let target =
            Target { name, header: host.clone(), authority, address, store: None, events: vec![], host };
        Engine::new(slot, 10 + slot as u64, target)
    }

    fn slots(of: &[usize]) -> SlotSet {
        of.iter().copied().collect()
    }

    #[test]
    fn a_model_is_served_by_those_that_list_it_and_by_those_without_a_list() {
        let (models, engines) = (Models::default(), [0, 1, 2].map(engine));
        engines.iter().for_each(|engine| models.add(engine));
        let serving = |model| models.serving(model).slots.clone();
        assert_eq!(serving("m"), slots(&[0, 1, 2]), "nobody has said anything");
        models.note(&engines[0], &list(&["m", "adapter"]), true);
        models.note(&engines[1], &list(&["m"]), false);
        let asked = ["m", "adapter", "other", "m:adapter-2"];
        let expected = [&[0, 1, 2][..], &[0, 2], &[2], &[0, 1, 2]];
        assert_eq!(asked.map(serving), expected.map(slots));
        models.note(&engines[2], &list(&["third"]), true);
        assert_eq!(asked.map(serving), [&[0, 1][..], &[0], &[], &[0, 1]].map(slots));
        models.note(&engines[0], &ListAnswer::Failed, true);
        assert_eq!(serving("adapter"), slots(&[0]), "an engine that is down is still known");
        let said = |status| ListAnswer::Other(ShortAnswer { status, body: Bytes::new() });
        models.note(&engines[1], &said(StatusCode::UNAUTHORIZED), true);
        assert_eq!(serving("m"), slots(&[0, 1]), "what it says to those with a key still holds");
        let open = [0, 1].map(|engine| models.open_list(&engines[engine]).is_some());
        assert_eq!(open, [true, false], "and is not shown to others");
        models.note(&engines[1], &said(StatusCode::NOT_FOUND), true);
        assert_eq!(serving("other"), slots(&[1]));
    }

    #[test]
    fn an_engine_that_has_left_serves_nothing_whatever_it_says_later() {
        let (models, engine) = (Models::default(), engine(0));
        models.add(&engine);
        models.note(&engine, &list(&["m"]), true);
        models.leave(&engine);
        assert!(models.serving("m").is_empty() && models.is_empty());
        models.remove(&engine);
        models.note(&engine, &list(&["m"]), true);
        assert!(models.serving("m").is_empty() && models.open_list(&engine).is_none());
    }

    #[test]
    fn an_engine_that_is_added_again_while_it_leaves_serves_what_it_served() {
        let (models, engine) = (Models::default(), engine(0));
        models.add(&engine);
        models.note(&engine, &list(&["m"]), true);
        models.leave(&engine);
        models.add(&engine);
        assert_eq!(models.serving("m").slots, slots(&[0]));
        assert!(models.serving("other").is_empty(), "it does not serve what nobody has heard of");
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
