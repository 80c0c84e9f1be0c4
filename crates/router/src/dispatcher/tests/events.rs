//! Tests of what engines' events say of their caches: they lower what is believed to be held.

use super::*;
use crate::rank_events::{Counts, Dropped, Held, Report, Unknown};
use crate::reported_cache::Noted;

/// What a rank reports that holds so many tokens, of so many that fit, if that is known, and to
/// which so many came.
fn report(stored_tokens: u64, tokens: u64, room_tokens: Option<u64>) -> Report {
    let held = Held { blocks: tokens / 16, tokens, room_tokens };
    Report { emptied: false, stored_tokens, held: Ok(held), counts: Counts::default() }
}

fn told(dispatcher: &mut Dispatcher, report: &Report) -> Noted {
    dispatcher.noted_events(0, 0, 0, 1, report)
}

/// How many tokens of a prompt the first engine is believed to hold.
fn hit(dispatcher: &Dispatcher, routing: &RoutingFacts) -> u64 {
    known(dispatcher, routing)[0].0
}

#[test]
fn an_engine_whose_events_say_that_it_was_emptied_is_believed_to_hold_nothing() {
    let mut dispatcher = two(Policy::Lpwl);
    let prompt = routing(1, 40_960);
    assert_eq!(serve(&mut dispatcher, &prompt, NO_USAGE), 0);
    told(&mut dispatcher, &report(10_240, 10_240, None));
    assert_eq!(hit(&dispatcher, &prompt), 10_240);
    told(&mut dispatcher, &Report { emptied: true, ..report(0, 0, None) });
    assert_eq!(hit(&dispatcher, &prompt), 0);
}

#[test]
fn what_others_made_an_engine_evict_is_not_believed_to_be_there() {
    let mut dispatcher = two(Policy::Lpwl);
    let prompt = routing(1, 40_960);
    serve(&mut dispatcher, &prompt, NO_USAGE);
    told(&mut dispatcher, &report(10_240, 10_240, None));
    told(&mut dispatcher, &report(10_240, 20_480, None));
    assert_eq!(hit(&dispatcher, &prompt), 10_240, "it has evicted nothing");
    told(&mut dispatcher, &report(15_360, 20_480, Some(20_480)));
    assert!(hit(&dispatcher, &prompt) < 1_024 + 20_480 / 8, "25,600 tokens came after it");
}

#[test]
fn what_others_bring_in_small_steps_ages_what_is_there_as_what_they_bring_at_once() {
    let hits = [(1, 32_000), (1_000, 32)].map(|(reports, tokens)| {
        let mut dispatcher = dispatcher(Policy::Lpwl, &["a"], THREE);
        let prompt = routing(1, 40_960);
        serve(&mut dispatcher, &prompt, NO_USAGE);
        told(&mut dispatcher, &report(10_240, 32_768, Some(32_768)));
        for _ in 0..reports {
            told(&mut dispatcher, &report(tokens, 32_768, Some(32_768)));
        }
        hit(&dispatcher, &prompt)
    });
    assert!(hits[0] == hits[1] && (1..10_240).contains(&hits[0]), "{hits:?}");
}

#[test]
fn what_the_router_sent_while_nothing_was_known_does_not_hide_what_others_bring() {
    let mut dispatcher = dispatcher(Policy::Lpwl, &["a"], THREE);
    let prompt = routing(1, 40_960);
    let full = report(0, 20_480, Some(20_480));
    told(&mut dispatcher, &Report { held: Err(Unknown::Gap), ..full });
    serve(&mut dispatcher, &prompt, NO_USAGE);
    told(&mut dispatcher, &full);
    assert_eq!(hit(&dispatcher, &prompt), 10_240);
    told(&mut dispatcher, &Report { stored_tokens: 23_552, ..full });
    assert_eq!(hit(&dispatcher, &prompt), 0);
}

#[test]
fn what_the_router_itself_sent_ages_what_is_there_once() {
    let mut dispatcher = dispatcher(Policy::Lpwl, &["a"], THREE);
    let prompts = [1, 2, 3].map(|session| routing(session, 40_960));
    for prompt in &prompts {
        serve(&mut dispatcher, prompt, NO_USAGE);
        told(&mut dispatcher, &report(10_240, 30_720, Some(30_720)));
    }
    assert_eq!(prompts.map(|prompt| hit(&dispatcher, &prompt)), [10_240; 3]);
}

#[test]
fn without_room_for_it_a_prompt_is_not_believed_to_be_there_also_where_answers_do_not_say_it() {
    let mut dispatcher = dispatcher(Policy::Lpwl, &["a"], THREE);
    let prompts = [1, 2, 3, 4].map(|session| routing(session, 40_960));
    for prompt in &prompts {
        serve(&mut dispatcher, prompt, NO_USAGE);
        told(&mut dispatcher, &report(10_240, 20_480, Some(20_480)));
    }
    let hits = prompts.map(|prompt| hit(&dispatcher, &prompt));
    assert_eq!((hits[0], hits[3]), (0, 10_240), "{hits:?}");
}

#[test]
fn what_an_engine_computes_with_is_not_evicted_meanwhile() {
    let mut dispatcher = dispatcher(Policy::Lpwl, &["a"], THREE);
    let prompt = routing(1, 40_960);
    told(&mut dispatcher, &report(0, 20_480, Some(20_480)));
    let mut assignment = dispatcher.assign(0, &prompt, &[]).unwrap();
    dispatcher.first_byte(1, &mut assignment, 200);
    told(&mut dispatcher, &report(10_240 + 90_000, 20_480, Some(20_480)));
    dispatcher.end(0, &prompt, assignment, NO_USAGE);
    assert_eq!(hit(&dispatcher, &prompt), 10_240);
}

#[test]
fn events_that_are_unknown_or_contradicted_lower_nothing() {
    let mut dispatcher = dispatcher(Policy::Lpwl, &["a"], THREE);
    let prompt = routing(1, 40_960);
    let small = report(0, 16, Some(16));
    serve(&mut dispatcher, &prompt, NO_USAGE);
    told(&mut dispatcher, &small);
    assert_eq!(hit(&dispatcher, &prompt), 512, "four chunks of slack");
    told(&mut dispatcher, &Report { held: Err(Unknown::Gap), ..small });
    assert_eq!(hit(&dispatcher, &prompt), 10_240);
    told(&mut dispatcher, &small);
    for _ in 0..3 {
        serve(&mut dispatcher, &prompt, answered(10_240, 10_000));
    }
    assert_eq!(hit(&dispatcher, &prompt), 10_240);
    let batches = Counts { batches: 2, ..Counts::default() };
    assert!(told(&mut dispatcher, &Report { emptied: true, counts: batches, ..small }).is_doubted);
    assert_eq!(hit(&dispatcher, &prompt), 10_240);
    let stats = &dispatcher.stats(0).backends[0];
    assert_eq!((stats.kv_events_followed, stats.kv_live_blocks), (false, 0));
    assert_eq!(stats.kv_events.dropped[Dropped::Contradicted as usize], 2);
}

proptest! {
    #[test]
    fn events_only_lower_what_is_believed(
        sent in prop::collection::vec((1..6_u64, 1..60_usize), 1..20),
        reports in prop::collection::vec((any::<u64>(), any::<u64>(), prop::option::of(any::<u64>())), 20),
    ) {
        let (mut with, mut without) = (two(Policy::RoundRobin), two(Policy::RoundRobin));
        for ((session, chunks), (stored, tokens, room)) in sent.into_iter().zip(reports) {
            let prompt = routing(session, chunks * CHUNK_BYTES);
            prop_assert!(hit(&with, &prompt) <= hit(&without, &prompt));
            serve(&mut with, &prompt, NO_USAGE);
            serve(&mut without, &prompt, NO_USAGE);
            told(&mut with, &report(stored, tokens, room));
        }
    }
}
