//! Guarantees of namespaces and chunk ids: what they depend on, and that their bytes never change
//! unnoticed.

use forebay_kv::{AxisOrder, ChunkId, Digest, KvDtype, Namespace, NamespaceKey, Rank, chunk_ids};
use proptest::prelude::*;

fn sample() -> Namespace {
    Namespace {
        weights: Digest::from_bytes([0x11; 32]),
        dtype: KvDtype::Bfloat16,
        order: AxisOrder::Lbhnc,
        block_tokens: 16,
        tensor_parallel: Rank::new(1, 2).expect("a valid rank"),
        pipeline_parallel: Rank::ONLY,
        attention: [("rope_theta".to_owned(), "10000000".to_owned())].into(),
        lora: None,
        tenant_salt: b"tenant".to_vec(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// The vectors were computed by a second implementation, in Python, from the documented encoding
// alone.

#[test]
fn the_encoding_of_a_namespace_does_not_change_unnoticed() {
    assert_eq!(
        hex(sample().key().as_bytes()),
        "d1e2f39334da853ab6e7eac582bd0d8f7a8ded2d7eaa8fe151e37279728ee553"
    );
    let with_lora = Namespace { lora: Some(Digest::from_bytes([0x22; 32])), ..sample() };
    assert_eq!(
        hex(with_lora.key().as_bytes()),
        "e74ff7e74540c6a803faf0c62de7d2a4410f071aac3f72ab87bbfd60a6704a94"
    );
}

#[test]
fn the_encoding_of_a_chunk_id_does_not_change_unnoticed() {
    let key = NamespaceKey::from_bytes([0x33; 32]);
    let tokens: Vec<u32> = (0..700).map(|n| n * 7919).collect();
    let ids = chunk_ids(&key, &tokens, 256);
    let expected = [
        "7aa9314b95eae9115805ab84eb1c641c515e681016d987163cf75ddc8a5d04bf",
        "b90eb38ecc5bdefcd8a1e143c49806be7db94d2ccd048c7644f6d2bf39444754",
    ];
    assert_eq!(ids.iter().map(ChunkId::to_string).collect::<Vec<_>>(), expected);
    let uneven = ChunkId::derive(&key, None, &tokens);
    assert_eq!(uneven.to_string(), "ce12e7c5136dedc7a241a04c7a2690eb78b96fbaf13f5133665f1fef2b34082f");
}

#[test]
fn every_field_changes_the_key() {
    let base = sample();
    let variants = [
        Namespace { weights: Digest::from_bytes([0x12; 32]), ..base.clone() },
        Namespace { dtype: KvDtype::Float16, ..base.clone() },
        Namespace { order: AxisOrder::Lbnhc, ..base.clone() },
        Namespace { block_tokens: 32, ..base.clone() },
        Namespace { tensor_parallel: Rank::new(0, 2).unwrap(), ..base.clone() },
        Namespace { tensor_parallel: Rank::new(1, 4).unwrap(), ..base.clone() },
        Namespace { pipeline_parallel: Rank::new(0, 2).unwrap(), ..base.clone() },
        Namespace { pipeline_parallel: Rank::new(1, 2).unwrap(), ..base.clone() },
        Namespace { attention: Default::default(), ..base.clone() },
        Namespace { attention: [("rope_theta".into(), "10000".into())].into(), ..base.clone() },
        Namespace { attention: [("rope_thet".into(), "a10000000".into())].into(), ..base.clone() },
        Namespace { lora: Some(Digest::from_bytes([0; 32])), ..base.clone() },
        Namespace { lora: Some(Digest::from_bytes([1; 32])), ..base.clone() },
        Namespace { tenant_salt: Vec::new(), ..base.clone() },
        Namespace { tenant_salt: b"tenanu".to_vec(), ..base.clone() },
    ];
    let mut keys: Vec<_> = variants.iter().map(|variant| *variant.key().as_bytes()).collect();
    keys.push(*base.key().as_bytes());
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), variants.len() + 1);
}

#[test]
fn a_secret_key_is_not_printed() {
    let key = sample().key();
    assert!(!format!("{key:?}").contains(&hex(key.as_bytes())[..16]));
}

#[test]
fn a_chunk_size_of_zero_gives_no_chunks() {
    assert!(chunk_ids(&sample().key(), &[1, 2, 3], 0).is_empty());
}

#[test]
fn the_facts_of_two_namespaces_differ_exactly_in_what_differs_and_do_not_say_the_salt() {
    let mine = sample().facts();
    assert_eq!(
        (mine["dtype"].as_str(), mine["tp"].as_str(), mine["lora"].as_str()),
        ("bfloat16", "1/2", "none")
    );
    assert_eq!(mine["attention.rope_theta"], "10000000");
    let attention = [("rope_theta".to_owned(), "1".to_owned())].into();
    for (field, other) in [
        ("weights", Namespace { weights: Digest::from_bytes([0x12; 32]), ..sample() }),
        ("dtype", Namespace { dtype: KvDtype::Float16, ..sample() }),
        ("order", Namespace { order: AxisOrder::Lbnhc, ..sample() }),
        ("block_tokens", Namespace { block_tokens: 32, ..sample() }),
        ("tp", Namespace { tensor_parallel: Rank::ONLY, ..sample() }),
        ("pp", Namespace { pipeline_parallel: Rank::new(0, 2).expect("a valid rank"), ..sample() }),
        ("attention.rope_theta", Namespace { attention, ..sample() }),
        ("lora", Namespace { lora: Some(Digest::from_bytes([1; 32])), ..sample() }),
        ("salt", Namespace { tenant_salt: b"other".to_vec(), ..sample() }),
    ] {
        let theirs = other.facts();
        let differ: Vec<&String> = mine.keys().filter(|name| mine[*name] != theirs[*name]).collect();
        assert_eq!(differ, [field]);
    }
    assert!(!mine.values().any(|value| value.contains("tenant") || value.contains(&hex(b"tenant"))));
}

proptest! {
    #[test]
    fn ids_agree_exactly_as_far_as_the_prefixes_do(
        tokens in prop::collection::vec(any::<u32>(), 1..200),
        at in any::<prop::sample::Index>(),
        flip in 1u32..,
        chunk_tokens in 1usize..20,
    ) {
        let key = sample().key();
        let at = at.index(tokens.len());
        let mut other = tokens.clone();
        other[at] ^= flip;
        let ids = chunk_ids(&key, &tokens, chunk_tokens);
        let others = chunk_ids(&key, &other, chunk_tokens);
        prop_assert_eq!(ids.len(), tokens.len() / chunk_tokens);
        for (chunk, (a, b)) in ids.iter().zip(&others).enumerate() {
            prop_assert_eq!(a == b, chunk < at / chunk_tokens, "chunk {} token {}", chunk, at);
        }
    }

    #[test]
    fn ids_of_two_namespaces_never_meet(tokens in prop::collection::vec(any::<u32>(), 0..600), salt in any::<u64>()) {
        let one = sample().key();
        let two = Namespace { tenant_salt: salt.to_le_bytes().to_vec(), ..sample() }.key();
        prop_assert_ne!(ChunkId::derive(&one, None, &tokens), ChunkId::derive(&two, None, &tokens));
    }

    #[test]
    fn a_first_chunk_is_not_a_later_one(tokens in prop::collection::vec(any::<u32>(), 0..64), parent in any::<[u8; 32]>()) {
        let key = sample().key();
        let parent = ChunkId::from_bytes(parent);
        prop_assert_ne!(ChunkId::derive(&key, None, &tokens), ChunkId::derive(&key, Some(&parent), &tokens));
    }
}
