//! What starts next. An idle path pulls the next eligible lot: owners of a link before guests, lots
//! that are under way before new ones, the most urgent class first, direct paths before longer
//! ones.

use super::{Mover, Op, OpId, Start};
use crate::link::LinkState;
use crate::lot::{Lot, MAX_LOT_BYTES, MIN_LOT_BYTES, lot_bytes};
use crate::path::{PathId, PathState};
use crate::queue::{Rank, Waiting};
use crate::transfer::Class;

/// A path that could take a lot now. The order of the fields is the order of precedence.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    precedence: (bool, Class),
    hops: usize,
    rank: Rank,
    path: usize,
    waiting: Waiting,
    bytes: u64,
}

/// A place in a link's window.
#[derive(Debug, Clone, Copy)]
struct Pass {
    /// Whether it is the first one: nothing is in flight.
    idle: bool,
    guest: bool,
}

impl Pass {
    fn considers(self, link: &LinkState) -> bool {
        !self.idle || link.load.lots == 0
    }
}

impl Mover {
    /// The next operation to start, or `None` when nothing can start before something completes, is
    /// submitted or times out. Call it until it returns `None`.
    ///
    /// Links with nothing in flight come first, owners before guests, so that all of them are at
    /// work before one has its window full. On each link its owner's lots still go before any
    /// guest's.
    pub fn poll(&mut self, now_us: u64) -> Option<Start> {
        for (idle, guest) in [(true, false), (true, true), (false, false), (false, true)] {
            let pass = Pass { idle, guest };
            let lot = self.take_ready(now_us, pass).or_else(|| self.pull_lot(now_us, pass));
            if let Some(lot) = lot {
                return Some(self.start(now_us, lot));
            }
        }
        self.polled_us = now_us;
        None
    }

    /// The first lot under way whose next hop has room.
    fn take_ready(&mut self, now_us: u64, pass: Pass) -> Option<Lot> {
        let fits = |lot: &Lot| {
            let path = &self.paths[lot.path.0 as usize];
            let link = &self.links[path.spec.hops[lot.hop].link.0 as usize];
            let has_slot = lot.slots.len() > lot.hop || self.slots.has_behind(path, lot.hop);
            has_slot
                && pass.considers(link)
                && link.admits(now_us, lot.cut.bytes - lot.hop_done_bytes, pass.guest)
        };
        let mut ready = self.ready.iter().filter(|((is_guest, ..), _)| *is_guest == pass.guest);
        let key = ready.find(|(_, lot)| fits(lot)).map(|(key, _)| *key)?;
        let lot = self.ready.remove(&key);
        lot.map(|lot| Lot { staged_us: lot.staged_us + now_us.saturating_sub(lot.ready_since_us), ..lot })
    }

    /// Cuts a new lot for the path with the highest precedence.
    fn pull_lot(&mut self, now_us: u64, pass: Pass) -> Option<Lot> {
        let waiting = self.place_pairs.iter().filter(|place_pair| !place_pair.is_empty());
        let paths = waiting.flat_map(|place_pair| &place_pair.paths).map(|path| path.0 as usize);
        let best = paths.filter_map(|path| self.candidate(now_us, path, pass)).min()?;
        let path = &mut self.paths[best.path];
        let place_pair = &mut self.place_pairs[path.place_pair];
        let transfer = self.transfers.get_mut(&best.rank.transfer)?;
        let (class, leg) = (transfer.class, &mut transfer.legs[best.waiting.leg].1);
        let cut = leg.cut(best.bytes)?;
        let exhausted = leg.remaining_bytes() == 0;
        transfer.lots += 1;
        place_pair.waiting_bytes -= cut.bytes;
        path.in_flight_bytes += cut.bytes;
        let counters = &mut self.class_counters[class.index()];
        counters.queued_us += now_us.saturating_sub(transfer.submitted_us);
        let link = path.spec.hops[0].link;
        let on_link = |other: &&PathState| other.spec.hops[0].link == link;
        let waits = |class| {
            self.paths.iter().filter(on_link).any(|path| self.place_pairs[path.place_pair].waits(class))
        };
        self.fairness[link.0 as usize].served(class, waits);
        if exhausted {
            self.place_pairs[self.paths[best.path].place_pair].remove(class, &best.waiting);
        }
        Some(Lot {
            transfer: best.rank.transfer,
            leg: best.waiting.leg,
            path: PathId(best.path as u32),
            cut,
            hop: 0,
            hop_done_bytes: 0,
            slots: Vec::new(),
            ready_since_us: now_us,
            staged_us: 0,
            moved_us: 0,
        })
    }

    /// What `path` would pull now.
    fn candidate(&self, now_us: u64, path: usize, pass: Pass) -> Option<Candidate> {
        let state = &self.paths[path];
        let hop = state.spec.hops[0];
        let place_pair = &self.place_pairs[state.place_pair];
        let link = &self.links[hop.link.0 as usize];
        let guest = pass.guest;
        let fits = hop.guest == guest && pass.considers(link) && self.slots.has_behind(state, 0);
        let may_start = fits && link.admits(now_us, 1, guest);
        if !may_start || !self.path_is_live(PathId(path as u32)) {
            return None;
        }
        let fairness = &self.fairness[hop.link.0 as usize];
        let waiting_classes = Class::ALL.into_iter().filter(|class| place_pair.waits(*class));
        let class = waiting_classes.min_by_key(|class| fairness.precedence(*class))?;
        let waiting = place_pair.first(class)?;
        let leg = &self.transfers.get(&waiting.rank.transfer)?.legs[waiting.leg].1;
        let sizes = self.lot_sizes(now_us, state);
        let bytes = lot_bytes(leg.remaining_bytes(), self.share(now_us, path), sizes);
        let eligible = link.admits(now_us, bytes, guest) && !self.others_finish_sooner(now_us, path, bytes);
        eligible.then_some(Candidate {
            precedence: fairness.precedence(class),
            hops: state.spec.hops.len(),
            rank: waiting.rank,
            path,
            waiting,
            bytes,
        })
    }

    /// The smallest and the largest lot for a path. The largest one fits through every staging and
    /// every window, and is a small one while a link has not been measured, since it may turn out
    /// to be slow.
    fn lot_sizes(&self, now_us: u64, path: &PathState) -> (u64, u64) {
        let slots = path.spec.staging.iter().map(|staging| staging.slot_bytes);
        let links = || path.spec.hops.iter().map(|hop| &self.links[hop.link.0 as usize]);
        let windows = links().map(|link| match link.is_measured(now_us) {
            true => link.spec.window_bytes.min(link.spec.lot_bytes_max),
            false => link.spec.window_bytes.min(link.spec.lot_bytes_min),
        });
        let most = slots.chain(windows).min().unwrap_or(u64::MAX).clamp(1, MAX_LOT_BYTES);
        (links().map(|link| link.spec.lot_bytes_min).max().unwrap_or(MIN_LOT_BYTES), most)
    }

    /// Rate of a path: that of its slowest hop, or `None` while one is unknown.
    fn rate(&self, now_us: u64, path: usize) -> Option<f64> {
        let hops = self.paths[path].spec.hops.iter();
        let rates = hops.map(|hop| self.links[hop.link.0 as usize].rate_bytes_per_s(now_us));
        rates.reduce(|slowest, rate| Some(slowest?.min(rate?))).flatten()
    }

    /// The live paths beside `path` between the same places.
    fn others(&self, path: usize) -> impl Iterator<Item = usize> {
        let place_pair = &self.place_pairs[self.paths[path].place_pair];
        let live = place_pair.paths.iter().filter(|other| self.path_is_live(**other));
        live.map(|other| other.0 as usize).filter(move |other| *other != path)
    }

    /// The part of its place pair's rate that `path` has; equal parts while a rate is unknown.
    fn share(&self, now_us: u64, path: usize) -> f64 {
        let own = self.rate(now_us, path);
        let all =
            self.others(path).map(|other| self.rate(now_us, other)).fold(own, |sum, rate| Some(sum? + rate?));
        match (own, all) {
            (Some(own), Some(all)) if all > 0.0 => own / all,
            _ => 1.0 / (1.0 + self.others(path).count() as f64),
        }
    }

    /// Whether a lot of `bytes` would arrive sooner if `path` left it, with all that waits, to the
    /// others. Without this a slow link would take the last lot of a transfer and everybody would
    /// wait for it. It is never true while the others are idle, so the lot is always taken by
    /// somebody.
    fn others_finish_sooner(&self, now_us: u64, path: usize, bytes: u64) -> bool {
        let state = &self.paths[path];
        let Some(own_rate) = self.rate(now_us, path) else { return false };
        let (mut sum, mut fastest, mut in_flight_bytes) = (0.0, 0.0_f64, 0);
        for other in self.others(path) {
            let Some(rate) = self.rate(now_us, other) else { return false };
            sum += rate;
            fastest = fastest.max(rate);
            in_flight_bytes += self.paths[other].in_flight_bytes;
        }
        let own_s = (state.in_flight_bytes + bytes) as f64 / own_rate;
        let all_s = (self.place_pairs[state.place_pair].waiting_bytes + in_flight_bytes) as f64 / sum;
        let lot_s = bytes as f64 / fastest;
        in_flight_bytes > 0 && own_s > all_s.max(lot_s)
    }

    /// Puts a lot's hop on its link.
    fn start(&mut self, now_us: u64, mut lot: Lot) -> Start {
        let path = &self.paths[lot.path.0 as usize];
        if lot.slots.len() == lot.hop
            && let Some(slot) = self.slots.take_behind(path, lot.hop)
        {
            lot.slots.push(slot);
        }
        let hop = path.spec.hops[lot.hop];
        let pairs = lot.hop_pairs(path, &self.slots);
        let bytes = lot.cut.bytes - lot.hop_done_bytes;
        let link = &mut self.links[hop.link.0 as usize];
        link.take(bytes, hop.guest);
        let op = OpId(self.next_op);
        self.next_op += 1;
        let expires_us = now_us.saturating_add(link.spec.op_timeout_us);
        self.expiries.insert((expires_us, op));
        if let Some(transfer) = self.transfers.get_mut(&lot.transfer) {
            transfer.in_flight += 1;
        }
        let (link, guest) = (hop.link.0 as usize, hop.guest);
        let state = Op { lot, link, guest, bytes, started_us: now_us, expires_us, lost: false };
        self.ops.insert(op, state);
        Start { op, link: hop.link, pairs, bytes }
    }
}
