//! `forebay.PagedCache`: an engine's paged cache, as Python sees it. This file only converts
//! arguments and answers.

use crate::errors::{PeerLostError, failed, invalid, not_moved, of_absent, of_forked};
use crate::ids::{id, ids};
use crate::node::Tenant;
use crate::process::Own;
use crate::trace::within;
use forebay_client::ClientOptions;
use forebay_paged::cache::{ALL_PAGES, CacheShape, Group, Layer};
use forebay_paged::direct::{Digest, DirectOptions, Key, OfferEnd, ReadRequest, ReadSource};
use forebay_paged::page_tables::PageTables;
use forebay_paged::pages::{HeadRange, Source};
use forebay_paged::{LoadRequest, NewChunk, NotBegun, NotOpened, PagedCache as Cache, PagedOptions, Verify};
use forebay_store::TenantId;
use forebay_transfer::mapped::{self, Absent};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::time::Duration;

/// Id, id of the chunk before it, tokens.
type Named<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, u32);
/// What a worker said of itself, the key of its offer; first head there, first head here and heads,
/// or whole pages; how many workers read it.
type Offered = (Vec<u8>, Key, Option<(u32, u32, u32)>, u32);
/// Job, tokens that may be used, why it is not all.
type LoadEnds = Vec<(u64, u64, Option<String>)>;
/// Job, places of chunks that the node neither took nor had.
type StoreEnds = Vec<(u64, Vec<u32>)>;

/// An engine's paged KV cache, and its way to the node of the host. For any number of threads.
#[pyclass(frozen, module = "forebay")]
pub struct PagedCache(Own<Cache>);

#[pymethods]
impl PagedCache {
    #[new]
    #[pyo3(signature = (
        socket, layers, *, page_tokens, chunk_tokens, heads, device = None, token = Vec::new(), name = None,
        tenant = Tenant(TenantId(0)), copy_threads = 2, sibling_devices = Vec::new(), kept_pages = None, direct = None,
        verify = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a constructor")]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        layers: Vec<(u64, u64, u64, u64, usize)>,
        page_tokens: Vec<u32>,
        chunk_tokens: u32,
        heads: Vec<u32>,
        device: Option<u16>,
        token: Vec<u8>,
        name: Option<String>,
        tenant: Tenant,
        copy_threads: usize,
        sibling_devices: Vec<u16>,
        kept_pages: Option<Vec<u32>>,
        direct: Option<String>,
        verify: Option<String>,
    ) -> PyResult<PagedCache> {
        let verify = verify.as_deref().map(Verify::named).transpose().map_err(invalid)?;
        let kept_pages = kept_pages.unwrap_or_else(|| vec![ALL_PAGES; page_tokens.len()]);
        let groups = groups(&page_tokens, &heads, &kept_pages)?;
        let cache = shape(layers.clone(), groups, chunk_tokens)?;
        if device.is_none() {
            py.detach(|| layers.iter().try_for_each(check_layer)).map_err(of_absent)?;
        }
        let direct = direct.map(|name| DirectOptions { name, token: token.clone() });
        let mut client = ClientOptions { token, tenant: tenant.0, ..ClientOptions::new(socket) };
        if let Some(name) = name {
            client.name = name;
        }
        let options = PagedOptions {
            threads: copy_threads,
            sibling_devices,
            direct,
            verify,
            ..PagedOptions::new(client)
        };
        // SAFETY: whoever makes a `PagedCache` promises that the addresses are its pages until
        // `close` has returned; a program that gives other numbers is as wrong as one that gives
        // them to ctypes.
        let opened = py.detach(|| unsafe {
            match device {
                Some(device) => Cache::on_device(cache, device, options),
                None => Cache::on_host(cache, options),
            }
        });
        opened.map(|cache| PagedCache(Own::new(cache))).map_err(not_opened)
    }

    /// Whether the node is there, as far as is known. It is looked for in the background while it
    /// is not.
    #[getter]
    fn is_connected(&self) -> PyResult<bool> {
        Ok(self.0.get()?.is_connected())
    }

    /// Begins to load chunks into pages. `limit_us` is of all of a layerwise load; any other ends
    /// when nothing of it has come for so long, or nothing of those before it while it waits for
    /// its turn. `trace` is a `traceparent`: the node's spans hang below it. The chunks are those
    /// of `tenant`, or of this cache's own.
    #[pyo3(signature = (
        job, sources, pages, *, tokens, source_page_tokens = None, layerwise, stream = 0, limit_us = 30_000_000,
        trace = None, tenant = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn load(
        &self,
        py: Python<'_>,
        job: u64,
        sources: Vec<(Bound<'_, PyAny>, u32, u32, u32)>,
        pages: Vec<Bound<'_, PyAny>>,
        tokens: u64,
        source_page_tokens: Option<u32>,
        layerwise: bool,
        stream: u64,
        limit_us: u64,
        trace: Option<&str>,
        tenant: Option<Tenant>,
    ) -> PyResult<()> {
        let cache = self.0.get()?;
        let source = |(chunks, first_there, first_here, heads): &(Bound<'_, PyAny>, u32, u32, u32)| {
            let heads = HeadRange { first_there: *first_there, first_here: *first_here, heads: *heads };
            Ok((ids(chunks)?, Source { heads, page_tokens: source_page_tokens }))
        };
        let sources = sources.iter().map(source).collect::<PyResult<_>>()?;
        let tables = PageTables::new(cache.cache(), tables(&pages)?, tokens, true).map_err(invalid)?;
        let (within, tenant) = (within(trace), tenant.map(|tenant| tenant.0));
        let request = LoadRequest { job, sources, tables, tokens, layerwise, limit_us, within, tenant };
        py.detach(|| cache.load(request, stream)).map_err(not_begun)
    }

    /// Waits until a layer of all layerwise loads is in its pages.
    #[pyo3(signature = (layer, stream = 0))]
    fn wait_layer(&self, py: Python<'_>, layer: u32, stream: u64) -> PyResult<()> {
        let cache = self.0.get()?;
        py.detach(|| cache.wait_layer(layer, stream)).map_err(not_begun)
    }

    /// Waits for all layers of all layerwise loads.
    #[pyo3(signature = (stream = 0))]
    fn wait_loads(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let cache = self.0.get()?;
        py.detach(|| cache.wait_loads(stream)).map_err(not_begun)
    }

    /// Begins to store chunks, one after another in their sequence: of each equal part of the heads
    /// the same ones. One part is whole pages. They will be those of `tenant`, or of this cache's
    /// own.
    #[pyo3(signature = (job, parts, pages, *, stream = 0, tenant = None))]
    fn store(
        &self,
        py: Python<'_>,
        job: u64,
        parts: Vec<Vec<Named<'_>>>,
        pages: Vec<Bound<'_, PyAny>>,
        stream: u64,
        tenant: Option<Tenant>,
    ) -> PyResult<()> {
        let cache = self.0.get()?;
        let chunk = |(name, parent, tokens): &Named<'_>| {
            let parent = parent.as_ref().map(id).transpose()?;
            Ok(NewChunk { id: id(name)?, parent, tokens: *tokens })
        };
        let part = |chunks: &Vec<Named<'_>>| chunks.iter().map(chunk).collect::<PyResult<Vec<_>>>();
        let parts = parts.iter().map(part).collect::<PyResult<Vec<_>>>()?;
        let tokens = cache.tokens_of(&parts).map_err(not_begun)?;
        let tables = PageTables::new(cache.cache(), tables(&pages)?, tokens, false).map_err(invalid)?;
        let tenant = tenant.map(|tenant| tenant.0);
        py.detach(|| cache.store_for(tenant, job, parts, tables, stream)).map_err(not_begun)
    }

    /// What other engines need to hand over directly from this one; None: it does not.
    #[getter]
    fn metadata(&self) -> PyResult<Option<Vec<u8>>> {
        Ok(self.0.get()?.metadata())
    }

    /// Offers pages of a sequence of `tokens` tokens to whoever has the key and the same digest of
    /// the sequence, for `ttl_s` if nobody opens the offer.
    #[pyo3(signature = (key, digest, pages, *, tokens, ttl_s))]
    fn offer(
        &self,
        py: Python<'_>,
        key: Key,
        digest: Digest,
        pages: Vec<Bound<'_, PyAny>>,
        tokens: u64,
        ttl_s: f64,
    ) -> PyResult<()> {
        let cache = self.0.get()?;
        let tables = PageTables::new(cache.cache(), tables(&pages)?, tokens, true).map_err(invalid)?;
        let ttl = seconds("ttl_s", ttl_s)?;
        py.detach(|| cache.offer(key, digest, &tables, tokens, ttl)).map_err(not_begun)
    }

    /// Offers that have ended since this was asked last, and how.
    fn take_offers_ended(&self) -> PyResult<Vec<(Key, &'static str)>> {
        let ended = self.0.get()?.take_offers_ended().into_iter();
        Ok(ended.map(|one| (one.key, how(one.how))).collect())
    }

    /// Ends all offers. When this returns nobody reads their pages any more.
    fn withdraw_offers(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.0.get()?;
        py.detach(|| cache.withdraw_offers());
        Ok(())
    }

    /// Begins to load pages straight from another engine, from the sequence's token `first_token`
    /// on. The offers may take `wait_s` to come.
    #[pyo3(signature = (job, sources, digest, pages, *, first_token, tokens, wait_s = 0.0, stream = 0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn read(
        &self,
        py: Python<'_>,
        job: u64,
        sources: Vec<Offered>,
        digest: Digest,
        pages: Vec<Bound<'_, PyAny>>,
        first_token: u64,
        tokens: u64,
        wait_s: f64,
        stream: u64,
    ) -> PyResult<()> {
        let cache = self.0.get()?;
        let wait = seconds("wait_s", wait_s)?;
        let tables = PageTables::new(cache.cache(), tables(&pages)?, tokens, true).map_err(invalid)?;
        let range = |(first_there, first_here, heads)| HeadRange { first_there, first_here, heads };
        let source = |(metadata, key, heads, readers): Offered| ReadSource {
            metadata,
            key,
            heads: heads.map(range),
            readers,
        };
        let sources = sources.into_iter().map(source).collect();
        let request = ReadRequest { job, sources, digest, tables, first_token, tokens, wait };
        py.detach(|| cache.read(request, stream)).map_err(not_begun)
    }

    /// Tells another engine that nobody will read what it offers under a key.
    fn decline(&self, py: Python<'_>, metadata: Vec<u8>, key: Key) -> PyResult<()> {
        let cache = self.0.get()?;
        py.detach(|| cache.decline(&metadata, key)).map_err(not_begun)
    }

    /// Loads and stores that have ended since this was asked last.
    fn take_ended(&self) -> PyResult<(LoadEnds, StoreEnds)> {
        let (loads, stores) = self.0.get()?.take_ended();
        let loads = loads.into_iter().map(|end| (end.job, end.tokens, end.why)).collect();
        Ok((loads, stores.into_iter().map(|end| (end.job, end.missing)).collect()))
    }

    /// Of loads that ended since this was asked last: from which tier how many bytes came in how
    /// many seconds.
    fn take_measured(&self) -> PyResult<Vec<(&'static str, u64, f64)>> {
        let measured = self.0.get()?.take_measured().into_iter();
        Ok(measured.map(|one| (one.tier.name(), one.bytes, one.time.as_secs_f64())).collect())
    }

    /// Of layerwise loads that ended since this was asked last: how many seconds a step waited for
    /// each, and for how many layers.
    fn take_bubbles(&self) -> PyResult<Vec<(u64, f64, u64)>> {
        let stalls = self.0.get()?.take_stalls().into_iter();
        Ok(stalls.map(|one| (one.job, one.time.as_secs_f64(), one.layers_late)).collect())
    }

    /// Waits until none of these loads is under way.
    #[pyo3(signature = (jobs, limit_s = None))]
    fn wait_loaded(&self, py: Python<'_>, jobs: Vec<u64>, limit_s: Option<f64>) -> PyResult<bool> {
        let (limit, cache) = (limit(limit_s)?, self.0.get()?);
        Ok(py.detach(|| cache.wait_loaded(&jobs, limit)))
    }

    /// Waits until none of these stores is under way.
    #[pyo3(signature = (jobs, limit_s = None))]
    fn wait_stored(&self, py: Python<'_>, jobs: Vec<u64>, limit_s: Option<f64>) -> PyResult<bool> {
        let (limit, cache) = (limit(limit_s)?, self.0.get()?);
        Ok(py.detach(|| cache.wait_stored(&jobs, limit)))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, value) in self.0.get()?.stats().named() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// Ends everything. Nothing touches the cache any more when this returns.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.0.get()?;
        py.detach(|| cache.close());
        Ok(())
    }
}

impl Drop for PagedCache {
    fn drop(&mut self) {
        // Another process only forgets it.
        let _ = Python::attach(|py| self.close(py));
    }
}

/// Checks that the pages of a layer in host memory are there.
fn check_layer(
    (address, pages, stride_bytes, page_bytes, _): &(u64, u64, u64, u64, usize),
) -> Result<(), Absent> {
    let behind = pages.checked_sub(1).and_then(|before| before.checked_mul(*stride_bytes));
    match behind.and_then(|behind| behind.checked_add(*page_bytes)) {
        Some(len) => mapped::check(*address, len, true),
        // No pages, or too many: the shape says so.
        None => Ok(()),
    }
}

fn groups(page_tokens: &[u32], heads: &[u32], kept_pages: &[u32]) -> PyResult<Vec<Group>> {
    let groups = page_tokens.len();
    for (name, given) in [("heads", heads.len()), ("kept_pages", kept_pages.len())] {
        if given != groups {
            return Err(invalid(format!("page_tokens has {groups} groups, {name} {given}: as many are")));
        }
    }
    let group = |((page_tokens, heads), kept_pages): ((&u32, &u32), &u32)| Group {
        page_tokens: *page_tokens,
        heads: *heads,
        kept_pages: *kept_pages,
    };
    Ok(page_tokens.iter().zip(heads).zip(kept_pages).map(group).collect())
}

fn shape(
    layers: Vec<(u64, u64, u64, u64, usize)>,
    groups: Vec<Group>,
    chunk_tokens: u32,
) -> PyResult<CacheShape> {
    let layer = |(address, pages, stride_bytes, page_bytes, group)| Layer {
        address,
        pages,
        stride_bytes,
        page_bytes,
        group,
    };
    CacheShape::new(layers.into_iter().map(layer).collect(), groups, chunk_tokens).map_err(invalid)
}

/// One table for each group: arrays of 32- or 64-bit integers.
fn tables(pages: &[Bound<'_, PyAny>]) -> PyResult<Vec<Vec<i64>>> {
    pages.iter().map(table).collect()
}

fn table(pages: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let py = pages.py();
    if let Ok(array) = PyBuffer::<i32>::get(pages) {
        return Ok(array.to_vec(py)?.into_iter().map(i64::from).collect());
    }
    match PyBuffer::<i64>::get(pages) {
        Ok(array) => array.to_vec(py),
        Err(_) => Err(invalid("the pages of a group are an array of int32 or int64")),
    }
}

/// A time that is not negative and not endless.
fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|error| invalid(format!("{name}: {value}: {error}")))
}

/// How an offer ended, as Python says it.
fn how(end: OfferEnd) -> &'static str {
    match end {
        OfferEnd::Closed => "closed",
        OfferEnd::Expired => "expired",
        OfferEnd::ReaderGone => "reader_gone",
    }
}

fn limit(limit_s: Option<f64>) -> PyResult<Option<Duration>> {
    let limit = limit_s.map(Duration::try_from_secs_f64).transpose();
    limit.map_err(|error| invalid(format!("limit_s: {error}")))
}

fn not_opened(error: NotOpened) -> PyErr {
    match error {
        NotOpened::Client(_) => PeerLostError::new_err(error.to_string()),
        NotOpened::Threads { .. } | NotOpened::Verify(_) => invalid(error),
        NotOpened::Copies(_) | NotOpened::System(_) => failed(error),
    }
}

fn not_begun(error: NotBegun) -> PyErr {
    match error {
        NotBegun::Pages(_) | NotBegun::Value { .. } => invalid(error),
        NotBegun::Copies(_) => not_moved(error),
        NotBegun::NoDirect => invalid(error),
        NotBegun::Closed => PeerLostError::new_err(error.to_string()),
        NotBegun::Forked(forked) => of_forked(forked),
    }
}

/// What a rank of one tensor parallel size reads from the ranks of another: source rank, first head
/// there, first head here, heads.
#[pyfunction]
pub fn head_reads(heads: u32, size: u32, rank: u32, source_size: u32) -> PyResult<Vec<(u32, u32, u32, u32)>> {
    let split = |size| forebay_kv::HeadSplit::new(heads, size).map_err(invalid);
    let reads = split(size)?.reads(rank, &split(source_size)?).map_err(invalid)?;
    Ok(reads.iter().map(|read| (read.from_rank, read.from_head, read.to_head, read.heads)).collect())
}
