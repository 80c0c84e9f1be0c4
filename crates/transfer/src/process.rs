//! Which process made a handle. A child of `fork()` has a copy of every handle, but none of the
//! threads behind it, and it shares the parent's sockets: only the process that made a handle may
//! use it.

use thiserror::Error;

/// A handle belongs to another process. The process that asks has to make its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("made before fork: by process {made_in}, and this is process {here}; each process makes its own")]
pub struct Forked {
    pub made_in: u32,
    pub here: u32,
}

/// The process that made something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// The one that calls.
    pub fn current() -> Process {
        // The system is asked each time: whatever is kept in memory is copied by a fork.
        Process(std::process::id())
    }

    /// Refuses to go on in any other process. To be called before any lock is taken: a thread that
    /// a child does not have may hold it there for ever.
    pub fn check(self) -> Result<(), Forked> {
        let here = std::process::id();
        if here == self.0 { Ok(()) } else { Err(Forked { made_in: self.0, here }) }
    }

    /// Whether it is the one that calls.
    pub fn is_current(self) -> bool {
        self.check().is_ok()
    }
}

/// Something that only the process which made it can reach. In any other one it is forgotten when
/// it is dropped: nothing is sent, nothing is waited for, and what the maker has of it stays as it
/// is.
#[derive(Debug)]
pub struct InProcess<T> {
    process: Process,
    /// `None` only in `drop` and behind `take`.
    value: Option<T>,
}

impl<T> InProcess<T> {
    /// Made by the process that calls.
    pub fn new(value: T) -> InProcess<T> {
        InProcess { process: Process::current(), value: Some(value) }
    }

    /// What was made, in its process.
    pub fn get(&self) -> Result<&T, Forked> {
        self.process.check()?;
        let forked = Forked { made_in: self.process.0, here: self.process.0 };
        self.value.as_ref().ok_or(forked)
    }
}

impl<T> Drop for InProcess<T> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            std::mem::forget(self.value.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_another_process_made_is_out_of_reach_and_only_forgotten() {
        let kept = Arc::new(());
        let mut made = InProcess::new(Arc::clone(&kept));
        assert!(made.get().is_ok());
        made.process = Process(std::process::id() + 1);
        let forked = made.get().unwrap_err();
        assert_eq!((forked.made_in, forked.here), (std::process::id() + 1, std::process::id()));
        assert!(forked.to_string().starts_with("made before fork"), "{forked}");
        drop(made);
        assert_eq!(Arc::strong_count(&kept), 2, "it was forgotten, not dropped");
        drop(InProcess::new(Arc::clone(&kept)));
        assert_eq!(Arc::strong_count(&kept), 2, "in its own process it is dropped");
    }
}
