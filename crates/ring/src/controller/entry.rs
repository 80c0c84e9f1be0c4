//! A submission queue entry as the controller reads it: 64 bytes from the host, which may be
//! anything.

use super::status::Status;

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 64;

/// The parts of dword 0 that no command here uses: the fuse, and reserved bits 13:10.
const UNUSED_FLAGS: u32 = 0x3f << 8;

#[derive(Debug, Clone, Copy)]
pub struct Entry(pub [u8; ENTRY_BYTES]);

impl Entry {
    pub fn dword(&self, number: usize) -> u32 {
        let at = number * 4;
        u32::from_le_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    /// Two dwords, the lower one first.
    pub fn pair(&self, number: usize) -> u64 {
        u64::from(self.dword(number)) | u64::from(self.dword(number + 1)) << 32
    }

    pub fn opcode(&self) -> u8 {
        self.0[0]
    }

    pub fn cid(&self) -> u16 {
        (self.dword(0) >> 16) as u16
    }

    pub fn namespace(&self) -> u32 {
        self.dword(1)
    }

    /// PRP or SGL for data transfer, as the two bits are.
    pub fn psdt(&self) -> u32 {
        self.dword(0) >> 14 & 3
    }

    /// Refuses what is set outside of these dwords; dword 0 always counts as used.
    pub fn only_uses(&self, dwords: &[usize]) -> Result<(), Status> {
        let is_clear = |number: &usize| dwords.contains(number) || self.dword(*number) == 0;
        match self.dword(0) & UNUSED_FLAGS == 0 && (1..ENTRY_BYTES / 4).all(|number| is_clear(&number)) {
            true => Ok(()),
            false => Err(Status::INVALID_FIELD),
        }
    }
}
