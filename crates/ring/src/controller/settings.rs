//! What the controller offers: its namespace, its limits, and how it takes scatter gather lists. It
//! is fixed when the controller is made.

/// How scatter gather lists are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglSetting {
    Refused,
    AnyAlignment,
    MultiplesOf4,
}

/// A controller's fixed properties.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The page of memory, both the smallest and the one that is used.
    pub page_bytes: u64,
    /// Transfers have at most 2^mdts pages; 0 for no limit.
    pub mdts: u8,
    pub sgl: SglSetting,
    pub max_queue_entries: u32,
    /// Queues for I/O, of each kind.
    pub max_queues: u16,
    /// Doorbells are 4 << this apart.
    pub doorbell_stride_log2: u8,
    pub block_bytes_log2: u8,
    pub blocks: u64,
}

impl Settings {
    pub fn max_transfer_bytes(&self) -> u64 {
        if self.mdts == 0 { u64::MAX } else { self.page_bytes << self.mdts }
    }
}

impl Default for Settings {
    /// 16 MiB in blocks of 512 bytes, transfers up to 512 KiB, four queues of up to 1,024 entries.
    fn default() -> Settings {
        Settings {
            page_bytes: 4096,
            mdts: 7,
            sgl: SglSetting::AnyAlignment,
            max_queue_entries: 1024,
            max_queues: 4,
            doorbell_stride_log2: 0,
            block_bytes_log2: 9,
            blocks: 1 << 15,
        }
    }
}
