//! Waiting for what other threads and processes do. The limit is generous: a busy machine does not
//! fail a test, and a test that waits for what never comes still ends and says for what.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(1);

/// Waits until something is so.
///
/// # Panics
/// With `what` where it is not so within a minute.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < LIMIT, "never: {what}");
        std::thread::sleep(PAUSE);
    }
}

/// As [`eventually`], among the tasks of tokio.
///
/// # Panics
/// With `what` where it is not so within a minute.
pub async fn eventually_async(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < LIMIT, "never: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}

/// How an operation ended that sends its end here.
///
/// # Panics
/// Where it has not ended within a minute, or was dropped without an end.
pub fn ended<T>(receiver: &Receiver<T>) -> T {
    receiver.recv_timeout(LIMIT).expect("every operation ends")
}
