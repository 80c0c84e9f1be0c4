//! Tests of what is counted of answers' times and of decisions.

use super::*;

/// Sends a request whose answer begins after 0.2 s and ends after 1 s.
fn serve_in_a_second(dispatcher: &mut Dispatcher, status: u16, is_stream: bool, end: End) {
    let prompt = routing(1, 400);
    let mut assignment = dispatcher.assign(0, &prompt, &[]).unwrap();
    dispatcher.first_byte(200_000, &mut assignment, status);
    if is_stream {
        assignment.is_streamed();
    }
    dispatcher.end(1_000_000, &prompt, assignment, end);
}

#[test]
fn whole_answers_are_timed_and_streams_by_their_tokens() {
    let mut dispatcher = dispatcher(Policy::Lpwl, &["a"], THREE);
    let answered = |status, completion_tokens| End::Answered {
        status,
        usage: Some(Usage { completion_tokens, ..SOME_USAGE }),
    };
    for (status, is_stream, end) in [
        (200, true, answered(200, 5)),
        // One token has no time of its own, and the tokens of a document come all at once.
        (200, true, answered(200, 1)),
        (200, false, answered(200, 5)),
        (200, true, End::Failed(Failure::ProgressTimeout)),
        (500, true, answered(500, 5)),
    ] {
        serve_in_a_second(&mut dispatcher, status, is_stream, end);
    }
    let stats = dispatcher.stats(0);
    let backend = &stats.backends[0];
    assert_eq!((backend.request_seconds.count(), backend.request_seconds.sum()), (3, 3.0));
    assert_eq!((backend.output_token_seconds.count(), backend.output_token_seconds.sum()), (1, 0.2));
    assert_eq!(backend.first_byte_seconds.count(), 4, "all that began without an error");
    let predicted_us = |entry: &Arc<Entry>| entry.predicted.first_byte_us;
    let predicted_us: u64 = dispatcher.decisions().iter().take(4).map(predicted_us).sum();
    assert!((backend.predicted_first_byte_seconds - predicted_us as f64 / 1e6).abs() < 1e-9);
    assert_eq!(stats.reasons[Reason::LowestScore as usize], 5);
}

#[test]
fn each_decision_is_counted_under_the_rule_that_settled_it() {
    let mut dispatcher = two(Policy::SessionSticky);
    for _ in 0..3 {
        serve(&mut dispatcher, &routing(1, 400), NO_USAGE);
    }
    let reasons = dispatcher.stats(0).reasons;
    assert_eq!((reasons[Reason::Turn as usize], reasons[Reason::Home as usize]), (1, 2));
    assert!(Reason::NAMES.iter().enumerate().all(|(at, (reason, _))| *reason as usize == at));
    for (reason, name) in Reason::NAMES {
        assert_eq!(serde_json::to_value(reason).unwrap(), name, "as the decision log has it");
    }
}
