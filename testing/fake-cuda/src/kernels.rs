//! Kernels by name: what each does, in Rust.
//!
//! A kernel is carried out as the moves it makes, the sums it writes and the words it stores, in
//! this order. Tables that a kernel reads are read when it begins.

mod commits;
mod nvme;

use crate::memory::{Memory, Move};
use crate::order::Touch;
use crc_fast::{CrcAlgorithm, checksum};
use std::time::Duration;

/// Entries of a table at most: more is a mistake of the test.
const ENTRIES_MAX: u64 = 1 << 22;

/// A kernel that the fake driver can run.
pub struct Kernel {
    pub name: &'static str,
    /// Bytes of each parameter.
    pub params: &'static [usize],
    body: fn(&mut View, &[u64]) -> Result<Work, String>,
}

/// What a kernel does.
pub struct Effect {
    pub work: Work,
    /// All that it reads and writes.
    pub touches: Vec<Touch>,
}

/// What a kernel moves, sums up and stores, and how long it computes beside.
#[derive(Default)]
pub struct Work {
    pub moves: Vec<Move>,
    pub sums: Vec<Sum>,
    pub stores: Vec<Store>,
    pub computes: Duration,
}

/// Bytes whose remainder, divided by the polynomial of CRC-32C, is written somewhere.
#[derive(Debug, Clone, Copy)]
pub struct Sum {
    pub from: u64,
    pub bytes: u64,
    pub to: u64,
}

/// A word that others see behind all that was stored before it.
#[derive(Debug, Clone, Copy)]
pub struct Store {
    pub to: u64,
    pub word: Word,
}

#[derive(Debug, Clone, Copy)]
pub enum Word {
    Of32(u32),
    Of64(u64),
}

static KERNELS: &[Kernel] = &[
    Kernel { name: "forebay_pieces", params: &[8, 4], body: pieces },
    Kernel { name: "forebay_checksums", params: &[8, 4, 8], body: checksums },
    Kernel { name: "forebay_commits", params: &[8, 4], body: commits::commits },
    Kernel { name: "forebay_nvme_submit", params: &[8, 8, 4], body: nvme::submit },
    Kernel { name: "forebay_nvme_take", params: &[8, 4, 8, 8], body: nvme::take },
    Kernel { name: "forebay_spin", params: &[8], body: spin },
];

pub fn kernel(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name)
}

/// Names of the entry points in PTX.
pub fn entries(ptx: &str) -> Vec<String> {
    let after = ptx.split(".entry").skip(1);
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    after.map(|text| text.trim_start().chars().take_while(|&c| is_name(c)).collect()).collect()
}

/// Memory as a kernel sees it.
struct View<'a> {
    memory: &'a Memory,
    gpu: usize,
    /// Tables that were read.
    tables: Vec<Touch>,
}

impl Word {
    fn bytes(self) -> u64 {
        match self {
            Word::Of32(_) => 4,
            Word::Of64(_) => 8,
        }
    }
}

impl Work {
    fn store(&mut self, to: u64, word: u64) {
        self.stores.push(Store { to, word: Word::Of64(word) });
    }

    fn store_half(&mut self, to: u64, word: u32) {
        self.stores.push(Store { to, word: Word::Of32(word) });
    }
}

impl View<'_> {
    /// Numbers of 4 bytes.
    fn half_words(&mut self, at: u64, count: u64) -> Result<Vec<u32>, String> {
        let raw = self.read(at, count, 4)? as *const u32;
        // SAFETY: as for `table`.
        Ok((0..count as usize).map(|index| unsafe { raw.add(index).read_unaligned() }).collect())
    }

    /// Numbers of 8 bytes.
    fn table(&mut self, at: u64, count: u64) -> Result<Vec<u64>, String> {
        let raw = self.read(at, count, 8)? as *const u64;
        // SAFETY: an area that this GPU reaches has these bytes, and stays while the state is
        // locked.
        Ok((0..count as usize).map(|index| unsafe { raw.add(index).read_unaligned() }).collect())
    }

    /// Where as many entries lie in this process.
    fn read(&mut self, at: u64, count: u64, entry_bytes: u64) -> Result<u64, String> {
        if count > ENTRIES_MAX {
            return Err(format!("a table of {count} entries"));
        }
        if count == 0 {
            // A GPU reads nothing then, wherever the table is said to be.
            return Ok(at);
        }
        self.reach(at, count * entry_bytes)?;
        self.tables.push(Touch::read(at, count * entry_bytes));
        Ok(self.memory.raw(at))
    }

    fn reach(&self, at: u64, bytes: u64) -> Result<(), String> {
        match self.memory.span(at, bytes) {
            Ok(area) if self.memory.reaches(self.gpu, area) => Ok(()),
            Ok(area) => Err(format!("GPU {} has no access to memory of GPU {}", self.gpu, area.gpu)),
            Err(lost) => Err(format!("{bytes} bytes at {at:#x}: {lost:?}")),
        }
    }
}

impl Kernel {
    /// What it does on a GPU now. An error is an illegal address.
    pub fn effect(&self, memory: &Memory, gpu: usize, args: &[u64]) -> Result<Effect, String> {
        let mut view = View { memory, gpu, tables: Vec::new() };
        let work = (self.body)(&mut view, args)?;
        let moved = work.moves.iter().map(|piece| (piece.from, piece.bytes, piece.to, piece.bytes));
        let summed = work.sums.iter().map(|sum| (sum.from, sum.bytes, sum.to, size_of::<u32>() as u64));
        let mut touches = Vec::new();
        for (from, read, to, written) in moved.chain(summed).filter(|(_, read, ..)| *read > 0) {
            view.reach(from, read)?;
            view.reach(to, written)?;
            touches.extend([Touch::read(from, read), Touch::write(to, written)]);
        }
        for store in &work.stores {
            view.reach(store.to, store.word.bytes())?;
            touches.push(Touch::write(store.to, store.word.bytes()));
        }
        touches.append(&mut view.tables);
        Ok(Effect { work, touches })
    }
}

/// `(const Piece* pieces, u32 count)` with `struct Piece { u64 from; u64 to; u64 bytes; }`
fn pieces(view: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[pieces, count] = args else { return Err("wrong parameters".into()) };
    let table = view.table(pieces, count * 3)?;
    let piece = |piece: &[u64]| Move { from: piece[0], to: piece[1], bytes: piece[2] };
    Ok(Work { moves: table.chunks_exact(3).map(piece).collect(), ..Work::default() })
}

/// `(const Range* ranges, u32 count, u32* remainders)` with `struct Range { u64 at; u64 bytes; }`
fn checksums(view: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[ranges, count, remainders] = args else { return Err("wrong parameters".into()) };
    let table = view.table(ranges, count * 2)?;
    let sum = |(range, to): (&[u64], u64)| Sum { from: range[0], bytes: range[1], to };
    let sums = table.chunks_exact(2).zip((remainders..).step_by(size_of::<u32>())).map(sum).collect();
    Ok(Work { sums, ..Work::default() })
}

/// `(u64 cycles)`: computes for as many nanoseconds, as the kernel beside which copies are timed.
fn spin(_: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[cycles] = args else { return Err("wrong parameters".into()) };
    Ok(Work { computes: Duration::from_nanos(cycles), ..Work::default() })
}

/// What the bytes leave when they are divided by the polynomial of CRC-32C. The initial value of a
/// CRC-32C and its final complement are the same for zeroes.
pub fn remainder(bytes: &[u8]) -> u32 {
    let sum = |bytes: &[u8]| checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    sum(bytes) ^ sum(&vec![0; bytes.len()])
}
