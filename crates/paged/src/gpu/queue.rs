//! What waits in a direction and how much of it is on its way. Pure: this file counts.

use std::collections::VecDeque;

/// How much may be on its way at a time. One segment always may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimit {
    pub segments: usize,
    pub bytes: u64,
}

/// Segments in the order in which they came.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: VecDeque<(T, u64)>,
    /// Segments that go another way, in the order in which they went, and those that are back. The
    /// first one has this ticket.
    asides: VecDeque<Option<(T, u64)>>,
    first_ticket: u64,
    segments: usize,
    bytes: u64,
    /// A thread has taken a segment and is putting it on its way. There is one at a time, so that
    /// segments keep their order.
    is_posting: bool,
    /// A segment has ended, or is back, since that thread took its own.
    has_ended: bool,
}

impl<T> Default for Queue<T> {
    fn default() -> Queue<T> {
        let (waiting, asides) = (VecDeque::new(), VecDeque::new());
        Queue { waiting, asides, first_ticket: 0, segments: 0, bytes: 0, is_posting: false, has_ended: false }
    }
}

impl<T> Queue<T> {
    pub fn push(&mut self, segment: T, bytes: u64) {
        self.waiting.push_back((segment, bytes));
    }

    /// The next segment, if nobody else is putting one on its way: one that is back, or one for
    /// which there is room by its limit. It counts as on its way; whoever takes it says
    /// [`posted`](Queue::posted), [`aside`](Queue::aside) or [`later`](Queue::later), and asks
    /// again.
    pub fn next(&mut self, limit: impl FnOnce(&T) -> QueueLimit) -> Option<(T, u64)> {
        if self.is_posting {
            return None;
        }
        if let Some(back) = self.asides.pop_front_if(|aside| aside.is_some()) {
            self.first_ticket += 1;
            (self.is_posting, self.has_ended) = (true, false);
            return back;
        }
        let (front, bytes) = self.waiting.front()?;
        let (limit, bytes) = (limit(front), *bytes);
        let fits = self.segments < limit.segments && self.bytes.saturating_add(bytes) <= limit.bytes;
        if !(fits || self.segments == 0) {
            return None;
        }
        (self.is_posting, self.has_ended) = (true, false);
        self.segments += 1;
        self.bytes += bytes;
        self.waiting.pop_front()
    }

    /// The segment that was taken is on its way, or has ended.
    pub fn posted(&mut self) {
        self.is_posting = false;
    }

    /// The segment that was taken goes another way, on which it still counts, and comes back with
    /// this ticket. Those that do come back in their order.
    pub fn aside(&mut self) -> u64 {
        self.is_posting = false;
        self.asides.push_back(None);
        self.first_ticket + self.asides.len() as u64 - 1
    }

    /// A segment is back, and is to be asked for.
    pub fn back(&mut self, ticket: u64, segment: T, bytes: u64) {
        let place = ticket.checked_sub(self.first_ticket).and_then(|at| self.asides.get_mut(at as usize));
        if let Some(place) = place {
            *place = Some((segment, bytes));
        }
        self.has_ended = true;
    }

    /// The segment that was taken has to wait until another one has ended, and goes first then.
    /// Gives it back if no other is on its way. Otherwise says whether one has ended meanwhile:
    /// nobody else asks again for that one.
    pub fn later(&mut self, segment: T, bytes: u64) -> Result<bool, T> {
        self.is_posting = false;
        if self.segments == 1 && !self.has_ended {
            self.is_posting = true;
            return Err(segment);
        }
        self.segments -= 1;
        self.bytes -= bytes;
        self.waiting.push_front((segment, bytes));
        Ok(self.has_ended)
    }

    pub fn ended(&mut self, bytes: u64) {
        self.segments -= 1;
        self.bytes -= bytes;
        self.has_ended = true;
    }

    /// Whether nothing is on its way and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.segments == 0 && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: QueueLimit = QueueLimit { segments: 2, bytes: 100 };

    #[test]
    fn one_part_always_has_room_and_others_while_there_is_some() {
        let mut queue = Queue::default();
        for (segment, bytes) in [(1, 500), (2, 60), (3, 40), (4, 1)] {
            queue.push(segment, bytes);
        }
        assert_eq!(queue.next(|_| LIMIT), Some((1, 500)));
        assert_eq!(queue.next(|_| LIMIT), None, "it is being put on its way");
        queue.posted();
        assert_eq!(queue.next(|_| LIMIT), None);
        queue.ended(500);
        for expected in [(2, 60), (3, 40)] {
            assert_eq!(queue.next(|_| LIMIT), Some(expected));
            queue.posted();
        }
        assert_eq!(queue.next(|_| LIMIT), None);
        queue.ended(60);
        assert_eq!(queue.next(|_| LIMIT), Some((4, 1)));
    }

    #[test]
    fn a_part_that_has_to_wait_is_asked_for_again_by_whoever_sees_another_end() {
        let mut queue = Queue::default();
        queue.push(1, 10);
        queue.push(2, 10);
        let _ = queue.next(|_| LIMIT);
        queue.posted();
        let (segment, bytes) = queue.next(|_| LIMIT).unwrap();
        assert_eq!(queue.later(segment, bytes), Ok(false), "the other one's end will ask");
        let (segment, bytes) = queue.next(|_| LIMIT).unwrap();
        queue.ended(10);
        assert_eq!(queue.next(|_| LIMIT), None, "which was in vain");
        assert_eq!(queue.later(segment, bytes), Ok(true));
        let (segment, bytes) = queue.next(|_| LIMIT).unwrap();
        assert_eq!(queue.later(segment, bytes), Err(2), "there is nothing to wait for");
        queue.posted();
        queue.ended(10);
        assert!(queue.is_idle());
    }

    #[test]
    fn a_segment_waits_for_room_by_its_own_limit() {
        let mut queue = Queue::default();
        (1..=3).for_each(|segment| queue.push(segment, 10));
        let limit = |segment: &u8| QueueLimit { segments: if *segment == 2 { 1 } else { 9 }, bytes: 100 };
        assert_eq!(queue.next(limit), Some((1, 10)));
        queue.posted();
        assert_eq!(queue.next(limit), None, "one at a time, of whomever");
        queue.ended(10);
        for expected in [2, 3] {
            assert_eq!(queue.next(limit), Some((expected, 10)));
            queue.posted();
        }
    }

    #[test]
    fn what_goes_aside_counts_and_comes_back_first_and_in_order() {
        let mut queue = Queue::default();
        (1..=4).for_each(|segment| queue.push(segment, 40));
        let mut aside = || {
            let (segment, bytes) = queue.next(|_| LIMIT).unwrap();
            (segment, bytes, queue.aside())
        };
        let (first, second) = (aside(), aside());
        assert_eq!(queue.next(|_| LIMIT), None, "both are on their way");
        queue.back(second.2, second.0, second.1);
        assert_eq!(queue.next(|_| LIMIT), None, "the first one is not back");
        queue.back(first.2, first.0, first.1);
        for expected in [1, 2] {
            assert_eq!(queue.next(|_| LIMIT), Some((expected, 40)));
            assert_eq!(queue.next(|_| LIMIT), None, "it is being put on its way");
            queue.posted();
        }
        assert_eq!(queue.next(|_| LIMIT), None, "both are on their way still");
        queue.ended(40);
        assert_eq!(queue.next(|_| LIMIT), Some((3, 40)));
        queue.posted();
        (0..2).for_each(|_| queue.ended(40));
        assert_eq!(queue.next(|_| LIMIT), Some((4, 40)));
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
                    1 => if let Some((segment, bytes)) = queue.next(|_| LIMIT) {
                        prop_assert!(taken.is_none());
                        prop_assert_eq!(segment, gone);
                        let sum = moving.iter().sum::<u64>() + bytes;
                        prop_assert!(moving.is_empty() || (moving.len() < 2 && sum <= 100));
                        taken = Some((segment, bytes));
                    },
                    2 => if let Some((segment, bytes)) = taken.take() {
                        if segment % 3 == 0 && queue.later(segment, bytes).is_ok() {
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
