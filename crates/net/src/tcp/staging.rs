//! Staging of a connection: pinned host memory through which bytes of GPUs pass between the wire
//! and where they lie. A part has one slot, so that one is copied while others are on the wire.
//! Knows slots and which of them are being copied; the mover copies.

use super::frame::DATA_BYTES_MAX;
use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{Backing, Class, End, MoverHandle, Place, RegionId, Span, SpanPair, Transfer};
use std::ptr::NonNull;
use std::sync::Arc;

/// Slots of a connection in each direction, of [`DATA_BYTES_MAX`] bytes each. One is on the wire,
/// one is copied, and the others cover for the threads in between.
pub const STAGING_SLOTS: u32 = 4;

/// Gives as many bytes of pinned host memory as it is asked for, or says why it cannot.
pub type StagingMemory = Arc<dyn Fn(usize) -> Result<Arc<dyn Backing>, String> + Send + Sync>;

/// What copies between memory of GPUs and staging.
pub struct Stager {
    pub mover: MoverHandle,
    /// Where staging lies.
    pub here: Place,
    pub memory: StagingMemory,
}

/// Told when a copy has ended.
pub(super) type Wake = Arc<dyn Fn() + Send + Sync>;

/// A slot that is somebody's. It goes back by [`Staging::give_back`].
pub(super) struct Slot(u32);

impl Slot {
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// Where a slot lies, for the CPU and for the mover.
#[derive(Clone, Copy)]
pub(super) struct SlotPlace {
    pub start: NonNull<u8>,
    pub span: Span,
}

/// How a copy has ended.
pub(super) struct CopyEnd {
    pub operation: u64,
    pub number: u32,
    /// `None`: something may still touch it.
    pub slot: Option<Slot>,
    pub outcome: Result<(), String>,
}

/// The slots of one direction. Dropping it waits for the copies that are under way.
pub(super) struct Staging {
    mover: MoverHandle,
    region: RegionId,
    memory: Arc<dyn Backing>,
    copies: Arc<Copies>,
}

struct Copies {
    state: Mutex<State>,
    quiet: Condvar,
    wake: Wake,
}

struct State {
    free: Vec<Slot>,
    ended: Vec<CopyEnd>,
    under_way: usize,
    lost: u32,
}

impl Staging {
    pub fn open(stager: &Stager, wake: &Wake) -> Result<Staging, String> {
        let memory = (stager.memory)(STAGING_SLOTS as usize * DATA_BYTES_MAX as usize)?;
        let region = stager.mover.register(stager.here, Arc::clone(&memory));
        let region = region.map_err(|closed| closed.to_string())?;
        let free = (0..STAGING_SLOTS).map(Slot).collect();
        let state = Mutex::new(State { free, ended: Vec::new(), under_way: 0, lost: 0 });
        let copies = Arc::new(Copies { state, quiet: Condvar::default(), wake: Arc::clone(wake) });
        Ok(Staging { mover: stager.mover.clone(), region, memory, copies })
    }

    pub fn take(&self) -> Option<Slot> {
        self.copies.state.lock().free.pop()
    }

    pub fn give_back(&self, slot: Slot) {
        self.copies.state.lock().free.push(slot);
    }

    /// Whether no slot will ever be free again: copies were given up that may still touch them.
    pub fn is_lost(&self) -> bool {
        self.copies.state.lock().lost == STAGING_SLOTS
    }

    pub fn place(&self, slot: &Slot) -> Option<SlotPlace> {
        let offset = slot.0 as usize * DATA_BYTES_MAX as usize;
        // SAFETY: the memory has all slots, so the start of one lies inside.
        let start = NonNull::new(unsafe { self.memory.as_ptr().add(offset) })?;
        Some(SlotPlace { start, span: Span::new(self.region, offset as u64, DATA_BYTES_MAX.into()) })
    }

    /// Copies between a slot and memory of GPUs. `keep` is dropped when nothing is under way any
    /// more; then the end is found in [`take_ended`](Staging::take_ended).
    pub fn copy(&self, operation: u64, slot: Slot, pairs: Vec<SpanPair>, keep: impl Send + 'static) {
        self.copies.state.lock().under_way += 1;
        let number = slot.number();
        let copies = Arc::clone(&self.copies);
        let under_way = UnderWay { copies, operation, number, slot: Some(slot), keep: Some(Box::new(keep)) };
        let on_end = move |end| under_way.finish(&end);
        // A mover that has ended drops what is under way, which ends it.
        let _ = self.mover.submit(Transfer::new(pairs, Class::Demand), on_end);
    }

    pub fn take_ended(&self) -> Vec<CopyEnd> {
        std::mem::take(&mut self.copies.state.lock().ended)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let mut state = self.copies.state.lock();
        self.copies.quiet.wait_while(&mut state, |state| state.under_way > 0);
        drop(state);
        // Refused where a copy was given up: then the mover keeps the memory for good.
        let _ = self.mover.unregister(self.region);
    }
}

/// A copy that has not ended. Ends exactly once, also where the mover has ended.
struct UnderWay {
    copies: Arc<Copies>,
    operation: u64,
    number: u32,
    slot: Option<Slot>,
    keep: Option<Box<dyn Send>>,
}

impl UnderWay {
    fn finish(mut self, end: &End) {
        match end {
            End::Done { .. } => self.end(Ok(())),
            End::Failed(failure) => {
                if !failure.quarantined.is_empty() {
                    self.slot = None;
                }
                self.end(Err(failure.reason.to_string()));
            }
            End::Cancelled { .. } => self.end(Err("the copy was cancelled".into())),
        }
    }

    fn end(&mut self, outcome: Result<(), String>) {
        self.keep = None;
        let UnderWay { operation, number, .. } = *self;
        let mut state = self.copies.state.lock();
        let slot = self.slot.take();
        state.lost += u32::from(slot.is_none());
        state.ended.push(CopyEnd { operation, number, slot, outcome });
        state.under_way -= 1;
        drop(state);
        self.operation = 0;
        self.copies.quiet.notify_all();
        (self.copies.wake)();
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // Operations are counted from 1; of one that has ended there is no number left.
        if self.operation > 0 {
            self.end(Err("the mover has ended".into()));
        }
    }
}
