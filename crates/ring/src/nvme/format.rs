//! Which of the two encodings a transfer takes: PRPs, which every drive has, or a scatter gather
//! list. It knows what each can describe and where descriptors become fewer than pages.

use super::identify::SglSupport;
use super::memory::Segment;

/// From this average a scatter gather list is shorter than PRPs and worth its segment; Linux has
/// drawn the line there too.
pub const SGL_FROM_AVERAGE_BYTES: u64 = 32 << 10;

/// How a command says where its data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Prp,
    Sgl,
}

impl Format {
    /// The encoding for these segments. PRPs cannot leave gaps inside pages: then it is a scatter
    /// gather list, if the drive has them, however short the segments are.
    pub fn choose(support: SglSupport, segments: &[Segment], page_bytes: u64) -> Format {
        let granularity = match support {
            SglSupport::None => return Format::Prp,
            SglSupport::Bytes => 1,
            SglSupport::Dwords => 4,
        };
        let fits = |segment: &Segment| {
            segment.address.is_multiple_of(granularity) && segment.bytes.is_multiple_of(granularity)
        };
        let bytes: u64 = segments.iter().map(|segment| segment.bytes).sum();
        let are_long = bytes >= SGL_FROM_AVERAGE_BYTES * segments.len() as u64;
        match segments.iter().all(fits) && (are_long || has_gaps(segments, page_bytes)) {
            true => Format::Sgl,
            false => Format::Prp,
        }
    }
}

/// Whether PRPs cannot describe the segments as one transfer.
fn has_gaps(segments: &[Segment], page_bytes: u64) -> bool {
    let meets = |pair: &[Segment]| {
        let ends_at_page = pair[0].address.wrapping_add(pair[0].bytes).is_multiple_of(page_bytes);
        ends_at_page && pair[1].address.is_multiple_of(page_bytes)
    };
    !segments.windows(2).all(meets) || segments.first().is_some_and(|first| !first.address.is_multiple_of(4))
}
