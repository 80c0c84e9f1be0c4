//! The commit threads, one for each volume: they make changes durable when
//! [`Committer`](super::committer::Committer) says so. Between commits they do the volume's chores:
//! scrubs, withdrawals, and a look at the disk's free space. What is written in which order is the
//! log's.

use super::inner::{OpenVolume, SsdInner};
use crate::log::Medium;
use std::io;
use std::sync::Arc;

/// How often the disk's free space is looked at, and chores that failed are tried again.
const WATCH_US: u64 = 1_000_000;
/// Pieces that are overwritten before the next commit may begin.
const SCRUBS_A_TURN: usize = 2;

/// The committer's thread, of volume `number`.
pub(super) fn run(shared: &Arc<SsdInner>, number: usize) {
    let volume = &shared.volumes[number];
    let mut watch_at_us = 0;
    while let Some(turn) = volume.committer.next_turn(|| shared.now_us(), &shared.staging, watch_at_us) {
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
            let path = volume.disk.path();
            volume.committer.end_turn(shared.now_us(), turn.asked, ended, &shared.lines, path);
        }
        if do_chores(shared, number) {
            volume.committer.hurry();
        }
    }
    volume.committer.stopped();
}

/// Makes durable what is pending, if anything is.
fn commit(shared: &Arc<SsdInner>, volume: &OpenVolume, number: usize) -> io::Result<()> {
    let begun_us = shared.now_us();
    let Some(commit) = shared.change_quietly(|tier, now_us| tier.next_commit(now_us, number)) else {
        return Ok(());
    };
    let ended = commit.write_to(&*volume.medium);
    shared.change(|tier, now_us| tier.end_commit(now_us, commit, ended.is_ok()));
    let mut counts = volume.committer.counts.lock();
    match ended {
        Ok(()) => {
            counts.commits += 1;
            counts.last_commit_us = shared.now_us() - begun_us;
        }
        Err(_) => counts.failed_commits += 1,
    }
    ended
}

/// Closes the log of a volume whose committer has ended: everything is durable, and the file says
/// so.
pub(super) fn close(shared: &Arc<SsdInner>, number: usize) -> io::Result<()> {
    let Some(commit) = shared.change_quietly(|tier, _| tier.close(number)) else { return Ok(()) };
    let ended = commit.write_to(&*shared.volumes[number].medium);
    shared.change_quietly(|tier, now_us| tier.end_commit(now_us, commit, ended.is_ok()));
    ended
}

/// Asks for less of the disk if it has less than the reserve left or refused a write, and for more
/// if it has plenty.
fn watch_disk(shared: &Arc<SsdInner>, number: usize, write_failed: bool) {
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

/// Overwrites what is to be overwritten, a bounded amount, and gives space back or takes it. Says
/// whether there may be more to do now; what failed rests for a while.
fn do_chores(shared: &Arc<SsdInner>, number: usize) -> bool {
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

fn fail_chore(shared: &SsdInner, number: usize, chore: &str, error: &io::Error) {
    shared.counts.lock().failed_chores += 1;
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
