//! What calls promise, whatever happens to the wire, and that operations do not notice them.

use super::super::frame::{CALL_BYTES_MAX, CALLS_MAX};
use super::*;

const CALL_LIMIT_US: u64 = 60_000_000;

/// Bodies of many lengths. The first byte says how the peer answers.
fn bodies(seed: u64, count: u64) -> Vec<Vec<u8>> {
    let mut dice = SplitMix(seed);
    let body = |number: u64| {
        let len = [0, 1, 300, 40_000][dice.below(4) as usize] + dice.below(2);
        (0..len).map(|at| (number + at) as u8).collect()
    };
    (0..count).map(body).collect()
}

/// Operations with calls in between, and what was asked. Every call and every operation has ended
/// once, as it should.
fn run_with_calls(seed: u64, count: u64, mischief: impl FnOnce(&mut World)) -> World {
    let mut world = World::new(seed);
    let (plans, mut bodies) = (plans(seed, 4), bodies(seed, count));
    let before = (bytes(&world.ours), bytes(&world.theirs));
    mischief(&mut world);
    for plan in &plans {
        world.submit(plan, u64::MAX);
    }
    let mut called = 0;
    // A flow that has ended takes no calls in.
    while world.asking_broken.is_none() && called < bodies.len() {
        let now_us = world.now_us;
        world.asking.role.call(now_us, bodies[called].clone(), CALL_LIMIT_US);
        called += 1;
        world.step();
    }
    bodies.truncate(called);
    run_calls(&mut world, called);
    world.run(plans.len());
    judge(&world, (&before.0, &before.1), &plans);
    for (number, body) in (1..).zip(&bodies) {
        match (&world.replies[&number], body.first().map_or(0, |byte| byte % 3)) {
            (Ok(reply), 0 | 2) => assert!(*reply == mirrored(body), "call {number}"),
            (Err(CallError::Refused(why)), 1) => assert_eq!(*why, format!("{} bytes", body.len())),
            (Err(CallError::Broken(broken)), _) => assert_eq!(Some(broken), world.asking_broken.as_ref()),
            (end, kind) => panic!("call {number}, kind {kind}: {end:?}"),
        }
    }
    world
}

fn run_calls(world: &mut World, count: usize) {
    for step in 0..1_000_000 {
        if world.replies.len() >= count {
            return;
        }
        world.answer_kept();
        world.step();
        if step > 20_000 {
            world.now_us += 1_000_000;
        }
    }
    panic!("{} of {count} calls ended", world.replies.len());
}

#[test]
fn every_call_is_answered_with_its_own_answer_among_operations() {
    for seed in 0..20 {
        let world = run_with_calls(seed, 150, |_| {});
        assert_eq!((&world.asking_broken, &world.owning_broken), (&None, &None));
        assert_eq!(moved(&world), 4);
        let asked: Vec<_> = bodies(seed, 150).into_iter().map(|body| (identity(1), body)).collect();
        assert!(*world.mirror.called.lock() == asked, "each was asked once, in order");
    }
}

#[test]
fn a_connection_lost_at_any_byte_ends_each_call_once() {
    let whole = run_with_calls(7, 12, |_| {});
    let carried = |pipe: &Shared| pipe.lock().carried;
    let mut dice = SplitMix(3);
    for (end, carried) in
        [carried(&whole.asking_end.out), carried(&whole.asking_end.back)].into_iter().enumerate()
    {
        // Every byte of the greetings and the first frames, then random ones.
        for at in (0..300).chain((0..80).map(|_| dice.below(carried))) {
            let world = run_with_calls(7, 12, |world| {
                let pipe = if end == 0 { &world.asking_end.out } else { &world.asking_end.back };
                pipe.lock().cut_at = Some(at);
            });
            assert!(world.asking_broken.is_some() || world.replies.len() == 12);
        }
    }
}

#[test]
fn a_flipped_bit_is_never_taken_for_an_answer() {
    for seed in 0..150u64 {
        let at = if seed % 3 == 0 { seed } else { SplitMix(seed).below(1 << 18) };
        run_with_calls(11, 12, |world| {
            let pipe = if seed % 2 == 0 { &world.asking_end.out } else { &world.asking_end.back };
            pipe.lock().flip_at = Some(at);
        });
    }
}

#[test]
fn a_call_that_takes_too_long_is_late_and_its_answer_comes_after_its_end() {
    let mut world = World::new(3);
    (0..100).for_each(|_| world.step());
    let kept = vec![2; 10];
    for _ in 0..CALLS_MAX {
        world.asking.role.call(world.now_us, kept.clone(), 1_000_000);
    }
    (0..100).for_each(|_| world.step());
    // As many as may be are unanswered: this one waits, and is late as well.
    world.asking.role.call(world.now_us, vec![0; 10], 500_000);
    (0..100).for_each(|_| world.step());
    assert_eq!(world.mirror.called.lock().len(), usize::from(CALLS_MAX));
    world.now_us += 1_000_000;
    (0..100).for_each(|_| world.step());
    assert_eq!(world.replies.len(), usize::from(CALLS_MAX) + 1);
    let late = |end: &CallEnd| matches!(end, Err(CallError::Late { limit_us: 1_000_000 | 500_000 }));
    assert!(world.replies.values().all(late), "{:?}", world.replies);
    // The answers come after all. The flow is good, and there is room for calls again.
    world.answer_kept();
    let next = world.asking.role.call(world.now_us, vec![3, 4], CALL_LIMIT_US);
    run_calls(&mut world, usize::from(CALLS_MAX) + 2);
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
        (0..10).for_each(|_| world.step());
        world.now_us += LIMIT_US / 2;
    }
    assert_eq!((world.asking_broken.as_ref(), world.replies.len()), (None, 0));
    world.answer_kept();
    run_calls(&mut world, 1);
    assert_eq!(world.replies[&call], Ok(vec![9, 2]));
}

#[test]
fn a_frozen_peer_is_found_by_a_call_in_time() {
    let mut world = World::new(3);
    (0..100).for_each(|_| world.step());
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
    run_calls(&mut world, 2);
    assert_eq!(world.replies[&1], Ok(longest));
    assert_eq!(world.replies[&2], Err(CallError::TooLong { bytes: CALL_BYTES_MAX as usize + 1 }));
    assert_eq!(world.asking_broken, None);
}
