//! Why there is no controller to test against. A test is skipped only where the machine lacks
//! something; all else is a failure.

use std::process::ExitStatus;
use std::time::Duration;

/// Why QEMU could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This machine lacks a program that the fixture needs.
    #[error("no NVMe controller of QEMU: {0}")]
    Missing(String),
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was to be done.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// QEMU ended before the firmware answered.
    #[error("QEMU ended before its firmware answered, with {status}: {said}")]
    Ended {
        /// How it ended.
        status: ExitStatus,
        /// What it printed.
        said: String,
    },
    /// QEMU runs, and its firmware does not answer.
    #[error("the firmware did not answer within {} s: {said}", limit.as_secs())]
    Silent {
        /// How long was waited.
        limit: Duration,
        /// What QEMU printed.
        said: String,
    },
    /// There is another device where the controller should be.
    #[error("the device's class is {0:#08x}; an NVMe controller has 0x010802")]
    NotNvme(u32),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Error::Io { what: what.into(), source }
    }
}
