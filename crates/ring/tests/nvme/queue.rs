//! A pair of queues by itself: when it is full, which identifiers it gives, and what it makes of
//! completions.

use forebay_ring::nvme::{Command, Ended, Fault, Faults, Outcome, Polled, QueueError, QueuePair};
use proptest::prelude::*;
use std::collections::{HashSet, VecDeque};

const FLUSH: Command = Command::Flush { namespace: 1 };

fn submit(queue: &mut QueuePair<u32>, purpose: u32) -> Result<u16, QueueError> {
    queue.submit(&FLUSH, purpose).map(|submitted| submitted.cid).map_err(|refused| refused.reason)
}

/// Words of a completion of queue 1.
fn completion(cid: u16, sq_head: u32, phase: bool) -> [u32; 4] {
    [0, 0, 1 << 16 | sq_head, u32::from(phase) << 16 | u32::from(cid)]
}

fn poll(queue: &mut QueuePair<u32>, words: [u32; 4]) -> Polled<u32> {
    queue.poll(|_, word| words[word])
}

#[test]
fn a_queue_is_full_one_entry_early_and_completions_always_have_room() {
    let mut queue = QueuePair::new(1, 4, 16).unwrap();
    (0..3).for_each(|purpose| assert!(submit(&mut queue, purpose).is_ok()));
    assert_eq!(submit(&mut queue, 3), Err(QueueError::SubmissionFull(3)));
    let mut queue = QueuePair::new(1, 16, 4).unwrap();
    (0..3).for_each(|purpose| assert!(submit(&mut queue, purpose).is_ok()));
    assert_eq!(submit(&mut queue, 3), Err(QueueError::CompletionFull(3)));
    for (sq, cq) in [(1, 2), (2, 1), (65_537, 2), (0, 2)] {
        assert!(matches!(QueuePair::<u32>::new(1, sq, cq), Err(QueueError::Entries { .. })));
    }
}

#[test]
fn entries_of_the_queue_are_free_again_when_the_drive_says_it_has_read_them() {
    let mut queue = QueuePair::new(1, 4, 16).unwrap();
    let cids: Vec<u16> = (0..3).map(|purpose| submit(&mut queue, purpose).unwrap()).collect();
    // The drive has ended a command and not told of any entry that it has read.
    assert!(matches!(poll(&mut queue, completion(cids[1], 0, true)), Polled::Ended(_)));
    assert_eq!(submit(&mut queue, 3), Err(QueueError::SubmissionFull(3)));
    assert!(matches!(poll(&mut queue, completion(cids[0], 3, true)), Polled::Ended(_)));
    assert!(submit(&mut queue, 3).is_ok() && submit(&mut queue, 4).is_ok());
    assert_eq!(submit(&mut queue, 5), Err(QueueError::CompletionFull(3)));
}

#[test]
fn the_last_word_is_read_first_and_the_others_only_if_its_phase_is_right() {
    let mut queue = QueuePair::new(1, 4, 4).unwrap();
    let cid = submit(&mut queue, 7).unwrap();
    let mut read = Vec::new();
    let mut look = |queue: &mut QueuePair<u32>, words: [u32; 4]| {
        read.clear();
        let polled = queue.poll(|slot, word| {
            read.push((slot, word));
            words[word]
        });
        (polled, read.clone())
    };
    assert_eq!(look(&mut queue, completion(cid, 1, false)), (Polled::Nothing, vec![(0, 3)]));
    let (polled, read) = look(&mut queue, completion(cid, 1, true));
    assert_eq!(polled, Polled::Ended(Ended { purpose: 7, cid, outcome: Outcome::Done(0) }));
    assert_eq!(read[0], (0, 3));
    assert_eq!(read.len(), 4, "each word once");
}

#[test]
fn the_phase_changes_each_time_round() {
    let mut queue = QueuePair::new(1, 8, 3).unwrap();
    for at in 0..600 {
        let cid = submit(&mut queue, at).unwrap();
        let (head, phase) = ((at + 1) % 8, at / 3 % 2 == 0);
        assert_eq!(poll(&mut queue, completion(cid, head, !phase)), Polled::Nothing);
        let ended = Ended { purpose: at, cid, outcome: Outcome::Done(0) };
        assert_eq!(poll(&mut queue, completion(cid, head, phase)), Polled::Ended(ended));
    }
}

#[test]
fn a_completion_that_cannot_be_ends_nothing_and_is_counted() {
    let mut queue = QueuePair::new(1, 8, 32).unwrap();
    let cids: Vec<u16> = (0..2).map(|purpose| submit(&mut queue, purpose).unwrap()).collect();
    let mut fault = |words| match poll(&mut queue, words) {
        Polled::Fault(fault) => fault,
        other => panic!("{other:?}"),
    };
    let [cid, unused] = [cids[0], cids[1] + 1];
    assert_eq!(fault(completion(unused, 1, true)), Fault::NotOutstanding(unused));
    assert_eq!(fault(completion(0xffff, 1, true)), Fault::NotOutstanding(0xffff));
    assert_eq!(fault([0, 0, 2 << 16 | 1, 1 << 16 | u32::from(cid)]), Fault::OtherQueue(2));
    for head in [3, 8, 0xffff] {
        let refused = Fault::SqHead { head: head as u16, from: 0, to: 2 };
        assert_eq!(fault(completion(cid, head, true)), refused);
    }
    assert!(matches!(poll(&mut queue, completion(cid, 2, true)), Polled::Ended(_)));
    let again = poll(&mut queue, completion(cid, 2, true));
    assert_eq!(again, Polled::Fault(Fault::NotOutstanding(cid)));
    assert_eq!(queue.faults(), Faults { not_outstanding: 3, other_queue: 1, sq_head: 3 });
    assert_eq!(queue.outstanding(), 1);
}

#[test]
fn a_late_completion_does_not_end_the_next_command_of_its_place() {
    let mut queue = QueuePair::new(1, 2, 64).unwrap();
    let first = submit(&mut queue, 1).unwrap();
    assert!(matches!(poll(&mut queue, completion(first, 1, true)), Polled::Ended(_)));
    let second = submit(&mut queue, 2).unwrap();
    assert_eq!(poll(&mut queue, completion(first, 0, true)), Polled::Fault(Fault::NotOutstanding(first)));
    let ended = Ended { purpose: 2, cid: second, outcome: Outcome::Done(0) };
    assert_eq!(poll(&mut queue, completion(second, 0, true)), Polled::Ended(ended));
}

#[test]
fn identifiers_are_used_again_but_never_by_two_commands_at_once_nor_that_of_no_command() {
    for entries in [2_u32, 3, 4, 1024, 65_536] {
        let mut queue = QueuePair::new(1, entries, entries).unwrap();
        let (mut outstanding, mut order) = (HashSet::new(), VecDeque::new());
        let (mut head, mut slot) = (0, 0_u32);
        for at in 0..140_000 {
            if order.len() as u32 == (entries - 1).min(500) {
                let cid = order.pop_front().unwrap();
                head = (head + 1) % entries;
                let phase = slot / entries % 2 == 0;
                slot = (slot + 1) % (2 * entries);
                assert!(matches!(poll(&mut queue, completion(cid, head, phase)), Polled::Ended(_)));
                outstanding.remove(&cid);
            }
            let cid = submit(&mut queue, at).unwrap();
            assert!(cid != 0xffff && outstanding.insert(cid), "{cid} of {entries}");
            order.push_back(cid);
        }
    }
}

#[test]
fn a_reset_ends_what_is_outstanding_once_and_begins_anew() {
    let mut queue = QueuePair::new(1, 8, 8).unwrap();
    let cids: Vec<u16> = (0..5).map(|purpose| submit(&mut queue, purpose).unwrap()).collect();
    assert!(matches!(poll(&mut queue, completion(cids[3], 5, true)), Polled::Ended(_)));
    let mut ended = queue.reset();
    ended.sort_by_key(|ended| ended.purpose);
    let purposes: Vec<u32> = ended.iter().map(|ended| ended.purpose).collect();
    assert_eq!(purposes, [0, 1, 2, 4]);
    assert!(ended.iter().all(|ended| ended.outcome == Outcome::Reset));
    assert!(queue.reset().is_empty());
    assert_eq!((queue.sq_tail(), queue.cq_head(), queue.outstanding()), (0, 0, 0));
    let cid = submit(&mut queue, 9).unwrap();
    assert!(!cids.contains(&cid), "a completion from before the reset is known as such");
    assert!(matches!(poll(&mut queue, completion(cid, 1, true)), Polled::Ended(_)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5_000))]

    #[test]
    fn any_completions_end_each_command_at_most_once(
        entries in 2_u32..9,
        words in prop::collection::vec((any::<u32>(), 0_u16..12, 0_u32..3, 0_u16..12, any::<u32>()), 1..100),
    ) {
        let mut queue = QueuePair::new(1, entries, entries).unwrap();
        let mut ended = vec![0; 1000];
        let (mut begun, mut slot) = (0, 0);
        for (result, sq_head, sq_id, cid, last) in words {
            while submit(&mut queue, begun).is_ok() {
                begun += 1;
            }
            let phase = slot / entries % 2 == 0;
            slot += 1;
            let last = last & !0x1_ffff | u32::from(phase) << 16 | u32::from(cid);
            let polled = poll(&mut queue, [result, 0, sq_id << 16 | u32::from(sq_head), last]);
            if let Polled::Ended(Ended { purpose, .. }) = polled {
                ended[purpose as usize] += 1;
            }
        }
        queue.reset().iter().for_each(|end| ended[end.purpose as usize] += 1);
        prop_assert!(ended[..begun as usize].iter().all(|ends| *ends == 1));
        prop_assert!(queue.outstanding() == 0);
    }
}
