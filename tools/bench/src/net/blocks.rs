//! Which block lies where and what is in it: equal blocks in different orders at the two ends, so
//! that no two neighbours of one end are neighbours at the other, filled with what only this block
//! of this run has. Pure.

use super::segment::{End, Memory};
use std::fmt;

/// A transfer of about this many bytes, unless it is asked for otherwise,
const TOTAL_BYTES: usize = 1_000_000_000;
/// with this many blocks at most.
const BLOCKS_MAX: usize = 10_000;

/// Bytes of a block, as written on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub usize);

/// Reads a size in bytes: a number, with KB, MB, KiB or MiB behind it or not.
pub fn size(text: &str) -> Result<Size, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KB" => 1_000,
        "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "MiB" => 1 << 20,
        other => return Err(format!("'{other}' is no unit; allowed: B, KB, KiB, MB, MiB")),
    };
    let bytes = digits.parse::<usize>().ok().and_then(|number| number.checked_mul(unit));
    let bytes = bytes.filter(|bytes| (8..=1 << 30).contains(bytes) && bytes % 8 == 0);
    bytes.map(Size).ok_or_else(|| format!("'{text}'; allowed: multiples of 8 from 8 B to 1 GiB"))
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % (1 << 20) == 0 => write!(f, "{}MiB", bytes >> 20),
            bytes if bytes % 1_000_000 == 0 => write!(f, "{}MB", bytes / 1_000_000),
            bytes if bytes % 1_024 == 0 => write!(f, "{}KiB", bytes >> 10),
            bytes if bytes % 1_000 == 0 => write!(f, "{}KB", bytes / 1_000),
            bytes => write!(f, "{bytes}"),
        }
    }
}

/// A number of equal blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub block_bytes: usize,
    pub blocks: usize,
}

impl Shape {
    pub fn new(block_bytes: usize, blocks: Option<usize>) -> Shape {
        let usual = (TOTAL_BYTES / block_bytes).clamp(1, BLOCKS_MAX);
        Shape { block_bytes, blocks: blocks.unwrap_or(usual) }
    }

    /// Bytes of all blocks.
    pub fn bytes(self) -> usize {
        self.block_bytes * self.blocks
    }

    /// Where a block begins.
    pub fn offset(self, end: End, block: usize) -> usize {
        let wish = match end {
            End::Asking => 7_919,
            End::Owner => 104_729,
        };
        let step = (wish..).find(|step| gcd(*step, self.blocks) == 1).unwrap_or(1);
        (block * (step % self.blocks.max(1)) % self.blocks) * self.block_bytes
    }

    /// As part of a row's name: `26kb`.
    pub fn name(self) -> String {
        Size(self.block_bytes).to_string().to_ascii_lowercase()
    }
}

/// Writes what a block has in a run.
pub fn fill(bytes: &mut [u8], run: u64, block: usize) {
    let mut state = mix(run, block);
    for word in bytes.chunks_exact_mut(8) {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// Whether a block has what it should have.
pub fn is_right(bytes: &[u8], run: u64, block: usize) -> bool {
    let mut state = mix(run, block);
    bytes.chunks_exact(8).all(|word| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        *word == state.to_le_bytes()
    })
}

/// Writes what every block has in a run.
pub fn fill_all(shape: Shape, end: End, memory: &Memory, run: u64) {
    let mut bytes = vec![0; shape.block_bytes];
    for block in 0..shape.blocks {
        fill(&mut bytes, run, block);
        memory.write(shape.offset(end, block), &bytes);
    }
}

/// Blocks that do not have what they should have after a run.
pub fn wrong_blocks(shape: Shape, end: End, memory: &Memory, run: u64) -> usize {
    let mut bytes = vec![0; shape.block_bytes];
    let wrong = |block: &usize| {
        !(memory.read(shape.offset(end, *block), &mut bytes) && is_right(&bytes, run, *block))
    };
    (0..shape.blocks).filter(wrong).count()
}

fn mix(run: u64, block: usize) -> u64 {
    (run.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ block as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn gcd(one: usize, other: usize) -> usize {
    if other == 0 { one } else { gcd(other, one % other) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_every_block_once_and_in_another_order() {
        for blocks in [1, 2, 7, 1_000, 7_919, 10_000] {
            let shape = Shape { block_bytes: 16, blocks };
            let places = |end| (0..blocks).map(|block| shape.offset(end, block)).collect::<Vec<_>>();
            let (mut asking, owner) = (places(End::Asking), places(End::Owner));
            assert!(blocks < 1_000 || asking != owner);
            asking.sort_unstable();
            assert_eq!(asking, (0..blocks).map(|at| at * 16).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_block_of_another_run_or_place_is_wrong() {
        let mut bytes = [0; 64];
        fill(&mut bytes, 3, 4);
        assert!(is_right(&bytes, 3, 4) && !is_right(&bytes, 3, 5) && !is_right(&bytes, 2, 4));
        bytes[63] ^= 1;
        assert!(!is_right(&bytes, 3, 4));
    }

    #[test]
    fn sizes_have_units_and_limits() {
        assert_eq!(size("26KB"), Ok(Size(26_000)));
        assert_eq!(size("1MiB").map(|size| size.to_string()), Ok("1MiB".into()));
        for bad in ["", "KB", "7", "3GB", "-8", "2097152KiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
