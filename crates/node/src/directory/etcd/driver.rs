//! The thread that carries questions and events between a member and etcd. It holds no policy: what to do is asked of
//! [`Membership`](super::membership::Membership), and whatever happens is passed in there.

use super::client::{Client, Watching};
use super::membership::{Step, Watch};
use super::wire::{Failure, Message, Request, Response, watch_body};
use super::{Shared, conflict};
use forebay_transfer::LogGate;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// How long saying goodbye may take.
const GOODBYE_LIMIT: Duration = Duration::from_millis(500);
/// Messages of a watch that wait to be taken in.
const MESSAGES_MAX: usize = 4;

/// Runs until the directory is closed.
pub(super) async fn run(shared: Arc<Shared>, client: Client) {
    let mut driver = Driver { shared, client, watch: None, log: Log::default() };
    driver.follow_membership().await;
    driver.watch = None;
    driver.say_goodbye().await;
}

struct Driver {
    shared: Arc<Shared>,
    client: Client,
    watch: Option<OpenWatch>,
    log: Log,
}

/// What was told, so that only changes are, and what stays so once a minute.
#[derive(Default)]
struct Log {
    is_failing: bool,
    failing: LogGate,
    is_hidden: bool,
    hidden: LogGate,
}

impl Log {
    /// `is_failing`: some of what is asked, which need not be this.
    fn answered(&mut self, failure: Option<&Failure>, is_failing: bool, endpoint: &str) {
        match failure {
            None if self.is_failing && !is_failing => {
                self.is_failing = false;
                self.failing.reset();
                tracing::info!("etcd at {endpoint} answers again");
            }
            // These are answers too.
            None | Some(Failure::LeaseGone | Failure::Compacted) => {}
            Some(failure) => {
                self.is_failing = true;
                if let Some(before) = self.failing.pass() {
                    tracing::warn!(
                        "etcd at {endpoint}: {failure}; it is asked again, less often each time, and what is known of \
                         other nodes may be out of date ({before} more failures since the last line)"
                    );
                }
            }
        }
    }

    fn hidden_by(&mut self, namesake: Option<String>) {
        match namesake {
            Some(conflict) => {
                self.is_hidden = true;
                if self.hidden.pass().is_some() {
                    tracing::error!("directory: {conflict}");
                }
            }
            None if self.is_hidden => {
                *self = Log { is_failing: self.is_failing, ..Log::default() };
                tracing::info!("directory: no other node has this one's name any more");
            }
            None => {}
        }
    }
}

impl Driver {
    async fn follow_membership(&mut self) {
        while !self.shared.is_closing() {
            let (step, wish) = self.shared.with_membership(|membership, now_us| {
                let step = membership.step(now_us);
                (step, membership.watch())
            });
            let namesake =
                self.shared.with_membership(|membership, now_us| membership.namesake(now_us).map(conflict));
            self.log.hidden_by(namesake);
            self.open_or_close(wish);
            match step {
                Step::Ask(request) => self.ask(request).await,
                Step::Rest { until_us } => self.rest(until_us).await,
            }
        }
    }

    /// Asks; takes in what the watch says meanwhile. Gives up when the directory is closed.
    async fn ask(&mut self, request: Request) {
        let client = self.client.clone();
        let mut asking = std::pin::pin!(async move { client.ask(&request).await });
        loop {
            tokio::select! {
                answer = &mut asking => return self.take_answer(answer),
                message = next(&mut self.watch) => self.take_message(message),
                // What was announced meanwhile is found afterwards.
                () = self.shared.stirred.notified() => if self.shared.is_closing() { return },
            }
        }
    }

    fn take_answer(&mut self, answer: Result<Response, Failure>) {
        let (failure, endpoint) = (answer.as_ref().err().cloned(), self.client.endpoint());
        if matches!(answer, Err(Failure::Unreachable(_))) {
            self.client.turn();
        }
        let is_failing = self.shared.with_membership(|membership, now_us| {
            membership.answered(answer, now_us);
            membership.is_failing()
        });
        self.log.answered(failure.as_ref(), is_failing, &endpoint);
    }

    fn take_message(&mut self, (number, message): (u64, Message)) {
        if message == Message::Ended {
            self.watch = None;
        }
        self.shared.with_membership(|membership, now_us| membership.watched(number, message, now_us));
    }

    async fn rest(&mut self, until_us: u64) {
        let rest = Duration::from_micros(until_us.saturating_sub(self.shared.now_us()));
        tokio::select! {
            () = sleep(rest) => {}
            () = self.shared.stirred.notified() => {}
            message = next(&mut self.watch) => self.take_message(message),
        }
    }

    /// Makes the watch that is open the one that has to be.
    fn open_or_close(&mut self, wish: Option<Watch>) {
        let open = self.watch.as_ref().map(|watch| watch.number);
        if open == wish.map(|watch| watch.number) {
            return;
        }
        self.watch = wish.map(|wish| {
            let body = self.shared.with_membership(|membership, _| {
                let keys = membership.keys();
                watch_body(&keys.first(), &keys.end(), wish.revision)
            });
            OpenWatch::new(wish.number, self.client.clone(), body)
        });
    }

    /// Ends the lease, so that others see at once that this node is gone. If that fails they see it by time.
    async fn say_goodbye(&self) {
        if let Some(lease) = self.shared.with_membership(|membership, _| membership.lease()) {
            let _ = timeout(GOODBYE_LIMIT, self.client.ask(&Request::Revoke { lease })).await;
        }
    }
}

/// A watch that is open, or being opened.
struct OpenWatch {
    number: u64,
    messages: mpsc::Receiver<Message>,
    task: JoinHandle<()>,
}

impl OpenWatch {
    fn new(number: u64, client: Client, body: String) -> OpenWatch {
        let (sender, messages) = mpsc::channel(MESSAGES_MAX);
        let task = tokio::spawn(async move {
            if let Some(watching) = client.watch(body).await {
                hand_on(watching, &sender).await;
            }
            // Dropping the sender is the last message.
        });
        OpenWatch { number, messages, task }
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn hand_on(mut watching: Watching, sender: &mpsc::Sender<Message>) {
    loop {
        let message = watching.next().await;
        if message == Message::Ended || sender.send(message).await.is_err() {
            return;
        }
    }
}

/// The next message of the watch, if there is one.
async fn next(watch: &mut Option<OpenWatch>) -> (u64, Message) {
    match watch {
        Some(watch) => (watch.number, watch.messages.recv().await.unwrap_or(Message::Ended)),
        None => std::future::pending().await,
    }
}
