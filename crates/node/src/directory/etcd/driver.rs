//! The thread that carries questions and events between a member and etcd, and logs what etcd
//! answers. It holds no policy: what to do is asked of [`Membership`], and whatever happens is
//! passed in there.

use super::Shared;
use super::client::{Client, Watching};
use super::membership::{Membership, Step, Watch};
use super::wire::{Failure, Message, Request, Response, watch_body};
use crate::directory::NodeRecord;
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

/// What was logged, so that a change is logged once, and what stays so once a minute.
#[derive(Default)]
struct Log {
    is_found: bool,
    lost: LogGate,
    refused: LogGate,
    expired: LogGate,
    is_hidden: bool,
    hidden: LogGate,
}

impl Log {
    /// `is_failing`: some of what is asked, which need not be this.
    fn answered(&mut self, failure: Option<&Failure>, is_failing: bool, endpoint: &str) {
        match failure {
            None if is_failing || self.is_found => {}
            None => {
                self.is_found = true;
                self.lost.reset();
                self.refused.reset();
                tracing::info!(endpoint, "directory found");
            }
            // Only a part of the history is gone, which is read anew.
            Some(Failure::Compacted) => {}
            Some(Failure::LeaseGone) => {
                if let Some(repeated) = self.expired.pass() {
                    tracing::warn!(endpoint, repeated, "directory lease expired");
                }
            }
            Some(Failure::Refused(reason)) => {
                self.is_found = false;
                if let Some(repeated) = self.refused.pass() {
                    tracing::warn!(endpoint, reason, repeated, "etcd refused");
                }
            }
            Some(Failure::Unreachable(reason)) => {
                self.is_found = false;
                if let Some(repeated) = self.lost.pass() {
                    tracing::warn!(endpoint, reason, repeated, "directory lost");
                }
            }
        }
    }

    fn hidden_by(&mut self, namesake: Option<NodeRecord>) {
        match namesake {
            Some(NodeRecord { name, address, .. }) => {
                self.is_hidden = true;
                if let Some(repeated) = self.hidden.pass() {
                    tracing::error!(name, %address, repeated, "node name taken");
                }
            }
            None if self.is_hidden => {
                self.is_hidden = false;
                self.hidden.reset();
                tracing::info!("node name free again");
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
            let namesake = |membership: &mut Membership, now_us| membership.namesake(now_us).cloned();
            self.log.hidden_by(self.shared.with_membership(namesake));
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

    /// Ends the lease, so that others see at once that this node is gone. If that fails they see it
    /// by time.
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

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::logged;

    #[test]
    fn a_directory_that_is_lost_refuses_and_is_found_is_one_line_each() {
        let mut log = Log::default();
        let mut answered = |failure: Option<Failure>| {
            logged(|| log.answered(failure.as_ref(), failure.is_some(), "http://a:1"))
        };
        assert!(answered(None).contains("INFO") && answered(None).is_empty());
        let lost = || Some(Failure::Unreachable("timed out".into()));
        let line = answered(lost());
        assert!(line.contains("WARN") && line.contains("directory lost"), "{line}");
        assert!(line.contains(r#"endpoint="http://a:1" reason="timed out" repeated=0"#), "{line}");
        assert!(answered(lost()).is_empty(), "a line a minute");
        let line = answered(Some(Failure::Refused("no space".into())));
        assert!(line.contains(r#"etcd refused endpoint="http://a:1" reason="no space""#), "{line}");
        assert!(answered(None).contains("directory found") && answered(None).is_empty());
        assert!(answered(lost()).contains("directory lost"), "it is news again");
        assert!(answered(Some(Failure::LeaseGone)).contains("directory lease expired"));
    }

    #[test]
    fn a_name_that_another_node_has_is_one_line_and_one_when_it_is_free_again() {
        let address = "127.0.0.1:7000".parse().unwrap();
        let other = NodeRecord { node: [1; 16], instance: [2; 16], name: "left".into(), address };
        let mut log = Log::default();
        let mut hidden_by = |other: Option<&NodeRecord>| logged(|| log.hidden_by(other.cloned()));
        assert!(hidden_by(None).is_empty());
        let line = hidden_by(Some(&other));
        assert!(line.contains(r#"node name taken name="left" address=127.0.0.1:7000"#), "{line}");
        assert!(hidden_by(Some(&other)).is_empty());
        assert!(hidden_by(None).contains("node name free again") && hidden_by(None).is_empty());
    }
}
