//! A peer's memory as regions of a mover, and operations of a mover in the words of the wire. This
//! file joins region ids, keys and addresses.

use super::command::{Command, PeerRegion, Section};
use super::export::{OpKind, Piece, Stretch};
use super::payload::Payload;
use super::requester::Operation;
use super::runs::runs;
use forebay_transfer::lock::RwLock;
use forebay_transfer::{Closed, LinkOp, Memory, MoverHandle, Place, Refused, RegionId, Span};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// Regions of peers that are known to a mover. Shared by all flows, so that each flow to a peer can
/// be a route to the same regions. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct PeerRegions {
    table: Arc<RwLock<HashMap<RegionId, Known>>>,
}

/// What a region is at its peer.
#[derive(Debug, Clone, Copy)]
struct Known {
    region: PeerRegion,
    lease: u64,
}

impl PeerRegions {
    /// Makes a peer's region a region of the mover, at the place that stands for the peer.
    /// Operations name `lease`; 0: none.
    pub fn register(
        &self,
        mover: &MoverHandle,
        place: Place,
        region: PeerRegion,
        lease: u64,
    ) -> Result<RegionId, Closed> {
        let id = mover.register_opaque(place, region.len)?;
        let mut table = self.table.write();
        table.insert(id, Known { region, lease });
        Ok(id)
    }

    /// Forgets a region. Refused while a transfer uses it.
    pub fn unregister(&self, mover: &MoverHandle, region: RegionId) -> Result<Result<(), Refused>, Closed> {
        let unregistered = mover.unregister(region)?;
        if unregistered.is_ok() {
            self.table.write().remove(&region);
        }
        Ok(unregistered)
    }

    /// What a region is at its peer, and the lease that operations name. `None`: it is no peer's.
    pub(crate) fn known(&self, id: RegionId) -> Option<(PeerRegion, u64)> {
        self.table.read().get(&id).map(|known| (known.region, known.lease))
    }

    /// What an operation of the mover wants of which of the peer's bytes.
    pub(crate) fn command(&self, op: &LinkOp) -> Result<(OpKind, Command), String> {
        let table = self.table.read();
        let op_kind = op_kind(&table, op)?;
        let theirs: Vec<Span> = match op_kind {
            OpKind::Read => op.pairs.iter().map(|pair| pair.from).collect(),
            OpKind::Write => op.pairs.iter().map(|pair| pair.to).collect(),
        };
        Ok((op_kind, command(&table, &theirs)?))
    }

    /// What an operation of the mover asks of the peer, or why it cannot be asked.
    pub(super) fn translate(
        &self,
        op: &LinkOp,
        memory: &Memory,
        deadline_us: u64,
    ) -> Result<Operation, String> {
        let table = self.table.read();
        let op_kind = op_kind(&table, op)?;
        let (theirs, ours): (Vec<Span>, Vec<Span>) = match op_kind {
            OpKind::Read => op.pairs.iter().map(|pair| (pair.from, pair.to)).unzip(),
            OpKind::Write => op.pairs.iter().map(|pair| (pair.to, pair.from)).unzip(),
        };
        let command = command(&table, &theirs)?;
        let pieces = pieces(memory, &ours, op_kind == OpKind::Read)?;
        // SAFETY: the mover keeps the regions of an operation registered, and so their memory in
        // place, until the operation has ended, which is after its payload is gone.
        let payload = unsafe { Payload::new(pieces, Arc::new([])) };
        Ok(Operation { op_kind, command, payload, deadline_us })
    }
}

fn op_kind(table: &HashMap<RegionId, Known>, op: &LinkOp) -> Result<OpKind, String> {
    let first = op.pairs.first().ok_or("an operation without spans")?;
    Ok(if table.contains_key(&first.from.region) { OpKind::Read } else { OpKind::Write })
}

/// The spans of peers' regions, one section for each run of spans in the same region.
fn command(table: &HashMap<RegionId, Known>, spans: &[Span]) -> Result<Command, String> {
    let mut command = Command::default();
    for spans in spans.chunk_by(|one, next| one.region == next.region) {
        let known = table.get(&spans[0].region);
        let Known { region, lease } =
            known.ok_or_else(|| format!("{:?} is no region of a peer", spans[0].region))?;
        let runs = runs(spans.iter().map(|span| (span.offset, span.len)));
        command.sections.push(Section {
            key: region.key,
            generation: region.generation,
            lease: *lease,
            runs,
        });
    }
    Ok(command)
}

/// The addresses of spans of host memory. Their regions are looked up once each, not once a span.
fn pieces(memory: &Memory, spans: &[Span], are_written: bool) -> Result<Vec<Stretch>, String> {
    let mut parts: Vec<Span> = Vec::new();
    for span in spans {
        let end = span.offset.saturating_add(span.len);
        match parts.iter_mut().find(|part| part.region == span.region) {
            Some(part) => part.len = part.len.max(end),
            None => parts.push(Span::new(span.region, 0, end)),
        }
    }
    let start = |part: &Span| {
        let found = if are_written { memory.target(part) } else { memory.host(part) };
        let missing = || format!("{part:?} is not host memory, or is not mapped any more");
        found.map(|(start, _)| (part.region, start)).ok_or_else(missing)
    };
    let starts = parts.iter().map(start).collect::<Result<Vec<(RegionId, NonNull<u8>)>, String>>()?;
    let piece = |span: &Span| {
        let (_, start) = starts.iter().find(|(region, _)| *region == span.region)?;
        // SAFETY: the memory table has checked that the region reaches to the end of the span.
        let start = unsafe { start.add(span.offset as usize) };
        Some(Stretch::Host(Piece { start, len: span.len as usize }))
    };
    Ok(spans.iter().filter(|span| span.len > 0).filter_map(piece).collect())
}
