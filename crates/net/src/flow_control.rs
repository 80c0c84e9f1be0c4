//! How many flows a peer deserves: one more is tried now and then, and kept if the bytes move
//! faster by a tenth. Pure: told what was moved in how much busy time, it says what to do.

/// A rate is believed after this much busy time
const WINDOW_US: u64 = 100_000;
/// and this many bytes.
const WINDOW_BYTES: u64 = 16 << 20;
/// How much faster one more flow has to be to be kept.
const WORTH: f64 = 1.10;
/// After a try that did not pay, so many windows pass before the next; twice as many after each
/// further one.
const FIRST_PAUSE_WINDOWS: u32 = 32;
const PAUSE_WINDOWS_MAX: u32 = 4096;

/// What to do about the number of flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advice {
    Stay,
    Add,
    Drop,
}

/// The control of one peer.
#[derive(Debug, Clone)]
pub(crate) struct FlowControl {
    flows_max: usize,
    window_start: Moved,
    /// The rate before the last flow was added, while it is on trial.
    trial: Option<f64>,
    pause_windows: u32,
    next_pause_windows: u32,
}

/// What has been moved so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Moved {
    pub bytes: u64,
    pub busy_us: u64,
}

impl FlowControl {
    pub fn new(flows_max: usize) -> FlowControl {
        let next_pause_windows = FIRST_PAUSE_WINDOWS;
        FlowControl {
            flows_max,
            window_start: Moved::default(),
            trial: None,
            pause_windows: 0,
            next_pause_windows,
        }
    }

    /// To be asked after each lot. `flows` are those at work.
    pub fn advise(&mut self, moved: Moved, flows: usize) -> Advice {
        let bytes = moved.bytes.saturating_sub(self.window_start.bytes);
        let busy_us = moved.busy_us.saturating_sub(self.window_start.busy_us);
        if bytes < WINDOW_BYTES || busy_us < WINDOW_US {
            return Advice::Stay;
        }
        self.window_start = moved;
        let rate = bytes as f64 / busy_us as f64;
        match self.trial.take() {
            Some(before) if rate < before * WORTH && flows > 1 => {
                self.pause_windows = self.next_pause_windows;
                self.next_pause_windows = (self.next_pause_windows * 2).min(PAUSE_WINDOWS_MAX);
                Advice::Drop
            }
            Some(_) => {
                self.next_pause_windows = FIRST_PAUSE_WINDOWS;
                self.try_one_more(rate, flows)
            }
            None if self.pause_windows > 0 => {
                self.pause_windows -= 1;
                Advice::Stay
            }
            None => self.try_one_more(rate, flows),
        }
    }

    /// The number of flows has changed: what was moved until now says nothing of the new one.
    pub fn changed(&mut self, moved: Moved) {
        self.window_start = moved;
    }

    /// One more flow was not to be had.
    pub fn refused(&mut self) {
        self.trial = None;
        self.pause_windows = self.next_pause_windows;
    }

    fn try_one_more(&mut self, rate: f64, flows: usize) -> Advice {
        if flows >= self.flows_max {
            return Advice::Stay;
        }
        self.trial = Some(rate);
        Advice::Add
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a control on a wire that has this rate, in bytes per microsecond, with so many flows.
    /// Says how many flows there were after each window.
    fn control(flows_max: usize, windows: usize, rate: impl Fn(usize) -> u64) -> Vec<usize> {
        let (mut control, mut moved, mut flows) = (FlowControl::new(flows_max), Moved::default(), 1);
        let mut seen = Vec::new();
        for _ in 0..windows {
            moved.busy_us += 2 * WINDOW_US;
            moved.bytes += rate(flows) * 2 * WINDOW_US;
            match control.advise(moved, flows) {
                Advice::Stay => {}
                Advice::Add => flows += 1,
                Advice::Drop => flows -= 1,
            }
            seen.push(flows);
        }
        seen
    }

    #[test]
    fn flows_are_added_while_each_pays() {
        let seen = control(16, 100, |flows| 1_000 * flows.min(4) as u64);
        assert_eq!(seen[..6], [2, 3, 4, 5, 4, 4]);
        assert!(seen[5..].iter().filter(|flows| **flows != 4).count() <= 3, "{seen:?}");
    }

    #[test]
    fn there_are_never_more_than_are_allowed() {
        assert_eq!(control(3, 50, |flows| 1_000 * flows as u64).into_iter().max(), Some(3));
        assert_eq!(control(1, 50, |flows| 1_000 * flows as u64).into_iter().max(), Some(1));
    }

    #[test]
    fn little_traffic_is_no_reason_for_more() {
        let mut control = FlowControl::new(8);
        for lot in 1..100u64 {
            let moved = Moved { bytes: lot * 4096, busy_us: lot * 1_000_000 };
            assert_eq!(control.advise(moved, 1), Advice::Stay);
        }
    }
}
