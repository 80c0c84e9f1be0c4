//! What to do with the result of an I/O: it is done, starts again, continues where it stopped, or
//! has failed. This file knows results and their meaning; it must never perform an I/O.
//!
//! A short result is never success. It is continued at the byte where it stopped; direct I/O can
//! only continue at a device block, so bytes past the last whole block are done twice.

use super::kernel::Action;
use thiserror::Error;

/// How often in a row an I/O may be interrupted or deferred without moving a byte before it counts
/// as failed.
pub const IDLE_RESULTS_MAX: u32 = 1_024;

/// How far an I/O has come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    action: Action,
    left_bytes: u64,
    idle_results: u32,
}

/// What comes next for an I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Every byte was moved.
    Done,
    /// Nothing was moved; the same request is to be made again.
    Again,
    /// The first `bytes` bytes of the request are done; the rest is to be requested.
    Continue { bytes: u64 },
    /// It cannot be done.
    Fail(FaultKind),
}

/// Why an I/O failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FaultKind {
    /// A read met the end of the file.
    #[error("the file ends {missing_bytes} bytes too early: it was truncated or replaced")]
    Truncated { missing_bytes: u64 },
    /// A write moved nothing and gave no reason.
    #[error("the system wrote nothing of the last {left_bytes} bytes and gave no reason")]
    NoProgress {
        /// Bytes left to write.
        left_bytes: u64,
    },
    /// The system claims more bytes than were asked for.
    #[error("the system reports {result} bytes where {left_bytes} were asked for")]
    TooMany { result: u64, left_bytes: u64 },
    /// The disk, or the quota on it, is full.
    #[error("the disk is full ({errno}): free space on it, or make the file smaller")]
    NoSpace {
        /// What the system said.
        errno: Errno,
    },
    /// The device could not read or write.
    #[error("the device failed ({errno}): see the kernel's log, and replace the device if it fails again")]
    Device {
        /// What the system said.
        errno: Errno,
    },
    /// Interrupted, or told to try again, [`IDLE_RESULTS_MAX`] times in a row.
    #[error("no progress after {IDLE_RESULTS_MAX} attempts ({errno})")]
    Busy {
        /// What the system said last.
        errno: Errno,
    },
    /// Anything else.
    #[error("{errno}")]
    Other {
        /// What the system said.
        errno: Errno,
    },
}

/// An error number of the system.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl std::fmt::Debug for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Errno({})", self.0)
    }
}

impl Progress {
    /// An I/O of `bytes` bytes.
    pub fn new(action: Action, bytes: u64) -> Progress {
        Progress { action, left_bytes: bytes, idle_results: 0 }
    }

    /// Bytes still to be moved.
    pub fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    /// Takes in a result: bytes, or a negated `errno`. The device can continue at multiples of
    /// `block_bytes`.
    pub fn take(&mut self, result: i32, block_bytes: u64) -> Next {
        match u64::try_from(result) {
            Ok(bytes) => self.moved(bytes, block_bytes),
            Err(_) => self.failed(result.saturating_neg()),
        }
    }

    fn moved(&mut self, bytes: u64, block_bytes: u64) -> Next {
        let left_bytes = self.left_bytes;
        if bytes > left_bytes {
            return Next::Fail(FaultKind::TooMany { result: bytes, left_bytes });
        }
        if bytes == left_bytes {
            self.left_bytes = 0;
            return Next::Done;
        }
        let usable_bytes = bytes - bytes % block_bytes;
        if usable_bytes == 0 {
            return Next::Fail(match self.action {
                Action::Read => FaultKind::Truncated { missing_bytes: left_bytes - bytes },
                Action::Write => FaultKind::NoProgress { left_bytes },
            });
        }
        self.left_bytes -= usable_bytes;
        self.idle_results = 0;
        Next::Continue { bytes: usable_bytes }
    }

    fn failed(&mut self, errno: i32) -> Next {
        let kind = errno;
        let errno = Errno(errno);
        Next::Fail(match kind {
            libc::EINTR | libc::EAGAIN => {
                self.idle_results += 1;
                if self.idle_results < IDLE_RESULTS_MAX {
                    return Next::Again;
                }
                FaultKind::Busy { errno }
            }
            libc::ENOSPC | libc::EDQUOT => FaultKind::NoSpace { errno },
            libc::EIO | libc::ENXIO | libc::ENODATA | libc::EREMOTEIO | libc::ETIMEDOUT => {
                FaultKind::Device { errno }
            }
            _ => FaultKind::Other { errno },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: u64 = 512;

    fn io(action: Action, bytes: u64) -> Progress {
        Progress::new(action, bytes)
    }

    #[test]
    fn every_byte_is_done_and_nothing_less() {
        assert_eq!(io(Action::Read, 8192).take(8192, BLOCK), Next::Done);
        assert_eq!(io(Action::Write, 8192).take(4096, BLOCK), Next::Continue { bytes: 4096 });
        assert_eq!(io(Action::Read, 8192).take(8191, BLOCK), Next::Continue { bytes: 7680 });
    }

    #[test]
    fn no_byte_is_a_failure() {
        let truncated = FaultKind::Truncated { missing_bytes: 8192 };
        assert_eq!(io(Action::Read, 8192).take(0, BLOCK), Next::Fail(truncated));
        let truncated = FaultKind::Truncated { missing_bytes: 7681 };
        assert_eq!(io(Action::Read, 8192).take(511, BLOCK), Next::Fail(truncated));
        let nothing = FaultKind::NoProgress { left_bytes: 8192 };
        assert_eq!(io(Action::Write, 8192).take(0, BLOCK), Next::Fail(nothing));
    }

    #[test]
    fn errors_are_told_apart() {
        let fault = |errno: i32| match io(Action::Write, 1).take(-errno, BLOCK) {
            Next::Fail(kind) => kind,
            next => panic!("{next:?}"),
        };
        assert!(matches!(fault(libc::ENOSPC), FaultKind::NoSpace { errno: Errno(libc::ENOSPC) }));
        assert!(matches!(fault(libc::EIO), FaultKind::Device { .. }));
        assert!(matches!(fault(libc::EINVAL), FaultKind::Other { .. }));
        assert!(matches!(fault(i32::MAX), FaultKind::Other { .. }));
        assert!(fault(libc::EIO).to_string().contains("os error 5"));
    }

    #[test]
    fn interruptions_are_retried_a_stated_number_of_times() {
        let mut storm = io(Action::Read, 4096);
        for _ in 1..IDLE_RESULTS_MAX {
            assert_eq!(storm.take(-libc::EINTR, BLOCK), Next::Again);
        }
        let mut survivor = storm;
        assert_eq!(survivor.take(1024, BLOCK), Next::Continue { bytes: 1024 });
        assert_eq!(survivor.take(-libc::EAGAIN, BLOCK), Next::Again);
        let busy = FaultKind::Busy { errno: Errno(libc::EAGAIN) };
        assert_eq!(storm.take(-libc::EAGAIN, BLOCK), Next::Fail(busy));
    }

    proptest! {
        /// Whatever the system reports, done means that its whole blocks add up to the I/O, the
        /// last part aside.
        #[test]
        fn done_means_that_the_results_add_up(
            blocks in 1u64..64,
            results in proptest::collection::vec(-40i32..40_000, 0..40),
        ) {
            let wanted = blocks * BLOCK;
            let mut io = io(Action::Read, wanted);
            let mut moved = 0;
            for result in results {
                match io.take(result, BLOCK) {
                    Next::Done => {
                        prop_assert_eq!(moved + result as u64, wanted);
                        prop_assert_eq!(io.left_bytes(), 0);
                        return Ok(());
                    }
                    Next::Continue { bytes } => {
                        prop_assert!(bytes > 0 && bytes <= result as u64 && bytes % BLOCK == 0);
                        moved += bytes;
                    }
                    Next::Again => prop_assert!(result == -libc::EINTR || result == -libc::EAGAIN),
                    Next::Fail(_) => return Ok(()),
                }
                prop_assert_eq!(io.left_bytes(), wanted - moved);
            }
        }
    }
}
