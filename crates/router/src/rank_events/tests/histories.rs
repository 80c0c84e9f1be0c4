//! Random histories of an engine whose messages are lost, repeated and late, and foreign messages.

use super::*;
use proptest::prelude::*;

/// What happens to a message, or to the engine.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Well,
    Lost,
    /// As many as a small buffer has, and more.
    ManyLost,
    Twice,
    /// It comes after the next one.
    Late,
    Restart,
    Reconnect,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    fault: Fault,
    store: u64,
    remove: u64,
    /// Replays of it fail after so many batches.
    fails_after: Option<usize>,
}

impl Step {
    const WELL: Step = Step { fault: Fault::Well, store: 1, remove: 0, fails_after: None };
}

fn any_step() -> impl Strategy<Value = Step> {
    use Fault::*;
    let faults = vec![Well, Well, Well, Well, Lost, ManyLost, Twice, Late, Restart, Reconnect];
    let step = (prop::sample::select(faults), 0..20_u64, 0..20_u64, prop::option::weighted(0.3, 0..6_usize));
    step.prop_map(|(fault, store, remove, fails_after)| Step { fault, store, remove, fails_after })
}

/// An engine and a rank that follows it.
struct World {
    publisher: Publisher,
    rank: RankEvents,
    now_us: u64,
    late: Option<Vec<Bytes>>,
    /// The engine has restarted, and nothing has been heard of it since.
    restarted: bool,
    /// Messages came in another order than they were sent in, as only those of two processes do.
    is_disordered: bool,
}

impl World {
    /// An engine that keeps so many batches.
    fn new(buffer: usize) -> World {
        let publisher = Publisher { buffer, ..Publisher::new(0.5) };
        let rank = RankEvents::new(true);
        World { publisher, rank, now_us: 0, late: None, restarted: false, is_disordered: false }
    }

    fn answer(&mut self, next: Next, fails_after: Option<usize>) {
        let Some(batches) = fails_after.filter(|_| next == Next::Replay) else {
            return self.publisher.answer(&mut self.rank, next);
        };
        let oldest = self.publisher.batches.len().saturating_sub(self.publisher.buffer);
        let from = oldest.max(self.rank.replay_from() as usize);
        for number in (from..self.publisher.batches.len()).take(batches) {
            if self.rank.replayed(number as u64, &self.publisher.batches[number].0) != Replaying::GoOn {
                break;
            }
        }
        self.rank.replay_failed();
    }

    fn hear(&mut self, message: &[Bytes], fails_after: Option<usize>) {
        let next = self.rank.hear(self.now_us, message);
        self.answer(next, fails_after);
    }

    fn step(&mut self, Step { fault, store, remove, fails_after }: Step) {
        self.now_us += 3 * SECOND;
        match fault {
            Fault::Restart => {
                self.publisher =
                    Publisher { buffer: self.publisher.buffer, ..Publisher::new(self.now_us as f64) };
                // Of one of which nothing was heard nothing is believed.
                self.restarted |= self.rank.newest.is_some();
                (0..store / 4).for_each(|_| drop(self.publisher.publish(vec![stored(1)])));
                return self.reconnect(fails_after);
            }
            Fault::Reconnect => return self.reconnect(fails_after),
            Fault::ManyLost => (0..6).for_each(|_| drop(self.publisher.publish(vec![stored(1)]))),
            _ => {}
        }
        let remove = remove.min(self.publisher.live());
        let message = self.publisher.publish(vec![removed(remove), stored(store)]);
        let late = self.late.take();
        match fault {
            Fault::Lost => {}
            Fault::Late => self.late = Some(message),
            Fault::Twice => {
                self.hear(&message, fails_after);
                self.hear(&message, fails_after);
            }
            _ => self.hear(&message, fails_after),
        }
        self.is_disordered |= matches!(fault, Fault::Late | Fault::Twice);
        if let Some(late) = late {
            self.hear(&late, fails_after);
        }
    }

    fn reconnect(&mut self, fails_after: Option<usize>) {
        self.rank.disconnected();
        self.late = None;
        let next = self.rank.connected(self.now_us);
        self.answer(next, fails_after);
    }
}

proptest! {
    #[test]
    fn whatever_is_lost_repeated_or_late_the_count_is_right_or_unknown(
        steps in prop::collection::vec(any_step(), 1..60),
        buffer in prop::sample::select(vec![usize::MAX, 20, 4]),
    ) {
        let mut world = World::new(buffer);
        world.reconnect(None);
        for step in steps {
            world.step(step);
            let report = world.rank.report();
            if let Ok(held) = report.held {
                // What was lost or is late is not missed before the next one comes.
                let place = world.rank.place.map(|place| place.number as usize);
                let live = place.map_or(0, |number| world.publisher.batches[number].1);
                prop_assert_eq!(held.blocks, live);
            }
            let may_be_emptied = world.restarted || world.is_disordered;
            prop_assert!(!report.emptied || may_be_emptied, "a restart is not made up");
            world.restarted &= !report.emptied;
            prop_assert!(!world.restarted || report.held.is_err(), "a restart is not missed");
        }
        // A minute later all is known, or once the cache is emptied where not all is replayed.
        for _ in 0..2 {
            world.now_us += 100 * SECOND;
            world.step(Step::WELL);
        }
        if buffer < usize::MAX {
            let message = world.publisher.publish(vec![cleared()]);
            world.hear(&message, None);
        }
        prop_assert_eq!(world.rank.report().held.map(|held| held.blocks), Ok(world.publisher.live()));
    }

    #[test]
    fn foreign_messages_are_taken_or_left_out_and_nothing_else(
        messages in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..12), 0..5), 0..20),
        numbers in prop::collection::vec(any::<u64>(), 0..20),
        has_replays in any::<bool>(),
    ) {
        let mut rank = RankEvents::new(has_replays);
        rank.connected(0);
        let mut publisher = Publisher::new(0.0);
        for (at, message) in messages.into_iter().enumerate() {
            let message: Vec<Bytes> = message.into_iter().map(Bytes::from).collect();
            rank.hear(at as u64 * SECOND, &message);
        }
        for (at, number) in numbers.into_iter().enumerate() {
            let batch = publisher.publish(vec![stored(3)]);
            rank.hear(at as u64 * SECOND, &self::message(number, &batch[2]));
            rank.replayed(number, &batch[2]);
        }
        rank.report();
    }
}
