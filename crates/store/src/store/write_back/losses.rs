//! What write-back lost, for the log: counted, and told at most once a minute. Sans-IO: time is an
//! argument. It knows reasons and numbers; it must never know which chunks they were.

use std::fmt;

/// The first loss waits so long for others, so that a line says how many there are.
const GATHER_US: u64 = 1_000_000;
/// Time between two lines.
const EVERY_US: u64 = 60_000_000;

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

/// Losses that no line has told yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Untold {
    gone: u64,
    too_old: u64,
    queue_full: u64,
    refused: u64,
    failed: u64,
}

/// Counts losses, and says when a line is due.
#[derive(Debug, Default)]
pub struct Losses {
    untold: Untold,
    due_us: Option<u64>,
    told_us: Option<u64>,
}

impl Losses {
    /// A chunk was lost.
    pub fn add(&mut self, now_us: u64, loss: Loss) {
        let untold = &mut self.untold;
        *match loss {
            Loss::Gone => &mut untold.gone,
            Loss::TooOld => &mut untold.too_old,
            Loss::QueueFull => &mut untold.queue_full,
            Loss::Refused => &mut untold.refused,
            Loss::Failed => &mut untold.failed,
        } += 1;
        let earliest_us = self.told_us.map_or(0, |told_us| told_us.saturating_add(EVERY_US));
        self.due_us.get_or_insert(now_us.saturating_add(GATHER_US).max(earliest_us));
    }

    /// When a line is due, if anything is untold.
    pub fn due_us(&self) -> Option<u64> {
        self.due_us
    }

    /// What a line is to tell now, if it is due.
    pub fn take_due(&mut self, now_us: u64) -> Option<Untold> {
        self.due_us.filter(|due_us| *due_us <= now_us)?;
        self.told_us = Some(now_us);
        self.take()
    }

    /// All that is untold, due or not.
    pub fn take(&mut self) -> Option<Untold> {
        self.due_us.take()?;
        Some(std::mem::take(&mut self.untold))
    }
}

impl Untold {
    /// How many chunks these are.
    pub fn chunks(&self) -> u64 {
        self.gone + self.too_old + self.queue_full + self.refused + self.failed
    }
}

impl fmt::Display for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Untold { gone, too_old, queue_full, refused, failed } = self;
        let reasons = [
            (gone, "left memory before their turn came"),
            (too_old, "waited for too long"),
            (queue_full, "found the queue full"),
            (refused, "were refused by the SSD tier"),
            (failed, "could not be written"),
        ];
        let mut separator = "";
        for (count, reason) in reasons.into_iter().filter(|(count, _)| **count > 0) {
            write!(f, "{separator}{count} {reason}")?;
            separator = ", ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_told_at_most_once_a_minute_and_none_is_left_out() {
        let mut losses = Losses::default();
        assert_eq!(losses.due_us(), None);
        let (mut told, mut lines) = (0, Vec::new());
        // Ten losses a second, for five minutes and a half.
        for tenth in 0..3_300 {
            let now_us = tenth * 100_000;
            losses.add(now_us, [Loss::Gone, Loss::Failed][tenth as usize % 2]);
            if let Some(untold) = losses.take_due(now_us) {
                told += untold.chunks();
                lines.push(now_us);
            }
        }
        assert!(lines.windows(2).all(|pair| pair[1] - pair[0] >= EVERY_US), "{lines:?}");
        assert_eq!(lines.len(), 6);
        assert_eq!(told + losses.take().unwrap().chunks(), 3_300);
        assert_eq!((losses.take(), losses.due_us()), (None, None), "told once");
    }

    #[test]
    fn a_line_says_how_many_chunks_were_lost_for_which_reason() {
        let mut losses = Losses::default();
        for loss in [Loss::Gone, Loss::Gone, Loss::TooOld] {
            losses.add(0, loss);
        }
        assert_eq!(losses.take_due(GATHER_US - 1), None, "others may come");
        let untold = losses.take_due(GATHER_US).unwrap();
        assert_eq!(untold.chunks(), 3);
        assert_eq!(untold.to_string(), "2 left memory before their turn came, 1 waited for too long");
    }
}
