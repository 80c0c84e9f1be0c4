//! What must hold of [`Health`] whatever comes, and the transitions one by one.

use super::*;
use proptest::prelude::*;

const THREE: Thresholds = Thresholds { eject_after: 3, readmit_after: 1 };

/// What a health is told.
#[derive(Debug, Clone, Copy)]
enum Told {
    Answered,
    Failed(Failure),
    ProbeAnswered,
    ProbeFailed(Failure),
}

fn tell(health: &mut Health, told: Told) -> Option<Change> {
    match told {
        Told::Answered => {
            health.answered();
            None
        }
        Told::Failed(failure) => health.failed(failure),
        Told::ProbeAnswered => health.probe_answered(),
        Told::ProbeFailed(failure) => health.probe_failed(failure),
    }
}

fn ejected(cause: Cause, last: Failure) -> Option<Change> {
    Some(Change::Ejected { cause, last })
}

#[test]
fn each_story_ends_as_the_table_says() {
    use Failure::*;
    use Told::*;
    let slow = Failed(FirstByteTimeout);
    let lost = ProbeFailed(FirstByteTimeout);
    let sick = ProbeFailed(Unavailable);
    // (what is told, the last change, is it up)
    let table: Vec<(&str, Vec<Told>, Option<Change>)> = vec![
        ("failures in a row", vec![Failed(Closed); 3], ejected(Cause::Failing, Closed)),
        ("not in a row", vec![Failed(Closed), Failed(Closed), Answered, Failed(Closed)], None),
        ("a refused connection", vec![Failed(Refused)], ejected(Cause::Gone, Refused)),
        ("a refused probe", vec![ProbeFailed(Refused)], ejected(Cause::Gone, Refused)),
        ("statuses of 500", vec![Failed(ServerError); 3], ejected(Cause::Failing, ServerError)),
        ("statuses of 503", vec![Failed(Unavailable); 3], ejected(Cause::Failing, Unavailable)),
        ("statuses of 429", vec![Failed(TooManyRequests); 3], ejected(Cause::Failing, TooManyRequests)),
        ("statuses of 404", vec![Failed(NotFound); 9], None),
        ("idle connections closed", vec![Failed(ClosedKept); 9], None),
        ("slow answers while probes are answered", vec![slow; 9], None),
        (
            "slow answers when a probe fails",
            vec![lost, slow, slow],
            ejected(Cause::Failing, FirstByteTimeout),
        ),
        ("probes that time out", vec![lost; 3], ejected(Cause::Silent, FirstByteTimeout)),
        ("probes that say 503", vec![sick; 3], ejected(Cause::Unwell, Unavailable)),
        (
            "answers do not excuse probes",
            vec![lost, Answered, lost, Answered, lost],
            ejected(Cause::Silent, FirstByteTimeout),
        ),
        (
            "probes do not excuse failures",
            vec![Failed(ServerError), ProbeAnswered, Failed(ServerError), ProbeAnswered, Failed(ServerError)],
            ejected(Cause::Failing, ServerError),
        ),
        (
            "a failing engine whose process ends",
            [vec![Failed(Closed); 3], vec![ProbeFailed(Refused)]].concat(),
            Some(Change::StillDown { cause: Cause::Gone }),
        ),
    ];
    for (story, told, wanted) in table {
        let mut health = Health::new(THREE);
        let last = told.into_iter().map(|told| tell(&mut health, told)).last().unwrap();
        assert_eq!(last, wanted, "{story}");
        assert_eq!(health.is_up(), wanted.is_none(), "{story}");
    }
}

#[test]
fn only_probes_bring_an_engine_back() {
    let mut health = Health::new(Thresholds { eject_after: 1, readmit_after: 2 });
    health.probe_failed(Failure::Refused);
    health.answered();
    assert!(!health.is_up());
    assert_eq!(health.probe_answered(), None);
    assert_eq!(health.probe_answered(), Some(Change::Readmitted));
    assert_eq!(health.probe_answered(), None);
}

#[test]
fn an_engine_that_fails_after_each_return_is_tried_less_and_less_often() {
    let mut health = Health::new(THREE);
    let mut waits = Vec::new();
    for _ in 0..8 {
        while health.is_up() {
            health.failed(Failure::ServerError);
        }
        let mut probes = 0;
        while !health.is_up() {
            health.probe_answered();
            probes += 1;
        }
        waits.push(probes);
    }
    assert_eq!(waits, [2, 4, 8, 16, 32, 64, 64, 64]);
    assert!(health.failed(Failure::ServerError).is_some(), "it is on trial");
    health.answered();
    health.probe_answered();
    assert!(health.is_up(), "one good answer ends the trial");
    assert_eq!(health.failed(Failure::ServerError), None);
}

#[test]
fn an_engine_whose_probes_are_answered_stays_a_last_resort() {
    let mut health = Health::new(THREE);
    for _ in 0..3 {
        health.failed(Failure::ServerError);
    }
    assert!(!health.is_up() && health.is_last_resort());
    for _ in 0..3 {
        health.probe_failed(Failure::FirstByteTimeout);
    }
    assert!(!health.is_last_resort() && health.is_silent());
}

#[test]
fn what_is_unwell_may_still_answer_and_what_is_silent_may_not() {
    for (failure, silent) in
        [(Failure::Unavailable, false), (Failure::Refused, false), (Failure::Closed, true)]
    {
        let mut health = Health::new(THREE);
        for _ in 0..3 {
            health.probe_failed(failure);
        }
        assert_eq!((health.is_up(), health.is_silent()), (false, silent), "{failure:?}");
    }
}

#[test]
fn a_failure_has_the_name_that_records_give_it() {
    for (failure, name) in Failure::NAMES {
        assert_eq!((failure.name(), serde_json::json!(failure)), (name, serde_json::json!(name)));
    }
}

fn any_told() -> impl Strategy<Value = Told> {
    let failure = || prop::sample::select(Failure::NAMES.map(|(failure, _)| failure).to_vec());
    prop_oneof![
        Just(Told::Answered),
        Just(Told::ProbeAnswered),
        failure().prop_map(Told::Failed),
        failure().prop_map(Told::ProbeFailed),
    ]
}

fn any_thresholds() -> impl Strategy<Value = Thresholds> {
    (1..6_u32, 1..4_u32).prop_map(|(eject_after, readmit_after)| Thresholds { eject_after, readmit_after })
}

proptest! {
    #[test]
    fn changes_are_told_exactly_when_the_state_changes(
        thresholds in any_thresholds(),
        story in prop::collection::vec(any_told(), 0..80),
    ) {
        let mut health = Health::new(thresholds);
        for told in story {
            let was_up = health.is_up();
            match tell(&mut health, told) {
                Some(Change::Ejected { .. }) => prop_assert!(was_up && !health.is_up()),
                Some(Change::Readmitted) => prop_assert!(!was_up && health.is_up()),
                Some(Change::StillDown { .. }) => prop_assert!(!was_up && !health.is_up()),
                None => prop_assert_eq!(was_up, health.is_up()),
            }
        }
    }

    #[test]
    fn probes_that_fail_in_a_row_eject_whatever_requests_do(
        thresholds in any_thresholds(),
        before in prop::collection::vec(any_told(), 0..40),
        between in prop::collection::vec(any_told(), 5),
        failure in prop::sample::select(Failure::NAMES.map(|(failure, _)| failure).to_vec()),
    ) {
        let mut health = Health::new(thresholds);
        for told in before {
            tell(&mut health, told);
        }
        for told in between.into_iter().take(thresholds.eject_after as usize) {
            if matches!(told, Told::Answered | Told::Failed(_)) {
                tell(&mut health, told);
            }
            tell(&mut health, Told::ProbeFailed(failure));
        }
        prop_assert!(!health.is_up());
    }

    #[test]
    fn requests_that_fail_in_a_row_eject_whatever_probes_say(
        thresholds in any_thresholds(),
        probes in prop::collection::vec(any::<bool>(), 5),
    ) {
        let mut health = Health::new(thresholds);
        for answered in probes.into_iter().take(thresholds.eject_after as usize) {
            if !health.is_up() {
                break;
            }
            let probe = if answered { Told::ProbeAnswered } else { Told::ProbeFailed(Failure::Closed) };
            tell(&mut health, probe);
            tell(&mut health, Told::Failed(Failure::ServerError));
        }
        prop_assert!(!health.is_up());
    }

    #[test]
    fn slow_answers_alone_never_eject(
        thresholds in any_thresholds(),
        story in prop::collection::vec(0..4_u8, 0..80),
    ) {
        let mut health = Health::new(thresholds);
        for told in story {
            tell(&mut health, match told {
                0 => Told::Answered,
                1 => Told::ProbeAnswered,
                2 => Told::Failed(Failure::FirstByteTimeout),
                _ => Told::Failed(Failure::ProgressTimeout),
            });
            prop_assert!(health.is_up());
        }
    }

    #[test]
    fn an_engine_whose_probes_are_answered_comes_back_in_a_bounded_number_of_them(
        thresholds in any_thresholds(),
        story in prop::collection::vec(any_told(), 0..200),
    ) {
        let mut health = Health::new(thresholds);
        for told in story {
            tell(&mut health, told);
        }
        for _ in 0..LAST_TRIAL_PROBES.max(thresholds.readmit_after) {
            health.probe_answered();
        }
        prop_assert!(health.is_up());
    }
}
