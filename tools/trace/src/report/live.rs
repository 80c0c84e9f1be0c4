//! One line that says how far a replay has come, while it runs.

use crate::replay::Progress;
use crate::units::{count, seconds};
use std::io::{IsTerminal, Write};
use std::time::Duration;
use tokio::sync::watch;

/// Shows a replay's progress on stderr: on a terminal one line that is rewritten, elsewhere a line
/// now and then.
#[derive(Debug)]
pub struct LiveLine {
    arm: String,
    progress: watch::Receiver<Progress>,
    terminal: bool,
}

const REWRITE_EVERY: Duration = Duration::from_millis(250);
const APPEND_EVERY: Duration = Duration::from_secs(5);

impl LiveLine {
    pub fn new(arm: &str, progress: watch::Receiver<Progress>) -> LiveLine {
        LiveLine { arm: arm.to_owned(), progress, terminal: std::io::stderr().is_terminal() }
    }

    /// Shows the progress while `work` runs and once more at its end.
    pub async fn during<T>(self, work: impl Future<Output = T>) -> T {
        let every = if self.terminal { REWRITE_EVERY } else { APPEND_EVERY };
        let mut ticks = tokio::time::interval(every);
        ticks.tick().await;
        tokio::pin!(work);
        loop {
            tokio::select! {
                ended = &mut work => {
                    self.show(true);
                    return ended;
                }
                _ = ticks.tick() => self.show(false),
            }
        }
    }

    fn show(&self, last: bool) {
        let text = line(&self.arm, &self.progress.borrow());
        let mut stderr = std::io::stderr().lock();
        // A display that cannot be written is no reason to stop the work.
        let _ = match (self.terminal, last) {
            // Back to the start of the line, and clear what a longer line left.
            (true, false) => write!(stderr, "\r{text}\x1b[K"),
            (true, true) => writeln!(stderr, "\r{text}\x1b[K"),
            (false, _) => writeln!(stderr, "{text}"),
        };
        let _ = stderr.flush();
    }
}

/// The progress of `arm` in at most 100 columns, as long as its name has at most 20.
///
/// ```
/// use forebay_trace::{replay::Progress, report};
///
/// let some = Progress { at_s: 61.5, in_flight: 8, done: 120, ttft_p50_s: Some(0.412), ..Progress::default() };
/// assert_eq!(report::line("lpwl", &some), "lpwl: 120 done, 8 in flight, 0 failed, TTFT p50 0.412 s, 61.5 s");
/// let checked = Progress { wrong_tokens: Some(0), ..some };
/// let line = report::line("lpwl", &checked);
/// assert_eq!(line, "lpwl: 120 done, 8 in flight, 0 failed, 0 wrong tokens, TTFT p50 0.412 s, 61.5 s");
/// ```
pub fn line(arm: &str, progress: &Progress) -> String {
    let ttft =
        progress.ttft_p50_s.map_or_else(String::new, |p50_s| format!(", TTFT p50 {} s", seconds(p50_s)));
    let wrong =
        progress.wrong_tokens.map_or_else(String::new, |wrong| format!(", {} wrong tokens", count(wrong)));
    format!(
        "{arm}: {} done, {} in flight, {} failed{wrong}{ttft}, {} s",
        count(progress.done),
        progress.in_flight,
        count(progress.failed),
        seconds(progress.at_s),
    )
}
