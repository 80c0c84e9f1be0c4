//! The completion queue entry: 16 bytes that the drive writes, and the order in which they may be
//! read. Any bytes can be decoded; whether they make sense is the queue's to judge.

/// Bytes of a completion queue entry.
pub const ENTRY_BYTES: usize = 16;

/// A completion queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Dword 0, whose meaning depends on the command.
    pub result: u32,
    /// How far the drive has read the submission queue.
    pub sq_head: u16,
    pub sq_id: u16,
    pub cid: u16,
    pub phase: bool,
    pub status: Status,
}

/// How a command ended, as the drive tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Status Code Type, 0 to 7: generic, specific to the command, media, path, ..., vendor.
    pub code_type: u8,
    pub code: u8,
    /// Which of the drive's delays to wait for before the command is sent again, 0 to 3.
    pub retry_delay: u8,
    /// There is more in the drive's error log.
    pub more: bool,
    pub do_not_retry: bool,
}

impl Status {
    /// The fifteen bits above the phase.
    fn from_bits(bits: u16) -> Status {
        Status {
            code: bits as u8,
            code_type: (bits >> 8 & 7) as u8,
            retry_delay: (bits >> 11 & 3) as u8,
            more: bits >> 13 & 1 == 1,
            do_not_retry: bits >> 14 & 1 == 1,
        }
    }

    pub fn is_success(self) -> bool {
        self.code_type == 0 && self.code == 0
    }
}

impl Completion {
    /// Reads an entry word by word if its phase is `phase`, and otherwise leaves it alone.
    ///
    /// The drive writes word 3, with phase and identifier, last. So word 3 is read first, and once:
    /// words read before it may still be those of the entry that stood there a round ago. `load`
    /// must load word 3 with acquire ordering.
    pub fn read(phase: bool, mut load: impl FnMut(usize) -> u32) -> Option<Completion> {
        let last = load(3);
        if (last >> 16 & 1 == 1) != phase {
            return None;
        }
        Some(Completion::from_words([load(0), load(1), load(2), last]))
    }

    /// The entry in these bytes, whatever they are.
    pub fn decode(bytes: &[u8; ENTRY_BYTES]) -> Completion {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Completion::from_words([word(0), word(4), word(8), word(12)])
    }

    fn from_words([result, _reserved, queue, last]: [u32; 4]) -> Completion {
        Completion {
            result,
            sq_head: queue as u16,
            sq_id: (queue >> 16) as u16,
            cid: last as u16,
            phase: last >> 16 & 1 == 1,
            status: Status::from_bits((last >> 17) as u16),
        }
    }
}
