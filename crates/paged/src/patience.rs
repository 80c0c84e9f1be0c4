//! When a load has waited too long. Sans-IO: this file knows moments that it is told; it must never know what comes.
//!
//! A load that a step waits for has its time from its begin on. Any other may take as long as something of it comes now and then;
//! and while it has nothing on its way and waits for its turn, as long as others go on.

use std::time::{Duration, Instant};

/// How long a load waits.
#[derive(Debug)]
pub struct Patience {
    limit: Duration,
    /// It is over so long after the begin, whatever comes.
    is_of_all: bool,
    /// When the load began, or something of it last came.
    since: Instant,
}

impl Patience {
    /// Of a load that begins now.
    pub fn new(limit: Duration, is_of_all: bool, now: Instant) -> Patience {
        Patience { limit, is_of_all, since: now }
    }

    /// Something of the load has come, or its turn has.
    pub fn came(&mut self, now: Instant) {
        if !self.is_of_all {
            self.since = now;
        }
    }

    /// When it is over unless something comes. `others` is when those before the load last went on, if it only waits for its turn.
    /// `None` is never.
    pub fn ends(&self, others: Option<Instant>) -> Option<Instant> {
        let others = others.filter(|_| !self.is_of_all);
        self.since.max(others.unwrap_or(self.since)).checked_add(self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn at(second: u64) -> impl Fn(Instant) -> Instant {
        move |start| start + Duration::from_secs(second)
    }

    #[test]
    fn what_comes_and_others_that_go_on_give_a_load_time_unless_a_step_waits_for_it() {
        let start = Instant::now();
        let ends = |is_of_all: bool, came: u64, others: Option<u64>| {
            let mut patience = Patience::new(LIMIT, is_of_all, start);
            patience.came(at(came)(start));
            let others = others.map(|second| at(second)(start));
            patience.ends(others).map(|end| end.duration_since(start).as_secs())
        };
        assert_eq!(ends(false, 0, None), Some(30));
        assert_eq!(ends(false, 25, None), Some(55));
        assert_eq!(ends(false, 25, Some(100)), Some(130));
        assert_eq!(ends(false, 25, Some(3)), Some(55), "others take no time away");
        assert_eq!(ends(true, 25, Some(100)), Some(30));
    }

    #[test]
    fn a_limit_beyond_all_time_is_none() {
        let patience = Patience::new(Duration::MAX, false, Instant::now());
        assert_eq!(patience.ends(None), None);
    }
}
