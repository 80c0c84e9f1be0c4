//! Which bytes of a chunk's layer are which bytes of which page. Pure: this file knows heads,
//! tokens and offsets.
//!
//! ```text
//! layer of a chunk = page of block 0 | block 1 | ...      as its storer had them
//! page             = head 0 | head 1 | ...                where heads come before tokens
//! head of a page   = token 0 | token 1 | ...              cells of equal size
//! ```
//!
//! A storer of the same shape has the same pages, and whole pages are copied. Others may have had
//! other heads (another tensor parallel size) or other pages (another block size): then the cells
//! are found one run of tokens of one head at a time. Where pages have as many tokens, a head's
//! part of a page is copied whole, also of a chunk's last page with fewer tokens: vLLM on CPUs
//! keeps keys transposed there, so no part of it is the first tokens. Pieces that are adjacent on
//! both sides become one.

use crate::cache::{BadValue, CacheShape, Group, Layer};
use crate::copies::Piece;
use thiserror::Error;

/// What a table says of a block that is not wanted.
pub const NO_PAGE: i64 = -1;

/// The page of each block of a sequence, by group, from the first token of its first chunk on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageTables(Vec<Vec<i64>>);

/// Tables that do not fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadPages {
    #[error("pages has {given} tables; allowed: {groups}, one for each group")]
    Groups { given: usize, groups: usize },
    #[error("the pages of group {group} are {given}; allowed: {needed} or more, for {tokens} tokens")]
    Short { group: usize, given: usize, needed: u64, tokens: u64 },
    #[error("page {page} of block {block} of group {group}; allowed: {allowed}")]
    Page { group: usize, block: usize, page: i64, allowed: String },
}

/// Which part of a page a storer's page has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRange {
    /// Its first head of these, as it counts.
    pub first_there: u32,
    /// The same head, as this cache counts.
    pub first_here: u32,
    pub heads: u32,
}

/// How a storer's chunks fit this cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    pub heads: HeadRange,
    /// Tokens of its pages; `None` if they are as here.
    pub page_tokens: Option<u32>,
}

/// A chunk's place in the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkAt {
    /// Its first token, counted from the first chunk's first one: a multiple of the tokens of a
    /// chunk.
    pub first_token: u64,
    pub tokens: u32,
}

/// Chunks of a storer that this cache has no use for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Misfit {
    #[error("layer {layer} of the chunk has {bytes} bytes; {fits}")]
    Bytes { layer: u32, bytes: u64, fits: String },
    #[error(transparent)]
    Value(#[from] BadValue),
}

impl PageTables {
    /// Tables for a sequence of `tokens` tokens. Blocks that are not wanted may be only where
    /// `holes`.
    pub fn new(
        cache: &CacheShape,
        tables: Vec<Vec<i64>>,
        tokens: u64,
        holes: bool,
    ) -> Result<PageTables, BadPages> {
        let tables = PageTables(tables);
        tables.check(cache, tokens, holes)?;
        Ok(tables)
    }

    /// Looks whether they fit a cache and a sequence of `tokens` tokens, as in
    /// [`new`](PageTables::new).
    pub fn check(&self, cache: &CacheShape, tokens: u64, holes: bool) -> Result<(), BadPages> {
        let (tables, groups) = (&self.0, cache.groups().len());
        if tables.len() != groups {
            return Err(BadPages::Groups { given: tables.len(), groups });
        }
        for (group, table) in tables.iter().enumerate() {
            let needed = tokens.div_ceil(cache.groups()[group].page_tokens.into());
            if (table.len() as u64) < needed {
                return Err(BadPages::Short { group, given: table.len(), needed, tokens });
            }
            let layers = cache.layers().iter().filter(|layer| layer.group == group);
            let pages = layers.map(|layer| layer.pages).min().unwrap_or(0);
            let is_good = |page: i64| (holes && page == NO_PAGE) || (page >= 0 && (page as u64) < pages);
            if let Some(block) = table.iter().position(|page| !is_good(*page)) {
                let allowed =
                    format!("0 to {}{}", pages.saturating_sub(1), if holes { ", or -1" } else { "" });
                return Err(BadPages::Page { group, block, page: table[block], allowed });
            }
        }
        Ok(())
    }

    /// Where the page of a block starts, from its layer's page 0 on.
    fn offset(&self, layer: &Layer, block: u64) -> Option<u64> {
        let page = *self.0.get(layer.group)?.get(usize::try_from(block).ok()?)?;
        u64::try_from(page).ok().map(|page| page * layer.stride_bytes)
    }
}

impl Source {
    /// A storer of the same shape.
    pub fn same(cache: &CacheShape) -> Source {
        let heads = cache.groups().iter().map(|group| group.heads).max().unwrap_or(1);
        Source { heads: HeadRange { first_there: 0, first_here: 0, heads }, page_tokens: None }
    }

    /// Looks whether it fits at all.
    pub fn check(&self, cache: &CacheShape) -> Result<(), BadValue> {
        let HeadRange { first_there, first_here, heads } = self.heads;
        let here = cache.groups().iter().map(|group| group.heads).max().unwrap_or(1);
        if heads == 0 || first_here.checked_add(heads).is_none_or(|end| end > here) {
            let allowed = format!("1 to {}", here.saturating_sub(first_here));
            return Err(BadValue::new("the number of heads", heads, allowed));
        }
        if first_there.checked_add(heads).is_none() {
            return Err(BadValue::new("the first head there", first_there, "what a page may have"));
        }
        let Some(page_tokens) = self.page_tokens else { return Ok(()) };
        if page_tokens == 0 || !cache.chunk_tokens().is_multiple_of(page_tokens) {
            let allowed = format!("a divisor of chunk_tokens, {}", cache.chunk_tokens());
            return Err(BadValue::new("source_page_tokens", page_tokens, allowed));
        }
        if cache.groups().len() > 1 {
            let allowed = "none for a cache of several groups";
            return Err(BadValue::new("source_page_tokens", page_tokens, allowed));
        }
        Ok(())
    }

    /// Whether a chunk of it is page for page what a chunk of this cache is, as far as the length
    /// of a layer tells.
    pub fn is_same(&self, cache: &CacheShape, layer: &Layer, tokens: u32, bytes: u64) -> bool {
        let group = cache.group_of(layer);
        let HeadRange { first_there, first_here, .. } = self.heads;
        let same_pages = self.page_tokens.is_none_or(|page_tokens| page_tokens == group.page_tokens);
        same_pages
            && first_there == 0
            && first_here == 0
            && bytes == group.pages_of(tokens) * layer.page_bytes
    }
}

/// Adds the pieces of layer `number` of a chunk, of which `bytes` bytes lie at `arena_offset`. In
/// the order of the arena.
pub fn pieces(
    cache: &CacheShape,
    tables: &PageTables,
    number: u32,
    at: ChunkAt,
    source: &Source,
    (arena_offset, bytes): (u64, u64),
    found: &mut Vec<Piece>,
) -> Result<(), Misfit> {
    let Some(layer) = cache.layers().get(number as usize) else {
        let allowed = format!("below {}", cache.layers().len());
        return Err(BadValue::new("the layer", number, allowed).into());
    };
    let mut found = Joined { found, layer: number };
    if source.is_same(cache, layer, at.tokens, bytes) {
        whole_pages(cache.group_of(layer), layer, tables, at, arena_offset, &mut found);
        return Ok(());
    }
    let foreign = Foreign::of(cache, layer, number, at, source, bytes)?;
    foreign.pieces(tables, layer, at, arena_offset, &mut found);
    Ok(())
}

fn whole_pages(
    group: Group,
    layer: &Layer,
    tables: &PageTables,
    at: ChunkAt,
    arena_offset: u64,
    found: &mut Joined<'_>,
) {
    let first = at.first_token / u64::from(group.page_tokens);
    for block in 0..group.pages_of(at.tokens) {
        if let Some(page) = tables.offset(layer, first + block) {
            found.add(arena_offset + block * layer.page_bytes, page, layer.page_bytes);
        }
    }
}

/// The pages of a storer of another shape.
struct Foreign {
    heads: HeadRange,
    cell_bytes: u64,
    /// Tokens of its pages, and of pages here.
    page_tokens: (u64, u64),
    page_bytes: u64,
}

impl Foreign {
    /// The heads of its pages follow from the length of the layer.
    fn of(
        cache: &CacheShape,
        layer: &Layer,
        number: u32,
        at: ChunkAt,
        source: &Source,
        bytes: u64,
    ) -> Result<Foreign, Misfit> {
        let group = cache.group_of(layer);
        let heads = source.heads;
        let misfit = |fits: String| Misfit::Bytes { layer: number, bytes, fits };
        if heads.first_here.saturating_add(heads.heads) > group.heads {
            return Err(misfit(format!("its page here has {} heads", group.heads)));
        }
        let cell_bytes = layer.page_bytes / (u64::from(group.heads) * u64::from(group.page_tokens));
        let page_tokens = source.page_tokens.unwrap_or(group.page_tokens);
        let pages = u64::from(at.tokens.div_ceil(page_tokens));
        let head_bytes = u64::from(page_tokens) * cell_bytes;
        let page_bytes = bytes.checked_div(pages).unwrap_or(0);
        let heads_there = page_bytes / head_bytes;
        let enough = u64::from(heads.first_there) + u64::from(heads.heads) <= heads_there;
        if page_bytes * pages != bytes || heads_there * head_bytes != page_bytes || !enough {
            let least = heads.first_there + heads.heads;
            return Err(misfit(format!("{pages} pages of {least} heads or more of {head_bytes} bytes fit")));
        }
        Ok(Foreign {
            heads,
            cell_bytes,
            page_tokens: (page_tokens.into(), group.page_tokens.into()),
            page_bytes,
        })
    }

    fn pieces(
        &self,
        tables: &PageTables,
        layer: &Layer,
        at: ChunkAt,
        arena_offset: u64,
        found: &mut Joined<'_>,
    ) {
        let (there, here) = self.page_tokens;
        let tokens = u64::from(at.tokens);
        for (number, start) in (0..tokens).step_by(there as usize).enumerate() {
            let page_there = arena_offset + number as u64 * self.page_bytes;
            let end = if there == here { start + there } else { tokens.min(start + there) };
            for head in 0..u64::from(self.heads.heads) {
                let row = page_there + (u64::from(self.heads.first_there) + head) * there * self.cell_bytes;
                self.row(tables, layer, at.first_token, (start, end), row, head, found);
            }
        }
    }

    /// One head of one of the storer's pages: the tokens from `start` to `end` of the chunk, whose
    /// cells begin at `row`.
    #[expect(clippy::too_many_arguments, reason = "a run of cells and the two places that it is in")]
    fn row(
        &self,
        tables: &PageTables,
        layer: &Layer,
        first_token: u64,
        (start, end): (u64, u64),
        row: u64,
        head: u64,
        found: &mut Joined<'_>,
    ) {
        let (_, here) = self.page_tokens;
        let mut token = start;
        while token < end {
            let (block, within) = ((first_token + token) / here, (first_token + token) % here);
            let run = (here - within).min(end - token);
            if let Some(page) = tables.offset(layer, block) {
                let cell = (u64::from(self.heads.first_here) + head) * here + within;
                found.add(
                    row + (token - start) * self.cell_bytes,
                    page + cell * self.cell_bytes,
                    run * self.cell_bytes,
                );
            }
            token += run;
        }
    }
}

/// Pieces that grow as long as both sides go on.
struct Joined<'a> {
    found: &'a mut Vec<Piece>,
    layer: u32,
}

impl Joined<'_> {
    fn add(&mut self, arena_offset: u64, page_offset: u64, bytes: u64) {
        if let Some(last) = self.found.last_mut()
            && last.layer == self.layer
            && last.arena_offset + last.bytes == arena_offset
            && last.page_offset + last.bytes == page_offset
        {
            last.bytes += bytes;
            return;
        }
        self.found.push(Piece { arena_offset, layer: self.layer, page_offset, bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const CELL: u64 = 3;

    fn cache(heads: u32, page_tokens: u32, chunk_tokens: u32, pages: u64, gap: u64) -> CacheShape {
        let page_bytes = u64::from(heads) * u64::from(page_tokens) * CELL;
        let layer = Layer { address: 64, pages, stride_bytes: page_bytes + gap, page_bytes, group: 0 };
        CacheShape::new(vec![layer], vec![Group { page_tokens, heads }], chunk_tokens).unwrap()
    }

    /// Every byte by itself: where in the arena each byte of the layer of the cache comes from. Of
    /// pages with as many tokens also what is behind the last one.
    fn by_hand(
        cache: &CacheShape,
        table: &[i64],
        at: ChunkAt,
        source: &Source,
        heads_there: u64,
    ) -> BTreeMap<u64, u64> {
        let (layer, group) = (cache.layers()[0], cache.groups()[0]);
        let (here, there) =
            (u64::from(group.page_tokens), u64::from(source.page_tokens.unwrap_or(group.page_tokens)));
        let mut bytes = BTreeMap::new();
        let tokens = u64::from(at.tokens);
        for token in 0..if here == there { tokens.next_multiple_of(here) } else { tokens } {
            let page = table[((at.first_token + token) / here) as usize];
            for head in (0..u64::from(source.heads.heads)).filter(|_| page >= 0) {
                let in_page =
                    (u64::from(source.heads.first_here) + head) * here + (at.first_token + token) % here;
                let in_row = (u64::from(source.heads.first_there) + head) * there + token % there;
                let to = page as u64 * layer.stride_bytes + in_page * CELL;
                let from = token / there * (heads_there * there * CELL) + in_row * CELL;
                bytes.extend((0..CELL).map(|byte| (to + byte, from + byte)));
            }
        }
        bytes
    }

    fn flat(pieces: &[Piece], arena_offset: u64) -> BTreeMap<u64, u64> {
        let bytes = pieces.iter().flat_map(|piece| (0..piece.bytes).map(move |byte| (piece, byte)));
        bytes
            .map(|(piece, byte)| (piece.page_offset + byte, piece.arena_offset + byte - arena_offset))
            .collect()
    }

    proptest! {
        #[test]
        fn every_wanted_cell_of_a_foreign_chunk_comes_from_its_place_and_no_other_byte_is_written(
            (here, there) in (0u32..4, 0u32..4),
            heads in 1u32..5,
            (first_there, first_here) in (0u32..3, 0u32..3),
            (more_there, more_here) in (0u32..3, 0u32..3),
            chunk in 0u64..3,
            tokens in 1u32..=16,
            gap in 0u64..5,
            holes in prop::collection::vec(any::<bool>(), 64),
            shift in 0usize..64,
        ) {
            let (here, there) = (1 << here, 1 << there);
            let cache = cache(first_here + heads + more_here, here, 16, 64, gap);
            let table: Vec<i64> = holes.iter().enumerate().map(|(block, hole)| {
                if *hole { NO_PAGE } else { ((block * 5 + shift) % 64) as i64 }
            }).collect();
            let tables = PageTables::new(&cache, vec![table.clone()], 48, true).unwrap();
            let source = Source {
                heads: HeadRange { first_there, first_here, heads },
                page_tokens: (there != here).then_some(there),
            };
            prop_assert_eq!(source.check(&cache), Ok(()));
            let at = ChunkAt { first_token: chunk * 16, tokens };
            let heads_there = u64::from(first_there + heads + more_there);
            let bytes = u64::from(tokens.div_ceil(there)) * heads_there * u64::from(there) * CELL;
            let mut found = Vec::new();
            pieces(&cache, &tables, 0, at, &source, (1000, bytes), &mut found).unwrap();
            let expected = by_hand(&cache, &table, at, &source, heads_there);
            let total: u64 = found.iter().map(|piece| piece.bytes).sum();
            let flat = flat(&found, 1000);
            if source.is_same(&cache, &cache.layers()[0], tokens, bytes) {
                // Whole pages, with all of their heads.
                prop_assert!(expected.iter().all(|(to, from)| flat.get(to) == Some(from)));
            } else {
                prop_assert_eq!(&flat, &expected);
            }
            prop_assert_eq!(total, flat.len() as u64, "no byte is written twice");
            prop_assert!(found.windows(2).all(|two| two[0].arena_offset + two[0].bytes <= two[1].arena_offset));
        }
    }

    #[test]
    fn neighbours_are_one_piece() {
        let cache = cache(2, 4, 16, 8, 0);
        let tables = PageTables::new(&cache, vec![vec![2, 3, 4, NO_PAGE]], 16, true).unwrap();
        let mut found = Vec::new();
        let at = ChunkAt { first_token: 0, tokens: 16 };
        pieces(&cache, &tables, 0, at, &Source::same(&cache), (100, 96), &mut found).unwrap();
        assert_eq!(found, [Piece { arena_offset: 100, layer: 0, page_offset: 48, bytes: 72 }]);
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_copied() {
        let cache = cache(2, 4, 16, 8, 0);
        let new = |tables: Vec<Vec<i64>>, holes| {
            PageTables::new(&cache, tables, 16, holes).map_err(|error| error.to_string())
        };
        assert!(new(Vec::new(), true).unwrap_err().contains("0 tables; allowed: 1"));
        assert!(new(vec![vec![0; 3]], true).unwrap_err().contains("allowed: 4 or more"));
        assert!(new(vec![vec![0, 8, 0, 0]], true).unwrap_err().contains("allowed: 0 to 7, or -1"));
        assert!(new(vec![vec![0, -1, 0, 0]], false).unwrap_err().contains("allowed: 0 to 7"));
        let tables = new(vec![vec![0, 1, 2, 3]], true).unwrap();
        let at = ChunkAt { first_token: 0, tokens: 16 };
        for bytes in [0, 95, 97, 48] {
            let misfit = pieces(&cache, &tables, 0, at, &Source::same(&cache), (0, bytes), &mut Vec::new());
            assert!(misfit.is_err(), "{bytes}");
        }
        let heads = |first_here, heads| Source {
            heads: HeadRange { first_there: 0, first_here, heads },
            page_tokens: None,
        };
        assert!(heads(1, 2).check(&cache).is_err() && heads(0, 0).check(&cache).is_err());
        assert!(Source { page_tokens: Some(3), ..heads(0, 2) }.check(&cache).is_err());
    }
}
