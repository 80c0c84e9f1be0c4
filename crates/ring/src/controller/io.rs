//! Read, Write and Flush of the one namespace, and the drive behind them: an image in memory.

use super::data::{Extent, check, from_prps, from_sgl};
use super::entry::Entry;
use super::memory::{HostMemory, OutsideMemory};
use super::settings::{Settings, SglSetting};
use super::status::Status;

/// The number of the one namespace.
pub const NAMESPACE: u32 = 1;

/// Force Unit Access and Limited Retry, which change nothing here.
const ALLOWED_FLAGS: u32 = 3 << 30;

/// The namespace's bytes.
#[derive(Debug)]
pub struct Drive {
    pub image: Vec<u8>,
}

impl Drive {
    pub fn new(settings: &Settings) -> Drive {
        Drive { image: vec![0; (settings.blocks << settings.block_bytes_log2) as usize] }
    }

    /// Carries a command out, or refuses it before a byte has moved.
    pub fn execute(
        &mut self,
        memory: &impl HostMemory,
        settings: &Settings,
        entry: &Entry,
    ) -> Result<(), Status> {
        let is_write = match entry.opcode() {
            0x00 => return flush(entry),
            0x01 => true,
            0x02 => false,
            _ => return Err(Status::INVALID_OPCODE),
        };
        let (offset, bytes) = range(settings, entry)?;
        let extents = data(memory, settings, entry, bytes)?;
        let is_reachable = extents.iter().all(|extent| memory.contains(extent.address, extent.bytes));
        check(is_reachable, Status::DATA_TRANSFER_ERROR)?;
        self.transfer(memory, &extents, offset as usize, is_write).map_err(|_| Status::DATA_TRANSFER_ERROR)
    }

    fn transfer(
        &mut self,
        memory: &impl HostMemory,
        extents: &[Extent],
        mut offset: usize,
        is_write: bool,
    ) -> Result<(), OutsideMemory> {
        for extent in extents {
            let part = &mut self.image[offset..offset + extent.bytes as usize];
            match is_write {
                true => memory.read(extent.address, part)?,
                false => memory.write(extent.address, part)?,
            }
            offset += part.len();
        }
        Ok(())
    }
}

fn flush(entry: &Entry) -> Result<(), Status> {
    check(entry.psdt() == 0, Status::INVALID_FIELD)?;
    entry.only_uses(&[1])?;
    check(entry.namespace() == NAMESPACE, Status::INVALID_NAMESPACE)
}

/// Where in the image a command works, and on how many bytes.
fn range(settings: &Settings, entry: &Entry) -> Result<(u64, u64), Status> {
    entry.only_uses(&[1, 6, 7, 8, 9, 10, 11, 12])?;
    check(entry.namespace() == NAMESPACE, Status::INVALID_NAMESPACE)?;
    let (blocks, flags) = (u64::from(entry.dword(12) & 0xffff) + 1, entry.dword(12) >> 16 << 16);
    check(flags & !ALLOWED_FLAGS == 0, Status::INVALID_FIELD)?;
    let bytes = blocks << settings.block_bytes_log2;
    check(bytes <= settings.max_transfer_bytes(), Status::INVALID_FIELD)?;
    let first = entry.pair(10);
    let end = first.checked_add(blocks).ok_or(Status::LBA_OUT_OF_RANGE)?;
    check(end <= settings.blocks, Status::LBA_OUT_OF_RANGE)?;
    Ok((first << settings.block_bytes_log2, bytes))
}

fn data(
    memory: &impl HostMemory,
    settings: &Settings,
    entry: &Entry,
    bytes: u64,
) -> Result<Vec<Extent>, Status> {
    let pointer = (entry.pair(6), entry.pair(8));
    match (entry.psdt(), settings.sgl) {
        (0, _) => from_prps(memory, settings.page_bytes, pointer, bytes),
        (1, SglSetting::AnyAlignment | SglSetting::MultiplesOf4) => {
            from_sgl(memory, settings.sgl, pointer, bytes)
        }
        _ => Err(Status::INVALID_FIELD),
    }
}
