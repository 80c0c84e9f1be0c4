//! Which buffer of the ring a piece of memory lies in. This file knows addresses; it must never
//! follow one.

use std::io;

/// Buffers of a ring at most.
pub(crate) const PINNED_PARTS_MAX: usize = 1024;
/// The system pins no more than this as one buffer.
const PART_BYTES_MAX: usize = 1 << 30;

/// Pinned memory: ranges of addresses, sorted, that do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    parts: Vec<Part>,
}

/// One buffer of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub start: usize,
    pub len: usize,
    pub index: u16,
}

impl Pinned {
    /// Cuts `len` bytes at `start` into parts that the system can pin, numbered behind those that
    /// there are.
    pub fn cut(&self, start: usize, len: usize) -> io::Result<Vec<Part>> {
        let overlaps = |part: &Part| part.start < start.saturating_add(len) && start < part.start + part.len;
        if self.parts.iter().any(overlaps) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "some of the memory is pinned already"));
        }
        let count = len.div_ceil(PART_BYTES_MAX);
        if self.parts.len() + count > PINNED_PARTS_MAX {
            let message =
                format!("{PINNED_PARTS_MAX} parts of {PART_BYTES_MAX} bytes can be pinned; no more");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, message));
        }
        let part = |number: usize| {
            let offset = number * PART_BYTES_MAX;
            let index = (self.parts.len() + number) as u16;
            Part { start: start + offset, len: PART_BYTES_MAX.min(len - offset), index }
        };
        Ok((0..count).map(part).collect())
    }

    /// Adds a part that the system has pinned.
    pub fn insert(&mut self, part: Part) {
        let at = self.parts.partition_point(|other| other.start < part.start);
        self.parts.insert(at, part);
    }

    /// The buffer that holds all of `len` bytes at `start`.
    pub fn find(&self, start: usize, len: usize) -> Option<u16> {
        let at = self.parts.partition_point(|part| part.start <= start).checked_sub(1)?;
        let part = self.parts.get(at)?;
        (start - part.start + len <= part.len).then_some(part.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    #[test]
    fn memory_is_found_where_all_of_it_is_pinned_and_nowhere_else() {
        let mut pinned = Pinned::default();
        for (start, len) in [(8 * GIB, GIB + 4096), (2 * GIB, 8192)] {
            pinned.cut(start, len).unwrap().into_iter().for_each(|part| pinned.insert(part));
        }
        assert_eq!(pinned.find(8 * GIB, GIB), Some(0));
        assert_eq!(pinned.find(9 * GIB, 4096), Some(1));
        assert_eq!(pinned.find(9 * GIB - 4096, 8192), None, "across two buffers");
        assert_eq!(pinned.find(2 * GIB + 4096, 4096), Some(2));
        assert_eq!(pinned.find(2 * GIB + 4096, 4097), None);
        assert_eq!((pinned.find(0, 1), pinned.find(7 * GIB, 1)), (None, None));
    }

    #[test]
    fn memory_is_pinned_once_and_within_the_limit() {
        let mut pinned = Pinned::default();
        pinned.cut(GIB, GIB).unwrap().into_iter().for_each(|part| pinned.insert(part));
        assert!(pinned.cut(2 * GIB - 1, 1).is_err());
        assert!(pinned.cut(2 * GIB, PINNED_PARTS_MAX * GIB).is_err());
        assert!(pinned.cut(2 * GIB, (PINNED_PARTS_MAX - 1) * GIB).is_ok());
    }
}
