//! Host memory as the controller reaches it: by device address, within bounds. What stands behind
//! the trait may be this process's memory, memory shared with another one, or a GPU's.

use std::sync::atomic::{AtomicU32, Ordering};
use thiserror::Error;

/// An access to addresses that are no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{bytes} bytes at {address:#x} are not within memory")]
pub struct OutsideMemory {
    pub address: u64,
    pub bytes: usize,
}

/// What a controller can read and write.
pub trait HostMemory {
    fn contains(&self, address: u64, bytes: u64) -> bool;

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), OutsideMemory>;

    fn write(&self, address: u64, from: &[u8]) -> Result<(), OutsideMemory>;

    /// Stores a word at a multiple of four. Whoever sees it sees all that was written before it.
    fn publish(&self, address: u64, word: u32) -> Result<(), OutsideMemory>;
}

impl<M: HostMemory + ?Sized> HostMemory for &M {
    fn contains(&self, address: u64, bytes: u64) -> bool {
        (**self).contains(address, bytes)
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), OutsideMemory> {
        (**self).read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), OutsideMemory> {
        (**self).write(address, from)
    }

    fn publish(&self, address: u64, word: u32) -> Result<(), OutsideMemory> {
        (**self).publish(address, word)
    }
}

/// Memory of this process from some device address on. Bytes that share a word with bytes that
/// another thread writes at the same time may be lost; queues and data of NVMe do not.
#[derive(Debug)]
pub struct WordMemory {
    start: u64,
    words: Vec<AtomicU32>,
}

impl WordMemory {
    /// Zeros; `start` and `bytes` are rounded down to multiples of four.
    pub fn new(start: u64, bytes: usize) -> WordMemory {
        let words = (0..bytes / 4).map(|_| AtomicU32::new(0)).collect();
        WordMemory { start: start & !3, words }
    }

    /// Loads the word at an address, with acquire ordering.
    pub fn load(&self, address: u64) -> Result<u32, OutsideMemory> {
        let at = self.place(address, 4)?;
        Ok(self.words[at / 4].load(Ordering::Acquire))
    }

    /// Where these bytes begin.
    fn place(&self, address: u64, bytes: usize) -> Result<usize, OutsideMemory> {
        let outside = OutsideMemory { address, bytes };
        let at = address.checked_sub(self.start).ok_or(outside)?;
        let end = at.checked_add(bytes as u64).ok_or(outside)?;
        if end <= self.words.len() as u64 * 4 { Ok(at as usize) } else { Err(outside) }
    }

    /// Calls `visit` with each word that the bytes touch, the bytes of the word that are meant, and
    /// which of the caller's bytes they are.
    fn each_word(
        &self,
        address: u64,
        bytes: usize,
        mut visit: impl FnMut(&AtomicU32, std::ops::Range<usize>, usize),
    ) -> Result<(), OutsideMemory> {
        let (mut at, mut done) = (self.place(address, bytes)?, 0);
        while done < bytes {
            let from = at % 4;
            let to = (from + bytes - done).min(4);
            visit(&self.words[at / 4], from..to, done);
            done += to - from;
            at += to - from;
        }
        Ok(())
    }
}

impl HostMemory for WordMemory {
    fn contains(&self, address: u64, bytes: u64) -> bool {
        usize::try_from(bytes).is_ok_and(|bytes| self.place(address, bytes).is_ok())
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), OutsideMemory> {
        self.each_word(address, into.len(), |word, part, done| {
            let bytes = word.load(Ordering::Acquire).to_le_bytes();
            into[done..done + part.len()].copy_from_slice(&bytes[part]);
        })
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), OutsideMemory> {
        self.each_word(address, from.len(), |word, part, done| {
            let mut bytes = word.load(Ordering::Relaxed).to_le_bytes();
            let length = part.len();
            bytes[part].copy_from_slice(&from[done..done + length]);
            word.store(u32::from_le_bytes(bytes), Ordering::Relaxed);
        })
    }

    fn publish(&self, address: u64, word: u32) -> Result<(), OutsideMemory> {
        let at = self.place(address, 4)?;
        self.words[at / 4].store(word, Ordering::Release);
        Ok(())
    }
}
