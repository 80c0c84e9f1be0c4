//! Writing a chunk: a slot, its layers and its footer in one transfer, and the chunk is visible. Layers that lie in memory
//! as they will on disk go there directly; others are put together in staging. This file knows these steps; it must never
//! know which slot is taken or when anything becomes durable.

use super::Ssd;
use super::crypt::SEAL_BYTES;
use super::error::NotWritten;
use super::gate::{NotIn, Pass};
use super::pool::{Held, NotStaged};
use super::shared::{Broken, Shared};
use crate::checksum;
use crate::log::{DiskBegun, DiskWrite, DiskWriteEnd, Footer, PAGE_BYTES, crc32c};
use crate::shape::ChunkShape;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use forebay_mover::{Class, End, Span, SpanPair, Transfer};
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;

/// How writing a chunk ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SsdWriteEnd {
    /// The chunk can be read. It survives a crash from the next commit on; see [`Ssd::flush`].
    Stored {
        /// Its length.
        bytes: u64,
    },
    /// It was here before; nothing was written.
    AlreadyHere,
    /// It was deleted while it was written.
    Deleted,
    /// It is not here.
    Failed(NotWritten),
}

type OnEnd = Box<dyn FnOnce(SsdWriteEnd) + Send>;

/// A chunk on its way to the disk. Dropped before it ended, it gives its slot back and says that it failed.
struct Outgoing {
    shared: Arc<Shared>,
    write: Option<DiskWrite>,
    tenant: TenantId,
    parent: Option<ChunkId>,
    layers: Vec<Vec<Span>>,
    crcs: Option<Vec<u32>>,
    bytes: u64,
    class: Class,
    sealed: bool,
    /// Whether the layers go to disk from where they are.
    direct: bool,
    /// The footer's page, or the whole slot.
    held: Option<Held>,
    on_end: Option<OnEnd>,
    pass: Option<Pass>,
}

impl Ssd {
    /// Writes a chunk from `layers`: for each layer the spans whose bytes, one after another, are the layer. They must be
    /// host memory at the store's place, and stay registered and unchanged until `on_end` is called. `crcs` are the
    /// CRC-32C of the layers, if the caller has them.
    ///
    /// With `Ok`, `on_end` is called exactly once: at once and on this thread if the chunk is here already, else on a
    /// thread of the store; it should be short and must not wait for the store or the mover. An error calls nobody.
    #[expect(
        clippy::too_many_arguments,
        reason = "what, whose, from where, how urgent and whom to tell, each plain"
    )]
    pub fn write(
        &self,
        tenant: TenantId,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        crcs: Option<Vec<u32>>,
        class: Class,
        on_end: impl FnOnce(SsdWriteEnd) + Send + 'static,
    ) -> Result<(), NotWritten> {
        let shared = self.shared();
        let pass = shared.writes.enter().map_err(|refused| match refused {
            NotIn::Full => NotWritten::TooMany,
            NotIn::Closed => NotWritten::Closed,
        })?;
        if let Some(given) = crcs.as_ref().map(Vec::len).filter(|given| *given != layers.len()) {
            return Err(NotWritten::Sums { given, layers: layers.len() });
        }
        let sealed = shared.keys.has(tenant);
        let seal_bytes = if sealed { SEAL_BYTES as u64 } else { 0 };
        let shape = ChunkShape::new(layers.iter().map(|spans| span_bytes(spans)))?;
        let on_disk =
            ChunkShape::new(layers.iter().map(|spans| span_bytes(spans).saturating_add(seal_bytes)))?;
        let all_aligned = shared.check_source(layers)?;
        let begun =
            shared.change(|tier, now_us| tier.begin_write(now_us, tenant, &id, parent.as_ref(), &on_disk))?;
        let DiskBegun::Write(write) = begun else {
            on_end(SsdWriteEnd::AlreadyHere);
            return Ok(());
        };
        let volume = write.volume();
        let lengths = vec![if all_aligned && !sealed { PAGE } else { write.shape().stride_bytes() }];
        let outgoing = Outgoing {
            shared: Arc::clone(shared),
            write: Some(write),
            tenant,
            parent,
            layers: layers.to_vec(),
            crcs,
            bytes: shape.bytes(),
            class,
            sealed,
            direct: all_aligned && !sealed,
            held: None,
            on_end: Some(Box::new(on_end)),
            pass: Some(pass),
        };
        if shared.volumes[volume].committer.is_read_only() {
            outgoing.refuse();
            return Err(NotWritten::ReadOnly { volume });
        }
        shared.staging.reserve(lengths, None, move |held| outgoing.staged(held));
        Ok(())
    }
}

impl Shared {
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
    /// There is staging, or there will be none.
    fn staged(mut self, held: Result<Vec<Held>, NotStaged>) {
        match held {
            Err(not_staged) => self.abort(0, not_staged.into()),
            Ok(mut held) => {
                self.held = held.pop();
                if self.direct && self.crcs.is_some() {
                    return self.prepare();
                }
                let crew = Arc::clone(&self.shared.crew);
                crew.run(move || self.prepare());
            }
        }
    }

    /// Puts together what is to be written, and submits it.
    fn prepare(mut self) {
        let crcs = if self.direct { self.crcs_of_source() } else { self.fill() };
        let (Some(write), Some(held), crcs) = (&self.write, &mut self.held, crcs) else { return };
        let crcs = match crcs {
            Ok(crcs) => crcs,
            Err(not_written) => return self.abort(0, not_written),
        };
        let footer = Footer::new(write.name(), self.tenant, self.parent, Arc::clone(write.shape()), &crcs)
            .with_sealed(self.sealed);
        let footer_at = if self.direct { 0 } else { write.shape().footer_at() };
        held.slice_mut(footer_at..footer_at + PAGE).copy_from_slice(&footer.encode());
        let transfer = Transfer::new(self.pairs(), self.class);
        let mover = self.shared.mover.clone();
        // A mover that takes nothing in drops the chunk, which ends it.
        let _ = mover.submit(transfer, move |end| self.moved(end));
    }

    /// The layers' checksums, as given or from where they lie.
    fn crcs_of_source(&self) -> Result<Vec<u32>, NotWritten> {
        if let Some(crcs) = &self.crcs {
            return Ok(crcs.clone());
        }
        let memory = self.shared.mover.memory();
        let crc = |spans: &Vec<Span>| checksum::of_spans(memory, spans).ok_or_else(|| not_host(spans));
        self.layers.iter().map(crc).collect()
    }

    /// Puts the layers into staging as they will lie on disk, with zeros between them, and returns their checksums there.
    fn fill(&mut self) -> Result<Vec<u32>, NotWritten> {
        let crcs = if self.sealed { None } else { Some(self.crcs_of_source()?) };
        let (Some(write), Some(held)) = (&self.write, &mut self.held) else { return Ok(Vec::new()) };
        let shape = write.shape();
        let mut filled = 0;
        let mut sealed_crcs = Vec::new();
        for (layer, spans) in self.layers.iter().enumerate() {
            let place = shape.layer(layer).unwrap_or(0..0);
            held.slice_mut(filled..place.start).fill(0);
            filled = place.end;
            let mut rest = held.slice_mut(place);
            for span in spans {
                let (start, len) = self.shared.mover.memory().host(span).ok_or(NotWritten::NotHost(*span))?;
                // SAFETY: the memory table has checked the bounds, and the caller of `write` keeps the spans registered
                // and unchanged.
                let source = unsafe { std::slice::from_raw_parts(start.as_ptr(), len) };
                let (part, behind) = rest.split_at_mut(len);
                part.copy_from_slice(source);
                rest = behind;
            }
            if self.sealed {
                let place = shape.layer(layer).unwrap_or(0..0);
                let buffer = held.slice_mut(place);
                self.shared.keys.seal_layer(self.tenant, &write.name(), layer as u16, buffer)?;
                sealed_crcs.push(crc32c(buffer));
            }
        }
        held.slice_mut(filled..shape.footer_at()).fill(0);
        Ok(crcs.unwrap_or(sealed_crcs))
    }

    /// What goes where. Pages that follow each other on disk become one I/O, wherever they lie in memory.
    fn pairs(&self) -> Vec<SpanPair> {
        let (Some(write), Some(held)) = (&self.write, &self.held) else { return Vec::new() };
        let (footer_at, stride) = (write.shape().footer_at(), write.shape().stride_bytes());
        if !self.direct {
            return vec![SpanPair::new(held.span(0..stride), self.shared.slot_span(write, 0..stride))];
        }
        let mut at = 0;
        let mut pair = |span: &Span| {
            let to = self.shared.slot_span(write, at..at + span.len);
            at += span.len;
            SpanPair::new(*span, to)
        };
        let mut pairs: Vec<SpanPair> =
            self.layers.iter().flatten().filter(|span| span.len > 0).map(&mut pair).collect();
        pairs.push(SpanPair::new(held.span(0..PAGE), self.shared.slot_span(write, footer_at..stride)));
        pairs
    }

    /// The transfer has ended; on the mover's thread.
    fn moved(mut self, end: End) {
        let crew = Arc::clone(&self.shared.crew);
        let Some(broken) = Broken::of(end) else { return crew.run(move || self.written()) };
        self.shared.counts.io_faults.add(1);
        let (mut lost_bytes, mut volume) = (0, 0);
        if let Some(write) = &self.write {
            lost_bytes = self.shared.lost_bytes(write, &broken.quarantined);
            volume = write.volume();
        }
        if let Some(held) = self.held.take() {
            held.end(&broken.quarantined);
        }
        self.shared.volumes[volume].committer.note_failed_write();
        self.abort(lost_bytes, NotWritten::Failed(broken.reason));
    }

    /// The chunk and its footer are in the file.
    fn written(mut self) {
        let Some(write) = self.write.take() else { return };
        let ended = self.shared.change(|tier, now_us| tier.end_write(now_us, write, DiskWriteEnd::Written));
        let counts = &self.shared.counts;
        counts.writes.add(1);
        counts.written_bytes.add(self.bytes);
        counts.direct_writes.add(u64::from(self.direct));
        let bytes = self.bytes;
        self.end(if ended.is_ok() { SsdWriteEnd::Stored { bytes } } else { SsdWriteEnd::Deleted });
    }

    /// Takes the chunk back without telling.
    fn refuse(mut self) {
        self.on_end = None;
        self.give_back(0);
    }

    fn abort(mut self, lost_bytes: u64, not_written: NotWritten) {
        self.give_back(lost_bytes);
        self.end(SsdWriteEnd::Failed(not_written));
    }

    /// Gives the slot back.
    fn give_back(&mut self, lost_bytes: u64) {
        if let Some(write) = self.write.take() {
            // A write that failed cannot also have been deleted.
            let _ = self
                .shared
                .change(|tier, now_us| tier.end_write(now_us, write, DiskWriteEnd::Failed { lost_bytes }));
        }
    }

    /// Lets go of the store, then tells: whoever is told may drop the store and open its logs again.
    fn end(mut self, end: SsdWriteEnd) {
        let (on_end, pass) = (self.on_end.take(), self.pass.take());
        drop(self);
        if let Some(on_end) = on_end {
            on_end(end);
        }
        drop(pass);
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.give_back(0);
        if let Some(on_end) = self.on_end.take() {
            on_end(SsdWriteEnd::Failed(NotWritten::MoverEnded));
        }
    }
}

fn not_host(spans: &[Span]) -> NotWritten {
    spans.first().map_or(NotWritten::MoverEnded, |span| NotWritten::NotHost(*span))
}

/// Bytes of all spans. A sum that cannot be is no layer that the tier would take, whatever number stands for it.
fn span_bytes(spans: &[Span]) -> u64 {
    spans.iter().fold(0, |sum, span| sum.saturating_add(span.len))
}
