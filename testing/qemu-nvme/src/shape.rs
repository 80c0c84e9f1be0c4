//! Random places for the data of a transfer, and the lists that say where they are. Lists are
//! encoded by `forebay-ring`; this knows only which shapes PRPs and SGLs can have.

use crate::GuestMemory;
use crate::drive::PAGE_BYTES;
use forebay_ring::nvme::{DataPointer, Format, ListPage, Segment, prp, sgl};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngExt};

/// QEMU maps at most `IOV_MAX` (1,024) pieces of memory for a command.
const MOST_SEGMENTS: usize = 600;
/// The longest gap between two data blocks of an SGL.
const LONGEST_GAP: u64 = 128;

/// Guest memory for one command's data and its lists. Nothing else lies there.
#[derive(Debug, Clone, Copy)]
pub struct Area {
    /// Where the data may lie: [`Area::DATA_BYTES`].
    pub data: u64,
    /// Where lists may lie: [`Area::LIST_BYTES`].
    pub lists: u64,
}

impl Area {
    /// The longest transfer, in bytes.
    pub const LONGEST: u64 = 512 << 10;
    /// What the longest transfer may use.
    pub const DATA_BYTES: u64 = Area::span(Area::LONGEST);
    /// As many pages as an SGL has segments if each holds but one data block.
    pub const LIST_BYTES: u64 = MOST_SEGMENTS as u64 * PAGE_BYTES;

    /// How much of the area's data a transfer of so many bytes may use: twice the bytes, and gaps.
    pub const fn span(bytes: u64) -> u64 {
        (2 * bytes + MOST_SEGMENTS as u64 * LONGEST_GAP).next_multiple_of(PAGE_BYTES)
    }
}

/// Where the bytes of a transfer lie, in their order, and where its lists go.
#[derive(Debug)]
pub struct Shape {
    format: Format,
    segments: Vec<Segment>,
    /// Address and bytes of each page of the list.
    lists: Vec<(u64, usize)>,
}

impl Shape {
    /// Any shape that this format can have, for so many bytes.
    ///
    /// # Panics
    /// Where there are more than [`Area::LONGEST`] bytes.
    pub fn random(rng: &mut StdRng, format: Format, bytes: u64, area: Area) -> Shape {
        assert!(bytes <= Area::LONGEST, "{bytes} bytes in an area for {}", Area::LONGEST);
        let (segments, lists) = match format {
            Format::Prp => (prp_pages(rng, bytes, area.data), prp_lists(rng, area.lists)),
            Format::Sgl => (sgl_blocks(rng, bytes, area.data), sgl_lists(rng, area.lists)),
        };
        Shape { format, segments, lists }
    }

    /// Its encoding and how many pieces of memory it has, for messages.
    pub fn kind(&self) -> String {
        format!("{:?} of {} segments", self.format, self.segments.len())
    }

    /// Writes the lists, and says what the command has.
    ///
    /// # Panics
    /// Where our encoders refuse the shape.
    pub fn encode(&self, memory: &GuestMemory) -> DataPointer {
        let mut pages: Vec<Vec<u8>> = self.lists.iter().map(|&(_, bytes)| vec![0; bytes]).collect();
        let pairs = self.lists.iter().zip(&mut pages);
        let mut lists: Vec<ListPage<'_>> =
            pairs.map(|(&(address, _), bytes)| ListPage { address, bytes }).collect();
        let (data, used) = match self.format {
            Format::Prp => {
                let encoded = prp::encode(&self.segments, PAGE_BYTES, &mut lists);
                let (prp, used) = encoded.unwrap_or_else(|error| panic!("{}: {error}", self.kind()));
                (DataPointer::Prp(prp), used)
            }
            Format::Sgl => {
                let encoded = sgl::encode(&self.segments, false, &mut lists);
                let (descriptor, used) = encoded.unwrap_or_else(|error| panic!("{}: {error}", self.kind()));
                (DataPointer::Sgl(descriptor), used)
            }
        };
        for (&(address, _), bytes) in self.lists.iter().zip(&pages).take(used) {
            memory.write(address, bytes);
        }
        data
    }

    /// Puts the data in its places within an image of memory that begins at `from`.
    pub fn scatter(&self, data: &[u8], image: &mut [u8], from: u64) {
        let mut rest = data;
        for &Segment { address, bytes } in &self.segments {
            let (here, after) = rest.split_at(bytes as usize);
            image[(address - from) as usize..][..here.len()].copy_from_slice(here);
            rest = after;
        }
    }
}

/// Pages in any order; the first may begin, and the last may end, inside of a page.
fn prp_pages(rng: &mut StdRng, bytes: u64, from: u64) -> Vec<Segment> {
    let mut pages: Vec<u64> = (from..from + Area::span(bytes)).step_by(PAGE_BYTES as usize).collect();
    pages.shuffle(rng);
    let mut in_page = if rng.random() { 4 * rng.random_range(0..PAGE_BYTES / 4) } else { 0 };
    let (mut segments, mut rest) = (Vec::new(), bytes);
    for page in pages {
        let here = rest.min(PAGE_BYTES - in_page);
        segments.push(Segment { address: page + in_page, bytes: here });
        (rest, in_page) = (rest - here, 0);
        if rest == 0 {
            break;
        }
    }
    segments
}

/// The first list may begin inside of a page, the next ones take whole pages.
fn prp_lists(rng: &mut StdRng, from: u64) -> Vec<(u64, usize)> {
    let in_page = match rng.random_range(0..3) {
        0 => 0,
        1 => 8 * rng.random_range(0..PAGE_BYTES / 8),
        // So that most of the entries come behind a chain.
        _ => PAGE_BYTES - 8 * rng.random_range(1..4),
    };
    let first = (from + in_page, (PAGE_BYTES - in_page) as usize);
    // One page has entries for 2 MiB.
    vec![first, (from + PAGE_BYTES, PAGE_BYTES as usize)]
}

/// Blocks of any length at any address, in rising order with gaps.
fn sgl_blocks(rng: &mut StdRng, bytes: u64, from: u64) -> Vec<Segment> {
    let (mut segments, mut rest, mut address) = (Vec::new(), bytes, from);
    while rest > 0 {
        let length = match rng.random_range(0..5) {
            0 => rng.random_range(1..64),
            1 => 512,
            2 => PAGE_BYTES,
            3 => 64 << 10,
            _ => rng.random_range(1..100_000),
        };
        let is_last = segments.len() + 1 == MOST_SEGMENTS;
        let length = if is_last { rest } else { rest.min(length) };
        address += rng.random_range(0..LONGEST_GAP);
        segments.push(Segment { address, bytes: length });
        (address, rest) = (address + length, rest - length);
    }
    segments
}

/// Segments of the list of any number of descriptors, up to a page. Neighbours differ: where the
/// last two segments before the last one are of one size, QEMU 7.2 takes the second one for the
/// last segment, since it has read it over the descriptor that led there.
fn sgl_lists(rng: &mut StdRng, from: u64) -> Vec<(u64, usize)> {
    let most = if rng.random() { 256 } else { rng.random_range(3..8) };
    let pages = (0..MOST_SEGMENTS as u64).map(|page| {
        let descriptors = most - page as usize % 2;
        (from + page * PAGE_BYTES, descriptors * sgl::DESCRIPTOR_BYTES)
    });
    pages.collect()
}

/// Bytes that are unlike each other's.
pub(crate) fn random_bytes(rng: &mut StdRng, bytes: u64) -> Vec<u8> {
    let mut data = vec![0; bytes as usize];
    rng.fill_bytes(&mut data);
    data
}
