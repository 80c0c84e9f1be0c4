//! Which page of a cache has which block of a sequence, as an engine says it. Pure. What of a chunk
//! goes into these pages is [`pages`](crate::pages)' matter.

use crate::cache::{CacheShape, Group, Layer};
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

impl PageTables {
    /// Tables for a sequence of `tokens` tokens. Blocks that are not wanted may be anywhere where
    /// `holes`, or else only where a chunk does not keep the page.
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
            let of = cache.groups()[group];
            let needed = tokens.div_ceil(of.page_tokens.into());
            if (table.len() as u64) < needed {
                return Err(BadPages::Short { group, given: table.len(), needed, tokens });
            }
            let layers = cache.layers().iter().filter(|layer| layer.group == group);
            let pages = layers.map(|layer| layer.pages).min().unwrap_or(0);
            let is_page = |page: i64| page >= 0 && (page as u64) < pages;
            let may_lack = |block: usize| holes || is_dropped(of, cache.chunk_tokens(), tokens, block as u64);
            let is_good =
                |(block, page): (usize, &i64)| is_page(*page) || (*page == NO_PAGE && may_lack(block));
            if let Some(block) = table.iter().enumerate().position(|at| !is_good(at)) {
                let none = if may_lack(block) { ", or -1" } else { "" };
                let allowed = format!("0 to {}{none}", pages.saturating_sub(1));
                return Err(BadPages::Page { group, block, page: table[block], allowed });
            }
        }
        Ok(())
    }

    /// The tables as they were given.
    pub fn to_lists(&self) -> Vec<Vec<i64>> {
        self.0.clone()
    }

    /// The pages of a group, without those that are not wanted.
    pub fn pages(&self, group: usize) -> impl Iterator<Item = u64> {
        self.0.get(group).into_iter().flatten().filter_map(|page| u64::try_from(*page).ok())
    }

    pub fn groups(&self) -> usize {
        self.0.len()
    }

    /// The page of a block, if it has one.
    pub fn page(&self, group: usize, block: u64) -> Option<u64> {
        u64::try_from(*self.0.get(group)?.get(usize::try_from(block).ok()?)?).ok()
    }

    /// Where the page of a block starts, from its layer's page 0 on.
    pub fn offset(&self, layer: &Layer, block: u64) -> Option<u64> {
        self.page(layer.group, block).map(|page| page * layer.stride_bytes)
    }
}

/// Whether a page lies in a chunk that does not keep it. The last chunk may be short.
fn is_dropped(group: Group, chunk_tokens: u32, tokens: u64, block: u64) -> bool {
    let pages = u64::from(chunk_tokens / group.page_tokens);
    let start = block / pages * u64::from(chunk_tokens);
    let chunk = tokens.saturating_sub(start).min(chunk_tokens.into()) as u32;
    block % pages < group.first_kept_of(chunk)
}
