//! Segments: how a lot of small pages is cut into what fits into a staging slot, so that host
//! memory is read or written in long runs and a kernel deals with the pages. Pure.

use crate::kernels::Piece;

/// What goes through one slot at a time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Segment {
    /// Host memory to or from the slot: (host address, offset in the slot, bytes).
    pub runs: Vec<(u64, u64, u64)>,
    /// The slot to or from pages: (offset in the slot, address of the page's part, bytes).
    pub pages: Vec<(u64, u64, u64)>,
    pub bytes: u64,
}

/// Cuts pieces, given as (host address, device address, bytes), into segments of at most
/// `slot_bytes`.
pub fn segments(pieces: impl IntoIterator<Item = (u64, u64, u64)>, slot_bytes: u64) -> Vec<Segment> {
    let mut segments = vec![Segment::default()];
    for (mut host, mut device, mut rest) in pieces {
        while rest > 0 {
            if segments.last().is_none_or(|segment| segment.bytes == slot_bytes) {
                segments.push(Segment::default());
            }
            let Some(segment) = segments.last_mut() else { break };
            let bytes = rest.min(slot_bytes - segment.bytes);
            segment.add(host, device, bytes);
            (host, device, rest) = (host + bytes, device + bytes, rest - bytes);
        }
    }
    segments.retain(|segment| segment.bytes > 0);
    segments
}

impl Segment {
    fn add(&mut self, host: u64, device: u64, bytes: u64) {
        match self.runs.last_mut() {
            Some((start, _, run)) if *start + *run == host => *run += bytes,
            _ => self.runs.push((host, self.bytes, bytes)),
        }
        match self.pages.last_mut() {
            Some((_, page, len)) if *page + *len == device => *len += bytes,
            _ => self.pages.push((self.bytes, device, bytes)),
        }
        self.bytes += bytes;
    }

    /// The pages as a kernel copies them out of a slot at an address.
    pub fn scattered(&self, slot: u64) -> impl Iterator<Item = Piece> {
        self.pages.iter().map(move |&(offset, page, bytes)| Piece { from: slot + offset, to: page, bytes })
    }

    /// The pages as a kernel copies them into a slot at an address.
    pub fn gathered(&self, slot: u64) -> impl Iterator<Item = Piece> {
        self.pages.iter().map(move |&(offset, page, bytes)| Piece { from: page, to: slot + offset, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn contiguous_host_memory_is_one_run_however_scattered_the_pages_are() {
        let pages = [(1000, 9000, 100), (1100, 5000, 100), (1200, 5100, 100)];
        let cut = segments(pages, 250);
        assert_eq!(cut.len(), 2);
        assert_eq!(cut[0].runs, vec![(1000, 0, 250)]);
        assert_eq!(cut[0].pages, vec![(0, 9000, 100), (100, 5000, 150)]);
        assert_eq!((cut[1].runs.as_slice(), cut[1].bytes), ([(1250, 0, 50)].as_slice(), 50));
    }

    proptest! {
        #[test]
        fn every_byte_is_in_one_segment(lens in prop::collection::vec(1..5000_u64, 0..60), slot_bytes in 1..4096_u64) {
            let pieces: Vec<_> =
                lens.iter().enumerate().map(|(nth, len)| (nth as u64 * 10_000, (1 << 40) + nth as u64 * 20_000, *len)).collect();
            let mut moved = Vec::new();
            for segment in segments(pieces.clone(), slot_bytes) {
                prop_assert!(segment.bytes > 0 && segment.bytes <= slot_bytes);
                let run_of = |offset: u64| segment.runs.iter().find(|(_, at, len)| offset >= *at && offset < at + len).unwrap();
                for (offset, device, bytes) in &segment.pages {
                    for byte in 0..*bytes {
                        let (host, at, _) = run_of(offset + byte);
                        moved.push((host + offset + byte - at, device + byte));
                    }
                }
            }
            let wanted: Vec<_> = pieces.iter().flat_map(|(host, device, len)| (0..*len).map(move |at| (host + at, device + at))).collect();
            prop_assert_eq!(moved, wanted);
        }
    }
}
