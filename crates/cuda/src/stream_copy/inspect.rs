//! What an address is, asked of the driver: pinned host memory, memory of a GPU, or something that
//! must be left alone; and so between what a piece is to be copied.

use super::DeclineReason;
use crate::driver::abi::{self, Address};
use crate::driver::{CudaError, Driver, Table, call};
use crate::kernels::Piece;
use crate::links::Direction;
use libc::c_void;
use std::borrow::Cow;

/// Where a range lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Pinned host memory that every context reaches.
    Host,
    /// Memory of the GPU of an ordinal.
    Device(u16),
}

/// An allocation or a registered piece of host memory.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    kind: Kind,
    pub start: Address,
    end: Address,
    /// Whether it is an allocation that any GPU with access to its GPU reaches, not one mapped for
    /// chosen ones.
    pub is_open: bool,
}

impl Range {
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// The GPU that it lies on, if it does.
    pub fn device(&self) -> Option<u16> {
        match self.kind {
            Kind::Host => None,
            Kind::Device(ordinal) => Some(ordinal),
        }
    }

    fn holds(&self, address: Address, bytes: u64) -> bool {
        address >= self.start && address.checked_add(bytes).is_some_and(|end| end <= self.end)
    }
}

/// Remembers ranges, since the pages of one copy lie in few allocations. For one copy only: memory
/// may be freed.
pub struct Inspector<'a> {
    table: &'a Table,
    /// By their start. No two overlap.
    known: Vec<Range>,
}

impl<'a> Inspector<'a> {
    pub fn new(driver: &'a Driver) -> Inspector<'a> {
        Inspector { table: driver.table(), known: Vec::new() }
    }

    /// The range that holds an address.
    pub fn range_of(&mut self, address: Address) -> Result<Range, DeclineReason> {
        let behind = self.known.partition_point(|range| range.start <= address);
        if let Some(range) = behind.checked_sub(1).and_then(|index| self.known.get(index))
            && address < range.end
        {
            return Ok(*range);
        }
        let range = self.ask(address)?;
        self.known.insert(behind, range);
        Ok(range)
    }

    fn ask(&self, address: Address) -> Result<Range, DeclineReason> {
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
        // SAFETY: one valid place for each attribute, of the attribute's type. Any address may be
        // asked about.
        let status =
            unsafe { (self.table.pointer_attributes)(6, attributes.as_ptr(), values.as_ptr(), address) };
        if status != abi::SUCCESS || (kind == 0 && managed == 0) {
            return Err(DeclineReason::Pageable);
        }
        if managed != 0 {
            return Err(DeclineReason::Managed);
        }
        let end = start.saturating_add(bytes as u64);
        if !(start..end).contains(&address) {
            return Err(DeclineReason::Pageable);
        }
        let kind = match kind {
            abi::MEMORY_TYPE_HOST => Kind::Host,
            abi::MEMORY_TYPE_DEVICE => {
                Kind::Device(u16::try_from(ordinal).map_err(|_| DeclineReason::Managed)?)
            }
            _ => return Err(DeclineReason::Managed),
        };
        Ok(Range { kind, start, end, is_open: open != 0 })
    }
}

/// The context that memory was allocated in; null: none.
pub fn context_of(driver: &Driver, address: Address) -> Result<abi::ContextHandle, CudaError> {
    let mut context: abi::ContextHandle = std::ptr::null_mut();
    let (attribute, value) = ([abi::POINTER_CONTEXT], [(&raw mut context).cast()]);
    // SAFETY: one valid place for the attribute, of its type. Any address may be asked about.
    unsafe { call!(driver, pointer_attributes(1, attribute.as_ptr(), value.as_ptr(), address)) }?;
    Ok(context)
}

/// The allocation of a GPU that holds an address.
pub fn pointer_range(driver: &Driver, address: Address) -> Result<Range, DeclineReason> {
    let range = Inspector::new(driver).ask(address)?;
    match range.kind {
        Kind::Device(_) => Ok(range),
        Kind::Host => Err(DeclineReason::SameKind),
    }
}

/// What a row of pieces spans, found in one pass without a branch for each: mostly that settles
/// where all of them lie.
#[derive(Debug, Clone, Copy)]
pub struct Outline {
    pub bytes: u64,
    from: Bounds,
    to: Bounds,
}

/// One side of pieces.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    start: Address,
    end: Address,
    /// Pieces that follow each other in memory are one run.
    runs: usize,
    last_end: Address,
}

impl Bounds {
    const NOTHING: Bounds = Bounds { start: Address::MAX, end: 0, runs: 0, last_end: Address::MAX };

    fn add(&mut self, start: Address, bytes: u64) {
        let end = start.saturating_add(bytes);
        (self.start, self.end) = (self.start.min(start), self.end.max(end));
        self.runs += usize::from(self.last_end != start);
        self.last_end = end;
    }
}

impl Outline {
    pub fn of(pieces: &[Piece]) -> Outline {
        let mut outline = Outline { bytes: 0, from: Bounds::NOTHING, to: Bounds::NOTHING };
        for piece in pieces {
            outline.bytes = outline.bytes.saturating_add(piece.bytes);
            outline.from.add(piece.from, piece.bytes);
            outline.to.add(piece.to, piece.bytes);
        }
        outline
    }

    /// Runs of host memory, if the pieces go in this direction.
    pub fn host_runs(&self, direction: Direction) -> usize {
        direction.in_order(self.from.runs, self.to.runs).0
    }
}

/// What a copy turned out to be.
#[derive(Debug)]
pub struct Inspected<'p> {
    pub device: u16,
    pub direction: Direction,
    /// Cut where allocations and registrations end.
    pub pieces: Cow<'p, [Piece]>,
    /// Addresses, in order, where allocations and registrations begin; none where there is one on
    /// either side.
    pub seams: Vec<Address>,
    /// Whether any GPU with access to that GPU reaches its side.
    pub peers_reach: bool,
}

/// Which GPU pieces go to or come from, and in which directions.
pub fn inspect<'p>(
    driver: &Driver,
    pieces: &'p [Piece],
    outline: &Outline,
) -> Result<Inspected<'p>, DeclineReason> {
    let mut sides = Sides::new(driver);
    let whole = Piece { from: outline.from.start, to: outline.to.start, bytes: 1 };
    if let Ok((from, to)) = sides.ranges(&whole)
        && outline.from.end <= from.end
        && outline.to.end <= to.end
    {
        let Part { device, direction, is_open, .. } = between(&from, &to, whole)?;
        let (pieces, seams) = (Cow::Borrowed(pieces), Vec::new());
        return Ok(Inspected { device, direction, pieces, seams, peers_reach: is_open });
    }
    let mut cut = Vec::with_capacity(pieces.len());
    let (mut ends, mut is_mixed, mut peers_reach) = (None, false, true);
    for piece in pieces {
        sides.may_go_over(piece)?;
        sides.cut(piece, |part| {
            let end = (part.device, part.direction);
            is_mixed |= *ends.get_or_insert(end) != end;
            peers_reach &= part.is_open;
            cut.push(part.piece);
        })?;
    }
    let (device, direction) = ends.filter(|_| !is_mixed).ok_or(DeclineReason::SameKind)?;
    Ok(Inspected { device, direction, pieces: Cow::Owned(cut), seams: sides.seams(), peers_reach })
}

struct Sides<'a> {
    from: Inspector<'a>,
    to: Inspector<'a>,
    /// The ranges of the last part, and what that was: mostly the next one lies there too.
    last: Option<(Range, Range, Part)>,
}

/// A piece, or a part of one, that lies in one range on either side.
#[derive(Debug, Clone, Copy)]
struct Part {
    device: u16,
    direction: Direction,
    piece: Piece,
    /// Whether any GPU with access to that GPU reaches its side.
    is_open: bool,
}

/// What a piece is that lies in these two ranges.
fn between(from: &Range, to: &Range, piece: Piece) -> Result<Part, DeclineReason> {
    let (device, direction, is_open) = match (from.kind, to.kind) {
        (Kind::Host, Kind::Device(device)) => (device, Direction::HostToDevice, to.is_open),
        (Kind::Device(device), Kind::Host) => (device, Direction::DeviceToHost, from.is_open),
        _ => return Err(DeclineReason::SameKind),
    };
    Ok(Part { device, direction, piece, is_open })
}

impl<'a> Sides<'a> {
    fn new(driver: &'a Driver) -> Sides<'a> {
        Sides { from: Inspector::new(driver), to: Inspector::new(driver), last: None }
    }

    /// The ranges in which a piece begins.
    fn ranges(&mut self, piece: &Piece) -> Result<(Range, Range), DeclineReason> {
        Ok((self.from.range_of(piece.from)?, self.to.range_of(piece.to)?))
    }

    /// A copy over two registrations, or over two allocations, is the driver's to refuse. Over what
    /// is mapped side by side it may go.
    fn may_go_over(&mut self, piece: &Piece) -> Result<(), DeclineReason> {
        let (from, to) = self.ranges(piece)?;
        let sides = [(from, piece.from), (to, piece.to)];
        let is_mapped = |range: &Range| matches!(range.kind, Kind::Device(_)) && !range.is_open;
        let fits = |(range, at): &(Range, Address)| range.holds(*at, piece.bytes) || is_mapped(range);
        if sides.iter().all(fits) { Ok(()) } else { Err(DeclineReason::DriverJudges) }
    }

    /// Where the ranges begin, in order.
    fn seams(&self) -> Vec<Address> {
        let known = self.from.known.iter().chain(&self.to.known);
        let mut seams: Vec<_> = known.map(|range| range.start).collect();
        seams.sort_unstable();
        seams
    }

    /// The parts of a piece, each given to `each`.
    fn cut(&mut self, piece: &Piece, mut each: impl FnMut(Part)) -> Result<(), DeclineReason> {
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
            let (from, to) = self.ranges(&rest)?;
            let bytes = rest.bytes.min(from.end - rest.from).min(to.end - rest.to);
            let part = between(&from, &to, Piece { bytes, ..rest })?;
            self.last = Some((from, to, part));
            each(part);
            rest = Piece { from: rest.from + bytes, to: rest.to + bytes, bytes: rest.bytes - bytes };
        }
        Ok(())
    }
}

/// Pieces that go in the same direction.
#[derive(Debug)]
pub struct Group {
    pub device: u16,
    pub direction: Direction,
    /// Cut where allocations end.
    pub pieces: Vec<Piece>,
}

/// Finds out where each piece goes; or which one, by its place, does not go between pinned memory
/// and a GPU, and why.
pub fn groups(driver: &Driver, pieces: &[Piece]) -> Result<Vec<Group>, (usize, DeclineReason)> {
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
