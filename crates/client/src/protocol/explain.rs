//! Why a prompt was no hit: what clients say of their namespaces and requests, what a person asks,
//! and what a node knows about it. Pure. The node's answer is JSON, since people read it and no
//! engine does.

use super::bytes::{BadBytes, Reader, Writer};
use forebay_kv::{ChunkId, NamespaceKey};
use forebay_store::Absence;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of all that a client says of a namespace.
pub const FACTS_BYTES_MAX: usize = 16 << 10;
/// Bytes of the name of a request.
pub const REQUEST_BYTES_MAX: usize = 256;
/// Bytes of the reason for what a request loads.
pub const REASON_BYTES_MAX: usize = 64;
/// Ids of a chunk that a request did not find, one for each rank.
pub const MISSING_MAX: usize = 64;
/// Tokens of a prompt that is to be explained.
pub const TOKENS_MAX: usize = 1 << 20;

/// What a namespace is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    pub key: NamespaceKey,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Its fields as text, and what else is worth knowing, such as the model's name.
    pub facts: BTreeMap<String, String>,
}

/// What a request found and loaded, and why no more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The request's name.
    pub request: String,
    /// A word; `docs/explain.md` lists those of the vLLM connector.
    pub reason: String,
    pub prompt_tokens: u32,
    /// Tokens that the engine had itself.
    pub held_tokens: u32,
    /// Tokens that it loads, those that it had itself not counted.
    pub loaded_tokens: u32,
    /// Chunks that were found in memory, on disk and at peers.
    pub found: [u32; 3],
    /// The first chunk that was not found: an id for each rank.
    #[serde(skip)]
    pub missing: Vec<ChunkId>,
}

/// What is to be explained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A prompt, in each namespace that clients have described.
    Tokens(Vec<u32>),
    /// A sequence of chunks.
    Ids(Vec<ChunkId>),
    /// A request of which a client has said what came of it: its name, or a part of it.
    Request(String),
}

/// What a node knows of why a prompt was no hit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explained {
    /// How long the node has been running.
    pub up_s: u32,
    pub memory: TierFacts,
    /// Absent without one.
    pub ssd: Option<TierFacts>,
    pub peers: Vec<PeerFacts>,
    /// One for each namespace that was described, or a single one without facts.
    pub sequences: Vec<Sequence>,
    /// What clients said of the requests with that name.
    pub requests: Vec<Outcome>,
    /// Namespaces and requests that gave way to newer ones.
    pub forgotten: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierFacts {
    pub used_bytes: u64,
    pub capacity_bytes: u64,
    /// How far back reasons are remembered, if older ones were forgotten.
    pub remembers_s: Option<u32>,
}

/// Another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerFacts {
    pub name: String,
    pub state: String,
    /// Why it is not reached, if it is not.
    pub unreached: Option<String>,
}

/// The chunks of a prompt in one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sequence {
    /// What the namespace is made of.
    pub facts: BTreeMap<String, String>,
    /// Whose it is.
    pub tenant: Option<u16>,
    /// The client that described it last.
    pub client: String,
    /// Tokens of a chunk; 0 if that is not known.
    pub chunk_tokens: u32,
    pub chunks: u32,
    /// Neighbours that are alike, in order. Behind the last one nothing is told.
    pub runs: Vec<Run>,
}

/// Chunks that are in the same place, for the same reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub first: u32,
    pub chunks: u32,
    pub place: Place,
    /// Whose they are, if they are not the tenant's of the namespace.
    pub owner: Option<u16>,
    /// Whether something that is known to the node continues the last of them.
    pub is_continued: bool,
    /// Why they are not in memory or on disk, of the last of them.
    pub events: Vec<Event>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    Memory,
    Disk,
    /// As another node says.
    Peer,
    Nowhere,
}

/// Something that happened to a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub at: Step,
    pub why: Absence,
    /// How long ago.
    pub ago_s: u32,
}

/// Where on its way it happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// It left memory, or was not taken in there.
    Memory,
    /// It was not written to the SSD.
    WriteBack,
    /// It left the SSD, or was not taken in there.
    Disk,
}

impl Description {
    pub fn check(&self) -> Result<(), BadBytes> {
        let bytes: usize = self.facts.iter().map(|(name, value)| name.len() + value.len() + 8).sum();
        at_most("the bytes of a namespace's facts", bytes, FACTS_BYTES_MAX, "0 to 16384")?;
        match self.chunk_tokens {
            0 => Err(BadBytes::Value { what: "the tokens of a chunk", value: 0, allowed: "1 or more" }),
            _ => Ok(()),
        }
    }

    pub(super) fn encode(&self, start: Writer) -> Writer {
        let facts: Vec<_> = self.facts.iter().collect();
        start
            .bytes(self.key.as_bytes())
            .u32(self.chunk_tokens)
            .list(&facts, |writer, (name, value)| writer.text(name).text(value))
    }

    pub(super) fn decode(body: &mut Reader) -> Result<Description, BadBytes> {
        let key = NamespaceKey::from_bytes(body.array("the key of a namespace")?);
        let chunk_tokens = body.u32("the tokens of a chunk")?;
        let facts = body.list("facts", 8, |body| Ok((body.text("a name")?, body.text("a value")?)))?;
        Ok(Description { key, chunk_tokens, facts: facts.into_iter().collect() })
    }
}

impl Outcome {
    pub fn check(&self) -> Result<(), BadBytes> {
        at_most("the length of a request's name", self.request.len(), REQUEST_BYTES_MAX, "0 to 256")?;
        at_most("the length of a reason", self.reason.len(), REASON_BYTES_MAX, "0 to 64")?;
        at_most("the number of missing chunks", self.missing.len(), MISSING_MAX, "0 to 64")
    }

    pub(super) fn encode(&self, start: Writer) -> Writer {
        let [memory, disk, peers] = self.found;
        let named = start.text(&self.request).text(&self.reason);
        let tokens = named.u32(self.prompt_tokens).u32(self.held_tokens).u32(self.loaded_tokens);
        tokens.u32(memory).u32(disk).u32(peers).ids(&self.missing)
    }

    pub(super) fn decode(body: &mut Reader) -> Result<Outcome, BadBytes> {
        let (request, reason) = (body.text("a request's name")?, body.text("a reason")?);
        let mut number = || body.u32("a number of tokens or chunks");
        let (prompt_tokens, held_tokens, loaded_tokens) = (number()?, number()?, number()?);
        let found = [number()?, number()?, number()?];
        let missing = body.ids()?;
        Ok(Outcome { request, reason, prompt_tokens, held_tokens, loaded_tokens, found, missing })
    }
}

/// Whether a prompt is not too long.
pub(super) fn check_tokens(tokens: &[u32]) -> Result<(), BadBytes> {
    at_most("the number of tokens", tokens.len(), TOKENS_MAX, "0 to 1048576")
}

impl Prompt {
    pub fn check(&self) -> Result<(), BadBytes> {
        match self {
            Prompt::Tokens(tokens) => check_tokens(tokens),
            // As all lists of ids: by the request.
            Prompt::Ids(_) => Ok(()),
            Prompt::Request(name) => {
                at_most("the length of a request's name", name.len(), REQUEST_BYTES_MAX, "0 to 256")
            }
        }
    }

    pub(super) fn encode(&self, start: Writer) -> Writer {
        match self {
            Prompt::Tokens(tokens) => start.u8(0).list(tokens, |writer, token| writer.u32(*token)),
            Prompt::Ids(ids) => start.u8(1).ids(ids),
            Prompt::Request(name) => start.u8(2).text(name),
        }
    }

    pub(super) fn decode(body: &mut Reader) -> Result<Prompt, BadBytes> {
        Ok(match body.u8("what is to be explained")? {
            0 => Prompt::Tokens(body.list("tokens", 4, |body| body.u32("a token"))?),
            1 => Prompt::Ids(body.ids()?),
            2 => Prompt::Request(body.text("a request's name")?),
            value => {
                let (what, value) = ("what is to be explained", value.into());
                return Err(BadBytes::Value { what, value, allowed: "0 to 2" });
            }
        })
    }
}

impl Explained {
    pub(super) fn encode(&self, start: Writer) -> Writer {
        // Strings and numbers: nothing in it can fail.
        start.text(&serde_json::to_string(self).unwrap_or_default())
    }

    pub(super) fn decode(body: &mut Reader) -> Result<Explained, BadBytes> {
        let text = body.text("an explanation")?;
        let (what, value) = ("the length of an explanation that cannot be read", text.len() as u64);
        let bad = BadBytes::Value { what, value, allowed: "JSON of this version" };
        serde_json::from_str(&text).map_err(|_| bad)
    }
}

fn at_most(what: &'static str, value: usize, most: usize, allowed: &'static str) -> Result<(), BadBytes> {
    let value = value as u64;
    if value > most as u64 { Err(BadBytes::Value { what, value, allowed }) } else { Ok(()) }
}
