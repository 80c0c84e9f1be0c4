//! The prompts of a workload as a prefix tree, so that a cache can be kept by runs of tokens and
//! not by blocks. It knows which prompts begin alike. It knows no engine and no time.

use forebay_trace::prefix::prefix_keys;
use forebay_trace::request::TraceRequest;
use std::collections::HashMap;

/// A run of tokens that all prompts through it have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// Positions of a run in its prompts, and the run before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    parent: Option<NodeId>,
    start: u32,
    end: u32,
}

/// A node and the positions of its tokens in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub node: NodeId,
    pub start: u32,
    pub end: u32,
}

/// The tree. A prompt is its leaf and a length.
#[derive(Debug, Default)]
pub struct Prefixes {
    nodes: Vec<Node>,
}

impl Prefixes {
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// The runs of the first `tokens` tokens of a leaf's sequence, from the first.
    pub fn path(&self, leaf: NodeId, tokens: u32) -> Vec<Run> {
        let mut path = Vec::with_capacity(4);
        let mut next = Some(leaf);
        while let Some(node) = next {
            let Node { parent, start, end } = self.nodes[node.0 as usize];
            if start < tokens {
                path.push(Run { node, start, end: end.min(tokens) });
            }
            next = parent;
        }
        path.reverse();
        path
    }
}

/// Makes a tree of sequences, one after the other.
#[derive(Default)]
pub struct PrefixesBuilder {
    prefixes: Prefixes,
    /// The node that had a prefix when it was added. Of a node that was split since, the prefix
    /// may belong to one above it.
    known: HashMap<u64, NodeId>,
}

impl PrefixesBuilder {
    /// Adds a sequence that begins with the blocks of `last` and is `tokens` long in all. Returns
    /// its leaf, which no other sequence has.
    pub fn add(&mut self, last: &TraceRequest, tokens: u32) -> NodeId {
        let keys = prefix_keys(last).collect::<Vec<_>>();
        // Whoever knows a prefix knows all shorter ones.
        let shared = keys.partition_point(|key| self.known.contains_key(key));
        let position = (shared as u32).saturating_mul(last.block_tokens).min(last.input_tokens);
        let parent = shared.checked_sub(1).map(|index| self.split(self.known[&keys[index]], position));
        let leaf = self.push(Node { parent, start: position, end: tokens.max(position) });
        for &key in &keys[shared..] {
            self.known.insert(key, leaf);
        }
        leaf
    }

    /// The tree, without what only its making needs.
    pub fn finish(self) -> Prefixes {
        self.prefixes
    }

    /// The node that ends at `position`, on the way to `below`.
    fn split(&mut self, below: NodeId, position: u32) -> NodeId {
        let mut lower = below;
        while let Node { parent: Some(parent), start, .. } = self.prefixes.nodes[lower.0 as usize]
            && position <= start
        {
            lower = parent;
        }
        let Node { parent, start, end } = self.prefixes.nodes[lower.0 as usize];
        if position >= end {
            return lower;
        }
        let upper = self.push(Node { parent, start, end: position });
        self.prefixes.nodes[lower.0 as usize] = Node { parent: Some(upper), start: position, end };
        upper
    }

    fn push(&mut self, node: Node) -> NodeId {
        self.prefixes.nodes.push(node);
        NodeId(self.prefixes.nodes.len() as u32 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prompt(blocks: &[u64]) -> TraceRequest {
        let blocks = blocks.to_vec();
        TraceRequest {
            input_tokens: 16 * blocks.len() as u32,
            block_tokens: 16,
            blocks,
            ..Default::default()
        }
    }

    proptest! {
        #[test]
        fn two_prompts_share_exactly_the_nodes_of_their_common_prefix(
            prompts in prop::collection::vec(prop::collection::vec(0..3_u64, 0..8), 1..12),
        ) {
            let mut builder = PrefixesBuilder::default();
            let leaves: Vec<NodeId> =
                prompts.iter().map(|blocks| builder.add(&prompt(blocks), 16 * blocks.len() as u32 + 5)).collect();
            let prefixes = builder.finish();
            for (a, leaf_a) in prompts.iter().zip(&leaves) {
                let length = 16 * a.len() as u32 + 5;
                let path = prefixes.path(*leaf_a, length);
                prop_assert_eq!(path.iter().map(|run| run.end - run.start).sum::<u32>(), length);
                prop_assert!(path.windows(2).all(|runs| runs[0].end == runs[1].start));
                for (b, leaf_b) in prompts.iter().zip(&leaves).filter(|(_, leaf)| *leaf != leaf_a) {
                    let other = prefixes.path(*leaf_b, 16 * b.len() as u32 + 5);
                    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count() as u32 * 16;
                    let shared = path.iter().zip(&other).take_while(|(a, b)| a.node == b.node);
                    prop_assert_eq!(shared.map(|(run, _)| run.end - run.start).sum::<u32>(), common);
                }
            }
        }
    }
}
