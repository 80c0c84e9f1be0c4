//! An explanation on the terminal and as JSON. This file arranges words.

use super::choose::Chosen;
use super::verdict::Verdict;
use forebay_client::protocol::explain::{Explained, Place, Run, Sequence};
use std::path::Path;

pub fn as_json(node: &Path, explained: &Explained, chosen: &Chosen<'_>, verdict: &Verdict) {
    let own: Vec<&Sequence> = chosen.own.clone();
    let all = serde_json::json!({ "node": node, "verdict": verdict, "own": own, "facts": explained });
    println!("{all:#}");
}

pub fn as_text(explained: &Explained, chosen: &Chosen<'_>, verdict: &Verdict) {
    for outcome in explained.requests.iter().take(1) {
        let [memory, disk, peers] = outcome.found;
        println!(
            "request {}: {} tokens, {} held by the engine, {} loaded; chunks found: memory {memory}, SSD \
             {disk}, peers {peers}; {}",
            outcome.request,
            outcome.prompt_tokens,
            outcome.held_tokens,
            outcome.loaded_tokens,
            outcome.reason
        );
    }
    for sequence in &chosen.own {
        if !sequence.facts.is_empty() {
            println!("{}, of client {}", facts_of(sequence), sequence.client);
        }
        sequence.runs.iter().for_each(|run| println!("  {}", line_of(run)));
    }
    println!("{}", verdict.text);
    println!("  {}", verdict.action);
}

fn facts_of(sequence: &Sequence) -> String {
    let short = |(name, value): (&String, &String)| {
        (!name.starts_with("attention.") && value != "none").then(|| format!("{name}={value}"))
    };
    let facts: Vec<String> = sequence.facts.iter().filter_map(short).collect();
    format!("{} tenant={}", facts.join(" "), sequence.tenant.unwrap_or_default())
}

fn line_of(run: &Run) -> String {
    let chunks = match run.chunks {
        1 => format!("chunk {}", run.first),
        more => format!("chunks {} to {}", run.first, run.first + more - 1),
    };
    let place = match run.place {
        Place::Memory => "in memory",
        Place::Disk => "on the SSD",
        Place::Peer => "at a peer",
        Place::Nowhere => "nowhere",
    };
    let event = |event: &forebay_client::protocol::explain::Event| {
        let [at, why] = [serde_json::json!(event.at), serde_json::json!(event.why)];
        format!("{} {} {} s ago", at.as_str().unwrap_or(""), why.as_str().unwrap_or(""), event.ago_s)
    };
    let events: Vec<String> = run.events.iter().map(event).collect();
    match events.is_empty() {
        true => format!("{chunks:<18} {place}"),
        false => format!("{chunks:<18} {place}: {}", events.join(", ")),
    }
}
