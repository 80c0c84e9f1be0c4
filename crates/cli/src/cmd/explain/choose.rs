//! Which of the namespaces that a node knows is the one that is asked about, and in which fields
//! others differ from it. Pure.

use forebay_client::protocol::explain::{Place, Sequence};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Fields that differ between the ranks of one engine.
const OF_RANKS: [&str; 2] = ["tp", "pp"];
/// Fields that a reset of an engine's cache changes.
const OF_RESETS: [&str; 2] = ["salt", "resets"];

/// The namespace that is meant, and others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen<'a> {
    /// One for each rank; of the ranks, all are needed.
    pub own: Vec<&'a Sequence>,
    pub others: Vec<&'a Sequence>,
}

/// Why it is not known which is meant.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotChosen {
    #[error("--namespace: no client has described a namespace with {wanted}; there are: {there}")]
    None { wanted: String, there: String },
    #[error(
        "{groups} namespaces are known here; say which is meant with --namespace: they differ in {differ}"
    )]
    Several { groups: usize, differ: String },
}

/// A field that differs: its name, here and there.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Difference {
    pub field: String,
    pub asked: String,
    pub stored: String,
}

/// The sequences whose namespace has these facts.
pub fn choose<'a>(all: &'a [Sequence], wanted: &[(String, String)]) -> Result<Chosen<'a>, NotChosen> {
    let has = |one: &Sequence| wanted.iter().all(|(name, value)| facts(one).get(name) == Some(value));
    let mut groups: BTreeMap<BTreeMap<String, String>, Vec<&Sequence>> = BTreeMap::new();
    for one in all.iter().filter(|one| has(one) && !is_replaced(one, all)) {
        groups.entry(without(&facts(one), &OF_RANKS)).or_default().push(one);
    }
    if groups.is_empty() && !all.is_empty() {
        let wanted: Vec<String> = wanted.iter().map(|(name, value)| format!("{name}={value}")).collect();
        return Err(NotChosen::None { wanted: wanted.join(" "), there: differing(all.iter().map(facts)) });
    }
    if groups.len() > 1 {
        let differ = differing(groups.keys().cloned());
        return Err(NotChosen::Several { groups: groups.len(), differ });
    }
    let own: Vec<&Sequence> = groups.into_values().flatten().collect();
    let is_own = |one: &&Sequence| own.iter().any(|mine| std::ptr::eq(*mine, *one));
    let others = all.iter().filter(|one| !is_own(one)).collect();
    Ok(Chosen { own, others })
}

impl<'a> Chosen<'a> {
    /// The rank that has the least of the prompt, and how many of its first chunks are there.
    pub fn least(&self) -> Option<(&'a Sequence, u32)> {
        self.own.iter().map(|one| (*one, chunks_there(one))).min_by_key(|(_, there)| *there)
    }

    /// Another namespace that has more of the prompt than `there` chunks, and in what it differs
    /// from `own`: the one with most, and of those the most alike.
    pub fn better(&self, own: &Sequence, there: u32) -> Option<Vec<Difference>> {
        let more = self.others.iter().filter(|one| chunks_there(one) > there);
        let rank = |one: &&&Sequence| (std::cmp::Reverse(chunks_there(one)), differences(own, one).len());
        more.min_by_key(rank).map(|one| differences(own, one))
    }
}

/// How many chunks, from the first on, are somewhere.
pub fn chunks_there(one: &Sequence) -> u32 {
    one.runs.iter().take_while(|run| run.place != Place::Nowhere).map(|run| run.chunks).sum()
}

fn differences(own: &Sequence, other: &Sequence) -> Vec<Difference> {
    let (asked, stored) = (facts(own), facts(other));
    let names: BTreeSet<&String> = asked.keys().chain(stored.keys()).collect();
    let value = |facts: &BTreeMap<String, String>, name: &String| {
        facts.get(name).map_or("none", String::as_str).to_owned()
    };
    let difference = |name: &String| Difference {
        field: name.clone(),
        asked: value(&asked, name),
        stored: value(&stored, name),
    };
    names.into_iter().map(difference).filter(|one| one.asked != one.stored).collect()
}

/// All that tells a namespace from others.
fn facts(one: &Sequence) -> BTreeMap<String, String> {
    let mut facts = one.facts.clone();
    if let Some(tenant) = one.tenant {
        facts.insert("tenant".into(), tenant.to_string());
    }
    if one.chunk_tokens > 0 {
        facts.insert("chunk_tokens".into(), one.chunk_tokens.to_string());
    }
    facts
}

fn without(facts: &BTreeMap<String, String>, names: &[&str]) -> BTreeMap<String, String> {
    facts
        .iter()
        .filter(|(name, _)| !names.contains(&name.as_str()))
        .map(|(a, b)| (a.clone(), b.clone()))
        .collect()
}

/// Whether the engine has reset its cache since, and uses a later namespace that is else the same.
fn is_replaced(one: &Sequence, all: &[Sequence]) -> bool {
    let names = [OF_RANKS, OF_RESETS].concat();
    let number = |one: &Sequence| one.facts.get("resets").and_then(|resets| resets.parse::<u64>().ok());
    let is_later = |other: &&Sequence| number(other) > number(one) && other.client == one.client;
    number(one).is_some()
        && all
            .iter()
            .filter(is_later)
            .any(|other| without(&facts(other), &names) == without(&facts(one), &names))
}

/// The fields in which these differ, each with its values.
fn differing(all: impl Iterator<Item = BTreeMap<String, String>>) -> String {
    let mut values: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let all: Vec<BTreeMap<String, String>> = all.collect();
    let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    for (name, one) in names.iter().flat_map(|name| all.iter().map(move |one| (*name, one))) {
        values.entry(name.clone()).or_default().insert(one.get(name).cloned().unwrap_or("none".into()));
    }
    let shown = |(name, values): (String, BTreeSet<String>)| {
        let values: Vec<String> = values.into_iter().collect();
        (values.len() > 1).then(|| format!("{name} ({})", values.join(", ")))
    };
    values.into_iter().filter_map(shown).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_client::protocol::explain::Run;

    fn sequence(there: u32, facts: &[(&str, &str)]) -> Sequence {
        let run = |first, chunks, place| Run {
            first,
            chunks,
            place,
            owner: None,
            is_continued: false,
            events: Vec::new(),
        };
        Sequence {
            facts: facts.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            tenant: Some(0),
            client: "engine".into(),
            chunk_tokens: 64,
            chunks: 9,
            runs: vec![run(0, there, Place::Memory), run(there, 9 - there, Place::Nowhere)],
        }
    }

    fn wanted(name: &str, value: &str) -> [(String, String); 1] {
        [(name.into(), value.into())]
    }

    #[test]
    fn the_ranks_of_an_engine_are_one_namespace_and_the_rank_with_the_least_counts() {
        let all = [sequence(5, &[("tp", "0/2")]), sequence(3, &[("tp", "1/2")])];
        let chosen = choose(&all, &[]).unwrap();
        assert_eq!((chosen.own.len(), chosen.others.len()), (2, 0));
        assert_eq!(chosen.least(), Some((&all[1], 3)));
        assert_eq!(choose(&[], &[]), Ok(Chosen { own: vec![], others: vec![] }));
    }

    #[test]
    fn what_is_meant_has_to_be_said_where_it_is_not_clear_and_in_words_that_are_known() {
        let all = [sequence(0, &[("dtype", "fp8"), ("lora", "none")]), sequence(4, &[("dtype", "bf16")])];
        let several = choose(&all, &[]).unwrap_err();
        assert_eq!(several, NotChosen::Several { groups: 2, differ: "dtype (bf16, fp8)".into() });
        let none = choose(&all, &wanted("dtype", "fp16")).unwrap_err().to_string();
        assert!(none.contains("dtype=fp16") && none.contains("dtype (bf16, fp8)"), "{none}");
        let chosen = choose(&all, &wanted("dtype", "fp8")).unwrap();
        let (own, there) = chosen.least().unwrap();
        let better = chosen.better(own, there).unwrap();
        assert_eq!(better.iter().map(|one| one.field.as_str()).collect::<Vec<_>>(), ["dtype"]);
        assert_eq!(chosen.better(own, 4), None);
    }

    #[test]
    fn of_an_engine_that_reset_its_cache_the_last_namespace_is_meant() {
        let all =
            [sequence(4, &[("salt", "a"), ("resets", "0")]), sequence(0, &[("salt", "b"), ("resets", "1")])];
        let chosen = choose(&all, &[]).unwrap();
        assert_eq!((chosen.own, chosen.others), (vec![&all[1]], vec![&all[0]]));
    }
}
