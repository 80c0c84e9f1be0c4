//! Keeps a log line that could repeat from filling the log: one line a minute, with the count of
//! those that were left out. It knows times.

use crate::lock::Mutex;
use std::time::{Duration, Instant};

/// One line in this time.
const EVERY: Duration = Duration::from_secs(60);

/// Says whether a line may be written now.
#[derive(Debug, Default)]
pub struct LogGate(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    left_out: u64,
}

impl LogGate {
    /// A gate that no line has passed.
    pub const fn new() -> LogGate {
        LogGate(Mutex::new(State { last: None, left_out: 0 }))
    }

    /// Asks for a line. `Some`: write it, and that so many were left out since the last one.
    pub fn pass(&self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    /// The next line passes, since it says something else.
    pub fn reset(&self) {
        *self.0.lock() = State::default();
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < EVERY) {
            state.left_out += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_minute_passes_with_the_count_of_the_others() {
        let (gate, start) = (LogGate::new(), Instant::now());
        assert_eq!(gate.pass_at(start), Some(0));
        assert_eq!((gate.pass_at(start), gate.pass_at(start + EVERY / 2)), (None, None));
        assert_eq!(gate.pass_at(start + EVERY), Some(2));
        assert_eq!(gate.pass_at(start + EVERY), None);
        gate.reset();
        assert_eq!(gate.pass_at(start + EVERY), Some(0));
    }
}
