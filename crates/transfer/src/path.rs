//! Paths: hops between two places, joined by staging slots.

use crate::link::LinkId;
use crate::region::Refused;
use crate::region::{Place, RegionId, Span};
use thiserror::Error;

/// Names a path of a mover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub(crate) u32);

/// One hop of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hop {
    pub link: LinkId,
    /// A guest uses a link that belongs to somebody else's traffic: it yields to every lot that is
    /// not a guest, and has at most [`MAX_LOT_BYTES`](crate::MAX_LOT_BYTES) in flight there.
    pub guest: bool,
}

/// StagingSlots between two hops, side by side in one region from offset 0. Paths with the same
/// staging share its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staging {
    /// Registered memory that nobody else uses.
    pub region: RegionId,
    /// Size of a slot; no lot on the path is larger.
    pub slot_bytes: u64,
    /// How many there are. Two let the hops overlap.
    pub slots: u32,
}

/// A way from one place to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSpec {
    pub from: Place,
    pub to: Place,
    /// The hops in order; at least one.
    pub hops: Vec<Hop>,
    /// What lies between them: one fewer than hops.
    pub staging: Vec<Staging>,
}

impl PathSpec {
    pub fn direct(from: Place, to: Place, link: LinkId) -> PathSpec {
        PathSpec { from, to, hops: vec![Hop { link, guest: false }], staging: Vec::new() }
    }

    /// A path of two hops over staging. Where `guest` is set, both hops are guests of their links.
    pub fn relayed(from: Place, to: Place, links: [LinkId; 2], staging: Staging, guest: bool) -> PathSpec {
        let hops = links.map(|link| Hop { link, guest }).to_vec();
        PathSpec { from, to, hops, staging: vec![staging] }
    }
}

/// Why a path was not added.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PathError {
    #[error("a path needs at least one hop and one staging fewer than hops: {hops} hops, {staging} stagings")]
    Shape { hops: usize, staging: usize },
    #[error("link {0:?} does not exist")]
    UnknownLink(LinkId),
    #[error("staging needs slots and bytes above 0: {slots} slots of {slot_bytes} bytes")]
    EmptyStaging { slots: u32, slot_bytes: u64 },
    #[error(
        "staging {region:?} has {known} slots of {known_bytes} bytes on another path, not {slots} of {slot_bytes}"
    )]
    CutOtherwise { region: RegionId, known: u32, known_bytes: u64, slots: u32, slot_bytes: u64 },
    #[error("staging: {0}")]
    Staging(#[from] Refused),
}

/// The slots of one staging, and which are free.
#[derive(Debug)]
pub(crate) struct StagingSlots {
    pub staging: Staging,
    free: Vec<u32>,
    /// How many are kept by operations that were given up, perhaps for ever.
    lost: u32,
}

impl StagingSlots {
    pub fn new(staging: Staging) -> StagingSlots {
        StagingSlots { staging, free: (0..staging.slots).rev().collect(), lost: 0 }
    }

    /// `len` bytes at `offset` of a slot.
    fn span(&self, slot: u32, offset: u64, len: u64) -> Span {
        let Staging { region, slot_bytes, .. } = self.staging;
        debug_assert!(offset + len <= slot_bytes);
        Span::new(region, u64::from(slot) * slot_bytes + offset, len)
    }
}

/// All slots of a mover.
#[derive(Debug, Default)]
pub(crate) struct SlotTable {
    pub all: Vec<StagingSlots>,
}

impl SlotTable {
    /// Whether the staging behind `hop` of a path, if there is one, has a free slot.
    pub fn has_behind(&self, path: &PathState, hop: usize) -> bool {
        path.slots.get(hop).is_none_or(|slots| !self.all[*slots].free.is_empty())
    }

    /// Whether every staging of a path from the one behind `hop` on has a slot at some time, if
    /// nothing that is lost ever completes.
    pub fn are_live_from(&self, path: &PathState, hop: usize) -> bool {
        let mut stagings = path.slots[hop..].iter().map(|slots| &self.all[*slots]);
        stagings.all(|slots| slots.lost < slots.staging.slots)
    }

    /// Notes that the slots of a lot are kept by an operation that was given up.
    pub fn lose(&mut self, path: &PathState, held: impl Iterator<Item = (usize, u32)>) {
        held.for_each(|(staging, _)| self.all[path.slots[staging]].lost += 1);
    }

    /// Notes that this operation has completed after all.
    pub fn find(&mut self, path: &PathState, held: impl Iterator<Item = (usize, u32)>) {
        held.for_each(|(staging, _)| self.all[path.slots[staging]].lost -= 1);
    }

    /// Takes a slot of the staging behind `hop` of a path, if there is one.
    pub fn take_behind(&mut self, path: &PathState, hop: usize) -> Option<u32> {
        self.all[*path.slots.get(hop)?].free.pop()
    }

    /// Gives back a slot of the staging behind `hop` of a path.
    pub fn give_back(&mut self, path: &PathState, hop: usize, slot: u32) {
        let free = &mut self.all[path.slots[hop]].free;
        debug_assert!(!free.contains(&slot), "a slot is given back once");
        free.push(slot);
    }

    /// `len` bytes at `offset` of a slot behind `hop` of a path.
    pub fn span(&self, path: &PathState, hop: usize, slot: u32, offset: u64, len: u64) -> Span {
        self.all[path.slots[hop]].span(slot, offset, len)
    }
}

/// A path at work.
#[derive(Debug)]
pub(crate) struct PathState {
    pub spec: PathSpec,
    /// Index of the place pair that it serves.
    pub place_pair: usize,
    /// Bytes of the lots that are on it.
    pub in_flight_bytes: u64,
    /// Indices of its stagings' slots.
    slots: Vec<usize>,
}

impl PathState {
    pub fn new(spec: PathSpec, place_pair: usize, slots: Vec<usize>) -> PathState {
        PathState { spec, place_pair, in_flight_bytes: 0, slots }
    }

    pub fn last_hop(&self) -> usize {
        self.spec.hops.len() - 1
    }
}
