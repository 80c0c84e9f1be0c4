//! Which bytes of a chunk's layer are which bytes of which page. Pure: this file knows heads,
//! tokens and offsets.
//!
//! ```text
//! layer of a chunk = page of block 0 | block 1 | ...      as its storer had them; where a chunk keeps
//!                                                         fewer pages than it has, the last ones
//! page             = head 0 | head 1 | ...                where heads come before tokens
//! head of a page   = token 0 | token 1 | ...              cells of equal size
//! ```
//!
//! A storer of the same shape has the same pages, and whole pages are copied. Others may have had
//! other heads (another tensor parallel size): then the heads' part of each page is copied whole,
//! also of a chunk's last page with fewer tokens, for vLLM on CPUs keeps keys transposed there, so
//! no part of it is the first tokens. Or other pages (another block size): then the cells are found
//! one run of tokens of one head at a time. Pieces that are adjacent on both sides become one.

use crate::cache::{BadValue, CacheShape, Group, Layer};
use crate::copies::Piece;
use crate::page_tables::PageTables;
use thiserror::Error;

/// Which part of a page a storer's page has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRange {
    /// Its first head of these, as it counts.
    pub first_there: u32,
    /// The same head, as this cache counts.
    pub first_here: u32,
    pub heads: u32,
}

impl HeadRange {
    /// The first head there, and how many.
    pub fn there(self) -> (u32, u32) {
        (self.first_there, self.heads)
    }

    /// The first head here, and how many.
    pub fn here(self) -> (u32, u32) {
        (self.first_here, self.heads)
    }
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
        let is_other = |layer: &&Layer| cache.group_of(layer).page_tokens != page_tokens;
        for layer in cache.layers().iter().filter(is_other) {
            Cells::of(cache, layer, page_tokens)?;
        }
        Ok(())
    }

    /// Whether a chunk of it is page for page what a chunk of this cache is, as far as the length
    /// of a layer tells.
    pub fn is_same(&self, cache: &CacheShape, layer: &Layer, tokens: u32, bytes: u64) -> bool {
        let group = cache.group_of(layer);
        let HeadRange { first_there, first_here, .. } = self.heads;
        let same_pages = self.page_tokens.is_none_or(|page_tokens| page_tokens == group.page_tokens);
        same_pages && first_there == 0 && first_here == 0 && bytes == group.kept_of(tokens) * layer.page_bytes
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
    let mut found = Joined { first: found.len(), found, layer: number };
    if source.is_same(cache, layer, at.tokens, bytes) {
        whole_pages(cache.group_of(layer), layer, tables, at, arena_offset, &mut found);
        return Ok(());
    }
    let foreign = Foreign::of(cache, layer, number, at, source, bytes)?;
    foreign.pieces(cache.group_of(layer), tables, layer, at, arena_offset, &mut found);
    Ok(())
}

/// The blocks of a chunk whose pages it keeps, as they are counted in the sequence.
fn kept_blocks(group: Group, at: ChunkAt) -> impl Iterator<Item = u64> {
    let first = at.first_token / u64::from(group.page_tokens);
    (first + group.first_kept_of(at.tokens))..(first + group.pages_of(at.tokens))
}

fn whole_pages(
    group: Group,
    layer: &Layer,
    tables: &PageTables,
    at: ChunkAt,
    arena_offset: u64,
    found: &mut Joined<'_>,
) {
    for (number, block) in (0..).zip(kept_blocks(group, at)) {
        if let Some(page) = tables.offset(layer, block) {
            found.add(arena_offset + number * layer.page_bytes, page, layer.page_bytes);
        }
    }
}

/// The pages of a storer of another shape.
struct Foreign {
    heads: HeadRange,
    /// Bytes of a head of one of its pages.
    head_bytes: u64,
    page_bytes: u64,
    /// Where its pages have other tokens.
    cells: Option<Cells>,
}

/// Tokens of pages of different sizes.
struct Cells {
    /// Bytes of a token of one head.
    bytes: u64,
    page_tokens_there: u64,
    page_tokens_here: u64,
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
        let head_bytes_here = layer.page_bytes / u64::from(group.heads);
        let other = source.page_tokens.filter(|page_tokens| *page_tokens != group.page_tokens);
        let cells = other.map(|there| Cells::of(cache, layer, there)).transpose()?;
        let (pages, head_bytes) = match &cells {
            None => (group.kept_of(at.tokens), head_bytes_here),
            Some(cells) => (cells.pages_there(at.tokens), cells.page_tokens_there * cells.bytes),
        };
        let page_bytes = bytes.checked_div(pages).unwrap_or(0);
        let heads_there = page_bytes / head_bytes;
        let enough = u64::from(heads.first_there) + u64::from(heads.heads) <= heads_there;
        if page_bytes * pages != bytes || heads_there * head_bytes != page_bytes || !enough {
            let least = u64::from(heads.first_there) + u64::from(heads.heads);
            return Err(misfit(format!("{pages} pages of {least} heads or more of {head_bytes} bytes fit")));
        }
        Ok(Foreign { heads, head_bytes, page_bytes, cells })
    }

    fn pieces(
        &self,
        group: Group,
        tables: &PageTables,
        layer: &Layer,
        at: ChunkAt,
        arena_offset: u64,
        found: &mut Joined<'_>,
    ) {
        match &self.cells {
            None => self.parts_of_pages(group, tables, layer, at, arena_offset, found),
            Some(cells) => self.runs_of_cells(cells, tables, layer, at, arena_offset, found),
        }
    }

    /// Of pages with as many tokens: the heads are together on both sides.
    fn parts_of_pages(
        &self,
        group: Group,
        tables: &PageTables,
        layer: &Layer,
        at: ChunkAt,
        arena_offset: u64,
        found: &mut Joined<'_>,
    ) {
        let HeadRange { first_there, first_here, heads } = self.heads;
        let [from, to, bytes] =
            [first_there, first_here, heads].map(|heads| u64::from(heads) * self.head_bytes);
        for (number, block) in (0..).zip(kept_blocks(group, at)) {
            if let Some(page) = tables.offset(layer, block) {
                found.add(arena_offset + number * self.page_bytes + from, page + to, bytes);
            }
        }
    }

    /// Of pages with other tokens, all of which a chunk keeps.
    fn runs_of_cells(
        &self,
        cells: &Cells,
        tables: &PageTables,
        layer: &Layer,
        at: ChunkAt,
        arena_offset: u64,
        found: &mut Joined<'_>,
    ) {
        let (there, tokens) = (cells.page_tokens_there, u64::from(at.tokens));
        for (number, start) in (0..tokens).step_by(there as usize).enumerate() {
            let page_there = arena_offset + number as u64 * self.page_bytes;
            let end = tokens.min(start + there);
            for head in 0..u64::from(self.heads.heads) {
                let row = page_there + (u64::from(self.heads.first_there) + head) * self.head_bytes;
                let here = u64::from(self.heads.first_here) + head;
                cells.row(tables, layer, at.first_token, (start, end), row, here, found);
            }
        }
    }
}

impl Cells {
    /// Cells of pages of `there` tokens at a storer. A page here must have a cell for each token,
    /// and a chunk must keep all of its pages: which tokens others keep is not known.
    fn of(cache: &CacheShape, layer: &Layer, there: u32) -> Result<Cells, BadValue> {
        let group = cache.group_of(layer);
        let (here, head_bytes) = (group.page_tokens, layer.page_bytes / u64::from(group.heads));
        let refuse = |why: String| {
            Err(BadValue::new("source_page_tokens", there, format!("{here}, as here, because {why}")))
        };
        let first_kept = group.first_kept_of(cache.chunk_tokens());
        if first_kept > 0 {
            return refuse(format!("a chunk does not keep its first {first_kept} pages"));
        }
        if there == 0 || !head_bytes.is_multiple_of(here.into()) {
            return refuse(format!("a head of a page has {head_bytes} bytes, which are no cells of tokens"));
        }
        let (page_tokens_there, page_tokens_here) = (there.into(), here.into());
        Ok(Cells { bytes: head_bytes / page_tokens_here, page_tokens_there, page_tokens_here })
    }

    fn pages_there(&self, tokens: u32) -> u64 {
        u64::from(tokens).div_ceil(self.page_tokens_there)
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
        let here = self.page_tokens_here;
        let mut token = start;
        while token < end {
            let (block, within) = ((first_token + token) / here, (first_token + token) % here);
            let run = (here - within).min(end - token);
            if let Some(page) = tables.offset(layer, block) {
                let cell = head * here + within;
                found.add(row + (token - start) * self.bytes, page + cell * self.bytes, run * self.bytes);
            }
            token += run;
        }
    }
}

/// Pieces that grow as long as both sides go on. Those of other chunks stay as they are: each chunk
/// is compared with its own checksum, and one without pieces would not be.
struct Joined<'a> {
    found: &'a mut Vec<Piece>,
    /// Its first one.
    first: usize,
    layer: u32,
}

impl Joined<'_> {
    fn add(&mut self, arena_offset: u64, page_offset: u64, bytes: u64) {
        if let Some(last) = self.found[self.first..].last_mut()
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
    use crate::cache::ALL_PAGES;
    use crate::page_tables::NO_PAGE;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const CELL: u64 = 3;

    fn cache(heads: u32, page_tokens: u32, chunk_tokens: u32, pages: u64, gap: u64) -> CacheShape {
        keeping(ALL_PAGES, heads, page_tokens, chunk_tokens, pages, gap)
    }

    fn keeping(
        kept_pages: u32,
        heads: u32,
        page_tokens: u32,
        chunk_tokens: u32,
        pages: u64,
        gap: u64,
    ) -> CacheShape {
        let page_bytes = u64::from(heads) * u64::from(page_tokens) * CELL;
        let layer = Layer { address: 64, pages, stride_bytes: page_bytes + gap, page_bytes, group: 0 };
        let group = Group { page_tokens, heads, kept_pages };
        CacheShape::new(vec![layer], vec![group], chunk_tokens).unwrap()
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
        let end = if here == there { tokens.next_multiple_of(here) } else { tokens };
        // The tokens of so many pages before the chunk's end, and what is before them in their
        // page.
        let kept = here * u64::from(group.kept_pages);
        let start = tokens.saturating_sub(kept) / here * here;
        for token in start..end {
            let page = table[((at.first_token + token) / here) as usize];
            for head in (0..u64::from(source.heads.heads)).filter(|_| page >= 0) {
                let in_page =
                    (u64::from(source.heads.first_here) + head) * here + (at.first_token + token) % here;
                let in_row = (u64::from(source.heads.first_there) + head) * there + token % there;
                let to = page as u64 * layer.stride_bytes + in_page * CELL;
                let from = (token - start) / there * (heads_there * there * CELL) + in_row * CELL;
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
            kept in prop::option::of(1u32..6),
        ) {
            let (here, there) = (1 << here, if kept.is_some() { 1 << here } else { 1 << there });
            let kept = kept.unwrap_or(ALL_PAGES);
            let cache = keeping(kept, first_here + heads + more_here, here, 16, 64, gap);
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
            let pages = tokens.div_ceil(there) - tokens.saturating_sub(there.saturating_mul(kept)) / there;
            let bytes = u64::from(pages) * heads_there * u64::from(there) * CELL;
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

    proptest! {
        #[test]
        fn a_store_lacks_a_page_only_where_its_chunk_does_not_keep_it(
            page_tokens in 0u32..4,
            kept in 1u32..6,
            tokens in 1u64..48,
            lacking in 0usize..64,
        ) {
            let page_tokens = 1 << page_tokens;
            let cache = keeping(kept, 1, page_tokens, 16, 64, 0);
            let mut table: Vec<i64> = (0..64).collect();
            table[lacking] = NO_PAGE;
            // By hand: the chunk of the page, its end, and the tokens of so many pages before that.
            let start = lacking as u64 * u64::from(page_tokens);
            let end = (start / 16 * 16 + 16).min(tokens);
            let is_kept = start < end && start + u64::from(page_tokens) > end.saturating_sub(u64::from(kept * page_tokens));
            let is_behind = start >= tokens;
            let given = PageTables::new(&cache, vec![table.clone()], tokens, false);
            prop_assert_eq!(given.is_err(), is_kept || is_behind, "{:?}", given);
            prop_assert!(PageTables::new(&cache, vec![table], tokens, true).is_ok());
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
    fn each_chunk_has_pieces_of_its_own_also_where_it_goes_on_from_the_one_before_on_both_sides() {
        let cache = cache(1, 4, 4, 8, 0);
        let tables = PageTables::new(&cache, vec![vec![2, 3]], 8, false).unwrap();
        let (mut found, same) = (Vec::new(), Source::same(&cache));
        for chunk in 0..2 {
            let at = ChunkAt { first_token: 4 * chunk, tokens: 4 };
            pieces(&cache, &tables, 0, at, &same, (100 + 12 * chunk, 12), &mut found).unwrap();
        }
        let piece = |arena_offset, page_offset| Piece { arena_offset, layer: 0, page_offset, bytes: 12 };
        assert_eq!(found, [piece(100, 24), piece(112, 36)]);
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

    #[test]
    fn pages_of_another_size_are_refused_where_they_cannot_be_cut_into_tokens() {
        let source = |page_tokens| Source {
            heads: HeadRange { first_there: 0, first_here: 0, heads: 1 },
            page_tokens: Some(page_tokens),
        };
        let at = ChunkAt { first_token: 0, tokens: 4 };
        let looked_at = |cache: &CacheShape, page_tokens, bytes| {
            let tables = PageTables::new(cache, vec![vec![0; 4]], 16, true).unwrap();
            let checked = source(page_tokens).check(cache).map_err(|error| error.to_string());
            let copied = pieces(cache, &tables, 0, at, &source(page_tokens), (0, bytes), &mut Vec::new());
            assert_eq!(checked.is_err(), copied.is_err(), "also of a chunk that has no page left out");
            checked
        };
        let some = keeping(3, 1, 4, 16, 8, 0);
        assert_eq!(looked_at(&some, 4, 4 * CELL), Ok(()));
        let why = looked_at(&some, 8, 8 * CELL).unwrap_err();
        assert!(why.contains("source_page_tokens is 8; allowed: 4, as here, because a chunk"), "{why}");
        assert_eq!(looked_at(&keeping(4, 1, 4, 16, 8, 0), 8, 8 * CELL), Ok(()), "it keeps all it has");

        let layer = Layer { address: 64, pages: 8, stride_bytes: 14, page_bytes: 14, group: 0 };
        let group = Group { page_tokens: 4, heads: 2, kept_pages: ALL_PAGES };
        let compressed = CacheShape::new(vec![layer], vec![group], 16).unwrap();
        assert_eq!(looked_at(&compressed, 4, 14), Ok(()));
        let why = looked_at(&compressed, 8, 14).unwrap_err();
        assert!(why.contains("a head of a page has 7 bytes"), "{why}");
    }
}
