//! The copy of one layer of chunks from the arena into pages, and the check of what arrived.

use super::{LoadRequest, NextBatch, Part, TierBytes};
use crate::access::Accessing;
use crate::copies::{Batch, Extent, ExtentPart, Job, NotCopied, Piece};
use crate::cost_model::Tier;
use crate::pages::{ChunkAt, pieces};
use crate::shared::Shared;
use crate::stats::add;
use crate::thread_pool::Urgency;
use forebay_client::{LeasedChunk, NodeArena};
use forebay_store::NotVerified;
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
    checks: Vec<Check>,
    /// Of each check what the GPU sums up, if it does.
    extents: Vec<Extent>,
    bytes: TierBytes,
}

/// A chunk whose layer is compared with its checksum.
struct Check {
    chunk: usize,
    lent: Arc<LeasedChunk>,
    /// Spans whose bytes, one after another, are the layer, if the host compares it.
    spans: Vec<Span>,
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
            extents: Vec::new(),
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
            let added = match Arc::ptr_eq(arena, lent.arena()) {
                true => copy.add(shared, request, *part, lent),
                false => Err("the node was started again".into()),
            };
            copy.bytes.add(*tier, copy.pieces[from..].iter().map(|piece| piece.bytes).sum());
            if let Err(why) = added {
                return (copy, Some((part.chunk, why)));
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

    /// Adds the pieces of a part's layer, and how it is checked. Nothing is if nothing is wanted.
    fn add(
        &mut self,
        shared: &Shared,
        request: &LoadRequest,
        part: Part,
        lent: &Arc<LeasedChunk>,
    ) -> Result<(), String> {
        let (cache, source, layer) = (&shared.cache, &request.sources[part.source].1, self.layer);
        if lent.shape().layers() != cache.layers().len() {
            let (theirs, ours) = (lent.shape().layers(), cache.layers().len());
            return Err(format!("the chunk has {theirs} layers, the cache {ours}"));
        }
        let chunk_tokens = u64::from(cache.chunk_tokens());
        let first_token = part.chunk as u64 * chunk_tokens;
        let tokens = (request.tokens - first_token).min(chunk_tokens) as u32;
        let at = ChunkAt { first_token, tokens };
        let whole = lent.layer(layer as usize).ok_or("the chunk lacks a layer")?;
        let (from, extent) = (self.pieces.len(), (whole.offset, whole.len));
        pieces(cache, &request.tables, layer, at, source, extent, &mut self.pieces)
            .map_err(|misfit| misfit.to_string())?;
        let of_part = &self.pieces[from..];
        if of_part.is_empty() {
            return Ok(());
        }
        let arrived = arrived(whole, of_part);
        let here = cache.layers().get(layer as usize);
        let is_same = here.is_some_and(|here| source.is_same(cache, here, tokens, whole.len));
        let spans = match shared.copies.region(layer).filter(|_| is_same) {
            _ if !shared.verify.on_host() => Vec::new(),
            Some(pages) => arrived.iter().map(|part| span(*part, whole.region, pages)).collect(),
            None => vec![whole],
        };
        if shared.verify.on_gpu() {
            self.extents.push(arrived);
        }
        self.checks.push(Check { chunk: part.chunk, lent: Arc::clone(lent), spans });
        Ok(())
    }

    /// Copies, and checks what arrived.
    pub fn start(
        mut self,
        shared: &Arc<Shared>,
        copying: &dyn Job,
        arena: Arc<NodeArena>,
        access: Accessing,
        on_copied: OnCopied,
    ) {
        let (layer, pieces) = (self.layer, std::mem::take(&mut self.pieces));
        let (extents, verify) = (std::mem::take(&mut self.extents), shared.verify);
        let running = Arc::new(Running {
            shared: Arc::clone(shared),
            copy: self,
            left: AtomicUsize::new(1 + usize::from(verify.on_host())),
            bad: Mutex::default(),
            on_copied: Mutex::new(Some(on_copied)),
            _access: access,
        });
        let on_end = move |outcome: Result<Vec<u32>, NotCopied>| {
            match outcome {
                Ok(sums) if verify.on_gpu() => running.compare(&sums),
                Ok(_) => {}
                Err(error) => running.note(running.copy.first_chunk, error.to_string()),
            }
            if verify.on_host() {
                running.verify_soon();
            }
            running.done();
        };
        copying.copy(layer, Batch { arena, pieces, extents }, Box::new(on_end));
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

    /// Compares what the host reads.
    fn verify(&self) {
        let checks = self.copy.checks.iter();
        let arrived: Vec<_> = checks.map(|check| (&*check.lent, check.spans.as_slice())).collect();
        self.note_first_bad(LeasedChunk::verify_each(self.copy.layer as usize, &arrived));
    }

    /// Compares what the GPU has summed up, of each check.
    fn compare(&self, sums: &[u32]) {
        let layer = self.copy.layer as usize;
        let compared =
            |(number, check): (usize, &Check)| check.lent.verify_sum(layer, sums.get(number).copied());
        self.note_first_bad(self.copy.checks.iter().enumerate().map(compared));
    }

    /// Those behind it cannot be used either.
    fn note_first_bad(&self, verified: impl IntoIterator<Item = Result<(), NotVerified>>) {
        let bad = self
            .copy
            .checks
            .iter()
            .zip(verified)
            .find_map(|(check, verified)| Some((check.chunk, verified.err()?)));
        let Some((chunk, error)) = bad else { return };
        if matches!(error, NotVerified::Corrupt { .. }) {
            add(&self.shared.counters.chunks_corrupt, 1);
            self.shared.log.corrupt(self.copy.job, chunk, self.copy.layer);
        }
        self.note(chunk, error.to_string());
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

/// A layer of a chunk where it arrived: its pages, and what was not wanted in the arena.
fn arrived(whole: Span, pieces: &[Piece]) -> Extent {
    let (mut parts, mut at) = (Vec::with_capacity(2 * pieces.len() + 1), whole.offset);
    for piece in pieces {
        if piece.arena_offset > at {
            parts.push(ExtentPart::Arena { offset: at, bytes: piece.arena_offset - at });
        }
        parts.push(ExtentPart::Page { layer: piece.layer, offset: piece.page_offset, bytes: piece.bytes });
        at = piece.arena_offset + piece.bytes;
    }
    let end = whole.offset + whole.len;
    if end > at {
        parts.push(ExtentPart::Arena { offset: at, bytes: end - at });
    }
    parts
}

/// A part where the host reads it.
fn span(part: ExtentPart, arena: RegionId, pages: RegionId) -> Span {
    match part {
        ExtentPart::Page { offset, bytes, .. } => Span::new(pages, offset, bytes),
        ExtentPart::Arena { offset, bytes } => Span::new(arena, offset, bytes),
    }
}
