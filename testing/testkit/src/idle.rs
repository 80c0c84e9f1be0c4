//! What this process uses while nothing is done. A test that asks has its process to itself.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::time::{Duration, Instant};

/// The CPU time of this process until now.
pub fn cpu_time() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
}

/// How many descriptors this process has open.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits until the descriptors have not changed for a while, and says how many there are.
pub fn settled_descriptors() -> usize {
    let (mut seen, mut since) = (descriptors(), Instant::now());
    while since.elapsed() < Duration::from_millis(300) {
        std::thread::sleep(Duration::from_millis(10));
        if descriptors() != seen {
            (seen, since) = (descriptors(), Instant::now());
        }
    }
    seen
}

/// Takes a few windows, each of which says what was used in it: one of them has to be within what
/// is allowed. What comes after every start is over by then, and what an idle thing does all the
/// time is in all of them.
pub fn assert_idle<T: PartialOrd + std::fmt::Debug>(what: &str, allowed: T, mut window: impl FnMut() -> T) {
    let mut used = Vec::new();
    while used.last().is_none_or(|last| *last > allowed) {
        assert!(used.len() < 5, "{what}: {used:?}, allowed {allowed:?}");
        used.push(window());
    }
}

/// The CPU time of two seconds.
pub fn cpu_of_two_seconds() -> Duration {
    let before = cpu_time();
    std::thread::sleep(Duration::from_secs(2));
    cpu_time() - before
}
