//! The request log: a JSON object on a line of its own for each request, off by default. It knows
//! how requests ended and a bounded queue to the thread that writes.

use crate::usage::Usage;
use http::{Method, StatusCode};
use serde::Serialize;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Lines that wait to be written; more are dropped and counted.
const QUEUE_LINES: usize = 4096;

/// A log line about lost lines comes at most this often.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// Where the lines go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestLogPlace {
    Stderr,
    File(PathBuf),
}

#[derive(Debug)]
pub struct RequestLog {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

enum Message {
    Line(Vec<u8>),
    /// Answer when everything before this has been written.
    Flush(SyncSender<()>),
}

impl RequestLog {
    /// Opens the place and starts the thread that writes.
    pub fn open(place: &RequestLogPlace) -> io::Result<RequestLog> {
        match place {
            RequestLogPlace::Stderr => RequestLog::start(io::stderr()),
            RequestLogPlace::File(path) => {
                RequestLog::start(OpenOptions::new().create(true).append(true).open(path)?)
            }
        }
    }

    fn start(output: impl Write + Send + 'static) -> io::Result<RequestLog> {
        let (queue, lines) = sync_channel(QUEUE_LINES);
        let dropped = Arc::new(AtomicU64::new(0));
        let writer = Writer { output, dropped: dropped.clone(), complaint: None };
        std::thread::Builder::new().name("request-log".into()).spawn(move || writer.run(&lines))?;
        Ok(RequestLog { queue, dropped })
    }

    /// Lines that were lost because the queue was full or could not be written.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all lines so far have been written, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let (done, written) = sync_channel(1);
        if self.queue.try_send(Message::Flush(done)).is_ok() {
            // A writer that takes longer has a disk that hangs; its lines are lost with the
            // process.
            let _ = written.recv_timeout(limit);
        }
    }

    /// The entry of a request that begins now.
    pub fn begin(self: &Arc<RequestLog>, method: &Method, path: &str) -> Box<LogEntry> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = Line {
            time_s: rounded(since_epoch),
            method: method.to_string(),
            path: path.to_owned(),
            end: "cancelled",
            ..Line::default()
        };
        Box::new(LogEntry { log: self.clone(), started: Instant::now(), line })
    }

    fn push(&self, line: &Line) {
        // Strings and numbers: nothing in it can fail.
        let mut text = serde_json::to_vec(line).unwrap_or_default();
        text.push(b'\n');
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.queue.try_send(Message::Line(text))
        {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One request. It is written when this is dropped: a request whose client went away is dropped
/// without having been told how it ended.
#[derive(Debug)]
pub struct LogEntry {
    log: Arc<RequestLog>,
    started: Instant,
    line: Line,
}

/// A line, as docs/routing.md explains it.
#[derive(Debug, Default, Serialize)]
struct Line {
    time_s: f64,
    method: String,
    path: String,
    model: Option<String>,
    engine: Option<String>,
    attempts: u32,
    status: Option<u16>,
    end: &'static str,
    error: Option<String>,
    first_byte_s: Option<f64>,
    total_s: f64,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl LogEntry {
    /// It names this model.
    pub fn model(&mut self, model: &str) {
        self.line.model = Some(model.to_owned());
    }

    /// It is sent to this engine.
    pub fn attempt(&mut self, engine: &str) {
        self.line.attempts += 1;
        self.line.engine = Some(engine.to_owned());
    }

    /// The first byte of an answer has come.
    pub fn first_byte(&mut self, status: StatusCode) {
        self.line.status = Some(status.as_u16());
        self.line.first_byte_s = Some(rounded(self.started.elapsed()));
    }

    /// The router answers itself.
    pub fn refused(&mut self, status: StatusCode, message: &str) {
        self.line.status = Some(status.as_u16());
        self.line.end = "refused";
        self.line.error = Some(message.to_owned());
    }

    /// The engine's answer ended: whole, or with the name of a failure.
    pub fn ended(&mut self, end: &'static str, usage: Option<Usage>) {
        self.line.end = end;
        self.line.prompt_tokens = usage.map(|usage| usage.prompt_tokens);
        self.line.cached_tokens = usage.and_then(|usage| usage.cached_tokens);
        self.line.completion_tokens = usage.map(|usage| usage.completion_tokens);
    }
}

impl Drop for LogEntry {
    fn drop(&mut self) {
        self.line.total_s = rounded(self.started.elapsed());
        self.log.push(&self.line);
    }
}

/// Seconds, to the microsecond.
fn rounded(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e6
}

struct Writer<W> {
    output: W,
    dropped: Arc<AtomicU64>,
    /// The last time that lost lines were complained of, and how many there were.
    complaint: Option<(Instant, u64)>,
}

impl<W: Write> Writer<W> {
    /// Writes until the log is gone. What waits is written in one go.
    fn run(mut self, messages: &Receiver<Message>) {
        while let Ok(message) = messages.recv() {
            let (mut text, mut lines, mut asking) = (Vec::new(), 0, Vec::new());
            for message in std::iter::once(message).chain(messages.try_iter().take(QUEUE_LINES)) {
                match message {
                    Message::Line(line) => {
                        lines += 1;
                        text.extend_from_slice(&line);
                    }
                    Message::Flush(done) => asking.push(done),
                }
            }
            let error = self.output.write_all(&text).err();
            if error.is_some() {
                self.dropped.fetch_add(lines, Ordering::Relaxed);
            }
            self.complain(error.as_ref());
            for done in asking {
                // Who asked may have stopped waiting.
                let _ = done.try_send(());
            }
        }
    }

    fn complain(&mut self, error: Option<&io::Error>) {
        let (at, known) = self.complaint.map_or((None, 0), |(at, known)| (Some(at), known));
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped == known || at.is_some_and(|at| at.elapsed() < COMPLAIN_EVERY) {
            return;
        }
        self.complaint = Some((Instant::now(), dropped));
        let lost = dropped - known;
        match error {
            Some(error) => tracing::warn!(lost, %error, "lines of the request log could not be written"),
            None => tracing::warn!(lost, "lines of the request log were dropped: it is written too slowly"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    /// Waits for a permit before each write, and says what was written.
    struct Slow(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let gone = |_| io::Error::other("the test has ended");
            self.0.recv().map_err(gone)?;
            self.1.send(bytes.to_vec()).map_err(|_| io::Error::other("the test has ended"))?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_find_no_room_are_dropped_and_counted_and_nobody_waits() {
        let ((permits, permit), (written, writes)) = (channel(), channel());
        let log = RequestLog::start(Slow(permit, written)).map(Arc::new).unwrap();
        let asked = 3 * QUEUE_LINES as u64;
        for _ in 0..asked {
            log.begin(&Method::POST, "/v1/completions").refused(StatusCode::NOT_FOUND, "nothing");
        }
        let dropped = log.dropped();
        assert!(dropped > 0 && dropped < asked, "{dropped}");
        let kept = asked - dropped;
        let mut lines = 0;
        while lines < kept {
            permits.send(()).unwrap();
            let bytes = writes.recv_timeout(Duration::from_secs(20)).unwrap();
            lines += bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
        }
        assert_eq!((lines, log.dropped()), (kept, dropped));
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let log = RequestLog::open(&RequestLogPlace::File("/dev/full".into())).map(Arc::new).unwrap();
        drop(log.begin(&Method::GET, "/version"));
        log.flush(Duration::from_secs(20));
        assert_eq!(log.dropped(), 1);
        assert!(RequestLog::open(&RequestLogPlace::File("/nowhere/log".into())).is_err());
    }
}
