//! One session file: its fields before the requests, and its requests one entry after the other. A
//! sub-agent's entry holds the requests of a session of its own, whose times count from the entry's
//! and whose block ids are the parent's.

use super::ids::{Ids, SystemPrompt};
use super::text::{ReadError, SessionText};
use crate::format::check::{FieldNames, check, micros};
use crate::format::error::{Problem, parse_json, parse_object};
use crate::number::{Tokens, ids, optional_tokens};
use crate::request::TraceRequest;
use serde::Deserialize;
use std::io::BufRead;

const NAMES: FieldNames = FieldNames { input: "in", output: "out", blocks: "hash_ids", other_size: "" };

/// The largest block size that is accepted, in tokens.
const MAX_BLOCK_TOKENS: u32 = 1 << 16;

pub(super) struct Session<R> {
    text: SessionText<R>,
    name: String,
    block_tokens: u32,
    system_tokens: Option<u32>,
    start_us: u64,
    ids: Ids,
    turns: u32,
    /// How many entries were read, the bad ones included.
    pub entries: u64,
}

#[derive(Default)]
struct Header {
    id: Option<String>,
    block_size: Option<u32>,
    hash_id_scope: Option<String>,
    tool_tokens: Option<u32>,
    system_tokens: Option<u32>,
}

/// One entry of `requests`, of either kind.
#[derive(Deserialize)]
struct Entry {
    t: f64,
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    model: String,
    #[serde(default, rename = "in", deserialize_with = "optional_tokens")]
    input: Option<u32>,
    #[serde(default, rename = "out", deserialize_with = "optional_tokens")]
    output: Option<u32>,
    #[serde(default, deserialize_with = "ids")]
    hash_ids: Vec<u64>,
    think_time: Option<f64>,
    api_time: Option<f64>,
    agent_id: Option<String>,
    #[serde(default, deserialize_with = "optional_tokens")]
    tool_tokens: Option<u32>,
    #[serde(default, deserialize_with = "optional_tokens")]
    system_tokens: Option<u32>,
    requests: Option<Vec<Entry>>,
}

/// What the requests of one entry are part of.
struct Agent {
    session: String,
    parent_session: Option<String>,
    system_tokens: Option<u32>,
}

impl<R: BufRead> Session<R> {
    /// Reads up to the first request. `fallback_name` stands for a missing `id`; all times begin at
    /// `start_us`.
    pub(super) fn open(
        input: R,
        fallback_name: String,
        start_us: u64,
        ids: Ids,
    ) -> Result<Session<R>, ReadError> {
        let mut text = SessionText::new(input);
        let mut header = Header::default();
        let mut outcome = Ok(());
        text.open(|name, value| {
            if outcome.is_ok() {
                outcome = header.set(name, value);
            }
        })?;
        outcome.and_then(|()| header.check()).map_err(ReadError::Text).map(|block_tokens| Session {
            text,
            name: header.id.unwrap_or(fallback_name),
            block_tokens,
            system_tokens: sum(header.tool_tokens, header.system_tokens),
            start_us,
            ids,
            turns: 0,
            entries: 0,
        })
    }

    /// The requests of the next entry: one of the main agent, or those of a sub-agent, perhaps
    /// none. `None` at the end. After [`ReadError`] from the text itself nothing more can be read;
    /// a bad entry, the inner error, is only left out.
    pub(super) fn next_entry(&mut self) -> Result<Option<Result<Vec<TraceRequest>, Problem>>, ReadError> {
        let mut element = Vec::new();
        self.entries += 1;
        if !self.text.next_element(&mut element)? {
            return Ok(None);
        }
        Ok(Some(parse_object(&element).and_then(|entry| self.requests_of_entry(entry))))
    }

    fn requests_of_entry(&mut self, entry: Entry) -> Result<Vec<TraceRequest>, Problem> {
        let start_us = self.start_us;
        if entry.kind == "subagent" {
            let mut requests = Vec::new();
            self.add_sub_agent(entry, start_us, &mut requests)?;
            return Ok(requests);
        }
        let agent =
            Agent { session: self.name.clone(), parent_session: None, system_tokens: self.system_tokens };
        let request = self.request(entry, start_us, self.turns, &agent)?;
        self.turns += 1;
        Ok(vec![request])
    }

    /// Adds the requests of a sub-agent and of those that it started. JSON's own limit on nesting
    /// bounds the recursion.
    fn add_sub_agent(
        &mut self,
        entry: Entry,
        base_us: u64,
        requests: &mut Vec<TraceRequest>,
    ) -> Result<(), Problem> {
        let start_us = base_us.saturating_add(micros("t", entry.t, 1.0)?);
        let agent = entry.agent_id.unwrap_or_else(|| format!("agent-of-entry-{}", self.entries));
        let agent = Agent {
            session: format!("{}/{agent}", self.name),
            parent_session: Some(self.name.clone()),
            system_tokens: sum(entry.tool_tokens, entry.system_tokens),
        };
        let mut turns = 0;
        for inner in entry.requests.ok_or_else(|| Problem::missing("requests"))? {
            if inner.kind == "subagent" {
                self.add_sub_agent(inner, start_us, requests)?;
            } else {
                requests.push(self.request(inner, start_us, turns, &agent)?);
                turns += 1;
            }
        }
        Ok(())
    }

    fn request(
        &mut self,
        entry: Entry,
        base_us: u64,
        turn: u32,
        agent: &Agent,
    ) -> Result<TraceRequest, Problem> {
        let seconds = |field, value: Option<f64>| value.map(|value| micros(field, value, 1.0)).transpose();
        let request = check(
            TraceRequest {
                session: agent.session.clone(),
                parent_session: agent.parent_session.clone(),
                turn,
                arrival_us: base_us.saturating_add(micros("t", entry.t, 1.0)?),
                think_us: seconds("think_time", entry.think_time)?,
                service_us: seconds("api_time", entry.api_time)?,
                input_tokens: entry.input.ok_or_else(|| Problem::missing("in"))?,
                output_tokens: entry.output.ok_or_else(|| Problem::missing("out"))?,
                system_tokens: agent.system_tokens,
                block_tokens: self.block_tokens,
                blocks: entry.hash_ids,
            },
            &NAMES,
        )?;
        let system = SystemPrompt {
            model: &entry.model,
            of_sub_agent: agent.parent_session.is_some(),
            blocks: (agent.system_tokens.unwrap_or(0) / self.block_tokens) as usize,
        };
        let mut request = request;
        self.ids.globalise(&mut request.blocks, &system)?;
        Ok(request)
    }
}

impl Header {
    fn set(&mut self, name: &[u8], value: &[u8]) -> Result<(), Problem> {
        match name {
            br#""id""# => self.id = Some(scalar("id", value)?),
            br#""block_size""# => self.block_size = Some(scalar::<Tokens>("block_size", value)?.0),
            br#""hash_id_scope""# => self.hash_id_scope = Some(scalar("hash_id_scope", value)?),
            br#""tool_tokens""# => self.tool_tokens = Some(scalar::<Tokens>("tool_tokens", value)?.0),
            br#""system_tokens""# => self.system_tokens = Some(scalar::<Tokens>("system_tokens", value)?.0),
            _ => {}
        }
        Ok(())
    }

    /// The block size, if all is well.
    fn check(&self) -> Result<u32, Problem> {
        if let Some(scope) = self.hash_id_scope.as_deref().filter(|&scope| scope != "local") {
            return Err(Problem::field("hash_id_scope", format!("{scope:?}, allowed \"local\"")));
        }
        match self.block_size {
            Some(block_tokens @ 1..=MAX_BLOCK_TOKENS) => Ok(block_tokens),
            Some(other) => {
                Err(Problem::field("block_size", format!("{other}, allowed 1 to {MAX_BLOCK_TOKENS}")))
            }
            None => Err(Problem::field("block_size", "missing, required before the requests")),
        }
    }
}

/// A field of the header.
fn scalar<'text, T: Deserialize<'text>>(name: &str, value: &'text [u8]) -> Result<T, Problem> {
    parse_json(value).map_err(|problem| match problem {
        Problem::Field { problem, .. } => Problem::field(name, problem),
        other => other,
    })
}

fn sum(tool_tokens: Option<u32>, system_tokens: Option<u32>) -> Option<u32> {
    Some(tool_tokens?.saturating_add(system_tokens?))
}

#[cfg(test)]
mod tests {
    use super::super::ids::Ids;
    use super::super::text::ReadError;
    use super::Session;
    use crate::request::TraceRequest;

    fn read(text: &str) -> (Vec<TraceRequest>, Vec<String>) {
        let (mut requests, mut problems) = (Vec::new(), Vec::new());
        let mut session =
            match Session::open(text.as_bytes(), "fallback".into(), 1_000_000, Ids::new(0, false)) {
                Ok(session) => session,
                Err(ReadError::Text(problem)) => return (requests, vec![problem.to_string()]),
                Err(ReadError::Io(error)) => panic!("{error}"),
            };
        while let Ok(Some(entry)) = session.next_entry() {
            match entry {
                Ok(more) => requests.extend(more),
                Err(problem) => problems.push(format!("{}: {problem}", session.entries)),
            }
        }
        (requests, problems)
    }

    const NESTED: &str = r#"{"id":"s","block_size":64,"tool_tokens":100,"system_tokens":28,"requests":[
        {"t":0.0,"type":"n","in":130,"out":5,"hash_ids":[1,2],"think_time":0.0,"api_time":2.5},
        {"t":10.0,"type":"subagent","agent_id":"a","tool_tokens":60,"system_tokens":4,"requests":[
            {"t":0.0,"type":"n","in":64,"out":1,"hash_ids":[9]},
            {"t":1.0,"type":"subagent","agent_id":"b","requests":[{"t":0.5,"in":64,"out":1,"hash_ids":[9]}]},
            {"t":3.0,"type":"n","in":128,"out":1,"hash_ids":[9,10],"think_time":2.0}]},
        {"t":20.5,"type":"s","in":200,"out":7,"hash_ids":[1,2,3],"think_time":8.0}]}"#;

    #[test]
    fn sub_agents_are_sessions_of_their_own_that_share_the_parents_ids() {
        let (requests, problems) = read(NESTED);
        assert_eq!(problems, [""; 0]);
        let shown: Vec<_> = requests
            .iter()
            .map(|r| (r.session.as_str(), r.parent_session.as_deref(), r.turn, r.arrival_us / 100_000))
            .collect();
        assert_eq!(
            shown,
            [
                ("s", None, 0, 10),
                ("s/a", Some("s"), 0, 110),
                ("s/b", Some("s"), 0, 125),
                ("s/a", Some("s"), 1, 140),
                ("s", None, 1, 215),
            ]
        );
        assert_eq!(requests[1].blocks, requests[2].blocks);
        assert_eq!((requests[0].system_tokens, requests[1].system_tokens), (Some(128), Some(64)));
        assert_eq!((requests[0].service_us, requests[4].think_us), (Some(2_500_000), Some(8_000_000)));
        assert!(requests.iter().all(|request| request.root_session() == "s"));
    }

    #[test]
    fn a_bad_entry_names_its_field_and_the_rest_is_read() {
        let text = r#"{"block_size":64,"requests":[{"t":0,"in":1,"out":1},{"t":0,"out":1},{"t":"x","in":1,"out":1},
            {"t":0,"in":70,"out":1,"hash_ids":[1,2,3]},{"t":0,"type":"subagent"},{"t":5,"in":2,"out":1}]}"#;
        let (requests, problems) = read(text);
        assert_eq!(requests.len(), 2);
        assert_eq!((requests[1].session.as_str(), requests[1].turn), ("fallback", 1));
        assert_eq!(
            problems,
            [
                "2: in: missing",
                "3: t: invalid type: string \"x\", expected f64",
                "4: hash_ids: 3 blocks of 64 tokens, allowed up to 2 in this prompt",
                "5: requests: missing",
            ]
        );
    }

    #[test]
    fn a_session_that_cannot_be_understood_is_refused() {
        let refused = |text: &str| read(text).1.join("; ");
        assert_eq!(refused(r#"{"requests":[]}"#), "block_size: missing, required before the requests");
        assert_eq!(refused(r#"{"block_size":0,"requests":[]}"#), "block_size: 0, allowed 1 to 65536");
        assert_eq!(
            refused(r#"{"block_size":"64","requests":[]}"#),
            "block_size: invalid type: string \"64\", expected a whole number of tokens"
        );
        assert_eq!(
            refused(r#"{"block_size":64,"hash_id_scope":"global","requests":[]}"#),
            "hash_id_scope: \"global\", allowed \"local\""
        );
    }
}
