//! What waits for a lane and how much of it is on its way. Pure: this file counts; it must never know what a part is, nor which
//! thread puts it on its way.

use std::collections::VecDeque;

/// How much may be on its way at a time. One part always may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub parts: usize,
    pub bytes: u64,
}

/// Parts in the order in which they came.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: VecDeque<(T, u64)>,
    parts: usize,
    bytes: u64,
    /// A thread has taken a part and is putting it on its way. There is one at a time, so that parts keep their order.
    is_posting: bool,
    /// A part has ended since that thread took its own.
    has_ended: bool,
}

impl<T> Default for Queue<T> {
    fn default() -> Queue<T> {
        let waiting = VecDeque::new();
        Queue { waiting, parts: 0, bytes: 0, is_posting: false, has_ended: false }
    }
}

impl<T> Queue<T> {
    /// Adds a part of so many bytes behind the others.
    pub fn push(&mut self, part: T, bytes: u64) {
        self.waiting.push_back((part, bytes));
    }

    /// The next part, if there is room for it and nobody else is putting one on its way. It counts as on its way; whoever takes
    /// it says [`posted`](Queue::posted) or [`later`](Queue::later), and asks again.
    pub fn next(&mut self, room: Room) -> Option<(T, u64)> {
        let bytes = self.waiting.front()?.1;
        let fits = self.parts < room.parts && self.bytes.saturating_add(bytes) <= room.bytes;
        if self.is_posting || !(fits || self.parts == 0) {
            return None;
        }
        (self.is_posting, self.has_ended) = (true, false);
        self.parts += 1;
        self.bytes += bytes;
        self.waiting.pop_front()
    }

    /// The part that was taken is on its way, or has ended.
    pub fn posted(&mut self) {
        self.is_posting = false;
    }

    /// The part that was taken has to wait until another one has ended, and goes first then. Gives it back if no other is on its
    /// way. Otherwise says whether one has ended meanwhile: nobody else asks again for that one.
    pub fn later(&mut self, part: T, bytes: u64) -> Result<bool, T> {
        self.is_posting = false;
        if self.parts == 1 && !self.has_ended {
            self.is_posting = true;
            return Err(part);
        }
        self.parts -= 1;
        self.bytes -= bytes;
        self.waiting.push_front((part, bytes));
        Ok(self.has_ended)
    }

    /// A part has ended.
    pub fn ended(&mut self, bytes: u64) {
        self.parts -= 1;
        self.bytes -= bytes;
        self.has_ended = true;
    }

    /// Whether nothing is on its way and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.parts == 0 && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROOM: Room = Room { parts: 2, bytes: 100 };

    #[test]
    fn one_part_always_has_room_and_others_while_there_is_some() {
        let mut queue = Queue::default();
        for (part, bytes) in [(1, 500), (2, 60), (3, 40), (4, 1)] {
            queue.push(part, bytes);
        }
        assert_eq!(queue.next(ROOM), Some((1, 500)));
        assert_eq!(queue.next(ROOM), None, "it is being put on its way");
        queue.posted();
        assert_eq!(queue.next(ROOM), None);
        queue.ended(500);
        for expected in [(2, 60), (3, 40)] {
            assert_eq!(queue.next(ROOM), Some(expected));
            queue.posted();
        }
        assert_eq!(queue.next(ROOM), None);
        queue.ended(60);
        assert_eq!(queue.next(ROOM), Some((4, 1)));
    }

    #[test]
    fn a_part_that_has_to_wait_is_asked_for_again_by_whoever_sees_another_end() {
        let mut queue = Queue::default();
        queue.push(1, 10);
        queue.push(2, 10);
        let _ = queue.next(ROOM);
        queue.posted();
        let (part, bytes) = queue.next(ROOM).unwrap();
        assert_eq!(queue.later(part, bytes), Ok(false), "the other one's end will ask");
        let (part, bytes) = queue.next(ROOM).unwrap();
        queue.ended(10);
        assert_eq!(queue.next(ROOM), None, "which was in vain");
        assert_eq!(queue.later(part, bytes), Ok(true));
        let (part, bytes) = queue.next(ROOM).unwrap();
        assert_eq!(queue.later(part, bytes), Err(2), "there is nothing to wait for");
        queue.posted();
        queue.ended(10);
        assert!(queue.is_idle());
    }

    proptest! {
        #[test]
        fn every_part_goes_once_in_order_and_never_too_many(steps in prop::collection::vec((0..4_u8, 1..80_u64), 0..200)) {
            let (mut queue, mut pushed, mut gone) = (Queue::default(), 0, 0);
            let (mut moving, mut taken) = (VecDeque::<u64>::new(), None);
            for (step, bytes) in steps {
                match step {
                    0 => {
                        queue.push(pushed, bytes);
                        pushed += 1;
                    }
                    1 => if let Some((part, bytes)) = queue.next(ROOM) {
                        prop_assert!(taken.is_none());
                        prop_assert_eq!(part, gone);
                        let sum = moving.iter().sum::<u64>() + bytes;
                        prop_assert!(moving.is_empty() || (moving.len() < 2 && sum <= 100));
                        taken = Some((part, bytes));
                    },
                    2 => if let Some((part, bytes)) = taken.take() {
                        if part % 3 == 0 && queue.later(part, bytes).is_ok() {
                            continue;
                        }
                        queue.posted();
                        moving.push_back(bytes);
                        gone += 1;
                    },
                    _ => if let Some(bytes) = moving.pop_front() {
                        queue.ended(bytes);
                    },
                }
            }
        }
    }
}
