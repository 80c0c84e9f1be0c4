//! What an address is, asked of the driver: pinned host memory, memory of a GPU, or something that must be left alone; and so
//! between what a piece is to be copied. This file knows pointer attributes; it must never know how anything is copied.

use super::Declined;
use crate::driver::abi::{self, Address};
use crate::driver::{Driver, Table};
use crate::kernels::Piece;
use crate::links::Direction;
use libc::c_void;

/// Where a range lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Pinned host memory that every context reaches.
    Host,
    /// Memory of the GPU of an ordinal.
    Device(u16),
}

/// An allocation or a registered piece of host memory.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub kind: Kind,
    pub start: Address,
    pub end: Address,
    /// Whether it is an allocation that any GPU with access to its GPU reaches, not one mapped for chosen ones.
    pub is_open: bool,
}

impl Range {
    fn holds(&self, address: Address, bytes: u64) -> bool {
        address >= self.start && address.checked_add(bytes).is_some_and(|end| end <= self.end)
    }
}

/// Remembers the last range, since the pages of one copy lie in few allocations. For one copy only: memory may be freed.
pub struct Inspector<'a> {
    table: &'a Table,
    last: Option<Range>,
}

impl<'a> Inspector<'a> {
    pub fn new(driver: &'a Driver) -> Inspector<'a> {
        Inspector { table: driver.table(), last: None }
    }

    /// The range that holds an address.
    pub fn range_of(&mut self, address: Address) -> Result<Range, Declined> {
        match self.last {
            Some(last) if (last.start..last.end).contains(&address) => Ok(last),
            _ => {
                let range = self.ask(address)?;
                self.last = Some(range);
                Ok(range)
            }
        }
    }

    fn ask(&self, address: Address) -> Result<Range, Declined> {
        let (mut kind, mut managed, mut open, mut ordinal) = (0_u32, 0_u32, 0_u32, 0_i32);
        let (mut start, mut bytes): (Address, abi::Size) = (0, 0);
        let attributes = [
            abi::POINTER_MEMORY_TYPE,
            abi::POINTER_IS_MANAGED,
            abi::POINTER_IS_IPC_CAPABLE,
            abi::POINTER_DEVICE_ORDINAL,
            abi::POINTER_RANGE_START,
            abi::POINTER_RANGE_SIZE,
        ];
        let values: [*mut c_void; 6] = [
            (&raw mut kind).cast(),
            (&raw mut managed).cast(),
            (&raw mut open).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut start).cast(),
            (&raw mut bytes).cast(),
        ];
        // SAFETY: one valid place for each attribute, of the attribute's type. Any address may be asked about.
        let status =
            unsafe { (self.table.pointer_attributes)(6, attributes.as_ptr(), values.as_ptr(), address) };
        if status != abi::SUCCESS || (kind == 0 && managed == 0) {
            return Err(Declined::Pageable);
        }
        if managed != 0 {
            return Err(Declined::Managed);
        }
        let end = start.saturating_add(bytes as u64);
        if !(start..end).contains(&address) {
            return Err(Declined::Pageable);
        }
        let kind = match kind {
            abi::MEMORY_TYPE_HOST => Kind::Host,
            abi::MEMORY_TYPE_DEVICE => Kind::Device(u16::try_from(ordinal).map_err(|_| Declined::Managed)?),
            _ => return Err(Declined::Managed),
        };
        Ok(Range { kind, start, end, is_open: open != 0 })
    }
}

/// Both sides of pieces.
pub struct Sides<'a> {
    from: Inspector<'a>,
    to: Inspector<'a>,
    /// The ranges of the last part, and what that was: mostly the next one lies there too.
    last: Option<(Range, Range, Part)>,
}

/// A piece, or a part of one, that lies in one range on either side.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The GPU.
    pub device: u16,
    pub direction: Direction,
    pub piece: Piece,
    /// Whether any GPU with access to that GPU reaches its side.
    pub is_open: bool,
}

impl<'a> Sides<'a> {
    pub fn new(driver: &'a Driver) -> Sides<'a> {
        Sides { from: Inspector::new(driver), to: Inspector::new(driver), last: None }
    }

    /// The parts of a piece, each given to `each`.
    pub fn cut(&mut self, piece: &Piece, mut each: impl FnMut(Part)) -> Result<(), Declined> {
        if let Some((from, to, last)) = &self.last
            && piece.bytes > 0
            && from.holds(piece.from, piece.bytes)
            && to.holds(piece.to, piece.bytes)
        {
            each(Part { piece: *piece, ..*last });
            return Ok(());
        }
        let mut rest = *piece;
        while rest.bytes > 0 {
            let (from, to) = (self.from.range_of(rest.from)?, self.to.range_of(rest.to)?);
            let (device, direction, is_open) = match (from.kind, to.kind) {
                (Kind::Host, Kind::Device(device)) => (device, Direction::HostToDevice, to.is_open),
                (Kind::Device(device), Kind::Host) => (device, Direction::DeviceToHost, from.is_open),
                _ => return Err(Declined::SameKind),
            };
            let bytes = rest.bytes.min(from.end - rest.from).min(to.end - rest.to);
            let part = Part { device, direction, piece: Piece { bytes, ..rest }, is_open };
            self.last = Some((from, to, part));
            each(part);
            rest = Piece { from: rest.from + bytes, to: rest.to + bytes, bytes: rest.bytes - bytes };
        }
        Ok(())
    }
}

/// Pieces that go the same way.
#[derive(Debug)]
pub struct Group {
    /// To or from this GPU.
    pub device: u16,
    /// Which of the two.
    pub direction: Direction,
    /// Cut where allocations end.
    pub pieces: Vec<Piece>,
}

/// Finds out where each piece goes; or which one, by its place, does not go between pinned memory and a GPU, and why.
pub fn groups(driver: &Driver, pieces: &[Piece]) -> Result<Vec<Group>, (usize, Declined)> {
    let mut sides = Sides::new(driver);
    let mut groups: Vec<Group> = Vec::new();
    for (index, piece) in pieces.iter().enumerate() {
        let add = |Part { device, direction, piece, .. }: Part| match groups
            .iter_mut()
            .find(|group| (group.device, group.direction) == (device, direction))
        {
            Some(group) => group.pieces.push(piece),
            None => groups.push(Group { device, direction, pieces: vec![piece] }),
        };
        sides.cut(piece, add).map_err(|why| (index, why))?;
    }
    Ok(groups)
}
