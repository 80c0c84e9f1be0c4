//! What commands print. `println!` and its kin of this crate take the place of std's in commands:
//! whoever reads may go away (`forebay store stat LOG | head -1`), and then a command does its work
//! all the same, says nothing more, and ends as it would have. Any other error of stdout makes the
//! command fail in the end.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::sync::OnceLock;

/// Why a command failed: it is printed on stderr, and the process exits with 1.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// What a command returns.
pub type CommandResult = Result<(), Error>;

/// The first error of stdout that is not a reader that went away.
static FAILED: OnceLock<io::Error> = OnceLock::new();

/// Prints a part of a line to stdout.
#[macro_export]
macro_rules! print {
    ($($part:tt)*) => { $crate::output::print(format_args!($($part)*)) };
}

/// Prints a line to stdout.
#[macro_export]
macro_rules! println {
    () => { $crate::output::print(format_args!("\n")) };
    ($($part:tt)*) => { $crate::output::print_line(format_args!($($part)*)) };
}

/// Prints a line to stderr.
#[macro_export]
macro_rules! eprintln {
    ($($part:tt)*) => { $crate::output::print_error(format_args!($($part)*)) };
}

/// Prints to stdout.
pub fn print(text: Arguments<'_>) {
    note(stdout().write_fmt(text));
}

/// Prints a line to stdout.
pub fn print_line(text: Arguments<'_>) {
    note(writeln!(stdout(), "{text}"));
}

/// Prints a line to stderr.
pub fn print_error(text: Arguments<'_>) {
    // There is nowhere else to say that it failed.
    let _ = writeln!(stderr(), "{text}");
}

/// Writes what is still to be written, and says whether all was.
pub fn finish() -> Result<(), &'static io::Error> {
    note(stdout().flush());
    FAILED.get().map_or(Ok(()), Err)
}

fn note(written: io::Result<()>) {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => FAILED.get_or_init(|| error),
        _ => return,
    };
}
