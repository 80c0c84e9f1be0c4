//! What code under test logs: on one thread while it does something, or on all threads of a
//! program of tests.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use tracing_subscriber::filter::LevelFilter;

/// What `act` logs on this thread, a line each, without times and colours.
///
/// # Panics
/// Where it logs anything that is no text.
pub fn logged(act: impl FnOnce()) -> String {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, act);
    lines.text()
}

/// The log of all threads of this program, for one test at a time: whoever counts lines has to know
/// that no other test adds any. All tests of the program that log have to take it.
pub struct Log {
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

/// Kept from the first use on.
static KEPT: LazyLock<Lines> = LazyLock::new(|| {
    let lines = Lines::default();
    let writer = lines.clone();
    tracing_subscriber::fmt().with_ansi(false).without_time().with_writer(move || writer.clone()).init();
    lines
});

/// Logged where others use the disk too.
const BUSY_DISK: &str = "SSD reads are slow";

impl Log {
    /// Waits until no other test has it, and forgets what was logged before.
    pub fn alone() -> Log {
        // A test that failed has said why.
        let log = Log { _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner) };
        log.forget();
        log
    }

    /// Forgets what was logged before.
    pub fn forget(&self) {
        KEPT.bytes().clear();
    }

    /// The lines so far that have all of these parts.
    pub fn lines(&self, parts: &[&str]) -> Vec<String> {
        let has_all = |line: &&str| parts.iter().all(|part| line.contains(part));
        KEPT.text().lines().filter(has_all).map(str::to_owned).collect()
    }

    /// Waits until each of these faults has a line with all of its parts.
    ///
    /// # Panics
    /// Where one has another number of lines than one, or there is a warning or an error of
    /// anything else than how busy the machine's disk is.
    pub fn expect_faults(&self, faults: &[&[&str]]) {
        for fault in faults {
            crate::eventually(&format!("a line with {fault:?}"), || !self.lines(fault).is_empty());
        }
        let mut told = [self.lines(&["WARN "]), self.lines(&["ERROR "])].concat();
        told.retain(|line| !line.contains(BUSY_DISK));
        for fault in faults {
            let lines = told.iter().filter(|line| fault.iter().all(|part| line.contains(part))).count();
            assert_eq!(lines, 1, "lines with {fault:?} of {told:#?}");
        }
        assert_eq!(told.len(), faults.len(), "other lines than {faults:?}: {told:#?}");
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().expect("nobody panics with it")
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().clone()).expect("a log is text")
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
