//! The terminal of `forebay top`: its screen, size and keys. It is as it was when this is dropped.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use std::io::{self, Read, Write, stdin, stdout};
use std::time::Instant;

/// Another screen without a cursor, and back to the one before.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// To the first line; nothing behind this on a line; nothing below.
const HOME: &str = "\x1b[H";
const END_OF_LINE: &str = "\x1b[K";
const END_OF_SCREEN: &str = "\x1b[J";

/// ETX, which Ctrl-C is where it makes no signal.
const CTRL_C: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    Quit,
    Other,
}

/// The terminal while frames are shown.
pub struct Screen {
    before: Termios,
}

/// Why nothing can be shown.
#[derive(Debug, thiserror::Error)]
pub enum NoTerminal {
    #[error("stdin and stdout must be a terminal: {0}; --once prints one frame without one")]
    None(io::Error),
    #[error("the terminal: {0}")]
    Broken(#[from] io::Error),
}

impl Screen {
    pub fn open() -> Result<Screen, NoTerminal> {
        let none = |error: rustix::io::Errno| NoTerminal::None(error.into());
        tcgetwinsize(stdout()).map_err(none)?;
        let before = tcgetattr(stdin()).map_err(none)?;
        let mut keys = before.clone();
        // A key comes at once, and is not shown.
        keys.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        keys.special_codes[SpecialCodeIndex::VMIN] = 0;
        keys.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(stdin(), OptionalActions::Flush, &keys).map_err(none)?;
        let screen = Screen { before };
        write(ENTER)?;
        Ok(screen)
    }

    /// Columns and lines, if the terminal knows.
    pub fn size(&self) -> Option<(usize, usize)> {
        let size = tcgetwinsize(stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0)?;
        Some((size.ws_col.into(), size.ws_row.into()))
    }

    pub fn show(&self, lines: &[String]) -> Result<(), NoTerminal> {
        let ends = lines.iter().map(|line| format!("{line}{END_OF_LINE}"));
        // One write: a slow line shows no half of a frame for long.
        write(&format!("{HOME}{}{END_OF_SCREEN}", ends.collect::<Vec<_>>().join("\r\n")))?;
        Ok(())
    }

    /// A key that is pressed before this moment.
    pub fn key_before(&self, until: Instant) -> Result<Option<Key>, NoTerminal> {
        let wait = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        let input = stdin();
        match poll(&mut [PollFd::new(&input, PollFlags::IN)], wait.as_ref()) {
            Ok(0) => return Ok(None),
            // The window has another size, perhaps, or the command is to end.
            Err(rustix::io::Errno::INTR) => return Ok(Some(Key::Other)),
            Ok(_) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let mut keys = [0; 64];
        let count = stdin().lock().read(&mut keys)?;
        // Nothing, though it is said to be there: the terminal has gone.
        let is_quit = count == 0 || keys[..count].iter().any(|key| matches!(*key, b'q' | CTRL_C));
        Ok(Some(if is_quit { Key::Quit } else { Key::Other }))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that has gone needs nothing.
        let _ = write(LEAVE);
        let _ = tcsetattr(stdin(), OptionalActions::Flush, &self.before);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
