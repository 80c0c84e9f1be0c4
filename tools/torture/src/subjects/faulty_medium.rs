//! The medium of Forebay's log with faults in front of it. A medium moves all bytes or fails, so
//! faults of single calls that its implementation hides, short ones and interrupted ones, cannot be
//! played here. What is misdirected goes to the page beside its own. This file plays faults.

use crate::faults::{Ending, Faults, instead};
use crate::misdirected;
use forebay_store::log::{Medium, VolumeSpace};
use forebay_store::ssd::FileMedium;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// A medium on a file.
pub struct FaultyMedium {
    inner: FileMedium,
    /// The same file for the power supply, which reads and writes it as it likes.
    file: Arc<File>,
    faults: Arc<Faults>,
}

impl FaultyMedium {
    /// A medium whose operations end as `faults` says.
    pub fn new(inner: FileMedium, file: Arc<File>, faults: Arc<Faults>) -> FaultyMedium {
        FaultyMedium { inner, file, faults }
    }

    /// The place beside a place, or that itself where the medium has no other.
    fn beside(&self, offset: u64, bytes: usize) -> u64 {
        let beside = misdirected::neighbour(offset);
        if beside + bytes as u64 <= self.inner.bytes() { beside } else { offset }
    }
}

impl Medium for FaultyMedium {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let ending = self.faults.read(buffer.len());
        check(ending, io::ErrorKind::UnexpectedEof)?;
        self.inner.read_at(offset, buffer)?;
        let Ending::Misdirected(choice) = ending else { return Ok(()) };
        let page = misdirected::page(buffer.len(), choice);
        self.inner.read_at(self.beside(offset + page.start as u64, page.len()), &mut buffer[page])
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let ending = self.faults.write(bytes.len());
        check(ending, io::ErrorKind::WriteZero)?;
        let offset = match ending {
            Ending::Misdirected(_) => self.beside(offset, bytes.len()),
            _ => offset,
        };
        let announced = self.faults.power().write(&self.file, offset, &[bytes])?;
        let written = self.inner.write_at(offset, bytes);
        self.faults.power().written(announced);
        written
    }

    fn sync(&self) -> io::Result<()> {
        check(self.faults.write(0), io::ErrorKind::WriteZero)?;
        let syncing = self.faults.power().sync(&self.file)?;
        self.inner.sync()?;
        self.faults.power().synced(&syncing);
        Ok(())
    }

    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()> {
        check(self.faults.write(0), io::ErrorKind::WriteZero)?;
        self.inner.withdraw(offset, bytes)
    }

    fn restore(&self, offset: u64, bytes: u64) -> io::Result<()> {
        check(self.faults.write(0), io::ErrorKind::WriteZero)?;
        self.inner.restore(offset, bytes)
    }

    fn space(&self) -> io::Result<VolumeSpace> {
        self.inner.space()
    }
}

/// `zero` is the error of an operation that could move nothing.
fn check(ending: Ending, zero: io::ErrorKind) -> io::Result<()> {
    match ending {
        Ending::Honest | Ending::Short(_) | Ending::Misdirected(_) => Ok(()),
        Ending::Instead(result) if result == -libc::EINTR => Ok(()),
        Ending::Instead(result) => instead(result).and(Err(zero.into())),
    }
}
