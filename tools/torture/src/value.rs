//! Values whose every byte is a function of (key, version, position), so that a wrong one is
//! noticed and can be told apart: another key's, an older version, zeros, or nothing that was ever
//! stored.

use crate::random::mix;

/// Bytes that are made, and judged, together: the smallest unit that a disk writes.
pub const SECTOR_BYTES: usize = 512;
/// Bytes at the start of a sector by which it is recognised.
pub const MARK_BYTES: usize = 16;

/// The value of `key` in its `version`-th edition.
pub fn value(key: u64, version: u32, bytes: usize) -> Vec<u8> {
    let mut value = Vec::with_capacity(bytes.next_multiple_of(8));
    for word in 0..bytes.div_ceil(8) {
        value.extend_from_slice(&word_of(key, version, word).to_le_bytes());
    }
    value.truncate(bytes);
    value
}

/// The first bytes of a value's sector. No two sectors share them.
pub fn mark(key: u64, version: u32, sector: usize) -> [u8; MARK_BYTES] {
    let first = sector * SECTOR_BYTES / 8;
    let mut mark = [0; MARK_BYTES];
    mark[..8].copy_from_slice(&word_of(key, version, first).to_le_bytes());
    mark[8..].copy_from_slice(&word_of(key, version, first + 1).to_le_bytes());
    mark
}

fn word_of(key: u64, version: u32, word: usize) -> u64 {
    let stream = mix(mix(key ^ 0xF0E1_BA70).wrapping_add(u64::from(version)));
    mix(stream ^ (word as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wrong {
    /// Bytes that differ from what was due, missing ones included.
    pub bytes: u64,
    /// Sectors of another key.
    pub foreign: usize,
    /// Sectors of another version of the key.
    pub stale: usize,
    pub zeros: usize,
    /// Sectors that are nothing that was stored.
    pub garbage: usize,
    pub resized: bool,
}

/// Which version of `key` the value `found` is, byte for byte, or how it is wrong. `allowed` are
/// the versions that may come back; `keys` and `versions` (from 0, exclusive) are all that were
/// ever stored, to tell where wrong bytes come from.
pub fn judge(
    found: &[u8],
    key: u64,
    allowed: &[u32],
    bytes: usize,
    keys: u64,
    versions: u32,
) -> Result<u32, Wrong> {
    let mut nearest = None;
    for &version in allowed {
        let due = value(key, version, bytes);
        if found == due {
            return Ok(version);
        }
        let wrong = compare(found, &due, key, version, keys, versions);
        if nearest.as_ref().is_none_or(|nearest: &Wrong| wrong.bytes < nearest.bytes) {
            nearest = Some(wrong);
        }
    }
    // Nothing was allowed at all: all that came back is wrong.
    let unwanted = || Wrong {
        bytes: found.len() as u64,
        resized: false,
        ..compare(found, &[], key, u32::MAX, keys, versions)
    };
    Err(nearest.unwrap_or_else(unwanted))
}

fn compare(found: &[u8], due: &[u8], key: u64, version: u32, keys: u64, versions: u32) -> Wrong {
    let common = found.len().min(due.len());
    let different = found.iter().zip(due).filter(|(found, due)| found != due).count();
    let mut wrong = Wrong {
        bytes: (different + found.len().max(due.len()) - common) as u64,
        resized: found.len() != due.len(),
        ..Wrong::default()
    };
    for (number, sector) in found.chunks(SECTOR_BYTES).enumerate() {
        let start = number * SECTOR_BYTES;
        if due.get(start..start + sector.len()) == Some(sector) {
            continue;
        }
        let is_of = |key, version| sector.starts_with(&mark(key, version, number));
        let is_stale = (0..versions).any(|other| other != version && is_of(key, other));
        let is_foreign =
            || (0..keys).any(|other| other != key && (0..versions).any(|version| is_of(other, version)));
        match () {
            () if sector.iter().all(|byte| *byte == 0) => wrong.zeros += 1,
            () if is_stale => wrong.stale += 1,
            () if is_foreign() => wrong.foreign += 1,
            () => wrong.garbage += 1,
        }
    }
    wrong
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kinds = [
            (self.foreign, "of another key"),
            (self.stale, "of another version"),
            (self.zeros, "of zeros"),
            (self.garbage, "of nothing that was stored"),
        ];
        let named = kinds
            .iter()
            .filter(|(sectors, _)| *sectors > 0)
            .map(|(sectors, kind)| format!("{sectors} sectors {kind}"))
            .chain(self.resized.then(|| "another length".into()));
        write!(f, "{} wrong bytes: {}", self.bytes, named.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 8 * SECTOR_BYTES;

    fn judged(found: &[u8]) -> Result<u32, Wrong> {
        judge(found, 3, &[1], BYTES, 10, 2)
    }

    fn wrong(found: &[u8]) -> Wrong {
        judged(found).unwrap_err()
    }

    #[test]
    fn only_the_value_itself_is_right() {
        assert_eq!(judged(&value(3, 1, BYTES)), Ok(1));
        assert_eq!(wrong(&value(3, 0, BYTES)).stale, 8);
        assert_eq!(wrong(&value(4, 1, BYTES)).foreign, 8);
        assert_eq!(wrong(&[0; BYTES]).zeros, 8);
        assert_eq!(wrong(&[1; BYTES]).garbage, 8);
    }

    #[test]
    fn one_flipped_bit_is_one_wrong_byte() {
        let mut flipped = value(3, 1, BYTES);
        flipped[1000] ^= 4;
        assert_eq!(wrong(&flipped), Wrong { bytes: 1, garbage: 1, ..Wrong::default() });
    }

    #[test]
    fn a_torn_value_is_told_by_its_sectors() {
        let mut torn = value(3, 1, BYTES);
        torn[5 * SECTOR_BYTES..].copy_from_slice(&value(3, 0, BYTES)[5 * SECTOR_BYTES..]);
        assert_eq!(wrong(&torn).stale, 3);
    }

    #[test]
    fn missing_and_surplus_bytes_are_wrong() {
        let half = wrong(&value(3, 1, BYTES)[..BYTES / 2]);
        assert_eq!((half.bytes, half.resized), (BYTES as u64 / 2, true));
        assert_eq!(wrong(&value(3, 1, BYTES + 5)).bytes, 5);
        assert_eq!(wrong(&[]).bytes, BYTES as u64);
    }

    #[test]
    fn what_should_not_be_there_is_wrong_even_if_it_once_was_right() {
        let stale = judge(&value(3, 0, BYTES), 3, &[], BYTES, 10, 2);
        assert!(matches!(stale, Err(wrong) if wrong.stale == 8 && wrong.bytes > 0));
    }
}
