//! Lots: how a transfer is cut, and what travels together.

use crate::path::{PathId, PathState, SlotTable};
use crate::region::{Span, SpanPair};
use crate::transfer::TransferId;
use std::collections::VecDeque;

/// No lot is cut smaller, unless less is left.
pub const MIN_LOT_BYTES: u64 = 512 << 10;
/// No lot is cut larger.
pub const MAX_LOT_BYTES: u64 = 16 << 20;
/// Pairs are cut at multiples of this, counted from their starts: pairs of whole pages stay so, as
/// direct I/O needs them.
pub const PAGE_BYTES: u64 = 4096;
/// Pairs in a lot at most, so that a lot of tiny blocks stays a bounded piece of work.
const MAX_LOT_PAIRS: usize = 16_384;
/// A path's share of what remains is cut into this many lots (guided self-scheduling): large lots
/// while much remains, small ones at the end, so that all paths finish together.
const ROUNDS: f64 = 4.0;

/// The size of the next lot for a path that has `share` of its place pair's rate, when
/// `remaining_bytes` are uncut: from the least to the most that its links take.
pub(crate) fn lot_bytes(remaining_bytes: u64, share: f64, (least, most): (u64, u64)) -> u64 {
    let guided = (remaining_bytes as f64 * share / ROUNDS) as u64;
    guided.max(least).min(most).min(remaining_bytes)
}

/// What is left to cut of a transfer between two places.
#[derive(Debug)]
pub(crate) struct Leg {
    pairs: VecDeque<SpanPair>,
    bytes: u64,
    /// Lots that failed on a path and may go again.
    returned: Vec<Cut>,
}

/// How much of a pair joins a lot that has `cut_bytes` of its `target_bytes`: all of it, or whole
/// pages, or nothing. A pair that fits into a lot by itself is not cut, because a link does more
/// work for two halves than for a whole; unless the lot would stay half empty. A lot that can never
/// hold a page takes part of one, so that every transfer gets on.
fn part_bytes(pair_bytes: u64, target_bytes: u64, cut_bytes: u64) -> u64 {
    let room_bytes = target_bytes - cut_bytes;
    match room_bytes / PAGE_BYTES * PAGE_BYTES {
        _ if pair_bytes <= room_bytes => pair_bytes,
        _ if pair_bytes <= target_bytes && cut_bytes * 2 >= target_bytes => 0,
        0 if cut_bytes == 0 => room_bytes,
        pages_bytes => pages_bytes,
    }
}

/// Pairs cut from a leg.
#[derive(Debug)]
pub(crate) struct Cut {
    pub pairs: Vec<SpanPair>,
    pub bytes: u64,
    /// Failed attempts so far.
    pub attempts: u32,
}

impl Leg {
    /// Pairs in this order; neighbours that are adjacent on both sides become one.
    pub fn of(mut pairs: Vec<SpanPair>) -> Leg {
        let bytes = pairs.iter().map(SpanPair::len).sum();
        pairs.dedup_by(|next, last| last.merge(next));
        Leg { pairs: pairs.into(), bytes, returned: Vec::new() }
    }

    /// Adds a pair at the end; a pair adjacent to the last one on both sides becomes part of it.
    pub fn push(&mut self, pair: SpanPair) {
        self.bytes += pair.len();
        if !self.pairs.back_mut().is_some_and(|last| last.merge(&pair)) {
            self.pairs.push_back(pair);
        }
    }

    /// Bytes still to be cut, returned lots included.
    pub fn remaining_bytes(&self) -> u64 {
        self.bytes + self.returned.iter().map(|cut| cut.bytes).sum::<u64>()
    }

    /// Gives a failed lot back.
    pub fn give_back(&mut self, cut: Cut) {
        self.returned.push(cut);
    }

    /// Cuts up to `target_bytes`, at least one byte; failed lots go first. No page of a pair is cut
    /// in two unless the target is less than a page. `None` when nothing is left.
    pub fn cut(&mut self, target_bytes: u64) -> Option<Cut> {
        let Some(mut again) = self.returned.pop() else { return self.cut_fresh(target_bytes) };
        if again.bytes > target_bytes {
            // The path that takes it over has smaller slots than the one it failed on.
            let mut source = Leg { bytes: again.bytes, pairs: again.pairs.into(), returned: Vec::new() };
            let first = source.cut_fresh(target_bytes)?;
            let rest = Cut { bytes: source.bytes, pairs: source.pairs.into(), attempts: again.attempts };
            self.returned.push(rest);
            again = Cut { attempts: again.attempts, ..first };
        }
        Some(again)
    }

    fn cut_fresh(&mut self, target_bytes: u64) -> Option<Cut> {
        let mut cut = Cut { pairs: Vec::new(), bytes: 0, attempts: 0 };
        while let Some(pair) = self.pairs.front_mut() {
            let len = part_bytes(pair.len(), target_bytes.max(1), cut.bytes);
            if len == 0 || cut.pairs.len() == MAX_LOT_PAIRS {
                break;
            }
            cut.pairs.push(pair.part(0, len));
            cut.bytes += len;
            match pair.len() - len {
                0 => drop(self.pairs.pop_front()),
                rest => *pair = pair.part(len, rest),
            }
        }
        self.bytes -= cut.bytes;
        (cut.bytes > 0).then_some(cut)
    }

    /// Everything that was never cut or came back.
    pub fn into_unmoved(self) -> impl Iterator<Item = SpanPair> {
        self.pairs.into_iter().chain(self.returned.into_iter().flat_map(|cut| cut.pairs))
    }
}

/// A lot under way.
#[derive(Debug)]
pub(crate) struct Lot {
    pub transfer: TransferId,
    pub leg: usize,
    pub path: PathId,
    pub cut: Cut,
    /// The hop that it is on or waits for.
    pub hop: usize,
    /// Bytes of that hop that have completed.
    pub hop_done_bytes: u64,
    /// The slot behind each hop passed or under way.
    pub slots: Vec<u32>,
    /// When it began to wait for its hop.
    pub ready_since_us: u64,
    /// Time spent waiting between hops.
    pub staged_us: u64,
    /// Time spent on links.
    pub moved_us: u64,
}

impl Lot {
    /// What the current hop still has to copy.
    pub fn hop_pairs(&self, path: &PathState, slots: &SlotTable) -> Vec<SpanPair> {
        let source_slot = self.hop.checked_sub(1).map(|staging| (staging, self.slots[staging]));
        let target_slot = (self.hop < path.last_hop()).then(|| (self.hop, self.slots[self.hop]));
        let slot_part = |slot: Option<(usize, u32)>, offset, len, otherwise: Span| match slot {
            Some((staging, slot)) => slots.span(path, staging, slot, offset, len),
            None => otherwise,
        };
        let mut pairs: Vec<SpanPair> = Vec::with_capacity(self.cut.pairs.len());
        let mut offset = 0;
        for pair in &self.cut.pairs {
            let from = slot_part(source_slot, offset, pair.len(), pair.from);
            let to = slot_part(target_slot, offset, pair.len(), pair.to);
            let hop = SpanPair::new(from, to);
            if !pairs.last_mut().is_some_and(|last| last.merge(&hop)) {
                pairs.push(hop);
            }
            offset += pair.len();
        }
        if self.hop_done_bytes == 0 { pairs } else { skip(pairs, self.hop_done_bytes) }
    }

    /// Gives back the slots that the lot still holds.
    pub fn give_slots_back(&self, path: &PathState, slots: &mut SlotTable) {
        for (staging, slot) in self.slots_held() {
            slots.give_back(path, staging, slot);
        }
    }

    /// The slots that the lot still holds: the one it was read from and the one it was written to,
    /// each with its staging.
    pub fn slots_held(&self) -> impl Iterator<Item = (usize, u32)> {
        self.slots.iter().copied().enumerate().skip(self.hop.saturating_sub(1))
    }

    /// Pairs that have not reached their target, when the lot is given up.
    pub fn unmoved(&self, path: &PathState) -> Vec<SpanPair> {
        let moved = if self.hop == path.last_hop() { self.hop_done_bytes } else { 0 };
        skip(self.cut.pairs.iter().copied(), moved)
    }
}

/// The pairs without their first `bytes` bytes.
fn skip(pairs: impl IntoIterator<Item = SpanPair>, mut bytes: u64) -> Vec<SpanPair> {
    let mut rest = Vec::new();
    for pair in pairs {
        let skipped = bytes.min(pair.len());
        bytes -= skipped;
        if skipped < pair.len() {
            rest.push(pair.part(skipped, pair.len() - skipped));
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::RegionId;
    use proptest::prelude::*;

    fn pair(from: u64, to: u64, len: u64) -> SpanPair {
        SpanPair::new(Span::new(RegionId::nth(0), from, len), Span::new(RegionId::nth(1), to, len))
    }

    #[test]
    fn adjacent_blocks_become_one_copy() {
        let mut leg = Leg::of(Vec::new());
        for block in 0..8 {
            leg.push(pair(block * 10, block * 10, 10));
        }
        leg.push(pair(200, 80, 10));
        let cut = leg.cut(MAX_LOT_BYTES).unwrap();
        assert_eq!(cut.pairs, vec![pair(0, 0, 80), pair(200, 80, 10)]);
        assert!(leg.cut(1).is_none());
    }

    #[test]
    fn a_lot_smaller_than_a_page_is_cut_at_any_byte_and_loses_none() {
        let mut leg = Leg::of(Vec::new());
        leg.push(pair(0, 100, 7));
        leg.push(pair(50, 300, 5));
        let mut cuts = Vec::new();
        while let Some(cut) = leg.cut(4) {
            cuts.push(cut.pairs);
        }
        let pieces = [pair(0, 100, 4), pair(4, 104, 3), pair(50, 300, 4), pair(54, 304, 1)];
        assert_eq!(cuts, pieces.map(|piece| vec![piece]));
    }

    #[test]
    fn a_lot_stops_before_a_page_that_it_has_no_room_for() {
        let mut leg = Leg::of(Vec::new());
        leg.push(pair(0, 0, 100));
        leg.push(pair(1 << 20, 1 << 20, 3 * PAGE_BYTES + 10));
        let first = leg.cut(PAGE_BYTES).unwrap();
        assert_eq!(first.pairs, vec![pair(0, 0, 100)], "the pair's first page does not fit");
        let second = leg.cut(3 * PAGE_BYTES + 9).unwrap();
        assert_eq!(second.bytes, 3 * PAGE_BYTES);
        assert_eq!(leg.cut(PAGE_BYTES).unwrap().bytes, 10, "a pair's end is where it is");
    }

    /// Lengths of pairs with odd places and ends; for each cut its target and whether the lot comes
    /// back.
    fn any_cuts() -> impl Strategy<Value = (Vec<u64>, Vec<(u64, bool)>)> {
        let lens =
            prop::collection::vec(prop_oneof![1..200_000u64, (1..60u64).prop_map(|p| p * PAGE_BYTES)], 1..20);
        (lens, prop::collection::vec((PAGE_BYTES..300_000, any::<bool>()), 1..200))
    }

    proptest! {
        #[test]
        fn no_page_of_a_pair_is_in_two_lots((lens, cuts) in any_cuts()) {
            const APART: u64 = 1 << 30;
            let mut leg = Leg::of(Vec::new());
            for (nth, len) in lens.iter().enumerate() {
                leg.push(pair(nth as u64 * APART + 17, nth as u64 * APART, *len));
            }
            let mut moved_bytes = vec![0; lens.len()];
            let targets = cuts.into_iter().chain(std::iter::repeat((100_000, false)));
            for (target_bytes, comes_back) in targets {
                let Some(cut) = leg.cut(target_bytes) else { break };
                prop_assert!(cut.bytes > 0 && cut.bytes <= target_bytes);
                for piece in &cut.pairs {
                    let (nth, start) = ((piece.to.offset / APART) as usize, piece.to.offset % APART);
                    let end = start + piece.len();
                    prop_assert!(start % PAGE_BYTES == 0 && (end % PAGE_BYTES == 0 || end == lens[nth]), "{:?}", piece);
                    prop_assert_eq!(piece.from.offset, piece.to.offset + 17);
                    moved_bytes[nth] += if comes_back { 0 } else { piece.len() };
                }
                if comes_back {
                    leg.give_back(cut);
                }
            }
            prop_assert_eq!(moved_bytes, lens);
        }
    }

    #[test]
    fn a_returned_lot_goes_first_and_keeps_its_attempts_when_split() {
        let mut leg = Leg::of(Vec::new());
        leg.push(pair(0, 0, 10));
        leg.give_back(Cut { pairs: vec![pair(100, 100, 10)], bytes: 10, attempts: 2 });
        assert_eq!(leg.remaining_bytes(), 20);
        let first = leg.cut(6).unwrap();
        assert_eq!((first.attempts, first.pairs), (2, vec![pair(100, 100, 6)]));
        let rest = leg.cut(6).unwrap();
        assert_eq!((rest.attempts, rest.pairs), (2, vec![pair(106, 106, 4)]));
        assert_eq!(leg.cut(100).unwrap().attempts, 0);
    }

    #[test]
    fn lots_grow_with_what_remains_and_shrink_with_the_share() {
        let usual = (MIN_LOT_BYTES, MAX_LOT_BYTES);
        assert_eq!(lot_bytes(1 << 30, 1.0, usual), MAX_LOT_BYTES);
        assert_eq!(lot_bytes(16 << 20, 0.5, usual), 2 << 20);
        assert_eq!(lot_bytes(16 << 20, 0.01, usual), MIN_LOT_BYTES);
        assert_eq!(lot_bytes(1000, 1.0, usual), 1000);
        assert_eq!(lot_bytes(1 << 30, 1.0, (MIN_LOT_BYTES, 4 << 20)), 4 << 20);
        assert_eq!(lot_bytes(6 << 20, 1.0, (4 << 20, MAX_LOT_BYTES)), 4 << 20);
        // Slots may be smaller than the smallest lot.
        assert_eq!(lot_bytes(6 << 20, 1.0, (4 << 20, 1 << 20)), 1 << 20);
    }
}
