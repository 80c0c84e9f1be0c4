//! How many bytes may be relocated: a share of what is stored pays for it.

/// What may be relocated.
#[derive(Debug)]
pub(super) struct RelocationBudget {
    percent: u32,
    allowed_bytes: u64,
    pub chunks: u64,
    pub bytes: u64,
}

impl RelocationBudget {
    pub fn new(percent: u32) -> RelocationBudget {
        RelocationBudget { percent, allowed_bytes: 0, chunks: 0, bytes: 0 }
    }

    /// Bytes were stored, which pays for a share of them to be relocated.
    pub fn allow(&mut self, stored_bytes: u64) {
        let share = u128::from(stored_bytes) * u128::from(self.percent) / 100;
        self.allowed_bytes = self.allowed_bytes.saturating_add(u64::try_from(share).unwrap_or(u64::MAX));
    }

    pub fn has_room(&self, bytes: u64) -> bool {
        self.allowed_bytes >= bytes
    }

    pub fn spend(&mut self, bytes: u64) {
        self.allowed_bytes = self.allowed_bytes.saturating_sub(bytes);
        self.chunks += 1;
        self.bytes += bytes;
    }
}
