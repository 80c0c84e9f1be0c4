//! The memory of a command, decoded from its data pointer: PRPs or a scatter gather list. It shares
//! nothing with the encoders, and refuses whatever the specification does not allow.

use super::memory::HostMemory;
use super::settings::SglSetting;
use super::status::Status;

/// No list has more descriptors, so that one in a circle comes to an end.
const MAX_DESCRIPTORS: u32 = 1 << 17;

/// Memory of a transfer, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub address: u64,
    pub bytes: u64,
}

/// The memory that two PRPs describe.
pub fn from_prps(
    memory: &impl HostMemory,
    page: u64,
    (first, second): (u64, u64),
    bytes: u64,
) -> Result<Vec<Extent>, Status> {
    if first & 3 != 0 {
        return Err(Status::PRP_OFFSET_INVALID);
    }
    let mut extents = vec![Extent { address: first, bytes: bytes.min(page - first % page) }];
    let mut left = bytes - extents[0].bytes;
    if left == 0 {
        // The field is reserved then.
        return if second == 0 { Ok(extents) } else { Err(Status::INVALID_FIELD) };
    }
    if left <= page {
        check(second.is_multiple_of(page), Status::PRP_OFFSET_INVALID)?;
        extents.push(Extent { address: second, bytes: left });
        return Ok(extents);
    }
    let mut at = second;
    check(at & 7 == 0, Status::PRP_OFFSET_INVALID)?;
    while left > 0 {
        let entry = read_u64(memory, at)?;
        check(entry.is_multiple_of(page), Status::PRP_OFFSET_INVALID)?;
        let is_last_of_page = at % page == page - 8;
        if is_last_of_page && left > page {
            at = entry;
            continue;
        }
        extents.push(Extent { address: entry, bytes: left.min(page) });
        left -= left.min(page);
        at = at.wrapping_add(8);
    }
    Ok(extents)
}

/// The memory that a scatter gather list describes, from the descriptor in the command.
pub fn from_sgl(
    memory: &impl HostMemory,
    setting: SglSetting,
    first: (u64, u64),
    bytes: u64,
) -> Result<Vec<Extent>, Status> {
    let mut walk = Walk { extents: Vec::new(), described: 0, bytes, setting };
    let mut next = walk.take(Raw::new(first), true, true)?;
    let mut seen = 0;
    while let Some(segment) = next.take() {
        for number in 0..segment.descriptors {
            seen += 1;
            check(seen <= MAX_DESCRIPTORS, Status::INVALID_SGL_COUNT)?;
            let at = segment.address.wrapping_add(u64::from(number) * 16);
            let raw = Raw::new((read_u64(memory, at)?, read_u64(memory, at.wrapping_add(8))?));
            let is_last = number + 1 == segment.descriptors;
            let led_to = walk.take(raw, is_last, !segment.is_last)?;
            // Only a last segment ends with data.
            check(!is_last || segment.is_last || led_to.is_some(), Status::INVALID_SGL_SEGMENT)?;
            next = led_to;
        }
    }
    check(walk.described == bytes, Status::SGL_LENGTH_INVALID)?;
    Ok(walk.extents)
}

/// A descriptor's fields, as they are.
struct Raw {
    address: u64,
    length: u32,
    reserved: u32,
    subtype: u8,
    kind: u8,
}

impl Raw {
    fn new((low, high): (u64, u64)) -> Raw {
        let identifier = (high >> 56) as u8;
        Raw {
            address: low,
            length: high as u32,
            reserved: (high >> 32) as u32 & 0xff_ffff,
            subtype: identifier & 0xf,
            kind: identifier >> 4,
        }
    }
}

/// A segment that is still to be read.
struct NextSegment {
    address: u64,
    descriptors: u32,
    is_last: bool,
}

struct Walk {
    extents: Vec<Extent>,
    described: u64,
    bytes: u64,
    setting: SglSetting,
}

impl Walk {
    /// Takes a descriptor; gives the segment that it leads to. `ends_segment` says that it is its
    /// segment's last one, `may_lead` that this segment is not the last.
    fn take(&mut self, raw: Raw, ends_segment: bool, may_lead: bool) -> Result<Option<NextSegment>, Status> {
        check(raw.subtype == 0 && matches!(raw.kind, 0 | 2 | 3), Status::SGL_TYPE_INVALID)?;
        check(raw.reserved == 0, Status::INVALID_FIELD)?;
        if raw.kind == 0 {
            self.data(raw.address, raw.length)?;
            return Ok(None);
        }
        check(may_lead, Status::INVALID_SGL_SEGMENT)?;
        check(ends_segment, Status::INVALID_SGL_COUNT)?;
        let is_whole = raw.length > 0 && raw.length.is_multiple_of(16) && raw.address.is_multiple_of(8);
        check(is_whole, Status::INVALID_SGL_SEGMENT)?;
        let (descriptors, is_last) = (raw.length / 16, raw.kind == 3);
        Ok(Some(NextSegment { address: raw.address, descriptors, is_last }))
    }

    fn data(&mut self, address: u64, length: u32) -> Result<(), Status> {
        if self.setting == SglSetting::MultiplesOf4 {
            check(address.is_multiple_of(4) && length.is_multiple_of(4), Status::SGL_GRANULARITY_INVALID)?;
        }
        self.described += u64::from(length);
        check(self.described <= self.bytes, Status::SGL_LENGTH_INVALID)?;
        // A block without bytes may have any address.
        self.extents.extend((length > 0).then_some(Extent { address, bytes: length.into() }));
        Ok(())
    }
}

pub fn check(is_right: bool, otherwise: Status) -> Result<(), Status> {
    if is_right { Ok(()) } else { Err(otherwise) }
}

fn read_u64(memory: &impl HostMemory, at: u64) -> Result<u64, Status> {
    let mut bytes = [0; 8];
    memory.read(at, &mut bytes).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
    Ok(u64::from_le_bytes(bytes))
}
