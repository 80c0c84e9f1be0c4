//! The shape of an engine's paged cache: its layers, their pages, and how tokens lie in them. Pure:
//! this file knows sizes and addresses as numbers.

use thiserror::Error;

pub const MAX_LAYERS: usize = forebay_store::MAX_LAYERS;
pub const MAX_CHUNK_TOKENS: u32 = forebay_kv::MAX_CHUNK_TOKENS;
/// What [`Group::kept_pages`] is where a chunk keeps all pages.
pub const ALL_PAGES: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    pub address: u64,
    pub pages: u64,
    /// Bytes from the start of one page to the start of the next.
    pub stride_bytes: u64,
    pub page_bytes: u64,
    /// Which of the cache's groups it belongs to: layers of a group share one table of pages.
    pub group: usize,
}

/// Layers whose pages are given out together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    pub page_tokens: u32,
    /// KV heads of a page where heads come before tokens; 1 where a page is never cut by heads.
    pub heads: u32,
    /// A chunk that ends where a page ends keeps at most so many, those at its end: nobody needs a
    /// sliding window's earlier ones. One that ends within a page keeps one more, for what is seen
    /// from there begins within a page too. [`ALL_PAGES`] for all of them. It is the same for all
    /// who share chunks: the length of a layer does not tell heads from pages.
    pub kept_pages: u32,
}

/// The shape of a cache. Every size was looked at: no sum or product of them overflows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheShape {
    layers: Vec<Layer>,
    groups: Vec<Group>,
    chunk_tokens: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{what} is {value}; allowed: {allowed}")]
pub struct BadValue {
    what: String,
    value: u64,
    allowed: String,
}

impl BadValue {
    pub fn new(what: impl Into<String>, value: impl Into<u64>, allowed: impl Into<String>) -> BadValue {
        BadValue { what: what.into(), value: value.into(), allowed: allowed.into() }
    }
}

impl CacheShape {
    /// A cache of these layers and groups, whose chunks have `chunk_tokens` tokens.
    pub fn new(layers: Vec<Layer>, groups: Vec<Group>, chunk_tokens: u32) -> Result<CacheShape, BadValue> {
        if !(1..=MAX_LAYERS).contains(&layers.len()) {
            return Err(BadValue::new(
                "the number of layers",
                layers.len() as u64,
                format!("1 to {MAX_LAYERS}"),
            ));
        }
        if !(1..=MAX_CHUNK_TOKENS).contains(&chunk_tokens) {
            return Err(BadValue::new("chunk_tokens", chunk_tokens, format!("1 to {MAX_CHUNK_TOKENS}")));
        }
        for (number, group) in groups.iter().enumerate() {
            group.check(number, chunk_tokens)?;
        }
        for (number, layer) in layers.iter().enumerate() {
            layer.check(number, &groups, chunk_tokens)?;
        }
        Ok(CacheShape { layers, groups, chunk_tokens })
    }

    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Tokens of a chunk that is not the last one.
    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    pub fn group_of(&self, layer: &Layer) -> Group {
        self.groups[layer.group]
    }

    /// Bytes of each layer of a chunk of `tokens` tokens: whole pages, also if the last one is not
    /// full.
    pub fn layer_bytes(&self, tokens: u32) -> impl Iterator<Item = u64> + '_ {
        self.layers.iter().map(move |layer| self.group_of(layer).kept_of(tokens) * layer.page_bytes)
    }
}

impl Group {
    pub fn pages_of(&self, tokens: u32) -> u64 {
        tokens.div_ceil(self.page_tokens).into()
    }

    /// How many pages a chunk of `tokens` tokens keeps.
    pub fn kept_of(&self, tokens: u32) -> u64 {
        let ends_within = !tokens.is_multiple_of(self.page_tokens);
        self.pages_of(tokens).min(u64::from(self.kept_pages) + u64::from(ends_within))
    }

    /// The first page of a chunk of `tokens` tokens that it keeps.
    pub fn first_kept_of(&self, tokens: u32) -> u64 {
        self.pages_of(tokens) - self.kept_of(tokens)
    }

    fn check(&self, number: usize, chunk_tokens: u32) -> Result<(), BadValue> {
        let Group { page_tokens, heads, kept_pages } = *self;
        if page_tokens == 0 || !chunk_tokens.is_multiple_of(page_tokens) {
            let allowed = format!("a divisor of chunk_tokens, {chunk_tokens}");
            return Err(BadValue::new(format!("page_tokens of group {number}"), page_tokens, allowed));
        }
        if heads == 0 {
            return Err(BadValue::new(format!("heads of group {number}"), 0_u64, "1 or more"));
        }
        if kept_pages == 0 {
            return Err(BadValue::new(format!("kept_pages of group {number}"), 0_u64, "1 or more"));
        }
        Ok(())
    }
}

impl Layer {
    /// Bytes from page 0 to the end of the last page.
    pub fn bytes(&self) -> u64 {
        (self.pages - 1) * self.stride_bytes + self.page_bytes
    }

    fn check(&self, number: usize, groups: &[Group], chunk_tokens: u32) -> Result<(), BadValue> {
        let what = |name: &str| format!("{name} of layer {number}");
        let Layer { address, pages, stride_bytes, page_bytes, group } = *self;
        let Some(of) = groups.get(group) else {
            return Err(BadValue::new(what("the group"), group as u64, format!("below {}", groups.len())));
        };
        // Not of its tokens: a page of compressed KV has fewer cells than tokens.
        if page_bytes == 0 || !page_bytes.is_multiple_of(of.heads.into()) {
            return Err(BadValue::new(
                what("page_bytes"),
                page_bytes,
                format!("a multiple of {}, the heads", of.heads),
            ));
        }
        if stride_bytes < page_bytes {
            return Err(BadValue::new(
                what("stride_bytes"),
                stride_bytes,
                format!("{page_bytes}, a page, or more"),
            ));
        }
        let last = pages.checked_sub(1).and_then(|last| last.checked_mul(stride_bytes));
        let end = last.and_then(|last| last.checked_add(page_bytes)?.checked_add(address));
        if address == 0 || end.is_none_or(|end| end > i64::MAX as u64) {
            let allowed = format!("1 or more that fit behind address {address:#x}, which is not 0");
            return Err(BadValue::new(what("pages"), pages, allowed));
        }
        let chunk_bytes = of.pages_of(chunk_tokens).checked_mul(page_bytes);
        let limit = i64::MAX as u64 / MAX_LAYERS as u64;
        if chunk_bytes.is_none_or(|bytes| bytes > limit) {
            return Err(BadValue::new(
                what("page_bytes"),
                page_bytes,
                format!("a layer of a chunk of {limit} bytes at most"),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: Layer = Layer { address: 4096, pages: 10, stride_bytes: 512, page_bytes: 256, group: 0 };
    const GROUP: Group = Group { page_tokens: 16, heads: 2, kept_pages: ALL_PAGES };

    #[test]
    fn what_cannot_be_is_refused_with_the_field_the_value_and_what_is_allowed() {
        let made = |layer: Layer, group: Group, chunk_tokens| {
            CacheShape::new(vec![layer], vec![group], chunk_tokens).map_err(|error| error.to_string())
        };
        assert!(made(LAYER, GROUP, 256).is_ok());
        for (layer, group, chunk_tokens, says) in [
            (LAYER, GROUP, 0, "chunk_tokens is 0"),
            (LAYER, GROUP, 250, "page_tokens of group 0 is 16; allowed: a divisor of chunk_tokens, 250"),
            (LAYER, Group { heads: 0, ..GROUP }, 256, "heads of group 0 is 0"),
            (LAYER, Group { kept_pages: 0, ..GROUP }, 256, "kept_pages of group 0 is 0"),
            (Layer { group: 1, ..LAYER }, GROUP, 256, "the group of layer 0 is 1; allowed: below 1"),
            (Layer { page_bytes: 101, ..LAYER }, GROUP, 256, "page_bytes of layer 0 is 101"),
            (Layer { page_bytes: 0, ..LAYER }, GROUP, 256, "page_bytes of layer 0 is 0"),
            (Layer { stride_bytes: 255, ..LAYER }, GROUP, 256, "stride_bytes of layer 0 is 255"),
            (Layer { pages: 0, ..LAYER }, GROUP, 256, "pages of layer 0 is 0"),
            (Layer { address: 0, ..LAYER }, GROUP, 256, "pages of layer 0"),
            (Layer { pages: u64::MAX / 512, ..LAYER }, GROUP, 256, "pages of layer 0"),
        ] {
            let why = made(layer, group, chunk_tokens).unwrap_err();
            assert!(why.starts_with(says), "{why}");
        }
        assert!(CacheShape::new(Vec::new(), vec![GROUP], 256).is_err());
    }

    #[test]
    fn a_short_chunk_has_whole_pages() {
        let shape = CacheShape::new(vec![LAYER; 2], vec![GROUP], 256).unwrap();
        assert_eq!(shape.layer_bytes(17).collect::<Vec<_>>(), [512, 512]);
        assert_eq!(LAYER.bytes(), 9 * 512 + 256);
    }

    #[test]
    fn a_chunk_keeps_so_many_pages_at_its_end_and_one_more_where_it_ends_within_a_page() {
        let group = Group { kept_pages: 3, ..GROUP };
        let shape = CacheShape::new(vec![LAYER], vec![group], 256).unwrap();
        for (tokens, kept, first) in [(1, 1, 0), (48, 3, 0), (49, 4, 0), (64, 3, 1), (65, 4, 1), (256, 3, 13)]
        {
            assert_eq!(
                (group.kept_of(tokens), group.first_kept_of(tokens)),
                (kept, first),
                "{tokens} tokens"
            );
            assert_eq!(shape.layer_bytes(tokens).collect::<Vec<_>>(), [kept * 256]);
        }
    }

    #[test]
    fn a_page_of_compressed_kv_may_have_fewer_cells_than_tokens() {
        let layer = Layer { page_bytes: 2 * 584, stride_bytes: 2 * 584, ..LAYER };
        let group = Group { page_tokens: 256, heads: 1, kept_pages: ALL_PAGES };
        let shape = CacheShape::new(vec![layer], vec![group], 512).unwrap();
        assert_eq!(shape.layer_bytes(512).collect::<Vec<_>>(), [4 * 584]);
    }
}
