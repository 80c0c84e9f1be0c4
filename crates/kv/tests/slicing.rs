//! Guarantees of slicing: between any two TP sizes every head byte arrives exactly once where it
//! belongs.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use forebay_kv::{HeadMove, HeadSplit, SplitError};
use proptest::prelude::*;

fn split(heads: u32, size: u32) -> HeadSplit {
    HeadSplit::new(heads, size).expect("sizes that divide")
}

/// Two splits of the same heads: each size divides the heads or is a multiple of them.
fn splits() -> impl Strategy<Value = (HeadSplit, HeadSplit)> {
    prop::sample::select(vec![1u32, 2, 3, 4, 6, 8, 12]).prop_flat_map(|heads| {
        let sizes: Vec<u32> = (1..=24).filter(|&size| HeadSplit::new(heads, size).is_ok()).collect();
        let size = prop::sample::select(sizes);
        (size.clone(), size).prop_map(move |(a, b)| (split(heads, a), split(heads, b)))
    })
}

fn all_reads(target: &HeadSplit, source: &HeadSplit) -> Vec<HeadMove> {
    (0..target.size()).flat_map(|rank| target.reads(rank, source).unwrap()).collect()
}

#[test]
fn twice_the_workers_read_half_of_a_worker_each() {
    let reads = all_reads(&split(8, 4), &split(8, 2));
    let expected = [(0, 0, 0), (0, 2, 1), (1, 0, 2), (1, 2, 3)].map(|(from_rank, from_head, to_rank)| {
        HeadMove { from_rank, from_head, to_rank, to_head: 0, heads: 2 }
    });
    assert_eq!(reads, expected);
}

#[test]
fn half_of_the_workers_read_two_workers_each() {
    let reads = split(8, 2).reads(1, &split(8, 4)).unwrap();
    let expected = [(2, 0), (3, 2)].map(|(from_rank, to_head)| HeadMove {
        from_rank,
        from_head: 0,
        to_rank: 1,
        to_head,
        heads: 2,
    });
    assert_eq!(reads, expected);
}

#[test]
fn the_latent_of_mla_is_read_whole_and_the_readers_are_spread() {
    let givers = |source: u32, target: u32| -> Vec<u32> {
        all_reads(&split(1, target), &split(1, source)).iter().map(|read| read.from_rank).collect()
    };
    assert_eq!(givers(2, 8), [0, 0, 0, 0, 1, 1, 1, 1]);
    assert_eq!(givers(8, 2), [0, 4]);
    assert_eq!(givers(4, 4), [0, 1, 2, 3]);
}

#[test]
fn heads_that_cannot_be_split_are_refused_by_number() {
    assert_eq!(HeadSplit::new(0, 1), Err(SplitError::NoHeads));
    assert_eq!(HeadSplit::new(8, 0), Err(SplitError::Size { size: 0 }));
    assert_eq!(HeadSplit::new(8, 3), Err(SplitError::Uneven { heads: 8, size: 3 }));
    assert_eq!(split(8, 2).heads_of(2), Err(SplitError::Rank { rank: 2, size: 2 }));
    assert_eq!(split(8, 2).reads(0, &split(4, 2)), Err(SplitError::Different { ours: 8, theirs: 4 }));
    assert_eq!(split(8, 2).writes(0, &split(4, 2)), Err(SplitError::Different { ours: 8, theirs: 4 }));
}

proptest! {
    #[test]
    fn every_reader_gets_each_of_its_heads_once_from_a_rank_that_has_it((source, target) in splits()) {
        for rank in 0..target.size() {
            let wanted = target.heads_of(rank).unwrap();
            let reads = target.reads(rank, &source).unwrap();
            let mut next = 0;
            for read in &reads {
                prop_assert_eq!((read.to_rank, read.to_head), (rank, next));
                let held = source.heads_of(read.from_rank).unwrap();
                prop_assert!(read.from_heads().end <= source.heads_per_rank());
                prop_assert_eq!(held.start + read.from_head, wanted.start + read.to_head);
                next += read.heads;
            }
            prop_assert_eq!(next, target.heads_per_rank());
        }
    }

    #[test]
    fn writes_are_the_reads_seen_from_the_other_side((source, target) in splits()) {
        let mut reads = all_reads(&target, &source);
        let mut writes: Vec<_> =
            (0..source.size()).flat_map(|rank| source.writes(rank, &target).unwrap()).collect();
        let key = |item: &HeadMove| (item.to_rank, item.to_head, item.from_rank);
        reads.sort_unstable_by_key(key);
        writes.sort_unstable_by_key(key);
        prop_assert_eq!(reads, writes);
    }

    #[test]
    fn equal_splits_read_rank_by_rank((split, _) in splits()) {
        for rank in 0..split.size() {
            let whole = HeadMove {
                from_rank: rank, from_head: 0, to_rank: rank, to_head: 0, heads: split.heads_per_rank(),
            };
            prop_assert_eq!(split.reads(rank, &split), Ok(vec![whole]));
        }
    }

    #[test]
    fn copies_of_a_head_share_its_readers_evenly((source, target) in splits()) {
        let most = target.copies().div_ceil(source.copies());
        let reads = all_reads(&target, &source);
        for rank in 0..source.size() {
            for head in 0..source.heads_per_rank() {
                let readers = reads
                    .iter()
                    .filter(|read| read.from_rank == rank && read.from_heads().contains(&head))
                    .count();
                prop_assert!(readers as u32 <= most, "rank {} head {}: {}", rank, head, readers);
            }
        }
    }
}
