//! A log of lines: a bounded queue to a thread that writes. Nobody waits for it; lines that are
//! lost are counted. It knows bytes, and not what they say.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Bytes that are written in one go, and a line.
const BATCH_BYTES: usize = 64 << 10;

/// A log line about lost lines comes at most this often.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct LineLog {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

enum Message {
    Line(Vec<u8>),
    /// Answer when everything before this has been written.
    Flush(SyncSender<()>),
}

impl LineLog {
    /// Starts the thread that writes to `output`. `name` is the log's, for people; `queue_lines`
    /// may wait to be written, more are dropped and counted.
    pub fn start(
        name: &'static str,
        queue_lines: usize,
        output: impl Write + Send + 'static,
    ) -> io::Result<LineLog> {
        let (queue, lines) = sync_channel(queue_lines);
        let dropped = Arc::new(AtomicU64::new(0));
        let writer = Writer { name, output, dropped: dropped.clone(), complaint: None, error: None };
        std::thread::Builder::new().name(format!("{name}-log")).spawn(move || writer.run(&lines))?;
        Ok(LineLog { queue, dropped })
    }

    /// Hands a line over, without its end.
    pub fn push(&self, mut line: Vec<u8>) {
        line.push(b'\n');
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.queue.try_send(Message::Line(line))
        {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
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
}

struct Writer<W> {
    name: &'static str,
    output: W,
    dropped: Arc<AtomicU64>,
    /// The last time that lost lines were complained of, and how many there were.
    complaint: Option<(Instant, u64)>,
    /// The last error since then.
    error: Option<io::Error>,
}

impl<W: Write> Writer<W> {
    /// Writes until the log is gone. What waits is written together.
    fn run(mut self, messages: &Receiver<Message>) {
        while let Ok(mut message) = messages.recv() {
            let (mut text, mut lines, mut asking) = (Vec::new(), 0, Vec::new());
            loop {
                match message {
                    Message::Line(line) => {
                        lines += 1;
                        text.extend_from_slice(&line);
                    }
                    Message::Flush(done) => asking.push(done),
                }
                match messages.try_recv() {
                    Ok(next) if text.len() < BATCH_BYTES => message = next,
                    Ok(next) => {
                        self.write(&std::mem::take(&mut text), std::mem::take(&mut lines));
                        message = next;
                    }
                    Err(_) => break,
                }
            }
            self.write(&text, lines);
            for done in asking {
                // Who asked may have stopped waiting.
                let _ = done.try_send(());
            }
        }
    }

    fn write(&mut self, text: &[u8], lines: u64) {
        if let Err(error) = self.output.write_all(text) {
            self.dropped.fetch_add(lines, Ordering::Relaxed);
            self.error = Some(error);
        }
        self.complain();
    }

    fn complain(&mut self) {
        let (at, known) = self.complaint.map_or((None, 0), |(at, known)| (Some(at), known));
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped == known || at.is_some_and(|at| at.elapsed() < COMPLAIN_EVERY) {
            return;
        }
        self.complaint = Some((Instant::now(), dropped));
        let (log, lost) = (self.name, dropped - known);
        match self.error.take() {
            Some(error) => tracing::warn!(log, lost, %error, "lines of a log could not be written"),
            None => tracing::warn!(log, lost, "lines of a log were dropped: it is written too slowly"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    const QUEUE_LINES: usize = 64;

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
        let log = LineLog::start("test", QUEUE_LINES, Slow(permit, written)).unwrap();
        let asked = 3 * QUEUE_LINES as u64;
        for _ in 0..asked {
            log.push(b"{}".to_vec());
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

    /// Fails the first writes.
    struct Damaged(u32);

    impl Write for Damaged {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.saturating_sub(1);
            if self.0 > 0 { Err(io::Error::other("the disk is damaged")) } else { Ok(bytes.len()) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_a_disk_did_not_take_are_not_blamed_on_its_pace() {
        let (name, dropped, error) = ("test", Arc::default(), None);
        let mut writer = Writer { name, output: Damaged(4), dropped, complaint: None, error };
        let said = testkit::logged(|| {
            (0..3).for_each(|_| writer.write(b"line\n", 1));
            // The next complaint is due when the disk is well again.
            writer.complaint = writer.complaint.map(|(_, lost)| (Instant::now() - COMPLAIN_EVERY, lost));
            writer.write(b"line\n", 1);
            assert_eq!(writer.output.0, 0, "it took this one");
        });
        assert_eq!(said.matches("the disk is damaged").count(), 2, "{said}");
        assert!(!said.contains("too slowly"), "{said}");
    }

    #[test]
    fn a_batch_is_never_much_longer_than_its_bound() {
        let ((permits, permit), (written, writes)) = (channel(), channel());
        let log = LineLog::start("test", QUEUE_LINES, Slow(permit, written)).unwrap();
        let line = vec![b'x'; BATCH_BYTES / 4];
        (0..QUEUE_LINES / 2).for_each(|_| log.push(line.clone()));
        let mut bytes = 0;
        while bytes < QUEUE_LINES / 2 * (line.len() + 1) {
            permits.send(()).unwrap();
            let batch = writes.recv_timeout(Duration::from_secs(20)).unwrap().len();
            assert!(batch <= BATCH_BYTES + line.len() + 1, "{batch}");
            bytes += batch;
        }
    }
}
