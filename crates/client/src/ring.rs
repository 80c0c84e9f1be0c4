//! A client's ring: requests in memory that it shares with its node, without a frame and, while
//! both are awake, without a system call. A request names a layer of many chunks of a lease, so
//! that an engine can begin with a layer as soon as that is there.

use super::connection::{Connection, Question};
use super::lease::{LayerPlace, Lease};
use super::{Client, Shared};
use crate::protocol::answer::Answer;
use crate::protocol::request::Request as Frame;
use forebay_ring::memory::{self, NotMapped, RingMemory};
use forebay_ring::sleep::{fall_asleep, is_to_be_woken};
use forebay_ring::{BadCompletion, Context, ContextStatus, NotPosted, Op, Producer, Reaped, Request};
use forebay_store::Unreadable;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, Forked};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long the thread looks for the next completion before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// Requests that wait for slots at most.
const UNPOSTED_MAX: usize = 8192;
/// How long it sleeps at a time: then it looks whether the node is still there.
const LOOK: Duration = Duration::from_millis(100);

/// Why a client has no ring.
#[derive(Debug, Error)]
pub enum NoRing {
    #[error(transparent)]
    Forked(#[from] Forked),
    #[error("the node gives none: {0}")]
    Refused(String),
    #[error(transparent)]
    NotMapped(#[from] NotMapped),
    #[error("the client's thread: {0}")]
    Thread(#[from] io::Error),
    /// One end wrote what it must not; the connection has no other ring.
    #[error("the ring is closed")]
    Closed,
}

/// Why layers are not being read. `on_end` was not and will not be called.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotRead {
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("{chunks} chunks; a request names 1 to {limit}")]
    Chunks { chunks: usize, limit: u16 },
    #[error("there is no layer {layer}")]
    Layer { layer: usize },
    #[error(transparent)]
    NotPosted(#[from] NotPosted),
    /// The node is gone, or closed it.
    #[error("the ring is closed")]
    Closed,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayersRead {
    /// For each chunk, in their order, where the layer lies, or why it does not.
    pub places: Vec<Result<LayerPlace, ContextStatus>>,
    /// The lengths of those that do, together.
    pub bytes: u64,
}

type OnEnd = Box<dyn FnOnce(LayersRead) + Send>;

/// A ring of a client, for as long as the node lives. It ends with the last clone; what is under
/// way then is gone.
#[derive(Debug, Clone)]
pub struct Ring(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The client keeps its ring, and closes its connection when nothing uses that any more.
    shared: Weak<Shared>,
    connection: Weak<Connection>,
    /// Chunks of a request at most.
    chunks_max: u16,
    memory: Arc<RingMemory>,
    state: Mutex<State>,
}

struct State {
    producer: Producer,
    next_user: u64,
    waiting: HashMap<u64, Waiting>,
    /// For which there was no slot, in their order.
    unposted: VecDeque<(Request, Vec<Context>)>,
    /// Nothing comes back any more.
    is_closed: bool,
}

/// Who is told of a request, and of how many chunks.
struct Waiting {
    on_end: OnEnd,
    chunks: usize,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("producer", &self.producer).finish_non_exhaustive()
    }
}

impl Client {
    /// The client's ring: it has one with each connection, which it asks for when this is called
    /// first. When that is closed there is none until the client connects anew.
    pub fn ring(&self) -> Result<Ring, NoRing> {
        self.here()?;
        let shared: &Arc<Shared> = &self.shared;
        let connection = shared.connection().ok_or_else(|| NoRing::Refused(shared.why_gone()))?;
        // Until the node has answered: it gives one.
        let mut kept = shared.ring.lock();
        if let Some(ring) = kept.as_ref().filter(|ring| ring.is_of(&connection)) {
            return if ring.is_closed() { Err(NoRing::Closed) } else { Ok(ring.clone()) };
        }
        let ring = self.open_ring(connection)?;
        *kept = Some(ring.clone());
        Ok(ring)
    }

    fn open_ring(&self, connection: Arc<Connection>) -> Result<Ring, NoRing> {
        let shared = &self.shared;
        let own = Arc::clone(&connection);
        let (sender, answer) = std::sync::mpsc::sync_channel(1);
        shared.ask_patiently(&connection, Question::from(&Frame::OpenRing), move |answer| {
            let file = match answer {
                Some(Answer::Ring) => own.take_descriptor().ok_or_else(|| "no ring came with it".into()),
                Some(Answer::Refused(_, why)) => Err(why),
                Some(other) => Err(format!("an answer to something else: {other:?}")),
                None => Err("the node is gone".into()),
            };
            // Whoever asked waits.
            let _ = sender.send(file);
        });
        let file =
            answer.recv().unwrap_or_else(|_| Err("the client ends".into())).map_err(NoRing::Refused)?;
        let (memory, layout) = RingMemory::attach(file)?;
        let producer = Producer::new(layout, &memory.header());
        let (waiting, unposted) = (HashMap::new(), VecDeque::new());
        let state = State { producer, next_user: 0, waiting, unposted, is_closed: false };
        let (memory, state) = (Arc::new(memory), Mutex::new(state));
        let (shared, connection) = (Arc::downgrade(shared), Arc::downgrade(&connection));
        let chunks_max = layout.contexts();
        let inner = Arc::new(Inner { shared, connection, chunks_max, memory: Arc::clone(&memory), state });
        let reaped = Arc::downgrade(&inner);
        let thread = std::thread::Builder::new().name("forebay-reap".into());
        thread.spawn(move || reap_all(&reaped, &memory))?;
        Ok(Ring(inner))
    }
}

impl Ring {
    /// Has a layer of chunks of a lease lie in the arena, from the node's disk or a peer if need
    /// be. `within` is how long it is of any use.
    ///
    /// With `Ok`, `on_end` is called exactly once, on the ring's thread: keep it short, and do not
    /// wait for the ring in it. The chunks stay where they are as long as the lease lives.
    pub fn read(
        &self,
        lease: &Lease,
        layer: usize,
        chunks: &[usize],
        (class, within): (Class, Option<Duration>),
        on_end: impl FnOnce(LayersRead) + Send + 'static,
    ) -> Result<(), NotRead> {
        let held = lease.alive()?;
        let layer = u16::try_from(layer).map_err(|_| NotRead::Layer { layer })?;
        let contexts: Vec<Context> = chunks.iter().map(|chunk| context(*chunk, layer)).collect();
        let limit = self.chunks_max();
        let count = u16::try_from(contexts.len()).ok().filter(|count| (1..=limit).contains(count));
        let count = count.ok_or(NotRead::Chunks { chunks: chunks.len(), limit })?;
        let within_us =
            within.map_or(0, |within| u32::try_from(within.as_micros()).unwrap_or(u32::MAX).max(1));
        let class = Class::ALL.iter().position(|one| *one == class).unwrap_or_default() as u8;
        let inner = &self.0;
        let mut state = inner.state.lock();
        if state.is_closed || !inner.is_node_there() {
            return Err(NotRead::Closed);
        }
        let user = state.next_user;
        let request = Request { user, lease: held.id, op: Op::Read, class, contexts: count, within_us };
        if state.unposted.len() >= UNPOSTED_MAX {
            return Err(NotPosted::Full { slots: UNPOSTED_MAX as u16 }.into());
        }
        state.unposted.push_back((request, contexts));
        state.next_user += 1;
        state.waiting.insert(user, Waiting { on_end: Box::new(on_end), chunks: chunks.len() });
        let has_posted = state.post_some(&inner.memory);
        drop(state);
        if has_posted {
            inner.wake_node();
        }
        Ok(())
    }

    /// Chunks that a request names at most.
    pub fn chunks_max(&self) -> u16 {
        self.0.chunks_max
    }

    /// Whether it belongs to this connection.
    pub(super) fn is_of(&self, connection: &Arc<Connection>) -> bool {
        std::ptr::eq(self.0.connection.as_ptr(), Arc::as_ptr(connection))
    }

    /// Whether nothing comes back any more: whoever asks does without it.
    fn is_closed(&self) -> bool {
        self.0.state.lock().is_closed
    }

    /// Requests that have not come back.
    pub fn under_way(&self) -> usize {
        self.0.state.lock().waiting.len()
    }
}

fn context(chunk: usize, layer: u16) -> Context {
    Context { extent: u32::try_from(chunk).unwrap_or(u32::MAX), layer, checksum: 0 }
}

impl Inner {
    fn wake_node(&self) {
        let asleep = self.memory.header().consumer_asleep();
        if is_to_be_woken(asleep) {
            memory::wake(asleep);
        }
    }

    /// Tells all whose requests have ended. `false`: nothing more will come.
    fn reap(&self) -> bool {
        loop {
            let mut state = self.state.lock();
            let reaped = match state.producer.reap(self.memory.words()) {
                Ok(Some(reaped)) => reaped,
                Ok(None) => break,
                Err(bad) => {
                    drop(state);
                    self.close(Some(&bad));
                    return false;
                }
            };
            let told = state.waiting.remove(&reaped.completion.user);
            let has_posted = state.post_some(&self.memory);
            drop(state);
            if has_posted {
                self.wake_node();
            }
            let torn = reaped.results.iter().filter(|result| result.status == ContextStatus::Torn).count();
            if torn > 0 {
                tracing::warn!(torn, contexts = reaped.results.len(), "torn request or answer in the ring");
            }
            if let Some(waiting) = told {
                (waiting.on_end)(layers_of(&reaped));
            }
        }
        if self.is_node_there() && !self.memory.header().is_closed() {
            return true;
        }
        self.close(None);
        false
    }

    fn is_node_there(&self) -> bool {
        self.connection.upgrade().is_some_and(|connection| connection.is_alive())
    }

    /// Everybody who waits is told that nothing comes.
    fn close(&self, bad: Option<&BadCompletion>) {
        if let Some(bad) = bad {
            tracing::warn!(reason = %bad, "wrong completion from the node; the ring is closed");
        }
        let mut state = self.state.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_values().for_each(Waiting::fail);
    }

    /// Asks a node from which something is awaited whether it is there: one that is stuck does not
    /// close its socket.
    fn look(&self) {
        let is_awaited = !self.state.lock().waiting.is_empty();
        if let Some((shared, connection)) = self.shared.upgrade().zip(self.connection.upgrade())
            && is_awaited
        {
            shared.ask_patiently(&connection, Question::from(&Frame::Ping), drop);
        }
    }
}

impl State {
    /// Posts what there are slots for, and says whether that was anything.
    fn post_some(&mut self, memory: &RingMemory) -> bool {
        let mut has_posted = false;
        while let Some((request, contexts)) = self.unposted.front()
            && self.producer.post(memory.words(), request, contexts).is_ok()
        {
            self.unposted.pop_front();
            has_posted = true;
        }
        has_posted
    }
}

impl Waiting {
    fn fail(self) {
        (self.on_end)(LayersRead { places: vec![Err(ContextStatus::Gone); self.chunks], bytes: 0 });
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        std::mem::take(&mut self.state.get_mut().waiting).into_values().for_each(Waiting::fail);
        // The thread finds that nobody is left.
        let asleep = self.memory.header().producer_asleep();
        asleep.store(0, Ordering::SeqCst);
        memory::wake(asleep);
    }
}

fn layers_of(reaped: &Reaped) -> LayersRead {
    let layer = |result: &forebay_ring::ContextResult| match result.status {
        ContextStatus::Done => {
            Ok(LayerPlace { offset_bytes: result.offset_bytes, checksum: result.checksum })
        }
        failed => Err(failed),
    };
    LayersRead { places: reaped.results.iter().map(layer).collect(), bytes: reaped.completion.bytes }
}

/// Reaps until the ring ends.
fn reap_all(ring: &Weak<Inner>, memory: &RingMemory) {
    let asleep = memory.header().producer_asleep();
    loop {
        let Some(inner) = ring.upgrade() else { return };
        if !inner.reap() {
            return;
        }
        let has_ended = || inner.state.lock().producer.has_ended(memory.words());
        let until = Instant::now() + SPIN;
        while Instant::now() < until && !has_ended() {
            std::hint::spin_loop();
        }
        let sleeps = fall_asleep(asleep, has_ended);
        let since = Instant::now();
        // Whoever drops the last one wakes this thread.
        drop(inner);
        if sleeps && ring.strong_count() > 0 {
            memory::wait(asleep, Some(LOOK));
        }
        if since.elapsed() >= LOOK
            && let Some(inner) = ring.upgrade()
        {
            inner.look();
        }
    }
}
