//! What [`CostModel`] learns, and what it decides from that.

use super::*;
use proptest::prelude::*;

const LINEAR_US: f64 = 60.0;
const PAIR_US: f64 = 0.006;
const FLOOR_US: f64 = 7_000.0;

fn truth_us(new: u64, prefix: u64) -> f64 {
    let (new, prefix) = (new as f64, prefix as f64);
    (LINEAR_US * new + PAIR_US * new * (prefix + new / 2.0)).max(FLOOR_US)
}

fn learned() -> CostModel {
    let mut model = CostModel::new(32, None).unwrap();
    for new in [1, 16, 256, 1024, 2048, 8192] {
        for prefix in [0, 1000, 8000, 32_000] {
            model.note_step(new, prefix, truth_us(new, prefix) / 1e6);
        }
    }
    model
}

fn question(chunks: [usize; 3]) -> Question {
    let [in_memory, on_disk, on_peers] = chunks;
    let prompt_tokens = (chunks.iter().sum::<usize>() as u64) * 256 + 100;
    Question {
        prompt_tokens,
        held_tokens: 0,
        chunk_tokens: 256,
        chunk_bytes: 256 * 98_304,
        in_memory,
        on_disk,
        on_peers,
        queued: [0; 3],
        wait_us: 0,
        others: 0,
    }
}

/// Numbers that can be, and the largest ones.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0u64..100_000, 1 => any::<u64>(), 1 => u64::MAX - 1_000..=u64::MAX]
}

fn seconds() -> impl Strategy<Value = f64> {
    prop_oneof![3 => 1e-9..100.0f64, 1 => any::<f64>()]
}

#[test]
fn a_table_of_what_is_worth_loading() {
    let gib = 1u64 << 30;
    let rates = |memory: f64, disk: f64, peer: f64| {
        let mut model = learned();
        model.note_load(Tier::Memory, gib, 1.0 / memory);
        model.note_load(Tier::Disk, gib, 1.0 / disk);
        model.note_load(Tier::Peer, gib, 1.0 / peer);
        model
    };
    let fast = || rates(40.0, 3.5, 10.0);
    let slow_disk = || rates(40.0, 0.5, 10.0);
    let nothing = || CostModel::new(32, None).unwrap();
    for (name, mut model, question, worth) in [
        ("all in memory", fast(), question([16, 0, 0]), 16),
        ("all tiers", fast(), question([4, 4, 4]), 12),
        ("a slow disk behind memory", slow_disk(), question([16, 16, 0]), 16),
        ("a slow disk alone", slow_disk(), question([0, 16, 0]), 0),
        ("a slow disk while others compute", slow_disk(), Question { others: 9, ..question([0, 16, 0]) }, 16),
        ("nothing known: try it", nothing(), question([1, 1, 1]), 3),
        ("nothing stored", fast(), question([0, 0, 0]), 0),
        ("no more than the prompt has", fast(), Question { prompt_tokens: 700, ..question([9, 0, 0]) }, 3),
        ("all of it held", fast(), Question { held_tokens: 4196, ..question([16, 0, 0]) }, 0),
        (
            "a fast disk behind a queue",
            fast(),
            Question { queued: [0, 8 * gib, 0], ..question([0, 16, 0]) },
            0,
        ),
    ] {
        assert_eq!(model.chunks_to_load(&question), worth, "{name}");
    }
}

#[test]
fn a_chunk_of_which_most_is_held_is_not_worth_what_a_whole_one_is() {
    let mut model = learned();
    model.note_load(Tier::Disk, 1 << 30, 1.0 / 2.5);
    let whole = Question { prompt_tokens: 9_000, held_tokens: 8_192, on_disk: 2, ..question([0, 0, 0]) };
    assert_eq!(model.chunks_to_load(&whole), 2);
    let part = Question { prompt_tokens: 8_448, held_tokens: 8_440, on_disk: 1, ..whole };
    assert_eq!(model.chunks_to_load(&part), 0);
}

#[test]
fn a_first_load_that_waited_for_what_is_made_ready_once_is_not_believed() {
    let mut model = learned();
    model.note_load(Tier::Memory, 1 << 30, 20.0);
    model.note_load(Tier::Memory, 1 << 30, 0.02);
    assert_eq!(model.chunks_to_load(&question([16, 0, 0])), 16);
}

#[test]
fn uneven_measurements_of_a_tier_give_its_rate() {
    let mut model = CostModel::new(32, None).unwrap();
    assert_eq!(model.load_us([1, 0, 0], [0; 3]), None, "nobody knows");
    // 1 GB takes 0.1 s, and of each two measurements one holds nearly all of the time.
    for _ in 0..100 {
        model.note_load(Tier::Memory, 1_000_000_000, 0.199);
        model.note_load(Tier::Memory, 1_000_000_000, 0.001);
    }
    let took_us = model.load_us([1_000_000_000, 0, 0], [0; 3]).unwrap();
    assert!((80_000.0..125_000.0).contains(&took_us), "{took_us}");
    let behind_us = model.load_us([1_000_000_000, 0, 0], [2_000_000_000, 0, 0]).unwrap();
    assert!((behind_us / took_us - 3.0).abs() < 1e-6);
    assert_eq!(model.load_us([1, 1, 0], [0; 3]), None, "the disk is not known");
}

#[test]
fn what_was_learned_predicts_steps_that_were_not_seen() {
    let model = learned();
    for (new, prefix) in [(512, 4000), (4096, 16_000), (3000, 0), (8192, 100_000)] {
        let (found, truth) = (model.step_us(new, prefix), truth_us(new, prefix));
        assert!((found / truth - 1.0).abs() < 0.25, "{new} behind {prefix}: {found} us, not {truth}");
    }
    assert_eq!(model.layer_us(512, 4000), model.step_us(512, 4000) / 32.0);
}

#[test]
fn a_slower_engine_is_learned() {
    let mut model = learned();
    (0..40).for_each(|_| model.note_step(2048, 8000, 10.0));
    assert!((model.step_us(2048, 8000) / 10e6 - 1.0).abs() < 0.05);
}

#[test]
fn a_profile_begins_where_another_ended_and_what_is_none_is_refused() {
    let mut model = learned();
    model.note_load(Tier::Peer, 1 << 30, 0.1);
    let mut again = CostModel::new(32, Some(&model.profile())).unwrap();
    assert!((again.step_us(700, 900) / model.step_us(700, 900) - 1.0).abs() < 1e-6);
    assert_eq!(again.chunks_to_load(&question([3, 0, 2])), model.chunks_to_load(&question([3, 0, 2])));
    for (profile, says) in [
        ("{}", "version"),
        (r#"{"version": 2, "layers": 32}"#, "version is 2; allowed: 1"),
        (r#"{"version": 1, "layers": 31}"#, "layers is 31; allowed: 32"),
        (r#"{"version": 1, "layers": 32, "tiers": {"tape": {"bytes_per_s": 1}}}"#, "tape"),
        (r#"{"version": 1, "layers": 32, "tiers": {"disk": {"bytes_per_s": 0}}}"#, "above 0"),
        (
            r#"{"version": 1, "layers": 32, "steps": [{"new_tokens": 0, "prefix_tokens": 0, "seconds": 1}]}"#,
            "tokens",
        ),
        (
            r#"{"version": 1, "layers": 32, "steps": [{"new_tokens": 1, "prefix_tokens": 0, "seconds": -1}]}"#,
            "seconds",
        ),
    ] {
        let why = CostModel::new(32, Some(profile)).unwrap_err().to_string();
        assert!(why.contains(says), "{why}");
    }
}

#[test]
fn what_is_not_worth_it_is_tried_now_and_then_and_so_learned_again() {
    let mut model = learned();
    model.note_load(Tier::Memory, 1 << 10, 1.0);
    assert!(model.tiers.is_empty(), "a few bytes that took long say nothing about the rate");
    (0..FIRST_LOADS).for_each(|_| model.note_load(Tier::Memory, 1 << 20, 10.0));
    let asked = question([16, 0, 0]);
    let answers: Vec<usize> = (0..2 * TRY_EVERY).map(|_| model.chunks_to_load(&asked)).collect();
    let tried = answers.iter().filter(|chunks| **chunks == 1).count();
    assert_eq!((tried, answers.iter().sum::<usize>()), (2, 2));
    assert_eq!(model.chunks_to_load(&question([0, 0, 0])), 0);
    for _ in 0..100 * TRY_EVERY {
        let chunks = model.chunks_to_load(&asked) as u64;
        model.note_load(Tier::Memory, chunks * asked.chunk_bytes, chunks as f64 * 0.001);
    }
    assert!((0..10).all(|_| model.chunks_to_load(&asked) == 16), "it is fast");
}

#[test]
fn a_slow_tier_behind_a_fast_one_is_tried_now_and_then_and_so_learned_again() {
    let mut model = learned();
    (0..FIRST_LOADS).for_each(|_| model.note_load(Tier::Memory, 1 << 30, 0.02));
    (0..FIRST_LOADS).for_each(|_| model.note_load(Tier::Disk, 1 << 30, 10.0));
    let asked = question([16, 16, 0]);
    let answers: Vec<usize> = (0..2 * TRY_EVERY).map(|_| model.chunks_to_load(&asked)).collect();
    let tried = answers.iter().filter(|chunks| **chunks == 17).count();
    assert_eq!((tried, answers.iter().filter(|chunks| **chunks == 16).count()), (2, 30));
    for _ in 0..100 * TRY_EVERY {
        let on_disk = model.chunks_to_load(&asked).saturating_sub(16) as u64;
        model.note_load(Tier::Disk, on_disk * asked.chunk_bytes, on_disk as f64 * 0.001);
    }
    assert!((0..10).all(|_| model.chunks_to_load(&asked) == 32), "it is fast");
}

#[test]
fn prompts_of_one_kind_do_not_take_the_tries_of_another() {
    let mut model = learned();
    (0..FIRST_LOADS).for_each(|_| model.note_load(Tier::Disk, 1 << 30, 10.0));
    (0..FIRST_LOADS).for_each(|_| model.note_load(Tier::Peer, 1 << 30, 10.0));
    let mut tried = |asked: Question| model.chunks_to_load(&asked) > 0;
    let tries: Vec<[bool; 2]> =
        (0..TRY_EVERY).map(|_| [tried(question([0, 16, 0])), tried(question([0, 0, 16]))]).collect();
    assert!((0..2).all(|tier| tries.iter().filter(|tries| tries[tier]).count() == 1), "{tries:?}");
}

#[test]
fn a_rest_that_is_computed_in_a_step_that_runs_anyway_is_no_tier_to_be_tried() {
    let mut model = learned();
    model.note_load(Tier::Memory, 1 << 30, 0.1);
    let rest =
        Question { prompt_tokens: 4_001, chunk_tokens: 16, chunk_bytes: 4 << 20, ..question([250, 0, 0]) };
    let worth = model.chunks_to_load(&rest);
    assert!((200..250).contains(&worth), "{worth}");
    assert!((0..2 * TRY_EVERY).all(|_| model.chunks_to_load(&rest) == worth));
}

proptest! {
    #[test]
    fn nonsense_is_survived_and_never_more_is_loaded_than_there_is(
        steps in prop::collection::vec((number(), number(), seconds()), 0..20),
        loads in prop::collection::vec((number(), seconds()), 0..5),
        numbers in (number(), number(), prop_oneof![any::<u32>(), 0u32..1_000], number()),
        chunks in (0usize..100, 0usize..100, 0usize..100),
        queued in [number(), number(), number()],
        others in any::<u32>(),
    ) {
        let mut model = CostModel::new(1, None).unwrap();
        steps.iter().for_each(|(new, prefix, seconds)| model.note_step(*new, *prefix, *seconds));
        loads.iter().for_each(|(bytes, seconds)| model.note_load(Tier::Disk, *bytes, *seconds));
        let (prompt_tokens, held_tokens, chunk_tokens, chunk_bytes) = numbers;
        let (in_memory, on_disk, on_peers) = chunks;
        let question = Question { prompt_tokens, held_tokens, chunk_tokens, chunk_bytes, in_memory, on_disk, on_peers, queued, wait_us: held_tokens, others };
        for _ in 0..2 * TRY_EVERY {
            prop_assert!(model.chunks_to_load(&question) <= in_memory + on_disk + on_peers);
        }
        prop_assert!(model.step_us(prompt_tokens, held_tokens) >= 0.0);
        prop_assert!(model.load_us(queued, queued).is_none_or(|us| us >= 0.0));
        prop_assert!(CostModel::new(1, Some(&model.profile())).is_ok());
    }
}
