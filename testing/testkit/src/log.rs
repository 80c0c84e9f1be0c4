//! What code under test logs.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

/// What `act` logs on this thread, a line each, without times and colours.
///
/// # Panics
/// Where it logs anything that is no text.
pub fn logged(act: impl FnOnce()) -> String {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, act);
    let bytes = lines.0.lock().expect("nobody panics with it").clone();
    String::from_utf8(bytes).expect("a log is text")
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("nobody panics with it").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
