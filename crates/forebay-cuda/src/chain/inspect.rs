//! What an address is, asked of the driver: pinned host memory, memory of a GPU, or something that must be left alone. This
//! file knows pointer attributes; it must never know what will be copied.

use super::Declined;
use crate::driver::abi::{self, Address};
use crate::driver::{Driver, Table};
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
