//! A client's socket that gives up on a client that takes nothing, and that can end in a reset. It
//! knows reads, writes and one timeout.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// Fails writes once one has waited for the client longer than a limit. Reads pass through: waiting
/// for a client's next request is bounded elsewhere. As long as writes do not wait it costs a test
/// of an `Option`.
#[derive(Debug)]
pub struct StallGuard {
    stream: TcpStream,
    limit: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// The connection must not end in order: what was sent is not whole, and nothing else says so.
    reset: Arc<AtomicBool>,
}

impl StallGuard {
    /// Guards `stream`. It is reset instead of closed once `reset` is true.
    pub fn new(stream: TcpStream, limit: Duration, reset: Arc<AtomicBool>) -> StallGuard {
        StallGuard { stream, limit, waiting: None, reset }
    }

    /// With a linger time of zero closing is a reset.
    fn close_by_reset(&self) -> bool {
        self.reset.load(Ordering::Relaxed) && self.stream.set_zero_linger().is_ok()
    }

    fn guard<T>(&mut self, context: &mut Context, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.waiting = None;
            return write;
        }
        let limit = self.limit;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(waiting.as_mut().poll(context));
        let what = format!("the client took nothing for {} s", limit.as_secs_f64());
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, what)))
    }
}

impl AsyncRead for StallGuard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context,
        buffer: &mut ReadBuf,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for StallGuard {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.guard(context, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context,
        slices: &[IoSlice],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.guard(context, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        if self.close_by_reset() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Drop for StallGuard {
    fn drop(&mut self) {
        self.close_by_reset();
    }
}
