//! The client of a node: what an engine links to keep its KV with the node of its host. Bytes are
//! copied once, by the engine, from or to the node's arena.
//!
//! A node may die at any time. Then every lookup finds nothing, what is under way fails, leases are
//! dead, and the client connects again in the background, to whatever instance is there next.

mod arena;
mod chunk_store;
mod connection;
mod fetch;
mod greeting;
mod lease;
mod leased_chunk;
mod leased_layers;
mod load;
pub mod log;
pub mod protocol;
mod ring;
mod save;
mod slot;
mod supervisor;

pub use crate::protocol::answer::{Found, NodeStat};
pub use crate::protocol::request::NewChunk;
pub use arena::{NodeArena, OnArena};
pub use fetch::fetch;
pub use greeting::{ask_control, ask_names, ask_stat, ask_why};
pub use lease::{LayerPlace, Lease};
pub use leased_chunk::LeasedChunk;
pub use leased_layers::LayerCame;
pub use load::NotLoaded;
pub use ring::{LayersRead, NoRing, NotRead, Ring};
pub use save::NotStored;
pub use slot::{Reserved, Slot};

use crate::protocol::answer::Answer;
use crate::protocol::bytes::BadBytes;
use crate::protocol::control::{Control, Report, Verb};
use crate::protocol::explain::{Description, Outcome};
use crate::protocol::request::Request;
use connection::{Connection, Question, RequestContext};
use forebay_kv::ChunkId;
use forebay_store::{NotVerified, TenantId};
use forebay_transfer::ArenaError;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Closed, Forked, MoverHandle, Place, Process, TraceContext};
use lease::Held;
use save::{Sealing, Unquiet};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;
use supervisor::Supervisor;
use thiserror::Error;

/// How to reach a node, and as whom.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    pub socket: PathBuf,
    /// What the node has to be shown.
    pub token: Vec<u8>,
    /// For people who read the node's counters.
    pub name: String,
    /// Whose chunks are stored and found.
    pub tenant: TenantId,
    /// A node that does not answer for so long is taken for dead.
    pub answer_limit_us: u64,
}

impl ClientOptions {
    /// Without a token, for the first tenant, with a limit of two seconds.
    pub fn new(socket: impl Into<PathBuf>) -> ClientOptions {
        ClientOptions {
            socket: socket.into(),
            token: Vec::new(),
            name: format!("process {}", std::process::id()),
            tenant: TenantId::default(),
            answer_limit_us: 2_000_000,
        }
    }
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error("{}: {error}", path.display())]
    Socket { path: PathBuf, error: std::io::Error },
    /// The node lets nobody in now: it shuts down, or has as many clients as it may have.
    #[error("the node refuses for now: {0}")]
    Busy(String),
    #[error("the node refuses: {0}")]
    Refused(String),
    /// Whoever answers is no node that this program understands.
    #[error("not a node of this version: {0}")]
    Protocol(String),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Mover(#[from] Closed),
    #[error("the client's threads: {0}")]
    Thread(std::io::Error),
}

/// Watched chunks that the node has no more, neither in memory nor on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gone {
    /// These. They are not watched any more.
    These(Vec<ChunkId>),
    /// The node is gone, and nothing is watched any more: what is known of its chunks is void.
    All,
}

/// Namespaces that a client describes to a node that comes.
const DESCRIBED_MAX: usize = 256;

type OnGone = Arc<dyn Fn(Gone) + Send + Sync>;

/// A client. Cheap to clone, usable from any thread; with the last clone and the last lease the
/// connection ends.
///
/// What the caller must do is what a [`Store`](forebay_store::Store) asks: a route of the mover
/// between `place` and the places of sources and targets; sources unchanged until their `on_end`;
/// every layer [verified](Client::verify) before use. A call that names more than 65,536 chunks is
/// not made: nothing is found, held or noted.
///
/// It belongs to the process that made it. A child of `fork()` has none of its threads and shares
/// its socket: there nothing is found, loaded or stored, [`here`](Client::here) says why, and
/// dropping it changes nothing of the parent's.
#[derive(Debug, Clone)]
pub struct Client {
    shared: Arc<Shared>,
    /// Ends the supervisor with the last clone.
    owner: Arc<Owner>,
    context: RequestContext,
}

#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    supervisor: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    process: Process,
    mover: MoverHandle,
    place: Place,
    options: ClientOptions,
    supervisor: Supervisor,
    sealer: Sender<Sealing>,
    unquiet: Mutex<Unquiet>,
    on_gone: Mutex<Option<OnGone>>,
    on_arena: OnceLock<OnArena>,
    /// For nodes that come.
    described: Mutex<VecDeque<(RequestContext, Description)>>,
    /// That of the node that was there last, if it gave one.
    ring: Mutex<Option<Ring>>,
}

impl Client {
    /// Connects to a node and registers its arena with `mover` at `place`.
    pub fn connect(
        mover: &MoverHandle,
        place: Place,
        options: ClientOptions,
    ) -> Result<Client, ConnectError> {
        let connection = Connection::open(mover, place, &options)?;
        Client::start(mover, place, options, Ok(connection))
    }

    /// As [`connect`](Client::connect), but a node that is not there yet, shuts down or is full is
    /// looked for in the background: until then it is as good as dead. A node that refuses this
    /// client is an error also here.
    pub fn connect_or_wait(
        mover: &MoverHandle,
        place: Place,
        options: ClientOptions,
    ) -> Result<Client, ConnectError> {
        let connection = match Connection::open(mover, place, &options) {
            Err(error @ (ConnectError::Socket { .. } | ConnectError::Busy(_))) => Err(error.to_string()),
            opened => Ok(opened?),
        };
        Client::start(mover, place, options, connection)
    }

    fn start(
        mover: &MoverHandle,
        place: Place,
        options: ClientOptions,
        connection: Result<Connection, String>,
    ) -> Result<Client, ConnectError> {
        let connection = connection.map(Arc::new);
        let (sealer, sealings) = channel::<Sealing>();
        let shared = Arc::new(Shared {
            process: Process::current(),
            mover: mover.clone(),
            place,
            options,
            supervisor: Supervisor::new(connection.clone()),
            sealer,
            unquiet: Mutex::default(),
            on_gone: Mutex::default(),
            on_arena: OnceLock::new(),
            described: Mutex::default(),
            ring: Mutex::default(),
        });
        let listener = Arc::downgrade(&shared);
        mover.on_quiet(move |spans| {
            if let Some(shared) = listener.upgrade() {
                shared.unquiet.lock().quiet(spans);
            }
        })?;
        let start = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(run).map_err(ConnectError::Thread)
        };
        start("forebay-seal", Box::new(move || sealings.into_iter().for_each(|seal| seal())))?;
        if connection.is_ok_and(|connection| !shared.start_receiving(&connection)) {
            return Err(ConnectError::Thread(std::io::ErrorKind::WouldBlock.into()));
        }
        let kept = Arc::clone(&shared);
        let supervisor = start("forebay-supervisor", Box::new(move || supervisor::run(&kept)))?;
        let owner = Owner { shared: Arc::clone(&shared), supervisor: Mutex::new(Some(supervisor)) };
        Ok(Client { shared, owner: Arc::new(owner), context: RequestContext::default() })
    }

    /// Refuses in any other process than the one that made it.
    pub fn here(&self) -> Result<(), Forked> {
        self.shared.process.check()
    }

    /// Ends the connection, for all clones, and waits until the mover has let go of the node's
    /// memory, but for what transfers still use. Not for the client's own threads.
    pub fn close(&self) {
        if self.here().is_err() {
            return;
        }
        self.shared.supervisor.close();
        let supervisor = self.owner.supervisor.lock().take();
        if let Some(supervisor) = supervisor {
            // A panic of the thread has already been printed.
            let _ = supervisor.join();
        }
    }

    /// Whether the node is there, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.shared.connection().is_some()
    }

    /// Why the node is not there, as it was found last; `None` while it is.
    pub fn why_gone(&self) -> Option<String> {
        (!self.is_connected()).then(|| self.shared.why_gone())
    }

    /// Which life of the node this is; another one after it was started again.
    pub fn instance(&self) -> Option<[u8; 16]> {
        self.arena().map(|arena| arena.instance())
    }

    /// The memory of the node that is there now.
    pub fn arena(&self) -> Option<Arc<NodeArena>> {
        self.shared.connection().map(|connection| Arc::clone(&connection.arena))
    }

    /// Has `on_arena` called with the memory of the node that is there, and with that of each one
    /// that comes, as soon as it does: whoever copies by himself can make it ready. With the same
    /// one twice at most. A client has one such.
    pub fn on_arena(&self, on_arena: OnArena) {
        // The first one stays.
        let _ = self.shared.on_arena.set(on_arena);
        if let Some(arena) = self.arena() {
            self.shared.tell_arena(&arena);
        }
    }

    /// The same client for work that is part of this span, if it is traced: the node's spans of
    /// what is looked up, leased and loaded hang below it.
    pub fn within(&self, within: Option<TraceContext>) -> Client {
        Client { context: RequestContext { within, ..self.context }, ..self.clone() }
    }

    /// The same client for requests of this tenant: its chunks are looked up, leased, stored, noted
    /// as used, controlled and described, and those of the client's own tenant are not. `None` is
    /// the client's own again. Leases stay those of whom they were asked for.
    pub fn for_tenant(&self, tenant: Option<TenantId>) -> Client {
        Client { context: RequestContext { tenant, ..self.context }, ..self.clone() }
    }

    /// How many of `ids`, a sequence from its first chunk on, are in the node's memory, on its disk
    /// or on its peers. Looking keeps nothing: only a lease does.
    pub fn lookup(&self, ids: &[ChunkId]) -> usize {
        let lookup = Request::Lookup(ids.to_vec());
        let found = self.shared.ask(Question::new(&lookup, self.context), |answer| match answer {
            Answer::Found(found) => Some(found.chunks() as usize),
            _ => None,
        });
        self.wait(found).map_or(0, |found| found.min(ids.len()))
    }

    /// As [`lookup`](Client::lookup), told apart and without waiting: `on_found` is called exactly
    /// once, on one of the client's threads or, if there is no node, on this one. A node that falls
    /// silent has nothing. Keep it short.
    pub fn find_then(&self, ids: &[ChunkId], on_found: impl FnOnce(Found) + Send + 'static) {
        let Some(connection) = self.shared.connection() else { return on_found(Found::default()) };
        let lookup = Request::Lookup(ids.to_vec());
        self.shared.ask_patiently(&connection, Question::new(&lookup, self.context), move |answer| {
            match answer {
                Some(Answer::Found(found)) => on_found(found),
                _ => on_found(Found::default()),
            }
        });
    }

    /// Leases the longest prefix of `ids` that is there. The lease is kept alive until it is
    /// dropped, as long as the node hears of it every `ttl_us`. It is empty if nothing is there, or
    /// too much is leased already.
    pub fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Lease {
        let (sender, leased) = sync_channel(1);
        self.lease_then(ids, ttl_us, move |lease| drop(lease.map(|lease| sender.send(lease))));
        self.wait(leased).unwrap_or_else(Lease::none)
    }

    /// Checks that `pieces`, one after another, are the bytes that layer `layer` of chunk `chunk`
    /// had when it was stored. The chunk must have been loaded under the lease, which must be
    /// alive. Corrupt bytes are reported to the node, which looks for itself. Anything but `Ok` is
    /// a miss.
    pub fn verify(
        &self,
        lease: &Lease,
        chunk: usize,
        layer: usize,
        pieces: &[&[u8]],
    ) -> Result<(), NotVerified> {
        lease.verify(chunk, layer, pieces)
    }

    /// Notes that a request uses a chain of chunks of `chunk_bytes` each, wherever they are and
    /// also if they have to be computed. To be called once for each request.
    pub fn used(&self, ids: &[ChunkId], chunk_bytes: u64) {
        if let Some(connection) = self.shared.connection() {
            let used = Request::Used { chunk_bytes, ids: ids.to_vec() };
            connection.tell(Question::new(&used, self.context));
        }
    }

    /// Says what a namespace is made of whose chunks this client uses, to the node that is there
    /// and to those that come: it is what `forebay explain` compares. The last 256 are kept.
    pub fn describe(&self, described: Description) -> Result<(), BadBytes> {
        described.check()?;
        if self.here().is_err() {
            return Ok(());
        }
        let mut kept = self.shared.described.lock();
        kept.retain(|(_, one)| one.key != described.key);
        if kept.len() >= DESCRIBED_MAX {
            kept.pop_front();
        }
        kept.push_back((self.context, described.clone()));
        drop(kept);
        if let Some(connection) = self.shared.connection() {
            connection.tell(Question::new(&Request::Describe(described), self.context));
        }
        Ok(())
    }

    /// Says what a request found and loaded, and why no more. A node that is not there does not
    /// hear of it.
    pub fn note_outcome(&self, outcome: Outcome) -> Result<(), BadBytes> {
        outcome.check()?;
        if let Some(connection) = self.shared.connection() {
            connection.tell(Question::new(&Request::Outcome(outcome), self.context));
        }
        Ok(())
    }

    /// Says what is to become of chunks, by name, and gives what the node says of each. `None` if
    /// it is not there. Chunks that are fetched ahead come after the answer.
    pub fn control(&self, verb: Verb, ids: &[ChunkId]) -> Result<Option<Vec<Report>>, BadBytes> {
        let control = Control { verb, ids: ids.to_vec() };
        control.check()?;
        let question = Request::Control(control);
        let answered = self.shared.ask(Question::new(&question, self.context), |answer| match answer {
            Answer::Controlled(reports) => Some(reports),
            _ => None,
        });
        Ok(self.wait(answered))
    }

    /// What the chunks of a prompt are called in each namespace that clients of this tenant have
    /// described. Nodes say it to root and to their own user. `None` if the node is not there.
    pub fn names(&self, tokens: &[u32]) -> Result<Option<Vec<Vec<ChunkId>>>, ConnectError> {
        greeting::names(tokens, |request| {
            request.check().map_err(|bad| ConnectError::Refused(bad.to_string()))?;
            Ok(self.wait(self.shared.ask(Question::new(request, self.context), Some)))
        })
    }

    /// Waits until the checksums of all that has been copied into slots are taken: then nothing but
    /// the mover reads what chunks are stored from. Not for the client's own threads.
    pub fn settle(&self) {
        if self.here().is_err() {
            return;
        }
        let (passed, waits) = sync_channel(1);
        self.shared.seal(Box::new(move || passed.send(()).unwrap_or_default()));
        // An error is the thread's end.
        let _ = waits.recv();
    }

    /// Has `listener`, and no other any more, told of [watched](Client::watch_then) chunks that go.
    /// It runs on the client's threads: keep it short.
    pub fn on_gone(&self, listener: impl Fn(Gone) + Send + Sync + 'static) {
        if self.here().is_err() {
            return;
        }
        *self.shared.on_gone.lock() = Some(Arc::new(listener));
    }

    /// Watches chunks from now on, those that are watched already too, without waiting. `on_answer`
    /// is called exactly once, as the listener is or, if there is no node, on this thread, with
    /// those of them that the node does not have or does not watch, since it watches too many: all,
    /// if it falls silent. Both are told in order: what goes after this was answered is told after
    /// it.
    pub fn watch_then(&self, ids: &[ChunkId], on_answer: impl FnOnce(Vec<ChunkId>) + Send + 'static) {
        let all = ids.to_vec();
        let Some(connection) = self.shared.connection() else { return on_answer(all) };
        self.shared.ask_patiently(&connection, &Request::Watch(ids.to_vec()), move |answer| match answer {
            Some(Answer::Watched(absent)) => on_answer(absent),
            _ => on_answer(all),
        });
    }

    /// What the node counts. `None` if it is not there.
    pub fn stat(&self) -> Option<NodeStat> {
        self.wait(self.shared.ask(&Request::Stat, |answer| match answer {
            Answer::Stat(stat) => Some(stat),
            _ => None,
        }))
    }

    /// Messages to and from the node over the connection that is there.
    pub fn messages(&self) -> u64 {
        self.shared.connection().map_or(0, |connection| connection.messages())
    }

    /// Waits for an answer. A node that gives none in time is as good as dead.
    fn wait<T>(&self, answered: Receiver<T>) -> Option<T> {
        let value = answered.recv_timeout(self.shared.answer_limit()).ok();
        if value.is_none()
            && let Some(connection) = self.shared.connection()
            && connection.silent_for().is_some_and(|silent_for| silent_for >= self.shared.answer_limit())
        {
            connection.end();
        }
        value
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if !self.shared.process.is_current() {
            // All of it is the parent's, and is left as it is.
            std::mem::forget(Arc::clone(&self.shared));
            return std::mem::forget(std::mem::take(&mut self.supervisor));
        }
        self.shared.supervisor.close();
    }
}

impl Shared {
    fn now_us(&self) -> u64 {
        self.mover.now_us()
    }

    fn answer_limit(&self) -> Duration {
        Duration::from_micros(self.options.answer_limit_us.max(1))
    }

    /// First of all, so that no lock is taken that a thread of another process had.
    fn connection(&self) -> Option<Arc<Connection>> {
        self.process.is_current().then(|| self.supervisor.connection())?
    }

    /// Why there is no connection, as far as is known.
    fn why_gone(&self) -> String {
        self.process.check().map_or_else(|forked| forked.to_string(), |()| self.supervisor.why_gone())
    }

    fn keep_alive(&self, held: &Arc<Held>) {
        self.supervisor.keep(held);
    }

    fn seal(&self, sealing: Sealing) {
        // The thread that takes it lives as long as this.
        let _ = self.sealer.send(sealing);
    }

    /// Called by the thread of a connection, in the order in which the node said it.
    fn tell_gone(&self, gone: Gone) {
        let listener = self.on_gone.lock().clone();
        if let Some(listener) = listener {
            listener(gone);
        }
    }

    fn tell_arena(&self, arena: &Arc<NodeArena>) {
        if let Some(on_arena) = self.on_arena.get() {
            on_arena(arena);
        }
    }

    /// Starts the thread of a connection. Says whether there is one.
    fn start_receiving(self: &Arc<Self>, connection: &Arc<Connection>) -> bool {
        let spoken = connection;
        let (connection, shared): (_, Weak<Shared>) = (Arc::clone(connection), Arc::downgrade(self));
        let socket = self.options.socket.display().to_string();
        tracing::info!(socket, arena_bytes = connection.arena.bytes(), "node connected");
        let receive = move || {
            connection.receive(|answer| {
                if let (Answer::Gone(ids), Some(shared)) = (answer, shared.upgrade()) {
                    shared.tell_gone(Gone::These(ids));
                }
            });
            if let Some(shared) = shared.upgrade() {
                // Before there can be another connection, over which chunks are watched.
                shared.tell_gone(Gone::All);
                if shared.supervisor.broken(&connection) {
                    tracing::warn!(socket, "node gone");
                }
            }
        };
        let started = std::thread::Builder::new().name("forebay-client".into()).spawn(receive).is_ok();
        if started {
            let tell = |(context, one): &(RequestContext, Description)| {
                spoken.tell(Question::new(&Request::Describe(one.clone()), *context));
            };
            self.described.lock().iter().for_each(tell);
        }
        started
    }

    /// Asks for something that may take long: meanwhile the node has to show that it lives.
    fn ask_patiently<'a>(
        &self,
        connection: &Arc<Connection>,
        question: impl Into<Question<'a>>,
        on_answer: impl FnOnce(Option<Answer>) + Send + 'static,
    ) {
        connection.ask(question, on_answer);
        self.supervisor.listen(self.answer_limit());
    }

    /// The same, for a request with several answers: `on_answer` says whether more are to come.
    fn ask_for_many<'a>(
        &self,
        connection: &Arc<Connection>,
        question: impl Into<Question<'a>>,
        on_answer: impl FnMut(Option<Answer>) -> bool + Send + 'static,
    ) {
        connection.ask_for_many(question, on_answer);
        self.supervisor.listen(self.answer_limit());
    }

    /// Asks. What `read` makes of the answer comes out of the receiver; nothing if it makes nothing
    /// of it.
    fn ask<'a, T: Send + 'static>(
        &self,
        question: impl Into<Question<'a>>,
        read: impl FnOnce(Answer) -> Option<T> + Send + 'static,
    ) -> Receiver<T> {
        let (sender, answered) = sync_channel(1);
        if let Some(connection) = self.connection() {
            // Whoever asked may not wait any more.
            connection
                .ask(question, move |answer| drop(answer.and_then(read).map(|value| sender.send(value))));
        }
        answered
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("options", &self.options).finish_non_exhaustive()
    }
}
