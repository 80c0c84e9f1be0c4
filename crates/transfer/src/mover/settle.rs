//! Ends of operations and of transfers: completed, failed, timed out or cancelled. A transfer ends
//! when none of its operations is in flight. An operation that timed out may still write later: the
//! end of its transfer lists the spans that it may touch as quarantined.

use super::{Active, Ending, Event, Mover, Op, OpId};
use crate::driver::Outcome;
use crate::link::LinkId;
use crate::lot::Lot;
use crate::path::{PathState, SlotTable};
use crate::region::Span;
use crate::transfer::{Class, End, Failure, Reason, TransferId};
use std::collections::HashMap;

impl Mover {
    /// Takes in how an operation ended. An operation that is not in flight is ignored.
    pub fn complete(&mut self, now_us: u64, id: OpId, outcome: Outcome) {
        let Some(op) = self.ops.remove(&id) else { return };
        self.links[op.link].give_back(op.bytes, op.guest, op.lost);
        self.expiries.remove(&(op.expires_us, id));
        if op.lost {
            return self.lost_op_is_quiet(op);
        }
        let transfer = op.lot.transfer;
        if let Some(active) = self.transfers.get_mut(&transfer) {
            active.in_flight -= 1;
        }
        self.apply(now_us, op, outcome);
        self.settle(now_us, transfer);
    }

    fn apply(&mut self, now_us: u64, op: Op, outcome: Outcome) {
        let Op { mut lot, link, bytes, started_us, guest, .. } = op;
        lot.moved_us += now_us.saturating_sub(started_us);
        let counters = &mut self.link_counters[link];
        match outcome {
            Outcome::Moved { bytes: moved } if moved > 0 && moved <= bytes => {
                self.links[link].moved(started_us, now_us, moved);
                counters.bytes += moved;
                counters.guest_bytes += if guest { moved } else { 0 };
                counters.lots += u64::from(moved == bytes);
                counters.short += u64::from(moved < bytes);
                lot.hop_done_bytes += moved;
                self.advance(now_us, lot);
            }
            Outcome::Moved { bytes: moved } => {
                let error = format!("reported {moved} bytes of an operation of {bytes}");
                self.attempt_failed(now_us, lot, link, error);
            }
            Outcome::Failed { error } => self.attempt_failed(now_us, lot, link, error),
            Outcome::Denied { error } => {
                counters.failed += 1;
                let link = self.links[link].spec.name.clone();
                self.give_up(lot, Reason::Denied { link, error });
            }
            Outcome::Corrupt => {
                counters.corrupt += 1;
                let link = self.links[link].spec.name.clone();
                self.give_up(lot, Reason::Corrupt { link });
            }
        }
    }

    /// Fails a lot, and with it its transfer, without another attempt.
    fn give_up(&mut self, lot: Lot, reason: Reason) {
        let transfer = lot.transfer;
        self.abandon(lot);
        self.begin_ending(transfer, Ending::Failed(reason));
    }

    /// Takes a lot whose operation moved something to where it goes next.
    fn advance(&mut self, now_us: u64, mut lot: Lot) {
        let is_ending = self.transfers.get(&lot.transfer).is_none_or(|transfer| transfer.ending.is_some());
        let path = &self.paths[lot.path.0 as usize];
        let hop_is_done = lot.hop_done_bytes == lot.cut.bytes;
        if hop_is_done && lot.hop == path.last_hop() {
            return self.arrived(lot);
        }
        if is_ending {
            return self.abandon(lot);
        }
        if hop_is_done {
            if let Some(behind) = lot.hop.checked_sub(1) {
                self.slots.give_back(path, behind, lot.slots[behind]);
            }
            lot.hop += 1;
            lot.hop_done_bytes = 0;
        }
        lot.ready_since_us = now_us;
        self.make_ready(lot);
    }

    fn make_ready(&mut self, lot: Lot) {
        if !self.path_is_live(lot.path) {
            return self.try_again(lot);
        }
        let Some(transfer) = self.transfers.get(&lot.transfer) else { return };
        let guest = self.paths[lot.path.0 as usize].spec.hops[lot.hop].guest;
        let key = (guest, transfer.class, self.next_ready);
        self.next_ready += 1;
        self.ready.insert(key, lot);
    }

    fn arrived(&mut self, lot: Lot) {
        self.leave_path(&lot);
        let Some(transfer) = self.transfers.get_mut(&lot.transfer) else { return };
        transfer.lots -= 1;
        transfer.moved_bytes += lot.cut.bytes;
        let counters = &mut self.class_counters[transfer.class.index()];
        counters.lots += 1;
        counters.bytes += lot.cut.bytes;
        counters.staged_us += lot.staged_us;
        counters.moved_us += lot.moved_us;
    }

    fn attempt_failed(&mut self, now_us: u64, mut lot: Lot, link: usize, error: String) {
        let ending = self.transfers.get(&lot.transfer).and_then(|transfer| transfer.ending.as_ref());
        if matches!(ending, Some(Ending::Cancelled)) {
            // What ended early because it was asked to says nothing against its link.
            return self.abandon(lot);
        }
        self.link_counters[link].failed += 1;
        self.links[link].failed(now_us);
        lot.cut.attempts += 1;
        let (transfer, attempts) = (lot.transfer, lot.cut.attempts);
        if attempts < self.limits.attempts {
            self.try_again(lot);
        } else {
            self.abandon(lot);
            let link = self.links[link].spec.name.clone();
            self.begin_ending(transfer, Ending::Failed(Reason::Link { link, error, attempts }));
        }
    }

    /// Gives a lot back to its place pair, from where any path may pull it; or gives it up when its
    /// transfer is ending or no path is left.
    fn try_again(&mut self, lot: Lot) {
        let place_pair = self.paths[lot.path.0 as usize].place_pair;
        if !self.place_pair_is_live(place_pair) {
            let (from, to) = (self.place_pairs[place_pair].from, self.place_pairs[place_pair].to);
            self.begin_ending(lot.transfer, Ending::Failed(Reason::NoPath { from, to }));
        }
        let going_on = self.transfers.get_mut(&lot.transfer).filter(|transfer| transfer.ending.is_none());
        let Some(transfer) = going_on else { return self.abandon(lot) };
        let place_pair = &mut self.place_pairs[place_pair];
        transfer.lots -= 1;
        place_pair.waiting_bytes += lot.cut.bytes;
        place_pair.insert(transfer.class, transfer.waiting(lot.transfer, lot.leg));
        let path = &mut self.paths[lot.path.0 as usize];
        path.in_flight_bytes -= lot.cut.bytes;
        lot.give_slots_back(path, &mut self.slots);
        transfer.legs[lot.leg].1.give_back(lot.cut);
    }

    /// Gives a lot up: what of it had not reached its target is the transfer's to report.
    fn abandon(&mut self, lot: Lot) {
        self.leave_path(&lot);
        let unmoved = lot.unmoved(&self.paths[lot.path.0 as usize]);
        if let Some(transfer) = self.transfers.get_mut(&lot.transfer) {
            transfer.lots -= 1;
            transfer.moved_bytes += lot.cut.bytes - unmoved.iter().map(|pair| pair.len()).sum::<u64>();
            transfer.unmoved.extend(unmoved);
        }
    }

    fn leave_path(&mut self, lot: &Lot) {
        let path = &mut self.paths[lot.path.0 as usize];
        path.in_flight_bytes -= lot.cut.bytes;
        lot.give_slots_back(path, &mut self.slots);
    }

    /// Ends a transfer early. It ends when nothing of it is in flight any more, at once if nothing
    /// is: then and only then nobody touches its spans. Unknown and ended transfers are ignored.
    pub fn cancel(&mut self, now_us: u64, transfer: TransferId) {
        self.begin_ending(transfer, Ending::Cancelled);
        self.settle(now_us, transfer);
    }

    /// Makes a transfer more urgent, whoever asked for it. What of it is under way goes on as it
    /// is. A class that is not more urgent changes nothing; unknown and ended transfers are
    /// ignored.
    pub fn raise(&mut self, id: TransferId, class: Class) {
        let raised = |transfer: &&mut Active| transfer.ending.is_none() && class < transfer.class;
        let Some(transfer) = self.transfers.get_mut(&id).filter(raised) else { return };
        let before = std::mem::replace(&mut transfer.class, class);
        for (index, (place_pair, leg)) in transfer.legs.iter().enumerate() {
            if leg.remaining_bytes() > 0 {
                let (place_pair, waiting) = (&mut self.place_pairs[*place_pair], transfer.waiting(id, index));
                place_pair.remove(before, &waiting);
                place_pair.insert(class, waiting);
            }
        }
    }

    /// Operations of a transfer that are in flight, and the links that they are on.
    pub fn under_way(&self, transfer: TransferId) -> impl Iterator<Item = (LinkId, OpId)> {
        let own = self.ops.iter().filter(move |(_, op)| op.lot.transfer == transfer && !op.lost);
        own.map(|(id, op)| (LinkId(op.link as u32), *id))
    }

    /// Starts nothing more for a transfer. The first cause counts.
    fn begin_ending(&mut self, id: TransferId, ending: Ending) {
        let Some(transfer) = self.transfers.get_mut(&id).filter(|transfer| transfer.ending.is_none()) else {
            return;
        };
        transfer.ending = Some(ending);
        for (index, (place_pair, leg)) in transfer.legs.iter().enumerate() {
            self.place_pairs[*place_pair].waiting_bytes -= leg.remaining_bytes();
            self.place_pairs[*place_pair].remove(transfer.class, &transfer.waiting(id, index));
        }
        let keys: Vec<_> =
            self.ready.iter().filter(|(_, lot)| lot.transfer == id).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(lot) = self.ready.remove(&key) {
                self.abandon(lot);
            }
        }
    }

    /// Ends a transfer if nothing is left to do for it and nothing is in flight.
    pub(super) fn settle(&mut self, now_us: u64, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else { return };
        let all_moved = transfer.lots == 0 && transfer.legs.iter().all(|(_, leg)| leg.remaining_bytes() == 0);
        let is_over = transfer.in_flight == 0 && (transfer.ending.is_some() || all_moved);
        if !is_over {
            return;
        }
        let Some(transfer) = self.transfers.remove(&id) else { return };
        for region in &transfer.regions {
            self.regions.release(*region);
        }
        let counters = &mut self.class_counters[transfer.class.index()];
        counters.late += u64::from(transfer.deadline_us.is_some_and(|deadline_us| now_us > deadline_us));
        let end = transfer.into_end();
        match &end {
            End::Done { .. } => counters.done += 1,
            End::Failed(_) => counters.failed += 1,
            End::Cancelled { .. } => counters.cancelled += 1,
        }
        self.events.push_back(Event::Ended(id, end));
    }

    /// Declares operations lost that overran their link's limit: their transfers fail, and what
    /// they may still touch is quarantined until they complete after all.
    pub fn expire(&mut self, now_us: u64) {
        while let Some((_, id)) =
            self.expiries.first().copied().filter(|(expires_us, _)| *expires_us <= now_us)
        {
            self.expiries.pop_first();
            self.lose(now_us, id);
        }
    }

    fn lose(&mut self, now_us: u64, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        op.lost = true;
        let (transfer_id, link) = (op.lot.transfer, op.link);
        let path = &mut self.paths[op.lot.path.0 as usize];
        path.in_flight_bytes -= op.lot.cut.bytes;
        let unmoved = op.lot.unmoved(path);
        let spans = op.touched_by_caller(path, &self.slots);
        for span in &spans {
            self.regions.hold(span.region);
        }
        self.slots.lose(path, op.lot.slots_held());
        self.link_counters[link].timed_out += 1;
        self.links[link].lose(now_us, op.bytes, op.guest);
        if let Some(transfer) = self.transfers.get_mut(&transfer_id) {
            transfer.in_flight -= 1;
            transfer.lots -= 1;
            transfer.moved_bytes += op.lot.cut.bytes - unmoved.iter().map(|pair| pair.len()).sum::<u64>();
            transfer.unmoved.extend(unmoved);
            transfer.quarantined.extend(spans);
        }
        let spec = &self.links[link].spec;
        let reason = Reason::TimedOut { link: spec.name.clone(), timeout_us: spec.op_timeout_us };
        self.begin_ending(transfer_id, Ending::Failed(reason));
        self.settle(now_us, transfer_id);
        self.leave(now_us, LinkId(link as u32));
    }

    /// Ends all transfers, since nothing will ever be started or complete any more. What is still
    /// in flight counts as lost.
    pub fn end_all(&mut self, now_us: u64) {
        let mut transfers: Vec<_> = self.transfers.keys().copied().collect();
        transfers.sort_unstable();
        for id in &transfers {
            self.begin_ending(*id, Ending::Failed(Reason::Closed));
        }
        let in_flight: Vec<_> = self.ops.iter().filter(|(_, op)| !op.lost).map(|(id, _)| *id).collect();
        in_flight.into_iter().for_each(|id| self.lose(now_us, id));
        transfers.into_iter().for_each(|id| self.settle(now_us, id));
    }

    /// A lost operation completed: its slots may be used again, and so may the spans that it kept
    /// in quarantine.
    fn lost_op_is_quiet(&mut self, op: Op) {
        let path = &self.paths[op.lot.path.0 as usize];
        op.lot.give_slots_back(path, &mut self.slots);
        self.slots.find(path, op.lot.slots_held());
        let spans = op.touched_by_caller(path, &self.slots);
        for span in &spans {
            self.regions.release(span.region);
        }
        match self.transfers.get_mut(&op.lot.transfer) {
            Some(transfer) => take_out(&mut transfer.quarantined, &spans),
            None => self.events.push_back(Event::Quiet(op.lot.transfer, spans)),
        }
    }

    /// Takes a link out of service. Lots that wait for it go back to their place pairs; what is in
    /// flight on it still has to complete. Transfers that no path can serve any more fail. It is
    /// the same while operations that were given up leave no room in its window, or no slot behind
    /// it.
    pub fn link_down(&mut self, now_us: u64, link: LinkId) {
        let Some(state) = self.links.get_mut(link.0 as usize) else { return };
        state.down = true;
        self.leave(now_us, link);
    }

    /// Has nothing wait any more for a link, as far as that is not live, nor for slots that never
    /// come.
    fn leave(&mut self, now_us: u64, link: LinkId) {
        let state = &self.links[link.0 as usize];
        let waits = |lot: &Lot| {
            let path = &self.paths[lot.path.0 as usize];
            let mut hops = path.spec.hops[lot.hop..].iter();
            hops.any(|hop| hop.link == link && !state.is_live(hop.guest))
                || !self.slots.are_live_from(path, lot.slots.len())
        };
        let keys: Vec<_> = self.ready.iter().filter(|(_, lot)| waits(lot)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(lot) = self.ready.remove(&key) {
                let transfer = lot.transfer;
                self.try_again(lot);
                // It may have been the last of a transfer that is in no place pair any more.
                self.settle(now_us, transfer);
            }
        }
        self.fail_stranded(now_us);
    }

    /// Puts a link back into service, without a back-off: whatever failed before has been seen to.
    pub fn link_up(&mut self, link: LinkId) {
        if let Some(state) = self.links.get_mut(link.0 as usize) {
            state.down = false;
            state.reset();
        }
    }

    fn fail_stranded(&mut self, now_us: u64) {
        for place_pair in 0..self.place_pairs.len() {
            if self.place_pair_is_live(place_pair) {
                continue;
            }
            let (from, to) = (self.place_pairs[place_pair].from, self.place_pairs[place_pair].to);
            let stranded: Vec<_> =
                self.place_pairs[place_pair].all().map(|waiting| waiting.rank.transfer).collect();
            for transfer in stranded {
                self.begin_ending(transfer, Ending::Failed(Reason::NoPath { from, to }));
                self.settle(now_us, transfer);
            }
        }
    }
}

/// Takes spans out of a list, each as often as it is named: another lost operation may touch the
/// same one.
fn take_out(list: &mut Vec<Span>, spans: &[Span]) {
    let mut left: HashMap<Span, usize> = HashMap::new();
    for span in spans {
        *left.entry(*span).or_default() += 1;
    }
    list.retain(|span| match left.get_mut(span) {
        Some(times) if *times > 0 => {
            *times -= 1;
            false
        }
        _ => true,
    });
}

impl Op {
    /// The spans of this operation that are the caller's, not staging.
    fn touched_by_caller(&self, path: &PathState, slots: &SlotTable) -> Vec<Span> {
        let pairs = self.lot.hop_pairs(path, slots);
        let from = pairs.iter().map(|pair| pair.from).filter(|_| self.lot.hop == 0);
        let to = pairs.iter().map(|pair| pair.to).filter(|_| self.lot.hop == path.last_hop());
        from.chain(to).collect()
    }
}

impl Active {
    fn into_end(self) -> End {
        let (moved_bytes, quarantined) = (self.moved_bytes, self.quarantined);
        match self.ending {
            None => End::Done { bytes: moved_bytes },
            Some(Ending::Cancelled) => End::Cancelled { moved_bytes, quarantined },
            Some(Ending::Failed(reason)) => {
                let rest = self.legs.into_iter().flat_map(|(_, leg)| leg.into_unmoved());
                let unmoved = self.unmoved.into_iter().chain(rest).collect();
                End::Failed(Failure { reason, unmoved, moved_bytes, quarantined })
            }
        }
    }
}
