//! Reading layers of leased chunks: one transfer for all wants of a request, then every byte is
//! checked before anyone may see it. A chunk that lies on disk as its reader wants it goes straight
//! to the reader's memory, and only its footer to staging; everything else goes to staging.

use super::Ssd;
use super::check::Check;
use super::crypt::{EncryptionError, TenantKeys};
use super::error::NotRead;
use super::in_flight::Permit;
use super::inner::{Broken, SsdInner};
use super::lease::DiskLease;
use super::pool::{NotStaged, StagingBlock};
use super::staged::{Staged, StagedIn, part_of};
use crate::checksum;
use crate::chunk_leases::LeaseId;
use crate::log::{DiskRead, DiskTier, Footer, PAGE_BYTES, crc32c};
use crate::tier::ReadEnd;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, End, Memory, RaisableClass, Span, SpanPair, Transfer};
use std::ops::Range;
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;

/// A run of layers of one chunk that is to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRead {
    /// The chunk's place in the lease, from 0.
    pub chunk: usize,
    pub layers: Range<usize>,
    /// Pages of host memory that the layers, one after another, may be read into without a copy.
    /// They stay registered and the reader's alone until the read has ended. Layers that lie
    /// otherwise on disk, share a page with others, or are encrypted, go to staging all the same.
    pub into: Option<Span>,
    pub check: Check,
}

type ReadResult = Result<Staged, NotRead>;

/// How each want of a request ended.
pub type ReadResults = Vec<ReadResult>;

type OnEnd = Box<dyn FnOnce(ReadResults) + Send>;

/// Collects how the wants of a request end, and tells when the last one has.
struct Answer {
    state: Mutex<(Vec<Option<ReadResult>>, Option<OnEnd>)>,
    /// Given back behind the call, so that a store that is being closed waits for it.
    _permit: Permit,
}

/// Wants that are read by one transfer. Dropped before it ended, it lets go of the chunks.
///
/// The answer is the last field: whoever is told may drop the store and open its logs again.
struct Request {
    parts: Vec<Part>,
    class: RaisableClass,
    deadline_us: Option<u64>,
    shared: Arc<SsdInner>,
    answer: Arc<Answer>,
}

/// A want that the tier granted.
struct Part {
    /// Its place in the request.
    number: usize,
    read: DiskRead,
    layers: Range<usize>,
    /// The pages of the slot that hold the layers.
    window: Range<u64>,
    /// Where these go, if not to staging.
    into: Option<Span>,
    check: Check,
    /// The pages of the layers, unless they go elsewhere, then that of the footer.
    held: Option<StagingBlock>,
}

impl Ssd {
    /// Reads layers of chunks of a lease and verifies them. Staging for all of them is reserved at
    /// once, or later if others have it, or not at all if the deadline permits first; never in
    /// part. `deadline_us` is in the mover's clock.
    ///
    /// With `Ok`, `on_end` is called exactly once, with as many ends as there are wants and in
    /// their order. A chunk that is found not to verify is dropped. It runs on a thread of the
    /// store, or on this one if it is known at once that there is no staging; it should be short
    /// and must not wait for the store or the mover. An error calls nobody.
    ///
    /// Many wants in one request cost much less than many requests. The class can be raised until
    /// the end.
    pub fn read(
        &self,
        lease: &DiskLease,
        wants: &[LayerRead],
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(ReadResults) + Send + 'static,
    ) -> Result<RaisableClass, NotRead> {
        let shared = self.shared();
        let permit = shared.reads.acquire().map_err(|_| NotRead::Closed)?;
        let id = lease.id()?;
        let parts = shared.change_quietly(|tier, now_us| begin_reads(tier, now_us, id, wants))?;
        let lengths = parts.iter().map(Part::staging_bytes).collect();
        let (ends, on_end): (_, OnEnd) = (parts.iter().map(|_| None).collect(), Box::new(on_end));
        let answer = Arc::new(Answer { state: Mutex::new((ends, Some(on_end))), _permit: permit });
        let class = RaisableClass::new(&shared.mover, class);
        let shared = Arc::clone(shared);
        let request = Request { parts, class: class.clone(), deadline_us, shared, answer };
        let shared = self.shared();
        let waits = shared.staging.reserve(lengths, deadline_us, move |held| request.staged(held));
        if waits && deadline_us.is_some() {
            // A committer also keeps this clock.
            shared.volumes.iter().for_each(|volume| volume.committer.look_again());
        }
        Ok(class)
    }
}

/// Begins all reads or none.
fn begin_reads(
    tier: &mut DiskTier,
    now_us: u64,
    lease: LeaseId,
    wants: &[LayerRead],
) -> Result<Vec<Part>, NotRead> {
    let mut parts = Vec::with_capacity(wants.len());
    for (number, want) in wants.iter().enumerate() {
        let refused = match tier.begin_read(now_us, lease, want.chunk) {
            Ok(read) => match read.shape.window(want.layers.clone()) {
                Some(window) => {
                    parts.push(Part::new(number, read, want, window));
                    continue;
                }
                None => {
                    let chunk_layers = read.shape.layers();
                    tier.end_read(now_us, read, ReadEnd::Done);
                    NotRead::Layers { chunk: want.chunk, layers: want.layers.clone(), chunk_layers }
                }
            },
            Err(unreadable) => unreadable.into(),
        };
        for Part { read, .. } in parts {
            tier.end_read(now_us, read, ReadEnd::Done);
        }
        return Err(refused);
    }
    Ok(parts)
}

impl Answer {
    fn end(&self, number: usize, end: Result<Staged, NotRead>) {
        if let Some(slot) = self.state.lock().0.get_mut(number) {
            *slot = Some(end);
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let (ends, on_end) = std::mem::take(self.state.get_mut());
        if let Some(on_end) = on_end {
            on_end(ends.into_iter().map(|end| end.unwrap_or(Err(NotRead::MoverEnded))).collect());
        }
    }
}

impl Request {
    /// There is staging, or there will be none.
    fn staged(mut self, held: Result<Vec<StagingBlock>, NotStaged>) {
        match held {
            Err(not_staged) => self.refuse(&not_staged.into()),
            Ok(held) => {
                self.parts.iter_mut().zip(held).for_each(|(part, held)| part.held = Some(held));
                self.submit();
            }
        }
    }

    fn submit(self) {
        let pairs = self.parts.iter().flat_map(|part| part.pairs(&self.shared)).collect();
        let class = self.class.clone();
        let transfer = Transfer { pairs, class: class.get(), deadline_us: self.deadline_us };
        // A mover that takes nothing in drops the request, which ends it.
        let _ = class.submit(transfer, move |end| self.moved(end));
    }

    /// The transfer has ended; on the mover's thread.
    fn moved(self, end: End) {
        let threads = Arc::clone(&self.shared.threads);
        let Some(broken) = Broken::of(end) else { return threads.run(move || self.verify()) };
        if self.parts.len() > 1 && broken.quarantined.is_empty() {
            // One chunk that cannot be read must not cost the others.
            return self.split().for_each(Request::submit);
        }
        self.fail(&broken);
    }

    fn split(mut self) -> impl Iterator<Item = Request> {
        let parts = std::mem::take(&mut self.parts);
        parts.into_iter().map(move |part| Request {
            parts: vec![part],
            class: self.class.clone(),
            deadline_us: self.deadline_us,
            shared: Arc::clone(&self.shared),
            answer: Arc::clone(&self.answer),
        })
    }

    /// Checks every part.
    fn verify(mut self) {
        let (mut ended, mut any) = (Vec::new(), false);
        for mut part in std::mem::take(&mut self.parts) {
            let proven = part.verify_and_decrypt(self.shared.mover.memory(), &self.shared.keys);
            self.shared.count(&part, &proven);
            any |= proven.is_ok();
            let end = match &proven {
                Err(NotRead::Corrupt { .. }) => ReadEnd::Corrupt,
                _ => ReadEnd::Done,
            };
            self.answer.end(part.number, proven);
            ended.push((part.read, end));
        }
        self.shared.counts.lock().reads += u64::from(any);
        self.shared.end_reads(ended);
    }

    /// Ends all parts for the same reason.
    fn refuse(mut self, why: &NotRead) {
        let mut ended = Vec::new();
        for part in std::mem::take(&mut self.parts) {
            self.answer.end(part.number, Err(why.clone()));
            ended.push((part.read, ReadEnd::Done));
        }
        self.shared.end_reads(ended);
    }

    /// Ends all parts after the disk failed them.
    fn fail(mut self, broken: &Broken) {
        self.shared.counts.lock().io_faults += self.parts.len() as u64;
        if let Some(part) = self.parts.first() {
            self.shared.lines.read_failed(self.shared.path_of(&part.read), &broken.reason);
        }
        let mut ended = Vec::new();
        for mut part in std::mem::take(&mut self.parts) {
            if let Some(held) = part.held.take() {
                held.end(&broken.quarantined);
            }
            let lost_bytes = self.shared.lost_bytes(&part.read, &broken.quarantined);
            let is_reader_s = |span: &&Span| part.into.is_some_and(|into| into.region == span.region);
            let quarantined = broken.quarantined.iter().filter(is_reader_s).copied().collect();
            let reason = broken.reason.clone();
            self.answer.end(part.number, Err(NotRead::Failed { reason, quarantined }));
            ended.push((part.read, ReadEnd::Failed { lost_bytes }));
        }
        self.shared.end_reads(ended);
    }
}

impl SsdInner {
    fn end_reads(self: &Arc<Self>, ended: Vec<(DiskRead, ReadEnd)>) {
        self.change(|tier, now_us| {
            ended.into_iter().for_each(|(read, end)| tier.end_read(now_us, read, end));
        });
    }

    fn count(&self, part: &Part, proven: &Result<Staged, NotRead>) {
        match proven {
            Ok(staged) => {
                self.counts.lock().read_wants += 1;
                self.counts.lock().read_bytes += staged.len_bytes();
                self.counts.lock().direct_reads += u64::from(staged.is_direct());
            }
            Err(NotRead::Corrupt { fault, .. }) => {
                self.counts.lock().corrupt += 1;
                self.lines.corrupt(self.path_of(&part.read), &part.read.copy, fault);
            }
            Err(_) => {}
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        if !parts.is_empty() {
            let ended = parts.into_iter().map(|part| (part.read, ReadEnd::Done));
            self.shared.end_reads(ended.collect());
        }
    }
}

impl Part {
    fn new(number: usize, read: DiskRead, want: &LayerRead, window: Range<u64>) -> Part {
        let shape = &read.shape;
        let is_alone = shape.is_dense() && shape.are_alone(want.layers.clone());
        let into = want.into.filter(|into| is_alone && into.len == window.end - window.start);
        Part { number, read, layers: want.layers.clone(), window, into, check: want.check, held: None }
    }

    /// Bytes of the window that go to staging.
    fn staged_bytes(&self) -> u64 {
        if self.into.is_some() { 0 } else { self.window.end - self.window.start }
    }

    fn staging_bytes(&self) -> u64 {
        self.staged_bytes() + PAGE
    }

    /// The layers, and right behind them in staging their footer. Of a whole chunk they are
    /// neighbours on disk, too, and become one I/O.
    fn pairs(&self, shared: &SsdInner) -> Vec<SpanPair> {
        let Some(held) = &self.held else { return Vec::new() };
        let bytes = self.staged_bytes();
        let layers = self.into.unwrap_or_else(|| held.span(0..bytes));
        let footer_at = self.read.shape.footer_at();
        vec![
            SpanPair::new(shared.slot_span(&self.read, self.window.clone()), layers),
            SpanPair::new(
                shared.slot_span(&self.read, footer_at..footer_at + PAGE),
                held.span(bytes..bytes + PAGE),
            ),
        ]
    }

    /// Whether the footer is this copy's and the layers are what it says, if that is for the read
    /// to say. Layers that are encrypted are decrypted in place.
    fn verify_and_decrypt(&mut self, memory: &Memory, keys: &TenantKeys) -> Result<Staged, NotRead> {
        let want = self.number;
        let corrupt = |fault| NotRead::Corrupt { want, fault };
        let mut held = self.held.take().ok_or(NotRead::MoverEnded)?;
        let bytes = self.staged_bytes();
        let footer = Footer::of(&self.read.copy, held.slice(bytes..bytes + PAGE)).map_err(corrupt)?;
        let is_left_to_users = self.check == Check::AtUse && self.into.is_some() && !footer.encrypted;
        let checked = if is_left_to_users { 0..0 } else { self.layers.clone() };
        for layer in checked {
            let place = self.place(layer);
            let span = self.into.map_or_else(|| held.span(place.clone()), |into| part_of(&into, &place));
            // Memory that is not registered any more is its reader's fault, not the disk's.
            let crc = checksum::of_spans(memory, &[span]).ok_or(NotRead::MoverEnded)?;
            footer.check(layer, span.len, crc).map_err(corrupt)?;
        }
        let place = match self.into {
            Some(_) if footer.encrypted => {
                let error = EncryptionError::NoKey { tenant: footer.tenant };
                return Err(NotRead::Encrypted { want, error });
            }
            Some(into) => StagedIn::Target { into, starts_at: self.window.start },
            None => {
                let decrypted =
                    if footer.encrypted { Some(self.open(keys, &footer, &mut held)?) } else { None };
                StagedIn::Staging { held, starts_at: self.window.start, decrypted }
            }
        };
        Ok(Staged { place, layers: self.layers.clone(), footer })
    }

    /// Decrypts the layers, and returns their checksums.
    fn open(
        &self,
        keys: &TenantKeys,
        footer: &Footer,
        held: &mut StagingBlock,
    ) -> Result<Box<[u32]>, NotRead> {
        let open = |layer: usize| {
            let encrypted = held.slice_mut(self.place(layer));
            let plain = keys.decrypt_layer(footer.tenant, &footer.copy, layer as u16, encrypted);
            plain.map(|plain| crc32c(plain)).map_err(|error| NotRead::Encrypted { want: self.number, error })
        };
        self.layers.clone().map(open).collect()
    }

    /// Where a layer lies in the window.
    fn place(&self, layer: usize) -> Range<u64> {
        let place = self.read.shape.layer(layer).unwrap_or(0..0);
        place.start.saturating_sub(self.window.start)..place.end.saturating_sub(self.window.start)
    }
}
