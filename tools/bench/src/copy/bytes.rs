//! What the copied bytes are: a pattern that no two places share, written, cleared and compared by
//! several threads, since a benchmark that looks at every byte spends most of its time looking.
//! Pure but for the threads.

use forebay_cuda::kernels::Piece;
use std::thread;

/// Threads that look at bytes; memory is the limit beyond.
const THREADS: usize = 8;
/// A thread's share is no smaller: starting one costs as much as this.
const SHARE_BYTES: usize = 1 << 20;

/// Fills memory with a pattern of its own for each seed.
pub fn fill(memory: &mut [u8], seed: u64) {
    shared_out(memory, |at, share| {
        let words = share.chunks_mut(8);
        for (word, bytes) in (at as u64 / 8..).zip(words) {
            let mixed = (word ^ seed << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            bytes.copy_from_slice(&(mixed ^ mixed >> 29).to_le_bytes()[..bytes.len()]);
        }
    });
}

/// Makes memory forget what it held, and the processor's caches too: host memory that copies come
/// to is not in them in practice, and a GPU that writes what a cache holds has to wait for it.
pub fn clear(memory: &mut [u8]) {
    shared_out(memory, |_, share| {
        share.fill(0);
        flush(share);
    });
}

#[cfg(target_arch = "x86_64")]
fn flush(memory: &[u8]) {
    const LINE_BYTES: usize = 64;
    for line in memory.chunks(LINE_BYTES) {
        // SAFETY: every x86-64 processor has the instruction, and the line is ours.
        unsafe { std::arch::x86_64::_mm_clflush(line.as_ptr()) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn flush(_: &[u8]) {}

/// The first piece whose bytes did not arrive; addresses of pieces are offsets here.
pub fn first_wrong(from: &[u8], to: &[u8], pieces: &[Piece]) -> Option<Piece> {
    let parts: Vec<Piece> = pieces.iter().flat_map(parts).collect();
    let is_wrong = |piece: &&Piece| {
        let (source, target, bytes) = (piece.from as usize, piece.to as usize, piece.bytes as usize);
        from[source..source + bytes] != to[target..target + bytes]
    };
    let bytes: u64 = pieces.iter().map(|piece| piece.bytes).sum();
    let share = parts.len().div_ceil(threads(bytes as usize)).max(1);
    thread::scope(|scope| {
        let looks: Vec<_> =
            parts.chunks(share).map(|share| scope.spawn(move || share.iter().find(is_wrong))).collect();
        // A thread that panicked has found something too.
        looks.into_iter().find_map(|look| look.join().unwrap_or(parts.first()).copied())
    })
}

/// A piece cut so that several threads can look at it.
fn parts(piece: &Piece) -> impl Iterator<Item = Piece> + use<> {
    let Piece { from, to, bytes } = *piece;
    let step = SHARE_BYTES as u64;
    (0..bytes.div_ceil(step)).map(move |part| {
        let at = part * step;
        Piece { from: from + at, to: to + at, bytes: step.min(bytes - at) }
    })
}

fn shared_out(memory: &mut [u8], work: impl Fn(usize, &mut [u8]) + Sync) {
    let share = memory.len().div_ceil(threads(memory.len())).next_multiple_of(8).max(8);
    if share >= memory.len() {
        return work(0, memory);
    }
    let work = &work;
    thread::scope(|scope| {
        for (nth, part) in memory.chunks_mut(share).enumerate() {
            scope.spawn(move || work(nth * share, part));
        }
    });
}

fn threads(bytes: usize) -> usize {
    let processors = thread::available_parallelism().map_or(1, |count| count.get());
    (bytes / SHARE_BYTES).clamp(1, processors.min(THREADS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_wrong_byte_is_overlooked() {
        let mut from = vec![0; (5 << 20) + 13];
        fill(&mut from, 3);
        let whole = Piece { from: 0, to: 0, bytes: from.len() as u64 };
        for wrong in [0, 1, 1 << 20, (3 << 20) - 1, from.len() - 1] {
            let mut to = from.clone();
            assert_eq!(first_wrong(&from, &to, &[whole]), None);
            to[wrong] ^= 1;
            let found = first_wrong(&from, &to, &[whole]).unwrap();
            assert!((found.to..found.to + found.bytes).contains(&(wrong as u64)), "{wrong}");
        }
    }

    #[test]
    fn a_page_in_another_place_is_wrong() {
        let mut from = vec![0; 64 << 10];
        fill(&mut from, 1);
        let to: Vec<u8> = [&from[32 << 10..], &from[..32 << 10]].concat();
        let page = |from: u64, to: u64| Piece { from: from << 10, to: to << 10, bytes: 32 << 10 };
        assert_eq!(first_wrong(&from, &to, &[page(32, 0), page(0, 32)]), None);
        assert_eq!(first_wrong(&from, &to, &[page(32, 0), page(32, 32)]), Some(page(32, 32)));
    }
}
