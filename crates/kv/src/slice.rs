//! Which heads each tensor-parallel worker holds, and who gives which heads to whom when the sizes
//! differ.
//!
//! Knows head numbers and ranks.
//!
//! The rule is that of vLLM and Megatron. With as many heads as ranks or more, each rank holds an
//! equal run of heads. With fewer, each head is held by an equal run of ranks, all copies alike.
//! The one shared latent of MLA is a single head, so every rank holds all of it.

use std::ops::Range;

use crate::rank::{MAX_RANKS, Rank};

/// How `heads` KV heads are split over `size` ranks.
///
/// ```
/// use forebay_kv::HeadSplit;
///
/// let prefill = HeadSplit::new(8, 2)?;
/// let decode = HeadSplit::new(8, 4)?;
/// assert_eq!(decode.heads_of(3)?, 6..8);
/// // Decode rank 3 reads its two heads from prefill rank 1, where they are local heads 2 and 3.
/// let reads = decode.reads(3, &prefill)?;
/// assert_eq!((reads[0].from_rank, reads[0].from_heads(), reads[0].to_heads()), (1, 2..4, 0..2));
/// # Ok::<(), forebay_kv::SplitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadSplit {
    heads: u32,
    size: u32,
}

/// A run of heads that one rank gives to another. Local heads are counted from the first head that
/// a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadMove {
    /// The rank that gives.
    pub from_rank: u32,
    /// The first local head of the giver.
    pub from_head: u32,
    /// The rank that receives.
    pub to_rank: u32,
    /// The first local head of the receiver.
    pub to_head: u32,
    pub heads: u32,
}

impl HeadMove {
    pub const fn from_heads(&self) -> Range<u32> {
        self.from_head..self.from_head + self.heads
    }

    pub const fn to_heads(&self) -> Range<u32> {
        self.to_head..self.to_head + self.heads
    }
}

/// Heads that cannot be split as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    #[error("heads is 0; allowed: 1 or more")]
    NoHeads,
    #[error("tensor parallel size is {size}; allowed: 1 to {MAX_RANKS}")]
    Size { size: u32 },
    #[error(
        "{heads} heads over a tensor parallel size of {size}; allowed: sizes that divide the heads or are a \
         multiple of them"
    )]
    Uneven { heads: u32, size: u32 },
    #[error("one side has {ours} heads and the other {theirs}; allowed: the same number on both")]
    Different { ours: u32, theirs: u32 },
    #[error("rank is {rank}; allowed: 0 to {last} for a tensor parallel size of {size}", last = size - 1)]
    Rank { rank: u32, size: u32 },
}

impl HeadSplit {
    /// Splits `heads` over `size` ranks.
    ///
    /// # Errors
    /// When either is zero, the size exceeds [`MAX_RANKS`], or neither divides the other.
    pub const fn new(heads: u32, size: u32) -> Result<Self, SplitError> {
        if heads == 0 {
            Err(SplitError::NoHeads)
        } else if Rank::new(0, size).is_err() {
            Err(SplitError::Size { size })
        } else if !heads.is_multiple_of(size) && !size.is_multiple_of(heads) {
            Err(SplitError::Uneven { heads, size })
        } else {
            Ok(Self { heads, size })
        }
    }

    /// Heads of the whole model.
    pub const fn heads(&self) -> u32 {
        self.heads
    }

    /// Ranks that they are split over.
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Heads that each rank holds; at least 1.
    pub const fn heads_per_rank(&self) -> u32 {
        if self.heads > self.size { self.heads / self.size } else { 1 }
    }

    /// Ranks that hold a copy of each head; at least 1.
    pub const fn copies(&self) -> u32 {
        if self.size > self.heads { self.size / self.heads } else { 1 }
    }

    /// The heads that a rank holds, as the whole model counts them.
    ///
    /// # Errors
    /// When there is no such rank.
    pub const fn heads_of(&self, rank: u32) -> Result<Range<u32>, SplitError> {
        if rank >= self.size {
            return Err(SplitError::Rank { rank, size: self.size });
        }
        let first = rank / self.copies() * self.heads_per_rank();
        Ok(first..first + self.heads_per_rank())
    }

    /// What `rank` of this split reads from a `source` split: each of its heads exactly once, in
    /// order.
    ///
    /// Where the source holds copies, readers of one head are spread evenly over them, and equal
    /// splits read rank by rank.
    ///
    /// # Errors
    /// When there is no such rank or the source has another number of heads.
    pub fn reads(&self, rank: u32, source: &HeadSplit) -> Result<Vec<HeadMove>, SplitError> {
        self.check_same_heads(source)?;
        let wanted = self.heads_of(rank)?;
        let copy = rank % self.copies() * source.copies() / self.copies();
        let held = source.heads_per_rank();
        let givers = wanted.start / held..wanted.end.div_ceil(held);
        Ok(givers
            .map(|giver| {
                let start = wanted.start.max(giver * held);
                let end = wanted.end.min((giver + 1) * held);
                HeadMove {
                    from_rank: giver * source.copies() + copy,
                    from_head: start - giver * held,
                    to_rank: rank,
                    to_head: start - wanted.start,
                    heads: end - start,
                }
            })
            .collect())
    }

    /// What `rank` of this split gives to the ranks of a `target` split: the same moves as
    /// [`HeadSplit::reads`] of all target ranks, seen from the giver. A rank whose copy nobody
    /// reads gives nothing.
    ///
    /// # Errors
    /// When there is no such rank or the target has another number of heads.
    pub fn writes(&self, rank: u32, target: &HeadSplit) -> Result<Vec<HeadMove>, SplitError> {
        self.check_same_heads(target)?;
        let held = self.heads_of(rank)?;
        let per_target = target.heads_per_rank();
        let first = held.start / per_target * target.copies();
        let last = held.end.div_ceil(per_target) * target.copies();
        let mut writes = Vec::new();
        for receiver in first..last {
            writes.extend(target.reads(receiver, self)?.into_iter().filter(|read| read.from_rank == rank));
        }
        Ok(writes)
    }

    const fn check_same_heads(&self, other: &HeadSplit) -> Result<(), SplitError> {
        if self.heads == other.heads {
            Ok(())
        } else {
            Err(SplitError::Different { ours: self.heads, theirs: other.heads })
        }
    }
}
