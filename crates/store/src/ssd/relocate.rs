//! Relocating a chunk forward: out of a segment that is to be reclaimed, verified, into a new slot
//! with a footer of its own. This file knows these steps.

use super::crypt::TenantKeys;
use super::in_flight::Permit;
use super::inner::{Broken, SsdInner};
use super::pool::{NotStaged, StagingBlock};
use crate::log::{DiskPlace, Fault, Footer, PAGE_BYTES, Relocation, RelocationEnd, crc32c};
use forebay_transfer::{Class, End, SpanPair, Transfer};
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;

/// Writers wait for the room that this makes, readers do not.
const CLASS: Class = Class::WriteBack;

const FAILED: RelocationEnd = RelocationEnd::Failed { read_lost_bytes: 0, write_lost_bytes: 0 };

/// A chunk on its way. Dropped before it ended, it stays where it was.
pub(super) struct Relocating {
    shared: Arc<SsdInner>,
    relocation: Option<Relocation>,
    held: Option<StagingBlock>,
    _permit: Permit,
}

impl Relocating {
    /// Begins. A store that is being closed relocates nothing more.
    pub fn start(shared: &Arc<SsdInner>, relocation: Relocation) {
        let Ok(permit) = shared.reads.acquire() else {
            return shared.end_relocation(relocation, FAILED);
        };
        let length = relocation.read.shape.stride_bytes();
        let relocating = Relocating {
            shared: Arc::clone(shared),
            relocation: Some(relocation),
            held: None,
            _permit: permit,
        };
        shared.staging.reserve(vec![length], None, move |held| relocating.staged(held));
    }

    fn staged(mut self, held: Result<Vec<StagingBlock>, NotStaged>) {
        let Ok(Some(held)) = held.map(|mut held| held.pop()) else { return };
        self.held = Some(held);
        let mover = self.shared.mover.clone();
        if let Some(pair) = self.pair(|relocation| &relocation.read) {
            // A mover that takes nothing in drops the relocation, which ends it.
            let pair = SpanPair::new(pair.to, pair.from);
            let _ = mover.submit(Transfer::new(vec![pair], CLASS), move |end| self.was_read(end));
        }
    }

    /// From staging to one of the two slots.
    fn pair(&self, slot: impl Fn(&Relocation) -> &DiskPlace) -> Option<SpanPair> {
        let (relocation, held) = (self.relocation.as_ref()?, self.held.as_ref()?);
        let stride = relocation.read.shape.stride_bytes();
        Some(SpanPair::new(held.span(0..stride), self.shared.slot_span(slot(relocation), 0..stride)))
    }

    /// The old slot is in staging, or not; on the mover's thread.
    fn was_read(mut self, end: End) {
        let threads = Arc::clone(&self.shared.threads);
        match Broken::of(end) {
            None => threads.run(move || self.rewrite()),
            Some(broken) => self.fail(&broken),
        }
    }

    /// Verifies the chunk, gives it the footer of its new slot and submits the write.
    fn rewrite(mut self) {
        let (Some(relocation), Some(held)) = (&self.relocation, &mut self.held) else { return };
        match renamed(&self.shared.keys, relocation, held) {
            Err(fault) => {
                if let Some(fault) = &fault {
                    self.shared.counts.lock().corrupt += 1;
                    let read = &relocation.read;
                    self.shared.lines.corrupt(self.shared.path_of(read), &read.copy, fault);
                }
                self.end(if fault.is_some() { RelocationEnd::Corrupt } else { FAILED });
            }
            Ok(()) => {
                let mover = self.shared.mover.clone();
                if let Some(pair) = self.pair(|relocation| &relocation.write) {
                    let _ = mover.submit(Transfer::new(vec![pair], CLASS), move |end| self.was_written(end));
                }
            }
        }
    }

    /// The new slot has it, or not; on the mover's thread.
    fn was_written(mut self, end: End) {
        let threads = Arc::clone(&self.shared.threads);
        match Broken::of(end) {
            None => threads.run(move || self.end(RelocationEnd::Written)),
            Some(broken) => self.fail(&broken),
        }
    }

    fn fail(&mut self, broken: &Broken) {
        self.shared.counts.lock().io_faults += 1;
        let mut end = FAILED;
        if let Some(relocation) = &self.relocation {
            self.shared.lines.relocation_failed(self.shared.path_of(&relocation.read), &broken.reason);
            end = RelocationEnd::Failed {
                read_lost_bytes: self.shared.lost_bytes(&relocation.read, &broken.quarantined),
                write_lost_bytes: self.shared.lost_bytes(&relocation.write, &broken.quarantined),
            };
        }
        if let Some(held) = self.held.take() {
            held.end(&broken.quarantined);
        }
        self.end(end);
    }

    fn end(&mut self, end: RelocationEnd) {
        self.held = None;
        if let Some(relocation) = self.relocation.take() {
            self.shared.end_relocation(relocation, end);
        }
    }
}

impl Drop for Relocating {
    fn drop(&mut self) {
        self.end(FAILED);
    }
}

/// Verifies what was read of the old slot and makes it what the new slot is to hold. Layers that
/// are encrypted are encrypted anew, since encryption is bound to the copy. An error without a
/// fault means that the tenant's key is not here.
fn renamed(keys: &TenantKeys, relocation: &Relocation, held: &mut StagingBlock) -> Result<(), Option<Fault>> {
    let Relocation { read, write } = relocation;
    let shape = &read.shape;
    let footer_page = shape.footer_at()..shape.footer_at() + PAGE;
    let old = Footer::of(&read.copy, held.slice(footer_page.clone()))?;
    let mut crcs = old.crcs();
    for (layer, crc) in crcs.iter_mut().enumerate() {
        let place = shape.layer(layer).unwrap_or(0..0);
        old.verify(layer, &[held.slice(place.clone())])?;
        if old.encrypted {
            let bytes = held.slice_mut(place);
            let number = layer as u16;
            keys.decrypt_layer(old.tenant, &old.copy, number, bytes).map_err(|_| None)?;
            keys.encrypt_layer(old.tenant, &write.copy, number, bytes).map_err(|_| None)?;
            *crc = crc32c(bytes);
        }
    }
    let new = Footer::new(write.copy, old.tenant, old.parent, Arc::clone(&write.shape), &crcs);
    held.slice_mut(footer_page).copy_from_slice(&new.with_encrypted(old.encrypted).encode());
    Ok(())
}
