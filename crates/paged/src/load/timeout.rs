//! When a load has taken too long. Sans-IO: it is told moments.
//!
//! A load that a step waits for has its time from its begin on. Any other may take as long as
//! something of it comes now and then; and while it has nothing on its way and waits for its turn,
//! as long as others go on.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct Timeout {
    limit: Duration,
    /// It is over so long after the begin, whatever comes.
    is_total: bool,
    /// When the load began, or something of it last came.
    since: Instant,
}

impl Timeout {
    /// Of a load that begins now.
    pub fn new(limit: Duration, is_total: bool, now: Instant) -> Timeout {
        Timeout { limit, is_total, since: now }
    }

    /// Something of the load has come, or its turn has.
    pub fn progressed(&mut self, now: Instant) {
        if !self.is_total {
            self.since = now;
        }
    }

    /// When it is over unless something comes. `others` is when those before the load last went on,
    /// if it only waits for its turn. `None` is never.
    pub fn ends(&self, others: Option<Instant>) -> Option<Instant> {
        let others = others.filter(|_| !self.is_total);
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
        let ends = |is_total: bool, came: u64, others: Option<u64>| {
            let mut timeout = Timeout::new(LIMIT, is_total, start);
            timeout.progressed(at(came)(start));
            let others = others.map(|second| at(second)(start));
            timeout.ends(others).map(|end| end.duration_since(start).as_secs())
        };
        assert_eq!(ends(false, 0, None), Some(30));
        assert_eq!(ends(false, 25, None), Some(55));
        assert_eq!(ends(false, 25, Some(100)), Some(130));
        assert_eq!(ends(false, 25, Some(3)), Some(55), "others take no time away");
        assert_eq!(ends(true, 25, Some(100)), Some(30));
    }

    #[test]
    fn a_limit_beyond_all_time_is_none() {
        let timeout = Timeout::new(Duration::MAX, false, Instant::now());
        assert_eq!(timeout.ends(None), None);
    }
}
