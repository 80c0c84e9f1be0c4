//! The ceiling: a loop around io_uring and nothing else, with registered files and buffers. It
//! knows system calls; it must never check or copy a byte.

use super::memory::{At, Buffers, Direction, Objects};
use crate::output::Error;
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A ring on the files under test.
pub struct Raw {
    ring: IoUring,
    buffers: Buffers,
    files: Vec<File>,
}

impl Raw {
    /// Opens the files once more.
    pub fn open(paths: &[&Path], buffers: &Buffers) -> Result<Raw, Error> {
        let open =
            |path: &&Path| File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let files: Vec<File> = paths.iter().map(open).collect::<Result<_, _>>()?;
        let ring = IoUring::new(buffers.objects.depth as u32)?;
        let descriptors: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        ring.submitter().register_files(&descriptors)?;
        // The kernel takes no buffer of more than 1 GiB: each object has one of its own.
        let Objects { bytes, slots, .. } = buffers.objects;
        let both = [Direction::Write, Direction::Read];
        let starts = both.iter().flat_map(|side| (0..slots).map(|slot| buffers.start(*side, slot)));
        let buffer = |start: *mut u8| libc::iovec { iov_base: start.cast(), iov_len: bytes as usize };
        let all: Vec<libc::iovec> = starts.map(buffer).collect();
        // SAFETY: the buffers lie in the arena, which lives as long as the ring that holds it.
        unsafe { ring.submitter().register_buffers(&all) }?;
        Ok(Raw { ring, buffers: buffers.clone(), files })
    }

    /// Moves one object for each place; what was written is then durable. Buffers take turns, as on
    /// our side: a few that stay in the processor's cache would be a ceiling for nobody.
    pub fn run(&mut self, direction: Direction, places: &[At]) -> Result<(), Error> {
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
            Direction::Write => Ok(self.files.iter().try_for_each(File::sync_data)?),
        }
    }

    fn push(&mut self, direction: Direction, slot: usize, at: At) -> Result<(), Error> {
        let (start, bytes) = (self.buffers.start(direction, slot), self.buffers.objects.bytes);
        let (file, len) = (Fixed(at.file as u32), bytes as u32);
        let buffer = (self.buffers.offset(direction, slot) / bytes) as u16;
        let entry = match direction {
            Direction::Read => opcode::ReadFixed::new(file, start, len, buffer).offset(at.offset).build(),
            Direction::Write => opcode::WriteFixed::new(file, start, len, buffer).offset(at.offset).build(),
        };
        // SAFETY: the buffer is part of the arena, and nothing else uses it while the benchmark is
        // here.
        unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }?;
        Ok(())
    }
}
