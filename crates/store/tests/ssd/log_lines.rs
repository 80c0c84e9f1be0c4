//! What the tests of this program wrote to the log, by the file that a line names.

use forebay_transfer::lock::Mutex;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Once;

static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Lines;

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LINES.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// From now on lines are kept, of all threads.
pub fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing_subscriber::fmt().with_ansi(false).with_writer(|| Lines).init());
}

/// Lines with this message about a volume.
pub fn count(volume: &Path, message: &str) -> usize {
    let lines = String::from_utf8(LINES.lock().clone()).unwrap();
    let (volume, message) = (format!("volume={} ", volume.display()), format!(" {message} "));
    let names = |line: &&str| line.contains(&message) && format!("{line} ").contains(&volume);
    lines.lines().filter(names).count()
}
