//! The request log: a JSON object on a line of its own for each request, off by default. It knows
//! how requests ended; how lines are written is `line_log`'s.

use crate::line_log::LineLog;
use crate::usage::Usage;
use http::{Method, StatusCode};
use serde::Serialize;
use std::fs::OpenOptions;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Lines that wait to be written; more are dropped and counted.
const QUEUE_LINES: usize = 4096;

/// Where the lines go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestLogPlace {
    Stderr,
    File(PathBuf),
}

#[derive(Debug)]
pub struct RequestLog(LineLog);

impl RequestLog {
    /// Opens the place and starts the thread that writes.
    pub fn open(place: &RequestLogPlace) -> io::Result<RequestLog> {
        let lines = match place {
            RequestLogPlace::Stderr => LineLog::start("request", QUEUE_LINES, io::stderr())?,
            RequestLogPlace::File(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path)?;
                LineLog::start("request", QUEUE_LINES, file)?
            }
        };
        Ok(RequestLog(lines))
    }

    /// Lines that were lost because the queue was full or could not be written.
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }

    /// Waits until all lines so far have been written, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        self.0.flush(limit);
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
        // Strings and numbers: nothing in it can fail.
        self.log.0.push(serde_json::to_vec(&self.line).unwrap_or_default());
    }
}

/// Seconds, to the microsecond.
fn rounded(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let log = RequestLog::open(&RequestLogPlace::File("/dev/full".into())).map(Arc::new).unwrap();
        drop(log.begin(&Method::GET, "/version"));
        log.flush(Duration::from_secs(20));
        assert_eq!(log.dropped(), 1);
        assert!(RequestLog::open(&RequestLogPlace::File("/nowhere/log".into())).is_err());
    }
}
