//! Subscribes to the KV events of engines and asks for what was missed. It knows connections and
//! time limits; what events mean is for `rank_events` and the dispatcher.

use crate::engine::Engine;
use crate::event_address::EventTarget;
use crate::rank_events::{Next, RankEvents, Replaying, number_of};
use crate::state::RouterState;
use crate::zmtp::{Connection, SocketType, ZmtpError};
use bytes::Bytes;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Between two attempts to connect: it doubles from here, up to here.
const RECONNECT_MIN: Duration = Duration::from_millis(100);
const RECONNECT_MAX: Duration = Duration::from_secs(5);
/// A publisher that is silent for so long is looked after: its host may be gone.
const SILENCE: Duration = Duration::from_secs(5);
/// For a replay, and for one message of it.
const REPLAY_LIMIT: Duration = Duration::from_secs(30);
const REPLAY_STALL: Duration = Duration::from_secs(2);
/// Bytes of a replay: vLLM keeps 10,000 batches, of some hundred bytes to some 100 KB.
const REPLAY_BYTES_MAX: usize = 1 << 30;
/// Times that a replay is asked for anew, where some of it was dropped on the way.
const ROUNDS: usize = 16;

/// Follows the events of one engine for ever, each rank by itself.
pub async fn watch(router: Arc<RouterState>, engine: Arc<Engine>) {
    let mut ranks = JoinSet::new();
    for (rank, target) in engine.target.events.iter().cloned().enumerate() {
        let events = RankEvents::new(target.replay.is_some());
        let (router, engine) = (router.clone(), engine.clone());
        ranks.spawn(Subscriber { router, engine, rank, target, events }.run());
    }
    while ranks.join_next().await.is_some() {}
    std::future::pending().await
}

struct Subscriber {
    router: Arc<RouterState>,
    engine: Arc<Engine>,
    rank: usize,
    target: EventTarget,
    events: RankEvents,
}

impl Subscriber {
    async fn run(mut self) {
        let mut pause = RECONNECT_MIN;
        loop {
            let begun = Instant::now();
            if self.router.engines.is_usable(&self.engine)
                && let Some(connection) = self.open(&self.target.publish, SocketType::Sub).await
            {
                self.follow(connection).await;
            }
            self.events.disconnected();
            self.report();
            pause = if begun.elapsed() > RECONNECT_MAX { RECONNECT_MIN } else { pause };
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(RECONNECT_MAX);
        }
    }

    async fn open(&self, authority: &str, socket_type: SocketType) -> Option<Connection> {
        match timeout(self.router.limits.connect, Connection::open(authority, socket_type)).await {
            Ok(Ok(connection)) => Some(connection),
            Ok(Err(error)) => {
                tracing::debug!(engine = self.engine.name(), authority, %error, "KV events");
                None
            }
            Err(_) => None,
        }
    }

    /// Takes in what is published until the connection breaks.
    async fn follow(&mut self, mut connection: Connection) {
        let mut next = self.events.connected(self.now_us());
        loop {
            if next == Next::Replay {
                self.replay().await;
            }
            if self.report() {
                next = self.events.contradicted(self.now_us());
                if next == Next::Replay {
                    continue;
                }
            }
            next = match timeout(SILENCE, connection.receive()).await {
                Ok(Ok(message)) => self.events.hear(self.now_us(), &message),
                Ok(Err(error)) => return self.broken(&error),
                Err(_) if self.router.engines.is_usable(&self.engine) => self.events.idle(self.now_us()),
                Err(_) => return,
            };
        }
    }

    fn broken(&mut self, error: &ZmtpError) {
        tracing::debug!(engine = self.engine.name(), %error, "KV events");
        if let ZmtpError::TooLong = error {
            self.events.oversized();
        }
    }

    /// Has missing batches replayed.
    async fn replay(&mut self) {
        let Some(authority) = self.target.replay.clone() else { return self.events.replay_failed() };
        let rounds = async {
            let mut bytes_left = REPLAY_BYTES_MAX;
            for _ in 0..ROUNDS {
                let Some(connection) = self.open(&authority, SocketType::Dealer).await else { break };
                match self.replay_round(connection, &mut bytes_left).await {
                    Ok(Replaying::Over) => return true,
                    Ok(_) => {}
                    Err(error) => {
                        self.broken(&error);
                        break;
                    }
                }
            }
            false
        };
        if timeout(REPLAY_LIMIT, rounds).await != Ok(true) {
            self.events.replay_failed();
        }
    }

    async fn replay_round(
        &mut self,
        mut connection: Connection,
        bytes_left: &mut usize,
    ) -> Result<Replaying, ZmtpError> {
        connection.send(&[b"", &self.events.replay_from().to_be_bytes()]).await?;
        loop {
            // The end may be what was dropped.
            let Ok(message) = timeout(REPLAY_STALL, connection.receive()).await else {
                return Ok(Replaying::AskAnew);
            };
            let (number, payload) = replayed(&message?)?;
            *bytes_left = bytes_left.checked_sub(payload.len()).ok_or(ZmtpError::TooLong)?;
            let then = match number {
                Some(number) => self.events.replayed(number, &payload),
                None => self.events.replay_ended(),
            };
            if then != Replaying::GoOn {
                return Ok(then);
            }
        }
    }

    /// Tells the dispatcher what is new, and returns whether it believes nothing of it.
    fn report(&mut self) -> bool {
        let ranks = self.engine.target.events.len();
        self.router.engines.noted_events(&self.engine, self.rank, ranks, &self.events.report())
    }

    fn now_us(&self) -> u64 {
        self.router.engines.now_us()
    }
}

/// The number and the payload of a replayed batch; at the end there is no number.
fn replayed(message: &[Bytes]) -> Result<(Option<u64>, Bytes), ZmtpError> {
    let parts = match message {
        [empty, number, payload] if empty.is_empty() => number_of(number).map(|number| (number, payload)),
        _ => None,
    };
    let (number, payload) = parts.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(((number != u64::MAX).then_some(number), payload.clone()))
}
