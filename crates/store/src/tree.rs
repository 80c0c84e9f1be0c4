//! A prefix tree of chunks: a chunk's parent is the chunk before it in a prompt, and its children
//! are the chunks that continue it. It keeps rows of the index, no ids and no bytes.

use crate::entry::Row;
use std::collections::HashSet;

/// Parents and children of rows, as links in both directions; every change is O(1).
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Node {
    parent: Option<Row>,
    first_child: Option<Row>,
    /// Neighbours among the parent's children.
    before: Option<Row>,
    after: Option<Row>,
}

impl Tree {
    pub fn new(limit: usize) -> Tree {
        Tree { nodes: Vec::with_capacity(limit) }
    }

    /// Puts a row that has no relatives below `parent`, or makes it a root.
    pub fn add(&mut self, row: Row, parent: Option<Row>) {
        if self.nodes.len() <= row.position() {
            self.nodes.resize(row.position() + 1, Node::default());
        }
        let after = parent.and_then(|parent| self.node_mut(parent).first_child.replace(row));
        if let Some(after) = after {
            self.node_mut(after).before = Some(row);
        }
        *self.node_mut(row) = Node { parent, first_child: None, before: None, after };
    }

    /// Takes a row without children out, and returns its parent.
    pub fn remove(&mut self, row: Row) -> Option<Row> {
        debug_assert!(self.is_leaf(row), "children go before their parents");
        let Node { parent, before, after, .. } = std::mem::take(self.node_mut(row));
        match (before, parent) {
            (Some(before), _) => self.node_mut(before).after = after,
            (None, Some(parent)) => self.node_mut(parent).first_child = after,
            (None, None) => {}
        }
        if let Some(after) = after {
            self.node_mut(after).before = before;
        }
        parent
    }

    /// The row that this one continues.
    pub fn parent(&self, row: Row) -> Option<Row> {
        self.nodes[row.position()].parent
    }

    pub fn is_leaf(&self, row: Row) -> bool {
        self.nodes[row.position()].first_child.is_none()
    }

    /// The rows and everything below them, each once, in no particular order. Nothing as soon as
    /// one of them may not be in it.
    pub fn descend(&self, mut rows: Vec<Row>, mut may: impl FnMut(Row) -> bool) -> Option<Vec<Row>> {
        let (mut seen, mut found) = (HashSet::new(), Vec::new());
        while let Some(row) = rows.pop() {
            if !seen.insert(row) {
                continue;
            }
            if !may(row) {
                return None;
            }
            rows.extend(self.children(row));
            found.push(row);
        }
        Some(found)
    }

    pub fn children(&self, row: Row) -> impl Iterator<Item = Row> + '_ {
        std::iter::successors(self.nodes[row.position()].first_child, |child| {
            self.nodes[child.position()].after
        })
    }

    pub fn table_bytes(&self) -> u64 {
        (self.nodes.capacity() * size_of::<Node>()) as u64
    }

    fn node_mut(&mut self, row: Row) -> &mut Node {
        &mut self.nodes[row.position()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(position: usize) -> Row {
        Row::at(position).unwrap()
    }

    #[test]
    fn children_can_go_in_any_order_and_the_last_leaves_a_leaf() {
        for order in [[1, 2, 3], [3, 2, 1], [2, 1, 3], [2, 3, 1]] {
            let mut tree = Tree::new(4);
            tree.add(row(0), None);
            (1..4).for_each(|child| tree.add(row(child), Some(row(0))));
            for (gone, child) in order.into_iter().enumerate() {
                assert!(!tree.is_leaf(row(0)));
                assert_eq!(tree.children(row(0)).count(), 3 - gone);
                assert_eq!(tree.remove(row(child)), Some(row(0)));
            }
            assert!(tree.is_leaf(row(0)));
        }
    }

    #[test]
    fn descending_finds_every_descendant_once() {
        let mut tree = Tree::new(6);
        let parents = [None, Some(0), Some(0), Some(1), Some(3), None];
        for (child, parent) in parents.into_iter().enumerate() {
            tree.add(row(child), parent.map(row));
        }
        for (from, expected) in [(vec![0], vec![0, 1, 2, 3, 4]), (vec![3, 1, 5, 3], vec![1, 3, 4, 5])] {
            let mut found: Vec<usize> = tree
                .descend(from.into_iter().map(row).collect(), |_| true)
                .unwrap()
                .into_iter()
                .map(Row::position)
                .collect();
            found.sort_unstable();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn descending_ends_at_the_first_row_that_has_to_stay() {
        let mut tree = Tree::new(9);
        (0..9).for_each(|child| tree.add(row(child), child.checked_sub(1).map(row)));
        let mut looks = 0;
        let may = |at: Row| {
            looks += 1;
            at != row(2)
        };
        assert_eq!(tree.descend(vec![row(0)], may), None);
        assert_eq!(looks, 3);
    }

    #[test]
    fn a_node_is_sixteen_bytes() {
        assert_eq!(size_of::<Node>(), 16);
    }
}
