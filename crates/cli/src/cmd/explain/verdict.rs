//! Why a prompt was no hit, in one sentence, and what to do about it. Pure: it judges what the node
//! and the engine have said.

use super::choose::{Chosen, Difference};
use forebay_client::protocol::explain::{Event, Explained, Outcome, Place, Run, Sequence, Step};
use forebay_store::Absence;
use serde::Serialize;

/// Why a prompt, or what is left of it, was no hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// All of it is there.
    AllThere,
    /// No client has said what its namespace is made of.
    NotDescribed,
    ShorterThanAChunk,
    /// It is stored under another namespace, whose facts differ.
    OtherNamespace,
    OtherModel,
    OtherTenant,
    /// It is stored under the name that it had before the engine's cache was reset.
    Reset,
    EvictedFromMemory,
    EvictedFromSsd,
    /// It left memory, and admission had not let it to the SSD.
    NotAdmitted,
    /// It left memory, and its write to the SSD did not come about.
    NotWrittenToSsd,
    /// It was not taken in.
    Refused,
    Deleted,
    Corrupt,
    /// What is stored goes on otherwise.
    Diverges,
    PeerUnreached,
    NeverStored,
    /// It is not known any more why.
    Forgotten,
    ComputingIsFaster,
    LoadFailed,
    /// The engine did not ask for it.
    NotAsked,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    pub cause: Cause,
    /// The first chunk that is missing.
    pub chunk: Option<u32>,
    pub text: String,
    pub action: String,
    /// In what the namespace differs that has more of the prompt.
    pub differences: Vec<Difference>,
}

pub fn judge(facts: &Explained, chosen: &Chosen<'_>) -> Verdict {
    let outcome = facts.requests.first();
    if let Some(verdict) = outcome.and_then(of_engine) {
        return verdict;
    }
    let Some((own, there)) = chosen.least() else {
        return match outcome {
            Some(outcome) => plain(Cause::NeverStored, found_only(outcome), STORE_IT),
            None => plain(Cause::NotDescribed, "No engine has told this node of its namespace.", DESCRIBE_IT),
        };
    };
    if own.chunks == 0 {
        return shorter(own);
    }
    let missing = own.runs.iter().find(|run| run.place == Place::Nowhere);
    let Some(missing) = missing.filter(|_| there < own.chunks) else { return all_there(own, outcome) };
    let mut verdict = of_events(facts, own, missing)
        .or_else(|| of_others(chosen, own, there))
        .unwrap_or_else(|| of_nothing_known(facts, own, missing, there));
    verdict.chunk = Some(missing.first);
    verdict
}

const STORE_IT: &str = "The next request with it is a hit, once this one is stored.";
const DESCRIBE_IT: &str =
    "Ask the node that the engine uses, and look whether the engine is connected to it and not older.";
const MORE_ROOM: &str = "Raise memory.size, or give the node an SSD.";
const LOOK_AT_REFUSED: &str = "Look at forebay_refused_total and at the log of the node.";

fn plain(cause: Cause, text: impl Into<String>, action: &str) -> Verdict {
    Verdict { cause, chunk: None, text: text.into(), action: action.into(), differences: Vec::new() }
}

/// What the engine itself has said, unless that is only that it was not found.
fn of_engine(outcome: &Outcome) -> Option<Verdict> {
    let Outcome { request, prompt_tokens, held_tokens, loaded_tokens, found, .. } = outcome;
    let chunks: u32 = found.iter().sum();
    let (cause, text, action) = match outcome.reason.as_str() {
        "shorter_than_a_chunk" => (
            Cause::ShorterThanAChunk,
            format!("The prompt of {request} has {prompt_tokens} tokens, less than a chunk."),
            "Nothing: it is computed faster than loaded. chunk_tokens of the connector is smaller if need be.",
        ),
        "computing_is_faster" => (
            Cause::ComputingIsFaster,
            format!(
                "{chunks} chunks of {request} were found, and {loaded_tokens} tokens loaded: to compute the \
                 rest was expected to take less time."
            ),
            "Nothing, if the engine's profile is right; `gate: false` of the connector loads all.",
        ),
        "load_failed" => (
            Cause::LoadFailed,
            format!("A load of {request} failed; it was computed behind the chunks that came."),
            "Look at the logs of the engine and the node for its reason.",
        ),
        "held" => (
            Cause::AllThere,
            format!("The engine had {held_tokens} of {prompt_tokens} tokens of {request} itself."),
            "Nothing: that is a hit of the engine's own cache.",
        ),
        "loaded" => (
            Cause::AllThere,
            format!("{loaded_tokens} tokens of {request} were loaded, all that was found."),
            "Nothing.",
        ),
        "left_alone" | "may_not_load" | "no_room" => (
            Cause::NotAsked,
            format!("The engine loaded nothing for {request}: {}.", not_asked(&outcome.reason)),
            "See docs/vllm-behaviour.md.",
        ),
        _ => return None,
    };
    Some(plain(cause, text, action))
}

fn not_asked(reason: &str) -> &'static str {
    match reason {
        "left_alone" => "its KV depends on more than tokens, salt, adapter and images",
        "no_room" => "its scheduler had no blocks for a load",
        _ => "the request or the engine's role does not allow it",
    }
}

fn found_only(outcome: &Outcome) -> String {
    let [memory, disk, peers] = outcome.found;
    format!(
        "Of {} tokens of {}, {} chunks were found (memory {memory}, SSD {disk}, peers {peers}); the next one \
         was not.",
        outcome.prompt_tokens,
        outcome.request,
        memory + disk + peers
    )
}

fn shorter(own: &Sequence) -> Verdict {
    let text = match own.chunk_tokens {
        0 => "There is no chunk to look for.".to_owned(),
        tokens => {
            format!("The prompt is shorter than a chunk, which has {tokens} tokens: nothing of it is stored.")
        }
    };
    plain(Cause::ShorterThanAChunk, text, "Nothing: it is computed faster than loaded.")
}

fn all_there(own: &Sequence, outcome: Option<&Outcome>) -> Verdict {
    if let Some(run) = own.runs.iter().find(|run| run.owner.is_some()) {
        let owner = run.owner.unwrap_or_default();
        let text = format!("{} is there, and belongs to tenant {owner}.", named(own, run.first));
        return plain(Cause::OtherTenant, text, "A tenant loads its own chunks only.");
    }
    if let Some(outcome) = outcome {
        let text = format!("What {} did not find is there now: it came since.", outcome.request);
        return plain(Cause::AllThere, text, "Nothing: the next request with it is a hit.");
    }
    let text = format!("All {} chunks can be loaded.", own.chunks);
    plain(Cause::AllThere, text, "If a request was no hit all the same, ask with --request.")
}

/// A chunk as people count: with its tokens, if a chunk's length is known.
fn named(own: &Sequence, chunk: u32) -> String {
    match own.chunk_tokens {
        0 => format!("Chunk {chunk}"),
        tokens => format!("Chunk {chunk} (tokens {} to {})", chunk * tokens, (chunk + 1) * tokens - 1),
    }
}

/// What is remembered of the chunk itself.
fn of_events(facts: &Explained, own: &Sequence, missing: &Run) -> Option<Verdict> {
    let at = |step: Step| missing.events.iter().copied().find(|event| event.at == step);
    let (memory, write_back, disk) = (at(Step::Memory), at(Step::WriteBack), at(Step::Disk));
    let chunk = named(own, missing.first);
    let left =
        |event: &Event| !matches!(event.why, Absence::Full | Absence::QuotaFull | Absence::ParentMissing);
    // What a full disk did not take in has been told as write-back's.
    let last = [disk.filter(left), memory].into_iter().flatten().min_by_key(|event| event.ago_s)?;
    let from = if last.at == Step::Disk { "the SSD" } else { "memory" };
    let ago = ago(last.ago_s);
    Some(match last.why {
        Absence::Corrupt => plain(
            Cause::Corrupt,
            format!("{chunk} was dropped from {from} {ago}: its bytes did not match their checksums."),
            "Look at the node's log, and at the memory or disk that it names.",
        ),
        Absence::Deleted => {
            let text = format!("{chunk} was deleted from {from} {ago}.");
            plain(Cause::Deleted, text, "Nothing: somebody wanted it gone.")
        }
        Absence::Evicted | Absence::EvictedForQuota if last.at == Step::Disk => plain(
            Cause::EvictedFromSsd,
            format!("{chunk} was evicted from the SSD {ago}: {}.", room_for(last.why)),
            "Give the node a larger SSD.",
        ),
        Absence::Evicted | Absence::EvictedForQuota | Absence::Demoted => {
            evicted(facts, &chunk, &last, write_back)
        }
        refused => plain(
            Cause::Refused,
            format!("{chunk} was not taken into {from} {ago}: {}.", in_words(refused)),
            LOOK_AT_REFUSED,
        ),
    })
}

/// It left memory; and why it is not on an SSD.
fn evicted(facts: &Explained, chunk: &str, last: &Event, write_back: Option<Event>) -> Verdict {
    let text = format!("{chunk} was evicted from memory {}: {}", ago(last.ago_s), room_for(last.why));
    match write_back {
        Some(event) if matches!(event.why, Absence::UsedOnce | Absence::OverBudget) => plain(
            Cause::NotAdmitted,
            format!("{text}. Admission had not let it to the SSD: {}.", in_words(event.why)),
            "Choose another write_back.policy or a larger endurance budget, if the SSD may wear.",
        ),
        Some(event) => plain(
            Cause::NotWrittenToSsd,
            format!("{text}. It was not written to the SSD: {}.", in_words(event.why)),
            "See write_back in docs/reference/configuration.md.",
        ),
        None if facts.ssd.is_none() => {
            plain(Cause::EvictedFromMemory, format!("{text}, and the node has no SSD."), MORE_ROOM)
        }
        None => plain(Cause::EvictedFromMemory, format!("{text}."), MORE_ROOM),
    }
}

fn room_for(why: Absence) -> &'static str {
    match why {
        Absence::EvictedForQuota => "its tenant's quota was used up",
        Absence::Demoted => "a client sent it to the SSD",
        _ => "others needed its room",
    }
}

fn in_words(why: Absence) -> &'static str {
    match why {
        Absence::Evicted => "it gave way to others",
        Absence::EvictedForQuota => "its tenant's quota was used up",
        Absence::Deleted => "it was deleted",
        Absence::Demoted => "a client sent it to the SSD",
        Absence::Corrupt => "its bytes did not match their checksums",
        Absence::NotWritten => "its write failed, or its writer gave it up or died",
        Absence::ParentMissing => "the chunk before it was not there",
        Absence::OtherTenant => "its id is another tenant's",
        Absence::TooLarge => "no chunk of its shape can be taken in (memory.largest_chunk)",
        Absence::Full => "there was no room, and all the rest was in use",
        Absence::QuotaFull => "its tenant's quota was used up by chunks in use",
        Absence::UsedOnce => "it had been used once only",
        Absence::OverBudget => "the SSD's endurance budget was used up",
        Absence::QueueFull => "too many chunks waited to be written",
        Absence::TooOld => "it had waited for too long",
        Absence::GoneBefore => "memory had evicted it before its turn came",
        Absence::NotTaken => "the SSD tier did not take it in",
    }
}

/// Another namespace has more of the prompt.
fn of_others(chosen: &Chosen<'_>, own: &Sequence, there: u32) -> Option<Verdict> {
    let differences = chosen.better(own, there)?;
    let differs = |names: &[&str]| differences.iter().any(|one| names.contains(&one.field.as_str()));
    let shown: Vec<String> = differences
        .iter()
        .map(|one| format!("{} is {} here and {} there", one.field, one.asked, one.stored))
        .collect();
    let (cause, what, action) = if differs(&["tenant"]) {
        (Cause::OtherTenant, "for another tenant", "A tenant loads its own chunks only.")
    } else if differs(&["weights", "model", "revision"]) {
        (Cause::OtherModel, "for another model", "Nothing: the KV of another model is of no use.")
    } else if differs(&["resets"]) {
        let what = "under the name that it had before the engine reset its cache";
        (
            Cause::Reset,
            what,
            "Nothing; `keep_on_reset` of the connector keeps it, if the weights are the same.",
        )
    } else {
        let what = "by an engine whose KV has another form";
        (Cause::OtherNamespace, what, "Run the engines with the same values, if they are to share KV.")
    };
    let text = format!("More of the prompt is stored {what}: {}.", shown.join(", "));
    Some(Verdict { differences, ..plain(cause, text, action) })
}

/// Nothing is remembered of the chunk, and nobody else has it.
fn of_nothing_known(facts: &Explained, own: &Sequence, missing: &Run, there: u32) -> Verdict {
    let chunk = named(own, missing.first);
    let before = own.runs.iter().take_while(|run| run.first < missing.first).last();
    if before.is_some_and(|run| run.is_continued) {
        let text = format!(
            "The first {there} chunks are there, and what is stored goes on otherwise: the first token that \
             differs is in {}.",
            chunk.replacen('C', "c", 1)
        );
        return plain(Cause::Diverges, text, "Put what changes (dates, names, ids) behind what is shared.");
    }
    let unreached: Vec<String> = facts
        .peers
        .iter()
        .filter_map(|peer| Some(format!("{} ({})", peer.name, peer.unreached.as_ref()?)))
        .collect();
    if !unreached.is_empty() {
        let text = format!(
            "{chunk} is not on this host, and these peers are not reached: {}.",
            unreached.join(", ")
        );
        return plain(Cause::PeerUnreached, text, "See the reasons in docs/node.md, \"Watching it\".");
    }
    let logs = [facts.memory.remembers_s, facts.ssd.and_then(|ssd| ssd.remembers_s)];
    match logs.into_iter().flatten().min() {
        None => {
            let text = format!("{chunk} was not stored here since the node started {}.", ago(facts.up_s));
            plain(Cause::NeverStored, text, STORE_IT)
        }
        Some(remembers_s) => {
            let text = format!(
                "{chunk} was never stored here, or left more than {remembers_s} s ago: the node remembers no \
                 more."
            );
            plain(Cause::Forgotten, text, MORE_ROOM)
        }
    }
}

fn ago(seconds: u32) -> String {
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        _ => format!("{} h ago", seconds / 3600),
    }
}

#[cfg(test)]
mod tests;
