//! Tests of the order of batches: a publisher whose messages are lost, repeated and reordered,
//! which restarts, and which lies. They know no sockets and no clock.

use super::*;
use rmpv::Value as V;

mod histories;

const SECOND: u64 = 1_000_000;

fn map(fields: &[(&str, V)]) -> V {
    V::Map(fields.iter().map(|(name, value)| ((*name).into(), value.clone())).collect())
}

fn hashes(count: u64) -> V {
    V::Array((0..count).map(V::from).collect())
}

fn stored(blocks: u64) -> V {
    stored_of(blocks, 16)
}

fn stored_of(blocks: u64, block_tokens: u64) -> V {
    map(&[
        ("type", "BlockStored".into()),
        ("block_hashes", hashes(blocks)),
        ("block_size", block_tokens.into()),
    ])
}

fn removed(blocks: u64) -> V {
    map(&[("type", "BlockRemoved".into()), ("block_hashes", hashes(blocks))])
}

fn cleared() -> V {
    map(&[("type", "AllBlocksCleared".into())])
}

/// An engine that publishes: all its batches, and how many blocks it holds after each.
struct Publisher {
    started: f64,
    batches: Vec<(Bytes, u64)>,
    /// Batches that it can replay.
    buffer: usize,
}

impl Publisher {
    fn new(started: f64) -> Publisher {
        Publisher { started, batches: Vec::new(), buffer: usize::MAX }
    }

    fn live(&self) -> u64 {
        self.batches.last().map_or(0, |(_, live)| *live)
    }

    /// Publishes a batch and returns its message.
    fn publish(&mut self, events: Vec<V>) -> Vec<Bytes> {
        let mut live = self.live();
        for event in &events {
            let field =
                |name: &str| event.as_map().unwrap().iter().find(|(key, _)| key.as_str() == Some(name));
            let blocks =
                field("block_hashes").map_or(0, |(_, hashes)| hashes.as_array().unwrap().len() as u64);
            live = match field("type").unwrap().1.as_str().unwrap() {
                "BlockStored" => live + blocks,
                "BlockRemoved" => live - blocks,
                _ => 0,
            };
        }
        let number = self.batches.len() as u64;
        let at = V::from(self.started + number as f64);
        let mut payload = Vec::new();
        let batch = V::Array(vec![at, V::Array(events), 0.into()]);
        rmpv::encode::write_value(&mut payload, &batch).unwrap();
        self.batches.push((payload.clone().into(), live));
        message(number, &payload)
    }

    fn replay(&self, rank: &mut RankEvents) -> Replaying {
        let oldest = self.batches.len().saturating_sub(self.buffer);
        let from = rank.replay_from() as usize;
        for number in oldest.max(from)..self.batches.len() {
            match rank.replayed(number as u64, &self.batches[number].0) {
                Replaying::GoOn => {}
                then => return then,
            }
        }
        rank.replay_ended()
    }

    /// Answers a rank that asks, as often as it asks.
    fn answer(&self, rank: &mut RankEvents, next: Next) {
        if next == Next::Hear {
            return;
        }
        for _ in 0..4 {
            if self.replay(rank) == Replaying::Over {
                return;
            }
        }
        panic!("it asks for ever");
    }
}

fn message(number: u64, payload: &[u8]) -> Vec<Bytes> {
    vec![
        Bytes::from_static(b"kv"),
        Bytes::copy_from_slice(&number.to_be_bytes()),
        Bytes::copy_from_slice(payload),
    ]
}

/// A rank that has followed this publisher from the beginning.
fn following(publisher: &mut Publisher, batches: Vec<Vec<V>>) -> RankEvents {
    let mut rank = RankEvents::new(true);
    let next = rank.connected(0);
    publisher.answer(&mut rank, next);
    for events in batches {
        assert_eq!(rank.hear(0, &publisher.publish(events)), Next::Hear);
    }
    rank
}

fn blocks(report: &Report) -> Result<u64, Unknown> {
    report.held.map(|held| held.blocks)
}

#[test]
fn what_is_held_is_what_was_stored_and_not_removed() {
    let mut publisher = Publisher::new(0.0);
    let events = vec![vec![stored(10)], vec![removed(4), stored(3)], vec![stored(2)]];
    let mut rank = following(&mut publisher, events);
    let report = rank.report();
    assert_eq!(report.held, Ok(Held { blocks: 11, tokens: 176, room_tokens: Some(176) }));
    assert_eq!((report.emptied, report.stored_tokens), (false, 15 * 16));
    assert_eq!((report.counts.batches, report.counts.gaps), (3, 0));
    let quiet = rank.report();
    assert_eq!((quiet.stored_tokens, quiet.counts, quiet.held), (0, Counts::default(), report.held));
}

#[test]
fn how_much_there_is_room_for_is_known_once_something_was_evicted() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(10)], vec![stored(10)]]);
    assert_eq!(rank.report().held.unwrap().room_tokens, None);
    for (events, room) in [(vec![removed(3)], 20), (vec![stored(2)], 20), (vec![removed(5), stored(5)], 19)] {
        rank.hear(0, &publisher.publish(events));
        assert_eq!(rank.report().held.unwrap().room_tokens, Some(room * 16));
    }
    rank.hear(0, &publisher.publish(vec![cleared(), stored(1)]));
    let report = rank.report();
    assert_eq!((report.held.unwrap().room_tokens, blocks(&report)), (None, Ok(1)));
    assert_eq!((report.emptied, report.stored_tokens, report.counts.emptied), (true, 16, 1));
}

#[test]
fn a_gap_is_filled_by_a_replay() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)]]);
    publisher.publish(vec![stored(6)]);
    publisher.publish(vec![cleared(), stored(7)]);
    let next = rank.hear(0, &publisher.publish(vec![stored(8)]));
    assert_eq!((next, blocks(&rank.report())), (Next::Replay, Err(Unknown::Gap)));
    publisher.answer(&mut rank, next);
    let report = rank.report();
    assert_eq!(blocks(&report), Ok(15));
    assert!(report.emptied, "what happened in the gap is news");
}

#[test]
fn without_replays_a_gap_is_unknown_until_the_cache_is_emptied() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = RankEvents::new(false);
    assert_eq!(rank.connected(0), Next::Hear);
    rank.hear(0, &publisher.publish(vec![stored(5)]));
    assert_eq!(blocks(&rank.report()), Ok(5));
    publisher.publish(vec![stored(6)]);
    assert_eq!(rank.hear(0, &publisher.publish(vec![stored(7)])), Next::Hear);
    let report = rank.report();
    assert_eq!((blocks(&report), report.counts.gaps), (Err(Unknown::Gap), 1));
    rank.hear(0, &publisher.publish(vec![removed(9)]));
    assert_eq!(blocks(&rank.report()), Err(Unknown::Gap), "removed is not what was counted");
    rank.hear(0, &publisher.publish(vec![stored(1), cleared(), stored(2)]));
    let report = rank.report();
    assert_eq!((blocks(&report), report.emptied), (Ok(2), true));
}

#[test]
fn a_router_that_comes_later_knows_what_is_held_if_the_replay_goes_back_to_the_beginning() {
    for (buffer, known) in [(100, Ok(50)), (3, Err(Unknown::NoBeginning))] {
        let mut publisher = Publisher { buffer, ..Publisher::new(0.0) };
        (0..10).for_each(|_| drop(publisher.publish(vec![stored(5)])));
        let mut rank = RankEvents::new(true);
        let next = rank.connected(0);
        assert_eq!(next, Next::Replay);
        publisher.answer(&mut rank, next);
        let report = rank.report();
        assert_eq!(blocks(&report), known);
        assert_eq!((report.stored_tokens, report.emptied), (0, false), "the past is no news");
        rank.hear(0, &publisher.publish(vec![cleared(), stored(1)]));
        assert_eq!(blocks(&rank.report()), Ok(1));
        assert_eq!(rank.idle(1_000 * SECOND), Next::Hear, "there is nothing to ask for");
    }
}

#[test]
fn an_engine_that_restarts_has_lost_everything_whatever_its_numbers_are() {
    for already in [0, 1, 2, 3, 7] {
        let mut publisher = Publisher::new(0.0);
        let mut rank = following(&mut publisher, vec![vec![stored(5)], vec![stored(5)]]);
        rank.report();
        rank.disconnected();
        assert_eq!(blocks(&rank.report()), Err(Unknown::NotConnected));
        let mut publisher = Publisher::new(9.0);
        (0..already).for_each(|_| drop(publisher.publish(vec![stored(1)])));
        let next = rank.connected(SECOND);
        publisher.answer(&mut rank, next);
        let report = rank.report();
        assert_eq!((report.emptied, blocks(&report)), (true, Ok(already)), "after {already} batches");
    }
}

#[test]
fn a_connection_that_breaks_and_comes_again_loses_nothing() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)]]);
    rank.report();
    rank.disconnected();
    publisher.publish(vec![stored(6)]);
    let next = rank.connected(SECOND);
    publisher.answer(&mut rank, next);
    let report = rank.report();
    assert_eq!((report.emptied, blocks(&report), report.stored_tokens), (false, Ok(11), 96));
}

#[test]
fn numbers_that_begin_anew_on_one_connection_are_another_process() {
    for has_replays in [true, false] {
        let mut publisher = Publisher::new(0.0);
        let mut rank = RankEvents::new(has_replays);
        let next = rank.connected(0);
        publisher.answer(&mut rank, next);
        for _ in 0..3 {
            rank.hear(0, &publisher.publish(vec![stored(5)]));
        }
        rank.report();
        let mut publisher = Publisher::new(9.0);
        let next = rank.hear(0, &publisher.publish(vec![stored(2)]));
        publisher.answer(&mut rank, next);
        let report = rank.report();
        assert_eq!((report.emptied, blocks(&report)), (true, Ok(2)));
    }
}

#[test]
fn what_came_by_a_replay_and_then_comes_again_counts_once() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)]]);
    let late: Vec<_> = (0..4).map(|_| publisher.publish(vec![stored(1)])).collect();
    let next = rank.hear(0, &late[1]);
    publisher.answer(&mut rank, next);
    assert_eq!(rank.hear(0, &late[2]), Next::Hear);
    assert_eq!(rank.hear(0, &late[3]), Next::Hear);
    rank.hear(0, &publisher.publish(vec![stored(1)]));
    let report = rank.report();
    assert_eq!((blocks(&report), report.emptied), (Ok(10), false));
}

#[test]
fn replays_are_asked_for_less_and_less_often() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)]]);
    let mut asked = 0;
    // No pause is a multiple of the time between batches.
    for batch in 1..4_380 {
        publisher.publish(vec![stored(1)]);
        if rank.hear(batch * 137_000, &publisher.publish(vec![stored(1)])) == Next::Replay {
            asked += 1;
            rank.replay_failed();
        }
    }
    assert!((14..=16).contains(&asked), "{asked} times in ten minutes");
    let next = rank.idle(700 * SECOND);
    assert_eq!(next, Next::Replay, "and when nothing comes");
    publisher.answer(&mut rank, next);
    assert_eq!(blocks(&rank.report()), Ok(publisher.live()));
}

#[test]
fn a_replay_of_which_some_was_dropped_on_the_way_is_asked_for_anew() {
    let mut publisher = Publisher::new(0.0);
    (0..10).for_each(|_| drop(publisher.publish(vec![stored(1)])));
    let mut rank = RankEvents::new(true);
    assert_eq!(rank.connected(0), Next::Replay);
    assert_eq!(rank.replayed(0, &publisher.batches[0].0), Replaying::GoOn);
    assert_eq!(rank.replayed(4, &publisher.batches[4].0), Replaying::AskAnew);
    publisher.answer(&mut rank, Next::Replay);
    let report = rank.report();
    assert_eq!((blocks(&report), report.emptied), (Ok(10), false));
}

#[test]
fn each_thing_that_is_left_out_has_its_reason() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)]]);
    let good = publisher.publish(vec![stored(1)]);
    let with = |at: usize, bytes: &[u8]| {
        let mut message = good.clone();
        message[at] = Bytes::copy_from_slice(bytes);
        message
    };
    let mut dropped = |message: &[Bytes]| {
        rank.hear(0, message);
        let counts = rank.report().counts.dropped;
        let reasons = Dropped::NAMES.iter().zip(counts).filter(|(_, count)| *count > 0);
        reasons.map(|((_, name), _)| *name).collect::<Vec<_>>()
    };
    assert_eq!(dropped(&good[..2]), ["unreadable"]);
    assert_eq!(dropped(&with(1, b"short")), ["unreadable"]);
    assert_eq!(dropped(&with(1, &u64::MAX.to_be_bytes())), ["unreadable"]);
    assert_eq!(dropped(&with(0, b"kv@another")), ["other-publisher"]);
    assert_eq!(dropped(&publisher.publish(vec![stored_of(9, 32), stored_of(9, 0)])), Vec::<&str>::new());
    rank.replay_failed();
    let mut rank = following(&mut Publisher::new(0.0), vec![vec![stored(5)]]);
    rank.oversized();
    rank.hear(0, &message(1, b"\x93\x00\x91"));
    let report = rank.report();
    assert_eq!(
        (report.counts.dropped[0], report.counts.dropped[1], blocks(&report)),
        (1, 1, Err(Unknown::Nonsense))
    );
}

#[test]
fn blocks_of_another_size_do_not_count() {
    let mut publisher = Publisher::new(0.0);
    let events = vec![vec![stored(5)], vec![stored_of(9, 32), stored_of(9, 0), stored_of(9, u64::MAX)]];
    let mut rank = following(&mut publisher, events);
    let report = rank.report();
    assert_eq!((blocks(&report), report.counts.dropped[Dropped::BlockSize as usize]), (Ok(5), 3));
}

#[test]
fn a_batch_of_another_rank_does_not_count() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)]]);
    let of_rank = [&publisher.batches[0].0[..publisher.batches[0].0.len() - 1], &[1]].concat();
    rank.hear(0, &message(1, &of_rank));
    let report = rank.report();
    assert_eq!((blocks(&report), report.counts.dropped[Dropped::OtherPublisher as usize]), (Ok(5), 1));
}

#[test]
fn numbers_that_cannot_be_are_asked_for_again() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)]]);
    let mut forger = Publisher::new(0.0);
    forger.publish(vec![stored(5)]);
    forger.publish(vec![stored(9)]);
    let forged = forger.publish(vec![removed(9)]);
    let next = rank.hear(0, &message(1, &forged[2]));
    assert_eq!((next, rank.report().counts.dropped[Dropped::Impossible as usize]), (Next::Replay, 1));
    publisher.publish(vec![stored(1)]);
    publisher.answer(&mut rank, next);
    assert_eq!(blocks(&rank.report()), Ok(6));
}

#[test]
fn what_was_contradicted_is_asked_for_from_the_beginning() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)], vec![cleared(), stored(3)]]);
    rank.report();
    let next = rank.contradicted(0);
    assert_eq!(
        (next, rank.replay_from(), blocks(&rank.report())),
        (Next::Replay, 0, Err(Unknown::Contradicted))
    );
    publisher.publish(vec![stored(2)]);
    publisher.answer(&mut rank, next);
    let report = rank.report();
    assert_eq!((blocks(&report), report.stored_tokens, report.emptied), (Ok(5), 32, false));
}

#[test]
fn a_restart_is_not_missed_where_all_is_asked_for() {
    let mut publisher = Publisher::new(0.0);
    let mut rank = following(&mut publisher, vec![vec![stored(5)], vec![stored(5)]]);
    rank.report();
    rank.replay_failed();
    rank.disconnected();
    let mut publisher = Publisher::new(9.0);
    (0..4).for_each(|_| drop(publisher.publish(vec![stored(1)])));
    let next = rank.connected(100 * SECOND);
    assert_eq!(rank.replay_from(), 0);
    publisher.answer(&mut rank, next);
    let report = rank.report();
    assert_eq!((report.emptied, blocks(&report), report.stored_tokens), (true, Ok(4), 0));
}

#[test]
fn a_restart_is_not_missed_where_nobody_replays_for_a_while() {
    for heard in [0, 1, 2, 5] {
        let mut publisher = Publisher::new(0.0);
        let mut rank = following(&mut publisher, vec![vec![stored(5)], vec![stored(5)], vec![stored(5)]]);
        rank.report();
        rank.disconnected();
        let mut publisher = Publisher::new(9.0);
        (0..heard).for_each(|_| drop(publisher.publish(vec![stored(1)])));
        assert_eq!(rank.connected(SECOND), Next::Replay);
        rank.replay_failed();
        for _ in 0..2 {
            assert_eq!(rank.hear(SECOND, &publisher.publish(vec![stored(1)])), Next::Hear);
        }
        let report = rank.report();
        assert_eq!(report.emptied, heard <= 2, "a number up to 2 was there before: {heard}");
        let next = rank.idle(100 * SECOND);
        publisher.answer(&mut rank, next);
        let after = rank.report();
        assert_eq!((report.emptied || after.emptied, blocks(&after)), (true, Ok(heard + 2)), "{heard}");
    }
}

#[test]
fn a_gap_that_is_longer_than_what_is_replayed_is_no_restart() {
    let mut publisher = Publisher { buffer: 3, ..Publisher::new(0.0) };
    let mut rank = following(&mut publisher, vec![vec![stored(5)], vec![stored(5)]]);
    for is_found in [false, true] {
        rank.report();
        (0..8).for_each(|_| drop(publisher.publish(vec![stored(1)])));
        if is_found {
            rank.replay_failed();
            rank.disconnected();
        }
        let next =
            if is_found { rank.connected(100 * SECOND) } else { rank.hear(0, &publisher.publish(vec![])) };
        assert_eq!(next, Next::Replay);
        publisher.answer(&mut rank, next);
        let report = rank.report();
        assert_eq!((report.emptied, blocks(&report)), (false, Err(Unknown::NoBeginning)));
    }
    (0..8).for_each(|_| drop(publisher.publish(vec![stored(1)])));
    publisher.publish(vec![cleared()]);
    let next = rank.hear(200 * SECOND, &publisher.publish(vec![stored(2)]));
    publisher.answer(&mut rank, next);
    let report = rank.report();
    assert_eq!((report.emptied, blocks(&report)), (true, Ok(2)), "what is replayed of it is news");
}
