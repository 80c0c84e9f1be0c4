//! The controller's capabilities register, and where its doorbells are. It knows two offsets of the
//! register file; who reads and writes registers is the caller.

/// Where doorbells begin in the register file.
const FIRST_DOORBELL: u64 = 0x1000;

/// What CAP, the 64-bit register at offset 0, says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The most entries of an I/O queue, at least 1 by its encoding; a usable drive says 2 or more.
    pub max_queue_entries: u32,
    /// Bytes between doorbells.
    pub doorbell_stride: u64,
    /// The smallest and the largest page of memory that the host may choose. MDTS counts in the
    /// smallest.
    pub min_page_bytes: u64,
    pub max_page_bytes: u64,
    /// How long the controller may take to become ready, or to stop.
    pub timeout_ms: u32,
}

impl Capabilities {
    pub fn decode(register: u64) -> Capabilities {
        Capabilities {
            max_queue_entries: (register & 0xffff) as u32 + 1,
            doorbell_stride: 4 << (register >> 32 & 0xf),
            min_page_bytes: 4096 << (register >> 48 & 0xf),
            max_page_bytes: 4096 << (register >> 52 & 0xf),
            timeout_ms: (register >> 24 & 0xff) as u32 * 500,
        }
    }

    /// The offset of the doorbell for a submission queue's tail.
    pub fn tail_doorbell(&self, queue: u16) -> u64 {
        FIRST_DOORBELL + 2 * u64::from(queue) * self.doorbell_stride
    }

    /// The offset of the doorbell for a completion queue's head.
    pub fn head_doorbell(&self, queue: u16) -> u64 {
        FIRST_DOORBELL + (2 * u64::from(queue) + 1) * self.doorbell_stride
    }
}
