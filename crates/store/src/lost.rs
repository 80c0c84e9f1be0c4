//! What lost operations may still touch of a stretch of a region. Spans of neighbours become one
//! when they are moved, so a span may begin before a stretch and end behind it. This file knows
//! spans.

use forebay_transfer::{RegionId, Span};
use std::ops::Range;

/// Bytes of the spans that lie in a stretch of a region.
pub(crate) fn bytes_in<'a>(
    region: RegionId,
    stretch: &Range<u64>,
    spans: impl IntoIterator<Item = &'a Span>,
) -> u64 {
    let own = spans.into_iter().filter(|span| span.region == region);
    let bytes = |span: &Span| {
        let end = span.offset.saturating_add(span.len).min(stretch.end);
        end.saturating_sub(span.offset.max(stretch.start))
    };
    own.map(bytes).sum()
}
