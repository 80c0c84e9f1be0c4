//! Memory as a drive sees it: pieces of data, and the pages that lists of such pieces are written
//! to. Addresses are those that the device uses; nothing here knows who maps them.

/// Contiguous memory that takes part in a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The device's address.
    pub address: u64,
    pub bytes: u64,
}

impl Segment {
    /// Where it ends, if that is an address at all.
    pub fn end(self) -> Option<u64> {
        self.address.checked_add(self.bytes)
    }
}

/// Memory for PRP entries or SGL descriptors: the device's address, and the same bytes for us. The
/// device must not read them until the command is in its queue.
#[derive(Debug)]
pub struct ListPage<'a> {
    pub address: u64,
    pub bytes: &'a mut [u8],
}
