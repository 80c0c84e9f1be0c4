//! The log lines of this process.

use std::io;
use std::sync::{LazyLock, Mutex};

static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

static CAPTURE: LazyLock<()> = LazyLock::new(|| {
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(|| Buffer);
    log.init();
});

struct Buffer;

impl io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LINES.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps what is logged from now on.
pub fn capture() {
    LazyLock::force(&CAPTURE);
}

pub fn lines(parts: &[&str]) -> Vec<String> {
    let text = String::from_utf8(LINES.lock().unwrap().clone()).unwrap();
    let has_all = |line: &&str| parts.iter().all(|part| line.contains(part));
    text.lines().filter(has_all).map(str::to_owned).collect()
}

pub fn line(parts: &[&str]) -> String {
    testkit::eventually(&format!("a line with {parts:?}"), || !lines(parts).is_empty());
    let mut found = lines(parts);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}
