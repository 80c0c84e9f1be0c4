//! Chunks that write-back lost since the last log line, by reason.

/// Why a chunk that was to be written to the disk is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Memory evicted it, or somebody deleted it, before its turn came.
    Gone,
    /// It waited for too long.
    TooOld,
    /// Too many waited already.
    QueueFull,
    /// The disk tier did not take it.
    Refused,
    /// The write failed.
    Failed,
}

/// How many chunks were lost for which reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Losses {
    gone: u64,
    too_old: u64,
    queue_full: u64,
    refused: u64,
    failed: u64,
}

impl Losses {
    pub fn add(&mut self, loss: Loss) {
        *match loss {
            Loss::Gone => &mut self.gone,
            Loss::TooOld => &mut self.too_old,
            Loss::QueueFull => &mut self.queue_full,
            Loss::Refused => &mut self.refused,
            Loss::Failed => &mut self.failed,
        } += 1;
    }

    pub fn chunks(&self) -> u64 {
        self.gone + self.too_old + self.queue_full + self.refused + self.failed
    }

    /// Says in the log what was lost.
    pub fn tell(&self) {
        let Losses { gone, too_old, queue_full, refused, failed } = *self;
        let chunks = self.chunks();
        tracing::warn!(chunks, gone, too_old, queue_full, refused, failed, "chunks were not written to SSD");
    }
}
