//! The client's own thread. It renews leases, finds a node that is stuck, connects again to one
//! that is gone, and takes arenas of the past out of the mover. With nothing to do it sleeps.

use super::Shared;
use super::connection::Connection;
use super::lease::Held;
use crate::protocol::answer::Answer;
use crate::protocol::request::Request;
use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{LogGate, RegionId};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Between attempts to connect, at first and at most.
const BACKOFF: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];
/// Between attempts to take an arena out of the mover that transfers still use.
const RETIRE_EVERY: Duration = Duration::from_millis(500);

/// Between renewals at least, however short a lease is.
const RENEW_EVERY_MIN: Duration = Duration::from_millis(1);

/// Why there is no connection, before another one was tried.
const GONE: &str = "the node is gone";

/// What the thread knows.
#[derive(Debug)]
pub(super) struct Supervisor {
    state: Mutex<State>,
    changed: Condvar,
    unreached_gate: LogGate,
}

#[derive(Debug, Default)]
struct State {
    leases: HashMap<u64, Weak<Held>>,
    next_lease: u64,
    renew_at: Option<Instant>,
    connection: Option<Arc<Connection>>,
    /// Why there is none.
    why_gone: String,
    connect_at: Option<Instant>,
    backoff: Duration,
    /// Arenas of connections that have ended, and when the thread tries to take them out of the
    /// mover.
    past: Vec<RegionId>,
    retire_at: Option<Instant>,
    /// The thread looks at a silent node again then.
    listen_at: Option<Instant>,
    closed: bool,
}

/// What is to be done now.
enum Task {
    Connect,
    Renew(Arc<Connection>, Vec<Arc<Held>>),
    Listen(Arc<Connection>),
    Retire(Vec<RegionId>),
    End(Vec<RegionId>),
}

impl Supervisor {
    /// Keeps a connection, or looks for one where there is none yet, and why.
    pub fn new(connection: Result<Arc<Connection>, String>) -> Supervisor {
        let connect_at = connection.is_err().then(Instant::now);
        let why_gone = connection.as_ref().err().map_or(GONE, String::as_str).to_owned();
        let backoff = BACKOFF[0];
        let state = State { connection: connection.ok(), why_gone, connect_at, backoff, ..State::default() };
        Supervisor { state: Mutex::new(state), changed: Condvar::new(), unreached_gate: LogGate::new() }
    }

    /// The connection, as long as it is alive.
    pub fn connection(&self) -> Option<Arc<Connection>> {
        self.state.lock().connection.clone().filter(|connection| connection.is_alive())
    }

    /// Why there is no connection, as far as is known.
    pub fn why_gone(&self) -> String {
        self.state.lock().why_gone.clone()
    }

    /// A lease is to be kept alive.
    pub fn keep(&self, held: &Arc<Held>) {
        let mut state = self.state.lock();
        let number = state.next_lease;
        state.next_lease += 1;
        state.leases.insert(number, Arc::downgrade(held));
        let due = Instant::now() + renew_every(held.ttl_us);
        if state.renew_at.is_none_or(|renew_at| due < renew_at) {
            state.renew_at = Some(due);
            self.changed.notify_one();
        }
    }

    /// Somebody waits for an answer that may take long: the node has to show that it lives
    /// meanwhile.
    pub fn listen(&self, limit: Duration) {
        let mut state = self.state.lock();
        if state.listen_at.is_none() {
            state.listen_at = Some(Instant::now() + limit / 2);
            self.changed.notify_one();
        }
    }

    /// A connection broke. Says whether it was the one that there is.
    pub fn broken(&self, connection: &Arc<Connection>) -> bool {
        let mut state = self.state.lock();
        let is_current = state.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection));
        if is_current {
            state.connection = None;
            state.why_gone = GONE.into();
            let now = Instant::now();
            state.leave(connection.arena.region, now);
            state.connect_at = Some(now);
            state.listen_at = None;
            self.changed.notify_one();
        }
        is_current
    }

    /// Ends the thread, which takes the arenas out of the mover first.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let connection = state.connection.take();
        if let Some(connection) = &connection {
            state.leave(connection.arena.region, Instant::now());
        }
        drop(state);
        self.changed.notify_one();
        if let Some(connection) = connection {
            connection.end();
        }
    }

    fn next(&self) -> Task {
        let mut state = self.state.lock();
        loop {
            let now = Instant::now();
            if let Some(task) = state.task(now) {
                return task;
            }
            match state.next_due() {
                None => self.changed.wait(&mut state),
                Some(due) => drop(self.changed.wait_until(&mut state, due)),
            }
        }
    }
}

impl State {
    fn next_due(&self) -> Option<Instant> {
        [self.renew_at, self.connect_at, self.listen_at, self.retire_at].into_iter().flatten().min()
    }

    fn task(&mut self, now: Instant) -> Option<Task> {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if self.closed {
            return Some(Task::End(std::mem::take(&mut self.past)));
        }
        if is_due(self.connect_at) {
            self.connect_at = None;
            return Some(Task::Connect);
        }
        if is_due(self.renew_at) {
            return self.renewal(now);
        }
        if is_due(self.listen_at) {
            self.listen_at = None;
            return self.connection.clone().map(Task::Listen);
        }
        if is_due(self.retire_at) {
            self.retire_at = None;
            return Some(Task::Retire(std::mem::take(&mut self.past)));
        }
        None
    }

    /// An arena is to be taken out of the mover as soon as transfers let go of it.
    fn leave(&mut self, arena: RegionId, now: Instant) {
        self.past.push(arena);
        self.retire_at.get_or_insert(now + RETIRE_EVERY);
    }

    /// There is a connection, or none yet and why. Gives it back if nobody wants it any more.
    fn connected(
        &mut self,
        connection: Result<Arc<Connection>, String>,
        now: Instant,
    ) -> Option<Arc<Connection>> {
        match connection {
            Ok(connection) if self.closed => {
                self.leave(connection.arena.region, now);
                return Some(connection);
            }
            Ok(connection) if connection.is_alive() => {
                self.backoff = BACKOFF[0];
                self.connection = Some(connection);
                self.why_gone = GONE.into();
            }
            broken_or_none => {
                match broken_or_none {
                    Ok(broken) => self.leave(broken.arena.region, now),
                    Err(why) => self.why_gone = why,
                }
                self.connect_at = Some(now + self.backoff);
                self.backoff = (self.backoff * 2).min(BACKOFF[1]);
            }
        }
        None
    }

    fn renewal(&mut self, now: Instant) -> Option<Task> {
        let mut held = Vec::with_capacity(self.leases.len());
        self.leases.retain(|_, lease| {
            let lease = lease.upgrade();
            let goes_on = lease.as_ref().is_some_and(|lease| !lease.is_over());
            held.extend(lease);
            goes_on
        });
        let ttl_us = held.iter().filter(|held| !held.is_over()).map(|held| held.ttl_us).min();
        self.renew_at = ttl_us.map(|ttl_us| now + renew_every(ttl_us));
        self.connection.clone().map(|connection| Task::Renew(connection, held))
    }
}

fn renew_every(ttl_us: u64) -> Duration {
    Duration::from_micros(ttl_us / 3).max(RENEW_EVERY_MIN)
}

/// The thread. It keeps the client's shared part alive until the client is dropped.
pub(super) fn run(shared: &Arc<Shared>) {
    loop {
        match shared.supervisor.next() {
            Task::End(arenas) => return retire(shared, arenas),
            Task::Connect => connect(shared),
            Task::Renew(connection, held) => renew(shared, &connection, held),
            Task::Listen(connection) => listen(shared, &connection),
            Task::Retire(arenas) => retire(shared, arenas),
        }
    }
}

fn connect(shared: &Arc<Shared>) {
    let opened = Connection::open(&shared.mover, shared.place, &shared.options);
    let started = opened.map_err(|error| error.to_string()).and_then(|connection| {
        let connection = Arc::new(connection);
        let has_thread = shared.start_receiving(&connection);
        has_thread.then_some(connection).ok_or_else(|| "the client gets no thread".into())
    });
    if let Err(reason) = &started
        && let Some(repeated) = shared.supervisor.unreached_gate.pass()
    {
        tracing::warn!(socket = %shared.options.socket.display(), reason, repeated, "node not reached");
    }
    let useless = shared.supervisor.state.lock().connected(started, Instant::now());
    if let Some(connection) = useless {
        connection.end();
    }
    if let Some(connection) = shared.connection() {
        shared.tell_arena(&connection.arena);
    }
}

/// Lets leases of the same connection live on.
fn renew(shared: &Arc<Shared>, connection: &Arc<Connection>, held: Vec<Arc<Held>>) {
    let mut by_ttl: HashMap<u64, Vec<Arc<Held>>> = HashMap::new();
    let goes_on = |held: &Arc<Held>| Arc::ptr_eq(&held.connection, connection) && !held.is_over();
    for held in held.into_iter().filter(goes_on) {
        by_ttl.entry(held.ttl_us).or_default().push(held);
    }
    for (ttl_us, held) in by_ttl {
        let asked_us = shared.now_us();
        let leases = held.iter().map(|held| held.id).collect();
        let held: Vec<Weak<Held>> = held.iter().map(Arc::downgrade).collect();
        connection.ask(&Request::Renew { ttl_us, leases }, move |answer| {
            let Some(Answer::Renewed(dead)) = answer else { return };
            for held in held.iter().filter_map(Weak::upgrade) {
                if dead.contains(&held.id) { held.ended() } else { held.renewed(asked_us) }
            }
        });
    }
    shared.supervisor.listen(shared.answer_limit());
}

/// Ends a connection whose node does not answer, and asks one that was silent for long whether it
/// is there.
fn listen(shared: &Arc<Shared>, connection: &Arc<Connection>) {
    let Some(silent_for) = connection.silent_for() else { return };
    let limit = shared.answer_limit();
    if silent_for >= limit {
        return connection.end();
    }
    if silent_for >= limit / 2 {
        connection.ask(&Request::Ping, |_| {});
    }
    shared.supervisor.listen(limit);
}

/// Takes arenas out of the mover that nothing uses any more.
fn retire(shared: &Arc<Shared>, arenas: Vec<RegionId>) {
    let in_use = |arena: &RegionId| matches!(shared.mover.unregister(*arena), Ok(Err(_)));
    let in_use: Vec<RegionId> = arenas.into_iter().filter(in_use).collect();
    let (mut state, now) = (shared.supervisor.state.lock(), Instant::now());
    in_use.into_iter().for_each(|arena| state.leave(arena, now));
}
