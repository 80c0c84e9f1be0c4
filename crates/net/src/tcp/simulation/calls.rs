//! What calls promise, whatever happens to the wire, and that operations do not notice them.

use super::super::frame::{CALL_BYTES_MAX, CALLS_MAX};
use super::*;

#[test]
fn every_call_is_answered_with_its_own_answer_among_operations() {
    for seed in 0..20 {
        let world = run(seed, 4, 150, |_| {});
        assert_eq!((&world.asking_broken, &world.owning_broken), (&None, &None));
        assert_eq!(moved(&world), 4);
        let asked: Vec<_> = bodies(seed, 150).into_iter().map(|body| (identity(1), body)).collect();
        assert!(*world.mirror.called.lock() == asked, "each was asked once, in order");
    }
}

#[test]
fn a_call_that_takes_too_long_is_late_and_its_answer_comes_after_its_end() {
    let mut world = World::new(3);
    world.steps(100);
    let kept = vec![2; 10];
    for _ in 0..CALLS_MAX {
        world.asking.role.call(world.now_us, kept.clone(), 1_000_000);
    }
    world.steps(100);
    // As many as may be are unanswered: this one waits, and is late as well.
    world.asking.role.call(world.now_us, vec![0; 10], 500_000);
    world.steps(100);
    assert_eq!(world.mirror.called.lock().len(), usize::from(CALLS_MAX));
    world.now_us += 1_000_000;
    world.steps(100);
    assert_eq!(world.replies.len(), usize::from(CALLS_MAX) + 1);
    let late = |end: &CallEnd| matches!(end, Err(CallError::Late { limit_us: 1_000_000 | 500_000 }));
    assert!(world.replies.values().all(late), "{:?}", world.replies);
    // The answers come after all. The flow is good, and there is room for calls again.
    world.answer_kept();
    let next = world.asking.role.call(world.now_us, vec![3, 4], CALL_LIMIT_US);
    world.run_calls(usize::from(CALLS_MAX) + 2);
    assert_eq!(world.replies[&next], Ok(vec![4, 3]));
    let answered = world.replies.values().filter(|end| **end == Ok(mirrored(&kept))).count();
    assert_eq!(answered, usize::from(CALLS_MAX));
    assert_eq!((&world.asking_broken, &world.owning_broken), (&None, &None));
}

#[test]
fn a_service_may_take_longer_than_a_frozen_peer_may() {
    let mut world = World::new(3);
    let call = world.asking.role.call(0, vec![2, 9], u64::MAX);
    for _ in 0..200 {
        world.steps(10);
        world.now_us += LIMIT_US / 2;
    }
    assert_eq!((world.asking_broken.as_ref(), world.replies.len()), (None, 0));
    world.answer_kept();
    world.run_calls(1);
    assert_eq!(world.replies[&call], Ok(vec![9, 2]));
}

#[test]
fn a_frozen_peer_is_found_by_a_call_in_time() {
    let mut world = World::new(3);
    world.steps(100);
    world.asking.role.call(world.now_us, vec![0], u64::MAX);
    let frozen_us = world.now_us;
    while world.replies.is_empty() {
        world.now_us += 10_000;
        world.step_asking();
        assert!(world.now_us < frozen_us + LIMIT_US + 100_000, "not found");
    }
    assert_eq!(world.replies[&1], Err(CallError::Broken(Broken::Frozen { limit_us: LIMIT_US })));
}

#[test]
fn the_longest_call_is_answered_and_a_longer_one_ends_by_itself() {
    let mut world = World::new(6);
    let longest = vec![0; CALL_BYTES_MAX as usize];
    world.asking.role.call(0, longest.clone(), CALL_LIMIT_US);
    world.asking.role.call(0, vec![0; CALL_BYTES_MAX as usize + 1], CALL_LIMIT_US);
    world.run_calls(2);
    assert_eq!(world.replies[&1], Ok(longest));
    assert_eq!(world.replies[&2], Err(CallError::TooLong { bytes: CALL_BYTES_MAX as usize + 1 }));
    assert_eq!(world.asking_broken, None);
}
