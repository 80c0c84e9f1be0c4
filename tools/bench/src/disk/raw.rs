//! The ceiling: a loop around io_uring and nothing else, with registered file and buffers. It knows
//! system calls; it must never check or copy a byte.

use super::memory::{Buffers, Direction, Objects};
use crate::output::Error;
use forebay_transfer::Backing;
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A ring on the file under test.
pub struct Raw {
    ring: IoUring,
    buffers: Buffers,
    file: File,
}

impl Raw {
    /// Opens the file once more.
    pub fn open(path: &Path, buffers: &Buffers) -> Result<Raw, Error> {
        let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
        let ring = IoUring::new(buffers.objects.depth as u32)?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let arena = &buffers.arena;
        let whole = libc::iovec { iov_base: arena.as_ptr().cast(), iov_len: arena.len() };
        // SAFETY: the arena lives as long as the ring, which holds the buffers.
        unsafe { ring.submitter().register_buffers(&[whole]) }?;
        Ok(Raw { ring, buffers: buffers.clone(), file })
    }

    /// Moves one object for each place; what was written is then durable. Buffers take turns, as on
    /// our side: a few that stay in the processor's cache would be a ceiling for nobody.
    pub fn run(&mut self, direction: Direction, places: &[u64]) -> Result<(), Error> {
        let Objects { bytes, depth, slots } = self.buffers.objects;
        let mut free: VecDeque<usize> = (0..slots).collect();
        let (mut begun, mut ended) = (0, 0);
        while ended < places.len() {
            while begun < places.len().min(ended + depth)
                && let Some(slot) = free.pop_front()
            {
                self.push(direction, slot, places[begun])?;
                begun += 1;
            }
            self.ring.submit_and_wait(1)?;
            for entry in self.ring.completion() {
                if i64::from(entry.result()) != bytes as i64 {
                    return Err(format!("raw I/O ended with {}", entry.result()).into());
                }
                free.push_back(entry.user_data() as usize);
                ended += 1;
            }
        }
        match direction {
            Direction::Read => Ok(()),
            Direction::Write => Ok(self.file.sync_data()?),
        }
    }

    fn push(&mut self, direction: Direction, slot: usize, place: u64) -> Result<(), Error> {
        let (start, len) = (self.buffers.start(direction, slot), self.buffers.objects.bytes as u32);
        let entry = match direction {
            Direction::Read => opcode::ReadFixed::new(Fixed(0), start, len, 0).offset(place).build(),
            Direction::Write => opcode::WriteFixed::new(Fixed(0), start, len, 0).offset(place).build(),
        };
        // SAFETY: the buffer is part of the arena, and nothing else uses it while the benchmark is
        // here.
        unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }?;
        Ok(())
    }
}
