//! The agent as Python has it. This file turns Python's objects into the agent's and back, and
//! keeps registered buffers until nothing touches them; how bytes move is the agent's.

use crate::cuda::AgentGpus;
use crate::descriptors::Descriptors;
use crate::errors::{PeerLostError, invalid, of_agent, of_run, of_trouble};
use crate::memory::{borrow, range_of};
use crate::process::Own;
use crate::rail::Rail;
use crate::rows::{self, Rows};
use crate::transfer::{Prepared, Transfer};
use forebay_net::tcp::TlsConfig;
use forebay_net::{Access, AgentConfig, AgentError, Histogram, Op, PeerError, PeerStat, Run, Select};
use forebay_transfer::lock::{Mutex, MutexGuard, RwLock};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, mpsc};

/// Memory that an agent offers.
#[pyclass(frozen, module = "forebay")]
pub struct Registration {
    /// The first address.
    #[pyo3(get)]
    address: u64,
    /// Its length.
    #[pyo3(get)]
    bytes: u64,
    of_agent: forebay_net::Registration,
}

/// One end of transfers: offers memory of this process, reads and writes memory of others. For any
/// number of threads.
#[pyclass(frozen, module = "forebay")]
pub struct Agent {
    name: String,
    state: Own<Ours>,
}

struct Ours {
    /// `None` after `close`. Taken before `buffers` are released: then nothing touches them any
    /// more.
    inner: RwLock<Option<forebay_net::Agent>>,
    buffers: Mutex<HashMap<u64, PyUntypedBuffer>>,
    gpus: AgentGpus,
}

impl Agent {
    /// Does something with the agent, without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&forebay_net::Agent) -> Result<T, AgentError> + Send,
    ) -> PyResult<T> {
        let state = self.state.get()?;
        let done = py.detach(|| {
            let inner = state.inner.read();
            inner.as_ref().map(act)
        });
        done.ok_or_else(|| self.is_closed())?.map_err(of_agent)
    }

    /// Registers memory of a GPU.
    fn register_on_gpu(
        &self,
        memory: &Bound<'_, PyAny>,
        device: i64,
        access: Access,
    ) -> PyResult<forebay_net::Registration> {
        let range = range_of(memory)?;
        let device = u16::try_from(device)
            .map_err(|_| invalid(format!("device is {device}; allowed: the ordinal of a GPU, 0 or more")))?;
        let state = self.state.get()?;
        memory.py().detach(|| {
            let inner = state.inner.read();
            let agent = inner.as_ref().ok_or_else(|| self.is_closed())?;
            state.gpus.register(agent, range, device, access)
        })
    }

    fn is_closed(&self) -> PyErr {
        PeerLostError::new_err(format!("agent {} is closed", self.name))
    }

    fn buffers(&self) -> PyResult<MutexGuard<'_, HashMap<u64, PyUntypedBuffer>>> {
        Ok(self.state.get()?.buffers.lock())
    }

    /// Ends the agent; when this returns nothing of it touches memory any more.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.get()?;
        py.detach(|| drop(state.inner.write().take()));
        Ok(())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Another process only forgets it.
        let _ = Python::attach(|py| self.end(py));
    }
}

#[pymethods]
impl Agent {
    #[new]
    #[pyo3(signature = (
        name,
        *,
        listen = Some("127.0.0.1:0"),
        advertise = None,
        token = Vec::new(),
        tls = None,
        plain_beyond_loopback = false,
        rails = Vec::new(),
        flows_max = 4,
        progress_limit_us = 2_000_000,
    ))]
    #[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn new(
        py: Python<'_>,
        name: String,
        listen: Option<&str>,
        advertise: Option<&str>,
        token: Vec<u8>,
        tls: Option<(Vec<u8>, Vec<u8>, Vec<u8>)>,
        plain_beyond_loopback: bool,
        rails: Vec<Py<Rail>>,
        flows_max: usize,
        progress_limit_us: u64,
    ) -> PyResult<Agent> {
        let config = AgentConfig {
            listen: listen.map(|text| address("listen", text)).transpose()?,
            advertise: advertise.map(|text| address("advertise", text)).transpose()?,
            token,
            tls: tls.map(|pem| certificates(&pem)).transpose()?,
            plain_beyond_loopback,
            rails: rails.iter().map(|rail| rail.get().options()).collect(),
            flows_max,
            progress_limit_us,
            ..AgentConfig::named(name.clone())
        };
        let agent = py.detach(|| forebay_net::Agent::start(config)).map_err(of_agent)?;
        let state =
            Ours { inner: RwLock::new(Some(agent)), buffers: Mutex::default(), gpus: AgentGpus::default() };
        Ok(Agent { name, state: Own::new(state) })
    }

    /// What it is called.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Where peers connect to; None: they cannot.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |agent| Ok(agent.address().map(|address| address.to_string())))
    }

    /// Offers memory: a contiguous buffer, or a tuple (address, bytes) that the caller keeps valid.
    /// Peers may read it, and write it if `writable`. With `device` the tuple is memory of that
    /// GPU.
    #[pyo3(signature = (memory, *, writable = true, device = None))]
    fn register_memory(
        &self,
        memory: &Bound<'_, PyAny>,
        writable: bool,
        device: Option<i64>,
    ) -> PyResult<Registration> {
        let access = Access { write: writable, ..Access::OPEN };
        if let Some(device) = device {
            let registration = self.register_on_gpu(memory, device, access)?;
            let (address, bytes) = (registration.base(), registration.bytes());
            return Ok(Registration { address, bytes, of_agent: registration });
        }
        let borrowed = borrow(memory, writable)?;
        let backing = borrowed.backing;
        let registration = self.with(memory.py(), |agent| agent.register(backing, access))?;
        if let Some(buffer) = borrowed.buffer {
            self.buffers()?.insert(registration.offered().key, buffer);
        }
        let (address, bytes) = (registration.base(), registration.bytes());
        Ok(Registration { address, bytes, of_agent: registration })
    }

    /// Takes memory back. Returns when nothing touches it any more.
    fn deregister_memory(&self, py: Python<'_>, registration: &Registration) -> PyResult<()> {
        self.with(py, |agent| agent.deregister(registration.of_agent))?;
        self.state.get()?.gpus.forget(registration.address);
        // Bound first: the buffer is released after the lock.
        let buffer = self.buffers()?.remove(&registration.of_agent.offered().key);
        drop(buffer);
        Ok(())
    }

    /// What others need to know to reach this agent and its memory, as it is now.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let metadata = self.with(py, |agent| Ok(agent.metadata()))?;
        Ok(PyBytes::new(py, &metadata))
    }

    /// Takes in a peer's metadata and says its name. Connects with the first transfer.
    fn add_peer(&self, py: Python<'_>, metadata: &[u8]) -> PyResult<String> {
        self.with(py, |agent| agent.add_peer(metadata))
    }

    /// Forgets a peer; what is under way with it is cancelled first.
    fn remove_peer(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.with(py, |agent| agent.remove_peer(name))
    }

    /// The peers that it knows of.
    fn peers(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |agent| Ok(agent.peer_names()))
    }

    /// Connects to a peer now, and waits for it.
    fn connect(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.with(py, |agent| agent.connect(name))
    }

    /// Checks a list of memory once, for any number of transfers: of this end, or of a peer. With
    /// `memory`, "DRAM" or "VRAM", a list of this end's has to lie there, on the GPUs that its rows
    /// name.
    #[pyo3(signature = (descriptors, *, peer = None, memory = None))]
    fn prepare(
        &self,
        descriptors: &Bound<'_, PyAny>,
        peer: Option<&str>,
        memory: Option<&str>,
    ) -> PyResult<Prepared> {
        let is_device = match memory {
            None => None,
            Some("DRAM") => Some(false),
            Some("VRAM") => Some(true),
            Some(other) => {
                return Err(invalid(format!("memory {other:?}: allowed are \"DRAM\" and \"VRAM\"")));
            }
        };
        // Where a peer's memory lies is the peer's to know: its addresses are enough.
        let kind = Kind { gpus: &self.state.get()?.gpus, is_device: is_device.filter(|_| peer.is_none()) };
        let list = runs(descriptors, &kind)?;
        let prepared = self.with(descriptors.py(), |agent| match peer {
            None => agent.prepare_local(&list),
            Some(peer) => agent.prepare_remote(peer, &list),
        })?;
        Ok(Prepared(Own::new(prepared)))
    }

    /// Makes a transfer of chosen blocks of two lists, all of them without a choice. It begins with
    /// `post`.
    #[pyo3(signature = (
        operation,
        local,
        remote,
        *,
        local_indices = None,
        remote_indices = None,
        notification = None,
        deadline_us = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "named arguments in Python")]
    fn transfer(
        &self,
        py: Python<'_>,
        operation: &str,
        local: &Prepared,
        remote: &Prepared,
        local_indices: Option<&Bound<'_, PyAny>>,
        remote_indices: Option<&Bound<'_, PyAny>>,
        notification: Option<Vec<u8>>,
        deadline_us: Option<u64>,
    ) -> PyResult<Transfer> {
        let op = match operation {
            "read" => Op::Read,
            "write" => Op::Write,
            other => return Err(invalid(format!("operation {other:?}: allowed are \"read\" and \"write\""))),
        };
        let (here, there) = (select(local_indices)?, select(remote_indices)?);
        let (local, remote) = (local.0.get()?, remote.0.get()?);
        let blocks = match &here {
            Select::All => local.len(),
            Select::Indices(indices) => indices.len() as u64,
        };
        let request = self
            .with(py, |agent| agent.request(op, (local, here), (remote, there), notification, deadline_us))?;
        Ok(Transfer::new(request, blocks))
    }

    /// Sends a message to a peer. Waits until the peer has it and raises what went wrong. Without
    /// `wait` it returns as soon as the message has its place on the way there, raises if there is
    /// none in time or if it has failed already, and a message that is lost after that is counted
    /// as `not_notified` among the peer's faults.
    #[pyo3(signature = (peer, message, *, wait = true))]
    fn notify(&self, py: Python<'_>, peer: &str, message: Vec<u8>, wait: bool) -> PyResult<()> {
        let (sender, receiver) = mpsc::sync_channel(1);
        // Nobody listens if nobody waits.
        self.with(py, |agent| agent.notify_when_room(peer, message, move |end| drop(sender.send(end))))?;
        let end = match wait {
            true => py.detach(move || receiver.recv().map_err(|_| PeerError::Ended)),
            false => receiver.try_recv().or(Ok(Ok(()))),
        };
        end.and_then(|end| end).map_err(|trouble| of_trouble(&trouble))
    }

    /// The messages that have come since the last call, with their senders.
    fn take_notifications<'py>(&self, py: Python<'py>) -> PyResult<Vec<(String, Bound<'py, PyBytes>)>> {
        let taken = self.with(py, |agent| Ok(agent.take_notifications()))?;
        Ok(taken.into_iter().map(|(sender, text)| (sender, PyBytes::new(py, &text))).collect())
    }

    /// A descriptor that becomes readable when a transfer has ended or a message has come.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.with(py, |agent| agent.event_fd().map(|fd| fd.as_raw_fd()))
    }

    /// Makes `fileno` quiet until the next event. Call it before looking at states and messages.
    fn clear_events(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |agent| {
            agent.clear_event();
            Ok(())
        })
    }

    /// What went on with each peer.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |agent| Ok(agent.stats()))?;
        let all = PyDict::new(py);
        for stat in stats {
            all.set_item(&stat.name, peer_stat(py, &stat)?)?;
        }
        Ok(all)
    }

    /// Ends the agent: what is under way is cancelled, and nothing touches memory any more when
    /// this returns.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)?;
        let buffers = std::mem::take(&mut *self.buffers()?);
        drop(buffers);
        Ok(())
    }
}

fn address(field: &str, text: &str) -> PyResult<SocketAddr> {
    let bad = |_| invalid(format!("{field} is {text:?}: an IP address and a port, as in 127.0.0.1:0"));
    text.parse().map_err(bad)
}

/// The contents of three PEM files: this end's certificates, its key, and the authorities whose
/// peers are let in.
fn certificates((own, key, authorities): &(Vec<u8>, Vec<u8>, Vec<u8>)) -> PyResult<Arc<TlsConfig>> {
    let config = TlsConfig::from_pem(own, key, authorities);
    config.map(Arc::new).map_err(|error| invalid(format!("tls: {error}")))
}

/// Where rows are said to lie.
struct Kind<'a> {
    gpus: &'a AgentGpus,
    /// `None`: nothing is said.
    is_device: Option<bool>,
}

impl Kind<'_> {
    fn check<const N: usize>(&self, rows: &[[u64; N]]) -> PyResult<()> {
        self.is_device.map_or(Ok(()), |is_device| self.gpus.check(rows, is_device))
    }
}

/// The runs that a list consists of, if it lies where it is said to.
fn runs(descriptors: &Bound<'_, PyAny>, kind: &Kind<'_>) -> PyResult<forebay_net::Descriptors> {
    if let Ok(kept) = descriptors.cast::<Descriptors>() {
        let rows = kept.get().rows();
        return kind.check(&rows).and_then(|()| blocks(&rows));
    }
    match rows::read(descriptors)? {
        Rows::Plain(rows) => kind.check(&rows).and_then(|()| blocks(&rows)),
        Rows::Strided(rows) => {
            kind.check(&rows)?;
            let runs =
                rows.into_iter().map(|[address, len, _, stride, count]| Run { address, len, count, stride });
            forebay_net::Descriptors::from_runs(runs).map_err(of_run)
        }
    }
}

fn blocks(rows: &[rows::Row]) -> PyResult<forebay_net::Descriptors> {
    let blocks = rows.iter().map(|[address, len, _]| (*address, *len));
    forebay_net::Descriptors::from_blocks(blocks).map_err(of_run)
}

fn select(indices: Option<&Bound<'_, PyAny>>) -> PyResult<Select> {
    Ok(match indices {
        None => Select::All,
        Some(indices) => Select::Indices(rows::read_indices(indices)?),
    })
}

fn peer_stat<'py>(py: Python<'py>, stat: &PeerStat) -> PyResult<Bound<'py, PyDict>> {
    let counts = &stat.counts;
    let stages = PyDict::new(py);
    for (name, times) in [
        ("queued", &counts.stages.queued),
        ("posted", &counts.stages.posted),
        ("wire", &counts.wire()),
        ("notified", &counts.stages.notified),
    ] {
        stages.set_item(name, histogram(py, times)?)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("state", stat.state)?;
    let unreached = stat.unreached.as_ref();
    dict.set_item("unreached", unreached.map(|unreached| unreached.reason.label()))?;
    dict.set_item("flows", stat.flows.len())?;
    let paths = PyDict::new(py);
    for (path, counts) in &counts.paths {
        paths.set_item(*path, counts.moved_bytes)?;
    }
    dict.set_item("paths", paths)?;
    let idle = stat.idle_rails.iter().map(|idle| (idle.rail.name(), idle.why.to_string()));
    dict.set_item("idle_rails", idle.collect::<Vec<_>>())?;
    dict.set_item("moved_bytes", counts.moved_bytes())?;
    dict.set_item("busy_us", counts.busy_us)?;
    dict.set_item("in_flight_bytes", counts.in_flight_bytes())?;
    dict.set_item("done", counts.done)?;
    dict.set_item("cancelled", counts.cancelled)?;
    dict.set_item("faults", counts.faults.clone())?;
    dict.set_item("stages", stages)?;
    Ok(dict)
}

fn histogram<'py>(py: Python<'py>, times: &Histogram) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("count", times.count())?;
    dict.set_item("sum_us", times.sum_us)?;
    dict.set_item("p50_us", times.quantile_us(0.5))?;
    dict.set_item("p99_us", times.quantile_us(0.99))?;
    Ok(dict)
}
