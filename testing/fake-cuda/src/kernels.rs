//! Kernels by name: what each does, in Rust.
//!
//! A kernel is carried out as the moves it makes. Tables that a kernel reads are read when it
//! begins.

use crate::memory::{Memory, Move};
use crate::order::Touch;
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
    pub moves: Vec<Move>,
    /// How long it computes beside.
    pub computes: Duration,
    /// All that it reads and writes.
    pub touches: Vec<Touch>,
}

/// The bytes that a kernel moves, and how long it computes.
type Work = (Vec<Move>, Duration);

static KERNELS: &[Kernel] = &[
    Kernel { name: "forebay_pieces", params: &[8, 4], body: pieces },
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

impl View<'_> {
    /// Numbers of 8 bytes.
    fn table(&mut self, at: u64, count: u64) -> Result<Vec<u64>, String> {
        if count > ENTRIES_MAX {
            return Err(format!("a table of {count} entries"));
        }
        if count == 0 {
            // A GPU reads nothing then, wherever the table is said to be.
            return Ok(Vec::new());
        }
        self.reach(at, count * 8)?;
        self.tables.push(Touch::read(at, count * 8));
        let raw = self.memory.raw(at) as *const u64;
        // SAFETY: an area that this GPU reaches has these bytes, and stays while the state is
        // locked.
        Ok((0..count as usize).map(|index| unsafe { raw.add(index).read_unaligned() }).collect())
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
        let (moves, computes) = (self.body)(&mut view, args)?;
        let mut touches = Vec::new();
        for &Move { from, to, bytes } in moves.iter().filter(|piece| piece.bytes > 0) {
            view.reach(from, bytes)?;
            view.reach(to, bytes)?;
            touches.extend([Touch::read(from, bytes), Touch::write(to, bytes)]);
        }
        touches.append(&mut view.tables);
        Ok(Effect { moves, computes, touches })
    }
}

/// `(const Piece* pieces, u32 count)` with `struct Piece { u64 from; u64 to; u64 bytes; }`
fn pieces(view: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[pieces, count] = args else { return Err("wrong parameters".into()) };
    let table = view.table(pieces, count * 3)?;
    let piece = |piece: &[u64]| Move { from: piece[0], to: piece[1], bytes: piece[2] };
    Ok((table.chunks_exact(3).map(piece).collect(), Duration::ZERO))
}

/// `(u64 cycles)`: computes for as many nanoseconds, as the kernel beside which copies are timed.
fn spin(_: &mut View, args: &[u64]) -> Result<Work, String> {
    let &[cycles] = args else { return Err("wrong parameters".into()) };
    Ok((Vec::new(), Duration::from_nanos(cycles)))
}
