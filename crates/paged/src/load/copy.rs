//! The copy of one layer of chunks from the arena into pages, and the check of what arrived.

use super::{LoadRequest, NextBatch, Part, TierBytes};
use crate::access::Accessing;
use crate::copies::{Batch, Job, NotCopied, Piece};
use crate::cost_model::Tier;
use crate::pages::{ChunkAt, pieces};
use crate::shared::Shared;
use crate::stats::add;
use crate::thread_pool::Urgency;
use forebay_client::{LeasedChunk, NodeArena};
use forebay_store::{NotVerified, Unreadable};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{RegionId, Span};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A chunk in the arena, and where it was when the load began.
#[derive(Clone)]
pub struct InArena {
    pub lent: Arc<LeasedChunk>,
    pub tier: Tier,
}

/// Chunks that cannot be used, and why.
pub type Bad = Vec<(usize, String)>;

/// Called once, on any thread, when nothing of a copy touches pages or arena any more: with the
/// chunks that cannot be used, and what was copied.
pub type OnCopied = Box<dyn FnOnce(Bad, TierBytes) + Send>;

/// One layer of chunks, ready to be copied.
pub struct LayerCopy {
    job: u64,
    layer: u32,
    first_chunk: usize,
    pieces: Vec<Piece>,
    /// Spans whose bytes, one after another, are a chunk's layer.
    checks: Vec<(usize, Arc<LeasedChunk>, Vec<Span>)>,
    bytes: TierBytes,
}

/// A copy on its way.
struct Running {
    shared: Arc<Shared>,
    copy: LayerCopy,
    /// What is to be done still: the copy, the comparison.
    left: AtomicUsize,
    bad: Mutex<Bad>,
    on_copied: Mutex<Option<OnCopied>>,
    _access: Accessing,
}

impl LayerCopy {
    /// Gathers the pieces of a batch's layer, up to the first chunk that cannot be used, which is
    /// named as well.
    pub fn gather(
        shared: &Shared,
        request: &LoadRequest,
        arena: &Arc<NodeArena>,
        next: &NextBatch,
        there: &[InArena],
    ) -> (LayerCopy, Option<(usize, String)>) {
        let mut copy = LayerCopy {
            job: request.job,
            layer: next.layer,
            first_chunk: next.parts.first().map_or(0, |part| part.chunk),
            pieces: Vec::new(),
            checks: Vec::new(),
            bytes: TierBytes::default(),
        };
        // A chunk of several sources is copied page by page: each page is written from its start to
        // its end.
        let by_page = |pieces: &mut [Piece]| pieces.sort_unstable_by_key(|piece| piece.page_offset);
        let (mut chunk, mut of_chunk) = (copy.first_chunk, 0);
        for (part, InArena { lent, tier }) in next.parts.iter().zip(there) {
            let from = copy.pieces.len();
            if part.chunk != chunk && request.sources.len() > 1 {
                by_page(&mut copy.pieces[of_chunk..]);
                (chunk, of_chunk) = (part.chunk, from);
            }
            let spans = match Arc::ptr_eq(arena, lent.arena()) {
                true => spans(shared, request, *part, lent, next.layer, &mut copy.pieces),
                false => Err("the node was started again".into()),
            };
            copy.bytes.add(*tier, copy.pieces[from..].iter().map(|piece| piece.bytes).sum());
            match spans {
                Ok(spans) if spans.is_empty() => {}
                Ok(spans) => copy.checks.push((part.chunk, Arc::clone(lent), spans)),
                Err(why) => return (copy, Some((part.chunk, why))),
            }
        }
        if request.sources.len() > 1 {
            by_page(&mut copy.pieces[of_chunk..]);
        }
        (copy, None)
    }

    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Copies, and checks what arrived. What the host cannot read was compared or summed when it
    /// came into the arena, and stays so as long as the lease lives; a GPU's links are several
    /// times as fast as the processors that it would take to do that once more.
    pub fn start(
        mut self,
        shared: &Arc<Shared>,
        copying: &dyn Job,
        arena: Arc<NodeArena>,
        access: Accessing,
        on_copied: OnCopied,
    ) {
        let (layer, pieces) = (self.layer, std::mem::take(&mut self.pieces));
        let is_read_here = shared.copies.region(layer).is_some();
        let running = Arc::new(Running {
            shared: Arc::clone(shared),
            copy: self,
            left: AtomicUsize::new(1 + usize::from(is_read_here)),
            bad: Mutex::default(),
            on_copied: Mutex::new(Some(on_copied)),
            _access: access,
        });
        let on_end = move |outcome: Result<(), NotCopied>| {
            if let Err(error) = outcome {
                running.note(running.copy.first_chunk, error.to_string());
            }
            match is_read_here {
                true => running.verify_soon(),
                false => running.check_leases(),
            }
            running.done();
        };
        copying.copy(layer, Batch { arena, pieces }, Box::new(on_end));
    }
}

impl Running {
    fn note(&self, chunk: usize, why: String) {
        self.bad.lock().push((chunk, why));
    }

    fn verify_soon(self: &Arc<Self>) {
        let running = Arc::clone(self);
        self.shared.tasks.post(Urgency::Load, move || {
            running.verify();
            running.done();
        });
    }

    /// The node may have written anything where chunks lay that it does not keep for us any more.
    fn check_leases(&self) {
        if let Some((chunk, ..)) = self.copy.checks.iter().find(|(_, lent, _)| !lent.is_alive()) {
            self.note(*chunk, Unreadable::DeadLease.to_string());
        }
    }

    fn verify(&self) {
        let checks = &self.copy.checks;
        let arrived: Vec<_> = checks.iter().map(|(_, lent, spans)| (&**lent, spans.as_slice())).collect();
        let verified = LeasedChunk::verify_each(self.copy.layer as usize, &arrived);
        for ((chunk, ..), verified) in checks.iter().zip(verified) {
            if let Err(error) = verified {
                if matches!(error, NotVerified::Corrupt { .. }) {
                    add(&self.shared.counters.chunks_corrupt, 1);
                    self.shared.log.corrupt(self.copy.job, *chunk, self.copy.layer);
                }
                return self.note(*chunk, error.to_string());
            }
        }
    }

    fn done(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let on_copied = self.on_copied.lock().take();
        if let Some(on_copied) = on_copied {
            on_copied(std::mem::take(&mut *self.bad.lock()), self.copy.bytes.clone());
        }
    }
}

/// Adds the pieces of a part's layer. Gives the spans to compare with its checksum; none if nothing
/// is wanted.
fn spans(
    shared: &Shared,
    request: &LoadRequest,
    part: Part,
    lent: &LeasedChunk,
    layer: u32,
    batch: &mut Vec<Piece>,
) -> Result<Vec<Span>, String> {
    let (cache, source) = (&shared.cache, &request.sources[part.source].1);
    if lent.shape().layers() != cache.layers().len() {
        let (theirs, ours) = (lent.shape().layers(), cache.layers().len());
        return Err(format!("the chunk has {theirs} layers, the cache {ours}"));
    }
    let chunk_tokens = u64::from(cache.chunk_tokens());
    let first_token = part.chunk as u64 * chunk_tokens;
    let tokens = (request.tokens - first_token).min(chunk_tokens) as u32;
    let at = ChunkAt { first_token, tokens };
    let whole = lent.layer(layer as usize).ok_or("the chunk lacks a layer")?;
    let (from, extent) = (batch.len(), (whole.offset, whole.len));
    pieces(cache, &request.tables, layer, at, source, extent, batch).map_err(|misfit| misfit.to_string())?;
    let of_part = &batch[from..];
    let is_same = cache
        .layers()
        .get(layer as usize)
        .is_some_and(|layer| source.is_same(cache, layer, tokens, whole.len));
    Ok(match shared.copies.region(layer).filter(|_| is_same) {
        _ if of_part.is_empty() => Vec::new(),
        Some(pages) => arrived(whole, of_part, pages),
        None => vec![whole],
    })
}

/// A layer of a chunk where it arrived: its pages, and what was not wanted in the arena.
fn arrived(whole: Span, pieces: &[Piece], pages: RegionId) -> Vec<Span> {
    let (mut spans, mut at) = (Vec::with_capacity(2 * pieces.len() + 1), whole.offset);
    for piece in pieces {
        if piece.arena_offset > at {
            spans.push(Span::new(whole.region, at, piece.arena_offset - at));
        }
        spans.push(Span::new(pages, piece.page_offset, piece.bytes));
        at = piece.arena_offset + piece.bytes;
    }
    let end = whole.offset + whole.len;
    if end > at {
        spans.push(Span::new(whole.region, at, end - at));
    }
    spans
}
