//! The signals that end a command which serves, or has a terminal. To be listened for before
//! anybody hears that it serves: from then on it may be told to end, and in order.

use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT and SIGTERM.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes them from now on, in a runtime.
    pub fn listen() -> std::io::Result<Signals> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Signals { terminate, interrupt })
    }

    /// Waits for one, or finds one that came before.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Whether one came.
    pub async fn have_come(&mut self) -> bool {
        // The runtime looks for signals when nothing else is to be done.
        tokio::time::timeout(Duration::from_millis(1), self.next()).await.is_ok()
    }
}
