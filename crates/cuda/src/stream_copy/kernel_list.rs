//! Lists for kernels: where the pages of segments are written, in pinned memory, once and for good,
//! while the segments before are on their way.

use super::pages::{Pages, are_shorter};
use crate::driver::abi::Address;
use crate::kernels::Piece;
use crate::links::Direction;

/// What is left of a list that stream copies in flight share.
#[derive(Debug)]
pub struct KernelList<'a> {
    free: &'a mut [Piece],
    /// Addresses, in order, where an allocation or a registration begins: the driver refuses a copy
    /// across one.
    seams: &'a [Address],
    /// Runs of host memory of the last segment; kept for its memory.
    runs: Vec<Piece>,
}

/// Pages that were taken off a share, and where the kernel finds them.
#[derive(Debug)]
pub struct Listed<'l> {
    /// Between the slot and the target.
    pub pages: &'l [Piece],
    /// Between host memory and the slot.
    pub runs: &'l [Piece],
    pub bytes: u64,
}

impl Listed<'_> {
    /// Whether these are several pages, on average shorter than that.
    pub fn are_shorter(&self, than: u64) -> bool {
        are_shorter(than, self.pages.len(), self.bytes)
    }

    /// Where the kernel reads the pages.
    pub fn address(&self) -> Address {
        self.pages.as_ptr() as Address
    }
}

impl<'a> KernelList<'a> {
    /// A list of these places, for pieces between which these seams may be.
    pub fn new(free: &'a mut [Piece], seams: &'a [Address]) -> KernelList<'a> {
        KernelList { free, seams, runs: Vec::new() }
    }

    pub fn left(&self) -> usize {
        self.free.len()
    }

    /// The first places, or all if there are not so many, as a list of their own.
    pub fn part(&mut self, places: usize) -> KernelList<'a> {
        let free = std::mem::take(&mut self.free);
        let (part, free) = free.split_at_mut(places.min(free.len()));
        self.free = free;
        KernelList::new(part, self.seams)
    }

    /// Keeps the first places as they are: a kernel reads them from now on.
    pub fn keep(&mut self, places: usize) {
        self.free = &mut std::mem::take(&mut self.free)[places..];
    }

    /// Lists the next `most` bytes of pages as they go through a slot: in long runs on the side of
    /// the host, page by page on the GPU's. Fewer where the list ends.
    pub fn through_slot(
        &mut self,
        direction: Direction,
        pages: &mut Pages,
        slot: Address,
        most: u64,
    ) -> Listed<'_> {
        let (mut listed, mut bytes) = (0, 0);
        self.runs.clear();
        while listed < self.free.len()
            && let Some(piece) = pages.next(most - bytes)
        {
            let at = slot + bytes;
            let (run, page) = direction.in_order(Piece { to: at, ..piece }, Piece { from: at, ..piece });
            match self.runs.last_mut() {
                Some(last) if goes_on(last, &run, self.seams) => last.bytes += run.bytes,
                _ => self.runs.push(run),
            }
            listed += self.add(listed, page);
            bytes += piece.bytes;
        }
        Listed { pages: &self.free[..listed], runs: &self.runs, bytes }
    }

    /// Lists the next `most` bytes of pages as they are, without a slot between.
    pub fn straight(&mut self, pages: &mut Pages, most: u64) -> Listed<'_> {
        let (mut listed, mut bytes) = (0, 0);
        while listed < self.free.len()
            && let Some(piece) = pages.next(most - bytes)
        {
            listed += self.add(listed, piece);
            bytes += piece.bytes;
        }
        Listed { pages: &self.free[..listed], runs: &[], bytes }
    }

    /// Puts a page into the place `at`, or makes the one before longer by it. Says how many places
    /// that took.
    fn add(&mut self, at: usize, page: Piece) -> usize {
        if at > 0 && goes_on(&self.free[at - 1], &page, self.seams) {
            self.free[at - 1].bytes += page.bytes;
            return 0;
        }
        self.free[at] = page;
        1
    }
}

/// Whether two pieces are one to the driver.
fn goes_on(last: &Piece, next: &Piece, seams: &[Address]) -> bool {
    let is_seam = |address: Address| seams.binary_search(&address).is_ok();
    last.goes_on_with(next) && !is_seam(next.from) && !is_seam(next.to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NONE: Piece = Piece { from: 0, to: 0, bytes: 0 };
    const SLOT: Address = 1 << 50;

    #[test]
    fn contiguous_host_memory_is_one_run_however_scattered_the_pages_are() {
        let pieces =
            [(1000, 9000), (1100, 5000), (1200, 5100)].map(|(from, to)| Piece { from, to, bytes: 100 });
        let mut places = [NONE; 8];
        let mut list = KernelList::new(&mut places, &[]);
        let mut pages = Pages::new(&pieces, 300);
        let listed = list.through_slot(Direction::HostToDevice, &mut pages, SLOT, 250);
        assert_eq!(listed.runs, [Piece { from: 1000, to: SLOT, bytes: 250 }]);
        let expected =
            [Piece { from: SLOT, to: 9000, bytes: 100 }, Piece { from: SLOT + 100, to: 5000, bytes: 150 }];
        assert_eq!(listed.pages, expected);
        list.keep(2);
        let listed = list.through_slot(Direction::HostToDevice, &mut pages, SLOT, 250);
        assert_eq!((listed.runs, listed.bytes), ([Piece { from: 1250, to: SLOT, bytes: 50 }].as_slice(), 50));
        assert_eq!((places[0], places[1]), (expected[0], expected[1]), "what is kept stays");
    }

    #[test]
    fn nothing_is_one_across_the_end_of_a_registration_or_an_allocation() {
        let pieces =
            [(1000, 9000), (1100, 9100), (1200, 9200)].map(|(from, to)| Piece { from, to, bytes: 100 });
        for (seam, runs, pages) in [(1100, 2, 1), (9100, 1, 2), (1150, 1, 1)] {
            let mut places = [NONE; 8];
            let seams = [500, seam, 20_000];
            let mut list = KernelList::new(&mut places, &seams);
            let listed = list.through_slot(Direction::HostToDevice, &mut Pages::new(&pieces, 300), SLOT, 300);
            assert_eq!((listed.runs.len(), listed.pages.len()), (runs, pages), "{seam}");
            let listed = list.straight(&mut Pages::new(&pieces, 300), 300);
            assert_eq!(listed.pages.len(), runs.max(pages), "{seam}");
        }
    }

    /// Where each byte comes from and goes to.
    fn bytes(pieces: &[Piece]) -> impl Iterator<Item = (u64, u64)> {
        pieces.iter().flat_map(|piece| (0..piece.bytes).map(|at| (piece.from + at, piece.to + at)))
    }

    proptest! {
        #[test]
        fn every_byte_passes_the_slot_once(
            lens in prop::collection::vec(1..500_u64, 0..40),
            most in 1..900_u64,
            places in 1..20_usize,
        ) {
            let piece = |(nth, bytes): (u64, &u64)| Piece { from: nth * 450, to: (1 << 40) - nth * 700, bytes: *bytes };
            let pieces: Vec<Piece> = (0..).zip(&lens).map(piece).collect();
            let mut pages = Pages::new(&pieces, lens.iter().sum());
            let mut places = vec![NONE; places];
            let mut moved = Vec::new();
            while pages.bytes() > 0 {
                let mut list = KernelList::new(&mut places, &[]);
                let listed = list.through_slot(Direction::DeviceToHost, &mut pages, SLOT, most);
                prop_assert!(listed.bytes <= most && listed.bytes > 0);
                let into: Vec<_> = bytes(listed.pages).collect();
                let out: Vec<_> = bytes(listed.runs).collect();
                prop_assert_eq!(into.len(), out.len());
                for ((from, at), (same, to)) in into.into_iter().zip(out) {
                    prop_assert_eq!(at, same);
                    moved.push((from, to));
                }
            }
            prop_assert_eq!(moved, bytes(&pieces).collect::<Vec<_>>());
        }
    }
}
