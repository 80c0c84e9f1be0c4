//! Writing chunks: slots, then all layers and footers in one transfer, and the chunks are visible.
//! Layers that lie in memory as they will on disk go there directly; others are put together in
//! staging. This file knows these steps.

use super::Ssd;
use super::crypt::ENCRYPTION_BYTES;
use super::error::NotWritten;
use super::in_flight::{NoPermit, Permit};
use super::inner::{Broken, SsdInner};
use super::pool::{NotStaged, StagingBlock};
use crate::checksum;
use crate::log::{DiskBegun, DiskTier, DiskWrite, Footer, PAGE_BYTES, crc32c};
use crate::shape::ChunkShape;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use forebay_transfer::{Class, End, Span, SpanPair, Transfer};
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SsdWriteEnd {
    /// The chunk can be read. It survives a crash from the next commit on; see [`Ssd::flush`].
    Stored {
        bytes: u64,
    },
    /// It was here before; nothing was written.
    AlreadyHere,
    /// It was deleted while it was written.
    Deleted,
    Failed(NotWritten),
}

/// A chunk to be written: for each layer the spans whose bytes, one after another, are the layer.
#[derive(Debug, Clone)]
pub struct Source {
    pub id: ChunkId,
    pub parent: Option<ChunkId>,
    /// Where its layers lie: host memory at the store's place.
    pub layers: Vec<Vec<Span>>,
    /// The CRC-32C of each layer, if the caller has them.
    pub crcs: Option<Vec<u32>>,
}

type OnEnd = Box<dyn FnOnce(Vec<SsdWriteEnd>) + Send>;

/// Chunks on their way to the disk. Dropped before they ended, they give their slots back and say
/// that they failed.
struct Outgoing {
    shared: Arc<SsdInner>,
    tenant: TenantId,
    encrypted: bool,
    class: Class,
    parts: Vec<Part>,
    /// How each chunk of the request ended, as far as it did.
    ends: Vec<Option<SsdWriteEnd>>,
    on_end: Option<OnEnd>,
    permit: Option<Permit>,
}

/// A chunk that has a slot.
struct Part {
    number: usize,
    write: DiskWrite,
    source: Source,
    bytes: u64,
    /// Whether the layers go to disk from where they are.
    direct: bool,
    /// The footer's page, or the whole slot.
    held: Option<StagingBlock>,
}

/// A chunk that may be let in.
struct Candidate {
    source: Source,
    on_disk: ChunkShape,
    bytes: u64,
    direct: bool,
}

impl Ssd {
    /// Writes one chunk; see [`write_many`](Ssd::write_many). An error is why it is not being
    /// written, and calls nobody.
    pub fn write(
        &self,
        tenant: TenantId,
        source: Source,
        class: Class,
        on_end: impl FnOnce(SsdWriteEnd) + Send + 'static,
    ) -> Result<(), NotWritten> {
        let mut outgoing = self.outgoing(tenant, vec![source], class)?;
        if let Some(Some(SsdWriteEnd::Failed(refused))) = outgoing.ends.first_mut() {
            return Err(std::mem::replace(refused, NotWritten::MoverEnded));
        }
        outgoing.go(move |mut ends| ends.pop().map_or((), on_end));
        Ok(())
    }

    /// Writes chunks of a tenant, parents before those that continue them. The sources must stay
    /// registered and unchanged until `on_end` is called.
    ///
    /// With `Ok`, `on_end` is called exactly once, with as many ends as there are sources and in
    /// their order: at once and on this thread if nothing is to be written, else on a thread of the
    /// store; it should be short and must not wait for the store or the mover. An error calls
    /// nobody.
    ///
    /// Many chunks in one call cost much less than many calls: they lie side by side on disk and
    /// become few, large I/Os. They need staging at the same time: a page each, or all of their
    /// bytes if they are not whole aligned pages or are to be encrypted.
    pub fn write_many(
        &self,
        tenant: TenantId,
        sources: Vec<Source>,
        class: Class,
        on_end: impl FnOnce(Vec<SsdWriteEnd>) + Send + 'static,
    ) -> Result<(), NotWritten> {
        self.outgoing(tenant, sources, class)?.go(on_end);
        Ok(())
    }

    /// Takes slots for as many chunks as get one.
    fn outgoing(&self, tenant: TenantId, sources: Vec<Source>, class: Class) -> Result<Outgoing, NotWritten> {
        let shared = self.shared();
        let permit = shared.writes.acquire().map_err(|refused| match refused {
            NoPermit::Full => NotWritten::TooMany,
            NoPermit::Closed => NotWritten::Closed,
        })?;
        let encrypted = shared.keys.has(tenant);
        let count = sources.len();
        let candidates: Vec<_> =
            sources.into_iter().map(|source| shared.candidate(source, encrypted)).collect();
        let mut outgoing = Outgoing {
            shared: Arc::clone(shared),
            tenant,
            encrypted,
            class,
            parts: Vec::with_capacity(count),
            ends: vec![None; count],
            on_end: None,
            permit: Some(permit),
        };
        shared.change(|tier, now_us| {
            for (number, candidate) in candidates.into_iter().enumerate() {
                match candidate.and_then(|candidate| candidate.begin(tier, now_us, tenant, number)) {
                    Ok(Some(part)) => outgoing.parts.push(part),
                    Ok(None) => outgoing.ends[number] = Some(SsdWriteEnd::AlreadyHere),
                    Err(refused) => outgoing.ends[number] = Some(SsdWriteEnd::Failed(refused)),
                }
            }
        });
        outgoing.refuse_read_only();
        Ok(outgoing)
    }
}

impl Candidate {
    /// Asks for a slot. Nothing if the chunk is here.
    fn begin(
        self,
        tier: &mut DiskTier,
        now_us: u64,
        tenant: TenantId,
        number: usize,
    ) -> Result<Option<Part>, NotWritten> {
        let Candidate { source, on_disk, bytes, direct } = self;
        match tier.begin_write(now_us, tenant, &source.id, source.parent.as_ref(), &on_disk)? {
            DiskBegun::AlreadyHere => Ok(None),
            DiskBegun::Write(write) => Ok(Some(Part { number, write, source, bytes, direct, held: None })),
        }
    }
}

impl SsdInner {
    /// Checks a source, and how its chunk will lie on disk.
    fn candidate(&self, source: Source, encrypted: bool) -> Result<Candidate, NotWritten> {
        let layers = &source.layers;
        if let Some(given) = source.crcs.as_ref().map(Vec::len).filter(|given| *given != layers.len()) {
            return Err(NotWritten::Checksums { given, layers: layers.len() });
        }
        let encryption_bytes = if encrypted { ENCRYPTION_BYTES as u64 } else { 0 };
        let lengths = || layers.iter().map(|spans| span_bytes(spans));
        let bytes = ChunkShape::new(lengths())?.bytes();
        let on_disk = ChunkShape::new(lengths().map(|bytes| bytes.saturating_add(encryption_bytes)))?;
        let direct = self.check_source(layers)? && !encrypted;
        Ok(Candidate { source, on_disk, bytes, direct })
    }

    /// Fails unless all sources are host memory, and says whether they are whole, aligned pages.
    fn check_source(&self, layers: &[Vec<Span>]) -> Result<bool, NotWritten> {
        let mut all_aligned = true;
        for span in layers.iter().flatten() {
            let (start, len) = self.mover.memory().host(span).ok_or(NotWritten::NotHost(*span))?;
            all_aligned &= (start.addr().get() | len).is_multiple_of(PAGE_BYTES);
        }
        Ok(all_aligned)
    }
}

impl Outgoing {
    /// Nothing goes to a volume on which commits fail.
    fn refuse_read_only(&mut self) {
        let shared = Arc::clone(&self.shared);
        let is_read_only = |part: &mut Part| shared.volumes[part.write.volume].committer.is_read_only();
        for part in self.parts.extract_if(.., is_read_only).collect::<Vec<_>>() {
            let volume = part.write.volume;
            self.fail(part, 0, NotWritten::ReadOnly { volume });
        }
    }

    fn go(mut self, on_end: impl FnOnce(Vec<SsdWriteEnd>) + Send + 'static) {
        self.on_end = Some(Box::new(on_end));
        if self.parts.is_empty() {
            return self.end();
        }
        let length = |part: &Part| if part.direct { PAGE } else { part.write.shape.stride_bytes() };
        let lengths = self.parts.iter().map(length).collect();
        let shared = Arc::clone(&self.shared);
        shared.staging.reserve(lengths, None, move |held| self.staged(held));
    }

    /// There is staging, or there will be none.
    fn staged(mut self, held: Result<Vec<StagingBlock>, NotStaged>) {
        match held {
            Err(not_staged) => self.fail_all(|_| 0, not_staged.into()),
            Ok(held) => {
                self.parts.iter_mut().zip(held).for_each(|(part, held)| part.held = Some(held));
                if self.parts.iter().all(|part| part.direct && part.source.crcs.is_some()) {
                    return self.prepare();
                }
                let threads = Arc::clone(&self.shared.threads);
                threads.run(move || self.prepare());
            }
        }
    }

    /// Puts together what is to be written, and submits it.
    fn prepare(mut self) {
        for mut part in std::mem::take(&mut self.parts) {
            match part.prepare(&self.shared, self.tenant, self.encrypted) {
                Ok(()) => self.parts.push(part),
                Err(not_written) => self.fail(part, 0, not_written),
            }
        }
        if self.parts.is_empty() {
            return self.end();
        }
        let pairs = self.parts.iter().flat_map(|part| part.pairs(&self.shared)).collect();
        let transfer = Transfer::new(pairs, self.class);
        let mover = self.shared.mover.clone();
        // A mover that takes nothing in drops the chunks, which ends them.
        let _ = mover.submit(transfer, move |end| self.moved(end));
    }

    /// The transfer has ended; on the mover's thread.
    fn moved(mut self, end: End) {
        let threads = Arc::clone(&self.shared.threads);
        let Some(broken) = Broken::of(end) else { return threads.run(move || self.written()) };
        self.shared.counts.lock().io_faults += 1;
        if let Some(part) = self.parts.first() {
            self.shared.lines.write_failed(self.shared.path_of(&part.write), &broken.reason);
        }
        for part in &mut self.parts {
            if let Some(held) = part.held.take() {
                held.end(&broken.quarantined);
            }
            self.shared.volumes[part.write.volume].committer.note_failed_write();
        }
        let shared = Arc::clone(&self.shared);
        let lost_bytes = |part: &Part| shared.lost_bytes(&part.write, &broken.quarantined);
        self.fail_all(lost_bytes, NotWritten::Failed(broken.reason));
    }

    /// The chunks and their footers are in the file.
    fn written(mut self) {
        let parts = std::mem::take(&mut self.parts);
        let mut counts = self.shared.counts.lock();
        counts.writes += parts.len() as u64;
        counts.written_bytes += parts.iter().map(|part| part.bytes).sum::<u64>();
        counts.direct_writes += parts.iter().filter(|part| part.direct).count() as u64;
        drop(counts);
        let ends = &mut self.ends;
        self.shared.change(|tier, now_us| {
            for Part { number, write, bytes, .. } in parts {
                let ended = tier.end_write(now_us, write);
                let stored = SsdWriteEnd::Stored { bytes };
                ends[number] = Some(ended.map_or(SsdWriteEnd::Deleted, |()| stored));
            }
        });
        self.end();
    }

    /// Gives all slots back, and tells.
    fn fail_all(mut self, lost_bytes: impl Fn(&Part) -> u64, not_written: NotWritten) {
        for part in std::mem::take(&mut self.parts) {
            let lost_bytes = lost_bytes(&part);
            self.fail(part, lost_bytes, not_written.clone());
        }
        self.end();
    }

    /// Gives a slot back.
    fn fail(&mut self, part: Part, lost_bytes: u64, not_written: NotWritten) {
        self.ends[part.number] = Some(SsdWriteEnd::Failed(not_written));
        self.shared.change(|tier, now_us| tier.abort(now_us, part.write, lost_bytes));
    }

    /// Lets go of the store, then tells: whoever is told may drop the store and open its logs
    /// again.
    fn end(mut self) {
        let (on_end, permit) = (self.on_end.take(), self.permit.take());
        let ends = std::mem::take(&mut self.ends);
        drop(self);
        if let Some(on_end) = on_end {
            on_end(told(ends));
        }
        drop(permit);
    }
}

/// How all chunks ended; those of which nothing is known did not get on.
fn told(ends: Vec<Option<SsdWriteEnd>>) -> Vec<SsdWriteEnd> {
    ends.into_iter().map(|end| end.unwrap_or(SsdWriteEnd::Failed(NotWritten::MoverEnded))).collect()
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        for part in std::mem::take(&mut self.parts) {
            self.fail(part, 0, NotWritten::MoverEnded);
        }
        if let Some(on_end) = self.on_end.take() {
            on_end(told(std::mem::take(&mut self.ends)));
        }
    }
}

impl Part {
    /// Takes the checksums, puts the chunk together if it does not lie as it will on disk, and
    /// makes its footer.
    fn prepare(&mut self, shared: &SsdInner, tenant: TenantId, encrypted: bool) -> Result<(), NotWritten> {
        let crcs = if self.direct {
            self.checksums_of_source(shared)?
        } else {
            self.fill(shared, tenant, encrypted)?
        };
        let Part { write, source, held: Some(held), .. } = self else { return Ok(()) };
        let footer = Footer::new(write.copy, tenant, source.parent, Arc::clone(&write.shape), &crcs)
            .with_encrypted(encrypted);
        let footer_at = if self.direct { 0 } else { write.shape.footer_at() };
        held.slice_mut(footer_at..footer_at + PAGE).copy_from_slice(&footer.encode());
        Ok(())
    }

    /// The layers' checksums, as given or from where they lie.
    fn checksums_of_source(&self, shared: &SsdInner) -> Result<Vec<u32>, NotWritten> {
        if let Some(crcs) = &self.source.crcs {
            return Ok(crcs.clone());
        }
        let memory = shared.mover.memory();
        let crc = |spans: &Vec<Span>| checksum::of_spans(memory, spans).ok_or_else(|| not_host(spans));
        self.source.layers.iter().map(crc).collect()
    }

    /// Puts the layers into staging as they will lie on disk, with zeros between them, and returns
    /// their checksums there.
    fn fill(&mut self, shared: &SsdInner, tenant: TenantId, encrypted: bool) -> Result<Vec<u32>, NotWritten> {
        let crcs = if encrypted { None } else { Some(self.checksums_of_source(shared)?) };
        let Part { write, source, held: Some(held), .. } = self else { return Ok(Vec::new()) };
        let shape = &write.shape;
        let mut filled = 0;
        let mut encrypted_crcs = Vec::new();
        for (layer, spans) in source.layers.iter().enumerate() {
            let place = shape.layer(layer).unwrap_or(0..0);
            held.slice_mut(filled..place.start).fill(0);
            filled = place.end;
            let mut rest = held.slice_mut(place.clone());
            for span in spans {
                let (start, len) = shared.mover.memory().host(span).ok_or(NotWritten::NotHost(*span))?;
                // SAFETY: the memory table has checked the bounds, and the caller of `write_many`
                // keeps the spans registered and unchanged.
                let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), len) };
                let (part, behind) = rest.split_at_mut(len);
                part.copy_from_slice(bytes);
                rest = behind;
            }
            if encrypted {
                let buffer = held.slice_mut(place);
                shared.keys.encrypt_layer(tenant, &write.copy, layer as u16, buffer)?;
                encrypted_crcs.push(crc32c(buffer));
            }
        }
        held.slice_mut(filled..shape.footer_at()).fill(0);
        Ok(crcs.unwrap_or(encrypted_crcs))
    }

    /// What goes where. Pages that follow each other on disk become one I/O, wherever they lie in
    /// memory.
    fn pairs(&self, shared: &SsdInner) -> Vec<SpanPair> {
        let Part { write, held: Some(held), .. } = self else { return Vec::new() };
        let (footer_at, stride) = (write.shape.footer_at(), write.shape.stride_bytes());
        if !self.direct {
            return vec![SpanPair::new(held.span(0..stride), shared.slot_span(write, 0..stride))];
        }
        let mut at = 0;
        let mut pair = |span: &Span| {
            let to = shared.slot_span(write, at..at + span.len);
            at += span.len;
            SpanPair::new(*span, to)
        };
        let spans = self.source.layers.iter().flatten().filter(|span| span.len > 0);
        let mut pairs: Vec<SpanPair> = spans.map(&mut pair).collect();
        pairs.push(SpanPair::new(held.span(0..PAGE), shared.slot_span(write, footer_at..stride)));
        pairs
    }
}

fn not_host(spans: &[Span]) -> NotWritten {
    spans.first().map_or(NotWritten::MoverEnded, |span| NotWritten::NotHost(*span))
}

/// Bytes of all spans. A sum that cannot be is no layer that the tier would take, whatever number
/// stands for it.
fn span_bytes(spans: &[Span]) -> u64 {
    spans.iter().fold(0, |sum, span| sum.saturating_add(span.len))
}
