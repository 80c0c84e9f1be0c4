//! Kernels by name: what each does, in Rust.
//!
//! A kernel is carried out as the moves it makes. Tables that a kernel reads are read when it
//! begins.

use crate::driver::State;
use crate::memory::Memory;
use crate::order::Touch;
use crate::queue::Move;
use std::time::Duration;

/// Entries of a table at most: more is a mistake of the test.
const ENTRIES_MAX: u64 = 1 << 22;

/// A kernel that the fake driver can run.
pub struct Kernel {
    pub name: &'static str,
    /// Bytes of each parameter.
    pub params: &'static [usize],
    body: fn(&mut View, &[u64]) -> Result<Effect, String>,
}

/// What a kernel does.
#[derive(Default)]
pub struct Effect {
    pub moves: Vec<Move>,
    /// How long it computes beside.
    pub computes: Duration,
    /// All that it reads and writes.
    pub touches: Vec<Touch>,
}

static KERNELS: &[Kernel] = &[
    Kernel { name: "forebay_scatter", params: &[8, 8, 4, 4], body: scatter },
    Kernel { name: "forebay_gather", params: &[8, 8, 4, 4], body: gather },
    Kernel { name: "forebay_relay", params: &[8, 8, 8], body: relay },
    Kernel { name: "forebay_pieces", params: &[8, 4], body: pieces },
    Kernel { name: "forebay_trap", params: &[], body: trap },
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

impl State {
    /// What a kernel does on a GPU now. An error is an illegal address.
    pub fn effect(&self, kernel: &Kernel, gpu: usize, args: &[u64]) -> Result<Effect, String> {
        let mut view = View { memory: &self.memory, gpu, tables: Vec::new() };
        let mut effect = (kernel.body)(&mut view, args)?;
        for &Move { from, to, bytes } in effect.moves.iter().filter(|piece| piece.bytes > 0) {
            view.reach(from, bytes)?;
            view.reach(to, bytes)?;
            effect.touches.extend([Touch::read(from, bytes), Touch::write(to, bytes)]);
        }
        effect.touches.append(&mut view.tables);
        Ok(effect)
    }
}

fn moved(moves: Vec<Move>) -> Result<Effect, String> {
    Ok(Effect { moves, ..Effect::default() })
}

/// `(const u8* from, const u64* to_pages, u32 page_bytes, u32 pages)`
fn scatter(view: &mut View, args: &[u64]) -> Result<Effect, String> {
    let &[from, to_pages, bytes, pages] = args else { return Err("wrong parameters".into()) };
    let to_pages = view.table(to_pages, pages)?;
    moved(
        (0..)
            .zip(to_pages)
            .map(|(page, to)| Move { from: from.wrapping_add(page * bytes), to, bytes })
            .collect(),
    )
}

/// `(const u64* from_pages, u8* to, u32 page_bytes, u32 pages)`
fn gather(view: &mut View, args: &[u64]) -> Result<Effect, String> {
    let &[from_pages, to, bytes, pages] = args else { return Err("wrong parameters".into()) };
    let from_pages = view.table(from_pages, pages)?;
    moved(
        (0..)
            .zip(from_pages)
            .map(|(page, from)| Move { from, to: to.wrapping_add(page * bytes), bytes })
            .collect(),
    )
}

/// `(const u8* from, u8* to, u64 bytes)`
fn relay(_: &mut View, args: &[u64]) -> Result<Effect, String> {
    let &[from, to, bytes] = args else { return Err("wrong parameters".into()) };
    moved(vec![Move { from, to, bytes }])
}

/// `(const Piece* pieces, u32 count)` with `struct Piece { u64 from; u64 to; u64 bytes; }`
fn pieces(view: &mut View, args: &[u64]) -> Result<Effect, String> {
    let &[pieces, count] = args else { return Err("wrong parameters".into()) };
    let table = view.table(pieces, count * 3)?;
    moved(table.chunks_exact(3).map(|piece| Move { from: piece[0], to: piece[1], bytes: piece[2] }).collect())
}

/// `()`: ends its context.
fn trap(_: &mut View, _: &[u64]) -> Result<Effect, String> {
    Err("it trapped".into())
}

/// `(u64 cycles)`: computes for as many nanoseconds.
fn spin(_: &mut View, args: &[u64]) -> Result<Effect, String> {
    let &[cycles] = args else { return Err("wrong parameters".into()) };
    Ok(Effect { computes: Duration::from_nanos(cycles), ..Effect::default() })
}
