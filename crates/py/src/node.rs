//! A node's client as Python has it: chunks of KV found, loaded and stored by id. This file turns
//! Python's objects into the client's and back; where the node keeps chunks is the node's.

use crate::chunk::{Ending, Loading, Storing};
use crate::errors::{NotFoundError, PeerLostError, failed, invalid, not_moved, of_absent};
use crate::finding::{Finding, Hold};
use crate::ids;
use crate::memory::borrow;
use crate::places::{Piece, Place, Places};
use crate::process::Own;
use crate::rows;
use crate::trace::within;
use crate::watching::{Said, Watching};
use forebay_client::protocol::control::{Report, Verb};
use forebay_client::protocol::explain::{Description, Outcome};
use forebay_client::{Client, ClientOptions};
use forebay_kv::ChunkId;
use forebay_store::TenantId;
use forebay_transfer::lock::{Mutex, MutexGuard, RwLock};
use forebay_transfer::{
    Class, Closed, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place as At, Span,
};
use forebay_transfer::{HostLink, mapped};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// The host's memory: the node's arena and this process's.
const HOST: At = At::Host(0);
/// Lots that are copied at a time.
const WINDOW_LOTS: u32 = 4;
const WINDOW_BYTES: u64 = 64 << 20;
/// The copying threads are this process's own and end what they began, so no copy is given up as
/// lost: `wait` would return while its memory is written.
const OP_TIMEOUT_US: u64 = 24 * 3_600 * 1_000_000;

/// Memory that chunks are loaded into and stored from.
#[pyclass(frozen, module = "forebay")]
pub struct NodeMemory {
    /// The first address.
    #[pyo3(get)]
    address: u64,
    /// Its length.
    #[pyo3(get)]
    bytes: u64,
    place: Arc<Place>,
}

/// The right to load the first chunks of a sequence. It is kept alive until it is released.
#[pyclass(frozen, module = "forebay")]
pub struct Lease(Own<Mutex<Held>>);

/// `None` after it was released.
type Held = Option<Arc<forebay_client::Lease>>;

impl Lease {
    fn new(lease: forebay_client::Lease) -> Lease {
        Lease(Own::new(Mutex::new(Some(Arc::new(lease)))))
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, Held>> {
        Ok(self.0.get()?.lock())
    }

    fn count(&self, of: impl Fn(&forebay_client::Lease) -> usize) -> PyResult<usize> {
        Ok(self.lock()?.as_ref().map_or(0, |lease| of(lease)))
    }

    /// Tells the node, and so waits for one that takes nothing in: never with the interpreter's
    /// lock.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.lock()?.take();
        py.detach(|| drop(held));
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Another process only forgets it.
        let _ = Python::attach(|py| self.end(py));
    }
}

#[pymethods]
impl Lease {
    /// How many of its chunks, the first ones, were in the node's memory.
    #[getter]
    fn in_memory(&self) -> PyResult<usize> {
        self.count(forebay_client::Lease::in_memory)
    }

    /// How many of its chunks, the next ones, were on the node's disk.
    #[getter]
    fn on_disk(&self) -> PyResult<usize> {
        self.count(forebay_client::Lease::on_disk)
    }

    /// How many of its chunks, the last ones, other nodes are said to have.
    #[getter]
    fn on_peers(&self) -> PyResult<usize> {
        self.count(forebay_client::Lease::on_peers)
    }

    /// Whether chunks can still be loaded under it.
    #[getter]
    fn is_alive(&self) -> PyResult<bool> {
        Ok(self.lock()?.as_ref().is_some_and(|lease| lease.is_alive()))
    }

    /// Ends it, as soon as nothing is being loaded under it.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }

    fn __len__(&self) -> PyResult<usize> {
        self.count(forebay_client::Lease::len)
    }
}

/// What became of a chunk: verdict, reason, where it is, and for how many milliseconds it is
/// pinned.
type ChunkReport = (&'static str, &'static str, &'static str, u64);

/// The client of the node of this host. For any number of threads.
#[pyclass(frozen, module = "forebay")]
pub struct Node {
    state: Arc<Own<State>>,
    /// Whose chunks, if they are not the client's own tenant's.
    tenant: Option<TenantId>,
}

/// What a client and the same one for tenants share.
struct State {
    /// `None` after `close`. Taken before `places` are let go of: then nothing touches them any
    /// more.
    inner: RwLock<Option<Inner>>,
    places: Mutex<Places>,
    watching: Watching,
}

/// The number of a question, and the chunks that are not there; without a number those that have
/// gone since; without chunks all.
type SaidOfChunks<'py> = (Option<u64>, Option<Vec<Bound<'py, PyBytes>>>);

struct Inner {
    client: Client,
    mover: MoverThread,
    copy_threads: usize,
    /// Whether the threads that copy were started.
    copies: Mutex<bool>,
}

/// Whose chunks, as Python numbers them.
pub struct Tenant(pub TenantId);

impl<'py> FromPyObject<'_, 'py> for Tenant {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Tenant> {
        let tenant = value.extract().ok().map(TenantId).filter(|tenant| *tenant != TenantId::NOBODY);
        let wrong = || invalid(format!("tenant is {}; allowed: 0 to {}", *value, u16::MAX - 1));
        tenant.map(Tenant).ok_or_else(wrong)
    }
}

impl Inner {
    fn start(options: ClientOptions, copy_threads: usize, wait: bool) -> PyResult<Inner> {
        let mover = MoverThread::spawn(Limits::default()).map_err(failed)?;
        let handle = mover.handle();
        let connect = if wait { Client::connect_or_wait } else { Client::connect };
        let client = connect(&handle, HOST, options);
        let client = client.map_err(|error| PeerLostError::new_err(error.to_string()))?;
        Ok(Inner { client, mover, copy_threads, copies: Mutex::new(false) })
    }

    /// Starts the threads that copy, once. A client without memory, such as that of an engine's
    /// scheduler, moves no byte and needs none.
    fn start_copies(&self) -> PyResult<()> {
        let mut started = self.copies.lock();
        if *started {
            return Ok(());
        }
        let handle = self.mover.handle();
        let link = HostLink::new(self.copy_threads).map_err(failed)?;
        let spec =
            LinkSpec { op_timeout_us: OP_TIMEOUT_US, ..LinkSpec::new("host", WINDOW_LOTS, WINDOW_BYTES) };
        let copies = handle.add_link(spec, Box::new(link)).map_err(failed)?;
        handle.add_path(PathSpec::direct(HOST, HOST, copies)).map_err(failed)?.map_err(failed)?;
        *started = true;
        Ok(())
    }
}

impl Node {
    /// Does something with the client, without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&Client, &MoverHandle) -> T + Send,
    ) -> PyResult<T> {
        let act = |inner: &Inner| match self.tenant {
            None => act(&inner.client, &inner.mover.handle()),
            tenant => act(&inner.client.for_tenant(tenant), &inner.mover.handle()),
        };
        self.with_inner(py, act)
    }

    fn with_inner<T: Send>(&self, py: Python<'_>, act: impl FnOnce(&Inner) -> T + Send) -> PyResult<T> {
        let state = self.state.get()?;
        let done = py.detach(|| state.inner.read().as_ref().map(act));
        done.ok_or_else(|| PeerLostError::new_err("this client of the node is closed"))
    }

    fn places(&self) -> PyResult<MutexGuard<'_, Places>> {
        Ok(self.state.get()?.places.lock())
    }

    fn layers(&self, layers: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<Piece>>> {
        let rows = layers.try_iter()?.map(|layer| rows::read_plain(&layer?)).collect::<PyResult<Vec<_>>>()?;
        let places = self.places()?;
        rows.iter().map(|layer| layer.iter().map(|row| places.find(row)).collect()).collect()
    }

    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.get()?;
        py.detach(|| {
            let mut inner = state.inner.write();
            let Some(Inner { client, mover, .. }) = inner.take() else { return };
            // What it has copied is summed up behind it.
            drop(mover);
            client.settle();
        });
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The interpreter's lock is held until this one is gone, so one of them is the last.
        if Arc::strong_count(&self.state) == 1 {
            // Another process only forgets it.
            let _ = Python::attach(|py| self.end(py));
        }
    }
}

#[pymethods]
impl Node {
    /// A client. With `wait` a node that is not there yet is looked for in the background; without
    /// it that is an error.
    #[new]
    #[pyo3(signature = (socket, *, token = Vec::new(), name = None, tenant = Tenant(TenantId(0)), copy_threads = 2, wait = false))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        token: Vec<u8>,
        name: Option<String>,
        tenant: Tenant,
        copy_threads: usize,
        wait: bool,
    ) -> PyResult<Node> {
        let mut options = ClientOptions { token, tenant: tenant.0, ..ClientOptions::new(socket) };
        if let Some(name) = name {
            options.name = name;
        }
        let inner = py.detach(|| Inner::start(options, copy_threads, wait))?;
        let (places, watching) = (Mutex::default(), Watching::default());
        let state = State { inner: RwLock::new(Some(inner)), places, watching };
        Ok(Node { state: Arc::new(Own::new(state)), tenant: None })
    }

    /// The same client for requests of a tenant: its chunks are found, loaded, stored and
    /// controlled, and those of the client's own tenant are not. The client ends with the last of
    /// them, or when one of them is closed.
    fn for_tenant(&self, tenant: Tenant) -> Node {
        Node { state: Arc::clone(&self.state), tenant: Some(tenant.0) }
    }

    /// Whether the node is there, as far as is known. It is looked for in the background while it
    /// is not.
    #[getter]
    fn is_connected(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |client, _| client.is_connected())
    }

    /// Makes memory known that chunks are loaded into and stored from: a buffer, or a tuple
    /// (address, bytes).
    fn register_memory(&self, memory: &Bound<'_, PyAny>) -> PyResult<NodeMemory> {
        let py = memory.py();
        let borrowed = borrow(memory, true)?;
        let (start, len) = (borrowed.backing.as_ptr() as u64, borrowed.backing.len() as u64);
        py.detach(|| mapped::check(start, len, true)).map_err(of_absent)?;
        let backing = borrowed.backing;
        let region = self.with_inner(py, |inner| {
            inner.start_copies()?;
            inner.mover.handle().register(HOST, backing).map_err(failed)
        })??;
        let place = Arc::new(Place::new(start, len, region, borrowed.buffer));
        let overlapping = {
            let mut places = self.places()?;
            let overlapping = places.overlapping(start, len).map(|place| (place.start, place.len));
            if overlapping.is_none() {
                places.insert(Arc::clone(&place));
            }
            overlapping
        };
        if let Some((at, bytes)) = overlapping {
            self.unregister(py, &place)?;
            return Err(invalid(format!(
                "memory at {start:#x} of {len} bytes overlaps what is registered at {at:#x}, {bytes} bytes"
            )));
        }
        Ok(NodeMemory { address: start, bytes: len, place })
    }

    /// Takes memory back. Refused while a chunk is loaded into it or stored from it.
    fn deregister_memory(&self, py: Python<'_>, memory: &NodeMemory) -> PyResult<()> {
        let NodeMemory { address, bytes, place } = memory;
        let is_place = |at: &Arc<Place>| Arc::ptr_eq(at, place);
        if !self.places()?.overlapping(*address, *bytes).is_some_and(is_place) {
            return Err(NotFoundError::new_err(format!("memory at {address:#x} is not registered")));
        }
        self.unregister(py, place)?;
        self.places()?.remove(place);
        Ok(())
    }

    /// How many of these chunks, from the first on, can be had: from memory, disk or peers. Looking
    /// keeps nothing.
    fn lookup(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<usize> {
        let ids = ids::ids(ids)?;
        self.with(py, |client, _| client.lookup(&ids))
    }

    /// As `lookup`, without waiting, for a sequence whose chunks are kept in parts: the ids of each
    /// part.
    #[pyo3(signature = (parts, *, trace = None))]
    fn find(&self, py: Python<'_>, parts: &Bound<'_, PyAny>, trace: Option<&str>) -> PyResult<Finding> {
        let parts = parts.try_iter()?.map(|part| ids::ids(&part?)).collect::<PyResult<Vec<_>>>()?;
        self.with(py, |client, _| Finding::ask(&client.within(within(trace)), parts))
    }

    /// As `lease`, without waiting and without access: what is there stays until it is released.
    /// With `bring`, what is on the node's disk or on peers comes into its memory meanwhile, behind
    /// what requests wait for.
    #[pyo3(signature = (ids, *, ttl_us = 10_000_000, bring = false))]
    fn hold(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, ttl_us: u64, bring: bool) -> PyResult<Hold> {
        let ids = ids::ids(ids)?;
        self.with(py, |client, _| Hold::ask(client, &ids, ttl_us, bring))
    }

    /// Leases the longest prefix of these chunks that is there; it may be empty.
    #[pyo3(signature = (ids, *, ttl_us = 10_000_000))]
    fn lease(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, ttl_us: u64) -> PyResult<Lease> {
        let ids = ids::ids(ids)?;
        let lease = self.with(py, |client, _| client.lease(&ids, ttl_us))?;
        Ok(Lease::new(lease))
    }

    /// Has the node say when these chunks have gone, and now which of them are not there, without
    /// waiting. Gives the number of this question.
    fn watch(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<u64> {
        let ids = ids::ids(ids)?;
        let watching = &self.state.get()?.watching;
        self.with(py, |client, _| watching.ask(client, &ids))
    }

    /// What the node has said of watched chunks since this was asked last, in its order.
    fn take_watched<'py>(&self, py: Python<'py>) -> PyResult<Vec<SaidOfChunks<'py>>> {
        let names = |ids: Vec<ChunkId>| Some(ids.iter().map(|id| PyBytes::new(py, id.as_bytes())).collect());
        let said = |said| match said {
            Said::Absent(number, ids) => (Some(number), names(ids)),
            Said::Gone(ids) => (None, names(ids)),
            Said::All => (None, None),
        };
        Ok(self.state.get()?.watching.take().into_iter().map(said).collect())
    }

    /// Loads a chunk of a lease, counted from 0, into memory: for each layer the descriptors whose
    /// bytes, one after another, become it.
    #[pyo3(signature = (lease, chunk, layers, *, deadline_us = None))]
    fn load(
        &self,
        py: Python<'_>,
        lease: &Lease,
        chunk: usize,
        layers: &Bound<'_, PyAny>,
        deadline_us: Option<u64>,
    ) -> PyResult<Loading> {
        let held = lease.lock()?.clone().ok_or_else(|| NotFoundError::new_err("the lease was released"))?;
        let layers = self.layers(layers)?;
        let (targets, ending) = (spans(&layers), Arc::new(Ending::default()));
        let told = Arc::clone(&ending);
        let (client, started) = self.with(py, |client, mover| {
            let deadline_us = deadline_us.map(|limit_us| mover.now_us().saturating_add(limit_us));
            let on_end = move |end| told.set(end);
            (client.clone(), client.load_chunk(&held, chunk, &targets, Class::Demand, deadline_us, on_end))
        })?;
        started.map_err(not_moved)?;
        Ok(Loading::new(client, held, chunk, layers, ending))
    }

    /// Stores a chunk: for each layer the descriptors whose bytes, one after another, are it.
    #[pyo3(signature = (id, parent, layers))]
    fn store(
        &self,
        py: Python<'_>,
        id: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        layers: &Bound<'_, PyAny>,
    ) -> PyResult<Storing> {
        let layers = self.layers(layers)?;
        let (sources, ending) = (spans(&layers), Arc::new(Ending::default()));
        let told = Arc::clone(&ending);
        let (id, parent) = (ids::id(id)?, parent.map(ids::id).transpose()?);
        let started = self.with(py, |client, _| {
            client.store_chunk(id, parent, &sources, Class::WriteBack, move |end| told.set(end))
        })?;
        started.map_err(not_moved)?;
        Ok(Storing::new(layers, ending))
    }

    /// Tells the node that a request uses these chunks, wherever they are: it decides by that what
    /// stays.
    fn used(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, chunk_bytes: u64) -> PyResult<()> {
        let ids = ids::ids(ids)?;
        self.with(py, |client, _| client.used(&ids, chunk_bytes))
    }

    /// The ids of a prompt's whole chunks, in each namespace that engines of this tenant use.
    fn prompt_ids<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Vec<Bound<'py, PyBytes>>>> {
        let tokens = ids::tokens(tokens)?;
        let named = self.with(py, |client, _| client.names(&tokens))?.map_err(invalid)?;
        let named = named.ok_or_else(|| PeerLostError::new_err("the node is not there"))?;
        let bytes = |id: &ChunkId| PyBytes::new(py, id.as_bytes());
        Ok(named.iter().map(|ids| ids.iter().map(bytes).collect()).collect())
    }

    /// Where each of these chunks is, and for how long it is still pinned.
    fn list_chunks(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<ChunkReport>> {
        self.control(py, Verb::List, ids)
    }

    /// Keeps chunks from being evicted from where they are.
    #[pyo3(signature = (ids, *, ttl_ms))]
    fn pin(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, ttl_ms: u64) -> PyResult<Vec<ChunkReport>> {
        self.control(py, Verb::Pin { ttl_ms }, ids)
    }

    /// Lets chunks be evicted again.
    fn unpin(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<ChunkReport>> {
        self.control(py, Verb::Unpin, ids)
    }

    /// Has chunks come into the node's memory, from its disk or from peers, behind what requests
    /// wait for. They come after this returns.
    fn prefetch(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<ChunkReport>> {
        self.control(py, Verb::Prefetch, ids)
    }

    /// Has chunks leave memory, as far as they are on the node's disk.
    fn demote(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<ChunkReport>> {
        self.control(py, Verb::Demote, ids)
    }

    /// Has chunks be gone from this node and from its peers, and their bytes overwritten.
    fn forget(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<ChunkReport>> {
        self.control(py, Verb::Forget, ids)
    }

    /// Tells the node what a namespace is made of, and what else is worth knowing of it, for
    /// `forebay explain`. Nodes that come later are told too.
    #[pyo3(signature = (fields, chunk_tokens, labels = BTreeMap::new()))]
    fn describe(
        &self,
        fields: &Bound<'_, PyDict>,
        chunk_tokens: u32,
        labels: BTreeMap<String, String>,
    ) -> PyResult<()> {
        let namespace = ids::namespace(fields)?;
        let facts = namespace.facts().into_iter().chain(labels).collect();
        let described = Description { key: namespace.key(), chunk_tokens, facts };
        self.with(fields.py(), |client, _| client.describe(described))?.map_err(invalid)
    }

    /// Tells the node what a request found and loads, and why no more, for `forebay explain`.
    #[pyo3(signature = (request, reason, *, prompt_tokens, held_tokens = 0, loaded_tokens = 0, found = (0, 0, 0), missing = Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "they are a record's fields, named in Python")]
    fn note_outcome(
        &self,
        py: Python<'_>,
        request: String,
        reason: String,
        prompt_tokens: u32,
        held_tokens: u32,
        loaded_tokens: u32,
        found: (u32, u32, u32),
        missing: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let missing = missing.iter().map(ids::id).collect::<PyResult<Vec<_>>>()?;
        let found = found.into();
        let outcome = Outcome { request, reason, prompt_tokens, held_tokens, loaded_tokens, found, missing };
        self.with(py, |client, _| client.note_outcome(outcome))?.map_err(invalid)
    }

    /// What the node counts; None if it is not there.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(stat) = self.with(py, |client, _| client.stat())? else { return Ok(None) };
        let dict = PyDict::new(py);
        for (name, value) in [
            ("capacity_bytes", stat.capacity_bytes),
            ("used_bytes", stat.used_bytes),
            ("chunks", stat.chunks),
            ("corrupt", stat.corrupt),
            ("clients", stat.clients),
            ("leases", stat.leases),
            ("hits_in_memory", stat.hits[0]),
            ("hits_on_disk", stat.hits[1]),
            ("hits_on_peers", stat.hits[2]),
        ] {
            dict.set_item(name, value)?;
        }
        Ok(Some(dict))
    }

    /// Ends the client. Nothing touches memory any more when this returns.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)?;
        self.places()?.clear();
        Ok(())
    }
}

impl Node {
    fn control(&self, py: Python<'_>, verb: Verb, ids: &Bound<'_, PyAny>) -> PyResult<Vec<ChunkReport>> {
        let ids = ids::ids(ids)?;
        let reports = self.with(py, |client, _| client.control(verb, &ids))?.map_err(invalid)?;
        let reports = reports.ok_or_else(|| PeerLostError::new_err("the node is not there"))?;
        let told = |report: &Report| {
            (report.verdict.name(), report.reason.name(), report.place_name(), report.pinned_ms)
        };
        Ok(reports.iter().map(told).collect())
    }

    fn unregister(&self, py: Python<'_>, place: &Place) -> PyResult<()> {
        let region = place.region;
        let unregister = |client: &Client, mover: &MoverHandle| {
            let refused = mover.unregister(region)?;
            // Whoever took a checksum then may still be at it.
            client.settle();
            Ok::<_, Closed>(refused)
        };
        let refused = self.with(py, unregister)?.map_err(failed)?;
        refused.map_err(|error| not_moved(format!("the memory is in use: {error}")))
    }
}

fn spans(layers: &[Vec<Piece>]) -> Vec<Vec<Span>> {
    layers.iter().map(|layer| layer.iter().map(Piece::span).collect()).collect()
}
