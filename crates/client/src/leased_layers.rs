//! Chunks of a lease that come layer by layer through the client's ring: the first layers of all of
//! them before the last ones of any.

use super::Client;
use super::lease::{Held, Lease};
use super::leased_chunk::LeasedChunk;
use super::ring::LayersRead;
use forebay_store::ChunkShape;
use forebay_transfer::Class;
use std::sync::Arc;
use std::time::Duration;

/// A layer of some chunks.
#[derive(Debug)]
pub struct LayerCame {
    pub layer: usize,
    /// Each with the chunk, of which this layer and those that came before may be read, or why it
    /// has not come.
    pub chunks: Vec<(usize, Result<LeasedChunk, String>)>,
}

impl Client {
    /// Has the layers of chunks of the lease lie in the arena, one after the other, where all of
    /// them have this shape. `deadline_us` is in the mover's clock. `false`: the node gives no
    /// ring, and nobody is told anything.
    ///
    /// `on_layer` is called once for each layer of each chunk, for many chunks at a time, on one of
    /// the client's threads. Keep it short. The lease lives at least until then.
    pub fn bring_layers(
        &self,
        lease: &Arc<Lease>,
        chunks: &[usize],
        shape: &Arc<ChunkShape>,
        (class, deadline_us): (Class, Option<u64>),
        on_layer: impl Fn(LayerCame) + Send + Sync + 'static,
    ) -> bool {
        let (Ok(held), Ok(ring)) = (lease.alive(), self.ring()) else { return false };
        let now_us = self.shared.now_us();
        let within = deadline_us.map(|deadline_us| Duration::from_micros(deadline_us.saturating_sub(now_us)));
        let on_layer = Arc::new(on_layer);
        let groups: Vec<&[usize]> = chunks.chunks(ring.chunks_max().into()).collect();
        for layer in 0..shape.layers() {
            for group in &groups {
                let (held, shape, told) = (Arc::clone(held), Arc::clone(shape), Arc::clone(&on_layer));
                let these = group.to_vec();
                let on_read = move |read: LayersRead| told(came(&held, &shape, layer, &these, read));
                if let Err(why) = ring.read(lease, layer, group, (class, within), on_read) {
                    let chunks = group.iter().map(|chunk| (*chunk, Err(why.to_string()))).collect();
                    on_layer(LayerCame { layer, chunks });
                }
            }
        }
        true
    }
}

/// What a request says of its chunks.
fn came(
    held: &Arc<Held>,
    shape: &Arc<ChunkShape>,
    layer: usize,
    chunks: &[usize],
    read: LayersRead,
) -> LayerCame {
    let layer_bytes = shape.layer(layer).map_or(0, |extent| extent.end - extent.start);
    let there = read.places.iter().filter(|place| place.is_ok()).count() as u64;
    let chunk = |(chunk, place): (&usize, Result<_, _>)| {
        let end = match place {
            Ok(_) if read.bytes != there * layer_bytes => Err(format!("layer {layer} has another length")),
            Ok(place) => held
                .note_layer(*chunk, layer, place, shape)
                .map(|place| LeasedChunk::coming(held, *chunk, place))
                .ok_or_else(|| "the chunk lies outside of the arena".to_owned()),
            Err(status) => Err(format!("layer {layer} is not there: {status}")),
        };
        (*chunk, end)
    };
    LayerCame { layer, chunks: chunks.iter().zip(read.places.iter().copied()).map(chunk).collect() }
}
