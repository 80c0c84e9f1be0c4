//! A power supply that fails at a chosen write. It keeps what every write since the last sync has
//! overwritten; when the power fails, each of these writes is kept, lost or torn at a sector, and
//! the process ends. So a store meets what a disk with a volatile cache leaves behind, which no
//! `SIGKILL` shows: the system's own cache survives that.
//!
//! This file knows writes and syncs of files. The length of a file stays what it was at the
//! failure, and names are kept: file systems put both into a journal, in order.

use crate::random::Random;
use crate::value::SECTOR_BYTES;
use forebay_transfer::lock::Mutex;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Where memory for direct I/O starts.
const DIRECT_ALIGN: usize = 4096;

#[derive(Debug, Default)]
pub struct Power {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Writes until it fails, counted down.
    fails_after: Option<u64>,
    seed: u64,
    /// In the order in which they were made.
    unsynced: Vec<Unsynced>,
    next: u64,
}

/// A write that no sync has made durable yet.
#[derive(Debug)]
struct Unsynced {
    number: u64,
    file: Arc<File>,
    offset: u64,
    before: Vec<u8>,
    has_ended: bool,
}

/// A write that was announced. Hand it back when the write has ended.
#[derive(Debug)]
#[must_use]
pub struct Announced(Option<u64>);

/// Writes that a sync makes durable, if it succeeds.
#[derive(Debug)]
#[must_use]
pub struct Syncing(Vec<u64>);

impl Power {
    /// Fails while the write after `writes` others is made.
    pub fn fail_after(&self, writes: u64, seed: u64) {
        let state = &mut *self.state.lock();
        (state.fails_after, state.seed) = (Some(writes), seed);
    }

    /// To be called before `parts` are written one after another. Does not return if the power
    /// fails: then the write was made, and is lost, torn or kept like any other.
    pub fn write(&self, file: &Arc<File>, offset: u64, parts: &[&[u8]]) -> io::Result<Announced> {
        let state = &mut *self.state.lock();
        let Some(left) = state.fails_after else { return Ok(Announced(None)) };
        let bytes = parts.concat();
        let before = read_up_to(file, offset, bytes.len())?.bytes().to_vec();
        let number = state.next;
        state.next += 1;
        state.unsynced.push(Unsynced { number, file: Arc::clone(file), offset, before, has_ended: false });
        if left == 0 {
            let mut last = Aligned::zeroed(bytes.len());
            last.bytes().copy_from_slice(&bytes);
            file.write_all_at(last.bytes(), offset)?;
            state.fail()?;
        }
        state.fails_after = Some(left.saturating_sub(1));
        Ok(Announced(Some(number)))
    }

    /// The write has ended, however it did.
    pub fn written(&self, announced: Announced) {
        let state = &mut *self.state.lock();
        if let Some(write) = state.unsynced.iter_mut().find(|write| Some(write.number) == announced.0) {
            write.has_ended = true;
        }
    }

    /// To be called before a file is synced: only writes that have ended by then become durable.
    pub fn sync(&self, file: &File) -> io::Result<Syncing> {
        let same = |write: &Unsynced| Ok::<_, io::Error>(inode(&write.file)? == inode(file)?);
        let mut numbers = Vec::new();
        for write in self.state.lock().unsynced.iter().filter(|write| write.has_ended) {
            if same(write)? {
                numbers.push(write.number);
            }
        }
        Ok(Syncing(numbers))
    }

    /// The sync has succeeded.
    pub fn synced(&self, syncing: &Syncing) {
        self.state.lock().unsynced.retain(|write| !syncing.0.contains(&write.number));
    }
}

impl State {
    /// Loses what was not synced, then ends the process. The lock is held, so nothing else is
    /// written meanwhile.
    fn fail(&mut self) -> io::Result<()> {
        lose(&self.unsynced, self.seed)?;
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
        loop {
            std::thread::park();
        }
    }
}

/// Undoes writes in part, the last one first, so that overlapping ones are undone in order.
fn lose(unsynced: &[Unsynced], seed: u64) -> io::Result<()> {
    let mut random = Random::new(seed);
    // A third of the failures loses everything, a third almost nothing: extremes find more than
    // averages.
    let lost_percent = [100, 50, 5][random.below(3) as usize];
    for write in unsynced.iter().rev() {
        if !random.chance(lost_percent) {
            continue;
        }
        let sectors = write.before.len().div_ceil(SECTOR_BYTES) as u64;
        let (first_lost, scattered) = match random.below(3) {
            0 => (0, false),
            1 => (random.below(sectors), false),
            _ => (0, true),
        };
        let mut left = read_up_to(&write.file, write.offset, write.before.len())?;
        for sector in first_lost..sectors {
            if scattered && random.chance(50) {
                continue;
            }
            let start = sector as usize * SECTOR_BYTES;
            let end = (start + SECTOR_BYTES).min(write.before.len());
            left.bytes()[start..end].copy_from_slice(&write.before[start..end]);
        }
        write.file.write_all_at(left.bytes(), write.offset)?;
    }
    Ok(())
}

/// Bytes that lie in memory as direct I/O wants them: beside direct writes of a store, others
/// through the system's cache would make the system report errors that no disk had.
pub struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn zeroed(len: usize) -> Aligned {
        let memory = vec![0; len + DIRECT_ALIGN];
        let start = memory.as_ptr().align_offset(DIRECT_ALIGN);
        Aligned { memory, start, len }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// What lies in a file, with zeros after its end.
pub(crate) fn read_up_to(file: &File, offset: u64, bytes: usize) -> io::Result<Aligned> {
    let (mut buffer, mut read) = (Aligned::zeroed(bytes), 0);
    while read < bytes {
        match file.read_at(&mut buffer.bytes()[read..], offset + read as u64) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(buffer)
}

fn inode(file: &File) -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> Arc<File> {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        Arc::new(file)
    }

    fn write(power: &Power, file: &Arc<File>, offset: u64, bytes: &[u8]) {
        let announced = power.write(file, offset, &[bytes]).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        power.written(announced);
    }

    fn content(file: &Arc<File>) -> Vec<u8> {
        read_up_to(file, 0, 4 * SECTOR_BYTES).unwrap().bytes().to_vec()
    }

    #[test]
    fn what_was_synced_survives_every_power_failure() {
        for seed in 0..50 {
            let (power, file) = (Power::default(), file(&[1; 4 * SECTOR_BYTES]));
            power.fail_after(9, seed);
            write(&power, &file, 0, &[2; 4 * SECTOR_BYTES]);
            let syncing = power.sync(&file).unwrap();
            power.synced(&syncing);
            lose(&power.state.lock().unsynced, seed).unwrap();
            assert!(content(&file) == [2; 4 * SECTOR_BYTES]);
        }
    }

    #[test]
    fn what_was_not_synced_is_kept_lost_and_torn_by_sectors() {
        let (mut kept, mut lost, mut torn) = (0, 0, 0);
        for seed in 0..200 {
            let (power, file) = (Power::default(), file(&[1; 4 * SECTOR_BYTES]));
            power.fail_after(9, seed);
            write(&power, &file, 0, &[2; 4 * SECTOR_BYTES]);
            lose(&power.state.lock().unsynced, seed).unwrap();
            let sectors = content(&file);
            assert!(sectors.chunks(SECTOR_BYTES).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
            match sectors.chunks(SECTOR_BYTES).filter(|sector| sector[0] == 2).count() {
                0 => lost += 1,
                4 => kept += 1,
                _ => torn += 1,
            }
        }
        assert!(kept > 20 && lost > 20 && torn > 20, "{kept} kept, {lost} lost, {torn} torn");
    }

    #[test]
    fn a_write_that_had_not_ended_when_the_sync_began_is_not_durable() {
        let (power, file) = (Power::default(), file(&[1; SECTOR_BYTES]));
        power.fail_after(9, 0);
        let announced = power.write(&file, 0, &[&[2; SECTOR_BYTES]]).unwrap();
        let syncing = power.sync(&file).unwrap();
        power.written(announced);
        power.synced(&syncing);
        assert_eq!(power.state.lock().unsynced.len(), 1);
    }
}
