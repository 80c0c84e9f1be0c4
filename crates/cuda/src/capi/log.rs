//! Log lines of this library in a program that is not ours: there is nobody else who would write
//! them. Each goes to the descriptor that the preload has, since descriptor 2 may be any file by
//! now.

use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Writes warnings and errors, each as one line.
pub struct WarningLog {
    file: libc::c_int,
}

impl WarningLog {
    /// Has warnings of this library go to a descriptor, once and for good.
    pub fn go_to(file: libc::c_int) {
        // It fails where somebody has set another one, who writes them then.
        let _ = tracing::subscriber::set_global_default(WarningLog { file });
    }
}

/// An event as text: the message, then its fields, then the reason.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
    reason: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string never fails.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "reason" => write!(self.reason, ": {value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

impl Subscriber for WarningLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let Text { message, fields, reason } = text;
        let line = format!("forebay: {message}{fields}{reason}\n");
        // SAFETY: the bytes are there until it returns. Nothing is to be done where it fails.
        unsafe { libc::write(self.file, line.as_ptr().cast(), line.len()) };
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}
