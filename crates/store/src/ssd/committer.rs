//! When a volume is to be committed next: soon after the first change, at once when it is urgent or
//! somebody waits, and later and later while commits fail. `commit.rs` is the thread that asks.

use super::log_lines::LogLines;
use super::pool::Pool;
use super::stat::VolumeStat;
use forebay_transfer::lock::{Condvar, Mutex};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Commits that may fail in a row before nothing more is written to the volume.
const FAILURES_MAX: u32 = 5;
/// How long a committer backs off after a failure; twice as long after each further one.
const FIRST_BACKOFF_US: u64 = 10_000;
const BACKOFF_DOUBLINGS: u32 = 7;

/// When a volume is to be committed next, and how it went.
#[derive(Debug)]
pub(super) struct Committer {
    interval_us: u64,
    state: Mutex<State>,
    /// For the committer.
    wake: Condvar,
    /// For those who wait for a commit.
    done: Condvar,
    read_only: AtomicBool,
    /// Commits so far.
    pub counts: Mutex<VolumeStat>,
}

#[derive(Debug, Default)]
struct State {
    /// When the oldest change is to be committed.
    due_us: Option<u64>,
    urgent: bool,
    /// Commits that somebody asked for, and those of them that ended.
    asked: u64,
    ended: u64,
    /// The last of these that failed, and why.
    failed: Option<(u64, String)>,
    failures_in_row: u32,
    backs_off_until_us: u64,
    /// A write failed: the disk may be full.
    look_at_disk: bool,
    stop: bool,
    stopped: bool,
}

impl Committer {
    pub fn new(interval_us: u64) -> Committer {
        Committer {
            interval_us,
            state: Mutex::default(),
            wake: Condvar::new(),
            done: Condvar::new(),
            read_only: AtomicBool::new(false),
            counts: Mutex::default(),
        }
    }

    /// Whether commits failed so often that nothing more is to be written.
    pub fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    /// Something changed in the tier.
    pub fn note(&self, now_us: u64, pending: bool, urgent: bool) {
        if !pending && !urgent {
            return;
        }
        let mut state = self.state.lock();
        let is_new = state.due_us.is_none() || (urgent && !state.urgent);
        state.due_us.get_or_insert(now_us.saturating_add(self.interval_us));
        state.urgent |= urgent;
        drop(state);
        if is_new {
            self.wake.notify_one();
        }
    }

    pub fn note_failed_write(&self) {
        self.state.lock().look_at_disk = true;
        self.wake.notify_one();
    }

    /// Has the committer take its next turn now, for chores that came up.
    pub fn hurry(&self) {
        self.state.lock().urgent = true;
        self.wake.notify_one();
    }

    /// Has the committer look at the clock again.
    pub fn look_again(&self) {
        // With the lock, so that a committer that is about to sleep is not missed.
        drop(self.state.lock());
        self.wake.notify_one();
    }

    /// Asks for a commit and sleeps until one that began after this call has ended.
    pub fn flush(&self) -> Result<(), String> {
        let mut state = self.state.lock();
        state.asked += 1;
        let mine = state.asked;
        self.wake.notify_one();
        while state.ended < mine && !state.stopped {
            self.done.wait(&mut state);
        }
        match &state.failed {
            Some((failed, error)) if *failed >= mine => Err(error.clone()),
            _ if state.ended < mine => Err("the store was closed".into()),
            _ => Ok(()),
        }
    }

    /// Has the committer end after what it is doing.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.wake.notify_one();
    }
}

/// What a turn is to do.
pub(super) struct Turn {
    /// Whether to commit, and for how many askers.
    pub commit: bool,
    pub asked: u64,
    pub look_at_disk: bool,
}

impl Committer {
    /// Sleeps until there is something to do, or returns nothing if the committer is to end.
    pub fn next_turn(&self, clock: impl Fn() -> u64, staging: &Pool, watch_at_us: u64) -> Option<Turn> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            let now_us = clock();
            let rested = now_us >= state.backs_off_until_us;
            let wanted = state.urgent
                || state.asked > state.ended
                || state.due_us.is_some_and(|due_us| due_us <= now_us);
            let staging_us = staging.next_deadline_us();
            let is_late = staging_us.is_some_and(|deadline_us| deadline_us <= now_us);
            if (wanted && rested) || now_us >= watch_at_us || is_late || state.look_at_disk {
                let commit = wanted && rested;
                if commit {
                    (state.urgent, state.due_us) = (false, None);
                }
                let look_at_disk = std::mem::take(&mut state.look_at_disk);
                return Some(Turn { commit, asked: state.asked, look_at_disk });
            }
            let commit_at_us = match wanted {
                true => Some(state.backs_off_until_us),
                false => state.due_us.map(|due_us| due_us.max(state.backs_off_until_us)),
            };
            let wake_us = [commit_at_us, staging_us].into_iter().flatten().fold(watch_at_us, u64::min);
            let timeout = Duration::from_micros(wake_us.saturating_sub(now_us).max(1));
            self.wake.wait_for(&mut state, timeout);
        }
    }

    pub fn end_turn(&self, now_us: u64, asked: u64, ended: io::Result<()>, lines: &LogLines, volume: &Path) {
        let mut state = self.state.lock();
        state.ended = asked;
        match ended {
            Ok(()) => {
                state.failures_in_row = 0;
                if self.read_only.swap(false, Ordering::Relaxed) {
                    lines.writable_again(volume);
                }
            }
            Err(error) => {
                state.failed = Some((asked, error.to_string()));
                state.backs_off_until_us =
                    now_us + (FIRST_BACKOFF_US << state.failures_in_row.min(BACKOFF_DOUBLINGS));
                state.failures_in_row += 1;
                state.due_us.get_or_insert(now_us);
                let read_only = state.failures_in_row >= FAILURES_MAX;
                let was_read_only = self.read_only.fetch_or(read_only, Ordering::Relaxed);
                lines.commit_failed(volume, &error, read_only && !was_read_only);
            }
        }
        drop(state);
        self.done.notify_all();
    }

    /// The thread ends: whoever waits for a commit waits in vain.
    pub fn stopped(&self) {
        self.state.lock().stopped = true;
        self.done.notify_all();
    }
}
