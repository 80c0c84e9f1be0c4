//! Which bytes of a peer's cache go where in this one. Pure. The peer's numbers are not trusted: a
//! plan names no byte outside of what the peer offers or of this cache.

use super::message::{Blocks, Heads, LayerAt, Opened};
use crate::cache::{CacheShape, Layer};
use crate::page_tables::PageTables;
use crate::pages::HeadRange;
use std::ops::Range;
use thiserror::Error;

/// Adjacent bytes of a layer that are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    pub layer: u32,
    /// Which allocation of the peer, and where in it.
    pub allocation: u32,
    pub from: u64,
    /// From this cache's page 0 of the layer on.
    pub to: u64,
    pub bytes: u64,
}

/// Why a peer's offer does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Misfit {
    #[error("the peer has {given} {what}; allowed: {allowed}, as here")]
    Count { what: &'static str, given: u64, allowed: u64 },
    #[error("the peer's layer {layer} has {what} {given}; allowed: {allowed}, as here, or as many heads")]
    Layer { layer: usize, what: &'static str, given: u64, allowed: u64 },
    #[error("the peer's layer {layer} ends behind its allocation")]
    OutOfBounds { layer: usize },
    #[error("the peer has no page for block {block} of group {group}")]
    NoPage { group: usize, block: u64 },
    #[error("the peer wants {runs} runs of blocks of group {group}, of which one is not behind the last")]
    Order { group: usize, runs: usize },
    #[error("the peer wants block {block} of group {group}, of which nothing is offered")]
    NotOffered { group: usize, block: u64 },
}

/// What a decoder wants of a sequence: which blocks, and its own pages for them, both by group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub blocks: Blocks,
    pub pages: Vec<Vec<u64>>,
}

impl Wanted {
    /// What pages are given for: `tables` begin at the sequence's token `first_token`.
    pub fn of(cache: &CacheShape, tables: &PageTables, first_token: u64, tokens: u64) -> Wanted {
        let mut wanted = Wanted { blocks: Vec::new(), pages: Vec::new() };
        for (number, group) in cache.groups().iter().enumerate() {
            let page_tokens = u64::from(group.page_tokens);
            let (skipped, blocks) = (first_token / page_tokens, tokens.div_ceil(page_tokens));
            let (mut runs, mut pages) = (Vec::<(u64, u64)>::new(), Vec::new());
            for block in 0..blocks {
                let Some(page) = tables.page(number, block) else { continue };
                pages.push(page);
                match runs.last_mut() {
                    Some((first, count)) if *first + *count == skipped + block => *count += 1,
                    _ => runs.push((skipped + block, 1)),
                }
            }
            wanted.blocks.push(runs);
            wanted.pages.push(pages);
        }
        wanted
    }
}

/// The pages of blocks that a peer wants of what is offered.
pub fn pages_of(wanted: &Blocks, offered: &PageTables) -> Result<Vec<Vec<u64>>, Misfit> {
    count("lists of blocks", wanted.len(), offered.groups())?;
    let mut pages = vec![Vec::new(); offered.groups()];
    for (group, runs) in wanted.iter().enumerate() {
        let mut next = 0;
        for (first, count) in runs.iter().copied() {
            if first < next {
                return Err(Misfit::Order { group, runs: runs.len() });
            }
            next = first.checked_add(count).ok_or(Misfit::NotOffered { group, block: first })?;
            for block in first..next {
                let page = offered.page(group, block).ok_or(Misfit::NotOffered { group, block })?;
                pages[group].push(page);
            }
        }
    }
    Ok(pages)
}

/// Where a part of a page begins, and its bytes.
type Part = (u64, u64);

/// The part of a page that has these heads. A page of one head is taken whole.
pub fn part_of_page(page_bytes: u64, heads_of_page: u32, heads: Heads) -> Option<Part> {
    let Some((first, heads)) = heads.filter(|_| heads_of_page > 1) else { return Some((0, page_bytes)) };
    first.checked_add(heads).filter(|end| heads > 0 && *end <= heads_of_page)?;
    let head_bytes = page_bytes / u64::from(heads_of_page);
    Some((u64::from(first) * head_bytes, u64::from(heads) * head_bytes))
}

/// The moves that fill heads of the pages of `tables`, which begin at the sequence's token
/// `first_token`, with what a peer has of its `tokens` tokens.
pub fn moves(
    cache: &CacheShape,
    tables: &PageTables,
    (first_token, tokens): (u64, u64),
    heads: Option<HeadRange>,
    offered: &Opened,
) -> Result<Vec<Move>, Misfit> {
    let theirs = &offered.memory;
    count("layers", theirs.layers.len(), cache.layers().len())?;
    count("tables of pages", offered.tables.len(), cache.groups().len())?;
    let mut moves = Vec::new();
    for (number, (here, there)) in cache.layers().iter().zip(&theirs.layers).enumerate() {
        let group = cache.group_of(here);
        let ((from_page, bytes), (to_page, _)) = check(number, (here, group.heads), there, heads, offered)?;
        let page_tokens = u64::from(group.page_tokens);
        let (skipped, blocks) = (first_token / page_tokens, tokens.div_ceil(page_tokens));
        let table = &offered.tables[here.group];
        for block in 0..blocks {
            let Some(to) = tables.offset(here, block) else { continue };
            let page = table.get((skipped + block) as usize).and_then(|page| u64::try_from(*page).ok());
            let no_page = Misfit::NoPage { group: here.group, block };
            let page = page.filter(|page| *page < there.pages).ok_or(no_page)?;
            let from = there.offset + page * there.stride_bytes + from_page;
            let (layer, allocation) = (number as u32, there.allocation);
            add(&mut moves, Move { layer, allocation, from, to: to + to_page, bytes });
        }
    }
    Ok(moves)
}

/// Some of the moves, and the layers that they fill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub moves: Range<usize>,
    pub layers: Range<usize>,
}

/// Moves in the order of layers, in stages of whole layers that have so many bytes or more, but the
/// last one. Every layer is in one stage, also where nothing fills it.
pub fn stages(moves: &[Move], layers: usize, stage_bytes: u64) -> Vec<Stage> {
    let (mut stages, mut stage, mut bytes) = (Vec::new(), Stage { moves: 0..0, layers: 0..0 }, 0);
    for of_layer in moves.chunk_by(|one, next| one.layer == next.layer) {
        stage.moves.end += of_layer.len();
        stage.layers.end = of_layer[0].layer as usize + 1;
        bytes += of_layer.iter().map(|each| each.bytes).sum::<u64>();
        if bytes >= stage_bytes {
            let (moves, layers) = (stage.moves.end, stage.layers.end);
            let next = Stage { moves: moves..moves, layers: layers..layers };
            stages.push(std::mem::replace(&mut stage, next));
            bytes = 0;
        }
    }
    stage.layers.end = layers;
    if !stage.layers.is_empty() {
        stages.push(stage);
    }
    stages
}

/// What touches on both sides is copied as one.
fn add(moves: &mut Vec<Move>, next: Move) {
    match moves.last_mut() {
        Some(last)
            if (last.layer, last.from + last.bytes, last.to + last.bytes)
                == (next.layer, next.from, next.to) =>
        {
            last.bytes += next.bytes;
        }
        _ => moves.push(next),
    }
}

fn count(what: &'static str, given: usize, allowed: usize) -> Result<(), Misfit> {
    let (given, allowed) = (given as u64, allowed as u64);
    if given == allowed { Ok(()) } else { Err(Misfit::Count { what, given, allowed }) }
}

/// Which part of a page of a peer's layer is which part of a page here, if the layer has the shape
/// of this one and lies where it says.
fn check(
    number: usize,
    (here, heads_of_page): (&Layer, u32),
    there: &LayerAt,
    heads: Option<HeadRange>,
    offered: &Opened,
) -> Result<(Part, Part), Misfit> {
    let differs = |what, given, allowed| Misfit::Layer { layer: number, what, given, allowed };
    if there.group as usize != here.group {
        return Err(differs("the group", there.group.into(), here.group as u64));
    }
    let (heads_there, heads_here) = (heads.map(HeadRange::there), heads.map(HeadRange::here));
    let to = part_of_page(here.page_bytes, heads_of_page, heads_here);
    let to = to.ok_or_else(|| differs("heads for a page here of", 0, heads_of_page.into()))?;
    let from = part_of_page(there.page_bytes, there.heads, heads_there).filter(|from| from.1 == to.1);
    let from = from.ok_or_else(|| differs("pages of so many bytes:", there.page_bytes, here.page_bytes))?;
    let allocation = offered.memory.allocations.get(there.allocation as usize);
    let last = there.pages.checked_sub(1).and_then(|last| last.checked_mul(there.stride_bytes));
    let end = last.and_then(|last| last.checked_add(there.offset)?.checked_add(there.page_bytes));
    let fits = allocation.zip(end).is_some_and(|(allocation, end)| end <= allocation.bytes());
    if fits { Ok((from, to)) } else { Err(Misfit::OutOfBounds { layer: number }) }
}

#[cfg(test)]
mod tests {
    use super::super::message::{Allocation, Memory};
    use super::*;
    use crate::cache::{ALL_PAGES, Group};
    use proptest::prelude::*;

    const PAGE: u64 = 100;

    fn cache() -> CacheShape {
        let layer = |group, number: u64| Layer {
            address: (1 << 30) + number * 100_000,
            pages: 50,
            stride_bytes: 150,
            page_bytes: PAGE,
            group,
        };
        let group = |page_tokens| Group { page_tokens, heads: 1, kept_pages: ALL_PAGES };
        CacheShape::new(vec![layer(0, 0), layer(1, 1)], vec![group(4), group(8)], 16).unwrap()
    }

    fn offered(tables: Vec<Vec<i64>>) -> Opened {
        let layer = |allocation, group| LayerAt {
            allocation,
            offset: 50,
            pages: 40,
            stride_bytes: PAGE,
            page_bytes: PAGE,
            heads: 1,
            group,
        };
        let allocations = vec![Allocation::Host { key: 0, generation: 0, bytes: 50 + 40 * PAGE }; 2];
        let memory = Memory { allocations, layers: vec![layer(0, 0), layer(1, 1)] };
        Opened { lease: 1, ttl_us: 1, tables, memory }
    }

    fn plan(tables: Vec<Vec<i64>>, first: u64, tokens: u64, offered: &Opened) -> Result<Vec<Move>, Misfit> {
        let cache = cache();
        let tables = PageTables::new(&cache, tables, tokens, true).unwrap();
        moves(&cache, &tables, (first, tokens), None, offered)
    }

    #[test]
    fn both_sides_sum_up_the_pages_of_the_same_blocks() {
        let cache = cache();
        let tables = PageTables::new(&cache, vec![vec![-1, 20, 21], vec![30]], 8, true).unwrap();
        let wanted = Wanted::of(&cache, &tables, 16, 8);
        assert_eq!(wanted.blocks, [vec![(5, 1)], vec![(2, 1)]]);
        assert_eq!(wanted.pages, [[20], [30]]);
        let theirs = vec![vec![1, 2, 3, 4, 5, 6], vec![7, 8, 9]];
        let offered = PageTables::new(&cache, theirs, 24, true).unwrap();
        assert_eq!(pages_of(&wanted.blocks, &offered).unwrap(), [[6], [9]]);
        let refused = |blocks: Blocks| pages_of(&blocks, &offered).unwrap_err().to_string();
        assert!(refused(vec![vec![]]).contains("1 lists of blocks; allowed: 2"));
        assert!(refused(vec![vec![(5, 2)], vec![]]).contains("block 6 of group 0, of which nothing"));
        assert!(refused(vec![vec![(0, u64::MAX)], vec![]]).contains("block 6 of group 0"));
        assert!(refused(vec![vec![(u64::MAX, 2)], vec![]]).contains("of which nothing is offered"));
        assert!(refused(vec![vec![(0, 2), (1, 1)], vec![]]).contains("2 runs of blocks of group 0"));
    }

    #[test]
    fn only_pages_that_are_wanted_are_read_from_where_the_sequence_has_them() {
        let offered = offered(vec![vec![1, 2, 3, 4, 5, 6], vec![7, 8, 9]]);
        let found = plan(vec![vec![-1, 20], vec![30]], 16, 8, &offered).unwrap();
        let moved = |layer, allocation, page: u64, to: u64| Move {
            layer,
            allocation,
            from: 50 + page * PAGE,
            to: to * 150,
            bytes: PAGE,
        };
        assert_eq!(found, [moved(0, 0, 6, 20), moved(1, 1, 9, 30)]);
    }

    #[test]
    fn what_the_peer_has_not_or_says_wrongly_is_refused() {
        let good = offered(vec![vec![1, 2], vec![7]]);
        let wanted = || vec![vec![10, 11], vec![12]];
        assert!(plan(wanted(), 0, 8, &good).is_ok());
        let refused = |change: fn(&mut Opened)| {
            let mut offered = good.clone();
            change(&mut offered);
            plan(wanted(), 0, 8, &offered).unwrap_err().to_string()
        };
        assert!(refused(|o| o.tables[0][1] = -1).contains("no page for block 1 of group 0"));
        assert!(refused(|o| o.tables[0][1] = 40).contains("no page for block 1"));
        assert!(refused(|o| o.tables[1].clear()).contains("no page for block 0 of group 1"));
        assert!(refused(|o| o.memory.layers.truncate(1)).contains("1 layers; allowed: 2"));
        assert!(refused(|o| o.tables.truncate(1)).contains("1 tables of pages; allowed: 2"));
        assert!(refused(|o| o.memory.layers[1].page_bytes = 99).contains("layer 1 has pages of so many"));
        assert!(refused(|o| o.memory.layers[1].group = 0).contains("layer 1 has the group 0"));
        for change in [
            (|o| o.memory.layers[1].allocation = 2) as fn(&mut Opened),
            |o| o.memory.layers[1].offset += 1,
            |o| o.memory.layers[1].offset = u64::MAX,
            |o| o.memory.layers[1].pages = u64::MAX,
            |o| o.memory.layers[1].pages = 0,
            |o| o.memory.layers[1].stride_bytes = u64::MAX / 2,
        ] {
            assert!(refused(change).contains("layer 1 ends behind its allocation"));
        }
    }

    proptest! {
        #[test]
        fn every_move_and_every_layer_is_in_one_stage(
            of_layers in prop::collection::vec((0_usize..4, 1_u64..100), 0..12), stage_bytes in 1_u64..500
        ) {
            let a_move = |layer: usize, bytes| Move { layer: layer as u32, allocation: 0, from: 0, to: 0, bytes };
            let moves: Vec<Move> = of_layers
                .iter()
                .enumerate()
                .flat_map(|(layer, (count, bytes))| vec![a_move(layer, *bytes); *count])
                .collect();
            let stages = stages(&moves, of_layers.len(), stage_bytes);
            let layers: Vec<usize> = stages.iter().flat_map(|stage| stage.layers.clone()).collect();
            prop_assert_eq!(layers, (0..of_layers.len()).collect::<Vec<_>>());
            let numbers: Vec<usize> = stages.iter().flat_map(|stage| stage.moves.clone()).collect();
            prop_assert_eq!(numbers, (0..moves.len()).collect::<Vec<_>>());
            for (at, stage) in stages.iter().enumerate() {
                let of_stage = &moves[stage.moves.clone()];
                prop_assert!(of_stage.iter().all(|each| stage.layers.contains(&(each.layer as usize))));
                let bytes: u64 = of_stage.iter().map(|each| each.bytes).sum();
                prop_assert!(bytes >= stage_bytes || at + 1 == stages.len());
            }
        }

        #[test]
        fn no_byte_outside_is_named_and_every_wanted_page_is_filled(
            mine in prop::collection::vec(-1..50_i64, 4), theirs in prop::collection::vec(-2..60_i64, 0..8)
        ) {
            let wanted = mine.iter().filter(|page| **page >= 0).count() as u64;
            let both = plan(vec![mine, vec![-1, -1]], 0, 16, &offered(vec![theirs, vec![]]));
            let Ok(found) = both else { return Ok(()) };
            prop_assert_eq!(found.iter().map(|each| each.bytes).sum::<u64>(), wanted * PAGE);
            for each in found {
                prop_assert!(each.from + each.bytes <= 50 + 40 * PAGE);
                prop_assert!(each.to + each.bytes <= 49 * 150 + PAGE);
            }
        }
    }
}
