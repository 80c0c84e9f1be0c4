//! A node and a client of it, in one process: values are put into the node's memory, go to its log,
//! and are asked for through the client's ring. This file is the user of both, and knows what an
//! engine's connector knows; faults of the ring are in `between`, those of memory behind its back.

mod between;
mod site;

use super::memory;
use crate::faults::Faults;
use crate::protocol::{Fault, Is, Setup};
use crate::serve::Subject;
use forebay_client::{LayerCame, LeasedChunk};
use forebay_store::{ChunkShape, StoreEnd, TenantId, checksum};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, HostBuffer, Span};
use site::{HOST, Site};
use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Layers of every second value; the others have one.
const LAYERS: usize = 4;
const TTL_US: u64 = 60_000_000;
/// After so long an engine has computed anew what it waits for.
const READ_US: u64 = 2_000_000;
/// Chunks that a request names, so that others of the same lease are named by others.
const TOGETHER: usize = 3;
/// A request that has not ended by then never does.
const PATIENCE: Duration = Duration::from_secs(30);

/// Each layer of some chunks, or why it has not come, as often as that was told.
type Ends = BTreeMap<(usize, usize), Vec<Result<LeasedChunk, String>>>;

pub struct Node {
    faults: Arc<Faults>,
    /// Whether what is copied is compared with its checksum.
    checks: bool,
    site: Mutex<Option<Arc<Site>>>,
}

impl Node {
    pub fn new() -> Node {
        Node { faults: Arc::default(), checks: true, site: Mutex::default() }
    }

    /// Its user takes what the ring says for granted. So the suite can show what the check is for.
    pub fn unverified() -> Node {
        Node { checks: false, ..Node::new() }
    }

    fn site(&self) -> Result<Arc<Site>, Is> {
        self.site.lock().clone().ok_or_else(|| failed("not open"))
    }

    /// The layers of a chunk, copied from the arena, and each copy compared with what it must be.
    fn use_layers(&self, site: &Site, layers: &[LeasedChunk]) -> Option<Vec<u8>> {
        let memory = site.mover.memory();
        let place = |(layer, chunk): (usize, &LeasedChunk)| chunk.layer(layer);
        let spans: Vec<Span> = layers.iter().enumerate().map(place).collect::<Option<_>>()?;
        if let Some((at, bits)) = self.faults.flip(spans.iter().map(|span| span.len as usize).sum()) {
            memory::flip(memory, &spans, at, bits);
        }
        let mut value = Vec::new();
        for ((layer, chunk), span) in layers.iter().enumerate().zip(&spans) {
            let bytes = memory::copy(memory, span)?;
            if self.checks {
                chunk.verify_sum(layer, Some(checksum::of_pieces(&[&bytes]))).ok()?;
            }
            value.extend(bytes);
        }
        Some(value)
    }
}

impl Default for Node {
    fn default() -> Node {
        Node::new()
    }
}

fn layers_of(key: u64) -> usize {
    if key.is_multiple_of(2) { LAYERS } else { 1 }
}

/// Asks for chunks of a lease, all of as many layers, through the ring, or without one if there is
/// none. An error is a request that did not end once.
fn bring(
    site: &Site,
    lease: &Arc<forebay_client::Lease>,
    chunks: &[usize],
    layers: usize,
) -> Result<BTreeMap<usize, Vec<LeasedChunk>>, Is> {
    let layer_bytes = site.value_bytes / layers as u64;
    let shape = Arc::new(ChunkShape::new(std::iter::repeat_n(layer_bytes, layers)).map_err(failed)?);
    let urgency = (Class::Demand, Some(site.mover.now_us() + READ_US));
    let (sender, came) = mpsc::channel();
    let told = sender.clone();
    let on_layer = move |layer: LayerCame| drop(told.send((layer.layer, layer.chunks)));
    if !site.client.bring_layers(lease, chunks, &shape, urgency, on_layer) {
        let told = sender.clone();
        let on_end = move |chunk, end: Result<LeasedChunk, String>| {
            (0..layers).for_each(|layer| drop(told.send((layer, vec![(chunk, end.clone())]))));
        };
        site.client.bring(lease, chunks, urgency.0, urgency.1, on_end);
    }
    drop(sender);
    let mut ends = Ends::new();
    loop {
        match came.recv_timeout(PATIENCE) {
            Ok((layer, of_chunks)) => of_chunks
                .into_iter()
                .for_each(|(chunk, end)| ends.entry((chunk, layer)).or_default().push(end)),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(failed("a request does not end")),
        }
    }
    let mut there = BTreeMap::new();
    for chunk in chunks {
        let layers = (0..layers).map(|layer| ended_once(&mut ends, *chunk, layer));
        // One layer that is not there makes a miss of the chunk; that all ended is seen first.
        if let Some(layers) = layers.collect::<Result<Vec<_>, Is>>()?.into_iter().collect() {
            there.insert(*chunk, layers);
        }
    }
    Ok(there)
}

fn ended_once(ends: &mut Ends, chunk: usize, layer: usize) -> Result<Option<LeasedChunk>, Is> {
    let mut ended = ends.remove(&(chunk, layer)).unwrap_or_default();
    match ended.len() {
        1 => Ok(ended.pop().and_then(Result::ok)),
        times => Err(failed(format!("layer {layer} of chunk {chunk} of the lease ended {times} times"))),
    }
}

fn refused(reason: impl ToString) -> Is {
    Is::Refused { reason: reason.to_string() }
}

fn failed(reason: impl ToString) -> Is {
    Is::Error { reason: reason.to_string() }
}

impl Subject for Node {
    fn open(&self, setup: &Setup) -> Result<(), Is> {
        let site = Site::open(setup, &self.faults).map_err(refused)?;
        *self.site.lock() = Some(Arc::new(site));
        Ok(())
    }

    fn put(&self, key: u64, value: Vec<u8>) -> Result<(), Is> {
        let site = self.site()?;
        let buffer = HostBuffer::new(value.len());
        buffer.write(0, &value);
        let region = site.mover.register(HOST, Arc::new(buffer)).map_err(failed)?;
        let layers = layers_of(key) as u64;
        let bytes = value.len() as u64 / layers;
        let spans: Vec<_> = (0..layers).map(|layer| vec![Span::new(region, layer * bytes, bytes)]).collect();
        let (sender, stored) = mpsc::channel();
        let on_end = move |end| drop(sender.send(end));
        site.client.store_chunk(site.id(key), None, &spans, Class::WriteBack, on_end).map_err(refused)?;
        let stored = match stored.recv().map_err(failed)? {
            StoreEnd::Stored { .. } | StoreEnd::AlreadyHere => Ok(()),
            other => Err(refused(format!("{other:?}"))),
        };
        // Memory that a failed transfer might still touch is kept.
        let _ = site.mover.unregister(region).map_err(failed)?;
        stored
    }

    fn get_many(&self, keys: &[u64]) -> Result<Vec<Option<Vec<u8>>>, Is> {
        let site = self.site()?;
        let ids: Vec<_> = keys.iter().map(|key| site.id(*key)).collect();
        let lease = Arc::new(site.client.lease(&ids, TTL_US));
        let mut values = vec![None; keys.len()];
        for layers in [LAYERS, 1] {
            let chunks: Vec<usize> =
                (0..lease.len()).filter(|chunk| layers_of(keys[*chunk]) == layers).collect();
            if chunks.is_empty() {
                continue;
            }
            for some in chunks.chunks(TOGETHER) {
                for (chunk, layers) in bring(&site, &lease, some, layers)? {
                    values[chunk] = self.use_layers(&site, &layers);
                }
            }
        }
        site.hold(lease);
        Ok(values)
    }

    fn delete(&self, key: u64) -> Result<(), Is> {
        let site = self.site()?;
        site.node.store().delete(TenantId::default(), &[site.id(key)]);
        Ok(())
    }

    fn flush(&self) -> Result<(), Is> {
        self.site()?.node.store().flush().map_err(refused)
    }

    fn faults(&self) -> &Faults {
        &self.faults
    }

    fn cannot_play(&self, fault: &Fault) -> Option<&'static str> {
        let is_below = matches!(fault, Fault::Io { .. } | Fault::PowerLoss { .. });
        is_below.then_some("its disk I/O is the node's own; `forebay` plays it")
    }

    fn noticed(&self) -> Option<u64> {
        let site = self.site().ok()?;
        // Behind all that the client has said before.
        let corrupt = site.client.stat()?.corrupt;
        let rings = site.node.rings();
        let disk = site.node.store().disk_stat()?;
        Some(corrupt + rings.refused + rings.closed + disk.ssd.corrupt + disk.ssd.io_faults)
    }

    fn close(&self) -> Result<(), Is> {
        let site = self.site.lock().take();
        match site.map(Arc::try_unwrap) {
            None => Ok(()),
            Some(Ok(site)) => site.close().map_err(refused),
            Some(Err(_)) => Err(failed("commands are under way")),
        }
    }
}
