//! Log lines of this library in a program that is not ours: there is nobody else who would write
//! them. Each goes to the descriptor that the preload has, since descriptor 2 may be any file by
//! now.

use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Writes warnings and errors, each as one line.
pub struct Lines {
    file: libc::c_int,
}

impl Lines {
    /// Has warnings of this library go to a descriptor, once and for good.
    pub fn go_to(file: libc::c_int) {
        // It fails where somebody has set another one, who writes them then.
        let _ = tracing::subscriber::set_global_default(Lines { file });
    }
}

/// The message of an event.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // Writing to a string never fails.
            let _ = write!(self.0, "{value:?}");
        }
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Message("forebay: ".into());
        event.record(&mut line);
        line.0.push('\n');
        // SAFETY: the bytes are there until it returns. Nothing is to be done where it fails.
        unsafe { libc::write(self.file, line.0.as_ptr().cast(), line.0.len()) };
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}
