//! The bell of a thread that sleeps until a time, or until it is called earlier.

use crate::lock::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Rings at the earliest time that it was set to. Times are microseconds since `epoch`.
#[derive(Debug)]
pub(crate) struct Alarm {
    epoch: Instant,
    /// When it rings. Written under the lock; read without it by those who would set it to a later
    /// time.
    at_us: AtomicU64,
    closed: Mutex<bool>,
    set: Condvar,
}

impl Alarm {
    pub fn new(epoch: Instant) -> Alarm {
        Alarm { epoch, at_us: AtomicU64::new(u64::MAX), closed: Mutex::new(false), set: Condvar::new() }
    }

    /// Lets it ring at `at_us`, unless it rings before.
    pub fn ring_at(&self, at_us: u64) {
        if at_us >= self.at_us.load(Ordering::Acquire) {
            return;
        }
        let _closed = self.closed.lock();
        if at_us < self.at_us.load(Ordering::Relaxed) {
            self.at_us.store(at_us, Ordering::Release);
            self.set.notify_one();
        }
    }

    /// Lets it ring now, for good.
    pub fn close(&self) {
        *self.closed.lock() = true;
        self.set.notify_all();
    }

    /// Sleeps until it rings, and unsets it. `false`: it was closed.
    pub fn wait(&self) -> bool {
        let mut closed = self.closed.lock();
        loop {
            let at_us = self.at_us.load(Ordering::Relaxed);
            let left = Duration::from_micros(at_us).saturating_sub(self.epoch.elapsed());
            if *closed || left.is_zero() {
                self.at_us.store(u64::MAX, Ordering::Release);
                return !*closed;
            }
            if at_us == u64::MAX {
                self.set.wait(&mut closed);
            } else {
                self.set.wait_for(&mut closed, left);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn it_rings_at_the_earliest_time_and_only_once() {
        let alarm = Alarm::new(Instant::now());
        alarm.ring_at(20_000);
        alarm.ring_at(3_600_000_000);
        assert!(alarm.wait());
        assert!(alarm.epoch.elapsed() >= Duration::from_millis(20));
        assert_eq!(alarm.at_us.load(Ordering::Relaxed), u64::MAX);
    }

    #[test]
    fn a_sleeper_hears_an_earlier_time_and_the_close() {
        let alarm = Arc::new(Alarm::new(Instant::now()));
        let sleeper = {
            let alarm = Arc::clone(&alarm);
            std::thread::spawn(move || (alarm.wait(), alarm.wait()))
        };
        alarm.ring_at(3_600_000_000);
        alarm.ring_at(0);
        while alarm.at_us.load(Ordering::Acquire) != u64::MAX {
            std::thread::yield_now();
        }
        alarm.close();
        assert_eq!(sleeper.join().unwrap(), (true, false));
    }
}
