//! The copy kernel: moves bytes between two addresses as fast as memory allows.
//!
//! An ordinary store first reads the cache line that it is about to replace, which costs a third of
//! the memory's bandwidth. Non-temporal stores do not, but bypass the cache, so they pay when the
//! bytes would not stay there anyway. A single stream of them waits for one DRAM page after the
//! other; four streams at a time, each in pages of its own, keep more of the memory busy, also
//! where blocks are too short for the hardware's prefetcher to get going. A long block is cut into
//! four streams. Of short ones, four are copied side by side: a quarter of one is too short.

/// Streams copied side by side.
pub(crate) const STREAMS: usize = 4;
/// A stream of one block at most: two pages, so that all streams stay within what the TLB and the
/// prefetcher follow.
pub(crate) const STREAM_BYTES_MAX: usize = 8192;

/// Where a block comes from, and where it goes.
pub(crate) type Block = (*const u8, *mut u8);

/// Which instructions copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// `memcpy`, which leaves the target in the cache.
    Cached,
    /// Non-temporal stores of 16 bytes.
    #[cfg(target_arch = "x86_64")]
    Sse2,
    /// Non-temporal stores of 32 bytes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Non-temporal stores of 64 bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    /// The best kernel of this processor for bytes that will not be read again soon.
    pub fn streaming() -> Kernel {
        Kernel::available().last().copied().unwrap_or(Kernel::Cached)
    }

    /// All kernels that this processor runs, the best one last.
    pub fn available() -> Vec<Kernel> {
        let mut kernels = vec![Kernel::Cached];
        #[cfg(target_arch = "x86_64")]
        {
            // SSE2 is part of x86-64.
            kernels.push(Kernel::Sse2);
            if is_x86_feature_detected!("avx2") {
                kernels.push(Kernel::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                kernels.push(Kernel::Avx512);
            }
        }
        kernels
    }

    /// Copies `len` bytes. Before another thread is told of them, this thread must call
    /// [`fence`](Kernel::fence).
    ///
    /// # Safety
    ///
    /// `from .. from + len` must be readable and `to .. to + len` writable, they must not overlap,
    /// and nobody may write the former or touch the latter meanwhile. The processor must run this
    /// kernel.
    pub unsafe fn copy(self, from: *const u8, to: *mut u8, len: usize) {
        match self {
            // SAFETY: as the caller promises.
            Kernel::Cached => unsafe { std::ptr::copy_nonoverlapping(from, to, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as the caller promises.
            Kernel::Sse2 => unsafe { x86::copy_sse2(from, to, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as the caller promises, also about the processor.
            Kernel::Avx2 => unsafe { x86::copy_avx2(from, to, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as the caller promises, also about the processor.
            Kernel::Avx512 => unsafe { x86::copy_avx512(from, to, len) },
        }
    }

    /// Copies several blocks of `len` bytes, as [`copy`](Kernel::copy) copies each.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Kernel::copy) of each block; and no block is written where another one is
    /// read or written.
    pub unsafe fn copy_side_by_side(self, blocks: &[Block; STREAMS], len: usize) {
        match self {
            // SAFETY: as the caller promises.
            Kernel::Cached => blocks.iter().for_each(|(from, to)| unsafe { self.copy(*from, *to, len) }),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as the caller promises.
            Kernel::Sse2 => unsafe { x86::blocks_sse2(blocks, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as the caller promises, also about the processor.
            Kernel::Avx2 => unsafe { x86::blocks_avx2(blocks, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as the caller promises, also about the processor.
            Kernel::Avx512 => unsafe { x86::blocks_avx512(blocks, len) },
        }
    }

    /// Orders this thread's copies before whatever it does next: non-temporal stores are not
    /// ordered by locks or atomics.
    pub fn fence(self) {
        #[cfg(target_arch = "x86_64")]
        if self != Kernel::Cached {
            // SAFETY: SSE is part of x86-64.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Block, STREAM_BYTES_MAX, STREAMS};
    use std::arch::x86_64::*;

    /// A cache line: what one non-temporal write to memory carries.
    const LINE: usize = 64;
    /// What one stream copies before the next one has its turn.
    const STEP: usize = 4 * LINE;

    /// A register of `LINE / PER_LINE` bytes.
    trait Vector: Copy {
        /// Registers to a cache line.
        const PER_LINE: usize;

        /// # Safety
        /// A whole register must be readable at `from`, and the processor must have such registers.
        unsafe fn load(from: *const u8) -> Self;

        /// # Safety
        /// A whole register must be writable at `to`, which is aligned to it, and the processor
        /// must have such registers.
        unsafe fn stream(self, to: *mut u8);
    }

    impl Vector for __m128i {
        const PER_LINE: usize = 4;

        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: as the caller promises.
            unsafe { _mm_loadu_si128(from.cast()) }
        }

        #[inline(always)]
        unsafe fn stream(self, to: *mut u8) {
            // SAFETY: as the caller promises.
            unsafe { _mm_stream_si128(to.cast(), self) }
        }
    }

    impl Vector for __m256i {
        const PER_LINE: usize = 2;

        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: as the caller promises.
            unsafe { _mm256_loadu_si256(from.cast()) }
        }

        #[inline(always)]
        unsafe fn stream(self, to: *mut u8) {
            // SAFETY: as the caller promises.
            unsafe { _mm256_stream_si256(to.cast(), self) }
        }
    }

    impl Vector for __m512i {
        const PER_LINE: usize = 1;

        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: as the caller promises.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }

        #[inline(always)]
        unsafe fn stream(self, to: *mut u8) {
            // SAFETY: as the caller promises.
            unsafe { _mm512_stream_si512(to.cast(), self) }
        }
    }

    /// # Safety
    /// As [`Kernel::copy`](super::Kernel::copy).
    pub unsafe fn copy_sse2(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: as the caller promises; every x86-64 processor has these registers.
        unsafe { copy::<__m128i>(from, to, len) }
    }

    /// # Safety
    /// As [`Kernel::copy`](super::Kernel::copy).
    #[target_feature(enable = "avx2")]
    pub unsafe fn copy_avx2(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: as the caller promises; the feature is enabled here.
        unsafe { copy::<__m256i>(from, to, len) }
    }

    /// # Safety
    /// As [`Kernel::copy`](super::Kernel::copy).
    #[target_feature(enable = "avx512f")]
    pub unsafe fn copy_avx512(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: as the caller promises; the feature is enabled here.
        unsafe { copy::<__m512i>(from, to, len) }
    }

    /// # Safety
    /// As [`Kernel::copy_side_by_side`](super::Kernel::copy_side_by_side).
    pub unsafe fn blocks_sse2(blocks: &[Block; STREAMS], len: usize) {
        // SAFETY: as the caller promises; every x86-64 processor has these registers.
        unsafe { copy_blocks::<__m128i>(blocks, len) }
    }

    /// # Safety
    /// As [`Kernel::copy_side_by_side`](super::Kernel::copy_side_by_side).
    #[target_feature(enable = "avx2")]
    pub unsafe fn blocks_avx2(blocks: &[Block; STREAMS], len: usize) {
        // SAFETY: as the caller promises; the feature is enabled here.
        unsafe { copy_blocks::<__m256i>(blocks, len) }
    }

    /// # Safety
    /// As [`Kernel::copy_side_by_side`](super::Kernel::copy_side_by_side).
    #[target_feature(enable = "avx512f")]
    pub unsafe fn blocks_avx512(blocks: &[Block; STREAMS], len: usize) {
        // SAFETY: as the caller promises; the feature is enabled here.
        unsafe { copy_blocks::<__m512i>(blocks, len) }
    }

    /// Copies up to the first cache line of each target, then step by step side by side, then the
    /// rest of each. Targets that lie otherwise in their lines are copied one after another.
    ///
    /// # Safety
    /// As [`Kernel::copy_side_by_side`](super::Kernel::copy_side_by_side), and the processor has
    /// `V`.
    #[inline(always)]
    unsafe fn copy_blocks<V: Vector>(blocks: &[Block; STREAMS], len: usize) {
        let head = blocks[0].1.align_offset(LINE).min(len);
        let alike = blocks.iter().all(|(_, to)| to.align_offset(LINE).min(len) == head);
        let steps = if alike { (len - head) / STEP } else { 0 };
        let mut done = if alike { head } else { 0 };
        for (from, to) in blocks {
            // SAFETY: `done` is at most `len`.
            unsafe { std::ptr::copy_nonoverlapping(*from, *to, done) };
        }
        for _ in 0..steps {
            for (from, to) in blocks {
                // SAFETY: `done + STEP` is at most `len`; behind its head each target is aligned to
                // a line, and a step is whole lines.
                unsafe { copy_lines::<V, { STEP / LINE }>(from.add(done), to.add(done)) };
            }
            done += STEP;
        }
        for (from, to) in blocks {
            // SAFETY: `done` is at most `len`.
            unsafe { copy::<V>(from.add(done), to.add(done), len - done) };
        }
    }

    /// Copies up to the target's first cache line, then lines in streams, then line by line, then
    /// the rest.
    ///
    /// # Safety
    /// As [`Kernel::copy`](super::Kernel::copy), and the processor has `V`.
    #[inline(always)]
    unsafe fn copy<V: Vector>(from: *const u8, to: *mut u8, len: usize) {
        let head = to.align_offset(LINE).min(len);
        // SAFETY: every offset below stays at or below `len`; from `head` on, `to` is aligned to a
        // line as long as offsets grow by whole lines, which they do until the rest.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            let mut done = head;
            loop {
                let stream = stream_bytes(len - done);
                if stream == 0 {
                    break;
                }
                copy_streams::<V>(from.add(done), to.add(done), stream);
                done += STREAMS * stream;
            }
            while len - done >= LINE {
                copy_lines::<V, 1>(from.add(done), to.add(done));
                done += LINE;
            }
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        }
    }

    /// How long each of the next streams is, in whole steps; 0 when the rest is too short.
    #[inline(always)]
    fn stream_bytes(rest: usize) -> usize {
        (rest / STREAMS).min(STREAM_BYTES_MAX) / STEP * STEP
    }

    /// Copies `STREAMS` neighbouring runs of `stream` bytes side by side.
    ///
    /// # Safety
    /// As [`Kernel::copy`](super::Kernel::copy) for all runs; `to` is aligned to a line, `stream`
    /// whole steps.
    #[inline(always)]
    unsafe fn copy_streams<V: Vector>(from: *const u8, to: *mut u8, stream: usize) {
        let mut done = 0;
        while done < stream {
            for run in 0..STREAMS {
                let at = run * stream + done;
                // SAFETY: `at + STEP` is at most `STREAMS * stream`.
                unsafe { copy_lines::<V, { STEP / LINE }>(from.add(at), to.add(at)) };
            }
            done += STEP;
        }
    }

    /// Copies `LINES` lines: all are loaded before the first is stored, as far as registers go.
    ///
    /// # Safety
    /// As [`Kernel::copy`](super::Kernel::copy) for `LINES` lines; `to` is aligned to a line.
    #[inline(always)]
    unsafe fn copy_lines<V: Vector, const LINES: usize>(from: *const u8, to: *mut u8) {
        let bytes = LINE / V::PER_LINE;
        for line in 0..LINES {
            for part in 0..V::PER_LINE {
                let at = line * LINE + part * bytes;
                // SAFETY: `at + bytes` is at most `LINES * LINE`.
                unsafe { V::load(from.add(at)).stream(to.add(at)) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GUARD: u8 = 0xa5;

    proptest! {
        #[test]
        fn every_kernel_copies_every_byte_and_no_other(
            len in prop_oneof![0usize..300, 0usize..70_000],
            from_offset in 0usize..130,
            to_offset in 0usize..130,
            seed in any::<u8>(),
        ) {
            let source: Vec<u8> = (0..from_offset + len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect();
            for kernel in Kernel::available() {
                let mut target = vec![GUARD; to_offset + len + 130];
                // SAFETY: both vectors are longer than their offset and `len` together, and
                // distinct.
                unsafe { kernel.copy(source.as_ptr().add(from_offset), target.as_mut_ptr().add(to_offset), len) };
                kernel.fence();
                prop_assert_eq!(&target[to_offset..to_offset + len], &source[from_offset..]);
                prop_assert!(target[..to_offset].iter().chain(&target[to_offset + len..]).all(|byte| *byte == GUARD));
            }
        }
    }

    proptest! {
        #[test]
        fn blocks_side_by_side_are_each_copied_and_no_other_byte_is(
            len in 0usize..9_000,
            from_offsets in prop::array::uniform4(0usize..130),
            to_offsets in prop_oneof![
                (0usize..130).prop_map(|offset| [offset; STREAMS]),
                prop::array::uniform4(0usize..130),
            ],
        ) {
            // A page for what is before and behind each block, which begins with a page.
            let stride = (len + 130).next_multiple_of(4096) + 4096;
            let source: Vec<u8> = (0..STREAMS * stride).map(|at| (at as u8).wrapping_mul(31)).collect();
            for kernel in Kernel::available() {
                let mut target = vec![GUARD; STREAMS * stride + 4096];
                let first = target.as_ptr().align_offset(4096);
                let at = |block: usize| first + block * stride + to_offsets[block];
                let read = |block: usize| block * stride + from_offsets[block];
                let base = target.as_mut_ptr();
                // SAFETY: both vectors are longer than the last offset and `len` together, and
                // distinct; a stride is longer than a block and its offset.
                unsafe {
                    let block = |block: usize| (source.as_ptr().add(read(block)), base.add(at(block)));
                    kernel.copy_side_by_side(&std::array::from_fn(block), len);
                }
                kernel.fence();
                let mut expected = vec![GUARD; target.len()];
                for block in 0..STREAMS {
                    expected[at(block)..at(block) + len].copy_from_slice(&source[read(block)..read(block) + len]);
                }
                prop_assert!(target == expected);
            }
        }
    }

    #[test]
    fn x86_64_always_has_a_streaming_kernel() {
        assert_eq!(Kernel::streaming() != Kernel::Cached, cfg!(target_arch = "x86_64"));
    }
}
