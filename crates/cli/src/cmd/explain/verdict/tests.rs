use super::super::choose::choose;
use super::*;
use forebay_client::protocol::explain::PeerFacts;

fn event(at: Step, why: Absence, ago_s: u32) -> Event {
    Event { at, why, ago_s }
}

/// A prompt of four chunks, of which two are there; the rest is not, for these reasons.
fn two_of_four(events: &[Event]) -> Sequence {
    let run =
        |first, place, events| Run { first, chunks: 2, place, owner: None, is_continued: false, events };
    Sequence {
        chunk_tokens: 64,
        chunks: 4,
        tenant: Some(0),
        runs: vec![run(0, Place::Memory, vec![]), run(2, Place::Nowhere, events.to_vec())],
        ..Sequence::default()
    }
}

fn verdict_of(sequences: Vec<Sequence>, wanted: &[(&str, &str)], facts: Explained) -> Verdict {
    let facts = Explained { sequences, ..facts };
    let wanted: Vec<_> = wanted.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    judge(&facts, &choose(&facts.sequences, &wanted).unwrap())
}

fn cause_of(events: &[Event]) -> Cause {
    verdict_of(vec![two_of_four(events)], &[], Explained::default()).cause
}

#[test]
fn what_happened_to_a_chunk_last_is_why_it_is_not_there() {
    let evicted = event(Step::Memory, Absence::Evicted, 9);
    for (events, cause) in [
        (vec![], Cause::NeverStored),
        (vec![evicted], Cause::EvictedFromMemory),
        (vec![evicted, event(Step::WriteBack, Absence::UsedOnce, 30)], Cause::NotAdmitted),
        (vec![evicted, event(Step::WriteBack, Absence::OverBudget, 30)], Cause::NotAdmitted),
        (vec![evicted, event(Step::WriteBack, Absence::TooOld, 8)], Cause::NotWrittenToSsd),
        (vec![evicted, event(Step::Disk, Absence::Evicted, 2)], Cause::EvictedFromSsd),
        (
            vec![event(Step::Memory, Absence::Corrupt, 1), event(Step::Disk, Absence::Evicted, 2)],
            Cause::Corrupt,
        ),
        (vec![event(Step::Memory, Absence::Deleted, 1)], Cause::Deleted),
        (vec![event(Step::Memory, Absence::TooLarge, 1)], Cause::Refused),
    ] {
        assert_eq!(cause_of(&events), cause, "{events:?}");
    }
}

#[test]
fn the_first_chunk_that_is_missing_is_named_with_its_tokens() {
    let verdict = verdict_of(vec![two_of_four(&[])], &[], Explained::default());
    assert_eq!(verdict.chunk, Some(2));
    assert!(verdict.text.contains("Chunk 2 (tokens 128 to 191)"), "{}", verdict.text);
}

#[test]
fn what_another_namespace_has_is_told_with_the_fields_that_differ() {
    for (field, cause) in
        [("dtype", Cause::OtherNamespace), ("weights", Cause::OtherModel), ("revision", Cause::OtherModel)]
    {
        let with = |value: &str| {
            let mut one = two_of_four(&[]);
            one.facts.insert(field.into(), value.into());
            one
        };
        let (mut other, own) = (with("b"), with("a"));
        other.runs[1].place = Place::Memory;
        let verdict = verdict_of(vec![other, own], &[(field, "a")], Explained::default());
        assert_eq!(verdict.cause, cause, "{field}");
        assert!(verdict.text.contains(&format!("{field} is a here and b there")), "{}", verdict.text);
    }
}

#[test]
fn another_way_on_comes_before_peers_that_are_not_reached_and_those_before_never() {
    let unreached = Some("refused: nobody listens".to_owned());
    let peers = vec![PeerFacts { name: "right".into(), state: "resting".into(), unreached }];
    let facts = Explained { peers, ..Explained::default() };
    let mut sequence = two_of_four(&[]);
    let verdict = verdict_of(vec![sequence.clone()], &[], facts.clone());
    assert_eq!(verdict.cause, Cause::PeerUnreached);
    assert!(verdict.text.contains("right (refused: nobody listens)"), "{}", verdict.text);
    sequence.runs[0].is_continued = true;
    assert_eq!(verdict_of(vec![sequence], &[], facts).cause, Cause::Diverges);
}

#[test]
fn what_the_engine_says_of_a_request_comes_first_unless_it_found_nothing() {
    let said = |reason: &str| {
        let outcome = Outcome { request: "cmpl-1".into(), reason: reason.into(), ..Outcome::default() };
        let facts = Explained { requests: vec![outcome], ..Explained::default() };
        verdict_of(vec![two_of_four(&[event(Step::Memory, Absence::Evicted, 9)])], &[], facts).cause
    };
    assert_eq!(said("computing_is_faster"), Cause::ComputingIsFaster);
    assert_eq!(said("load_failed"), Cause::LoadFailed);
    assert_eq!(said("left_alone"), Cause::NotAsked);
    assert_eq!(said("not_found"), Cause::EvictedFromMemory);
}

#[test]
fn what_a_node_may_have_forgotten_is_not_said_never_to_have_been_there() {
    let mut facts = Explained::default();
    facts.memory.remembers_s = Some(77);
    let verdict = verdict_of(vec![two_of_four(&[])], &[], facts);
    assert_eq!(verdict.cause, Cause::Forgotten);
    assert!(verdict.text.contains("more than 77 s ago"), "{}", verdict.text);
}
