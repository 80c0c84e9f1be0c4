//! Loading what lies on disk: read and verified in memory's slots or in staging, and from there
//! copied to its targets. To the caller a fault of the disk is a miss.

use super::load::{Load, NotLoaded, Outgoing, Urgency, span_bytes, spread};
use super::promote::{self, Promotion};
use super::reserve::ChunkName;
use super::{Lease, Store, StoreInner};
use crate::ssd::{Check, LayerRead, NotRead, ReadResults, Staged};
use crate::store::lease::{DiskChecksums, DiskPart};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, End, Failure, Reason, Refused, SpanPair, SubmitError, Transfer};
use std::sync::Arc;

type OnEnd = Box<dyn FnOnce(End) + Send>;

/// What is to be done when the disk has been read.
struct DiskLoad {
    shared: Arc<StoreInner>,
    /// Those on disk, in the order of the wants. Chunks are counted from the first one on disk.
    loads: Vec<Load>,
    /// The chunks that may go to memory if all of their layers were read.
    names: Vec<Option<ChunkName>>,
    /// The slots of those that the disk reads straight into memory.
    promotions: Vec<Option<Promotion>>,
    checksums: Arc<DiskChecksums>,
    outgoing: Outgoing,
    pairs: Vec<SpanPair>,
    urgency: Urgency,
}

impl Store {
    /// Loads `loads`, which lie on disk, and then what `outgoing` and `pairs` are for.
    pub(super) fn load_from_disk(
        &self,
        lease: &Lease,
        loads: Vec<Load>,
        outgoing: Outgoing,
        pairs: Vec<SpanPair>,
        urgency: Urgency,
        on_end: OnEnd,
    ) -> Result<(), NotLoaded> {
        let shared = Arc::clone(&self.shared);
        let (Some(disk), Some((part, _))) = (&self.shared.disk, lease.on_disk(usize::MAX)) else {
            return Err(NotLoaded::Disk(NotRead::Closed));
        };
        let loads = loads.into_iter().map(|load| placed(lease, load)).collect::<Result<Vec<_>, _>>()?;
        let names: Vec<_> = loads.iter().map(|load| name(part, load)).collect();
        let promotions: Vec<_> =
            loads.iter().zip(&names).map(|(load, name)| promotion(&shared, part, load, *name)).collect();
        let want = |(load, promotion): (&Load, &Option<Promotion>)| {
            let into = promotion.as_ref().map(Promotion::pages);
            LayerRead { chunk: load.chunk, layers: load.layers.clone(), into, check: Check::AtRead }
        };
        let wants: Vec<LayerRead> = loads.iter().zip(&promotions).map(want).collect();
        let load = DiskLoad {
            names,
            promotions,
            checksums: Arc::clone(&part.checksums),
            shared,
            loads,
            outgoing,
            pairs,
            urgency,
        };
        let reading = self.shared.disk_reading();
        let on_read = move |ends| {
            reading.end(&ends);
            load.read(ends, on_end);
        };
        disk.ssd.read(&part.lease, &wants, urgency.class, urgency.deadline_us, on_read)?;
        Ok(())
    }
}

/// The same load with its chunk counted from the first one on disk.
fn placed(lease: &Lease, load: Load) -> Result<Load, NotLoaded> {
    let chunk = lease.on_disk(load.chunk).map_or(usize::MAX, |(_, place)| place);
    if load.layers.len() != load.targets.len() || load.layers.is_empty() {
        let (layers, targets) = (load.layers.clone(), load.targets.len());
        return Err(NotLoaded::Layers { chunk_layers: layers.end, layers, targets });
    }
    Ok(Load { chunk, ..load })
}

fn name(part: &DiskPart, load: &Load) -> Option<ChunkName> {
    let (id, parent) = part.name(load.chunk)?;
    Some(ChunkName { tenant: part.tenant, id, parent })
}

/// A slot for a chunk of which all is loaded, if the disk can read it there and memory takes it in.
fn promotion(
    shared: &Arc<StoreInner>,
    part: &DiskPart,
    load: &Load,
    name: Option<ChunkName>,
) -> Option<Promotion> {
    let (shape, is_plain) = part.lease.layout_of(load.chunk).ok()?;
    let is_whole = load.layers == (0..shape.layers());
    let name = name.filter(|_| is_plain && is_whole)?;
    Promotion::begin(shared, name, shape.chunk(), false).ok().flatten()
}

impl DiskLoad {
    /// The disk was read, or was not; on a thread of the disk tier.
    fn read(mut self, ends: ReadResults, on_end: OnEnd) {
        let promotions = std::mem::take(&mut self.promotions);
        if let Some(error) = ends.iter().find_map(|end| end.as_ref().err()).cloned() {
            promotions.into_iter().zip(ends).for_each(|(promotion, end)| keep_or_abandon(promotion, end));
            return on_end(failed(reason(error)));
        }
        let staged: Vec<Staged> = ends.into_iter().flatten().collect();
        for (load, staged) in self.loads.iter().zip(&staged) {
            self.checksums.note_all(load.chunk, staged);
            if let Err(refused) = pair_up(load, staged, &mut self.pairs) {
                return on_end(failed(Reason::Refused(refused)));
            }
        }
        let staged: Vec<Arc<Staged>> = staged.into_iter().map(Arc::new).collect();
        let (shared, names) = (Arc::clone(&self.shared), std::mem::take(&mut self.names));
        self.deliver(staged.clone(), promotions, on_end);
        for (name, staged) in names.into_iter().zip(staged) {
            if let Some(name) = name.filter(|_| !staged.is_direct()) {
                promote::offer(&shared, name, staged, Class::Prefetch, false, drop);
            }
        }
    }

    /// Everything to its targets. Staging and slots stay until that has ended; what a lost
    /// operation reads from them later goes to targets that are quarantined. Only then do others
    /// see the chunks in these slots.
    fn deliver(self, staged: Vec<Arc<Staged>>, promotions: Vec<Option<Promotion>>, on_end: OnEnd) {
        let DiskLoad { shared, outgoing, pairs, urgency, .. } = self;
        let transfer = Transfer { pairs, class: urgency.class, deadline_us: urgency.deadline_us };
        let on_end = Arc::new(Mutex::new(Some(on_end)));
        let waiting = Arc::clone(&on_end);
        let submitted = shared.mover.submit(transfer, move |end| {
            outgoing.ended(&end);
            for (promotion, staged) in promotions.into_iter().zip(&staged) {
                // Counted; whoever loaded it has it all the same.
                let _ = promotion.map(|promotion| promotion.copied(&end, &staged.crcs()));
            }
            drop(staged);
            call(&on_end, end);
        });
        if let Err(error) = submitted {
            call(&waiting, failed(not_taken(error)));
        }
    }
}

/// The load failed: a chunk that was read all the same stays in memory.
fn keep_or_abandon(promotion: Option<Promotion>, end: Result<Staged, NotRead>) {
    match (promotion, end) {
        (Some(promotion), Ok(staged)) if staged.is_direct() => drop(promotion.commit(&staged.crcs())),
        (Some(promotion), Err(error)) => promotion.abandon(error.quarantined()),
        _ => {}
    }
}

/// The layers as they were read with the spans of their targets.
fn pair_up(load: &Load, staged: &Staged, pairs: &mut Vec<SpanPair>) -> Result<(), Refused> {
    for (layer, target) in load.layers.clone().zip(&load.targets) {
        let from_bytes = staged.span(layer).map_or(0, |span| span.len);
        let to_bytes = span_bytes(target);
        match staged.span(layer).filter(|_| from_bytes == to_bytes) {
            Some(from) => pairs.extend(spread(from, target.iter())),
            None => return Err(Refused::Length { from_bytes, to_bytes }),
        }
    }
    Ok(())
}

fn call(on_end: &Mutex<Option<OnEnd>>, end: End) {
    let on_end = on_end.lock().take();
    if let Some(on_end) = on_end {
        on_end(end);
    }
}

/// Nothing was written to any target.
fn failed(reason: Reason) -> End {
    End::Failed(Failure { reason, unmoved: Vec::new(), moved_bytes: 0, quarantined: Vec::new() })
}

const LINK: &str = "ssd";

fn reason(error: NotRead) -> Reason {
    match error {
        NotRead::Corrupt { .. } => Reason::Corrupt { link: LINK.to_owned() },
        other => Reason::Link { link: LINK.to_owned(), error: other.to_string(), attempts: 1 },
    }
}

fn not_taken(error: SubmitError) -> Reason {
    Reason::Link { link: "mover".to_owned(), error: error.to_string(), attempts: 1 }
}

impl DiskChecksums {
    fn note_all(&self, chunk: usize, staged: &Staged) {
        for layer in staged.layers() {
            if let (Some(sum), Some(span)) = (staged.crc(layer), staged.span(layer)) {
                self.note(chunk, layer, sum, span.len);
            }
        }
    }
}
