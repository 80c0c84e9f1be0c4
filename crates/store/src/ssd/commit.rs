//! Committers: one thread per volume that makes its changes durable, soon after the first of them, at once when it is urgent
//! or somebody waits. Between commits it does the volume's chores: scrubs, withdrawals, and a look at the disk's free
//! space. This file knows when; what is written in which order is the log's.

use super::shared::{OpenVolume, Shared};
use crate::log::{Commit, Medium, Pages};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Commits that may fail in a row before nothing more is written to the volume.
const FAILURES_MAX: u32 = 5;
/// How long a committer backs off after a failure; twice as long after each further one.
const FIRST_BACKOFF_US: u64 = 10_000;
const BACKOFF_DOUBLINGS: u32 = 7;
/// How often the disk's free space is looked at, and chores that failed are tried again.
const WATCH_US: u64 = 1_000_000;
/// Pieces that are overwritten before the next commit may begin.
const SCRUBS_A_TURN: usize = 2;

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
    pub progress: Mutex<Progress>,
}

/// What a committer did.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    pub commits: u64,
    pub failed_commits: u64,
    pub last_commit_us: u64,
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
            progress: Mutex::default(),
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

    /// A write failed.
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

    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }
}

/// What a turn is to do.
struct Turn {
    /// Whether to commit, and for how many askers.
    commit: bool,
    asked: u64,
    look_at_disk: bool,
}

/// The committer's thread, of volume `number`.
pub(super) fn run(shared: &Arc<Shared>, number: usize) {
    let volume = &shared.volumes[number];
    let mut watch_at_us = 0;
    while let Some(turn) = volume.committer.next_turn(shared, watch_at_us) {
        let now_us = shared.now_us();
        shared.staging.expire(now_us);
        if now_us >= watch_at_us || turn.look_at_disk {
            watch_at_us = now_us + WATCH_US;
            watch_disk(shared, number, turn.look_at_disk);
            // What rested after a failure goes on.
            shared.change(|_, _| ());
        }
        if turn.commit {
            let ended = commit(shared, volume, number);
            volume.committer.end_turn(shared, volume.disk.path(), turn.asked, ended);
        }
        if do_chores(shared, number) {
            volume.committer.hurry();
        }
    }
    let mut state = volume.committer.state.lock();
    state.stopped = true;
    drop(state);
    volume.committer.done.notify_all();
}

impl Committer {
    /// Sleeps until there is something to do, or returns nothing if the committer is to end.
    fn next_turn(&self, shared: &Shared, watch_at_us: u64) -> Option<Turn> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            let now_us = shared.now_us();
            let rested = now_us >= state.backs_off_until_us;
            let wanted = state.urgent
                || state.asked > state.ended
                || state.due_us.is_some_and(|due_us| due_us <= now_us);
            let staging_us = shared.staging.next_deadline_us();
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

    fn end_turn(&self, shared: &Shared, volume: &Path, asked: u64, ended: io::Result<()>) {
        let now_us = shared.now_us();
        let mut state = self.state.lock();
        state.ended = asked;
        match ended {
            Ok(()) => {
                state.failures_in_row = 0;
                if self.read_only.swap(false, Ordering::Relaxed) {
                    shared.lines.writable_again(volume);
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
                shared.lines.commit_failed(volume, &error, read_only && !was_read_only);
            }
        }
        drop(state);
        self.done.notify_all();
    }
}

/// Makes durable what is pending, if anything is.
fn commit(shared: &Arc<Shared>, volume: &OpenVolume, number: usize) -> io::Result<()> {
    let begun_us = shared.now_us();
    let Some(commit) = shared.change_quietly(|tier, now_us| tier.next_commit(now_us, number)) else {
        return Ok(());
    };
    let ended = carry_out(&*volume.medium, &commit);
    shared.change(|tier, now_us| tier.end_commit(now_us, commit, ended.is_ok()));
    let mut progress = volume.committer.progress();
    match ended {
        Ok(()) => {
            progress.commits += 1;
            progress.last_commit_us = shared.now_us() - begun_us;
        }
        Err(_) => progress.failed_commits += 1,
    }
    ended
}

/// Closes the log of a volume whose committer has ended: everything is durable, and the file says so.
pub(super) fn close(shared: &Arc<Shared>, number: usize) -> io::Result<()> {
    let Some(commit) = shared.change_quietly(|tier, _| tier.close(number)) else { return Ok(()) };
    let ended = carry_out(&*shared.volumes[number].medium, &commit);
    shared.change_quietly(|tier, now_us| tier.end_commit(now_us, commit, ended.is_ok()));
    ended
}

/// The steps of a commit, in the order that the log says.
fn carry_out(medium: &dyn Medium, commit: &Commit) -> io::Result<()> {
    medium.sync()?;
    write_pages(medium, &commit.head)?;
    write_pages(medium, &commit.journal)?;
    medium.sync()?;
    if !commit.tail.is_empty() {
        write_pages(medium, &commit.tail)?;
        medium.sync()?;
    }
    Ok(())
}

fn write_pages(medium: &dyn Medium, pages: &Pages) -> io::Result<()> {
    pages.iter().try_for_each(|(offset, bytes)| medium.write_at(*offset, bytes))
}

/// Asks for less of the disk if it has less than the reserve left or refused a write, and for more if it has plenty.
fn watch_disk(shared: &Arc<Shared>, number: usize, write_failed: bool) {
    let volume = &shared.volumes[number];
    let Some(free_bytes) = volume.medium.space().ok().and_then(|space| space.free_bytes) else { return };
    let reserve_bytes = shared.reserve_bytes;
    let is_full = write_failed && volume.disk.stats().no_space > 0 && free_bytes == 0;
    let lacks_bytes = reserve_bytes.saturating_sub(free_bytes).max(u64::from(is_full));
    if lacks_bytes > 0 {
        shared.lines.short_of_space(volume.disk.path(), free_bytes, reserve_bytes);
        shared.change_quietly(|tier, _| tier.shrink(number, lacks_bytes));
    } else if reserve_bytes > 0 && free_bytes > 2 * reserve_bytes {
        shared.change_quietly(|tier, _| tier.grow(number, free_bytes - 2 * reserve_bytes));
    }
}

/// Overwrites what is to be overwritten, a bounded amount, and gives space back or takes it. Says whether there may be more
/// to do now; what failed rests for a while.
fn do_chores(shared: &Arc<Shared>, number: usize) -> bool {
    let mut did = false;
    for _ in 0..SCRUBS_A_TURN {
        let Some(scrub) = shared.change_quietly(|tier, now_us| tier.next_scrub(now_us)) else { break };
        let scrub_volume = scrub.volume;
        let ended = overwrite(&*shared.volumes[scrub.volume].medium, scrub.offset, scrub.bytes);
        shared.change_quietly(|tier, _| tier.end_scrub(scrub, ended.is_ok()));
        if let Err(error) = ended {
            fail_chore(shared, scrub_volume, "overwrite", &error);
            return false;
        }
        did = true;
    }
    while let Some(withdrawal) = shared.change_quietly(|tier, _| tier.next_withdrawal(number)) {
        let medium = &shared.volumes[number].medium;
        let chore = if withdrawal.restore { "take back" } else { "give back" };
        let ended = match withdrawal.restore {
            true => medium.restore(withdrawal.offset, withdrawal.bytes),
            false => medium.withdraw(withdrawal.offset, withdrawal.bytes),
        };
        shared.change_quietly(|tier, _| tier.end_withdrawal(withdrawal, ended.is_ok()));
        if let Err(error) = ended {
            fail_chore(shared, number, chore, &error);
            return false;
        }
        did = true;
    }
    did
}

fn fail_chore(shared: &Shared, number: usize, chore: &str, error: &io::Error) {
    shared.counts.failed_chores.add(1);
    shared.lines.chore_failed(shared.volumes[number].disk.path(), chore, error);
}

fn overwrite(medium: &dyn Medium, offset: u64, bytes: u64) -> io::Result<()> {
    const ZEROS: &[u8] = &[0; 64 << 10];
    let mut done = 0;
    while done < bytes {
        let part = (bytes - done).min(ZEROS.len() as u64);
        medium.write_at(offset + done, &ZEROS[..part as usize])?;
        done += part;
    }
    Ok(())
}
