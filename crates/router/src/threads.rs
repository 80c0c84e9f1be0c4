//! The threads of a router, each with a runtime of its own, and their end in four steps. It does
//! not know what they serve.

use crate::starting::StartError;
use crate::state::{Phase, RouterState};
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::oneshot;

/// For the last lines of the logs to be written.
const LOG_FLUSH: Duration = Duration::from_secs(2);

/// Dropping them has them take nothing more; nobody waits for requests under way.
#[derive(Debug)]
pub struct Threads {
    pub router: Arc<RouterState>,
    threads: Vec<(JoinHandle<()>, oneshot::Receiver<()>)>,
}

impl Threads {
    /// None yet.
    pub fn new(router: Arc<RouterState>) -> Threads {
        Threads { router, threads: Vec::new() }
    }

    /// Adds one that does this.
    pub fn spawn<F: Future<Output = ()>>(
        &mut self,
        name: String,
        run: impl FnOnce() -> F + Send + 'static,
    ) -> Result<(), StartError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
        let (done, ended) = oneshot::channel();
        let run = move || {
            runtime.block_on(run());
            // A file or a name server that hangs must not hold up the end.
            runtime.shutdown_background();
            drop(done);
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).map_err(StartError::Thread)?;
        self.threads.push((thread, ended));
        Ok(())
    }

    /// Ends in four steps: the router says that it is not well while requests are still taken, for
    /// `limits.shutdown_delay`; nothing new is taken and requests under way may end, for
    /// `limits.drain`; what remains is cut off; all threads have ended, and this returns. When
    /// `hurry` ends, what is under way is cut off at once.
    pub async fn shutdown_or_hurry(mut self, hurry: impl Future<Output = ()>) {
        let mut hurry = pin!(hurry);
        let router = self.router.clone();
        router.enter(Phase::Leaving);
        let mut hurried = false;
        if !router.limits.shutdown_delay.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(router.limits.shutdown_delay) => {}
                () = &mut hurry => hurried = true,
            }
        }
        router.enter(if hurried { Phase::Cut } else { Phase::Draining });
        for (thread, ended) in self.threads.drain(..) {
            let mut ended = pin!(ended);
            // Resolves, with an error, when the thread drops its end; after that joining does not
            // wait.
            tokio::select! {
                _ = &mut ended => {}
                () = &mut hurry, if !hurried => {
                    hurried = true;
                    router.enter(Phase::Cut);
                    let _ = ended.await;
                }
            }
            let _ = thread.join();
        }
        tracing::info!(in_flight = router.in_flight(), "drain ends");
        if let Some(log) = &router.log {
            log.flush(LOG_FLUSH);
        }
        if let Some(log) = router.engines.decision_log() {
            log.flush(LOG_FLUSH);
        }
        router.tracing.stop();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.router.enter(Phase::Draining);
    }
}
