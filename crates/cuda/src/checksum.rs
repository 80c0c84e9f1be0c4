//! CRC-32C of memory where a GPU has it: a kernel sums up ranges, the host joins their sums. This
//! file knows the arithmetic of the joining and the lists that the kernel reads; what is to be
//! summed up, and what the sums are compared with, is the caller's.
//!
//! An *extent* is what has one checksum: ranges of memory, one after another, which need not touch.
//! The kernel divides the bytes of each range by the polynomial of CRC-32C, so that no range waits
//! for another. A CRC-32C goes on over a range by being multiplied with `x` to the range's bits and
//! added to the range's remainder.

use crate::device::{Device, HostMemory, Stream};
use crate::driver::CudaError;
use crate::driver::abi::Address;
use crate::kernels::Kernel;
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Source and build script are in the folder `kernels`.
const PTX: &str = concat!(include_str!("../kernels/checksums.ptx"), "\0");
/// How many blocks of a list's kernel there are at most, and how many threads each has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width {
    pub blocks: u32,
    pub threads: u32,
}

/// As many threads as 16 SMs hold in two halves, which sum up five times as much as a PCIe link
/// carries; in blocks for which there soon is room while the GPU computes.
pub const BEHIND_COPIES: Width = Width { blocks: 64, threads: 256 };
/// What one warp sums up.
const RANGE_BYTES: u64 = 16 << 10;
/// Ranges of a list at most: 64 GiB in long extents.
const RANGES_MAX: u64 = 1 << 22;
/// Room of a list at least, and how many lists of that size are made before any is needed: to pin
/// memory takes longer than to copy a layer.
const LIST_RANGES: usize = 4096;
const LISTS: usize = 8;

/// Reflected, as all sums here: bit 31 is `x` to the power of 0.
const POLYNOMIAL: u32 = 0x82F6_3B78;
const ONE: u32 = 1 << 31;

/// Contiguous bytes. The layout is the kernel's.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub at: Address,
    pub bytes: u64,
}

/// The kernel, loaded for one device, and memory for its lists.
#[derive(Debug)]
pub struct Checksums {
    kernel: Kernel,
    spare: Mutex<Vec<HostMemory>>,
}

/// Extents that are to be summed up, and then their sums.
#[derive(Debug)]
pub struct SumList {
    checksums: Arc<Checksums>,
    /// All ranges, behind them their remainders, and then of each extent the place of its first
    /// range, and behind the last one where that ends. Taken when this is dropped.
    memory: Option<HostMemory>,
    /// How many ranges there are, and where those of each extent end.
    count: usize,
    ends: Vec<usize>,
}

impl Checksums {
    /// Loads the kernel, and has the driver prepare it fully.
    pub fn load(device: &Arc<Device>) -> Result<Arc<Checksums>, CudaError> {
        let kernel = Kernel::load(device, PTX, c"forebay_checksums")?;
        let spare = (0..LISTS).map(|_| memory(device, LIST_RANGES)).collect::<Result<_, _>>()?;
        let checksums = Arc::new(Checksums { kernel, spare: Mutex::new(spare) });
        let stream = Stream::new(device)?;
        // SAFETY: no ranges, so no address is used.
        unsafe { checksums.list(&[])?.queue(&stream, BEHIND_COPIES)? };
        stream.synchronize()?;
        Ok(checksums)
    }

    /// Lists extents for the kernel.
    pub fn list(self: &Arc<Self>, extents: &[Vec<Range>]) -> Result<SumList, CudaError> {
        let count: u64 = extents.iter().flatten().map(|range| range.bytes.div_ceil(RANGE_BYTES)).sum();
        if count > RANGES_MAX {
            return Err(CudaError::full("list of checksums"));
        }
        let count = count as usize;
        let memory = Some(self.memory_for(count, extents.len() + 1)?);
        let ends = Vec::with_capacity(extents.len());
        let mut list = SumList { checksums: Arc::clone(self), memory, count, ends };
        let Places { start, remainders, starts } = list.places();
        let mut at = 0;
        // SAFETY: the memory has room for it, as for all that follows; no kernel has it.
        unsafe { starts.write(0) };
        for (extent, number) in extents.iter().zip(1..) {
            for piece in extent.iter().flat_map(|range| cut(*range)) {
                // SAFETY: as above.
                unsafe { start.add(at).write(piece) };
                at += 1;
            }
            list.ends.push(at);
            // SAFETY: as above.
            unsafe { starts.add(number).write(at as u32) };
        }
        // SAFETY: as above. Those of ranges before might be right by chance.
        unsafe { std::ptr::write_bytes(remainders, 0, count) };
        Ok(list)
    }

    /// The smallest spare memory with room for so many ranges and starts, or new one.
    fn memory_for(&self, ranges: usize, starts: usize) -> Result<HostMemory, CudaError> {
        let mut spare = self.spare.lock();
        // No extent that is summed up is without a range.
        let ranges = ranges.max(starts);
        let fits = spare.iter().enumerate().filter(|(_, memory)| memory.bytes() >= list_bytes(ranges));
        let best = fits.min_by_key(|(_, memory)| memory.bytes()).map(|(at, _)| at);
        if let Some(at) = best {
            return Ok(spare.swap_remove(at));
        }
        drop(spare);
        memory(self.kernel.device(), ranges.next_power_of_two().max(LIST_RANGES))
    }
}

impl SumList {
    /// Has a stream sum up all extents.
    ///
    /// # Safety
    ///
    /// As for [`queue_part`](SumList::queue_part).
    pub unsafe fn queue(&self, stream: &Stream, width: Width) -> Result<(), CudaError> {
        // SAFETY: by this function's contract.
        unsafe { self.queue_part(0..self.ends.len(), stream, width) }
    }

    /// Has a stream sum up some of the extents, by their numbers.
    ///
    /// # Safety
    ///
    /// Until the stream has come past it, the list lives, all ranges of these extents are memory
    /// that the stream's device reaches, and nobody writes them. The stream is one of the device
    /// that the kernel was loaded for.
    pub unsafe fn queue_part(
        &self,
        extents: std::ops::Range<usize>,
        stream: &Stream,
        width: Width,
    ) -> Result<(), CudaError> {
        let _current = self.checksums.kernel.device().enter()?;
        let end_of = |extents: usize| extents.checked_sub(1).map_or(0, |last| self.ends[last]);
        let (first, end) = (end_of(extents.start), end_of(extents.end));
        let Places { start, remainders, .. } = self.places();
        let mut count = (end - first) as u32;
        let mut start = start.wrapping_add(first) as Address;
        let mut remainders = remainders.wrapping_add(first) as Address;
        let mut parameters = [(&raw mut start).cast(), (&raw mut count).cast(), (&raw mut remainders).cast()];
        let blocks = count.clamp(1, width.blocks);
        // SAFETY: the parameters have the types of the kernel's; the rest is this function's
        // contract.
        unsafe { self.checksums.kernel.launch(stream, (blocks, 1), width.threads, &mut parameters) }
    }

    /// The CRC-32C of each extent, when the stream has come past it. Before that they are wrong.
    pub fn sums(&self) -> Vec<u32> {
        let Places { start, remainders, .. } = self.places();
        // SAFETY: there are as many as ranges; a kernel that is under way may write them meanwhile.
        let remainder = |at: usize| unsafe { remainders.add(at).read_volatile() };
        // SAFETY: these were written, and nobody writes them again.
        let length = |at: usize| unsafe { (*start.add(at)).bytes };
        let mut joining = Joining::default();
        let mut from = 0;
        let mut sum = |end: &usize| {
            let ranges = std::mem::replace(&mut from, *end)..*end;
            !ranges.fold(!0, |sum, at| joining.go_on(sum, length(at), remainder(at)))
        };
        self.ends.iter().map(&mut sum).collect()
    }

    /// A number for each extent, when the stream has come past it: extents of as many ranges of the
    /// same lengths have the same one if they have the same bytes. Many ranges are joined sooner so
    /// than to a CRC of all bytes.
    pub fn digests(&self) -> Vec<u64> {
        let remainders = self.places().remainders;
        let mut bytes = Vec::with_capacity(self.count * size_of::<u32>());
        let mut from = 0;
        let digest = |end: &usize| {
            bytes.clear();
            for at in std::mem::replace(&mut from, *end)..*end {
                // SAFETY: there are as many as ranges; a kernel that is under way may write them
                // meanwhile.
                let remainder: u32 = unsafe { remainders.add(at).read_volatile() };
                bytes.extend_from_slice(&remainder.to_le_bytes());
            }
            xxh3_64(&bytes)
        };
        self.ends.iter().map(digest).collect()
    }

    /// How many extents there are.
    pub(crate) fn extents(&self) -> usize {
        self.ends.len()
    }

    /// Where everything is.
    pub(crate) fn places(&self) -> Places {
        let start = self.memory.as_ref().map_or(std::ptr::null_mut(), HostMemory::start).cast::<Range>();
        let remainders = start.wrapping_add(self.count).cast::<u32>();
        Places { start, remainders, starts: remainders.wrapping_add(self.count) }
    }
}

/// Where a list has its ranges, their remainders, and the place of each extent's first range.
pub(crate) struct Places {
    pub start: *mut Range,
    pub remainders: *mut u32,
    pub starts: *mut u32,
}

impl Drop for SumList {
    fn drop(&mut self) {
        self.checksums.spare.lock().extend(self.memory.take());
    }
}

fn list_bytes(ranges: usize) -> usize {
    ranges * (size_of::<Range>() + 2 * size_of::<u32>()) + size_of::<u32>()
}

fn memory(device: &Arc<Device>, ranges: usize) -> Result<HostMemory, CudaError> {
    HostMemory::new(device, list_bytes(ranges))
}

/// A range in pieces that a warp takes.
fn cut(range: Range) -> impl Iterator<Item = Range> {
    let piece = move |from| Range { at: range.at + from, bytes: RANGE_BYTES.min(range.bytes - from) };
    (0..range.bytes).step_by(RANGE_BYTES as usize).map(piece)
}

/// Goes on with sums over ranges. Most ranges have one of few lengths.
#[derive(Default)]
struct Joining(HashMap<u64, u32>);

impl Joining {
    fn go_on(&mut self, sum: u32, bytes: u64, remainder: u32) -> u32 {
        times(sum, *self.0.entry(bytes).or_insert_with(|| power(8 * bytes))) ^ remainder
    }
}

const fn times(mut one: u32, other: u32) -> u32 {
    let (mut product, mut bit) = (0, ONE);
    while bit > 0 {
        if other & bit != 0 {
            product ^= one;
        }
        one = (one >> 1) ^ if one & 1 == 1 { POLYNOMIAL } else { 0 };
        bit >>= 1;
    }
    product
}

/// `x` to a power.
const fn power(mut of: u64) -> u32 {
    let (mut result, mut square) = (ONE, ONE >> 1);
    while of > 0 {
        if of & 1 == 1 {
            result = times(result, square);
        }
        square = times(square, square);
        of >>= 1;
    }
    result
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LANES: usize = 32;
    const ROW_BYTES: usize = LANES * 16;

    /// The products of a word's bytes with a power of `x`, as the kernel has them in tables.
    struct Step(Vec<u32>);

    impl Step {
        fn new(bits: u64) -> Step {
            let product = |at: u32| times((at & 255) << (at >> 8 << 3), power(bits));
            Step((0..4 * 256).map(product).collect())
        }

        fn of(&self, word: u32) -> u32 {
            let bytes = word.to_le_bytes().into_iter().enumerate();
            bytes.fold(0, |sum, (byte, value)| sum ^ self.0[256 * byte + usize::from(value)])
        }
    }

    /// What the kernel gives for a range, by the same steps.
    fn remainder(bytes: &[u8]) -> u32 {
        let (row, word) = (Step::new(8 * ROW_BYTES as u64), Step::new(32));
        let mut padded = vec![0; bytes.len().next_multiple_of(ROW_BYTES) - bytes.len()];
        padded.extend_from_slice(bytes);
        let lane = |lane: usize| {
            let mut sums = [0_u32; 4];
            for of_row in padded.chunks_exact(ROW_BYTES) {
                let words = of_row[16 * lane..].chunks_exact(4).map(|word| word.try_into().unwrap());
                for (sum, found) in sums.iter_mut().zip(words) {
                    *sum = row.of(*sum) ^ u32::from_le_bytes(found);
                }
            }
            let own = sums.into_iter().reduce(|own, next| word.of(own) ^ next).unwrap();
            times(own, power(128 * (LANES - lane) as u64 - 96))
        };
        (0..LANES).fold(0, |sum, nth| sum ^ lane(nth))
    }

    proptest! {
        #[test]
        fn sums_of_ranges_join_to_the_checksum_of_their_bytes(
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            cuts in prop::collection::vec(0_usize..5000, 0..6),
        ) {
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
            ends.push(bytes.len());
            ends.sort_unstable();
            let (mut joining, mut from) = (Joining::default(), 0);
            let sum = ends.into_iter().fold(!0, |sum, end| {
                let range = &bytes[std::mem::replace(&mut from, end)..end];
                joining.go_on(sum, range.len() as u64, remainder(range))
            });
            prop_assert_eq!(!sum, crc32c::crc32c(&bytes));
        }

        #[test]
        fn a_range_is_cut_into_what_warps_take_and_no_byte_is_left_out(at in any::<u32>(), bytes in 0..200_000_u64) {
            let mut next = u64::from(at);
            for piece in cut(Range { at: at.into(), bytes }) {
                prop_assert_eq!(piece.at, next);
                prop_assert!(piece.bytes > 0 && piece.bytes <= RANGE_BYTES);
                next += piece.bytes;
            }
            prop_assert_eq!(next, u64::from(at) + bytes);
        }
    }
}
