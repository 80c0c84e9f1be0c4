//! Tests of reading batches: in all forms that engines write, and of bytes that are none.

use super::*;
use proptest::prelude::*;
use rmpv::Value as V;

fn bytes(value: &V) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).unwrap();
    bytes
}

fn map(fields: &[(&str, V)]) -> V {
    V::Map(fields.iter().map(|(name, value)| ((*name).into(), value.clone())).collect())
}

fn hashes(count: u64) -> V {
    V::Array((0..count).map(|hash| V::from(u64::MAX - hash)).collect())
}

/// As vLLM writes hashes unless it is asked for integers.
fn byte_hashes(count: u8) -> V {
    V::Array((0..count).map(|hash| V::Binary(vec![hash; 32])).collect())
}

fn tokens(count: u64) -> V {
    V::Array((0..count).map(V::from).collect())
}

fn batch(events: Vec<V>) -> Vec<u8> {
    bytes(&V::Array(vec![1.5.into(), V::Array(events), 3.into()]))
}

fn stored(fields: &[(&str, V)]) -> V {
    let usual = [
        ("type", "BlockStored".into()),
        ("block_hashes", hashes(2)),
        ("parent_block_hash", V::Nil),
        ("token_ids", tokens(32)),
        ("block_size", 16.into()),
        ("lora_id", V::Nil),
        ("medium", "GPU".into()),
        ("lora_name", V::Nil),
    ];
    map(&[&usual, fields].concat())
}

fn removed(fields: &[(&str, V)]) -> V {
    let usual = [("type", "BlockRemoved".into()), ("block_hashes", hashes(1)), ("medium", "GPU".into())];
    map(&[&usual, fields].concat())
}

fn changes(events: Vec<V>) -> Vec<Change> {
    read(&batch(events)).unwrap().changes
}

const TWO: Change = Change::Stored { blocks: 2, block_tokens: 16, group: 0 };

#[test]
fn maps_and_arrays_of_all_versions_say_the_same() {
    let as_map = stored(&[("extra_keys", V::Nil), ("group_idx", 0.into())]);
    let array = |values: &[V]| V::Array(values.to_vec());
    let kind = V::from("BlockStored");
    let oldest = array(&[kind.clone(), hashes(2), V::Nil, tokens(32), 16.into(), V::Nil]);
    let with_medium =
        array(&[kind.clone(), byte_hashes(2), 7.into(), tokens(32), 16.into(), V::Nil, "GPU".into()]);
    let group = [V::Nil, V::Nil, 0.into(), "full_attention".into(), V::Nil];
    let head = [kind, hashes(2), V::Nil, tokens(32), 16.into(), V::Nil, "GPU".into()];
    let newest = array(&[&head[..], &group].concat());
    for form in [as_map, oldest, with_medium, newest] {
        assert_eq!(changes(vec![form.clone()]), [TWO], "{form}");
        let whole = map(&[("ts", 1.5.into()), ("events", array(&[form])), ("data_parallel_rank", 3.into())]);
        assert_eq!(read(&bytes(&whole)), Ok(Batch { rank: 3, changes: vec![TWO] }));
    }
    let gone = array(&["BlockRemoved".into(), hashes(4)]);
    let all = array(&["AllBlocksCleared".into()]);
    let expected = [Change::Removed { blocks: 4, group: 0 }, Change::Cleared];
    assert_eq!(changes(vec![gone, all]), expected);
    assert_eq!(changes(vec![map(&[("type", "AllBlocksCleared".into())])]), [Change::Cleared]);
    assert_eq!(read(&bytes(&V::Array(vec![0.into(), V::Array(vec![])]))).unwrap().rank, 0, "no rank");
}

#[test]
fn what_is_elsewhere_or_no_measure_of_the_cache_is_passed_over() {
    let cpu = [("medium", "CPU".into())];
    let window = [("group_idx", 1.into()), ("kv_cache_spec_kind", "sliding_window".into())];
    let unknown = map(&[("type", "BlockTouched".into()), ("block_hashes", 7.into())]);
    // What it does not name is not looked at.
    assert_eq!(changes(vec![stored(&cpu), removed(&cpu), stored(&window)]), []);
    let array = |values: Vec<V>| V::Array(values);
    let on_cpu = ["BlockStored".into(), hashes(2), V::Nil, tokens(32), 16.into(), V::Nil, "CPU".into()];
    let window = [&on_cpu[..6], &["GPU".into(), V::Nil, V::Nil, 1.into(), "sliding_window".into()]].concat();
    let off_cpu = array(vec!["BlockRemoved".into(), hashes(2), "CPU".into()]);
    assert_eq!(changes(vec![array(on_cpu.to_vec()), array(window), off_cpu]), []);
    assert_eq!(changes(vec![stored(&[("medium", V::Nil)])]), [TWO], "nowhere else");
    assert!(read(&batch(vec![unknown])).is_err(), "hashes are hashes in all events");
    let unknown = map(&[("type", "BlockTouched".into()), ("blocks", 7.into())]);
    assert_eq!(changes(vec![unknown, stored(&[])]), [TWO]);
}

#[test]
fn neighbours_of_one_kind_are_one_change() {
    let other_group = removed(&[("group_idx", 1.into())]);
    let events = vec![stored(&[]), stored(&[]), removed(&[]), removed(&[]), other_group, stored(&[])];
    let expected = [
        Change::Stored { blocks: 4, block_tokens: 16, group: 0 },
        Change::Removed { blocks: 2, group: 0 },
        Change::Removed { blocks: 1, group: 1 },
        TWO,
    ];
    assert_eq!(changes(events), expected);
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let of = |event: V| read(&batch(vec![event])).unwrap_err().to_string();
    for (event, message) in [
        (stored(&[("block_size", V::Nil)]), "block_size is not there"),
        (stored(&[("block_size", (-1).into())]), "block_size is not a count or nil"),
        (stored(&[("block_hashes", 7.into())]), "block_hashes is not an array"),
        (map(&[("type", "BlockRemoved".into())]), "block_hashes is not there"),
        (stored(&[("medium", 7.into())]), "medium is not text or nil"),
        (V::from(7), "an event is not a map or an array"),
    ] {
        assert_eq!(of(event), message);
    }
    assert_eq!(read(&bytes(&7.into())).unwrap_err().to_string(), "a batch is not a map or an array");
    assert_eq!(read(b""), Err(BadBatch::Short));
}

#[test]
fn a_claimed_length_costs_nothing() {
    // 2^32 - 1 hashes, tokens, events, and bytes of text, none of which is there.
    let cut = |whole: Vec<u8>, claim: [u8; 5]| [&whole[..whole.len() - 1], &claim].concat();
    let claims = [[0xDD, 255, 255, 255, 255], [0xDB, 255, 255, 255, 255], [0xDF, 255, 255, 255, 255]];
    for claim in claims {
        for field in ["block_hashes", "token_ids", "medium"] {
            let event = cut(bytes(&map(&[("type", "BlockStored".into()), (field, V::Nil)])), claim);
            let whole = [&[0x93, 0, 0x91][..], &event].concat();
            assert!(read(&whole).is_err(), "{field}");
        }
        assert!(read(&[&[0x93, 0][..], &claim].concat()).is_err());
    }
}

#[test]
fn no_depth_of_nesting_is_too_deep() {
    let deep = [&[0x92][..], &[0x91].repeat(1 << 20), &[0xC0, 0x90]].concat();
    assert_eq!(read(&deep).unwrap().changes, []);
}

fn any_batch() -> impl Strategy<Value = Vec<u8>> {
    let event = prop::sample::select(vec![0_u8, 1, 2, 3]).prop_map(|kind| match kind {
        0 => stored(&[("group_idx", 0.into())]),
        1 => removed(&[]),
        2 => map(&[("type", "AllBlocksCleared".into())]),
        _ => V::Array(vec!["BlockStored".into(), byte_hashes(2), V::Nil, tokens(32), 16.into(), V::Nil]),
    });
    prop::collection::vec(event, 0..6).prop_map(batch)
}

proptest! {
    #[test]
    fn foreign_bytes_are_read_or_refused_and_nothing_else(payload in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&payload);
        let _ = read(&[&[0x93, 0, 0x91, 0x82], &payload[..]].concat());
    }

    #[test]
    fn a_damaged_batch_claims_no_more_blocks_than_it_has_bytes(
        mut payload in any_batch(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        for (at, byte) in damage {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        for payload in [&payload[..], &payload[..cut.index(payload.len())]] {
            let Ok(batch) = read(payload) else { continue };
            let blocks = batch.changes.iter().map(|change| match *change {
                Change::Stored { blocks, .. } | Change::Removed { blocks, .. } => blocks,
                Change::Cleared => 0,
            });
            prop_assert!(blocks.sum::<u64>() <= payload.len() as u64);
        }
    }
}
