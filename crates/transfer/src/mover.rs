//! The mover: the schedule as a sans-IO state machine. Callers submit transfers and report what
//! completed; the mover says what to start next and how each transfer ended. Time is an argument.

mod pull;
mod settle;

use crate::link::{LinkId, LinkSpec, LinkState};
use crate::lot::{Leg, Lot};
use crate::path::{PathError, PathId, PathSpec, PathState, SlotTable, Staging, StagingSlots};
use crate::queue::{Fairness, PlacePair, Rank, Waiting};
use crate::region::Refused;
use crate::region::{Place, RegionId, RegionTable, Span, SpanPair};
use crate::telemetry::{ClassTelemetry, LinkTelemetry, Telemetry};
use crate::transfer::{Class, End, Reason, Transfer, TransferId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Names an operation: one hop of one lot, started once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(u64);

/// How much a mover takes on.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Transfers that have not ended, at most.
    pub transfers: usize,
    /// Pairs in one transfer, at most.
    pub pairs_per_transfer: usize,
    /// Attempts that a lot gets, over all paths, before its transfer fails.
    pub attempts: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { transfers: 65_536, pairs_per_transfer: 4 << 20, attempts: 4 }
    }
}

/// An operation to start now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// To be named when it completes.
    pub op: OpId,
    /// The link to start it on.
    pub link: LinkId,
    pub pairs: Vec<SpanPair>,
    pub bytes: u64,
}

/// Something that callers wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Ended(TransferId, End),
    /// Spans that were quarantined when their transfer ended are touched by nobody any more.
    Quiet(TransferId, Vec<Span>),
}

/// The schedule.
#[derive(Debug)]
pub struct Mover {
    limits: Limits,
    regions: RegionTable,
    links: Vec<LinkState>,
    fairness: Vec<Fairness>,
    paths: Vec<PathState>,
    slots: SlotTable,
    place_pairs: Vec<PlacePair>,
    place_pair_of: HashMap<(Place, Place), usize>,
    transfers: HashMap<TransferId, Active>,
    /// Lots between two hops, or in the middle of one after a short copy; guests last, then by
    /// class, then by age.
    ready: BTreeMap<(bool, Class, u64), Lot>,
    ops: HashMap<OpId, Op>,
    expiries: BTreeSet<(u64, OpId)>,
    events: VecDeque<Event>,
    link_counters: Vec<LinkTelemetry>,
    class_counters: [ClassTelemetry; Class::ALL.len()],
    next_transfer: u64,
    next_op: u64,
    next_ready: u64,
    /// When nothing could be started. A back-off that ends after that has to be told of, however
    /// late it is asked.
    polled_us: u64,
}

/// A transfer's parts by place pair.
type Legs = Vec<(usize, Leg)>;

/// A transfer that has not ended.
#[derive(Debug)]
struct Active {
    class: Class,
    deadline_us: Option<u64>,
    submitted_us: u64,
    legs: Legs,
    /// Every region that it names.
    regions: Vec<RegionId>,
    /// Lots that were cut and have neither arrived nor been given up.
    lots: u32,
    /// Of these, lots with an operation in flight.
    in_flight: u32,
    moved_bytes: u64,
    unmoved: Vec<SpanPair>,
    quarantined: Vec<Span>,
    /// Set once nothing more is started for it.
    ending: Option<Ending>,
}

#[derive(Debug)]
enum Ending {
    Cancelled,
    Failed(Reason),
}

/// An operation in flight.
#[derive(Debug)]
struct Op {
    lot: Lot,
    link: usize,
    guest: bool,
    bytes: u64,
    started_us: u64,
    expires_us: u64,
    /// It overran its limit; its transfer has gone on without it.
    lost: bool,
}

/// Pairs by place pair, given the place pair and the length of each run of them.
fn legs(pairs: Vec<SpanPair>, runs: &[(usize, usize)]) -> Legs {
    let Some((place_pair, _)) = runs.first() else { return Legs::new() };
    if runs.iter().all(|(other, _)| other == place_pair) {
        return vec![(*place_pair, Leg::of(pairs))];
    }
    let mut legs = Legs::new();
    let mut pairs = pairs.into_iter();
    for (place_pair, len) in runs {
        let leg = legs.iter().position(|(known, _)| known == place_pair).unwrap_or_else(|| {
            legs.push((*place_pair, Leg::of(Vec::new())));
            legs.len() - 1
        });
        pairs.by_ref().take(*len).for_each(|pair| legs[leg].1.push(pair));
    }
    legs
}

impl Active {
    fn waiting(&self, id: TransferId, leg: usize) -> Waiting {
        Waiting { rank: Rank { deadline_us: self.deadline_us.unwrap_or(u64::MAX), transfer: id }, leg }
    }
}

impl Mover {
    pub fn new(limits: Limits) -> Mover {
        Mover {
            limits,
            regions: RegionTable::default(),
            links: Vec::new(),
            fairness: Vec::new(),
            paths: Vec::new(),
            slots: SlotTable::default(),
            place_pairs: Vec::new(),
            place_pair_of: HashMap::new(),
            transfers: HashMap::new(),
            ready: BTreeMap::new(),
            ops: HashMap::new(),
            expiries: BTreeSet::new(),
            events: VecDeque::new(),
            link_counters: Vec::new(),
            class_counters: Default::default(),
            next_transfer: 0,
            next_op: 0,
            next_ready: 0,
            polled_us: 0,
        }
    }

    pub fn add_region(&mut self, place: Place, len: u64) -> RegionId {
        self.regions.add(place, len)
    }

    /// Forgets a region. Refused while a transfer that has not ended, or a lost operation, uses it.
    pub fn remove_region(&mut self, region: RegionId) -> Result<(), Refused> {
        self.regions.remove(region)
    }

    pub fn add_link(&mut self, spec: LinkSpec) -> LinkId {
        self.link_counters.push(LinkTelemetry { name: spec.name.clone(), ..LinkTelemetry::default() });
        self.links.push(LinkState::new(spec));
        self.fairness.push(Fairness::default());
        LinkId(self.links.len() as u32 - 1)
    }

    /// Adds a path over links that exist and staging that is registered. Its staging regions stay
    /// in use for good.
    pub fn add_path(&mut self, spec: PathSpec) -> Result<PathId, PathError> {
        self.check_path(&spec)?;
        let slots = spec.staging.iter().map(|staging| self.slots_of(staging)).collect();
        let id = PathId(self.paths.len() as u32);
        let place_pair = *self.place_pair_of.entry((spec.from, spec.to)).or_insert_with(|| {
            self.place_pairs.push(PlacePair::new(spec.from, spec.to));
            self.place_pairs.len() - 1
        });
        self.place_pairs[place_pair].paths.push(id);
        self.paths.push(PathState::new(spec, place_pair, slots));
        Ok(id)
    }

    /// The index of a staging's slots, which are there from the first path on that has it.
    fn slots_of(&mut self, staging: &Staging) -> usize {
        let known = self.slots.all.iter().position(|slots| slots.staging == *staging);
        known.unwrap_or_else(|| {
            self.regions.hold(staging.region);
            self.slots.all.push(StagingSlots::new(*staging));
            self.slots.all.len() - 1
        })
    }

    fn check_path(&self, spec: &PathSpec) -> Result<(), PathError> {
        if spec.hops.is_empty() || spec.staging.len() + 1 != spec.hops.len() {
            return Err(PathError::Shape { hops: spec.hops.len(), staging: spec.staging.len() });
        }
        if let Some(hop) = spec.hops.iter().find(|hop| hop.link.0 as usize >= self.links.len()) {
            return Err(PathError::UnknownLink(hop.link));
        }
        for staging in &spec.staging {
            let (slots, slot_bytes) = (staging.slots, staging.slot_bytes);
            if slots == 0 || slot_bytes == 0 {
                return Err(PathError::EmptyStaging { slots, slot_bytes });
            }
            let mut known = self.slots.all.iter().map(|slots| slots.staging);
            if let Some(known) = known.find(|known| known.region == staging.region && known != staging) {
                let (region, known, known_bytes) = (known.region, known.slots, known.slot_bytes);
                return Err(PathError::CutOtherwise { region, known, known_bytes, slots, slot_bytes });
            }
            let all = u64::from(slots).saturating_mul(slot_bytes);
            self.regions.place_of(&Span::new(staging.region, 0, all))?;
        }
        Ok(())
    }

    /// Accepts a transfer. It ends exactly once, with an [`Event::Ended`]. A transfer without pairs
    /// ends at once.
    pub fn submit(&mut self, now_us: u64, transfer: Transfer) -> Result<TransferId, Refused> {
        let (legs, regions) = self.admit(transfer.pairs)?;
        let id = TransferId(self.next_transfer);
        self.next_transfer += 1;
        for region in &regions {
            self.regions.hold(*region);
        }
        let active = Active {
            class: transfer.class,
            deadline_us: transfer.deadline_us,
            submitted_us: now_us,
            legs,
            regions,
            lots: 0,
            in_flight: 0,
            moved_bytes: 0,
            unmoved: Vec::new(),
            quarantined: Vec::new(),
            ending: None,
        };
        for (index, (place_pair, leg)) in active.legs.iter().enumerate() {
            self.place_pairs[*place_pair].waiting_bytes += leg.remaining_bytes();
            self.place_pairs[*place_pair].insert(active.class, active.waiting(id, index));
        }
        self.transfers.insert(id, active);
        self.settle(now_us, id);
        Ok(id)
    }

    /// Checks a transfer's pairs and sorts them by place pair. Blocks of one transfer lie in few
    /// regions, so that is looked at once for each run of pairs between the same two.
    fn admit(&self, pairs: Vec<SpanPair>) -> Result<(Legs, Vec<RegionId>), Refused> {
        let (queued, limit) = (self.transfers.len(), self.limits.transfers);
        if queued >= limit {
            return Err(Refused::TooManyTransfers { queued, limit });
        }
        let (given, limit) = (pairs.len(), self.limits.pairs_per_transfer);
        if given > limit {
            return Err(Refused::TooManyPairs { pairs: given, limit });
        }
        let (mut runs, mut regions) = (Vec::new(), BTreeSet::new());
        for run in pairs.chunk_by(|one, next| one.between() == next.between()) {
            regions.extend(<[RegionId; 2]>::from(run[0].between()));
            runs.push((self.place_pair_for(run)?, run.len()));
        }
        Ok((legs(pairs, &runs), regions.into_iter().collect()))
    }

    /// The place pair of pairs between the same two regions, which hold all of them.
    fn place_pair_for(&self, run: &[SpanPair]) -> Result<usize, Refused> {
        let unequal = |pair: &&SpanPair| pair.from.len != pair.to.len || pair.from.len == 0;
        if let Some(pair) = run.iter().find(unequal) {
            return Err(Refused::Length { from_bytes: pair.from.len, to_bytes: pair.to.len });
        }
        let from = self.regions.place_of_all(run[0].from.region, run.iter().map(|pair| &pair.from))?;
        let to = self.regions.place_of_all(run[0].to.region, run.iter().map(|pair| &pair.to))?;
        let place_pair = self.place_pair_of.get(&(from, to)).copied();
        place_pair
            .filter(|place_pair| self.place_pair_is_live(*place_pair))
            .ok_or(Refused::NoPath { from, to })
    }

    fn place_pair_is_live(&self, place_pair: usize) -> bool {
        self.place_pairs[place_pair].paths.iter().any(|path| self.path_is_live(*path))
    }

    fn path_is_live(&self, path: PathId) -> bool {
        let path = &self.paths[path.0 as usize];
        let mut hops = path.spec.hops.iter();
        hops.all(|hop| self.links[hop.link.0 as usize].is_live(hop.guest))
            && self.slots.are_live_from(path, 0)
    }

    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The next thing that callers wait for, in the order in which it happened.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When to call [`expire`](Mover::expire) and [`poll`](Mover::poll) again at the latest, even
    /// if nothing completes. That may be in the past: what has changed since the last poll, changed
    /// after it.
    pub fn next_timeout_us(&self) -> Option<u64> {
        let expiry = self.expiries.first().map(|(expires_us, _)| *expires_us);
        let work = !self.ready.is_empty() || self.place_pairs.iter().any(|place_pair| !place_pair.is_empty());
        let backoffs = self.links.iter().filter_map(|link| link.backoff_ends_us(self.polled_us));
        backoffs.filter(|_| work).chain(expiry).min()
    }

    pub fn telemetry(&self) -> Telemetry {
        let links = self.links.iter().zip(&self.link_counters).map(|(state, counters)| LinkTelemetry {
            down: state.down,
            in_flight_lots: state.load.lots,
            in_flight_bytes: state.load.bytes,
            rate_bytes_per_s: state.last_rate_bytes_per_s(),
            ..counters.clone()
        });
        Telemetry {
            links: links.collect(),
            classes: self.class_counters.clone(),
            transfers_active: self.transfers.len(),
            waiting_bytes: self.place_pairs.iter().map(|place_pair| place_pair.waiting_bytes).sum(),
        }
    }
}
