//! When write-back may begin a write, so that reads of the disk come first: now, or at which time
//! to ask again. Sans-IO: time is an argument. This file knows when the disk is read, for how long
//! it was not read before, and how fast it writes.
//!
//! Engines read the disk in bursts: the prefix of a prompt, then nothing while the prompt is
//! computed. The times between bursts are the windows. How long one will last is taken from the
//! windows before it: of those that lasted at least as long as this one has, three in four lasted
//! at least as long as is now expected. So no engine has to say what it does:
//!
//! * **Prefill**: the disk is read, or will be within the windows seen lately. Writes begin in
//!   windows that are expected to last until they end.
//! * **Decode**: this window has lasted longer than any other. One chunk is written at a time, so
//!   that a read waits for one at most.
//! * **Idle**: the disk was not read for a second. As many writes as the pacer allows.
//!
//! A write does not wait if it is due, if no window was long enough for it, or if reads were seen
//! to keep their rate beside writes.

use super::rates::{Rates, Side};
use std::collections::VecDeque;

/// When writes begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// As soon as the pacer allows them.
    AtOnce,
    /// In windows between reads that are long enough.
    InWindows,
    /// When the disk was not read for a second. Here to be compared with the others.
    WhenIdle,
}

/// Why a write begins now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Waiting would bring nothing.
    AtOnce,
    /// It is expected to end before the next read.
    Window,
    /// Nobody knows when the next read comes, and nothing else is being written.
    BestEffort,
    Idle,
    /// It has waited for too long, or too much waits, or somebody waits for all of it.
    Due,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    Now(Why),
    /// Not before this time, unless a read or a write ends.
    Later(u64),
}

/// A pause shorter than this is a part of its burst of reads.
pub const SETTLE_US: u64 = 2_000;
/// A disk that was not read for so long is idle.
pub const IDLE_US: u64 = 1_000_000;
/// Windows that are remembered.
const WINDOWS: usize = 64;
/// Windows that have to be known before all of them can be too short.
const WINDOWS_MIN: usize = 8;
/// Of the windows that may be meant, this part may end sooner than is expected.
const ENDS_SOONER: usize = 4;
/// Reads that keep this part of their rate beside writes are not disturbed by them.
const KEPT_IS_HARMLESS: f64 = 0.9;

#[derive(Debug)]
pub struct Windows {
    timing: Timing,
    rates: Rates,
    /// Since when the disk is not read. `None`: it is being read, or was never read.
    quiet_since_us: Option<u64>,
    /// How long the last windows lasted, in the order in which they ended.
    lasted_us: VecDeque<u64>,
}

impl Windows {
    pub fn new(timing: Timing) -> Windows {
        Windows { timing, rates: Rates::default(), quiet_since_us: None, lasted_us: VecDeque::new() }
    }

    pub fn read_began(&mut self, now_us: u64) {
        if let Some(since_us) = self.quiet_since_us.take() {
            let lasted_us = now_us.saturating_sub(since_us);
            if (SETTLE_US..IDLE_US).contains(&lasted_us) {
                self.lasted_us.truncate(WINDOWS - 1);
                self.lasted_us.push_front(lasted_us);
            }
        }
        self.rates.began(now_us, Side::Read);
    }

    /// A read that began has ended. `bytes` is 0 if it failed.
    pub fn read_ended(&mut self, now_us: u64, bytes: u64) {
        self.rates.ended(now_us, Side::Read, bytes);
        if !self.is_read() {
            self.quiet_since_us = Some(now_us);
        }
    }

    pub fn write_began(&mut self, now_us: u64) {
        self.rates.began(now_us, Side::Write);
    }

    /// A write that began has ended. `bytes` is 0 if it failed.
    pub fn write_ended(&mut self, now_us: u64, bytes: u64) {
        self.rates.ended(now_us, Side::Write, bytes);
    }

    /// Whether reads hold back writes no longer that they held back before.
    pub fn may_go_on(&self) -> bool {
        self.timing != Timing::AtOnce && !self.is_read()
    }

    fn is_read(&self) -> bool {
        self.rates.under_way(Side::Read) > 0
    }

    /// Whether a write of `bytes` bytes may begin while `writing_bytes` are being written.
    pub fn ask(&self, now_us: u64, bytes: u64, writing_bytes: u64) -> When {
        match self.timing {
            Timing::AtOnce => When::Now(Why::AtOnce),
            Timing::WhenIdle => self.when_idle(now_us),
            Timing::InWindows if self.is_waiting_useless(bytes) => When::Now(Why::AtOnce),
            Timing::InWindows => self.in_windows(now_us, bytes, writing_bytes),
        }
    }

    fn when_idle(&self, now_us: u64) -> When {
        match self.quiet_us(now_us) {
            None => When::Later(u64::MAX),
            Some(quiet_us) if quiet_us >= IDLE_US => When::Now(Why::Idle),
            Some(quiet_us) => When::Later(now_us + IDLE_US - quiet_us),
        }
    }

    fn in_windows(&self, now_us: u64, bytes: u64, writing_bytes: u64) -> When {
        let Some(quiet_us) = self.quiet_us(now_us) else { return When::Later(u64::MAX) };
        if quiet_us < SETTLE_US {
            return When::Later(now_us + SETTLE_US - quiet_us);
        }
        let Some((next_us, ends_us)) = self.expect(quiet_us) else {
            return match self.rates.under_way(Side::Write) {
                _ if quiet_us >= IDLE_US => When::Now(Why::Idle),
                0 => When::Now(Why::BestEffort),
                _ => When::Later(now_us + IDLE_US - quiet_us),
            };
        };
        if self.rates.write_us(writing_bytes + bytes) <= ends_us - quiet_us {
            return When::Now(Why::Window);
        }
        // When this window has outlasted another one, more is expected of it.
        When::Later(now_us + next_us - quiet_us)
    }

    /// For how long the disk has not been read; for ever if it never was.
    fn quiet_us(&self, now_us: u64) -> Option<u64> {
        match self.quiet_since_us {
            Some(since_us) => Some(now_us.saturating_sub(since_us)),
            None => (!self.is_read()).then_some(IDLE_US),
        }
    }

    /// Of a window that has lasted for `quiet_us`: the end of the shortest that lasted longer, and
    /// the end that is expected. `None` if none lasted longer.
    fn expect(&self, quiet_us: u64) -> Option<(u64, u64)> {
        let mut longer_us: Vec<u64> =
            self.lasted_us.iter().copied().filter(|lasted_us| *lasted_us > quiet_us).collect();
        longer_us.sort_unstable();
        Some((*longer_us.first()?, longer_us[longer_us.len() / ENDS_SOONER]))
    }

    fn is_waiting_useless(&self, bytes: u64) -> bool {
        let needed_us = SETTLE_US + self.rates.write_us(bytes);
        let too_short = self.lasted_us.len() >= WINDOWS_MIN
            && self.lasted_us.iter().all(|lasted_us| *lasted_us < needed_us);
        too_short || self.rates.reads_keep().is_some_and(|kept| kept >= KEPT_IS_HARMLESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// Windows of a disk that writes 1 MB in 1 ms, after windows of these lengths in milliseconds,
    /// with bursts of 1 ms between them; and when the last burst ended.
    fn after(lasted_ms: &[u64]) -> (Windows, u64) {
        let mut windows = Windows::new(Timing::InWindows);
        windows.write_began(0);
        windows.write_ended(MB / 1_000, MB);
        let mut now_us = 10_000_000;
        for lasted_ms in std::iter::once(&2_000).chain(lasted_ms) {
            now_us += lasted_ms * 1_000;
            windows.read_began(now_us);
            now_us += 1_000;
            windows.read_ended(now_us, MB);
        }
        (windows, now_us)
    }

    #[test]
    fn nothing_is_begun_while_the_disk_is_read_or_between_two_reads_of_a_burst() {
        let (mut windows, now_us) = after(&[50; 8]);
        windows.read_began(now_us);
        assert_eq!(windows.ask(now_us + 500_000, MB, 0), When::Later(u64::MAX));
        windows.read_ended(now_us + 500_000, MB);
        assert_eq!(windows.ask(now_us + 501_000, MB, 0), When::Later(now_us + 502_000));
        assert_eq!(windows.ask(now_us + 502_000, MB, 0), When::Now(Why::Window));
    }

    #[test]
    fn a_write_begins_in_a_window_only_if_it_ends_before_the_next_read() {
        let (windows, now_us) = after(&[50; 8]);
        let at_ms =
            |ms: u64, mb: u64, writing_mb: u64| windows.ask(now_us + ms * 1_000, mb * MB, writing_mb * MB);
        assert_eq!(at_ms(40, 10, 0), When::Now(Why::Window));
        assert_eq!(at_ms(40, 11, 0), When::Later(now_us + 50_000));
        assert_eq!(at_ms(40, 1, 10), When::Later(now_us + 50_000));
    }

    #[test]
    fn a_window_that_outlasts_the_short_ones_is_taken_for_a_long_one() {
        let (windows, now_us) = after(&[10, 10, 10, 10, 100, 100, 100, 100]);
        assert_eq!(windows.ask(now_us + 5_000, 20 * MB, 0), When::Later(now_us + 10_000));
        assert_eq!(windows.ask(now_us + 10_000, 20 * MB, 0), When::Now(Why::Window));
    }

    #[test]
    fn beyond_all_windows_one_chunk_is_written_at_a_time_and_many_on_an_idle_disk() {
        let (mut windows, now_us) = after(&[50; 8]);
        assert_eq!(windows.ask(now_us + 60_000, MB, 0), When::Now(Why::BestEffort));
        windows.write_began(now_us + 60_000);
        assert_eq!(windows.ask(now_us + 60_000, MB, MB), When::Later(now_us + IDLE_US));
        assert_eq!(windows.ask(now_us + IDLE_US, MB, MB), When::Now(Why::Idle));
    }

    #[test]
    fn a_disk_that_was_never_read_is_idle() {
        let windows = Windows::new(Timing::InWindows);
        assert_eq!(windows.ask(0, MB, 100 * MB), When::Now(Why::Idle));
    }

    #[test]
    fn a_write_for_which_no_window_is_long_enough_does_not_wait() {
        let (mut windows, now_us) = after(&[5; 8]);
        windows.read_began(now_us + 1_000);
        assert_eq!(windows.ask(now_us + 1_000, 4 * MB, 0), When::Now(Why::AtOnce));
        assert_eq!(windows.ask(now_us + 1_000, 2 * MB, 0), When::Later(u64::MAX));
    }

    #[test]
    fn reads_that_writes_do_not_slow_down_hold_none_back() {
        let (mut windows, now_us) = after(&[50; 8]);
        let read_beside_a_write = |windows: &mut Windows, took_us| {
            windows.write_began(now_us);
            windows.read_began(now_us);
            windows.read_ended(now_us + took_us, MB);
            windows.write_ended(now_us + took_us, 0);
            windows.read_began(now_us + took_us);
            windows.ask(now_us + took_us, MB, 0)
        };
        assert_eq!(read_beside_a_write(&mut windows, 1_000), When::Now(Why::AtOnce));
        let (mut windows, _) = after(&[50; 8]);
        assert_eq!(read_beside_a_write(&mut windows, 1_200), When::Later(u64::MAX));
    }

    #[test]
    fn idle_nights_are_no_windows() {
        let (mut windows, now_us) = after(&[50; 8]);
        windows.read_began(now_us + IDLE_US);
        windows.read_ended(now_us + IDLE_US, MB);
        assert_eq!(windows.ask(now_us + IDLE_US + 60_000, MB, MB), When::Now(Why::BestEffort));
    }
}
