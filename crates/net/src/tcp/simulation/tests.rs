//! What a flow promises, whatever happens to its wire. This file knows mischief and judgement; the
//! world that it happens in is its parent's.

use super::*;

#[test]
fn reads_and_writes_arrive_whole_whatever_the_wire_cuts_them_into() {
    for seed in 0..30 {
        let count = [1, 2, 40][seed as usize % 3];
        let world = run(seed, count, 0, |_| {});
        assert_eq!(moved(&world) as u64, count, "{:?} {:?}", world.asking_broken, world.owning_broken);
    }
}

#[test]
fn a_connection_lost_at_any_byte_ends_each_operation_and_call_once_and_never_says_done_too_early() {
    let whole = run(7, 3, 12, |_| {});
    let mut dice = SplitMix(3);
    for back in [false, true] {
        let pipe = |world: &World| {
            let end = &world.asking_end;
            Arc::clone(if back { &end.back } else { &end.out })
        };
        let carried = pipe(&whole).lock().carried;
        // Every byte of the greetings and the first frames, then random ones.
        for at in (0..300).chain((0..80).map(|_| dice.below(carried))) {
            let world = run(7, 3, 12, |world| pipe(world).lock().cut_at = Some(at));
            assert!(world.asking_broken.is_some() || (moved(&world), world.replies.len()) == (3, 12));
        }
    }
}

#[test]
fn a_flipped_bit_is_never_taken_for_data_or_an_answer() {
    let mut corrupt = 0;
    for seed in 0..150u64 {
        let at = if seed % 3 == 0 { seed } else { SplitMix(seed).below(1 << 18) };
        let world = run(11, 6, 12, |world| {
            let end = &world.asking_end;
            let pipe = if seed % 2 == 0 { &end.out } else { &end.back };
            pipe.lock().flip_at = Some(at);
        });
        corrupt += world.ended.values().filter(|outcome| **outcome == Outcome::Corrupt).count();
    }
    assert!(corrupt > 10, "{corrupt} operations were found damaged");
}

#[test]
fn after_a_cancelled_operation_has_ended_nothing_of_it_is_written_anywhere() {
    let mut cancelled = 0;
    for steps in 0..150 {
        let (mut world, plans) = World::asked(steps, 8);
        let before = (bytes(&world.ours), bytes(&world.theirs));
        world.steps(steps / 4);
        (1..=8).for_each(|number| world.asking.role.cancel(number, "cancelled"));
        world.run(plans.len());
        judge(&world, (&before.0, &before.1), &plans);
        cancelled += plans.len() - moved(&world);
        // The sources change and the targets are used for something else: nobody may notice.
        let (ours, theirs) = (bytes(&noise(900)), bytes(&noise(901)));
        assert!(world.ours.write(0, &ours) && world.theirs.write(0, &theirs));
        world.steps(200);
        assert!(bytes(&world.ours) == ours && bytes(&world.theirs) == theirs);
        assert_eq!((&world.asking_broken, &world.owning_broken), (&None, &None), "the flow is still good");
        // And the flow still works.
        world.submit(&plans[0], u64::MAX);
        world.run(plans.len() + 1);
        assert!(matches!(world.ended[&9], Outcome::Moved { .. }));
    }
    assert!(cancelled > 100, "{cancelled} operations were cancelled");
}

#[test]
fn silence_before_a_ping_is_not_a_frozen_peer() {
    let mut world = World::new(1);
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    // As with a limit that is shorter than the time after which a flow asks.
    world.steps(4);
    world.now_us += LIMIT_US + 1;
    world.steps(4);
    assert_eq!(world.asking_broken, None);
}

#[test]
fn a_cancel_is_told_by_the_call_in_which_the_deadline_passes() {
    let mut world = World::new(4);
    world.steps(100);
    let deadline_us = world.now_us + 1_000;
    world.submit(&Plan { op_kind: OpKind::Read, ..plans(4, 1).remove(0) }, deadline_us);
    world.step_asking();
    let told = world.asking_end.out.lock().carried;
    world.now_us = deadline_us;
    world.step_asking();
    assert!(world.asking_end.out.lock().carried > told, "nothing was told");
}

#[test]
fn a_deadline_ends_an_operation_and_leaves_the_flow_good() {
    let mut world = World::new(4);
    let plans = plans(4, 4);
    world.run(0);
    world.steps(100);
    let deadline_us = world.now_us + 1;
    for plan in &plans {
        world.submit(plan, deadline_us);
    }
    world.run(4);
    let late = world.ended.values().filter(|outcome| matches!(outcome, Outcome::Failed { .. })).count();
    assert!(late > 0, "{:?}", world.ended);
    world.submit(&plans[0], u64::MAX);
    world.run(5);
    assert!(matches!(world.ended[&5], Outcome::Moved { .. }));
}

#[test]
fn a_frozen_peer_is_found_in_time_and_writes_nothing_when_it_thaws() {
    for steps in 0..60 {
        let (mut world, plans) = World::asked(steps, 8);
        world.steps(steps);
        let open = plans.len() - world.ended.len();
        let frozen_us = world.now_us;
        while world.ended.len() < plans.len() {
            world.now_us += 1_000;
            world.step_asking();
            assert!(
                world.now_us <= frozen_us + LIMIT_US + 100_000,
                "frozen for {} us",
                world.now_us - frozen_us
            );
        }
        if open > 0 {
            assert_eq!(world.asking_broken, Some(Broken::Frozen { limit_us: LIMIT_US }));
        }
        let theirs = bytes(&noise(77));
        assert!(world.theirs.write(0, &theirs));
        world.steps(100);
        assert!(bytes(&world.theirs) == theirs, "written after the operation had failed");
    }
}

/// Lets time pass for the asking end alone, until it gives up. Says how long that took.
fn until_broken(world: &mut World, mut each_step: impl FnMut(&mut World)) -> u64 {
    let frozen_us = world.now_us;
    while world.asking_broken.is_none() {
        world.now_us += LIMIT_US / 20;
        each_step(world);
        world.step_asking();
        assert!(world.now_us < frozen_us + 10 * LIMIT_US, "still hoping");
    }
    assert_eq!(world.asking_broken, Some(Broken::Frozen { limit_us: LIMIT_US }));
    world.now_us - frozen_us
}

#[test]
fn asking_a_frozen_peer_for_more_is_no_sign_of_life() {
    let mut world = World::new(1);
    world.steps(100);
    let small = Plan { op_kind: OpKind::Read, spans: vec![(0, 0, 100)] };
    let took_us = until_broken(&mut world, |world| {
        world.submit(&small, u64::MAX);
    });
    assert!(took_us <= LIMIT_US + LIMIT_US / 10, "{took_us} us");
}

#[test]
fn room_that_is_left_in_our_own_buffers_is_no_sign_of_life() {
    let mut world = World::new(1);
    world.steps(100);
    world.submit(&Plan { op_kind: OpKind::Write, spans: vec![(0, 0, BYTES as u64)] }, u64::MAX);
    (0..1_000).for_each(|_| world.step_asking());
    let took_us = until_broken(&mut world, |world| {
        // As a system that fetches the rest of what was on its way when the peer froze, a little at
        // a time.
        let mut pipe = world.asking_end.out.lock();
        if pipe.bytes.len() > pipe.room * 3 / 4 {
            pipe.bytes.drain(..2);
        }
    });
    assert!(took_us <= LIMIT_US + LIMIT_US / 10, "{took_us} us");
}

#[test]
fn a_flow_that_is_doubted_ends_unless_its_peer_was_heard_lately() {
    let mut world = World::new(1);
    world.steps(100);
    let heard_us = world.now_us;
    assert_eq!(world.asking.fail_if_silent(heard_us + LIMIT_US / 4), Ok(()));
    // What is due for a moment only does not make the silence before it shorter.
    world.now_us = heard_us + LIMIT_US;
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.step_asking();
    assert_eq!(world.asking.fail_if_silent(world.now_us), Err(Broken::Frozen { limit_us: LIMIT_US }));
}

#[test]
fn an_owner_that_slept_in_the_middle_of_a_write_drops_what_came_late() {
    let mut slept = 0;
    for steps in 1..60 {
        let mut world = World::new(steps);
        world.submit(&Plan { op_kind: OpKind::Write, ..plans(steps, 1).remove(0) }, u64::MAX);
        world.steps(steps);
        world.step_asking();
        if !world.owning.role.awaits() {
            continue;
        }
        // The asking end is gone, and the news of it was lost.
        let theirs = bytes(&world.theirs);
        world.now_us += LIMIT_US;
        world.step_owning();
        assert_eq!(world.owning_broken, Some(Broken::Frozen { limit_us: LIMIT_US }));
        assert!(bytes(&world.theirs) == theirs, "late bytes were written");
        slept += 1;
    }
    assert!(slept > 3, "{slept} owners slept in the middle of a write");
}

#[test]
fn a_slow_peer_is_not_a_frozen_one() {
    let mut world = World::new(2);
    world.steps(100);
    let plans = plans(2, 4);
    world.submit_all(&plans);
    for _ in 0..10_000 {
        world.now_us += LIMIT_US / 3;
        world.step_asking();
        if world.now_us % LIMIT_US < LIMIT_US / 3 {
            world.step_owning();
        }
    }
    assert_eq!(moved(&world), 4, "{:?} {:?}", world.asking_broken, world.owning_broken);
}

#[test]
fn an_idle_flow_in_use_finds_a_frozen_peer_and_an_unused_one_is_silent() {
    let mut world = World::new(1);
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    // Both ends live: pings are answered, and stop when the flow is no longer in use.
    let mut wakes = 0;
    for _ in 0..1000 {
        world.steps(4);
        let Some(at_us) = world.asking.next_timeout_us() else { break };
        world.now_us = world.now_us.max(at_us);
        wakes += 1;
    }
    assert!((50..70).contains(&wakes), "{wakes} wake-ups");
    assert_eq!((&world.asking_broken, world.asking.next_timeout_us()), (&None, None));
    // Used again, then frozen.
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(2);
    for _ in 0..100 {
        world.now_us += 50_000;
        world.step_asking();
    }
    assert_eq!(world.asking_broken, Some(Broken::Frozen { limit_us: LIMIT_US }));
}

#[test]
fn a_lease_that_ends_meanwhile_ends_the_operation_without_done() {
    let mut refused = 0;
    for steps in 0..60 {
        let mut world = World::with(steps, Access { leased: true, ..Access::OPEN }, hello());
        let plans = plans(steps, 8);
        world.submit_all(&plans);
        world.steps(steps);
        assert!(world.leases.revoke(world.lease));
        // What the owner puts into the memory from now on must reach nobody as what was read.
        let before = bytes(&world.theirs);
        assert!(world.theirs.write(0, &bytes(&noise(88))));
        world.run(plans.len());
        let ours = bytes(&world.ours);
        for (number, plan) in (1..).zip(&plans) {
            let read = plan.op_kind == OpKind::Read && matches!(world.ended[&number], Outcome::Moved { .. });
            for (our, their, len) in plan.spans.iter().filter(|_| read) {
                let (our, their) = (*our as usize, *their as usize);
                let len = *len as usize;
                assert!(
                    ours[our..our + len] == before[their..their + len],
                    "bytes of a lease that had ended"
                );
            }
        }
        refused += plans.len() - moved(&world);
        assert_eq!(world.asking_broken, None);
    }
    assert!(refused > 50, "{refused} operations were refused");
}

#[test]
fn a_withdrawn_region_is_quiet_at_once_and_its_operations_fail() {
    let mut failed = 0;
    for steps in 0..60 {
        let (mut world, plans) = World::asked(steps, 8);
        world.steps(steps);
        assert!(world.exports.withdraw(KEY));
        let theirs = bytes(&noise(66));
        assert!(world.theirs.write(0, &theirs));
        world.run(plans.len());
        assert!(bytes(&world.theirs) == theirs, "written after the region was withdrawn");
        assert_eq!((&world.asking_broken, &world.owning_broken), (&None, &None));
        failed += plans.len() - moved(&world);
    }
    assert!(failed > 50, "{failed} operations failed");
}

#[test]
fn a_stale_generation_is_refused() {
    let mut world = World::new(1);
    world.generation += 1;
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    let Outcome::Denied { error } = &world.ended[&1] else { panic!("{:?}", world.ended) };
    assert!(error.contains("StaleGeneration"), "{error}");
}

#[test]
fn another_instance_is_refused() {
    let hello = Hello { to_instance: [3; 16], ..hello() };
    let mut world = World::with(1, Access::OPEN, hello);
    world.submit(&plans(1, 1)[0], u64::MAX);
    world.run(1);
    assert!(matches!(world.owning_broken, Some(Broken::Turned(_))), "{:?}", world.owning_broken);
}

/// What a responder says to frames that a peer may send after its HELLO.
fn hostile(list: impl FnOnce(u64) -> Vec<(u64, Frame)>) -> Option<Broken> {
    let world = World::new(5);
    let bytes = frames(&list(world.generation));
    hostile_bytes(world, &bytes)
}

fn hostile_bytes(mut world: World, bytes: &[u8]) -> Option<Broken> {
    let pipe = Arc::clone(&world.owning_end.back);
    let mut left = bytes;
    for _ in 0..10_000 {
        let mut there = pipe.lock();
        let (now, rest) = left.split_at(left.len().min(there.room - there.bytes.len()));
        there.bytes.extend(now);
        left = rest;
        drop(there);
        world.now_us += 10;
        world.step_owning();
        world.owning_end.out.lock().bytes.clear();
        if left.is_empty() && world.owning.role.is_idle() {
            break;
        }
    }
    world.owning_broken
}

fn frames(frames: &[(u64, Frame)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame::Hello(hello()).put(0, &mut bytes);
    frames.iter().for_each(|(number, frame)| frame.put(*number, &mut bytes));
    bytes
}

fn command(generation: u64, len: u32) -> Command {
    let runs = runs([(0, len.into())]);
    Command { sections: vec![Section { key: KEY, generation, lease: 0, runs }] }
}

#[test]
fn frames_out_of_order_end_the_connection() {
    let unexpected = |found: Option<Broken>| matches!(found, Some(Broken::Bad(BadFrame::Unexpected { .. })));
    let read = |generation| Frame::Read(command(generation, 10));
    let write = |generation| Frame::Write(command(generation, 10));
    assert_eq!(hostile(|generation| vec![(1, read(generation))]), None);
    assert!(unexpected(hostile(|_| vec![(0, Frame::Hello(hello()))])), "two HELLOs");
    assert!(unexpected(hostile(|_| vec![(0, Frame::Done)])), "an answer from the asking end");
    assert!(unexpected(hostile(|_| vec![(1, Frame::Cancel)])), "a CANCEL of nothing");
    assert!(unexpected(hostile(|of| vec![(2, read(of)), (1, read(of))])), "a number that went back");
    assert!(unexpected(hostile(|of| vec![(1, read(of)), (1, read(of))])), "a duplicate");
    assert!(unexpected(hostile(|of| vec![(1, write(of)), (2, write(of))])), "a WRITE in a WRITE");
    assert!(unexpected(hostile(|of| vec![(1, write(of)), (2, Frame::Data(5))])), "DATA of another operation");
    assert!(unexpected(hostile(|of| vec![(1, write(of)), (1, Frame::Data(11))])), "more DATA than spans");
    let mut before_hello = Vec::new();
    read(1).put(1, &mut before_hello);
    assert!(unexpected(hostile_bytes(World::new(5), &before_hello)), "an operation before the greeting");
    let call = |number| (number, Frame::Call(vec![0]));
    assert!(unexpected(hostile(|_| vec![call(2), call(1)])), "a call's number that went back");
    assert!(unexpected(hostile(|_| vec![call(1), call(1)])), "a duplicate call");
    assert!(unexpected(hostile(|_| vec![(1, Frame::Reply(vec![]))])), "a reply from the asking end");
    assert!(
        unexpected(hostile(|_| (1..=65).map(|number| (number, Frame::Call(vec![2]))).collect())),
        "more calls than may be unanswered"
    );
    assert_eq!(hostile(|_| (0..100).map(|_| (0, Frame::Ping)).collect()), None);
}

#[test]
fn a_peer_that_takes_no_answers_is_cut_off() {
    let mut world = World::new(5);
    let pings: Vec<_> = (0..100_000).map(|_| (0, Frame::Ping)).collect();
    let bytes = frames(&pings);
    let pipe = Arc::clone(&world.owning_end.back);
    pipe.lock().room = bytes.len();
    pipe.lock().bytes.extend(&bytes);
    while world.owning_broken.is_none() {
        world.now_us += 10;
        world.step_owning();
    }
    assert!(matches!(world.owning_broken, Some(Broken::Bad(_))), "{:?}", world.owning_broken);
}

#[test]
fn random_frames_never_panic_and_never_reach_memory_that_is_not_offered() {
    let mut dice = SplitMix(17);
    for _ in 0..300 {
        let frame = |dice: &mut SplitMix, generation: u64| {
            let number = dice.below(4);
            let mut command = || command(generation, 1 + dice.below(2 * BYTES as u64) as u32);
            let commands = (Frame::Read(command()), Frame::Write(command()));
            let frame = match dice.below(9) {
                0 => commands.0,
                1 => commands.1,
                2 => Frame::Data(1 + dice.below(1000) as u32),
                3 => Frame::Cancel,
                4 => Frame::Ping,
                5 => Frame::Cancelled,
                6 => Frame::Call(vec![number as u8; dice.below(9) as usize]),
                7 => Frame::Reply(vec![number as u8]),
                _ => Frame::Done,
            };
            (number, frame)
        };
        hostile(|generation| (0..20).map(|_| frame(&mut dice, generation)).collect());
    }
}

#[test]
fn a_responder_waits_for_a_greeting_only_so_long() {
    let mut world = World::new(5);
    world.now_us = LIMIT_US;
    world.step_owning();
    assert!(matches!(world.owning_broken, Some(Broken::Turned(_))));
    assert!(world.owning.role.next_timeout_us().is_some());
}
