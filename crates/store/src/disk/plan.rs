//! Plans: how the pieces of an operation become vectored I/Os. Neighbouring bytes of the file
//! become one I/O, however scattered they are in memory, within the limits of the system call. This
//! file knows offsets, addresses and limits; it must never follow an address.

use std::ptr::NonNull;
use thiserror::Error;

/// Direct I/O needs file offsets, lengths and addresses that are multiples of this. Devices with
/// smaller blocks would allow less; one rule for all keeps files portable between them.
pub const DISK_ALIGN_BYTES: u64 = 4096;

/// Slices of one I/O at most: Linux's `UIO_MAXIOV`.
pub const SLICES_MAX: usize = 1024;

/// Bytes that lie together both in the file and in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub offset: u64,
    pub address: NonNull<u8>,
    pub len: usize,
}

/// One I/O: bytes that lie together in the file, and the slices of memory that they belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Io {
    pub offset: u64,
    pub bytes: u64,
    first_slice: usize,
    slice_count: usize,
}

/// The I/Os of an operation.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    ios: Vec<Io>,
    slices: Vec<libc::iovec>,
}

// SAFETY: a plan never follows its addresses; who may is the contract of `Kernel::start`.
unsafe impl Send for Plan {}

/// Why pieces cannot be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum PlanError {
    #[error("{what} {value} is not a multiple of {DISK_ALIGN_BYTES} bytes, as direct I/O needs it")]
    Unaligned { what: &'static str, value: u64 },
}

impl Plan {
    /// Adds a piece behind the others. `io_bytes_max` is a multiple of [`DISK_ALIGN_BYTES`].
    pub fn push(&mut self, piece: Piece, io_bytes_max: u64) -> Result<(), PlanError> {
        check_alignment(&piece)?;
        let Piece { mut offset, mut address, len } = piece;
        let mut left = len as u64;
        while left > 0 {
            if !self.ios.last().is_some_and(|io| io.has_room(offset, address, io_bytes_max, &self.slices)) {
                self.ios.push(Io { offset, bytes: 0, first_slice: self.slices.len(), slice_count: 0 });
            }
            let Some(io) = self.ios.last_mut() else { break };
            let part = left.min(io_bytes_max - io.bytes);
            io.append(address, part as usize, &mut self.slices);
            offset += part;
            left -= part;
            // Past the piece's last byte only when the loop ends; never followed.
            address = address.map_addr(|address| address.saturating_add(part as usize));
        }
        Ok(())
    }

    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.ios.clear();
        self.slices.clear();
    }

    /// The I/Os, in the order of the pieces.
    pub fn ios(&self) -> &[Io] {
        &self.ios
    }

    /// The slices of an I/O. They stay where they are while the plan lives and gets no more pieces.
    pub fn slices(&self, io: &Io) -> &[libc::iovec] {
        &self.slices[io.first_slice..io.first_slice + io.slice_count]
    }

    /// Takes the first `bytes` bytes, which are done, off the I/O at `index`. More than it has
    /// empties it.
    pub fn advance(&mut self, index: usize, bytes: u64) {
        let io = &mut self.ios[index];
        let mut left = bytes.min(io.bytes);
        io.offset += left;
        io.bytes -= left;
        while left > 0 {
            let slice = &mut self.slices[io.first_slice];
            let part = left.min(slice.iov_len as u64);
            slice.iov_base = slice.iov_base.wrapping_byte_add(part as usize);
            slice.iov_len -= part as usize;
            left -= part;
            if slice.iov_len == 0 {
                io.first_slice += 1;
                io.slice_count -= 1;
            }
        }
    }
}

impl Io {
    /// Whether bytes at `offset` that go to `address` can become part of this I/O.
    fn has_room(&self, offset: u64, address: NonNull<u8>, io_bytes_max: u64, slices: &[libc::iovec]) -> bool {
        let adjacent = self.offset + self.bytes == offset;
        let has_slice = self.slice_count < SLICES_MAX || ends_at(slices, address);
        adjacent && has_slice && self.bytes < io_bytes_max
    }

    fn append(&mut self, address: NonNull<u8>, len: usize, slices: &mut Vec<libc::iovec>) {
        self.bytes += len as u64;
        if self.slice_count > 0
            && ends_at(slices, address)
            && let Some(last) = slices.last_mut()
        {
            last.iov_len += len;
            return;
        }
        slices.push(libc::iovec { iov_base: address.as_ptr().cast(), iov_len: len });
        self.slice_count += 1;
    }
}

/// Whether the last slice ends where `address` starts.
fn ends_at(slices: &[libc::iovec], address: NonNull<u8>) -> bool {
    slices.last().is_some_and(|last| last.iov_base.addr() + last.iov_len == address.addr().get())
}

fn check_alignment(piece: &Piece) -> Result<(), PlanError> {
    let values = [
        ("file offset", piece.offset),
        ("length", piece.len as u64),
        ("memory address", piece.address.addr().get() as u64),
    ];
    match values.into_iter().find(|(_, value)| value % DISK_ALIGN_BYTES != 0) {
        Some((what, value)) => Err(PlanError::Unaligned { what, value }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = DISK_ALIGN_BYTES;

    fn piece(offset: u64, address: u64, len: u64) -> Piece {
        let address = NonNull::new(std::ptr::without_provenance_mut(address as usize)).unwrap();
        Piece { offset, address, len: len as usize }
    }

    fn pages(offset: u64, address: u64, len: u64) -> Piece {
        piece(offset * PAGE, address * PAGE, len * PAGE)
    }

    fn plan(pieces: &[Piece], io_bytes_max: u64) -> Plan {
        let mut plan = Plan::default();
        pieces.iter().for_each(|piece| plan.push(*piece, io_bytes_max).unwrap());
        plan
    }

    /// Each page of the file with its address, in order.
    fn coverage(plan: &Plan) -> Vec<(u64, u64)> {
        let of_io = |io: &Io| {
            let slices = plan.slices(io).iter();
            let addresses = slices.flat_map(|slice| {
                let start = slice.iov_base.addr() as u64;
                (start..start + slice.iov_len as u64).step_by(PAGE as usize)
            });
            (io.offset..io.offset + io.bytes).step_by(PAGE as usize).zip(addresses).collect::<Vec<_>>()
        };
        plan.ios().iter().flat_map(of_io).collect()
    }

    #[test]
    fn a_layer_into_scattered_blocks_is_one_io() {
        let blocks: Vec<Piece> = (0..16).map(|block| pages(100 + block * 8, 1_000 - block * 50, 8)).collect();
        let plan = plan(&blocks, 1 << 20);
        assert_eq!(plan.ios().len(), 1);
        assert_eq!((plan.ios()[0].offset, plan.ios()[0].bytes), (100 * PAGE, 128 * PAGE));
        assert_eq!(plan.slices(&plan.ios()[0]).len(), 16);
    }

    #[test]
    fn bytes_that_lie_together_on_both_sides_are_one_slice() {
        let plan = plan(&[pages(0, 10, 1), pages(1, 11, 1), pages(2, 20, 1)], 1 << 20);
        assert_eq!(plan.slices(&plan.ios()[0]).len(), 2);
    }

    #[test]
    fn unaligned_values_are_named() {
        let mut plan = Plan::default();
        for (bad, message) in [
            (piece(512, PAGE, PAGE), "file offset 512 is not a multiple of 4096 bytes"),
            (piece(PAGE, PAGE, 100), "length 100 is not a multiple of 4096 bytes"),
            (piece(PAGE, PAGE + 64, PAGE), "memory address 4160 is not a multiple of 4096 bytes"),
        ] {
            assert!(plan.push(bad, 1 << 20).unwrap_err().to_string().starts_with(message));
        }
        assert!(plan.ios().is_empty());
    }

    #[test]
    fn an_io_that_continues_starts_at_the_exact_byte() {
        let mut plan = plan(&[pages(0, 10, 2), pages(2, 30, 2)], 1 << 20);
        plan.advance(0, 2 * PAGE + 512);
        let io = plan.ios()[0];
        assert_eq!((io.offset, io.bytes), (2 * PAGE + 512, 2 * PAGE - 512));
        let slices = plan.slices(&io);
        assert_eq!((slices.len(), slices[0].iov_base.addr() as u64), (1, 30 * PAGE + 512));
        assert_eq!(slices[0].iov_len as u64, 2 * PAGE - 512);
    }

    /// Runs of pieces, some adjacent to the one before in the file or in memory.
    fn any_pieces() -> impl Strategy<Value = Vec<Piece>> {
        let step = (0u64..3, 0u64..3, 1u64..40);
        proptest::collection::vec(step, 0..1500).prop_map(|steps| {
            let (mut offset, mut address) = (0, 1);
            let place = |(gap, jump, len)| {
                let piece = pages(offset + gap, address + jump, len);
                (offset, address) = (offset + gap + len, address + jump + len);
                piece
            };
            steps.into_iter().map(place).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_plan_covers_each_byte_once_within_the_limits(pieces in any_pieces(), max_pages in 1u64..3000) {
            let io_bytes_max = max_pages * PAGE;
            let plan = plan(&pieces, io_bytes_max);
            let wanted: Vec<(u64, u64)> = pieces.iter().flat_map(|piece| {
                let (offset, address) = (piece.offset, piece.address.addr().get() as u64);
                (0..piece.len as u64).step_by(PAGE as usize).map(move |at| (offset + at, address + at))
            }).collect();
            prop_assert_eq!(coverage(&plan), wanted);
            for io in plan.ios() {
                let slices = plan.slices(io);
                prop_assert!(io.bytes > 0 && io.bytes <= io_bytes_max && slices.len() <= SLICES_MAX);
                prop_assert_eq!(slices.iter().map(|slice| slice.iov_len as u64).sum::<u64>(), io.bytes);
            }
            for neighbours in plan.ios().windows(2) {
                let [before, after] = neighbours else { unreachable!() };
                let apart = before.offset + before.bytes != after.offset;
                let full = before.bytes == io_bytes_max || before.slice_count == SLICES_MAX;
                prop_assert!(apart || full, "two I/Os where one would do: {before:?} {after:?}");
            }
        }

        #[test]
        fn advancing_drops_a_prefix_and_nothing_else(pieces in any_pieces(), skip_pages in 0u64..100) {
            let mut plan = plan(&pieces, 1 << 20);
            let before = coverage(&plan);
            let Some(first) = plan.ios().first().copied() else { return Ok(()) };
            let skip = skip_pages.min(first.bytes / PAGE);
            plan.advance(0, skip * PAGE);
            prop_assert_eq!(coverage(&plan), before[skip as usize..].to_vec());
        }
    }
}
