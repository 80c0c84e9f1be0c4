//! Which part of a model a worker holds.
//!
//! Knows that ranks are numbered from 0 below their size.

use std::fmt;

/// The most workers that one dimension of parallelism may have.
pub const MAX_RANKS: u32 = 4096;

/// A worker's place in one dimension of parallelism: `rank` of `size`, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    rank: u32,
    size: u32,
}

/// A place that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankError {
    #[error("parallel size is {size}; allowed: 1 to {MAX_RANKS}")]
    Size { size: u32 },
    #[error("rank is {rank}; allowed: 0 to {last} for a size of {size}", last = size - 1)]
    Rank { rank: u32, size: u32 },
}

impl Rank {
    /// The only worker.
    pub const ONLY: Rank = Rank { rank: 0, size: 1 };

    /// Place `rank` of `size`.
    ///
    /// # Errors
    /// When `size` is not 1 to [`MAX_RANKS`] or `rank` is not below `size`.
    pub const fn new(rank: u32, size: u32) -> Result<Self, RankError> {
        if size == 0 || size > MAX_RANKS {
            Err(RankError::Size { size })
        } else if rank >= size {
            Err(RankError::Rank { rank, size })
        } else {
            Ok(Self { rank, size })
        }
    }

    /// The place, from 0.
    pub const fn rank(self) -> u32 {
        self.rank
    }

    /// How many places there are; at least 1.
    pub const fn size(self) -> u32 {
        self.size
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.rank, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_outside_its_size_cannot_be_made() {
        assert_eq!(Rank::new(0, 0), Err(RankError::Size { size: 0 }));
        assert_eq!(Rank::new(0, MAX_RANKS + 1), Err(RankError::Size { size: MAX_RANKS + 1 }));
        assert_eq!(Rank::new(4, 4), Err(RankError::Rank { rank: 4, size: 4 }));
        assert_eq!(Rank::new(0, 1), Ok(Rank::ONLY));
    }
}
