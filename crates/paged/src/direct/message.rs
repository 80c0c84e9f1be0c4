//! What two engines say to each other about an offer: the decoder asks, the prefiller answers.
//! Bytes of a peer are checked here as far as their form goes; [`plan`](super::plan) checks the
//! numbers.

use crate::cache::CacheShape;
use serde::{Deserialize, Serialize};

/// Names an offer. Whoever has it may read what is offered, so it cannot be guessed.
pub type Key = [u8; 16];
/// What both engines make of a prompt and of all that its KV depends on. Who reads an offer must
/// have the same: a ticket may be for another prompt.
pub type Digest = [u8; 32];

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// A lease of what is offered under the key, of which this is wanted. `readers` open it, each
    /// once. Who asks while the prefiller computes waits so long for the offer.
    Open { key: Key, digest: Digest, wanted: Blocks, heads: Heads, readers: u32, wait_us: u64 },
    /// To let a lease live on.
    Renew { lease: u64 },
    /// Nothing of it is read any more.
    Close { key: Key, lease: u64 },
    /// Nobody will open it.
    Decline { key: Key },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Opened(Opened),
    /// Whether a lease lives.
    Lives(bool),
    /// Whether it lived until now, and a checksum of each layer of what was wanted.
    Closed {
        lived: bool,
        sums: Vec<u64>,
    },
}

/// Heads of a page, where a layer's pages have several: a first one and how many. None: the whole
/// page.
pub type Heads = Option<(u32, u32)>;
/// Blocks of a sequence by group: runs of a first one and how many follow it, in order.
pub type Blocks = Vec<Vec<(u64, u64)>>;

/// A lease, and what lies where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    pub lease: u64,
    pub ttl_us: u64,
    /// The page of each block of the sequence from its first token on, by group; -1: there is none.
    pub tables: Vec<Vec<i64>>,
    pub memory: Memory,
}

/// Where a cache's layers lie.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub allocations: Vec<Allocation>,
    /// In the order of the cache's layers.
    pub layers: Vec<LayerAt>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Allocation {
    /// A region of the engine's agent.
    Host { key: u64, generation: u64, bytes: u64 },
    /// An allocation of a GPU, by its handle.
    Gpu { handle: [[u8; 32]; 2], bytes: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerAt {
    /// Which of the allocations has it.
    pub allocation: u32,
    /// Of page 0 in that.
    pub offset: u64,
    pub pages: u64,
    pub stride_bytes: u64,
    pub page_bytes: u64,
    /// Of a page, which come one after another; 1 where a page is never cut by heads.
    pub heads: u32,
    pub group: u32,
}

impl Allocation {
    pub fn bytes(&self) -> u64 {
        match self {
            Allocation::Host { bytes, .. } | Allocation::Gpu { bytes, .. } => *bytes,
        }
    }
}

impl Question {
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Question, postcard::Error> {
        postcard::from_bytes(bytes)
    }
}

impl Answer {
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Answer, postcard::Error> {
        postcard::from_bytes(bytes)
    }
}

/// Vectors grow, so nothing of these types fails. What the other side could not read it refuses.
fn encode(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).unwrap_or_default()
}

impl Memory {
    /// The layers of a cache in allocations: `place` gives the allocation and the offset of an
    /// address.
    pub fn of<E>(
        cache: &CacheShape,
        allocations: Vec<Allocation>,
        mut place: impl FnMut(u64) -> Result<(u32, u64), E>,
    ) -> Result<Memory, E> {
        let layer = |layer: &crate::cache::Layer| {
            let (allocation, offset) = place(layer.address)?;
            Ok(LayerAt {
                allocation,
                offset,
                pages: layer.pages,
                stride_bytes: layer.stride_bytes,
                page_bytes: layer.page_bytes,
                heads: cache.group_of(layer).heads,
                group: layer.group as u32,
            })
        };
        let layers = cache.layers().iter().map(layer).collect::<Result<_, E>>()?;
        Ok(Memory { allocations, layers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_was_said_is_understood() {
        let layer = LayerAt {
            allocation: 1,
            offset: 2,
            pages: 3,
            stride_bytes: 4,
            page_bytes: 5,
            heads: 24,
            group: 6,
        };
        let allocations = vec![
            Allocation::Host { key: 7, generation: 8, bytes: 9 },
            Allocation::Gpu { handle: [[10; 32], [11; 32]], bytes: 12 },
        ];
        let memory = Memory { allocations, layers: vec![layer] };
        let opened = Opened { lease: 13, ttl_us: 14, tables: vec![vec![15, -1], vec![]], memory };
        let closed = Answer::Closed { lived: true, sums: vec![20, 21] };
        for answer in [Answer::Opened(opened), Answer::Lives(true), Answer::Lives(false), closed] {
            assert_eq!(Answer::decode(&answer.encode()).unwrap(), answer);
        }
        let key = [16; 16];
        for question in [
            Question::Open {
                key,
                digest: [19; 32],
                wanted: vec![vec![(22, 23)], vec![]],
                heads: Some((25, 26)),
                readers: 27,
                wait_us: 28,
            },
            Question::Renew { lease: 17 },
            Question::Close { key, lease: 18 },
            Question::Decline { key },
        ] {
            assert_eq!(Question::decode(&question.encode()).unwrap(), question);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_understood_or_not(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Question::decode(&bytes), Answer::decode(&bytes));
        }
    }
}
