//! Reading layers of leased chunks into staging: one transfer for all wants of a request, then every byte is verified
//! before anyone may see it. This file knows these steps; it must never know where a chunk lies or what its bytes mean.

use super::Ssd;
use super::crypt::{SealError, TenantKeys};
use super::error::NotRead;
use super::gate::Pass;
use super::lease::DiskLease;
use super::pool::{Held, NotStaged};
use super::shared::{Broken, Shared};
use super::staged::Staged;
use crate::lease::LeaseId;
use crate::log::{DiskRead, DiskReadEnd, DiskTier, Fault, Footer, PAGE_BYTES, crc32c};
use forebay_transfer::{Class, End, SpanPair, Transfer};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;

/// A wish for a run of layers of one chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// The chunk's place in the lease, from 0.
    pub chunk: usize,
    /// Which of its layers.
    pub layers: Range<usize>,
}

type OnEnd = Box<dyn FnOnce(Result<Vec<Staged>, NotRead>) + Send>;

/// A request under way. Dropped before it ended, it lets go of the chunks and says that it failed.
struct Request {
    shared: Arc<Shared>,
    parts: Vec<Part>,
    /// For each part its pages: those of the layers, then the footer.
    held: Vec<Held>,
    class: Class,
    deadline_us: Option<u64>,
    on_end: Option<OnEnd>,
    pass: Option<Pass>,
}

/// A want that the tier granted.
struct Part {
    read: DiskRead,
    layers: Range<usize>,
    /// The pages of the slot that hold the layers.
    window: Range<u64>,
}

/// A want that proved to be what was written.
struct Proven {
    footer: Footer,
    opened: Option<Box<[u32]>>,
}

enum NotProven {
    Corrupt(Fault),
    Sealed(SealError),
}

impl Ssd {
    /// Reads layers of chunks of a lease into staging and verifies them. Staging for all of them is reserved at once, or
    /// later if others have it, or not at all if the deadline passes first; never in part. `deadline_us` is in the
    /// mover's clock.
    ///
    /// With `Ok`, `on_end` is called exactly once, with as many [`Staged`] as there are wants and in their order, or with
    /// the reason why there are none: a request whose wants do not all verify gives nothing, and drops the chunks that
    /// did not. It runs on a thread of the store, or on this one if it is known at once that there is no staging; it
    /// should be short and must not wait for the store or the mover. An error calls nobody.
    ///
    /// Many wants in one request cost much less than many requests.
    pub fn read(
        &self,
        lease: &DiskLease,
        wants: &[Want],
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(Result<Vec<Staged>, NotRead>) + Send + 'static,
    ) -> Result<(), NotRead> {
        let shared = self.shared();
        let pass = shared.reads.enter().map_err(|_| NotRead::Closed)?;
        let id = lease.id()?;
        let parts = shared.change_quietly(|tier, now_us| begin_reads(tier, now_us, id, wants))?;
        let lengths = parts.iter().map(|part| part.window.end - part.window.start + PAGE).collect();
        let request = Request {
            shared: Arc::clone(shared),
            parts,
            held: Vec::new(),
            class,
            deadline_us,
            on_end: Some(Box::new(on_end)),
            pass: Some(pass),
        };
        let waits = shared.staging.reserve(lengths, deadline_us, move |held| request.staged(held));
        if waits && deadline_us.is_some() {
            // A committer also keeps this clock.
            shared.volumes.iter().for_each(|volume| volume.committer.look_again());
        }
        Ok(())
    }
}

/// Begins all reads or none.
fn begin_reads(
    tier: &mut DiskTier,
    now_us: u64,
    lease: LeaseId,
    wants: &[Want],
) -> Result<Vec<Part>, NotRead> {
    let mut parts = Vec::with_capacity(wants.len());
    for want in wants {
        let refused = match tier.begin_read(now_us, lease, want.chunk) {
            Ok(read) => match read.shape().window(want.layers.clone()) {
                Some(window) => {
                    parts.push(Part { read, layers: want.layers.clone(), window });
                    continue;
                }
                None => {
                    let chunk_layers = read.shape().layers();
                    tier.end_disk_read(now_us, read, DiskReadEnd::Done);
                    NotRead::Layers { chunk: want.chunk, layers: want.layers.clone(), chunk_layers }
                }
            },
            Err(unreadable) => unreadable.into(),
        };
        for Part { read, .. } in parts {
            tier.end_disk_read(now_us, read, DiskReadEnd::Done);
        }
        return Err(refused);
    }
    Ok(parts)
}

impl Request {
    /// There is staging, or there will be none.
    fn staged(mut self, held: Result<Vec<Held>, NotStaged>) {
        match held {
            Err(not_staged) => self.end(|_| DiskReadEnd::Done, Err(not_staged.into())),
            Ok(held) => {
                self.held = held;
                let transfer =
                    Transfer { pairs: self.pairs(), class: self.class, deadline_us: self.deadline_us };
                let mover = self.shared.mover.clone();
                // A mover that takes nothing in drops the request, which ends it.
                let _ = mover.submit(transfer, move |end| self.moved(end));
            }
        }
    }

    /// For each part its layers and, right behind them in staging, its footer. Of a whole chunk they are neighbours on
    /// disk, too, and become one I/O.
    fn pairs(&self) -> Vec<SpanPair> {
        let pairs = |(part, held): (&Part, &Held)| {
            let bytes = part.window.end - part.window.start;
            let footer_at = part.read.shape().footer_at();
            [
                SpanPair::new(self.shared.slot_span(&part.read, part.window.clone()), held.span(0..bytes)),
                SpanPair::new(
                    self.shared.slot_span(&part.read, footer_at..footer_at + PAGE),
                    held.span(bytes..bytes + PAGE),
                ),
            ]
        };
        self.parts.iter().zip(&self.held).flat_map(pairs).collect()
    }

    /// The transfer has ended; on the mover's thread.
    fn moved(mut self, end: End) {
        let crew = Arc::clone(&self.shared.crew);
        let Some(broken) = Broken::of(end) else { return crew.run(move || self.verify()) };
        self.shared.counts.io_faults.add(1);
        self.held.drain(..).for_each(|held| held.end(&broken.quarantined));
        let lost = |part: &Part| self.shared.lost_bytes(&part.read, &broken.quarantined);
        let mut lost: VecDeque<u64> = self.parts.iter().map(lost).collect();
        let end = |_: &Part| DiskReadEnd::Failed { lost_bytes: lost.pop_front().unwrap_or(0) };
        self.end(end, Err(NotRead::Failed(broken.reason)));
    }

    /// Checks every part, and gives them all or none.
    fn verify(mut self) {
        let parts = self.parts.iter().zip(&mut self.held);
        let proven: Vec<_> = parts.map(|(part, held)| part.prove(&self.shared.keys, held)).collect();
        let is_corrupt = |proven: &Result<_, _>| matches!(proven, Err(NotProven::Corrupt(_)));
        let mut corrupt: VecDeque<bool> = proven.iter().map(is_corrupt).collect();
        self.shared.counts.corrupt.add(corrupt.iter().filter(|corrupt| **corrupt).count() as u64);
        let result = self.staged_of(proven);
        self.count(&result);
        let end = |_: &Part| match corrupt.pop_front() {
            Some(true) => DiskReadEnd::Corrupt,
            _ => DiskReadEnd::Done,
        };
        self.end(end, result);
    }

    /// What everybody waits for, or why it is not to be had.
    fn staged_of(&mut self, proven: Vec<Result<Proven, NotProven>>) -> Result<Vec<Staged>, NotRead> {
        let refused = |(want, proven): (usize, _)| match proven {
            Ok(proven) => Ok(proven),
            Err(NotProven::Corrupt(fault)) => Err(NotRead::Corrupt { want, fault }),
            Err(NotProven::Sealed(error)) => Err(NotRead::Sealed { want, error }),
        };
        let proven: Vec<Proven> = proven.into_iter().enumerate().map(refused).collect::<Result<_, _>>()?;
        let parts = self.parts.iter().zip(self.held.drain(..)).zip(proven);
        let staged = |((part, held), proven): ((&Part, Held), Proven)| Staged {
            held,
            layers: part.layers.clone(),
            starts_at: part.window.start,
            footer: proven.footer,
            opened: proven.opened,
        };
        Ok(parts.map(staged).collect())
    }

    fn count(&self, result: &Result<Vec<Staged>, NotRead>) {
        if let Ok(staged) = result {
            let counts = &self.shared.counts;
            let bytes = |staged: &Staged| {
                staged.layers().filter_map(|layer| staged.span(layer)).map(|span| span.len).sum::<u64>()
            };
            counts.reads.add(1);
            counts.read_wants.add(staged.len() as u64);
            counts.read_bytes.add(staged.iter().map(bytes).sum());
        }
    }

    /// Lets go of the chunks, then of the store, then tells. In this order, because whoever is told may drop the store
    /// and open its logs again.
    fn end(mut self, how: impl FnMut(&Part) -> DiskReadEnd, result: Result<Vec<Staged>, NotRead>) {
        let told = self.let_go(how);
        let pass = self.pass.take();
        drop(self);
        if let Some(on_end) = told {
            on_end(result);
        }
        drop(pass);
    }

    /// Lets go of chunks and staging, and says who is to be told.
    fn let_go(&mut self, mut how: impl FnMut(&Part) -> DiskReadEnd) -> Option<OnEnd> {
        let on_end = self.on_end.take()?;
        let parts = std::mem::take(&mut self.parts);
        self.shared.change(|tier, now_us| {
            for part in parts {
                let end = how(&part);
                tier.end_disk_read(now_us, part.read, end);
            }
        });
        self.held.clear();
        Some(on_end)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(on_end) = self.let_go(|_| DiskReadEnd::Done) {
            on_end(Err(NotRead::MoverEnded));
        }
    }
}

impl Part {
    /// Whether the footer is this copy's and the layers are what it says. Layers that were sealed are opened in place.
    fn prove(&self, keys: &TenantKeys, held: &mut Held) -> Result<Proven, NotProven> {
        let bytes = self.window.end - self.window.start;
        let corrupt = NotProven::Corrupt;
        let footer = Footer::of(&self.read.name(), held.slice(bytes..bytes + PAGE)).map_err(corrupt)?;
        for layer in self.layers.clone() {
            footer.verify(layer, &[held.slice(self.place(layer))]).map_err(corrupt)?;
        }
        let opened = if footer.sealed { Some(self.open(keys, &footer, held)?) } else { None };
        Ok(Proven { footer, opened })
    }

    /// Opens the layers, and returns their checksums.
    fn open(&self, keys: &TenantKeys, footer: &Footer, held: &mut Held) -> Result<Box<[u32]>, NotProven> {
        let open = |layer: usize| {
            let sealed = held.slice_mut(self.place(layer));
            let plain = keys.open_layer(footer.tenant, &footer.name, layer as u16, sealed);
            plain.map(|plain| crc32c(plain)).map_err(NotProven::Sealed)
        };
        self.layers.clone().map(open).collect()
    }

    /// Where a layer lies in staging.
    fn place(&self, layer: usize) -> Range<u64> {
        let place = self.read.shape().layer(layer).unwrap_or(0..0);
        place.start.saturating_sub(self.window.start)..place.end.saturating_sub(self.window.start)
    }
}
