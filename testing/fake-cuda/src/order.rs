//! Whether operations that touch the same bytes are ordered.
//!
//! An operation is ordered after another if a chain of stream order, events, values and the host's
//! own waiting leads from one to the other. Two operations that touch the same bytes, one of them
//! to write, without such a chain, corrupt data on some day, whatever happened today. What cannot
//! be seen is taken as an order: a value that someone else wrote, and what threads of the host tell
//! each other. So everything that is reported is a mistake, but not every mistake is reported.

use crate::clock::Clock;
use std::collections::{HashMap, VecDeque};

/// Operations that have begun and are remembered at most.
const PAST_MAX: usize = 1024;
/// Ranges of one operation that are looked at one by one; beyond, its mistakes may go unseen.
const TOUCHES_MAX: usize = 8192;

/// Bytes that an operation reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    pub from: u64,
    pub to: u64,
    pub writes: bool,
}

impl Touch {
    pub fn read(at: u64, bytes: u64) -> Touch {
        Touch { from: at, to: at.saturating_add(bytes), writes: false }
    }

    pub fn write(at: u64, bytes: u64) -> Touch {
        Touch { from: at, to: at.saturating_add(bytes), writes: true }
    }

    pub fn overlaps(&self, other: &Touch) -> bool {
        self.from < other.to && other.from < self.to
    }

    fn collides(&self, other: &Touch) -> bool {
        (self.writes || other.writes) && self.overlaps(other)
    }
}

/// An operation that has begun.
struct Past {
    stream: usize,
    number: u64,
    name: &'static str,
    touches: Vec<Touch>,
}

/// What is known of the order of things.
#[derive(Default)]
pub struct Order {
    /// What the host knows to have ended. All its threads share it.
    pub host: Clock,
    past: VecDeque<Past>,
    /// By address: what lies before the value that was written there last.
    values: HashMap<u64, Clock>,
}

impl Order {
    /// Operation `number` of `stream` begins. Says which operation it should have been ordered
    /// after and is not.
    pub fn begin(
        &mut self,
        stream: usize,
        number: u64,
        name: &'static str,
        clock: &Clock,
        touches: &[Touch],
    ) -> Option<&'static str> {
        let touches = merged(touches);
        let unordered = |past: &&Past| past.stream != stream && !clock.has(past.stream, past.number);
        let collides = |past: &&Past| collide(&past.touches, &touches);
        let found = self.past.iter().filter(unordered).find(collides).map(|past| past.name);
        if self.past.len() == PAST_MAX {
            self.past.pop_front();
        }
        self.past.push_back(Past { stream, number, name, touches });
        found
    }

    /// These addresses mean other bytes from now on.
    pub fn forget(&mut self, base: u64, bytes: u64) {
        let gone = Touch::write(base, bytes);
        for past in &mut self.past {
            past.touches.retain(|touch| !touch.overlaps(&gone));
        }
        self.values.retain(|&at, _| !(base..base + bytes).contains(&at));
    }

    /// A stream is gone, and with it everyone who could be ordered after it by name.
    pub fn forget_stream(&mut self, stream: usize) {
        self.past.retain(|past| past.stream != stream);
    }

    /// A stream has written a value.
    pub fn wrote_value(&mut self, at: u64, clock: &Clock) {
        self.values.insert(at, clock.clone());
    }

    /// What lies before the value that is at `at`, if a stream of this process wrote it last.
    pub fn value(&self, at: u64) -> Option<&Clock> {
        self.values.get(&at)
    }
}

/// Sorted, neighbours of the same kind as one: a batch of pages is a few ranges then.
fn merged(touches: &[Touch]) -> Vec<Touch> {
    let mut sorted: Vec<Touch> =
        touches.iter().take(TOUCHES_MAX).copied().filter(|touch| touch.from < touch.to).collect();
    sorted.sort_unstable_by_key(|touch| (touch.writes, touch.from));
    sorted.dedup_by(|next, kept| {
        let joins = next.writes == kept.writes && next.from <= kept.to;
        if joins {
            kept.to = kept.to.max(next.to);
        }
        joins
    });
    sorted
}

/// Whether any two collide. Both are sorted by [`merged`]: reads first, each by address.
fn collide(past: &[Touch], new: &[Touch]) -> bool {
    let halves = |touches: &[Touch]| touches.partition_point(|touch| !touch.writes);
    let ((past_reads, past_writes), (reads, writes)) =
        (past.split_at(halves(past)), new.split_at(halves(new)));
    meet(past_writes, writes) || meet(past_writes, reads) || meet(past_reads, writes)
}

/// Whether two lists of disjoint ranges, sorted by address, meet anywhere.
fn meet(mut one: &[Touch], mut other: &[Touch]) -> bool {
    while let ([first, rest @ ..], [second, other_rest @ ..]) = (one, other) {
        if first.collides(second) {
            return true;
        }
        if first.to <= second.to { one = rest } else { other = other_rest }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_on_the_same_bytes_collide_unless_one_lies_before_the_other() {
        let mut order = Order::default();
        let alone = Clock::default();
        assert_eq!(order.begin(1, 1, "first", &alone, &[Touch::write(100, 10)]), None);
        assert_eq!(order.begin(2, 1, "beside", &alone, &[Touch::read(110, 10)]), None);
        assert_eq!(order.begin(3, 1, "over", &alone, &[Touch::read(109, 1)]), Some("first"));
        let mut after = Clock::default();
        after.reach(1, 1);
        assert_eq!(order.begin(4, 1, "after", &after, &[Touch::read(109, 1)]), None);
    }

    #[test]
    fn pages_of_two_batches_collide_where_one_page_is_shared() {
        let pages =
            |pages: &[u64]| pages.iter().map(|page| Touch::write(page * 4096, 4096)).collect::<Vec<_>>();
        assert!(!collide(&merged(&pages(&[0, 2, 4, 6])), &merged(&pages(&[1, 3, 5, 7]))));
        assert!(collide(&merged(&pages(&[0, 2, 4, 6])), &merged(&pages(&[7, 5, 4, 1]))));
    }
}
